# %% [markdown]
# # 03 · Where the bytes go
#
# *Chapter 18.3. A GPU calculates much faster than it can fetch; this counts what attention fetches.*
#
# ## What you'll do
#
# Put three GPUs on a roofline, count what standard attention moves while it runs, take S and P out of
# memory, and predict from that how much faster the kernels here should get. Then look at what was measured.
#
# ## What you'll learn
#
# - three different things that are called "bytes moved", and which of them a formula means;
# - why fusing alone does not lower the traffic to the minimum, and what tile sizes do;
# - when saving traffic saves time, and when it does not.
#
# ## What you'll need
#
# Notebook 02. No GPU: measured numbers come from `verify/records/` and name their device.

# %%
from difflib import unified_diff
from inspect import getsource
from itertools import product

import numpy as np

from figures import hbm_traffic, records, roofline
from figures.devices import DEVICES, H200
from refimpl import step0_standard, step1_fused, step3_flash_v2
from refimpl.observe import Tally
from refimpl.tiling import Tile

rng = np.random.default_rng(183)

# %% [markdown]
# ## 1 Roofs
#
# A kernel that does F operations and moves B bytes cannot take less than the longer of F / (peak rate) and
# B / (bandwidth). So what counts is its *intensity*, F / B, against the *ridge*, peak rate / bandwidth:
# left of it memory is the limit, right of it arithmetic. From the makers' data sheets (sources in
# `figures/devices.py`), for dense operands:

# %%
print("GPU    HBM GB/s   fp32 TFLOP/s   ridge   fp16 tensor TFLOP/s   ridge   shared memory a block")
for g in DEVICES:
    ridges = g.ridge(g.fp32_tflops), g.ridge(g.fp16_tflops)
    print(
        f"{g.name}{g.hbm_gb_per_s:11,}{g.fp32_tflops:15.1f}{ridges[0]:8.0f}{g.fp16_tflops:22.1f}{ridges[1]:8.0f}",
        end="",
    )
    print(f"{g.smem_kib:18} KiB")

# %% [markdown]
# There are two ridges a GPU, and it matters which applies. Kernels that multiply on tensor cores need
# hundreds of operations for each byte before memory stops being the limit. Kernels that multiply in
# ordinary fp32, as steps 0 to 4 here do, need far fewer.
#
# ## 2 Counting
#
# Standard attention is three kernels with S and P between them in memory (Dao et al. 2022, algorithm 0). In
# the step below `head.load` and `head.store` are the only ways between HBM and the chip, so they can be
# counted:

# %%
print(getsource(step0_standard.one_head))

# %%
N, d = 512, 64
Q, K, V = (rng.standard_normal((1, 1, N, d)) for _ in "QKV")
tally = Tally()
step0_standard.attention(Q, K, V, observe=tally)
for name in dict.fromkeys([*tally.loads, *tally.stores]):
    print(f"{name:4} loaded {tally.loads[name]:9,} elements   stored {tally.stores[name]:9,}")
print(f"{tally.hbm_bytes(e=2):,} bytes, with Q, K, V, O in fp16 and S, P, lse in fp32")

# %% [markdown]
# Each step has its traffic as a formula in its docstring, derived before anything is counted. `verify
# bytes` evaluates that very line, so that text and check cannot drift apart, and it must match the count
# exactly, ragged tiles included:

# %%
print(step0_standard.__doc__.split("**Numerics")[0])
for step in (step0_standard, step1_fused, step3_flash_v2):
    tally = Tally()
    step.attention(Q[:, :, :501], K, V, tile=Tile(32, 48), observe=tally)
    name = step.__name__.removeprefix("refimpl.")
    formula = hbm_traffic.fills(name, 501, Tile(32, 48), Nk=N)
    print(f"{name:15} counted {tally.hbm_bytes(e=2):11,}   formula {formula:11,}")
    assert tally.hbm_bytes(e=2) == formula

# %% [markdown]
# **Three ledgers.** What was counted here is *tile fills*: each tile once for each visit, as if there were
# no cache. That is what the papers' formulas mean. A kernel's own loads and stores, thread by thread, are
# *requested* bytes: more, where threads ask for the same element. The *compulsory* minimum is Q, K, V read
# once and O written once: no method moves less. The DRAM counters of a GPU lie between that and the others,
# as its L2 cache serves part of the fills. A number without its ledger says little. The chapter's table
# 18-10, for instance, has FlashAttention move 5.3 MB for one head of N = 16384 and d = 64 in 16 bits:

# %%
print(f"compulsory minimum: {hbm_traffic.least(16384) / 1e6:.1f} MB")
print(
    f"fills of step 3, tile 64 × 64: {hbm_traffic.fills('step3_flash_v2', 16384, Tile(64, 64)) / 1e6:,.1f} MB"
)
assert hbm_traffic.least(16384) > 5.3e6

# %% [markdown]
# That is less than reading Q, K and V and writing O. Here is how the ledgers grow, each step's fills with
# the chapter's idealised account of standard attention (S and P in 16 bits, each written and read once)
# apart:

# %%
hbm_traffic.fig_by_length(hbm_traffic.data_by_length())

# %% [markdown]
# All lines but one grow with N². FlashAttention does not change that; it changes the factor.
#
# ## 3 Fusing, and what it does not do
#
# Step 1 keeps S and P on chip, by computing S twice. The parts of its text that are new:

# %%
old, new = (getsource(step.one_head).splitlines() for step in (step0_standard, step1_fused))
print("\n".join(line for line in unified_diff(old, new, n=0, lineterm="") if line.startswith("+ ")))

# %% [markdown]
# No N × N array is left, and still the traffic grows with N²: K and V stream past each query tile again, so
# the fills are about $2 N d \cdot N / B_r$ elements. The lever is the tile. Twice the rows, half the
# traffic, as long as the tile fits on chip:

# %%
hbm_traffic.fig_by_tile(hbm_traffic.data_by_tile())

# %% [markdown]
# What fits? A tile of Q, K and V and one of P in shared memory, with `O_acc` in registers, is in fp16 $2
# (B_r d + 2 B_c d + B_r B_c)$ bytes a block:

# %%
for d in (64, 128):
    for Br, Bc in ((64, 64), (128, 64), (128, 128), (256, 128), (256, 256)):
        kib = 2 * (Br * d + 2 * Bc * d + Br * Bc) / 1024
        fits = [g.name for g in DEVICES if kib <= g.smem_kib]
        print(f"d = {d:3}, tile {Br:3} × {Bc:3}: {kib:5.0f} KiB, fits {', '.join(fits) or 'none'}")

# %% [markdown]
# ## 4 Under the roofs
#
# Intensity of each step: $4 N^2 d$ operations over its fills.

# %%
data = roofline.data_steps()
print(data.note)
for name, intensity in data.intensity.items():
    tensor, fp32 = (
        [g.name for g in DEVICES if intensity < g.ridge(rate(g))]
        for rate in (lambda g: g.fp16_tflops, lambda g: g.fp32_tflops)
    )
    print(
        f"{name:15} {intensity:5.1f} FLOP/byte; memory is the limit on tensor cores: {', '.join(tensor)}",
        end="",
    )
    print(f"; in fp32: {', '.join(fp32) or 'none'}")

# %%
roofline.fig_steps(data)

# %% [markdown]
# Read the figure twice. Against the *tensor-core* roof every step at this tile is limited by memory,
# standard attention most of all: this is the world in which FlashAttention was made, and there less traffic
# is less time. Against the *fp32* roof the steps with the most traffic stand about at the ridge and the
# others to the right of it: memory can nearly, or easily, keep up, and a kernel that reaches only part of
# the fp32 peak leaves it more time still.
#
# ## 5 Four predictions
#
# So what should the times of steps 0 to 4 be, in fp32 arithmetic, relative to step 3? Predicted before
# measuring:
#
# **Step 0.** S and P are N × N in fp32, and each is written once and read at least once: $16 N^2$ bytes a
# head. If nothing else can be done meanwhile, that takes $16 N^2 / \text{bandwidth}$; the arithmetic takes
# $4 N^2 d / R$ at the rate R that a kernel reaches. The ratio of the two,
#
# $$\frac{t_{S,P}}{t_\text{arithmetic}} = \frac{16 N^2 / \text{bandwidth}}{4 N^2 d / R}
# = \frac{4 R}{d \cdot \text{bandwidth}},$$
#
# does not depend on N: it is a matter of how fast one calculates. On an H200, for rates from a slow
# kernel's to the two peaks:

# %%
print("rate R, TFLOP/s       d = 64   d = 128   (time of S and P traffic over time of arithmetic)")
for R in (5, 10, 20, H200.fp32_tflops, 300, H200.fp16_tflops):
    shares = [4 * R * 1e12 / (d * H200.hbm_gb_per_s * 1e9) for d in (64, 128)]
    print(f"{R:15.1f} {shares[0]:12.2f} {shares[1]:9.2f}")

# %% [markdown]
# At the bottom of the table the traffic costs several times as much as the arithmetic. At the top it is a
# few per cent, and may even hide behind arithmetic that runs at the same time: so step 0 should lose
# little.
#
# **Step 1** computes S twice, three products where step 3 has two. It should *lose* to step 3, and to step
# 0 as well.
#
# **Step 2** has K and V outside, so the query tiles of a head must come one after the other: one block a
# head. With 16 heads most of the chip has nothing to do.
#
# **Step 4** does not visit dead tiles. With a causal mask its time should be step 3's times the share of
# its fills.

# %%
print(f"step 1: {3 / 2} × step 3")
print(f"step 2, 16 heads on {H200.sms} multiprocessors: at least {H200.sms / 16:.1f} × step 3")
for N in (1024, 4096, 16384):
    visited, all_of_them = (
        hbm_traffic.fills(step, N, Tile(64, 32), causal=True) for step in ("step4_causal", "step3_flash_v2")
    )
    print(f"step 4, causal, N = {N:5}: {visited / all_of_them:.2f} × step 3")

# %% [markdown]
# ## 6 What was measured
#
# The newest record of times, fp16 in and out: step 3 in milliseconds and by the convention of $4 B H N^2 d$
# operations, the others as multiples of it.

# %%
points = {(p.kernel, p.size["d"], p.size["Nq"], p.causal): p for p in records.times() if p.dtype == "fp16"}
sizes = sorted({key[1:3] for key in points})
others = (
    ("step0_standard", False),
    ("step1_fused", False),
    ("step2_flash_v1", False),
    ("step4_causal", True),
)
found = {}
for (kernel, causal), (d, N) in product(others, sizes):
    base = points["step3_flash_v2", d, N, causal]
    found[kernel, d, N] = points[kernel, d, N, causal].median_ms / base.median_ms

# %%
print(next((p.device for p in points.values()), "no record of times yet"))
print("  d      N   step 3, ms   TFLOP/s   step 0   step 1   step 2   causal: step 4")
for d, N in sizes:
    base = points["step3_flash_v2", d, N, False]
    row = "".join(f"{found[kernel, d, N]:7.2f} ×" for kernel, _ in others)
    print(f"{d:3} {N:6} {base.median_ms:12.3f} {base.tflops:9.1f} {row}")

# %% [markdown]
# Prediction and measurement side by side, with R as step 3 reached it and the bandwidth as a plain copy
# reached it on that device:

# %%
print("  d      N   S and P at most, found      step 4: share of fills, of time")
for d, N in sizes:
    p = points["step3_flash_v2", d, N, False]
    most = 4 * p.tflops * 1e12 / (d * p.copy_gb_per_s * 1e9)
    share = [hbm_traffic.fills(k, N, p.tile, d=d, causal=True) for k in ("step4_causal", "step3_flash_v2")]
    print(f"{d:3} {N:6} {most:+16.0%} {found['step0_standard', d, N] - 1:+7.0%}", end="")
    print(f" {share[0] / share[1]:27.2f} {found['step4_causal', d, N]:9.2f}")
    assert found["step0_standard", d, N] - 1 > most and 1.3 < found["step1_fused", d, N] < 1.7
    assert N < 2048 or found["step1_fused", d, N] > found["step0_standard", d, N]
    assert 1.5 < found["step2_flash_v1", d, N] / (H200.sms / 16) < 4
    assert N < 8192 or abs(share[0] / share[1] - found["step4_causal", d, N]) < 0.1

# %% [markdown]
# **Step 1** is as predicted, about half as much again, and but for the shortest sequences slower than step
# 0: the kernel that moves a fraction of step 0's bytes loses, because bytes were not what these kernels
# wait for. **Step 4** is as predicted for long sequences. For short ones it gains little: there are so few
# blocks that all can run at the same time, and then the last query tile, which skips nothing, decides.
# **Step 2** is beyond its lower bound by another factor of two to four: a block that is alone on its
# multiprocessor leaves nobody to work while it waits for its state to come round.
#
# **Step 0** is slower than predicted, in most rows by more than twice. The model was kind to it: its three
# kernels wait for one another, they need not reach the rate of a copy, and its softmax reads S twice and
# takes each exponential twice. How much each of these costs this record does not say; hardware counters
# would. What it does say is that in fp32 arithmetic taking S and P out of memory is worth tens of per cent.
# On tensor cores the same bytes are worth a factor (the bottom of the first table of section 5).
#
# ## Exercises
#
# 1. The chapter gives 8 N² + 12 N d bytes for standard attention in 16 bits in one place and 8 N² + 8 N d
#    in another. Count Q, K, V and O once each: which one is it?
# 2. From which tile size on is step 3, in tile fills, to the right of the H200's tensor-core ridge? Does
#    such a tile fit? What else can move it there?
# 3. A mask and a dropout as separate kernels read and write S once more each. Where does that put standard
#    attention on the roofline?
# 4. Decoding has one query. What is its intensity, whatever the method?
#
# <details><summary>Solutions</summary>
#
# 1. Four arrays of N × d elements of 2 bytes are 8 N d; the cell below counts it. (Step 0 moves more, as
#    its product kernels are tiled too and load Q, K and V once for each tile.)
# 2. Its fills are about $4 N^2 d / B_r$ bytes for $4 N^2 d$ operations, so its intensity is about $B_r$:
#    the ridge itself in rows. The cell below prints which; section 3 said whether it fits. In practice the
#    L2 cache serves most of the fills of K and V, as blocks that run at the same time read the same tiles.
# 3. Each adds 4 N² bytes in 16 bits, so the idealised 8 N² become 16 N² and the intensity halves.
# 4. 4 N d operations over 4 N d bytes of K and V in 16 bits: 1. No tiling helps; only fewer bytes do
#    (grouped heads, smaller types), or more queries that share the keys.
#
# </details>

# %%
N, d, e = 4096, 128, 2
print(f"Q, K, V, O once: {4 * N * d * e / (N * d):.0f} N d bytes")
print(f"S and P, written and read: {4 * N * N * e / N**2:.0f} N² bytes")
ridge = H200.ridge(H200.fp16_tflops)
for B in (64, 128, 192, 256):
    intensity = 4 * N * N * d / hbm_traffic.fills("step3_flash_v2", N, Tile(B, 64), d=d)
    print(
        f"Br = {B:3}: {intensity:5.0f} FLOP/byte, {'right' if intensity > ridge else 'left'} of {ridge:.0f}"
    )

# %% [markdown]
# ## Sources
#
# - Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 2009.
# - Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022: section 2 and theorem 2; Saha, Ye, "I/O complexity of
#   attention", 2024, for the matching lower bound.
# - NVIDIA's data sheets of the A100, H100 and H200, as cited in `figures/devices.py`.
# - In this repository: the **Traffic** paragraph of each step, `python -m verify bytes`, `verify/records/`.
