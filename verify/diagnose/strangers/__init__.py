"""Kernels written without a look at ours, in the ways that strangers write them: what a diagnosis is tested on."""
