"""The code samples of section 18.7 that decide by numbers, emulated without the libraries."""

import inspect

import ml_dtypes
import numpy as np

from refimpl import oracle
from verify.claims.ledger import Truth, claim
from verify.claims.trial import make


def gap(a, b):
    """Largest difference; NaN wherever either is NaN."""
    return float(np.max(np.abs(a - b)))


@claim(
    "18.7-120", section="18.7.1", where="Listing 13", kind="code",
    title_en="Reference of the installation check", title_zh="前向数值正确性",
    paraphrase="A boolean triu(diagonal=1) mask is passed to SDPA as the causal reference; the check "
    "asserts an error below 5e-3.",
    stated={"a right kernel passes": True}, verdict="wrong", severity=3,
    mended=lambda: installation_check(np.tri)[0],
    right="In SDPA a boolean mask marks what may be attended to. triu(diagonal=1) lets every row see its "
    "future only; the last row sees nothing (NaN). A right kernel fails the check. Pass ~mask, or "
    "tril(diagonal=0), or is_causal=True.",
    source="PyTorch documentation, scaled_dot_product_attention: True takes part in attention",
)
def check_reference():
    return Truth(*installation_check(lambda n: np.triu(np.ones((n, n)), 1)))


def installation_check(triangle):
    t = make(1720, H=2, Nq=128, d=16)
    mask = triangle(128).astype(bool)
    kernel = oracle.attention(t.Q, t.K, t.V, causal=True)[0]
    reference = oracle.attention(t.Q, t.K, t.V, mask=mask)[0]
    worst = gap(kernel[:, :, :-1], reference[:, :, :-1])
    seen = int(mask[-1].sum())
    return {
        "a right kernel passes": worst < 5e-3 and seen > 0
    }, f"error {worst:.2f}; the last row sees {seen} keys"


@claim(
    "18.7-121", section="18.7.1", where="Listing 14", kind="code",
    title_en="Gradient of the reference", title_zh="反向梯度正确性",
    paraphrase="The reference query is cloned with requires_grad, rebound to its permuted float copy, and "
    "its .grad is compared.",
    stated={".grad is filled": True}, verdict="wrong", severity=3,
    mended=lambda: {".grad is filled": leaf_has_grad(rebind=False)},
    right="After the rebinding the name is a non-leaf tensor, whose .grad stays None: the line raises. Keep "
    "the leaf under its own name (and mend the mask as well).",
    source="PyTorch documentation, Tensor.grad and is_leaf",
)
def reference_gradient():
    return Truth(
        {".grad is filled": leaf_has_grad(rebind=True)}, "by autograd's rule: only leaves keep a gradient"
    )


class Node:
    """As much of autograd as the sample needs: backward fills `grad` on leaves only."""

    def __init__(self, parent=None):
        self.parent, self.grad = parent, None

    def permute(self):
        return Node(self)

    def backward(self):
        node = self
        while node.parent is not None:
            node = node.parent
        node.grad = 1.0


def leaf_has_grad(rebind):
    q = leaf = Node()
    q = q.permute()
    q.permute().backward()
    return (q if rebind else leaf).grad is not None


@claim(
    "18.7-122", section="18.7.2", where="Listing 7", kind="code",
    title_en="FlexAttention sample", title_zh="composite_score_mod",
    paraphrase="A five-argument score function (ALiBi, window, documents) is given to create_block_mask; "
    "flex_attention gets the block mask alone.",
    stated={"runs": True, "applies ALiBi": True, "applies the document mask": True}, verdict="wrong",
    severity=3, mended=lambda: flex_sample(mended=True)[0],
    right="create_block_mask wants a mask_mod(b, h, q, kv) that returns a boolean: five arguments raise. "
    "The score function must go to flex_attention(score_mod=...). No document mask is in it, despite its "
    "docstring.",
    source="PyTorch 2.5 documentation, torch.nn.attention.flex_attention",
)
def flex_listing():
    return Truth(*flex_sample(mended=False))


def flex_sample(mended):
    """The sample's control flow with stand-ins that keep FlexAttention's calling conventions."""
    document = np.repeat([0, 1], 32)
    # ALiBi's slopes for four heads.
    slopes = 0.25 ** np.arange(1, 5)

    def printed_mod(score, b, h, q, kv):
        return np.where((q - kv <= 1024) & (kv <= q), alibi(score, b, h, q, kv), -np.inf)

    def mask_mod(b, h, q, kv):
        return (q - kv <= 1024) & (kv <= q) & (document[q] == document[kv])

    def alibi(score, b, h, q, kv):
        return score + slopes[h] * (kv - q)

    def create_block_mask(mod):
        inspect.signature(mod).bind(0, 0, 0, 0)
        q, kv = np.indices((64, 64))
        return mod(0, 0, q, kv)

    t = make(1722, H=4, Nq=64, d=8)
    q, kv = np.indices((64, 64))
    bias = slopes[:, None, None] * (kv - q)
    want = oracle.attention(t.Q, t.K, t.V, mask=mask_mod(0, 0, q, kv), bias=bias)[0]
    try:
        mask, score_mod = create_block_mask(mask_mod if mended else printed_mod), alibi if mended else None
    except TypeError as error:
        return {
            "runs": False,
            "applies ALiBi": False,
            "applies the document mask": False,
        }, f"TypeError: {error}"
    added = np.stack([score_mod(0.0, 0, h, q, kv) for h in range(4)]) if score_mod else np.zeros((4, 64, 64))
    got = oracle.attention(t.Q, t.K, t.V, mask=mask, bias=added)[0]
    good = gap(got, want) < 1e-12
    return {
        "runs": True,
        "applies ALiBi": good,
        "applies the document mask": good,
    }, f"error {gap(got, want):.1e}"


@claim(
    "18.7-123", section="18.7.4", where="Listing 5", kind="code",
    title_en="Casting to FP8 without a scale", title_zh="FP8 推理优化",
    paraphrase="q, k and v are cast to E4M3 directly, without a scale.",
    stated={"no NaN at 500": True, "1e-3 survives": True, "error as with a scale": True}, verdict="wrong",
    severity=3, mended=lambda: fp8_cast(scaled=True)[0],
    right="E4M3 has no infinity: values above 464 become NaN, those below 2^-10 zero. Divide by amax / 448 "
    "first and pass the factor as descale.",
    source="ml_dtypes and PyTorch float8_e4m3fn (finite, NaN on overflow)",
)
def bare_cast():
    return Truth(*fp8_cast(scaled=False))


def fp8_cast(scaled):
    def cast(x):
        s = np.float32(np.abs(x).max() / 448) if scaled else np.float32(1)
        return (x / s).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * s

    small = np.float32(1e-3) * np.random.default_rng(1723).standard_normal(4096).astype(np.float32)
    with np.errstate(all="ignore"):
        large, back = cast(np.array([500, 1], np.float32)), cast(small)
    loss = float(np.sqrt(np.mean((back - small) ** 2) / np.mean(small**2)))
    return (
        {
            "no NaN at 500": bool(np.isfinite(large).all()),
            "1e-3 survives": bool(cast(np.array([1e-3, 1e-3], np.float32))[0] > 0) and loss < 0.5,
            "error as with a scale": loss < 0.05,
        },
        f"relative RMS error of values around 1e-3: {loss:.1%}",
    )


@claim(
    "18.7-124", section="18.7.4", where="Listing 2", kind="code",
    title_en="Layout of the MLX sample", title_zh="MLX 示例",
    paraphrase="Arrays (batch, length, heads, d) are handed to a function that wants (batch, heads, length, "
    "d).",
    stated={"attention along the sequence": True}, verdict="wrong", severity=3,
    mended=lambda: mlx_sample(transpose=True)[0],
    right="Transpose first. As printed each position attends over the heads of the same position. The "
    "shapes fit, no error is raised.",
    source="MLX documentation, mlx.core.fast.scaled_dot_product_attention",
)
def mlx_layout():
    return Truth(*mlx_sample(transpose=False))


def mlx_sample(transpose):
    t = make(1724, H=4, Nq=16, d=8)
    want = oracle.attention(t.Q, t.K, t.V)[0]
    bshd = [x.transpose(0, 2, 1, 3) for x in (t.Q, t.K, t.V)]
    if transpose:
        got = oracle.attention(*(x.transpose(0, 2, 1, 3) for x in bshd))[0]
    else:
        got = oracle.attention(*bshd)[0].transpose(0, 2, 1, 3)
    return {"attention along the sequence": gap(got, want) < 1e-12}, f"largest error {gap(got, want):.2f}"


@claim(
    "18.7-125", section="18.7.2", where="Listing 4", kind="code",
    title_en="Replacing an attention module by SDPA", title_zh="替换一",
    paraphrase="A module without a mask is replaced by one that calls SDPA with is_causal=causal_mask, True "
    "by default.",
    stated={"same output by default": True}, verdict="wrong", severity=3,
    mended=lambda: replacement(causal=False)[0],
    right="The replacement is causal by default and the original is not: only the last position agrees. "
    "Default to False.",
)
def module_replacement():
    return Truth(*replacement(causal=True))


def replacement(causal):
    t = make(1725, H=2, Nq=32, d=8)
    a, b = oracle.attention(t.Q, t.K, t.V)[0], oracle.attention(t.Q, t.K, t.V, causal=causal)[0]
    same = int(np.sum(np.abs(a - b).max(axis=(0, 1, 3)) < 1e-12))
    return {
        "same output by default": gap(a, b) < 1e-12
    }, f"largest difference {gap(a, b):.2f}; {same} of 32 positions agree"


@claim(
    "18.7-126", section="18.7.3", where="Listing 3", kind="code",
    title_en="Collator of the training sample", title_zh="data_collator",
    paraphrase="Texts are tokenised without padding; the collator stacks input_ids of the batch.",
    stated={"lists of unequal length stack": True}, verdict="wrong", severity=3,
    mended=lambda: collate(pad=True),
    right="torch.stack wants tensors, the data set yields lists, and their lengths differ. Pad in the "
    "collator (DataCollatorForLanguageModeling, mlm=False), which also sets the labels of padding to -100.",
    source="PyTorch documentation, torch.stack; Transformers data collators",
)
def collator():
    return Truth(collate(pad=False), "NumPy's stack has the same rule")


def collate(pad):
    batch = [[1, 2, 3], [4, 5], [6]]
    if pad:
        batch = [np.array(ids + [0] * (3 - len(ids))) for ids in batch]
    try:
        stacked = np.stack([np.asarray(ids) for ids in batch])
    except ValueError:
        return {"lists of unequal length stack": False}
    return {"lists of unequal length stack": stacked.shape == (3, 3)}
