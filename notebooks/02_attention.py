# %% [markdown]
# # 02 · Attention
#
# *Chapter 18.2. What is computed, under which conventions, what it costs, and how its gradients look.*
#
# ## What you'll do
#
# Compute attention by hand once and by the oracle from then on; switch on scale, masks and grouped heads
# one at a time; count its work and memory; go back through it; and see how far apart two correct answers
# are.
#
# ## What you'll learn
#
# - the conventions that everything else here keeps, each of which some library has chosen otherwise;
# - where the two N × N matrices come from that FlashAttention gets rid of;
# - how large an error is normal, and why "not equal" is not "wrong".
#
# ## What you'll need
#
# Matrix products and the exponential function. No GPU.

# %%
from inspect import getsource

import numpy as np

from figures import error_matrix, tiling
from refimpl import options, oracle, softmax, step0_standard, step3_flash_v2
from refimpl.observe import Trace
from refimpl.tiling import Tile
from verify.cases import DEFAULT, HAND_L, HAND_O
from verify.dtypes import DTYPES
from verify.judge import judge, reference

rng = np.random.default_rng(182)

# %% [markdown]
# ## 1 By hand
#
# A query asks, each key says how well it answers, and the output is the average of the values, weighted by
# the softmax of those scores (Vaswani et al. 2017, equation 1):
#
# $$O = \text{softmax}(\text{scale}\; Q K^T)\, V, \quad \text{scale} = 1 / \sqrt d \text{ by default}$$
#
# Four queries, four keys, small integers, and a scale of $\ln 2$, so that each weight is a power of two
# over a sum:

# %%
problem = DEFAULT["hand"].build("fp64")
Q, K, V = problem.Q[0, 0], problem.K[0, 0], problem.V[0, 0]
weights = np.exp2(Q @ K.T)
for q, row in zip(Q.astype(int), weights, strict=True):
    print(f"q = {q}: 2^(q.k) = {row}, sum {row.sum()}")

# %% [markdown]
# With pencil and paper the rows of O are fractions, and they were written down as such for the tests.
# Beside them, the oracle: attention in fp64 that is not tiled and shares no code with
# what it judges.

# %%
O, lse = oracle.attention(problem.Q, problem.K, problem.V, **problem.options)
for row, wanted, l, sum_of_row in zip(O[0, 0], HAND_O, np.exp(lse[0, 0]), HAND_L, strict=True):
    print("O =", *(f"{w!s:>8}" for w in wanted), "  oracle:", row, f"  l = {sum_of_row}, oracle: {l:.12g}")
assert np.abs(O[0, 0] - np.array(HAND_O, float)).max() <= 1e-14

# %% [markdown]
# The second result, `lse`, is the natural logarithm of each row's sum of $e^{s}$. It is what a backward
# pass needs, and what joins partial results (notebook 04).
#
# ## 2 Why divide by √d
#
# The chapter's argument: if the components of q and k are independent with mean 0 and variance 1, then q.k
# has variance d. Without the scale a larger head dimension makes the softmax sharper, until one key takes
# all; and where a weight $a$ is near 0 or 1, its derivative $a(1 - a)$ is near 0, and nothing is learned.

# %%
print("  d   variance of q.k   scaled   largest weight of 256, unscaled   scaled")
for d in (16, 64, 128, 256):
    q, k = rng.standard_normal((400, d)), rng.standard_normal((256, d))
    s = q @ k.T
    peak, peak_scaled = (softmax.safe(x)[0].max(axis=1).mean() for x in (s, s / np.sqrt(d)))
    print(f"{d:3} {s.var():17.1f} {(s / np.sqrt(d)).var():8.2f} {peak:33.2f} {peak_scaled:8.2f}")
    assert abs(s.var() / d - 1) <= 0.2 and peak >= 3 * peak_scaled

# %% [markdown]
# ## 3 Masks and alignment
#
# A mask removes keys: their score becomes −∞ and their weight exactly 0. Here a mask is a rule, one plain
# expression of the query's position i and the key's position j, and true means *attend*:

# %%
print(getsource(options.causal_mask))

# %% [markdown]
# When there are fewer queries than keys, as in decoding, "position of query row r" needs a convention.
# **bottom_right** puts the last query at the last key; **top_left** puts the first query at the first key.
# Libraries differ, some changed their mind, and both are called causal. Three queries, five keys:

# %%
for align in ("bottom_right", "top_left"):
    rule = options.causal(3, 5, align)
    print(align)
    print(options.visible(rule, 0, 0, slice(0, 3), slice(0, 5)).astype(int))

# %% [markdown]
# With more queries than keys, bottom_right leaves the first rows without any key. The softmax of nothing is
# 0/0, and some libraries return NaN. Here such a row gives O = 0 and lse = −∞, and its gradients are 0:

# %%
Q, K, V = (
    rng.standard_normal((1, 1, 5, 4)),
    rng.standard_normal((1, 1, 3, 4)),
    rng.standard_normal((1, 1, 3, 4)),
)
O, lse = oracle.attention(Q, K, V, causal=True)
print("lse =", lse[0, 0])
print("rows of O that are all 0:", np.flatnonzero((O[0, 0] == 0).all(axis=1)))
assert np.isneginf(lse[0, 0, :2]).all() and np.isfinite(lse[0, 0, 2:]).all() and (O[0, 0, :2] == 0).all()

# %% [markdown]
# A hidden key has no influence at all. That is stronger than "a weight of 0", because 0 × NaN is NaN:
# padding may hold anything, and must not be multiplied with.

# %%
K[0, 0, 2], V[0, 0, 2] = np.nan, np.inf
mask = np.array([True, True, False])
clean, _ = oracle.attention(Q, K[:, :, :2], V[:, :, :2])
padded, _ = oracle.attention(Q, K, V, mask=mask)
print("with NaN behind the mask, O changes by", np.abs(padded - clean).max())
assert np.abs(padded - clean).max() <= 1e-15

# %% [markdown]
# Seen in tiles, a mask is a shape, and that is what later steps exploit: most tiles are hidden as a whole
# or visible as a whole, and only those on the edge have to look at single elements.

# %%
tiling.fig_causal(tiling.data_causal())

# %% [markdown]
# ## 4 Heads that share keys
#
# Query heads may share K and V heads: all of them (multi-query), or in groups (grouped-query). Query head h
# reads K/V head h // (Hq / Hk). It is the same as repeating each K/V head for its group, without the
# copies:

# %%
Q, K, V = (
    rng.standard_normal((1, 6, 10, 4)),
    rng.standard_normal((1, 2, 12, 4)),
    rng.standard_normal((1, 2, 12, 4)),
)
grouped, _ = oracle.attention(Q, K, V)
repeated, _ = oracle.attention(Q, K.repeat(3, axis=1), V.repeat(3, axis=1))
print(f"largest difference: {np.abs(grouped - repeated).max():.1e}")
assert np.abs(grouped - repeated).max() <= 1e-14

# %% [markdown]
# What it saves is the cache of K and V that decoding reads for every token. For the shapes of two published
# models at 32 K tokens in fp16, in both of the units that are called "GB":

# %%
N = 32768
print("model          layers  K/V heads  cache")
for name, layers, Hk, d in (
    ("LLaMA 7B", 32, 32, 128),
    ("LLaMA 2 70B", 80, 8, 128),
    ("  were it MHA", 80, 64, 128),
):
    cache = 2 * layers * Hk * N * d * 2
    print(f"{name:14} {layers:6} {Hk:10}  {cache / 1e9:5.1f} GB = {cache / 2**30:5.1f} GiB")

# %% [markdown]
# ## 5 Work and memory
#
# Two products of N × N × d, each a multiplication and an addition: $4 N^2 d$ floating-point operations a
# head, half of that when causal, and the exponentials beside them. The memory that standard attention needs
# is S and P. Both grow with the square of the length:

# %%
d = 128
print("     N      4 N² d    S and P in fp16     Q, K, V, O in fp16")
for N in (512, 2048, 8192, 32768, 131072):
    flops, square, linear = 4 * N * N * d, 2 * 2 * N * N, 4 * 2 * N * d
    print(f"{N:6} {flops / 1e9:9.1f} G {square / 2**20:14,.0f} MiB {linear / 2**20:18,.1f} MiB")

# %% [markdown]
# When does attention overtake the rest of a layer? With model width D the four projections and a
# feed-forward block of width 4 D cost $24 N D^2$ operations, attention over all heads $4 N^2 D$. They are
# equal at $N = 6 D$:

# %%
for D in (1024, 4096, 8192):
    N = 6 * D
    rest, attention = 24 * N * D * D, 4 * N * N * D
    print(f"D = {D}: equal at N = {N:,}; causal attention does half and needs {2 * N:,}")
    assert rest == attention

# %% [markdown]
# The count is not only a formula. A step reports each tile that it visits, and a tile of Br × Bc costs 4 Br
# Bc d:

# %%
Q, K, V = (rng.standard_normal((1, 1, 256, 32)) for _ in "QKV")
trace = Trace()
step3_flash_v2.attention(Q, K, V, tile=Tile(32, 64), observe=trace)
counted = sum(4 * 32 * 64 * 32 for _ in trace.visits)
print(f"{len(trace.visits)} tiles, {counted:,} operations; 4 N² d = {4 * 256 * 256 * 32:,}")
assert counted == 4 * 256 * 256 * 32

# %% [markdown]
# ## 6 Gradients
#
# The derivative of a softmax $a$ is $\partial a_i / \partial s_j = a_i (\delta_{ij} - a_j)$, so a gradient
# goes back through it as $ds = a \circ (da - \langle a, da \rangle)$: one inner product, and no Jacobian.
# With the products before and after, and dO the gradient of the output:
#
# $$dV = P^T dO, \quad dP = dO\,V^T, \quad dS = P \circ (dP - D),$$
#
# $$dQ = \text{scale}\; dS\,K, \quad dK = \text{scale}\; dS^T Q,$$
#
# with $D_i = \sum_j P_{ij}\, dP_{ij}$, over all keys of the row. Read with the equations above, in fp64:

# %%
Q, K, V, dO = (rng.standard_normal((1, 1, 24, 8)) for _ in range(4))
scale = 1 / np.sqrt(8)
P = softmax.safe(scale * Q @ K.swapaxes(-1, -2))[0]
dP = dO @ V.swapaxes(-1, -2)
dS = P * (dP - (P * dP).sum(axis=-1, keepdims=True))
by_formula = scale * dS @ K, scale * dS.swapaxes(-1, -2) @ Q, P.swapaxes(-1, -2) @ dO
for name, a, b in zip(("dQ", "dK", "dV"), by_formula, oracle.attention_backward(Q, K, V, dO), strict=False):
    print(f"{name}: largest difference from the oracle {np.abs(a - b).max():.1e}")
    assert np.abs(a - b).max() <= 1e-13

# %% [markdown]
# A gradient predicts how the loss changes. Move K a little in a random direction and look:

# %%
direction, h = rng.standard_normal(K.shape), 1e-5
up, down = ((dO * oracle.attention(Q, K + sign * h * direction, V)[0]).sum() for sign in (1, -1))
predicted = (by_formula[1] * direction).sum()
print(f"predicted {predicted:.9f}, found {(up - down) / (2 * h):.9f}")
assert abs((up - down) / (2 * h) - predicted) <= 1e-7

# %% [markdown]
# The backward pass uses P twice, for dV and for dS. Keeping it from the forward pass is what makes the
# memory of training grow with N²; S itself is not needed once P is there.
#
# ## 7 Why is it not equal?
#
# Run two correct programs and compare them with `==`, and the answer is no. It is the question that
# libraries of fast kernels get most often. Adding in another order rounds differently, and rounding to 16
# bits is coarse. The same attention by two steps in fp32:

# %%
problem = DEFAULT["square"].build("fp32")
O_exact, _ = oracle.attention(problem.Q, problem.K, problem.V)
O_0, _ = step0_standard.attention(problem.Q, problem.K, problem.V, dtype=np.float32)
O_3, _ = step3_flash_v2.attention(problem.Q, problem.K, problem.V, dtype=np.float32, tile=Tile(16, 16))
print(f"elements that are equal to the bit: {(O_0 == O_3).mean():.0%}")
print(f"largest difference between the two: {np.abs(O_0 - O_3).max():.1e}")
print(f"their errors against fp64: {np.abs(O_0 - O_exact).max():.1e} and {np.abs(O_3 - O_exact).max():.1e}")
assert 0 < np.abs(O_0 - O_3).max() <= 1e-6

# %% [markdown]
# Neither is "the" answer; both are about as near to the true one. So the useful question is how far from
# the truth a *reasonable* program would be. Here that is the **plain formula at the same precision**:
# inputs as stored, everything else in fp32, P rounded to the storage type as tensor cores need it, the
# output rounded. A kernel passes if its error is at most twice that, plus a floor of 2 units in the last
# place of the output's type times the largest value.

# %%
print("        error of step3   plain formula    bound: 2 × plain + floor    a-priori bound")
for dtype in ("fp32", "fp16", "bf16"):
    problem = DEFAULT["square"].build(dtype)
    O, lse = step3_flash_v2.attention(problem.Q, problem.K, problem.V, dtype=np.float32, tile=Tile(16, 16))
    m = judge(problem, O.astype(DTYPES[dtype].numpy), lse, known=reference(problem))["O"]
    print(f"{dtype:6} {m.max_abs:14.1e} {m.plain:15.1e} {m.bound:20.1e} {m.apriori:24.1e}")
    assert m.ok and m.max_abs <= m.apriori

# %% [markdown]
# The error grows with the unit in the last place: bf16 has three bits less than fp16, so its errors are
# larger, although its *range* is that of fp32. (The chapter has this the other way round.) The last column
# was derived from d, N and the sizes of the inputs before anything was run, and holds whatever the order of
# the sums.

# %%
for name in ("fp32", "fp16", "bf16"):
    kind = DTYPES[name]
    print(f"{name}: one unit in the last place at 1 is {kind.ulp:.1e}, smallest number {kind.subnormal:.1e}")
assert DTYPES["bf16"].ulp == 8 * DTYPES["fp16"].ulp

# %% [markdown]
# All steps on all default cases, the error as a share of the bound. Each case is a way in which kernels
# have been wrong:

# %%
error_matrix.fig_kernels(error_matrix.data_kernels())

# %% [markdown]
# ## Exercises
#
# 1. Add a constant to every score of a row. What happens to O, what to lse? Which of the two can a check
#    use that has no reference at all?
# 2. What is O when all keys are equal? When V is 1 everywhere? Try both with a mask.
# 3. A causal mask built from `j < i` instead of `j <= i` hides one key too many. In which row does it show
#    first, and what does that row give?
# 4. Softmax in fp16 without taking out the maximum: from which score on does the exponential overflow?
#
# <details><summary>Solutions</summary>
#
# 1. $e^{s + c} / \sum e^{s + c}$: c cancels, so O stays and lse grows by c. That O does not move is a check
#    without a reference (a *metamorphic* one), at any length.
# 2. The average of the visible V; and exactly 1, as weights add to 1 (0 in a row that sees nothing). The
#    second is a good check of the bookkeeping of l, again without a reference.
# 3. In the first row: with equal lengths it sees only its own key, and now none. It gives 0 by our
#    convention and NaN by others. Written as rows and columns, `<=` is the lower triangle with the
#    diagonal.
# 4. Above $\ln 65504$; the last cell prints it. Scores beyond that are ordinary in trained models.
#
# </details>

# %%
limit = np.log(np.finfo(np.float16).max)
print(f"exp overflows fp16 above {limit:.2f}")
ones, _ = oracle.attention(Q, K, np.ones_like(V), causal=True)
print(f"V = 1: largest difference of O from 1: {np.abs(ones - 1).max():.1e}")
assert np.abs(ones - 1).max() <= 1e-15

# %% [markdown]
# ## Sources
#
# - Vaswani et al., "Attention is all you need", 2017: section 3.2.
# - Shazeer, "Fast transformer decoding: one write-head is all you need", 2019; Ainslie et al., "GQA", 2023.
# - Touvron et al., "LLaMA", 2023, and "Llama 2", 2023: the shapes in section 4.
# - In this repository: `refimpl/oracle.py`, `refimpl/options.py`, `verify/tolerance.py`.
