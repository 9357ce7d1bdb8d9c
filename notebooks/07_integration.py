# %% [markdown]
# # 07 · Options, and how to ask for them
#
# *Chapter 18.7. One kernel, many callers: layouts, masks, windows, packed sequences, shared heads, caches,
# dropout, gradients; and what goes wrong between two libraries that both say "causal".*
#
# ## What you'll do
#
# Call the same attention through flash-attn's functions and by definition, until you can translate one
# into the other; write a mask of your own in one line and see a kernel skip tiles by it; and check each
# option against the fp64 truth.
#
# ## What you'll learn
#
# - which conventions differ between libraries, and how each difference shows;
# - what a mask has to tell a kernel besides who sees whom;
# - why packed sequences, shared heads and a cache are indexing, not new algorithms;
# - what dropout and gradients need from the forward pass.
#
# ## What you'll need
#
# Notebooks 02 and 04. No GPU: kernels run in the emulator, thread by thread, at small sizes.

# %%
from inspect import getsource

import numpy as np

from figures import mask_claims, masks
from flash_cuda import backward, general, interface
from flash_cuda.executors.emulator import Emulator

# %%
from reading import judged
from refimpl import masks as shipped
from refimpl import options, oracle, scores, standard
from refimpl.philox import Dropout, philox
from refimpl.tiling import Tile
from verify import calls, judge, runner
from verify.cases import DEFAULT
from verify.registry import ALL

rng = np.random.default_rng(187)
SMALL = {"tile": Tile(16, 16), "threads": (4, 2)}


# %%
def normal(*shape):
    """N(0, 1) in fp32."""
    return rng.standard_normal(shape, dtype=np.float32)


def apart(a, b):
    """The largest difference; NaN anywhere makes it NaN."""
    return float(np.abs(np.asarray(a, float) - b).max())


# %% [markdown]
# ## 1 Two layouts
#
# PyTorch's `scaled_dot_product_attention` takes (B, H, N, d), heads first; flash-attn takes (B, N, H, d),
# as a projection leaves them. Both are only strides: a transposed view is enough, and no copy is made. The
# functions in `flash_cuda.interface` have flash-attn's names, order of arguments, defaults and layout; the
# oracle and the steps have heads first.

# %%
q, k, v = normal(1, 20, 4, 8), normal(1, 37, 4, 8), normal(1, 37, 4, 8)
Q, K, V = (x.swapaxes(1, 2) for x in (q, k, v))
O, lse = oracle.attention(Q, K, V)
out = interface.flash_attn_func(q, k, v, on=Emulator(), **SMALL)
print("q", q.shape, "out", out.shape, "O", O.shape)
print(f"largest difference {apart(out.swapaxes(1, 2), O):.1e}")
assert apart(out.swapaxes(1, 2), O) <= 1e-6

# %% [markdown]
# An array handed over in the other layout has, with N heads of length H, a shape that is just as good. No
# error is raised; attention then runs over the heads of one token. The chapter has a listing that does it.

# %%
judged("18.7-044", "18.7-124")
short = q, k[:, :20], v[:, :20]
right, swapped = oracle.attention(*(x.swapaxes(1, 2) for x in short))[0], oracle.attention(*short)[0]
print(f"shape {swapped.shape}, like q; off by {apart(swapped, right.swapaxes(1, 2)):.2f}")

# %% [markdown]
# Asked to explain itself, a call says which kernel it takes and why. With `return_attn_probs` it also
# returns lse and, for tests, the weights, with their sign set where dropout dropped them. In flash-attn they
# are not meant for display, whatever the text says:

# %%
judged("18.7-015", "18.7-007")
out, softmax_lse, weights = interface.flash_attn_func(
    q, k, v, return_attn_probs=True, explain=True, on=Emulator(), **SMALL
)
print(f"lse off by {apart(softmax_lse, lse):.1e}; rows of weights add to 1 within {apart(weights.sum(-1), 1):.1e}")
assert apart(softmax_lse, lse) <= 1e-6

# %% [markdown]
# ## 2 Where the diagonal starts
#
# With as many queries as keys, "causal" has one meaning. With fewer, two: the first query stands at the
# first key (top left), or the last at the last (bottom right). The second is what decoding needs, where the
# queries are the newest tokens, and what flash-attn has done since 2.1; `is_causal` of PyTorch's function is
# the first.

# %%
judged("18.7-011")
for align in ("top_left", "bottom_right"):
    seen = options.visible(options.causal(3, 5, align), 0, 0, slice(0, 3), slice(0, 5))
    print(f"{align:13}", *("".join(".#"[int(x)] for x in row) for row in seen))

# %% [markdown]
# From here on $i$ is the *position* of a query on the keys' axis, $i = \text{row} + N_k - N_q$ at the bottom
# right, and $j$ that of a key. Windows and ALiBi count in positions too, so an alignment that is wrong shows
# in all three.

# %%
q, k, v = normal(1, 20, 4, 8), normal(1, 37, 4, 8), normal(1, 37, 4, 8)
Q, K, V = (x.swapaxes(1, 2) for x in (q, k, v))
slopes = np.float32(2.0) ** -np.arange(1, 5, dtype=np.float32)
for told, same in (
    ({"causal": True}, {"causal": True}),
    ({"window_size": (6, 2)}, {"window": (6, 2)}),
    ({"alibi_slopes": slopes}, {"alibi_slopes": slopes}),
    ({"causal": True, "softcap": 1.5}, {"causal": True, "softcap": 1.5}),
):
    out = interface.flash_attn_func(q, k, v, on=Emulator(), **told, **SMALL).swapaxes(1, 2)
    right, left = (oracle.attention(Q, K, V, align=at, **same)[0] for at in ("bottom_right", "top_left"))
    print(f"{', '.join(told):16} off by {apart(out, right):.1e}; by {apart(out, left):.1e} if starts were aligned")
    assert apart(out, right) <= 1e-6 < 1e-2 < apart(out, left)

# %% [markdown]
# ## 3 A rule, written once
#
# A kernel cannot have a branch for every mask that somebody wants. FlexAttention's answer is to take the
# mask as an expression. So is ours: this text runs on index arrays in NumPy, thread by thread in the
# emulator, and compiled into the kernel on a GPU.

# %%
print(getsource(shipped.window_mask))
print(getsource(scores.alibi_score))

# %% [markdown]
# There are two kinds, and they are not interchangeable. A *mask* says who sees whom and allows whole tiles to
# be skipped; a *score* rule changes a number, and every tile has to be computed. A listing of the chapter
# gives a score function to the maker of block masks:

# %%
judged("18.7-122")
window, alibi = options.window(6, 0), options.alibi(slopes)
for rule in (window, alibi):
    has = {"a formula for tiles": rule.tiles, "a derivative": rule.grad}
    print(f"{rule.fn.__name__:12} is a {rule.kind} rule with", *(name for name, fn in has.items() if fn))

# %% [markdown]
# One's own rule is one line, and no kernel is touched. Keys at an even distance, joined with causal and a
# softcap, against an array of the same by the oracle:

# %%
even = options.Rule(lambda b, h, i, j: (i - j) % 2 == 0)
O, _ = general.attention(Q, K, V, rules=[even], causal=True, softcap=2.0, on=Emulator(), **SMALL)
i, j = np.ogrid[17:37, 0:37]
wanted, _ = oracle.attention(Q, K, V, mask=(i - j) % 2 == 0, causal=True, softcap=2.0)
print(f"largest difference {apart(O, wanted):.1e}")
assert apart(O, wanted) <= 1e-6

# %% [markdown]
# **Order matters.** The softcap comes before the mask. Cap a score that was set to −∞, and the hidden key is
# back with the weight of a score of −cap:

# %%
S = np.where(np.tri(4, dtype=bool), 0.0, -np.inf)
print("masked, then capped:", 2.0 * np.tanh(S / 2.0)[0])
print(getsource(standard.standard_score))

# %% [markdown]
# **What True means.** In PyTorch a boolean mask says who *may* be seen; in many older libraries who may *not*.
# The chapter takes `triu(diagonal=1)` for a causal mask; drawn is what a run makes of it, of its opposite, and
# of a window whose sides are swapped.

# %%
judged("18.7-120", "18.7-071")
mask_claims.fig_handed(mask_claims.data_handed())

# %% [markdown]
# ## 4 What a mask saves
#
# A kernel works in tiles, so what counts is not how many pairs a mask hides but how many tiles it empties.
# Each rule therefore has a second formula: the class of the tile $i_0 \le i < i_1$, $j_0 \le j < j_1$, from
# its corners alone. Empty tiles are not loaded, full ones need no masking, and only the partial ones are
# masked pair by pair.

# %%
print(getsource(shipped.causal_tiles))
print(getsource(shipped.window_tiles))

# %%
panels = masks.data_classes()
masks.fig_classes(panels)

# %% [markdown]
# The counts under the panels are computed from these formulas. A window is cheap because it leaves tiles
# empty. `dilated(3)` hides two pairs of three and saves nothing: no tile is empty. Sparse patterns pay only
# in blocks.

# %%
for panel in panels:
    pairs, tiles = 1 - panel.seen.mean(), 1 - panel.visited / panel.classes.size
    print(f"{panel.title:30} hides {pairs:4.0%} of the pairs, {tiles:4.0%} of the tiles")
dilated = next(panel for panel in panels if panel.title == "dilated(3)")
assert dilated.visited == dilated.classes.size and dilated.seen.mean() < 0.34

# %% [markdown]
# Counted in a run: the emulator counts what a kernel loads. 64 queries and keys, 16 × 16 tiles, so four key
# tiles of 16 rows for each of four query tiles without a mask:

# %%
Q64, K64, V64 = (normal(1, 1, 64, 8) for _ in "QKV")
for name, told in (("full", {}), ("causal", {"causal": True}), ("window (15, 0)", {"window": (15, 0)})):
    machine = Emulator()
    general.attention(Q64, K64, V64, **told, on=machine, **SMALL)
    loads, _ = machine.counts["K"]
    print(f"{name:15} {loads // (16 * 8):2} tiles of K loaded")

# %% [markdown]
# ## 5 Shared heads
#
# With $H_q$ query heads on $H_k$ key heads, query head h reads key head $h \div (H_q / H_k)$, rounded down:
# neighbours share. The other order, $h \bmod H_k$, has the same shapes and other numbers. PyTorch does not
# share by itself; it has to be asked:

# %%
judged("18.7-031")
q, k, v = normal(1, 12, 6, 8), normal(1, 20, 2, 8), normal(1, 20, 2, 8)
out = interface.flash_attn_func(q, k, v, on=Emulator(), **SMALL)
for name, repeated in (("neighbours share", np.repeat), ("every second", lambda x, n, axis: np.tile(x, (1, 1, n, 1)))):
    whole = [repeated(x, 3, axis=2).swapaxes(1, 2) for x in (k, v)]
    wanted, _ = oracle.attention(q.swapaxes(1, 2), *whole)
    print(f"{name:17} off by {apart(out.swapaxes(1, 2), wanted):.1e}")

# %% [markdown]
# ## 6 Sequences of different lengths
#
# Padding computes what nobody wants. Packed, the sequences stand end to end in one array and `cu_seqlens`
# says where each begins. Nothing else changes: each sequence is attention by itself, a sequence without
# queries or keys included.

# %%
judged("18.7-017", "18.7-018")
lengths_q, lengths_k = np.array([5, 0, 17, 9]), np.array([12, 4, 17, 0])
cu_q, cu_k = (np.append(0, np.cumsum(n)).astype(np.int32) for n in (lengths_q, lengths_k))
q, k, v = normal(cu_q[-1], 2, 8), normal(cu_k[-1], 2, 8), normal(cu_k[-1], 2, 8)
out = interface.flash_attn_varlen_func(
    q, k, v, cu_q, cu_k, lengths_q.max(), lengths_k.max(), causal=True, on=Emulator(), **SMALL
)
for b in range(4):
    rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
    alone, _ = oracle.attention(*(x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])), causal=True)
    off = apart(out[rows], alone[0].swapaxes(0, 1)) if len(q[rows]) else 0.0
    print(f"sequence {b}: {lengths_q[b]:2} queries, {lengths_k[b]:2} keys, off by {off:.1e}")
    assert off <= 1e-6

# %% [markdown]
# The last one has queries and no keys. Its rows are 0 and their lse is −∞, the neutral element of notebook
# 04; a kernel without a guard divides 0 by 0. The same happens to rows of the padding, of a window that ends
# before the first key, of a mask without a True.
#
# ## 7 A cache
#
# In decoding the keys and values of earlier tokens stay where they are and each step appends one. Three steps,
# the cache being twice as long as what is in it; what lies beyond is NaN here, and does not matter:

# %%
k_cache, v_cache = (np.full((2, 32, 2, 8), np.nan, np.float32) for _ in "kv")
past, (k, v) = np.array([9, 14], np.int32), (normal(2, 14, 2, 8) for _ in "kv")
for cache, x in ((k_cache, k), (v_cache, v)):
    for b in range(2):
        cache[b, : past[b]] = x[b, : past[b]]
for _ in range(3):
    q, k, v = (normal(2, 1, heads, 8) for heads in (4, 2, 2))
    out = interface.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=past, causal=True, on=Emulator(), **SMALL
    )
    past = past + 1
    wanted, _ = oracle.attention(*(x.swapaxes(1, 2) for x in (q, k_cache, v_cache)), lengths_k=past)
    print(f"keys in use {past}, off by {apart(out.swapaxes(1, 2), wanted):.1e}")
    assert apart(out.swapaxes(1, 2), wanted) <= 1e-6

# %% [markdown]
# ## 8 Dropout
#
# Weights are dropped after the softmax, so lse does not know of it. The backward pass needs the same mask
# again, and storing it would bring back the N × N that the method got rid of. A counter-based generator draws
# it from the *place* of a weight: the words of (b, h, row, column) under a key, in any order, by any tile.

# %%
print("philox at 0 under 0:", *(f"{int(word):08x}" for word in philox(0, 0, 0, 0, 0, 0)))
drop = Dropout(0.25, seed=18, offset=7)
kept = np.array([[drop.mask(0, h, slice(0, 20), slice(0, 37)) for h in range(4)]])
pieces = np.hstack([drop.mask(0, 1, slice(0, 20), slice(c, min(c + 5, 37))) for c in range(0, 37, 5)])
assert np.array_equal(pieces, kept[0, 1])
for tile in (Tile(16, 16), Tile(8, 32)):
    O, lse = general.attention(Q, K, V, dropout=drop, on=Emulator(), tile=tile, threads=(4, 2))
    wanted, lse_true = oracle.attention(Q, K, V, keep=kept, dropout_p=0.25)
    print(f"tile {tile.Br} × {tile.Bc}: O off by {apart(O, wanted):.1e}, lse by {apart(lse, lse_true):.1e}")
    assert apart(O, wanted) <= 2e-6
print(f"kept {kept.mean():.1%} of {kept.size} weights")

# %% [markdown]
# ## 9 Gradients
#
# The backward kernels take the same options, recompute P from lse, and multiply by what each rule's derivative
# says: 1 for whatever is added, $1 - \tanh^2$ for the softcap. A key head's gradient is the sum over the query
# heads that read it. With everything on at once:

# %%
everything = {"causal": True, "window": (9, 0), "softcap": 2.0, "alibi_slopes": slopes, "dropout": drop}
bias, dO = normal(1, 4, 20, 37), normal(1, 4, 20, 8)
O, lse = general.attention(Q, K, V, bias=bias, **everything, on=Emulator(), **SMALL)
found = backward.attention_backward(Q, K, V, O, lse, dO, bias=bias, **everything, on=Emulator(), **SMALL)
plain = {name: x for name, x in everything.items() if name != "dropout"} | {"keep": kept, "dropout_p": 0.25}
wanted = oracle.attention_backward(Q, K, V, dO, bias=bias, **plain)
for name, got, true in zip(("dQ", "dK", "dV", "dbias"), found, wanted, strict=True):
    print(f"{name:5} {true.shape!s:15} largest {np.abs(true).max():.2f}, off by {apart(got, true):.1e}")
    assert apart(got, true) <= 1e-5

# %% [markdown]
# One element of each by the definition of a gradient: move it a little either way, in fp64, and see what the
# loss, the sum of dO × O, does.


# %%
def loss(**moved):
    """The sum of dO x O with some of the inputs in another place."""
    given = {"Q": Q, "K": K, "V": V, "bias": bias} | moved
    return float((dO * oracle.attention(**given, **plain)[0]).sum())


for name, gradient in zip(("Q", "K", "V", "bias"), wanted, strict=True):
    at = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
    step = np.zeros(gradient.shape)
    step[at] = 1e-5
    x = {"Q": Q, "K": K, "V": V, "bias": bias}[name].astype(float)
    slope = (loss(**{name: x + step}) - loss(**{name: x - step})) / 2e-5
    print(f"d{name:4} at {tuple(map(int, at))}: {gradient[at]:.8f}, from differences {slope:.8f}")
    assert abs(slope - gradient[at]) <= 1e-7

# %% [markdown]
# ## 10 Judged
#
# All of this is in the default cases of `python -m verify`: each option, forward and for some of them
# backward, at ragged sizes with more queries than keys and fewer, so that a rule that is off by one fails.
# Here are the options of all at once and three gradients, for the kernel with rules in bf16. The bound is
# twice the error of the plain formula at the same precision, plus a floor.

# %%
kernel = ALL["general"]
for name in ("all_options", "back_window_softcap", "back_alibi", "back_dropout"):
    problem = DEFAULT[name].build("bf16")
    known = judge.reference(problem, problem.dO() if problem.backward else None)
    outputs = calls.outputs(kernel, problem, runner.placed("emulated", [16, 16], seed=0))
    metrics = judge.judge(problem, **outputs, known=known)
    print(f"{name:20}", ", ".join(f"{output} {m.ratio:.2f}" for output, m in metrics.items()), "of the bound")
    assert all(m.ok for m in metrics.values())
print(len(DEFAULT), "default cases,", sum(bool(case.having) for case in DEFAULT.values()), "with options,",
      sum(case.backward for case in DEFAULT.values()), "with gradients")  # fmt: skip

# %% [markdown]
# ## Exercises
#
# 1. A model was trained with `is_causal=True` in PyTorch's function and is served with flash-attn, one new token
#    at a time. Which of the two alignments does each use, and why does nobody notice in training?
# 2. Write the rule of a window of 8 keys, of which the first 4 keys of the sequence are always seen too. Use
#    `or_`. How many of 64 × 64 tiles of 8 does it leave, for 512 queries and keys?
# 3. Which of the panels of section 4 would look different with tiles of 8 × 16, and could `dilated(3)` become
#    cheaper?
# 4. Why may a kernel not take lse from a forward pass that applied dropout before the softmax's sum?
#
# <details><summary>Solutions</summary>
#
# 1. PyTorch's function aligns at the top left; with one query that query would see the first key alone. In
#    training there are as many queries as keys, and the two are the same. Serving code therefore passes
#    `is_causal=False` for a single query, or a function that aligns at the bottom right.
# 2. The cell below: `and_(causal(), or_(window(7, 0), first))`, with a formula for the tiles of `first`. It leaves
#    less than a twentieth.
# 3. All whose borders do not fall on multiples of 16 keys: more tiles are partial. `dilated(3)` cannot become
#    cheaper while a tile holds three neighbouring distances; reordering the keys by their remainder makes three
#    dense blocks of it.
# 4. Because $D_i = \sum_c dO_{ic} O_{ic}$ and $P = e^{S - \text{lse}}$ rest on weights that add to 1 before any is
#    dropped; with other sums P would not come back from lse.
#
# </details>

# %%
first = options.Rule(lambda b, h, i, j: j < 4, tiles=lambda b, h, i0, i1, j0, j1: (j0 < 4) + (j1 <= 4))
rule = options.and_(options.causal(), options.or_(options.window(7, 0), first))
rule = rule.at(options.Frame(1, 1, 512, 512))
kinds = [[rule.tiles(0, 0, i, i + 8, j, j + 8, *rule.aux) for j in range(0, 512, 8)] for i in range(0, 512, 8)]
left = np.count_nonzero(kinds)
print(f"{left} of {64 * 64} tiles, {left / 64**2:.1%}")
assert left / 64**2 < 1 / 20
seen = options.visible(rule, 0, 0, slice(0, 512), slice(0, 512)).reshape(64, 8, 64, 8)
assert left == seen.any(axis=(1, 3)).sum()

# %% [markdown]
# ## Sources
#
# - Dao, *flash-attn* 2.8: docstrings of `flash_attn_interface.py` (layout, alignment, windows, ALiBi).
# - PyTorch documentation of `scaled_dot_product_attention` (layout, `is_causal`, boolean masks, `enable_gqa`).
# - Dong, Feng, Guessous, Liang, He, "Flex Attention", 2024: sections 3 and 4.
# - Press, Smith, Lewis, "Train Short, Test Long", 2022: section 3. Gemma Team, "Gemma 2", 2024: section 2.
# - Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011: section 3.3.
# - In this repository: `refimpl/masks.py`, `refimpl/scores.py`, `refimpl/rule.py`, `numba_cuda/general.py`,
#   `numba_cuda/interface/__init__.py`, `verify/option_cases.py`.
