"""Everything of a bench but the GPU: contenders of known speed on a simulated device, and a bench around them."""

from functools import cache
from types import SimpleNamespace

from verify.bench import check as bench_check
from verify.bench import machine
from verify.bench import points as bench_points
from verify.bench.limits import Ceiling
from verify.bench.record import Bench
from verify.bench.simulated import Device
from verify.timing import Clock, Contender

# Operations a millisecond, as an H200 reaches them; and what they are divided by, for small points to take long enough.
RATES = {"step5_tensor_core": 300e9, "step6_flash_v3": 600e9, "sdpa_flash": 310e9, "sdpa_cudnn": 590e9}
SLOW = 1e3
REAL_INPUTS, REAL_TRUTH = bench_points.Inputs, bench_check.Truth


@cache
def _truth(point):
    return REAL_TRUTH(point, REAL_INPUTS(upload=lambda host, kept: host).host(point))


def truth_of(point, arrays):
    """`bench_check.Truth`, computed once a point: inputs are the same every time."""
    return _truth(point)


def contenders(device, rates=RATES, slow=SLOW, wrong=(), broken=()):
    """A stand-in for `bench_points.contenders`: names with rates are there, others are not.

    Parameters
    ----------
    device : bench_simulated.Device
    rates : dict of str to float
        Operations a millisecond.
    slow : float
        What rates are divided by.
    wrong, broken : tuple of str
        Names that compute nonsense, or raise.
    """

    def found(point, kernels, others, arrays):
        truth = truth_of(point, arrays)

        def make(name):
            ms = slow * point.work.flops / rates[name]
            work = device.work(name, ms, 0.9 * ms)

            def launch():
                if name in broken:
                    raise RuntimeError(f"{name}: an illegal address\nand a traceback")
                work()

            offset = {key: 1.0 if name in wrong else error for key, error in truth.rmse_plain.items()}

            def outputs():
                return {key: x + offset[key] for key, x in truth.exact.items()}

            ours = {"fingerprint": f"of {name}", "tile": [64, 32]}
            facts = ours if name in kernels else {"version": "1.0"}
            return Contender(name, launch, outputs=outputs, facts=facts)

        there = [name for name in (*kernels, *others) if name in rates]
        return [make(name) for name in there], {n: "not here" for n in (*kernels, *others) if n not in rates}

    return found


def bench(monkeypatch, kernels, others, device=None, name="NVIDIA H200", **how):
    """A `Bench` on a simulated H200, with the driver's answers made up.

    Parameters
    ----------
    device : bench_simulated.Device, optional
    name : str
        What the driver calls it.
    how : dict
        `rates`, `slow`, `wrong`, `broken` for the contenders; the rest for `Bench`.
    """
    device = device or Device(seed=1, scatter=0.01)
    who = {key: how.pop(key) for key in ("rates", "slow", "wrong", "broken") if key in how}
    monkeypatch.setattr(machine, "measured", lambda clock: Ceiling(700.0, 4200.0, 0, "made up"))
    monkeypatch.setattr(machine, "state", lambda: {"sm_mhz": 1755.0, "max_sm_mhz": 1980.0})
    monkeypatch.setattr(bench_points, "contenders", contenders(device, **who))
    monkeypatch.setattr(bench_check, "Truth", truth_of)
    monkeypatch.setattr("verify.executors.device_name", lambda kind: name)
    inputs = bench_points.Inputs(upload=lambda host, kept: host)
    # dO is wanted on the host whatever the direction: the stand-in's truth is made from these arrays.
    inputs.device = inputs.host
    return Bench(Clock(device), kernels, others, inputs=inputs, **how)


def gpu_with(monkeypatch, device):
    """`timing.Clock()` as the command makes it, on a simulated device."""
    monkeypatch.setattr("verify.timing.Device", lambda: device)
    monkeypatch.setattr("verify.timing.missing", lambda: None)
    return SimpleNamespace(device=device)
