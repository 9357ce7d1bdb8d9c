# %% [markdown]
# # 06 · FlashAttention, version 3
#
# *Chapter 18.6. A product is no longer executed but started: so everything else can happen meanwhile.*
#
# ## What you'll do
#
# Find out by arithmetic what there is to hide. Then read the Hopper kernel of this repository, `step6_flash_v3`:
# one warp that loads, warpgroups that compute, and a chain of products that never waits for a softmax.
#
# ## What you'll learn
#
# - why d = 64 is harder than d = 128, although it is less work;
# - how a producer and consumers agree without a barrier of all threads: `mbarrier` phases;
# - what `wgmma` wants of its operands, and where a swizzle comes in again;
# - how much rounding P to fp16 costs, and what does not;
# - how causal query tiles are shared out among blocks that stay.
#
# ## What you'll need
#
# Notebook 05. No GPU: times are from `verify/records/`, and diagrams of time are models and say so.

# %%
from dataclasses import replace
from inspect import getsource

import numpy as np

from figures import hopper, ladder, overlap, suite
from flash_cuda import step6_flash_v3 as step6
from flash_cuda.executors import memory_bytes
from flash_cuda.executors.emulator import Emulator
from flash_cuda.parts import hopper_ops, hopper_shapes, schedule
from flash_cuda.ptx import hopper as ptx_hopper

# %%
from reading import LEDGER, excerpt, judged
from refimpl import oracle, step4_causal, step5_tensor_core
from refimpl import step6_flash_v3 as twin
from refimpl.tiling import Tile
from verify.claims.hardware import A100, H100
from verify.mutants import Graft
from verify.mutants.mutant import Edit

rng = np.random.default_rng(186)
KERNEL = getsource(step6.make_kernel)

# %% [markdown]
# ## 1 What there is to hide
#
# From the A100 to the H100 tensor cores got more than three times as fast. The units that take exponentials did
# not: there are more of them, at a higher clock, and that is all. A multiprocessor does 4096 operations of 16-bit
# products a cycle and 16 exponentials. A tile of 64 queries by 128 keys needs two products, each
# $2 \cdot 64 \cdot 128 \cdot d$ operations, and $64 \cdot 128$ exponentials, whatever d is:

# %%
per_cycle = H100.fp16 * 1e12 / (H100.sms * H100.boost_ghz * 1e9)
more = H100.sms * H100.boost_ghz / (A100.sms * A100.boost_ghz)
print(f"H100 over A100: products {H100.fp16 / A100.fp16:.1f} times as many a second, exponentials {more:.1f} times")
print(f"{per_cycle:,.0f} operations a cycle on each multiprocessor")
print("  d   two products  exponentials  softmax    (cycles a tile)")
for d in (64, 128, 256):
    cost = overlap.budget(d)
    print(f"{d:3} {2 * cost.product:13,.0f} {cost.exponentials:13,.0f} {cost.softmax:8,.0f}")
assert abs(per_cycle / overlap.PRODUCT_FLOPS - 1) < 0.02

# %% [markdown]
# "Softmax" is the exponentials with a maximum before and a rounding after, which the same warps cannot do at the
# same time. At d = 128 a kernel that does one after the other leaves its tensor cores idle for more than a third
# of the time; at d = 64 the exponentials alone take as long as both products, and *no* order can keep the
# tensor cores busy. So the two dims are different problems, and a kernel's rate at d = 64 is bounded by units
# that no data sheet's headline names.
#
# ## 2 Two ways to overlap
#
# Two warpgroups in *turns*: while one takes exponentials, the other's products run. And within a warpgroup:
# start S of the next tile *and* the product of this tile's weights with V, and do the next softmax while the
# second one runs. A model of the two units, in which each does one thing at a time:

# %%
overlap.fig_timeline(overlap.data_timeline(128))

# %%
for d in (64, 128, 256):
    busy = [overlap.run(way, overlap.budget(d)).busy for way in overlap.WAYS]
    print(f"d = {d:3}:", ", ".join(f"{way} {share:.0%}" for way, share in zip(overlap.WAYS, busy, strict=True)))

# %% [markdown]
# In the model softmax under a product gives d = 128 most of what there is, and turns the rest. At d = 64 turns
# are what matters. The kernel has both ideas, and what was measured on an H200 agrees as far as it goes: turns
# helped at d = 64 and did nothing at d = 128, so `SHAPES` asks for them at d = 64 alone.

# %%
for name, shape in {**hopper_shapes.SHAPES, "64, short": hopper_shapes.SHORT_CAUSAL}.items():
    print(f"d up to {name}: {shape.consumers} consumer warpgroups, turns: {shape.turns}")
print(step6.__doc__.split("**Speed**: ")[1].split("**Source**")[0].strip())

# %% [markdown]
# ## 3 Who does what
#
# A block has a *producer*, one thread that starts copies, and two or three *consumer* warpgroups. TMA copies a
# whole tile on one instruction: a box of a tensor whose shape the copy engine knows, so that what lies past an
# end arrives as zeros. The producer, whole:

# %%
excerpt(KERNEL, "while i >= 0:", "i, bh = locate(turn")

# %% [markdown]
# There is no `syncthreads`. Each buffer has two `mbarrier`s, "full" and "empty". A barrier counts arrivals and
# bytes; when all that it expects have come, its *phase* ends, and the next begins. Who waits names the parity of
# a phase, one bit, and that is enough because nobody can be two phases ahead. A new ring is empty: its producer
# waits for the parity of the phase *before* the first, which counts as over.
#
# Below, rings of one, two and three stages, run on the emulator's own barriers; how long a copy takes is made
# up. With the bits that each wait names:

# %%
hopper.fig_ring(hopper.data_ring())

# %%
for stages in (1, 2, 3):
    ring = hopper.run_ring(stages, tiles=6)
    bits = [(s.j, s.stage, s.waits_for, s.signals) for s in ring.stays]
    print(f"{stages} stages: (tile, stage, empty?, full?)", *bits)
    assert all(s.signals == s.j // stages % 2 for s in ring.stays)

# %% [markdown]
# Two stages hide a copy that is shorter than the work; a third one only evens out copies that are late at times.
# In the emulator a barrier is more than an order of events that happened to be right: each thread carries a
# clock of what it *knows*, and a copy into a buffer that a warpgroup need not have read yet is a fault, even if
# it has. See `memory_bytes`:

# %%
print(memory_bytes.__doc__)

# %% [markdown]
# ## 4 Products that read shared memory
#
# `wgmma` multiplies 64 rows, four warps together, by up to 256 columns. Its second operand is in shared memory,
# its first there or in registers. Addresses go in a *descriptor* of 64 bits, and the layout is the hardware's:

# %%
print(getsource(ptx_hopper.k_major))
print(f"K tile, 128 keys: {ptx_hopper.k_major(128):#018x}; V tile: {ptx_hopper.mn_major(128):#018x}")

# %% [markdown]
# The swizzle that TMA writes and `wgmma` reads is the one that step 5 computes by hand: in rows of 128 bytes,
# chunk c of row r lies in the place of c ⊕ r. A head of 128 elements is two *slabs* of 64 columns.

# %%
plain, swizzled = hopper.data_swizzle()
assert all((swizzled.chunk[r] == np.arange(8) ^ r).all() for r in range(8))
hopper.fig_swizzle([plain, swizzled])

# %% [markdown]
# Accumulators are spread over a warpgroup as `mma`'s are over a warp, and again the map of S in registers is
# the map of P as an operand: weights are packed where they were computed.

# %%
thread = np.arange(128)[:, None]


def places(registers):
    """Row and column of each fp32 accumulator of each thread."""
    r = np.arange(registers)
    return 16 * (thread // 32) + thread % 32 // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (thread % 4) + r % 2


row, column = places(64)  # of S: 64 x 128
assert len(set(zip(row.flat, column.flat, strict=True))) == 64 * 128  # each element once
for t in (0, 5, 37):
    print(f"thread {t:2}:", *(f"acc[{k}] ({row[t, k]}, {column[t, k]})" for k in range(6)), "...")
print("def pack_weights" + getsource(hopper_ops.hopper_ops).split("def pack_weights")[1].split("@cuda")[0].rstrip())

# %% [markdown]
# ## 5 The chain
#
# A consumer's loop. Read it as one link: start S; under it, rescale O or write out the one that is done; start
# the product with V; wait for S alone; softmax under what still runs; only then wait for O.

# %%
excerpt(KERNEL, "# products: S of this link", "ops.pack_weights(S, P)")

# %% [markdown]
# A link need not belong to the query tile of the link before. At the end of one tile, $S$ of the block's *next*
# query tile is started together with the last product of this one (`fresh`), so that the tensor cores see no
# seam between tiles. That is why a block stays on its multiprocessor and takes tile after tile.
#
# Most of the kernel's other lines are there so that the compiler lets products overlap. A register of a product
# in flight may not be touched; `wgmma_wait` names the arrays that it makes safe, and `wgmma_fence` hands
# registers over. If the assembler cannot prove it, it makes all products wait, and says so in a note that
# `tests/flash_cuda/test_step6_offline.py` looks for. What this needs, offline for an H200, if the `dev` extra is
# installed:

# %%
try:
    from flash_cuda.executors.assembler import Assembler

    on = Assembler("sm_90a")
    for d in (64, 128):
        step6.attention(*np.zeros((3, 1, 1, 4096, d), np.float16), on=on)
    reports = dict(zip((64, 128), on.reports, strict=True))
except ImportError as missing:
    reports = {}
    print(f"no NVVM here ({missing}): install the dev extra to see registers")

# %%
GIVEN = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # as in make_kernel
assert f"give, take = {GIVEN}[WG]" in KERNEL
for d, shape in ((d, hopper_shapes.SHAPES[d]) for d in (64, 128)):
    give, take = GIVEN[shape.consumers]
    used = give + take * shape.consumers
    print(f"d = {d}: tile {shape.Br} × {shape.Bc}, {shape.threads} threads, {shape.shared_bytes / 1024:.0f} KiB shared")
    print(f"    S {shape.Bc // 2}, P {shape.Bc // 4} and O {d // 2} registers a consumer thread")
    print(f"    registers a thread: producer {give}, consumer {take}: {used * 128:,} of 65,536", end="; ")
    if d in reports:
        print(f"compiled for {reports[d].registers} at the start, stack {reports[d].stack_bytes}")
        assert reports[d].stack_bytes == 0 and reports[d].registers * shape.threads <= 65536
    else:
        print("not compiled")

# %% [markdown]
# `setmaxnreg` moves registers from the producer, who needs few, to the consumers. Without it a thread of three
# consumer warpgroups would have 128: S, P and O alone are as many.
#
# ## 6 Is it right?
#
# The emulator plays the kernel's own body: 256 threads, TMA, barriers, descriptors, swizzle, registers in
# flight. Small shapes, ragged lengths, with several query tiles for a block so that the chain crosses seams:

# %%
SMALL = step6.Shape(64, 32, 64)


def outputs(attention, Nq, Nk, d, **options):
    """Inputs in fp16, and what a kernel makes of them."""
    Q, K, V = (rng.standard_normal((1, heads, n, d)).astype(np.float16) for heads, n in ((2, Nq), (1, Nk), (1, Nk)))
    return (Q, K, V), attention(Q, K, V, **options)


# %%
WINDOW = {"causal": True, "window": (20, None)}
for Nq, Nk, options in ((150, 150, {"causal": True}), (70, 100, {}), (100, 100, WINDOW)):
    arrays, (O, lse) = outputs(step6.attention, Nq, Nk, 64, shape=SMALL, on=Emulator(), **options)
    plain = {key: value for key, value in options.items() if key != "window"}
    r, c = np.indices((Nq, Nk))
    mask = c >= r + Nk - Nq - options["window"][0] if "window" in options else None
    O_true, lse_true = oracle.attention(*(x.astype(np.float64) for x in arrays), mask=mask, **plain)
    far, lse_far = np.abs(O - O_true).max(), np.abs(lse - lse_true).max()
    print(f"{Nq} × {Nk} {options}: O from the oracle {far:.1e}, lse {lse_far:.1e}")
    assert far <= 2**-9 and lse_far <= 2e-6
    if mask is None:
        O_twin, _ = twin.attention(*arrays, tile=Tile(64, 32), dtype=np.float32, **plain)
        print(f"    from the NumPy twin {np.abs(O - O_twin.astype(np.float16)).max():.1e}")

# %% [markdown]
# Asynchrony fails differently from arithmetic: a kernel without a wait can be right a thousand times. Plant such
# mistakes in the source, and the emulator names each, in one run:

# %%
WAIT = "wait_O(O_acc, S)\n"
RELEASE = " " * 16 + "if leader:\n" + " " * 20 + "ptx.mbarrier_arrive(uint32(V_bar + uint32(V_EMPTY)))\n"
EDITS = {
    "S is read before it is there": ("wait_S(S)", "pass"),
    "K's phase bit never turns": ("ptx.mbarrier_wait(K_bar, k_phase)", "ptx.mbarrier_wait(K_bar, uint32(0))"),
    "no fence before S is started": ("ptx.wgmma_fence()\n                start_scores(", "start_scores("),
    "K is never released": ("ptx.mbarrier_arrive(uint32(K_bar + uint32(K_EMPTY)))", "pass"),
    "V is released before it was read": (WAIT + RELEASE, RELEASE.lstrip() + " " * 16 + WAIT),
}

# %%
for about, (old, new) in EDITS.items():
    graft = Graft([Edit("numba_cuda/step6_flash_v3.py", "step6_flash_v3", old, new)])
    faulty = graft.load("flash_cuda.step6_flash_v3")
    shape = faulty.Shape(64, 16, 64, k_stages=1)
    try:
        outputs(faulty.attention, 64, 64, 64, shape=shape, on=Emulator())
        raise AssertionError(f"{about}: nothing was noticed")
    except memory_bytes.KernelFault as fault:
        print(f"{about}:\n    {type(fault).__name__}: {str(fault).splitlines()[0][:110]}")

# %% [markdown]
# ## 7 Numbers
#
# The twin has the kernel's order of operations. That order is unlike step 5's, whose softmax and product of a
# tile belong together; but each number meets the same numbers in the same order, so not one bit differs:

# %%
Q, K, V = (rng.standard_normal((1, 2, 300, 64)).astype(np.float16) for _ in "QKV")
tile = Tile(64, 32)
pair = [step.attention(Q, K, V, causal=True, tile=tile, dtype=np.float32) for step in (step5_tensor_core, twin)]
print("step 5 and step 6, O and lse equal to the bit:", *(np.array_equal(*two) for two in zip(*pair, strict=True)))
assert all(np.array_equal(*two) for two in zip(*pair, strict=True))

# %% [markdown]
# What the tensor core adds is one rounding: P becomes fp16 before it meets V. $l$ is summed before that, in
# fp32. How much it costs, as a root mean square over O, before O itself is rounded; beside it, what rounding O
# to fp16 costs anyway:

# %%
O_true, lse_true = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)))
for name, step in {"step 4, P in fp32": step4_causal, "step 6, P in fp16": twin}.items():
    O, lse = step.attention(Q, K, V, tile=tile, dtype=np.float32)
    rms, rounded = (np.sqrt(np.mean((x - O_true) ** 2)) for x in (O, O.astype(np.float16).astype(np.float64)))
    print(f"{name}: {rms:.1e}, with O rounded {rounded:.1e}, lse {np.abs(lse - lse_true).max():.1e}")
print(f"a weight just below 1 is off by up to {2.0**-12:.1e} in fp16, and by {2.0**-9:.1e} in bf16")

# %% [markdown]
# lse does not see it at all. The backward pass (notebook 11) recomputes P from lse, so this rounding does not reach it.
#
# ## 8 Even shares
#
# A block that stays takes query tile after query tile. Under a causal mask one tile is as long as all its keys
# and another as short as one, and the busiest block is the one that all others wait for. The order by which tiles
# are dealt out, for 2048 of them:

# %%
data = hopper.data_balance()
for name, work in data.work.items():
    print(f"{name:36} busiest {work[0]:.3f}, idlest {work[-1]:.3f}")
*_, ours, table = (work[0] for work in data.work.values())
assert 0 < ours - table < 0.01
hopper.fig_balance(data)

# %% [markdown]
# "Back and forth" deals the second round backwards, so that who got the longer of one round gets the shorter of
# the next. A table would do better by less than a percent, but a value that is read from memory is not known to be
# the same in all lanes of a warp, and `wgmma` wants its addresses in registers that are; the table lost more than it
# gained. Groups of heads are chosen so that their K and V stay in the L2, and among these sizes the most even:

# %%
print(schedule.__doc__.split("\n\n", 1)[1])
lengths = tuple(range(1, 17))
for group in (16, 20, 22, 24, 128):
    print(f"groups of {group:3} heads: {schedule.unevenness(lengths, 128, group, 132):.3f}")

# %% [markdown]
# ## 9 What it bought
#
# From standard attention to step 6 at one size, under the ceilings of the chip; below a line, the same sizes in
# PyTorch. Where there is no record yet, the figure says so.

# %%
data = ladder.data_rungs()
print(data.note, "| no time on record:", ", ".join(data.missing) or "none")
for d in ladder.DIMS:
    for causal in (False, True):
        rates = {r.name: r.tflops for r in data.rungs if (r.d, r.causal) == (d, causal)}
        said = ", ".join(f"{name} {rate:,.1f}" for name, rate in rates.items())
        print(f"d = {d}, causal {causal}, TFLOP/s: {said}")
ladder.fig_rungs(data)

# %% [markdown]
# How far is that from the model of section 2, which knows products and softmax and nothing else?

# %%
for d in ladder.DIMS:
    way = overlap.WAYS[-1] if hopper_shapes.SHAPES[d].turns else overlap.WAYS[2]
    model, found = overlap.run(way, overlap.budget(d)).busy, data.best("step6_flash_v3", d, False)
    share = f"{found.tflops / data.device.fp16_tflops:.0%} measured" if found and data.device else "no record"
    print(f"d = {d}, {way}: {model:.0%} of the peak in the model, {share}")
if data.reached and data.device:
    share = data.reached / data.device.fp16_tflops
    print(f"large products and nothing else: {share:.0%} measured, the solid line above")

# %% [markdown]
# All sizes against the bars that this repository set itself, as ratios of times taken side by side:

# %%
bars = suite.data_bars()
print(bars.note)
for at in bars.standings:
    print(f"{at.bar}: {at.mean or 'no record'}; the bar is {at.bar.mean:g}")
suite.fig_bars(bars)

# %% [markdown]
# ## 10 The chapter on version 3

# %%
mine = [claim for claim in LEDGER.values() if claim.section.startswith("18.6")]
counts = {verdict: sum(c.verdict == verdict for c in mine) for verdict in sorted({c.verdict for c in mine})}
print(f"{len(mine)} claims:", ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
judged("18.6-002", "18.6-008", "18.6-044", "18.6-061", "18.6-066")

# %% [markdown]
# Double buffering and the order of the stages stand. The table of tile latencies does not, and neither do the
# tables of utilisation (notebook 10, section 10); the FP8 backward pass that the section describes does not
# exist in version 3.

# %%
judged("18.6-045", "18.6-095", "18.6-047", "18.6-060", "18.6-022")

# %% [markdown]
# ## Exercises
#
# 1. Blackwell doubles the products a cycle and leaves the exponentials. Where does the model put d = 128 then?
# 2. The producer of a ring with three stages starts with parity 1. What happens if it starts with 0, and what
#    if the consumers do with 1?
# 3. K and V have rings of their own. Why does that help short sequences, if both are as long?
# 4. A consumer waits for S with `wgmma_wait(1, ...)` and for O with `wgmma_wait(0, ...)`. What would waiting for
#    S with 0 cost? Find it in the timeline.
#
# <details><summary>Solutions</summary>
#
# 1. Where d = 64 is now: the cell below halves the product's cycles. It is what FlashAttention-4 is about.
# 2. The first wait for "empty" would not return, as phase 0 never ends if nothing is loaded: a deadlock. Consumers
#    that begin with 1 would not wait at all and multiply what was never loaded. The emulator says which.
# 3. With one barrier for both, K of the next tile cannot come before V of this one has been used; and there is
#    room for a second buffer for Q, so that the next query tile is there when the chain reaches it.
# 4. It would wait for both products: softmax would begin after O, "in step" without anything under the product.
#
# </details>

# %%
half = replace(overlap.budget(128), product=overlap.budget(128).product / 2)
print(f"d = 128 at twice the rate: {overlap.run(overlap.WAYS[-1], half).busy:.0%}, as d = 64 now")
zero = "uint32(0), uint32(0), uint32(0), uint32(0), uint32(0), uint32(0)"
one = zero.replace("uint32(0), uint32(0)", "uint32(0), uint32(1)")
for about, old, new in (("producer begins with 0", one, zero), ("consumers begin with 1", zero, one)):
    faulty = Graft([Edit("numba_cuda/step6_flash_v3.py", "step6_flash_v3", old, new)]).load("flash_cuda.step6_flash_v3")
    try:
        outputs(faulty.attention, 64, 64, 64, shape=faulty.Shape(64, 32, 64), on=Emulator())
    except memory_bytes.KernelFault as fault:
        print(f"{about}: {type(fault).__name__}: {str(fault).splitlines()[0][:90]}")

# %% [markdown]
# ## Sources
#
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, "FlashAttention-3: Fast and Accurate Attention with Asynchrony
#   and Low-precision", 2024: sections 3.1 and 3.2, algorithms 1 and 2.
# - NVIDIA, *Parallel Thread Execution ISA*, 9.0: "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier",
#   "Tensor copy", "setmaxnreg".
# - NVIDIA, *CUDA C++ Programming Guide*: "Arithmetic Instructions", results a cycle and multiprocessor.
# - In this repository: `numba_cuda/step6_flash_v3.py`, `numba_cuda/parts/hopper_ops.py`, `numba_cuda/ptx/hopper.py`,
#   `numba_cuda/parts/schedule.py`; `refimpl/step6_flash_v3.py`; `figures/overlap.py`, the model.
