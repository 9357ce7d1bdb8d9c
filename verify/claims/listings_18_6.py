"""The listings of section 18.6: the FP8 backward sketch and the double-buffered pipeline, run."""

import numpy as np

from verify.claims.emulate import rounded
from verify.claims.ledger import Cases, Truth, claim
from verify.claims.trial import TRIALS, everywhere, judge_backward, make, per_head

# With dS rounded to E5M2 the gradients carry an error of a few percent; a wrong formula is off by order one.
E5M2_ERROR = 0.1
NAMES = ("dQ", "dK", "dV")


def stored(Q, K, V):
    """P and O of one head, as the forward pass leaves them (P from the saved statistics)."""
    S = Q @ K.T * Q.shape[1] ** -0.5
    P = np.exp(S - S.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    return P, P @ V


def sketch(Q, K, V, dO, *, quantise=False):
    """Listing 1 of 18.6.2, one head, as printed: dS = P (dV V^T), dQ = dS K, dK = dS Q, no dV.

    dV does not exist when dS needs it; the output buffer still holds zeros. FP8 is left out unless `quantise`.
    """
    P, _ = stored(Q, K, V)
    dV = np.zeros_like(V)
    dS = P * (dV @ V.T)
    dS = fp8(dS) if quantise else dS
    return dS @ K, dS @ Q, dV


def kindly(Q, K, V, dO, *, quantise=False):
    """The same with dV read as a slip for dO: what remains wrong is D, the transpose, the scale and dV."""
    P, _ = stored(Q, K, V)
    dS = P * (dO @ V.T)
    dS = fp8(dS) if quantise else dS
    return dS @ K, dS @ Q, np.zeros_like(V)


def mended(Q, K, V, dO, *, quantise=False):
    """What holds: D = rowsum(dO O), dS = P (dO V^T - D), dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO."""
    P, O = stored(Q, K, V)
    dS = P * (dO @ V.T - (dO * O).sum(1, keepdims=True))
    dS = fp8(dS) if quantise else dS
    scale = Q.shape[1] ** -0.5
    return scale * dS @ K, scale * dS.T @ Q, P.T @ dO


def fp8(dS, rows=16):
    """dS in E5M2 with one scale per block of rows, as quantize_blockwise would do it."""
    out = np.empty_like(dS)
    for i in range(0, len(dS), rows):
        s = max(float(np.abs(dS[i : i + rows]).max()) / 57344, 1e-30)
        out[i : i + rows] = rounded(dS[i : i + rows] / s, "e5m2").astype(float) * s
    return out


def batched(function, **options):
    return lambda Q, K, V, dO, Br, Bc: per_head(function, 3)(Q, K, V, dO, **options)


@claim(
    "18.6-090", section="18.6.2", where="Listing 1", kind="listing",
    title_en="FP8 backward kernel", title_zh="反向传播 kernel 伪代码",
    paraphrase="dS = P (dV V^T), quantised to E5M2; dQ = dS K; dK = dS Q; both added to FP32 masters.",
    stated=everywhere(), verdict="wrong", severity=3, mended=lambda: judge_backward(batched(mended))[0],
    right="dS = P o (dO V^T - D) with D = rowsum(dO o O); dQ = scale dS K; dK = scale dS^T Q; dV = P^T dO. "
    "The sketch uses dV where dO belongs, has no D, no transpose, no scale and never computes dV. It fails "
    "even with exact arithmetic in place of FP8, and reading dV as dO does not save it.",
)
def fp8_backward():
    verdicts, told = judge_backward(batched(sketch))
    kind, kind_told = judge_backward(batched(kindly))
    passed = [n for n, ok in kind.items() if ok]
    return Truth(
        verdicts, f"{told}. With dV read as dO it passes on: {', '.join(passed) or 'nothing'} ({kind_told})"
    )


@claim(
    "18.6-091", section="18.6.2", where="Listing 1", kind="number",
    title_en="Error that E5M2 alone brings into dS", title_zh="E5M2 量化",
    paraphrase="With FP32 accumulation the E5M2 rounding of dS is kept in check.",
    stated={"dQ": True, "dK": True}, unit="relative RMS error below 10 %", verdict="confirmed",
)
def e5m2_noise():
    t = make(691, Nq=256, d=64)
    exact = batched(mended)(t.Q, t.K, t.V, t.dO, 16, 16)
    low = batched(mended, quantise=True)(t.Q, t.K, t.V, t.dO, 16, 16)
    errors = [float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))) for a, b in zip(low, exact, strict=True)]
    return Truth(
        {name: e < E5M2_ERROR for name, e in zip(NAMES[:2], errors[:2], strict=True)},
        f"relative RMS error of the mended listing with dS in E5M2: {errors[0]:.1%} in dQ, {errors[1]:.1%} "
        "in dK (a single value is off by up to 12.5 %)",
    )


@claim(
    "18.6-092", section="18.6.4", where="Formula", kind="formula",
    title_en="Products of the backward pass", title_zh="dQ = dS K, dK = dS Q, dV = P dO",
    paraphrase="The backward products are dQ = dS K, dK = dS Q and dV = P dO, one of them with a transpose "
    "that the print has displaced.",
    stated=dict.fromkeys(NAMES, True), verdict="wrong", severity=3, reading_is_guess=True,
    right="dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO: two transposes and the scale. Without them dK "
    "and dV even have the wrong number of rows when Nq and Nk differ.",
)
def backward_products():
    def printed(Q, K, V, dO):
        P, O = stored(Q, K, V)
        dS = P * (dO @ V.T - (dO * O).sum(1, keepdims=True))
        return dS @ K, dS @ Q, P.T @ dO  # the stray T is read as P^T, the kinder choice

    t = make(692, Nq=48)
    got = batched(printed)(t.Q, t.K, t.V, t.dO, 16, 16)
    want = batched(mended)(t.Q, t.K, t.V, t.dO, 16, 16)
    errors = {n: float(np.abs(g - w).max()) for n, g, w in zip(NAMES, got, want, strict=True)}
    return Truth(
        {n: e < 1e-9 for n, e in errors.items()},
        "largest errors "
        + ", ".join(f"{n} {e:.1e}" for n, e in errors.items())
        + "; dQ is off by the scale alone",
    )


class Slots:
    """Two shared-memory slots and the rule by which the producer may write one."""

    def __init__(self, K, V, Bc, rule):
        self.tiles = [(K[j : j + Bc], V[j : j + Bc]) for j in range(0, len(K), Bc)]
        self.slot = [None, None]
        self.rule = rule
        self.produced = 0

    def run_ahead(self, consumed):
        """Let the producer write every tile that its rule allows, as a scheduler that favours it would."""
        while self.produced < len(self.tiles) and self.rule(self.produced, consumed):
            self.slot[self.produced % 2] = self.tiles[self.produced]
            self.produced += 1


def pipeline(rule):
    """Consumer loop of the listing over slots that a producer fills by `rule(tile, tiles consumed)`."""

    def one_head(Q, K, V, *, Bc):
        slots = Slots(K, V, Bc, rule)
        m, l = np.full((len(Q), 1), -np.inf), np.zeros((len(Q), 1))
        o = np.zeros((len(Q), V.shape[1]))
        for tile in range(len(slots.tiles)):
            slots.run_ahead(tile)
            K_j, V_j = slots.slot[tile % 2]
            S = Q @ K_j.T * Q.shape[1] ** -0.5
            m_new = np.maximum(m, S.max(1, keepdims=True))
            alpha, P = np.exp(m - m_new), np.exp(S - m_new)
            l, o, m = alpha * l + P.sum(1, keepdims=True), alpha * o + P @ V_j, m_new
        return o / l

    return lambda Q, K, V, Br, Bc: per_head(one_head, 1)(Q, K, V, Bc=Bc)


def waits_for_slot(tile, consumed):
    """An empty barrier: tile t may be written once tile t - 2 has been consumed."""
    return tile - 2 < consumed


@claim(
    "18.6-093", section="18.6.3", where="Listing 3", kind="listing",
    title_en="Double-buffered pipeline", title_zh="双缓冲流水线",
    paraphrase="The consumer waits for a slot, computes, flips the slot; the producer, not shown, fills "
    "slots and signals.",
    stated=everywhere(), verdict="depends", severity=3, mended=lambda: _judged(waits_for_slot)[0],
    right="The text's producer only signals 'ready' and goes on: nothing tells it that a slot has been read, "
    "and it may overwrite a tile before use. Add a second barrier a slot ('empty'), or let both sides arrive "
    "and wait at one, which costs the overlap. The producer's branch is missing from the listing.",
)
def double_buffer():
    free, free_told = _judged(lambda tile, consumed: True)
    both, _ = _judged(waits_for_slot)
    return Cases(
        {
            "producer signals and runs on, as the text describes it": free,
            "both sides arrive and wait at one barrier a slot": both,
        },
        f"a producer that runs ahead: {free_told}",
    )


def _judged(rule):
    from verify.claims.trial import judge_forward

    return judge_forward(pipeline(rule))


@claim(
    "18.6-094", section="18.6.3", where="Listing 3", kind="number",
    title_en="Registers of the score tile", title_zh="S[B_r * B_c]",
    paraphrase="Each consumer thread declares the whole S tile, Br x Bc floats, as a local array.",
    stated={"registers a thread": 255}, unit="at most, for Br = Bc = 128", tol=0, verdict="wrong", severity=2,
    right="16384 floats a thread, 64 times the limit of 255 registers, so 64 KB of local memory each. A "
    "thread's share is Br Bc / 256 = 64 floats with two consumer warpgroups; the listing divides O's "
    "accumulator so, but not S.",
)
def score_registers():
    return Truth({"registers a thread": 128 * 128}, "Br * Bc elements of 32 bits")


@claim(
    "18.6-095", section="18.6.3", where="Figure 18-25", kind="statement",
    title_en="Order of the stages", title_zh="Prologue / Steady / Swap / Epilogue",
    paraphrase="Tile 0 is loaded first; then, while tile i is worked on, tile i + 1 is loaded into the "
    "other slot; after the last tile O is divided and written.",
    stated=everywhere({n: t for n, t in TRIALS.items() if n != "one tile"}), verdict="confirmed",
)
def stage_order():
    verdicts, told = _judged(lambda tile, consumed: tile <= consumed + 1)
    del verdicts["one tile"]
    return Truth(verdicts, f"prefetching exactly one tile ahead is safe with two slots: {told}")
