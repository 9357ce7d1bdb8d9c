# %% [markdown]
# # 10 · Twelve errors
#
# *The whole chapter, 18.1 to 18.8. Where not to believe it, and what holds instead.*
#
# ## What you'll do
#
# Read twelve statements of the chapter, recompute each, and see in a picture or a few lines how far off
# it is and why. They are the ones that would cost a reader most: code that computes something else,
# numbers that decide a purchase or a design, a mental picture of the algorithm that is upside down.
#
# ## What you'll learn
#
# - the checks that find such errors: run it on a second tile, compare with the least possible, divide the
#   work by the time;
# - which slips come back in several places because they have one cause;
# - how to look up any other number of the chapter.
#
# ## What you'll need
#
# Notebooks 02 to 04 for the words. No GPU.

# %%
import textwrap
from inspect import getsource
from itertools import product

import numpy as np

from figures import claims, error_claims, hbm_traffic, mask_claims, rate_claims
from refimpl import backward, options, oracle, step2_flash_v1, step3_flash_v2
from refimpl.observe import Tally, Trace
from refimpl.tiling import Tile, spans
from verify.claims import emulate, listings_18_4, listings_18_5, listings_18_6, report
from verify.claims.hardware import A100, H100
from verify.claims.ledger import VERDICTS, leaves, load

rng = np.random.default_rng(18)

# %% [markdown]
# ## The ledger
#
# Every number, formula, table, listing and statement about a library that the chapter makes is an entry
# of `verify/claims`: what the text says, in our words; what it states, as data; and a small function
# that computes what is true without looking at it. The verdict follows from comparing the two. How many
# there are of each:

# %%
LEDGER, shown = load(), set()
totals = {verdict: sum(claim.verdict == verdict for claim in LEDGER.values()) for verdict in VERDICTS}
print(", ".join(f"{count} {verdict}" for verdict, count in totals.items()), "of", len(LEDGER))
claims.fig_verdicts(claims.data_verdicts())

# %% [markdown]
# *Inconsistent*: another place of the chapter contradicts it. *Units*: right but for the unit.
# *Depends*: true under one reading only. *Unverifiable*: possible, and nobody can rerun it. A chapter
# of this size has errors; the point is to know which. This prints an entry after running its
# recomputation again:


# %%
def few(value, most):
    """The first leaves of a value on one line."""
    flat = list(leaves(value).items())
    rest = f"; … {len(flat)} in all" if len(flat) > most else ""
    return report.short(dict(flat[:most]), 1000) + rest


# %%
def show(*ids, most=6):
    """Recompute entries and print them, cut to where they disagree if stated and found are alike."""
    for id in ids:
        claim = LEDGER[id]
        outcome = claim.recompute()
        assert outcome.verdict == claim.verdict != "confirmed"
        shown.add(id)
        stated, found = (few(side, most) for side in report.telling(claim, outcome))
        print(f"{id}  {outcome.verdict}: {claim.title_en} {claim.title_zh}, {claim.section} {claim.where}")
        text = {"says": claim.paraphrase, "stated": f"{stated} {claim.unit}", "found": found}
        for name, line in (text | {"right": claim.right}).items():
            print(textwrap.indent(textwrap.fill(f"{name:8}{line}", 88, subsequent_indent=" " * 8), "   "))


# %% [markdown]
# ## 1 Rows that see nothing
#
# Add a causal mask and a padding mask, and every score that either hides is −∞. That is right as long
# as some key is left:

# %%
show("18.2-015", "18.7-064")

# %% [markdown]
# In a batch that is going to be continued, short texts are padded on the *left*, so that all end at the
# same place. Then the first rows see only padding, and the softmax of nothing is 0/0. The text's advice
# elsewhere, to pad on the right, has the sides swapped. Nobody reads a padding row; but it is a key and
# a value of the next layer, and a weight of 0 does not hide a NaN:
#
# $$0 \times \text{NaN} = \text{NaN}.$$

# %%
right, left, later = mask_claims.data_padding()
rows = [np.isnan(panel.weights).any(axis=1) for panel in (right, left, later)]
print("rows that are NaN:", ", ".join(f"{bad.sum()} of {len(bad)}" for bad in rows))
assert not rows[0].any() and not left.wanted[rows[1]].any() and rows[2].all()

Q, K, V = (rng.standard_normal((1, 1, len(left.wanted), 4)) for _ in "QKV")
O, _ = oracle.attention(Q, K, V, mask=left.wanted)
deeper, _ = oracle.attention(O, O, O, mask=left.wanted)
print("with O = 0 in such rows, one layer on:", "no NaN" if np.isfinite(deeper).all() else "NaN")
assert np.isfinite(deeper).all() and (O[0, 0, rows[1]] == 0).all()

# %%
mask_claims.fig_padding([right, left, later])

# %% [markdown]
# ## 2 One kernel, three intensities
#
# Intensity is operations over bytes, and decides whether memory is the limit. For the tiled kernel at
# the same head dimension the chapter gives three formulas whose values are orders of magnitude apart,
# and its value for the standard kernel is off as well:

# %%
show("18.1-005", "18.3-031", "18.3-042", "18.3-051", "18.6-067")

# %% [markdown]
# Two slips are behind them. $4 N^2 d$ operations over $8 N d$ bytes are $N / 2$: the d cancels. And M,
# in $N^2 d^2 / M$, is what *one block* can keep, counted in elements; the chapter puts in the bytes of
# all SMs together. The check that catches it is to compare with the least that any method moves:

# %%
N, d, M = 4096, 64, 20 * 2**20
print(f"N² d² / M with M = {M:,}: {N**2 * d**2 / M:9,.0f} elements")
print(f"Q, K, V, O of one head:     {4 * N * d:9,} elements")
assert N**2 * d**2 / M < 4 * N * d
for Br in (64, 128, 192, 256):
    intensity = 4 * N * N * d / hbm_traffic.fills("step3_flash_v2", N, Tile(Br, 64))
    sides = [f"{'left' if intensity < g.ridge else 'right'} of the {g.name} ridge" for g in (A100, H100)]
    print(f"step 3, tiles of {Br:3} rows: {intensity:4.0f} FLOP a byte, {', '.join(sides)}")

# %% [markdown]
# The intensity of a tiled kernel is about its tile height. That is near the ridge, not hundreds of
# times beyond it, and it is why tile sizes, and what the L2 cache serves, are worth a section:

# %%
data = claims.data_intensity()
stated = [row.stated for row in data if "tiled" in row.label]
beyond = [row.stated / g.ridge for row, g in zip(data[2:4], (A100, H100), strict=True)]
print(f"stated for d = 64: {min(stated):,} to {max(stated):,}; over the ridge: {beyond[0]:.0f} and {beyond[1]:.0f}")
assert max(stated) / min(stated) > 1e3 and min(beyond) > 100
claims.fig_intensity(data)

# %% [markdown]
# ## 3 Less than nothing
#
# The table that most readers will quote has FlashAttention's traffic by length, and how many times less
# it is:

# %%
show("18.3-045", "18.3-046")

# %% [markdown]
# Reading Q, K and V once and writing O once is compulsory. From the fourth row on the table is below
# that. Counted while the reference runs, for the row that is quick to run:

# %%
N, d = 512, 64
tally = Tally()
Q, K, V = (rng.standard_normal((1, 1, N, d)) for _ in "QKV")
step3_flash_v2.attention(Q, K, V, tile=Tile(128, 64), observe=tally)
print(f"counted {tally.hbm_bytes(e=2) / 1e6:.2f} MB at N = {N}, with lse; compulsory {8 * N * d / 1e6:.2f} MB")
below = 0
for row, mb in LEDGER["18.3-045"].stated.items():
    least = 8 * int(row.split("=")[1]) * d / 1e6
    below += mb < least
    print(f"{row:9}  stated {mb:4} MB, compulsory {least:5.2f} MB" + ", impossible" * (mb < least))
assert below == 3

# %% [markdown]
# Both methods move bytes in proportion to N², so their ratio settles: at $2 B_r / d$, whatever the
# length. A ratio that grows with N would need traffic that does not.

# %%
claims.fig_traffic(claims.data_traffic())

# %% [markdown]
# ## 4 Weights that add up to more than one
#
# The function that merges a block of scores into the running maximum and sum:

# %%
show("18.4-016")
print()
print(getsource(listings_18_4.accumulate))

# %% [markdown]
# m and l come out right, so a test of those passes. But the block's exponentials were taken against the
# block's *own* maximum, which is forgotten; a caller can rescale what it had, not what it gets. Two
# keys with scores 0 and ln 3, a block each, V the identity, so that O is the weights, in both orders:

# %%
for repaired, order in product((False, True), ((0, 1), (1, 0))):
    m, l, O = np.full(1, -np.inf), np.zeros(1), np.zeros((1, 2))
    for key in order:
        x = np.array([[(0.0, np.log(3))[key]]])
        m_new, l, P = listings_18_4.accumulate(m, l, x, repaired)
        O = np.exp(m - m_new)[:, None] * O + P @ np.eye(2)[[key]]
        m = m_new
    weights = O[0] / l
    name = "repaired" if repaired else "printed"
    print(f"{name:8}  l = {l[0]:.3f} with {weights}, sum {weights.sum():.2f}; keys in order {order}")
    assert np.allclose(weights, [0.25, 0.75], rtol=1e-12) == (repaired or order == (0, 1))

# %% [markdown]
# Right is ¼ and ¾. As long as each block brings a new maximum nothing shows; when it does not, the
# block counts for too much. The other fault is that of section 1 again: a block that is masked as a
# whole has maximum −∞, and −∞ − (−∞) is NaN, here for good:

# %%
with np.errstate(invalid="ignore"):
    for repaired in (False, True):
        m, l = np.full(1, -np.inf), np.zeros(1)
        for block in ([[-np.inf, -np.inf]], [[1.0, 2.0]]):
            m, l, _ = listings_18_4.accumulate(m, l, np.array(block), repaired)
        print("repaired" if repaired else "printed ", f" m = {m[0]}, l = {l[0]:.4f}")
        assert np.isfinite(l[0]) == repaired

# %% [markdown]
# ## 5 Version 1 in version 2's clothes
#
# Four statements about version 1 describe version 2, or the reverse of version 1:

# %%
show("18.4-003", "18.4-027", "18.4-028", "18.4-047")

# %% [markdown]
# It matters because the loop order *is* the difference between the versions. With K and V outside, as
# in the 2022 paper, every query tile's state goes out to HBM and comes back at each visit; with Q
# outside it never leaves the chip. The tiles (i, j) in the order visited, and what is stored:

# %%
Q, K, V, dO = (rng.standard_normal((1, 1, 64, 8)) for _ in range(4))
tile = Tile(16, 32)
for step in (step2_flash_v1, step3_flash_v2):
    trace, tally = Trace(), Tally()
    O, lse = step.attention(Q, K, V, tile=tile, observe=trace)
    step.attention(Q, K, V, tile=tile, observe=tally)
    name = step.__name__.removeprefix("refimpl.")
    print(f"{name:15}", *(f"({v.i},{v.j})" for v in trace.visits), "  O_acc stored:", tally.stores["O_acc"])
    assert (tally.stores["O_acc"] > 0) == (step is step2_flash_v1)

# %% [markdown]
# Backwards it is the same question. What the inner loop adds to has to go round; in version 1's order
# that is dQ, while dK and dV stay on chip and are written once:

# %%
for order in ("v1", "v2"):
    tally = Tally()
    backward.attention_backward(Q, K, V, O, lse, dO, order=order, tile=tile, observe=tally)
    partial = {name: count for name, count in tally.stores.items() if name.endswith("_acc")}
    once = {name: tally.stores[name] for name in ("dQ", "dK", "dV")}
    print(f"order {order}: written once {once}; partial sums {partial or 'none'}")
    assert (set(partial) == {"dQ_acc"}) == (order == "v1")

# %% [markdown]
# (Version 2 of the library keeps K and V outside in the backward pass and adds dQ up with atomics; the
# order called v2 here takes two passes instead, to be free of them.)
#
# ## 6 A row sum over part of the row
#
# The gradient of the scores needs one number a row, $D_i = \sum_j P_{ij}\, dP_{ij}$, over *all* keys.
# The tiled backward pass of the chapter takes it over the keys of one tile, and says that the result is
# the standard one:

# %%
show("18.4-045", "18.4-046")

# %% [markdown]
# One key tile holds the whole row, so the listing passes the test that one tries first. With two it is
# wrong in dQ and dK by about the size of the gradients, and dV, which needs no D, stays right:

# %%
data = error_claims.data_rowsum()
for name in ("dQ", "dK", "dV"):
    one, two = data.per_tile[name][:2]
    print(f"{name}: one key tile {one:.0e}, two {two:.0e}; with D of the row {data.per_row[name][1]:.0e}")
assert all(data.per_tile[name][0] <= 1e-12 and data.per_tile[name][1] > 0.1 for name in ("dQ", "dK"))
assert max(max(errors) for errors in data.per_row.values()) <= 1e-12 >= max(data.per_tile["dV"])
error_claims.fig_rowsum(data)

# %% [markdown]
# The repair costs nothing: $D_i$ is also the row sum of $dO \circ O$ (notebook 04), known before the
# loop from an O that the listing loads and never uses. The FP8 version in 18.6 has no D at all, and dV
# where dO belongs; and version 3 has no such kernel:

# %%
show("18.6-090", "18.6-022")
one_head = [x[0, 0] for x in (Q, K, V, dO)]
wanted = [g[0, 0] for g in oracle.attention_backward(Q, K, V, dO)[:3]]
print("off by           dQ      dK      dV")
for form in (listings_18_6.sketch, listings_18_6.kindly, listings_18_6.mended):
    errors = [np.abs(a - b).max() for a, b in zip(form(*one_head), wanted, strict=True)]
    print(f"   {form.__name__:10}", *(f"{e:7.0e}" for e in errors))
    assert (max(errors) <= 1e-12) == (form is listings_18_6.mended)

# %% [markdown]
# (*kindly* reads the dV as a slip for dO. All in fp64: this is the formula, before any rounding to
# FP8.)
#
# ## 7 Range is not precision
#
# bf16 has fp32's range, and the chapter concludes that its errors are smaller:

# %%
show("18.4-075")

# %% [markdown]
# A rounding error does not depend on the range unless something overflows, and softmax weights lie
# between 0 and 1. It depends on the bits of the mantissa, of which bf16 has three fewer. Emulated, with
# products of rounded operands and sums in fp32:

# %%
data = error_claims.data_storage()
print("output     fp16       bf16     bf16 / fp16   stated")
for name in data["fp16"]:
    low, high = data["bf16"][name], data["fp16"][name]
    print(f"{name:6} {high:10.1e} {low:10.1e} {low / high:11.1f} {data['stated'][name] / high:11.1f}")
    assert 7 <= low / high <= 9
error_claims.fig_storage(data)

# %% [markdown]
# ## 8 A causal mask that leaks
#
# Of the key tiles that a row of tiles visits, only those on the diagonal need the mask. The chapter
# takes it for granted that this is one tile, the last:

# %%
show("18.5-044", "18.5-093", "18.5-094")

# %% [markdown]
# With equal tiles that is true, and the tests pass. With more rows than columns, or tiles that are not
# aligned, the diagonal crosses two tiles of a row of tiles, and in the first of them rows read their
# future. In training it shows as a loss that is too good. The kernel as printed, on random input:

# %%
print(getsource(listings_18_5.last_tile_masked))
panels = mask_claims.data_leak()
N = len(panels[0].wanted)
for panel in panels:
    on_edge = 0
    for rows in spans(N, panel.tile.Br):
        kinds = [options.classify(options.causal(N, N), 0, 0, rows, cols) for cols in spans(N, panel.tile.Bc)]
        on_edge = max(on_edge, kinds.count(options.TileClass.PARTIAL))
    print(f"{panel.title}: key tiles on the diagonal, in a row of tiles: {on_edge}; {panel.below}")
    assert (on_edge > 1) == (panel.classes == mask_claims.LEAKED).any()
mask_claims.fig_leak(panels)

# %% [markdown]
# The repair is one comparison: mask every tile whose last key is later than the first query, $(j + 1)
# B_c - 1 > q_\text{start}$. Step 4 asks `classify` and never has to know.
#
# ## 9 Faster than the hardware
#
# A printed time is a claim about a rate:

# %%
show("18.5-061", "18.5-062", "18.5-064", most=4)

# %% [markdown]
# Divide the operations by the time, with half of them if the mask is causal:

# %%
data = rate_claims.data_rates()
for row in data.rows:
    over = [" above the peak"] * (row.full > data.peak) + [" even if causal"] * (row.causal > data.best)
    print(f"{row.label:25} {row.ms:6.2f} ms {row.causal:4.0f} TFLOP/s or {row.full:4.0f}", *over)
assert sum(row.full > data.peak for row in data.rows) == 2
rate_claims.fig_rates(data)

# %% [markdown]
# The table does not say whether the mask is causal; one row is impossible either way, another one if it
# is not, and the batch of four takes longer than the batch of eight. The source that it names has no
# such numbers. Its column of speedups is the quotient of two columns, and *that* is right: a table can
# be consistent and still nobody's measurement.
#
# ## 10 Shares of a GPU that does not exist
#
# Two tables of version 3 have utilisation columns:

# %%
show("18.6-029", "18.6-068", "18.6-069")

# %% [markdown]
# A rate and its share of the peak give the peak; an intensity and a bandwidth give the largest share:

# %%
data = rate_claims.data_utilisation()
for row, (peak, kind) in data.peaks.items():
    real = {"BF16": H100.fp16, "FP8": H100.fp8}[kind]
    print(f"{row:20} implies a peak of {peak:5,.0f} TFLOP/s; an H100 has {real:5,.0f}")
    assert peak < 0.6 * real
for d, shares in data.stated.items():
    print(f"{d:7} stated {shares['v2']} and {shares['v3']} %; HBM allows {data.limit[d]:2.0f} %")
    assert min(shares.values()) > data.limit[d]
rate_claims.fig_utilisation(data)

# %% [markdown]
# The first table divides by a peak that no H100 has. The second sets an intensity beside a share that
# the same intensity rules out: its intensities are those of standard attention (section 2). Both
# columns look plausible alone; it takes the product of two columns to see that they cannot both be
# true.
#
# ## 11 True means attend
#
# The chapter ends its installation guide with a check of the freshly built kernel against PyTorch. The
# reference gets a boolean mask:

# %%
show("18.7-120", "18.7-071")

# %% [markdown]
# In PyTorch's `scaled_dot_product_attention` a true element of a boolean mask takes part; in its
# `MultiheadAttention` it is hidden. Here the reference sees the future and nothing else, and the last
# row nothing at all. A right kernel fails the check. The second entry has the same kind of slip,
# quieter: −1 for the left side of a window means no limit, so that together with a causal mask there is
# no window, and everything works, at full cost. The masks as they act:

# %%
inverted, opposite, window = mask_claims.data_handed()
for panel in (inverted, opposite, window):
    leaked, missed = (panel.classes == mask_claims.LEAKED).sum(), panel.missing.sum()
    title = " ".join(panel.title.split())
    print(f"{title:36} {leaked:3} pairs too many, {missed:3} missing")
assert inverted.missing.sum() == inverted.wanted.sum() and not opposite.missing.any()
assert (window.weights > 0).sum() == len(window.wanted) * (len(window.wanted) + 1) // 2
mask_claims.fig_handed([inverted, opposite, window])

# %% [markdown]
# ## 12 A thousand blocks, a thousand times as fast
#
# In decoding there is one query, and splitting the keys over blocks is what fills the GPU:

# %%
show("18.8-026")

# %% [markdown]
# The blocks do not have a memory each. Splitting helps until together they read as fast as HBM
# delivers, and not beyond:

# %%
print(LEDGER["18.8-026"].recompute().detail)
data = rate_claims.data_splits()
print(f"HBM is busy all the time from {np.ceil(data.gain[1]):.0f} blocks on; the A100 has {A100.sms} SMs")
assert data.gain[1] < A100.sms < data.gain[0]
rate_claims.fig_splits(data)

# %% [markdown]
# ## Exploring the ledger
#
# What was printed here is also on the command line:
#
# | command | gives |
# | --- | --- |
# | `python -m verify claims` | every entry, worst first, and the counts |
# | `python -m verify claims --id 18.4-046,18.3-045` | entries in full, with source and why |
# | `python -m verify claims --section 18.7 --verdict wrong` | the wrong ones of a section |
# | `python -m verify claims --html claims.html` | one page to search, with links to the notebooks |
# | `python -m verify claims --coverage` | which entries judge which table, figure and listing |
#
# Each entry is a few lines in `verify/claims/`; the easiest way to doubt one is to read its function.
# An entry is also a promise: a test changes the stated value and expects another verdict. The entries
# of severity 3, which lead to wrong results or decisions, that were not shown above:

# %%
severe = [claim for claim in LEDGER.values() if claim.severity == 3 and claim.id not in shown]
print(len(severe), "more:")
for group in dict.fromkeys(claim.group for claim in severe):
    titles = [f"{c.title_en} ({c.id.split('-')[1]})" for c in severe if c.group == group]
    print(textwrap.fill(f"{group:5} {'; '.join(titles)}", 96, subsequent_indent=" " * 6))

# %% [markdown]
# ## Exercises
#
# 1. Table 18-18 gives version 2's backward pass 1.82 ms for one size and 6.74 ms for another with twice the
#    operations. What do you expect of the ratio, and what does the ledger say (18.5-067)?
# 2. For which tiles is masking the last one enough? Guess from the three pictures of section 8, then let
#    all tile sizes up to 12 answer.
# 3. Section 7 compares each type with fp64 on its *own* rounded inputs. What becomes of the factor if both
#    are compared with fp64 on the inputs before rounding?
# 4. Section 12 is about one head. How much can splitting gain with 8 K/V heads, where the unsplit kernel
#    has a block for each?
#
# <details><summary>Solutions</summary>
#
# 1. About two: with the same head dimension and long rows the rate hardly changes. The table's ratio is
#    nearly four, as if doubling N had been counted and halving the batch forgotten.
# 2. When the last tile holds all keys from the row tile's second on: if $B_r$ divides $B_c$, and always for
#    $B_r \le 2$, because a row sees its own key. The cell below finds no other.
# 3. It stays: what rounding the inputs does is also proportional to the unit in the last place.
# 4. HBM is shared by all heads, so the gain is that of one head divided by 8: the cell below. The more heads
#    there are, the less is left for splitting.
#
# </details>

# %%
show("18.5-067")
for Br, Bc in product(range(1, 13), repeat=2):
    # The key tiles where the row tile from q on has keys that its first row must not see.
    crossed = [{key // Bc for key in range(q + 1, q + Br)} for q in range(0, 4 * Br * Bc, Br)]
    assert all(len(tiles) <= 1 for tiles in crossed) == (Bc % Br == 0 or Br <= 2)
Q, K, V = rng.standard_normal((3, 256, 64))
exact = emulate.exact(Q, K, V)
errors = [np.abs(emulate.flash_forward(Q, K, V, dtype=t) - exact).mean() for t in ("bf16", "fp16")]
print(f"3: bf16 errs {errors[0] / errors[1]:.1f} times as much as fp16 against unrounded inputs")
assert 7 <= errors[0] / errors[1] <= 9
print(f"4: one head at most {data.gain[1]:.1f} times, 8 heads {data.gain[1] / 8:.1f} times")

# %% [markdown]
# ## Sources
#
# - Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022: algorithms 1 and 4, theorem 2, appendix B.
# - Dao, "FlashAttention-2", 2023: sections 3.1 to 3.3, algorithms 1 and 2, table 1, figures 4 to 7.
# - Shah et al., "FlashAttention-3", 2024: section 3.3; the repository `Dao-AILab/flash-attention`, `hopper/`.
# - Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023.
# - PyTorch documentation, `scaled_dot_product_attention`; Transformers, `modeling_mistral.py`.
# - NVIDIA's data sheets of the A100 and H100, as cited in `verify/claims/hardware.py`.
# - In this repository: `verify/claims/`, with a source in each entry that needs one.
