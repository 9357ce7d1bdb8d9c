"""Ledger entries for section 18.3.4: the eager chain of kernels, fusion, and its limits."""

from verify.claims.account import compulsory_elements, flash_forward_elements
from verify.claims.ledger import Bound, Cases, claim

MI = 1.048576
N, D = 2048, 64
DROPOUT = "PyTorch native_functions.yaml: dropout(Tensor input, float p, bool train)"


@claim(
    "18.3-060", section="18.3.4", where="Figure 18-11", kind="number",
    title_en="Launches of the eager chain", title_zh="启动次数",
    paraphrase="Eager attention launches six kernels (QK^T, scale, mask, softmax, dropout, PV), a fused one "
    "launches one.",
    stated={"eager": 6, "fused": 1}, verdict="confirmed", tol=0,
)
def launches():
    return {"eager": len(("QK^T", "scale", "mask", "softmax", "dropout", "PV")), "fused": 1}


@claim(
    "18.3-061", section="18.3.4", where="Listing 1", kind="code",
    title_en="torch.dropout in the eager chain", title_zh="dropout 调用",
    paraphrase="The chain calls torch.dropout with the tensor and p.",
    stated={"the call is accepted": True}, verdict="wrong", severity=2, source=DROPOUT,
    right="torch.dropout has a third required argument, train: as printed the line raises TypeError. "
    "torch.nn.functional.dropout(x, p=..., training=...) is meant.",
    mended=lambda: {"the call is accepted": _call(functional_dropout)},
)
def dropout_call():
    return {"the call is accepted": _call(native_dropout)}


def native_dropout(input, p, train):
    """torch.dropout's published signature."""
    return input


def functional_dropout(input, p=0.5, training=True, inplace=False):
    """torch.nn.functional.dropout's published signature."""
    return input


def _call(dropout):
    try:
        dropout("probabilities", p=0.1)
    except TypeError:
        return False
    return True


@claim(
    "18.3-062", section="18.3.4", where="text", kind="timing",
    title_en="Cost of six launches", title_zh="launch overhead",
    paraphrase="Six launches cost 30-60 microseconds together.",
    stated=45, unit="us", verdict="unverifiable", severity=1,
    right="5-10 us each is the order of a launch with its framework call; back to back on a busy stream it "
    "is hidden.",
)
def launch_cost():
    # Two microseconds is about what an empty kernel takes from a C++ loop, 50 a slow Python call.
    return Bound(6 * 2, 6 * 50, "depends on host, driver and framework")


@claim(
    "18.3-063", section="18.3.4", where="text", kind="number",
    title_en="Traffic of the eager chain", title_zh="冗余 I/O",
    paraphrase="N = 2048, d = 64: 8 MB to write S, 64 MB for four kernels in between, 8 MB to read P: 80 MB.",
    stated={"write S": 8, "four kernels": 64, "read P": 8, "total": 80}, unit="MB", verdict="units",
    unit_factor=MI,
    right="80 MiB, 84 MB. The mask itself (8 MiB in FP16) and dropout's kept mask (4 MiB) are not counted.",
    tol=0.005,
)
def eager_chain():
    matrix = 2 * N * N / 1e6
    return {"write S": matrix, "four kernels": 4 * 2 * matrix, "read P": matrix, "total": 10 * matrix}


@claim(
    "18.3-064", section="18.3.4", where="text", kind="number",
    title_en="Necessary and redundant traffic", title_zh="数学上必要",
    paraphrase="Of 80 MB only about 1 MB is necessary (Q, K, V, O); the other 64 MB are redundant.",
    stated={"necessary": 1, "redundant": 64}, unit="MB", verdict="wrong", severity=1, tol=0.06,
    conflicts_with=("18.3-063",),
    right="All of the 80 MiB are S and P and none of it is necessary; Q, K, V and O are 1 MB on top.",
)
def redundant():
    return {"necessary": 2 * compulsory_elements(N, D) / 1e6, "redundant": 10 * 2 * N * N / 1e6}


@claim(
    "18.3-065", section="18.3.4", where="text", kind="library",
    title_en="What torch.compile can fuse", title_zh="torch.compile",
    paraphrase="A graph compiler cannot turn this chain into a fused attention; hence hand-written kernels.",
    stated={"Inductor rewrites the pattern to fused attention": False}, verdict="wrong", severity=1,
    right="Inductor has pattern replacements that turn matmul, scale, mask, softmax, dropout, matmul into "
    "SDPA, and so into the hand-written kernel. What it does not do is derive the online softmax itself; "
    "FlexAttention does that from a template.",
    source="PyTorch 2.1 and later, torch/_inductor/fx_passes/fuse_attention.py",
)
def inductor():
    return {"Inductor rewrites the pattern to fused attention": True}


@claim(
    "18.3-066", section="18.3.4", where="text", kind="formula",
    title_en="Passes of the online softmax", title_zh="单次遍历",
    paraphrase="Softmax needs three passes over the data, the online form one, its output ready for use.",
    stated={"three-pass": 3, "online": 1}, unit="passes", verdict="depends", severity=2,
    conflicts_with=("18.4-017",),
    right="The online form needs one pass for m and l and a second to write probabilities. One pass is "
    "enough only for what is linear in P, such as PV, whose accumulator is rescaled.",
    source="Milakov and Gimelshein, arXiv:1805.02867, section 3",
)
def passes():
    return Cases(
        {"writing the probabilities": {"three-pass": 3, "online": 2}, "accumulating PV": {"three-pass": 3, "online": 1}}
    )


@claim(
    "18.3-067", section="18.3.4", where="text", kind="formula",
    title_en="Larger tiles", title_zh="分块大小",
    paraphrase="Tiles k times as large divide traffic by about k, with rescaling work falling as 1/k.",
    stated={"traffic, 64 to 128 rows": 2, "rescalings, 64 to 128 keys": 2}, verdict="confirmed",
    reading_is_guess=True,
)
def larger_tiles():
    n = 1 << 14
    return {
        "traffic, 64 to 128 rows": flash_forward_elements(n, D, 64) / flash_forward_elements(n, D, 128),
        "rescalings, 64 to 128 keys": (n // 64) / (n // 128),
    }
