# %% [markdown]
# # 04 · FlashAttention, version 1
#
# *Chapter 18.4. One pass over the keys, nothing N × N in memory, and the same answer.*
#
# ## What you'll do
#
# Take softmax apart until it can be computed in pieces, put the pieces into two loops over tiles, and
# follow one row through them. Then do the same backwards.
#
# ## What you'll learn
#
# - why a maximum and a sum are all that a row has to remember;
# - why the order of the tiles does not matter to the answer, and matters to the traffic;
# - what "exact" means, and what it does not;
# - how a backward pass does without the matrix that the forward pass never stored.
#
# ## What you'll need
#
# Notebooks 02 (what attention is) and 03 (what traffic costs). No GPU.

# %%
from inspect import getsource

import numpy as np

from figures import hbm_traffic, online_softmax
from refimpl import backward, oracle, softmax, step0_standard, step1_fused, step2_flash_v1, step3_flash_v2
from refimpl.observe import Tally, Trace
from refimpl.tiling import Tile, cdiv, spans
from verify.cases import DEFAULT
from verify.judge import judge, reference

rng = np.random.default_rng(184)

# %% [markdown]
# ## 1 The obstacle
#
# A tile of scores, $S_{ij} = \text{scale}\; Q_i K_j^T$, needs a tile of Q and a tile of K: it fits on chip,
# and product kernels have always been cut up like this. A tile need not divide the length, so the last one
# is short.

# %%
N, Bc = 50, 16
for cols in spans(N, Bc):
    print(f"keys {cols.start:2} .. {cols.stop - 1:2}: {cols.stop - cols.start} of them")
print(f"Tc = ceil({N} / {Bc}) = {cdiv(N, Bc)} tiles")

# %% [markdown]
# The obstacle is the softmax between the two products. A weight is
#
# $$P_{ij} = \frac{e^{s_{ij} - m_i}}{l_i}, \qquad m_i = \max_j s_{ij}, \qquad l_i = \sum_j e^{s_{ij} - m_i},$$
#
# and both $m_i$ and $l_i$ depend on the whole row. Read literally that is three sweeps over the row: one
# for the maximum, one for the sum, one for the weights.

# %%
print(getsource(softmax.three_pass))

# %% [markdown]
# Milakov and Gimelshein (2018, algorithm 3) take the first two sweeps together. When a tile brings a larger
# maximum, the sum so far was taken with the wrong one; one factor mends it:
#
# $$m^\text{new} = \max(m, \tilde m), \quad \alpha = e^{m - m^\text{new}},
# \quad l^\text{new} = \alpha\, l + \tilde l.$$

#
# ($\tilde m$ and $\tilde l$ are the tile's own maximum and its own sum, the latter taken with the new
# maximum.)

# %%
print(getsource(softmax.online))

# %% [markdown]
# The claim is that the result is that of the definition, whatever the tile. All three, on scores wide
# enough to overflow a naive `exp`:

# %%
S = 400 * rng.standard_normal((64, 1000))
P, lse = softmax.safe(S)
for Bc in (1, 7, 64, 1000):
    for sweep in (softmax.three_pass, softmax.online):
        P_tiled, lse_tiled = sweep(S, Bc)
        worst = max(np.abs(P_tiled - P).max(), np.abs(lse_tiled / lse - 1).max())
        print(f"{sweep.__name__:10}  Bc = {Bc:4}  largest difference {worst:.1e}")
        assert worst <= 1e-13

# %% [markdown]
# ## 2 What a row remembers
#
# The third sweep goes too, because what is wanted is not P but $O = P V$, and O can be mended with the same
# factor as $l$. What a row knows after some of its keys is a triple $(m, l, O)$, and two triples about
# different keys can be joined:

# %%
print(getsource(softmax.merge))

# %% [markdown]
# This is the whole of FlashAttention's mathematics. Joining is associative and commutative and has a
# neutral element (the row that has seen no key), so keys may be visited in tiles, in any order, by anyone,
# and joined in the end. Here eleven groups of keys, chosen at random, are attended to alone, by the oracle;
# their outputs are joined in random pairings, and one row that has seen nothing is joined in too.

# %%
Q, K, V = (rng.standard_normal((1, 1, n, 8)) for n in (4, 80, 80))
O, lse = oracle.attention(Q, K, V, scale=3)
for trial in range(5):
    parts = np.array_split(rng.permutation(80), 11)
    answers = [oracle.attention(Q, K[:, :, keys], V[:, :, keys], scale=3) for keys in parts]
    pieces = [softmax.from_output(O_part, lse_part[..., None]) for O_part, lse_part in answers]
    pieces.append(softmax.identity(O.shape))
    while len(pieces) > 1:
        a, b = (pieces.pop(rng.integers(len(pieces))) for _ in "ab")
        pieces.append(softmax.merge(a, b))
    O_joined, lse_joined = softmax.finish(pieces[0])
    worst = max(np.abs(O_joined - O).max(), np.abs(lse_joined[..., 0] - lse).max())
    print(f"pairing {trial}: largest difference {worst:.1e}")
    assert worst <= 1e-13

# %% [markdown]
# What it looks like along one row, taken from a real run: dots are scores, steps are the state after each
# tile. An ordinary row finds its maximum early and α is 1 from then on. A row whose maximum keeps growing
# is rescaled at every tile, and one whose largest score comes last has to forget nearly all it had summed:
# both are among the default cases of `python -m verify`, because a kernel that forgets to rescale is right
# on ordinary rows surprisingly often.

# %%
online_softmax.fig_state(online_softmax.data_state())

# %% [markdown]
# ## 3 The two loops
#
# The step itself, for one head. `load` and `store` mark what crosses between HBM and the chip; everything
# between them stays on chip. Compare the block "softmax" with the equation above, and "accumulate" with
# `merge`.

# %%
print(getsource(step2_flash_v1.one_head))

# %% [markdown]
# **Which loop is outside?** In the paper (Dao et al. 2022, algorithm 1) K and V are: a pair $K_j, V_j$
# stays on chip while all query tiles pass by. The chapter describes its version 1 with the query tile
# outside, which is what version 2 changed to. The steps here follow the papers. The same four by three
# tiles, in the order visited:


# %%
def order(step, Nq=64, Nk=48):
    """The tiles (i, j) that a step visits, in order."""
    trace = Trace()
    shape = (1, 1, Nq, 8), (1, 1, Nk, 8), (1, 1, Nk, 8)
    step.attention(*(rng.standard_normal(s) for s in shape), tile=Tile(16, 16), observe=trace)
    return [(v.i, v.j) for v in trace.visits]


print("step2, version 1:", *order(step2_flash_v1))
print("step3, version 2:", *order(step3_flash_v2))
assert sorted(order(step2_flash_v1)) == sorted(order(step3_flash_v2))

# %% [markdown]
# A second difference from the paper is small and deliberate. The paper divides O by l at every visit and
# multiplies it back at the next; here `O_acc` stays unnormalised and is divided once. That rounds less, and
# it is what makes the bit-exact proof of `python -m verify exact` possible: on integer scores in base 2
# every $(m, l, O_\text{acc})$ is a number that fp32 holds exactly.
#
# ## 4 Exact?
#
# The method is exact in the sense that it computes the same function, not an approximation of it: with
# unlimited precision the difference would be zero. With rounding it is a few units of the last place,
# because sums are taken in another order. In fp64, against an oracle that is not tiled and shares no code
# with the steps:

# %%
steps = [step0_standard, step1_fused, step2_flash_v1, step3_flash_v2]
problem = DEFAULT["growing_max"].build("fp64")
O, lse = oracle.attention(problem.Q, problem.K, problem.V)
for tile in (Tile(64, 64), Tile(16, 16), Tile(7, 5), Tile(1, 1)):
    worst = []
    for step in steps:
        O_step, lse_step = step.attention(problem.Q, problem.K, problem.V, tile=tile)
        worst.append(max(np.abs(O_step - O).max(), np.abs(lse_step - lse).max()))
    print(f"tile {tile.Br:2} × {tile.Bc:2}:", *(f"{w:.1e}" for w in worst))
    assert max(worst) <= 1e-13

# %% [markdown]
# Steps 2 and 3 do the same operations in the same order for each row, so between them not one bit differs,
# although one of them carries its state through HBM:

# %%
traces = [Trace(), Trace()]
for step, trace in zip((step2_flash_v1, step3_flash_v2), traces, strict=True):
    step.attention(problem.Q, problem.K, problem.V, tile=Tile(16, 8), observe=trace)
visits = [{(v.i, v.j): v for v in trace.visits} for trace in traces]
same = [
    np.array_equal(a, b)
    for key, v1 in visits[0].items()
    for a, b in zip(v1[4:], visits[1][key][4:], strict=True)
]
print(f"{sum(same)} of {len(same)} states (m, l, O_acc) are equal to the bit")
assert all(same)

# %% [markdown]
# ## 5 What it costs to carry the state
#
# The price of the outer K/V loop is that m, l and `O_acc` of every query tile go out and come back at each
# visit, in fp32. Counted while the steps run, in elements of one head:

# %%
Q, K, V = (rng.standard_normal((1, 1, 512, 64)) for _ in "QKV")
for step in (step2_flash_v1, step3_flash_v2):
    tally = Tally()
    step.attention(Q, K, V, observe=tally)
    print(step.__name__.removeprefix("refimpl."))
    for name in dict.fromkeys([*tally.loads, *tally.stores]):
        print(f"    {name:6} loaded {tally.loads[name]:8,}   stored {tally.stores[name]:8,}")
    print(f"    {tally.hbm_bytes(e=2) / 1e6:.2f} MB with fp16 in and out")

# %% [markdown]
# Version 1 reads K and V once; version 2 reads them once for each query tile, and that is the cheaper way
# round: a tile of K and V in fp16 is smaller than a tile of `O_acc` in fp32 that has to be written as well
# as read. The figure draws both against the length, with what standard attention moves and with the least
# that any method can.

# %%
hbm_traffic.fig_by_length(hbm_traffic.data_by_length())

# %% [markdown]
# ## 6 Backwards, without P
#
# The gradients need P again. From notebook 02, with $dP = dO\, V^T$:
#
# $$dV = P^T dO, \quad dS = P \circ (dP - D),
# \quad dQ = \text{scale}\; dS\, K, \quad dK = \text{scale}\; dS^T Q.$$
#
# Nothing N × N was stored, but one number a row was, $\text{lse}_i = m_i + \ln l_i$, and with it any tile
# of P comes back from a product: $P_{ij} = e^{S_{ij} - \text{lse}_i}$. No maximum, no rescaling; the
# statistics are final this time.
#
# The second trick is $D_i$. By definition it is a sum over the *whole* row of P; but
#
# $$D_i = \sum_j P_{ij}\, dP_{ij} = \sum_j P_{ij} \sum_c dO_{ic} V_{jc} = \sum_c dO_{ic}\, O_{ic},$$
#
# a row sum of two N × d arrays, computed once before the loops. A listing that takes D from one tile at a
# time is wrong as soon as there are two key tiles.

# %%
Q, K, V, dO = (rng.standard_normal((1, 2, 40, 8)) for _ in range(4))
O, lse = oracle.attention(Q, K, V)
P = np.exp(Q @ K.swapaxes(-1, -2) / np.sqrt(8) - lse[..., None])
dP = dO @ V.swapaxes(-1, -2)
D, D_tile = (dO * O).sum(axis=-1), (P * dP)[..., :16].sum(axis=-1)
print(f"rowsum(dO O) against rowsum(P dP): {np.abs(D - (P * dP).sum(axis=-1)).max():.1e}")
print(f"the sum over one tile of 16 keys:  {np.abs(D - D_tile).max():.1e}")
assert np.abs(D - (P * dP).sum(axis=-1)).max() <= 1e-13
assert D_tile.max() > 0 and np.abs(D - D_tile).max() > 1e-3

# %% [markdown]
# One tile's share, and the loops of version 1: K and V outside as in the forward pass, `dK_j` and `dV_j` on
# chip until their column of tiles is done, and dQ going round through HBM.

# %%
print(getsource(backward.recompute))
print(getsource(backward.keys_outer))

# %% [markdown]
# Checked against the oracle's gradients, and both against the definition of a gradient: move one element of
# Q a little each way and see what happens to the loss, the sum of dO × O.

# %%
for order_name in backward.ORDERS:
    got = backward.attention_backward(Q, K, V, O, lse, dO, order=order_name, tile=Tile(16, 8))
    wanted = oracle.attention_backward(Q, K, V, dO)
    for name, a, b in zip(("dQ", "dK", "dV"), got, wanted, strict=False):
        print(f"order {order_name}, {name}: largest difference from the oracle {np.abs(a - b).max():.1e}")
        assert np.abs(a - b).max() <= 1e-13

step = np.zeros_like(Q)
step[0, 1, 7, 3] = 1e-5
loss = [(dO * oracle.attention(Q + sign * step, K, V)[0]).sum() for sign in (1, -1)]
slope = (loss[0] - loss[1]) / 2e-5
print(f"one element of dQ: {wanted[0][0, 1, 7, 3]:.9f}, from differences {slope:.9f}")
assert abs(slope - wanted[0][0, 1, 7, 3]) <= 1e-8

# %% [markdown]
# What this costs in memory and in work. Between the passes standard attention keeps P; FlashAttention keeps
# O, which the next layer holds anyway, and one number a row. The work is five products instead of four, as
# S has to be computed again. (Notebook 11 counts them, in kernels on tensor cores.)

# %%
for N in (1024, 4096, 16384, 65536):
    kept = {"P in fp16": 2 * N * N, "lse in fp32": 4 * N}
    print(
        f"N = {N:5}, kept for one head:",
        ", ".join(f"{name} {n / 2**20:,.2f} MiB" for name, n in kept.items()),
    )
forward, stored, recomputed = 2, 4, 5
print(f"products: forward {forward}, backward from P {stored}, backward without {recomputed}", end=", ")
print(f"that is {recomputed / stored - 1:.0%} more, and {recomputed / forward} times the forward pass")

# %% [markdown]
# ## 7 In low precision
#
# In practice Q, K and V are fp16 or bf16, while m, l and `O_acc` are fp32. Here the steps calculate in fp32
# on inputs that were rounded to fp16, and the output is rounded at the end. Beside their error, as a root
# mean square over the output: that of the *plain formula* at the same precision, the yardstick that
# `verify` judges by. An output rounded to fp16 is off by this much whoever computed it.

# %%
print(f"{'case':14}{'plain formula':>15}" + "".join(f"{s.__name__.split('.')[-1]:>16}" for s in steps))
for case in ("square", "growing_max", "late_max", "logits_x10"):
    problem = DEFAULT[case].build("fp16")
    known = reference(problem)
    rms = []
    for step in steps:
        O, lse = step.attention(problem.Q, problem.K, problem.V, tile=Tile(16, 16), dtype=np.float32)
        metrics = judge(problem, O.astype(np.float16), lse, known=known)
        assert all(m.ok for m in metrics.values()), case
        rms.append(metrics["O"].rmse)
    print(f"{case:14}{metrics['O'].rmse_plain:15.1e}" + "".join(f"{x:16.1e}" for x in rms))

# %% [markdown]
# The steps do as well as the plain formula or better, because it rounds P to fp16 before the second product
# and they do not. Rescaling adds roundings in fp32, which nobody sees behind an fp16 output.
#
# ## Exercises
#
# 1. Leave `alpha` out of the update of `O_acc`. On which of the three rows in the figure would you not
#    notice, and why is a test on random inputs a poor guard?
# 2. Show that $1 \le l_i \le N_k$ as soon as a row has seen a key. What does that say about the division at
#    the end, and about l in fp16?
# 3. The paper chooses $B_c = \lceil M / 4d \rceil$ and $B_r = \min(B_c, d)$ for a chip of M elements.
#    Compare the fills of step2 for this tile with those for $B_r = B_c$ of the same area. Which of the two
#    sizes does version 1 care about, and which version 2?
# 4. `softmax.from_output` makes a state of a finished output. Use it to split 4096 keys over four "devices"
#    and join the results: which arrays travel, and how many bytes is that for each query?
#
# <details><summary>Solutions</summary>
#
# 1. On the ordinary row once its maximum is found: from then on $\alpha = 1$. With many keys in the first
#    tile the maximum is often there already, and the few rows where it is not are averaged away by a loose
#    tolerance. The growing and the late maximum make α matter in every tile, or by nine orders of magnitude
#    in one.
# 2. The key that attains the maximum adds $e^0 = 1$, and no key adds more than that. So the division is
#    never by less than 1, and only a row without keys ($l = 0$) needs a guard. In fp16 l would overflow at
#    65504 equal scores and, from 2048 on, adding 1 to it would change nothing: hence fp32.
# 3. The cell below has it for M = 51,200 elements and d = 64. Version 1 carries its state once for each
#    *key* tile, so it wants a large $B_c$, and the paper's choice suits it; version 2 reads K and V once
#    for each *query* tile and wants a large $B_r$.
# 4. O (or `O_acc`) and lse: $d_v + 1$ numbers a query from each device, whatever the number of keys. It is
#    the idea of split-KV decoding and of ring attention.
#
# </details>

# %%
for tile in (Tile(64, 200), Tile(113, 113), Tile(200, 64)):
    moved = [hbm_traffic.fills(step, 8192, tile) / 1e6 for step in ("step2_flash_v1", "step3_flash_v2")]
    print(f"tile {tile.Br:3} × {tile.Bc:3}: version 1 moves {moved[0]:6.1f} MB, version 2 {moved[1]:6.1f} MB")
assert np.float16(2048) + np.float16(1) == np.float16(2048) and np.finfo(np.float16).max == 65504
assert online_softmax.data_state()[2].alpha[-1] < 1e-8

# %% [markdown]
# ## Sources
#
# - Dao, Fu, Ermon, Rudra, Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention with
#   IO-Awareness", 2022: section 3.1, algorithm 1; appendix B.
# - Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018: algorithm 3.
# - Dao, "FlashAttention-2", 2023: section 3.1.
# - In this repository: `refimpl/softmax.py`, `refimpl/step2_flash_v1.py`, `refimpl/backward.py`, and the
#   same step as a GPU kernel, `numba_cuda/step2_flash_v1.py`.
