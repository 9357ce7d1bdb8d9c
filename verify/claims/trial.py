"""Standard inputs for the listings of the texts, and the judges that hold a transcription against fp64."""

from dataclasses import dataclass

import numpy as np

from refimpl import oracle

# Listings are judged in fp64, so that a correct one differs from the oracle by rounding of order 1e-15 only.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Trial:
    """One input: arrays (B, H, N, d) in fp64 and the tile sizes that the listing is called with."""

    Q: np.ndarray
    K: np.ndarray
    V: np.ndarray
    dO: np.ndarray
    Br: int
    Bc: int
    causal: bool = False


def make(seed, B=1, H=1, Nq=32, Nk=None, d=8, Br=16, Bc=16, gain=1.0, causal=False):
    """Gaussian inputs; `gain` multiplies Q, so that large values give peaked rows."""
    rng = np.random.default_rng(seed)
    Nk = Nq if Nk is None else Nk
    Q, dO = rng.standard_normal((2, B, H, Nq, d))
    K, V = rng.standard_normal((2, B, H, Nk, d))
    return Trial(gain * Q, K, V, dO, Br, Bc, causal)


TRIALS = {
    "one tile": make(1, Nq=16),
    "several key tiles": make(2, Nq=64),
    "Br < Bc": make(3, Nq=96, Br=16, Bc=32),
    "Br > Bc": make(4, Nq=96, Br=32, Bc=16),
    "several heads": make(5, B=2, H=3, Nq=48),
    "peaked scores": make(6, Nq=64, gain=40.0),
    "ragged keys": make(7, Nq=48, Nk=53),
    "ragged queries": make(8, Nq=53, Nk=48),
    "ragged both, Br != Bc": make(9, H=2, Nq=53, Br=16, Bc=24),
}
CAUSAL = {
    "one tile": make(11, Nq=16, causal=True),
    "several key tiles": make(12, Nq=64, causal=True),
    "Br < Bc": make(13, Nq=96, Br=16, Bc=32, causal=True),
    "Br > Bc": make(14, Nq=96, Br=32, Bc=16, causal=True),
    "several heads": make(15, B=2, H=3, Nq=48, causal=True),
    "peaked scores": make(16, Nq=64, gain=40.0, causal=True),
    "ragged both, Br != Bc": make(17, H=2, Nq=53, Br=16, Bc=24, causal=True),
}


def everywhere(trials=TRIALS) -> dict[str, bool]:
    """What a reader of a listing may expect: right on every input. `stated` of most listing entries."""
    return dict.fromkeys(trials, True)


def per_head(function, n_out):
    """Turn a listing for single-head (N, d) arrays into one for (B, H, N, d), by looping outside."""

    def batched(*arrays, **options):
        B, H = arrays[0].shape[:2]
        parts = [[function(*(a[b, h] for a in arrays), **options) for h in range(H)] for b in range(B)]
        if n_out == 1:
            return np.array(parts)
        return tuple(np.array([[part[k] for part in row] for row in parts]) for k in range(n_out))

    return batched


def _error(got, want) -> float:
    if np.shape(got) != want.shape:
        return float("inf")
    return float(np.max(np.abs(got - want))) if want.size else 0.0


def _judge(call, wanted, trials, tol):
    """Run on every trial; a result is right when all its errors are at most `tol` (NaN is not)."""
    verdicts, told = {}, []
    for name, trial in trials.items():
        wants = wanted(trial)
        try:
            with np.errstate(all="ignore"):
                gots = call(trial)
        except (ValueError, NameError, IndexError, TypeError) as error:
            verdicts[name] = False
            told.append(f"{name}: {type(error).__name__}")
            continue
        errors = [_error(got, want) for got, want in zip(gots, wants, strict=True)]
        verdicts[name] = all(error <= tol for error in errors)
        worst = max(errors, key=lambda e: (np.isnan(e), e))
        told.append(f"{name}: max error {worst:.1e}")
    return verdicts, "; ".join(told)


def judge_forward(function, trials=TRIALS, tol=TOLERANCE):
    """Hold `function(Q, K, V, Br, Bc)` on (B, H, N, d) against the oracle.

    Returns
    -------
    (dict[str, bool], str)
        Right or not per trial, and a line with the largest error of each.
    """
    return _judge(
        lambda t: (function(t.Q, t.K, t.V, t.Br, t.Bc),),
        lambda t: oracle.attention(t.Q, t.K, t.V, causal=t.causal)[:1],
        trials,
        tol,
    )


def judge_backward(function, trials=TRIALS, tol=TOLERANCE):
    """The same for `function(Q, K, V, dO, Br, Bc) -> (dQ, dK, dV)`."""
    return _judge(
        lambda t: function(t.Q, t.K, t.V, t.dO, t.Br, t.Bc),
        lambda t: oracle.attention_backward(t.Q, t.K, t.V, t.dO, causal=t.causal)[:3],
        trials,
        tol,
    )
