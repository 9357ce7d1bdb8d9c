"""Kernels that are not ours: where they are, what they take, how they are called and run."""
