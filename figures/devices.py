"""What three GPUs can do, as their maker publishes it: the ceilings of every roofline here."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Device:
    """Published peaks of one GPU; rates are decimal, and for dense operands.

    Attributes
    ----------
    name : str
    hbm_gb_per_s : float
        Memory bandwidth in 1e9 bytes a second.
    fp32_tflops, fp16_tflops : float
        fp32 outside tensor cores; fp16 or bf16 with fp32 sums inside them. In 1e12 operations a second.
    smem_kib : int
        Shared memory that one block may use, in KiB.
    sms : int
        Streaming multiprocessors.
    source : str
    """

    name: str
    hbm_gb_per_s: float
    fp32_tflops: float
    fp16_tflops: float
    smem_kib: int
    sms: int
    source: str

    def ridge(self, tflops: float) -> float:
        """Intensity in FLOP a byte from which this rate, and no longer the memory, is the limit."""
        return tflops * 1e12 / (self.hbm_gb_per_s * 1e9)

    def roof(self, intensity, tflops: float):
        """The most that this intensity allows, in TFLOP/s: memory or arithmetic, whichever is less."""
        return np.minimum(np.asarray(intensity) * self.hbm_gb_per_s / 1e3, tflops)


# Shared memory a block: CUDA C++ Programming Guide, "Compute capabilities" (8.0: 163 KB, 9.0: 227 KB).
# Multiprocessors: NVIDIA A100 and H100 architecture white papers; the H200 has the H100's chip.
# The H100 and H200 sheets state 1,979 TFLOP/s for fp16 "with sparsity"; dense operands reach half of it.
A100 = Device(
    "A100", 2039, 19.5, 312, 163, 108, "NVIDIA A100 Tensor Core GPU datasheet, column A100 80GB SXM"
)
H100 = Device("H100", 3350, 67, 1979 / 2, 227, 132, "NVIDIA H100 Tensor Core GPU datasheet, column H100 SXM")
H200 = Device("H200", 4800, 67, 1979 / 2, 227, 132, "NVIDIA H200 Tensor Core GPU datasheet, column H200 SXM")
DEVICES = (A100, H100, H200)
