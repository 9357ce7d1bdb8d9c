"""FlashAttention in NumPy: what the answer is, tile by tile, in the letters of the papers.

Read `step0_standard` to `step6_flash_v3` in that order, each beside the one before it: `diff` is the lesson.
Masks, biases and the other options are rules (`rule`, `options`), `backward` and `varlen` branch off, and
`oracle` is the untiled fp64 truth that all of them, and the GPU kernels, are judged by.
"""
