"""Vendors' published figures that the ledger judges timings and hardware tables by, each with its source."""

from dataclasses import dataclass

A100_DATASHEET = "NVIDIA A100 80GB SXM datasheet (dense rates; the sparse ones are twice as high)"
A100_WHITEPAPER = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, 2020, table 4 and the L2 cache"
H100_DATASHEET = "NVIDIA H100 SXM5 datasheet (1,979 TFLOP/s FP16 is with sparsity; dense is half)"
H100_WHITEPAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, 2022"
H200_DATASHEET = "NVIDIA H200 SXM datasheet"
CUDA_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"
AMPERE_TUNING = "NVIDIA Ampere GPU Architecture Tuning Guide, shared memory"
BEST_PRACTICES = "CUDA C++ Best Practices Guide, coalesced access to global memory"
FA1 = "Dao et al., FlashAttention, arXiv:2205.14135"
FA2 = "Dao, FlashAttention-2, arXiv:2307.08691"
FA3 = "Shah et al., FlashAttention-3, arXiv:2407.08608"


@dataclass(frozen=True)
class Device:
    """One GPU: dense tensor-core rates in TFLOP/s, memory in GB/s and GB, SRAM in KiB, L2 in MiB, clock in GHz.

    `shared_kib` is what all blocks of an SM may use together; one block may use 1 KiB less.
    """

    name: str
    fp16: float
    fp8: float | None
    gb_per_s: float
    gb: float
    sms: int
    l1_kib: int
    shared_kib: int
    l2_mib: int
    boost_ghz: float
    bus_bits: int
    source: str

    @property
    def ridge(self) -> float:
        """FLOP per byte at which FP16 arithmetic and HBM traffic take equally long."""
        return self.fp16 * 1e3 / self.gb_per_s

    @property
    def shared_tb_per_s(self) -> float:
        """Shared-memory bandwidth of all SMs, TB/s: 128 bytes a clock and SM."""
        return self.sms * 128 * self.boost_ghz / 1e3

    @property
    def l1_mib(self) -> float:
        """L1 and shared memory of all SMs together, MiB."""
        return self.sms * self.l1_kib / 1024


A100 = Device("A100 80GB SXM", 312, None, 2039, 80, 108, 192, 164, 40, 1.41, 5120, A100_DATASHEET)
H100 = Device("H100 SXM5", 989.4, 1978.9, 3350, 80, 132, 256, 228, 50, 1.83, 5120, H100_DATASHEET)
H200 = Device("H200 SXM", 989.4, 1978.9, 4800, 141, 132, 256, 228, 50, 1.83, 6144, H200_DATASHEET)
