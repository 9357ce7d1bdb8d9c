"""Random combinations of options, shapes, types and strides, judged against the oracle; drawn alike everywhere."""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from flash_cuda import backward, general
from refimpl import oracle
from refimpl.philox import Dropout
from verify.case import Problem
from verify.judge import explain, measure, reference

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
# Absolute, times max(1, largest true value): a few roundings of the storage type; fp32 sums for fp32.
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}


@dataclass
class Combination:
    """One call: arrays as the kernel gets them, our options, and the same options in the oracle's words."""

    seed: int
    dtype: str
    arrays: dict
    options: dict
    truth: dict = field(repr=False)

    def __str__(self):
        shapes = {name: x.shape for name, x in self.arrays.items()}
        told = {k: v if np.isscalar(v) or isinstance(v, tuple) else np.shape(v) for k, v in self.options.items()}
        return f"seed {self.seed} {self.dtype} {shapes} {told}"


def draw(seed, longest=20, dims=(1, 16), dtypes=tuple(DTYPES)):
    """The combination of a seed; each option is there with probability 0.4."""
    rng = np.random.default_rng([seed, 18])
    B, Hk, group = rng.integers(1, 3), rng.integers(1, 3), rng.integers(1, 3)
    Nq, Nk = rng.integers(1, longest + 1, 2)
    d, dv = rng.integers(dims[0], dims[1] + 1, 2)
    Hq = Hk * group
    dtype = str(rng.choice(dtypes))

    def array(H, N, width):
        x = rng.standard_normal((B, H, N, width)).astype(DTYPES[dtype])
        kind = rng.integers(4)
        if kind == 1:  # a transposed (B, N, H, d) buffer
            return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        if kind == 2:  # every second row, backwards
            return np.repeat(x[:, :, ::-1], 2, axis=2)[:, :, ::-2]
        if kind == 3 and H > 1:  # one head for all
            return np.broadcast_to(x[:, :1], x.shape)
        return x

    arrays = {"Q": array(Hq, Nq, d), "K": array(Hk, Nk, d), "V": array(Hk, Nk, dv), "dO": array(Hq, Nq, dv)}
    chance = iter(rng.random(20) < 0.4)
    options = {}
    if next(chance):
        options["scale"] = float(rng.normal())
    if next(chance):
        options |= {"causal": True, "align": str(rng.choice(["bottom_right", "top_left"]))}
    if next(chance):
        options["mask"] = rng.random([n if rng.random() < 0.7 else 1 for n in (B, Hq, Nq, Nk)]) < 0.7
    if next(chance):
        bias = rng.standard_normal([n if rng.random() < 0.7 else 1 for n in (B, Hq, Nq, Nk)])
        options["bias"] = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias).astype(np.float32)
    if next(chance):
        options["window"] = tuple(None if rng.random() < 0.3 else int(n) for n in rng.integers(0, longest, 2))
    if next(chance):
        options["softcap"] = float(rng.uniform(0.5, 5))
    if next(chance):
        options["alibi_slopes"] = rng.random((B, Hq) if rng.random() < 0.5 else Hq).astype(np.float32)
    if next(chance):
        options |= {"lengths_q": rng.integers(0, Nq + 1, B), "lengths_k": rng.integers(0, Nk + 1, B)}
    truth = dict(options)
    if next(chance):
        drop = Dropout(float(rng.choice([0.1, 0.5, 1.0])), int(rng.integers(2**62)), int(rng.integers(9)))
        options["dropout"] = drop
        kept = [[drop.mask(b, h, slice(0, int(Nq)), slice(0, int(Nk))) for h in range(Hq)] for b in range(B)]
        truth |= {"keep": np.array(kept).reshape(B, Hq, Nq, Nk), "dropout_p": drop.p}
    return Combination(seed, dtype, arrays, options, truth)


def judge(made, **on):
    """None if every output is right, else what is wrong; forward, backward, and the gradient of the bias.

    Odd seeds take the backward pass with atomic additions.
    """
    Q, K, V, dO = made.arrays.values()
    way = {"deterministic": made.seed % 2 == 0}
    O, lse = general.attention(Q, K, V, **made.options, **on_of(on))
    *gradients, dbias = backward.attention_backward(Q, K, V, O, lse, dO, **made.options, **way, **on_of(on))
    exact = [x.astype(np.float64) for x in made.arrays.values()]
    want = [*oracle.attention(*exact[:3], **made.truth), *oracle.attention_backward(*exact, **made.truth)]
    for name, got, true in zip(("O", "lse", "dQ", "dK", "dV", "dbias"), (O, lse, *gradients, dbias), want, strict=True):
        if got is None and true is None:
            continue
        if told := wrong(made, name, got, true, through_D(name, made, want[0], true)):
            return told
    return None


def judge_forward(made, attention, **on):
    """None if O and lse of another forward pass are right, else what is wrong."""
    Q, K, V, _ = made.arrays.values()
    found = attention(Q, K, V, **made.options, **on_of(on))
    want = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)), **made.truth)
    said = (wrong(made, name, got, true) for name, got, true in zip(("O", "lse"), found, want, strict=True))
    return next(filter(None, said), None)


def judge_gradients(made, attention_backward, **on):
    """None if the gradients of another backward pass are within the limits of `verify`, else what is wrong.

    What it is given of the forward pass is the oracle's, rounded.
    """
    Q, K, V, dO = made.arrays.values()
    plain = {"scale": None, "causal": False, "align": "bottom_right"}
    problem = Problem(Q, K, V, plain | made.truth, dtype=made.dtype, backward=True)
    known = reference(problem, dO)
    O, lse = (known.anchors[name].truth for name in ("O", "lse"))
    found = attention_backward(Q, K, V, O.astype(Q.dtype), lse.astype(np.float32), dO, **made.options, **on_of(on))
    for name, got in zip(("dQ", "dK", "dV", "dbias"), found, strict=True):
        if got is None:
            continue
        if got.shape != known.anchors[name].truth.shape or got.dtype != (np.float32 if name == "dbias" else Q.dtype):
            return f"{name}: shape {got.shape}, dtype {got.dtype}; {made}"
        if not (measured := measure(name, got, known, made.dtype)).ok:
            return f"{explain(name, {name: measured})}; {made}"
    return None


def wrong(made, name, got, true, more=0.0):
    """What is wrong with an output, None if nothing; ``more`` is added to its bound."""
    got = np.asarray(got, np.float64)
    if got.shape != true.shape or not np.array_equal(np.isneginf(got), np.isneginf(true)):
        return f"{name}: shape {got.shape} for {true.shape}, or -inf in other places; {made}"
    seen = np.isfinite(true)
    kind = "fp32" if name == "lse" else made.dtype
    error = np.abs(got[seen] - true[seen]).max(initial=0.0)
    bound = TOLERANCE[kind] * max(1.0, np.abs(true[seen]).max(initial=0.0)) + more
    return None if error <= bound else f"{name}: off by {error:.2e}, bound {bound:.2e}; {made}"


def through_D(name, made, O, true):
    """What O's rounding can do to a gradient by way of D = rowsum(dO O), which is computed from the stored O.

    |change of D_i| <= half an ulp of sum |dO O|, and with weights p_ij <= 1, sum_j p_ij <= 1, slopes <= 1:
    |dQ_i| changes by at most |scale| max|K| of that, dK_j by |scale| max|Q| of its sum over rows, dbias by its sum
    over as many rows as share an element.
    """
    if name not in ("dQ", "dK", "dbias"):
        return 0.0
    Q, K, _, dO = (np.abs(x.astype(np.float64)) for x in made.arrays.values())
    scale = abs(made.options.get("scale", Q.shape[-1] ** -0.5))
    D = float(ml_dtypes.finfo(DTYPES[made.dtype]).eps) / 2 * (dO * np.abs(O)).sum(axis=-1)  # (B, Hq, Nq)
    if name == "dQ":
        return scale * K.max(initial=0) * D.max(initial=0)
    if name == "dK":
        return scale * Q.max(initial=0) * D.sum(axis=2).max(initial=0) * (Q.shape[1] // K.shape[1])
    return D.max(initial=0) + D.sum() * (true.size < D.size * K.shape[2])


def on_of(on):
    """Arguments of one call: a fresh executor each time."""
    return {name: make() if callable(make) else make for name, make in on.items()}
