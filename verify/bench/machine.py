"""The state of the machine while something is timed (clocks, power, temperature), and the ceilings it reaches."""

import os
import subprocess
from contextlib import suppress
from importlib import import_module

import numpy as np

from verify.bench import peers
from verify.bench.limits import Ceiling

# What is asked of the driver, under nvidia-smi's names and ours.
QUERY = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
    "clocks_throttle_reasons.active": "throttle",
}
PRODUCT = 8192  # side of the square matrices: large enough that launch and tail do not show
SPELLED = {"gpu_idle": 0x1, "application_clocks": 0x2, "power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10,
           "sw_thermal": 0x20, "hw_thermal": 0x40, "hw_power_brake": 0x80, "display_clocks": 0x100}  # fmt: skip


def state() -> dict:
    """Clocks in MHz, power in W, temperature in degrees Celsius and what holds the clock down, now.

    Returns
    -------
    dict
        Empty where neither NVML's Python package nor nvidia-smi answers; None for what the driver does not tell.
    """
    found = {}
    with suppress(ImportError):
        found = _by_nvml(import_module("pynvml"))
    # Drivers rename the last field now and then, and then refuse all of them.
    return found or _by_smi(QUERY) or _by_smi({name: ours for name, ours in QUERY.items() if ours != "throttle"})


def _by_nvml(nvml) -> dict:
    """Through NVML: a few microseconds, so that it can be asked between two rounds."""

    def ask(name, *args, scale=1.0):
        with suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, name)(gpu, *args) * scale
        return None

    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByIndex(_index())
    except nvml.NVMLError:
        return {}
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return {
        "sm_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "memory_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "max_sm_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "power_w": ask("nvmlDeviceGetPowerUsage", scale=1e-3),
        "power_limit_w": ask("nvmlDeviceGetPowerManagementLimit", scale=1e-3),
        "temperature_c": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "throttle": None if reasons is None else throttle(int(reasons)),
    }


def _by_smi(query) -> dict:
    """Through the program that comes with every driver; empty if it does not know a field."""
    ask = ["nvidia-smi", f"--id={_index()}", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse(done.stdout, query)


def parse(line: str, query=QUERY) -> dict:
    """A line of nvidia-smi's table as numbers; None where it says "[N/A]" or the like."""
    fields = [field.strip() for field in line.strip().split(",")]
    if len(fields) != len(query):
        return {}
    found = {}
    for name, field in zip(query.values(), fields, strict=True):
        try:
            found[name] = throttle(int(field, 16)) if name == "throttle" else float(field)
        except ValueError:
            found[name] = None
    return found


def throttle(bits: int) -> list[str]:
    """Names of what holds the clock down."""
    return [name for name, bit in SPELLED.items() if bits & bit]


def _index() -> int:
    """The first GPU that this process sees, in the driver's numbering."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return int(first) if first.isdigit() else 0


def measured(clock, dtype="fp16") -> Ceiling:
    """The ceilings that this device reaches with a plain copy and, if torch is there, a plain product.

    Parameters
    ----------
    clock : verify.timing.Clock
    dtype : "fp16" or "bf16"
        Of the product's operands; fp32 sums.
    """
    copy = clock.device.copy_gb_per_s(clock)
    reason = peers.absent("sdpa_math")
    if reason:
        return Ceiling(None, copy, 0, f"a plain copy measured in this run; no plain product: {reason}")
    import torch

    kind = getattr(torch, peers.TORCH_DTYPES[dtype])
    A, B = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=kind) for _ in range(2))
    out = torch.empty_like(A)
    times = [clock.cold(lambda: torch.matmul(A, B, out=out)) for _ in range(15)][5:]
    words = f"a plain copy and a plain {dtype} product of {PRODUCT}³ by torch {torch.__version__}, in this run"
    return Ceiling(2 * PRODUCT**3 / float(np.median(times)) / 1e9, copy, 0, words)
