"""Timing kernels and peers in turns, what is kept of it, and the bars it is held to."""
