# %% [markdown]
# # 05 · FlashAttention, version 2
#
# *Chapter 18.5. The same mathematics, other loops: more blocks, less traffic, half the tiles, and products on
# tensor cores.*
#
# ## What you'll do
#
# Read version 2 as a diff of version 1. Count blocks, tiles and divisions. Then go down one level and follow a
# number through a tensor core: which lane holds it, where shared memory keeps it, which instruction moves it.
#
# ## What you'll learn
#
# - why turning two loops round pays, although each way does the same operations on the same tiles;
# - how many causal tiles are dead, full or on the edge, and why one mask per row of tiles is not always enough;
# - what `mma`, `ldmatrix`, `cp.async` and a swizzle are, in Python with the PTX beside it;
# - what fits into the registers, and what that decides.
#
# ## What you'll need
#
# Notebook 04 (the two loops and the state $m$, $l$, $O_\text{acc}$). No GPU.

# %%
import difflib
import re
from inspect import getsource

import numpy as np

from figures import ladder, tensor_core, tiling
from figures.devices import A100
from flash_cuda import ptx, step5_tensor_core
from flash_cuda.executors.emulator import Emulator
from flash_cuda.parts import tensor_ops

# %%
from reading import LEDGER, judged
from refimpl import oracle, step2_flash_v1, step3_flash_v2, step4_causal
from refimpl import step5_tensor_core as twin
from refimpl.observe import Tally, Trace
from refimpl.tiling import Tile, cdiv
from verify.mutants import MUTANTS, Graft, trial

rng = np.random.default_rng(185)


# %%
def normal(*shape, dtype=np.float16):
    """N(0, 1), rounded to a storage type."""
    return rng.standard_normal(shape).astype(dtype)


# %% [markdown]
# ## 1 The loops change places
#
# Version 1 keeps a tile of K and V and lets all query tiles pass; version 2 keeps a query tile and lets K and V
# pass. In the code of this repository that is the whole difference, and it reads as one idea: whatever was
# loaded and stored because it had to travel is gone.

# %%
v1, v2 = (getsource(step.one_head).splitlines() for step in (step2_flash_v1, step3_flash_v2))
diff = list(difflib.unified_diff(v1, v2, "step2_flash_v1", "step3_flash_v2", n=1, lineterm=""))
print("\n".join(diff))
changed = [line for line in diff if re.match(r"[+-](?![+-])", line)]
print(f"\n{len(changed)} lines go or come of {len(v1)}")
assert len(changed) <= 40

# %% [markdown]
# Within a row the operations are the same and in the same order (notebook 04 has the states equal to the bit).
# What changes is who waits for whom: a query tile now depends on no other, from its first load to its last
# store.
#
# ## 2 More blocks
#
# That independence is the parallelism of version 2: a block for each query tile, not for each head. With the
# chapter's example, one sequence of 8192 tokens and 40 heads on an A100:

# %%
B, H, N = 1, 40, 8192
for name, blocks in {"version 1": B * H, "version 2, Br = 128": B * H * cdiv(N, 128)}.items():
    waves = cdiv(blocks, A100.sms)
    share = blocks / (waves * A100.sms)
    print(f"{name:20} {blocks:5} blocks on {A100.sms} multiprocessors, one each: {waves:2} waves, {share:4.0%} at work")
judged("18.5-002", "18.5-005", "18.6-009")

# %% [markdown]
# Section 18.6 of the chapter counts the blocks of this same example again, and gets 160.
#
# Within a block the second half of the idea repeats: each *warp* takes rows of its own, so that a row's maximum
# and sum stay inside a warp. Version 1's kernel split the keys among the warps, which then had to add up their
# parts of O through shared memory.

# %%
judged("18.5-008", "18.5-004")

# %% [markdown]
# ## 3 One division at the end
#
# A tensor core multiplies and adds. Everything else runs on units that are an order of magnitude slower, so
# operations that are no products are worth counting. Algorithm 1 of the
# first paper keeps O normalised: it multiplies the old O by the old $l$, and divides by the new one, at each
# visit. Kept unnormalised, O needs one factor a visit and one division at the end.

# %%
print(f"A100: {A100.fp16_tflops:g} TFLOP/s of products, {A100.fp32_tflops:g} of all else", end=", ")
print(f"{A100.fp16_tflops / A100.fp32_tflops:.0f} to one")
Nk, d = 8192, 64
for Bc in (64, 128):
    visits = cdiv(Nk, Bc)
    # l O, the factor of the new tile's share and the quotient, each visit; alpha O each visit, and O / l once.
    paper, kept = 3 * d * visits, d * visits + d
    products = 4 * Nk * d
    shares = ", ".join(f"{n} operations on O ({n / products:.2%})" for n in (paper, kept))
    print(f"Bc = {Bc:3}: a row has {products:,} of products; normalised and not: {shares}")

# %% [markdown]
# The exponentials remain, one a score, and they do not shrink: notebook 06 is about them.
#
# ## 4 Half the tiles
#
# Under a causal mask a tile is dead (no row sees any of its keys), full (every row sees all) or on the edge.
# The first kind is not visited, the second not masked. Corners decide:

# %%
print(getsource(step4_causal.one_head).split("# load\n            K_j")[0].rstrip())
tiling.fig_causal(tiling.data_causal())

# %% [markdown]
# Counted, by classifying every tile. The dead ones are nearly half; the edge is a diagonal of tiles, unless the
# two sizes differ:


# %%
def classes(N, tile):
    """How many tiles of N x N are dead, on the edge and full, and the most on the edge in one row of tiles."""
    rows, cols = (np.arange(0, N, size) for size in (tile.Br, tile.Bc))
    last_row, last_col = np.minimum(rows + tile.Br, N) - 1, np.minimum(cols + tile.Bc, N) - 1
    dead, full = cols[None] > last_row[:, None], last_col[None] <= rows[:, None]
    edge = ~dead & ~full
    return dead.sum(), edge.sum(), full.sum(), edge.sum(axis=1).max()


# %%
for N, tile in ((2048, Tile(64, 64)), (2048, Tile(128, 64)), (2048, Tile(64, 128)), (1000, Tile(48, 64))):
    dead, edge, full, most = classes(N, tile)
    total = dead + edge + full
    print(f"{N:4}, {tile.Br:3} × {tile.Bc:3}: {dead:4} dead ({dead / total:.1%}), {full:4} full, {edge:3} edge", end="")
    print(f", up to {most} of these in a row of tiles")
    trace = Trace()
    step4_causal.attention(*normal(3, 1, 1, N, 4, dtype=np.float64), causal=True, tile=tile, observe=trace)
    assert len(trace.visits) == edge + full  # and this is what the step visits
judged("18.5-030", "18.5-044", "18.5-032", "18.5-033")

# %% [markdown]
# So "mask the last tile" is right for square tiles only. It passes any test with $B_r \le B_c$ and lengths that
# the tile divides; with $128 \times 64$ it lets half of a tile see the future.
#
# What is saved is loads, too. In elements of one head, counted while the steps run:

# %%
Q, K, V = normal(3, 1, 1, 1024, 64, dtype=np.float64)
for step in (step3_flash_v2, step4_causal):
    tally = Tally()
    step.attention(Q, K, V, causal=True, tile=Tile(64, 64), observe=tally)
    print(f"{step.__name__.removeprefix('refimpl.'):15} K and V: {tally.loads['K'] + tally.loads['V']:9,}", end="")
    print(f"   Q, O and lse: {tally.loads['Q'] + tally.stores['O'] + tally.stores['lse']:7,}")

# %% [markdown]
# ## 5 Products on tensor cores
#
# Up to here a thread has multiplied two numbers at a time. `mma.sync.m16n8k16` has a *warp* multiply two
# matrices of 16-bit numbers, 2048 products, in one instruction. Its operands are in registers, and each lane
# holds a few elements of each, in an order that NVIDIA fixed:

# %%
print(ptx.__doc__.split("\n\n**Source**")[0])
tensor_core.fig_lanes(tensor_core.data_lanes())

# %% [markdown]
# Look at the two panels with 16 rows. Two C fragments side by side have the lane map of an A fragment: lane 5
# has row 1, columns 2 and 3, in both. The first product gives C, $S = Q K^T$; the second one wants A, $P$. A
# lane turns its own scores into its own weights, and no element ever moves. It is for this that rows go to
# warps whole: what a row needs of others is a maximum over four lanes, a *quad*.

# %%
A, B_fragment, C = tensor_core.data_lanes()
both = np.concatenate([C.lane, C.lane], axis=1)  # of two neighbouring blocks of eight keys
print("lanes of C C equal lanes of A:", bool((both == A.lane).all()))
print("lanes that share row 1:", sorted(set(A.lane[1].tolist())))
assert (both == A.lane).all() and len(set(A.lane[1])) == 4

# %% [markdown]
# The kernel's softmax, in these registers. `shfl_xor` with 1 and 2 is the exchange within the quad; `p` is at
# once the A fragment of the next product:

# %%
source = getsource(tensor_ops.tensor_ops)


def routine(name):
    """The source of one of the tile routines."""
    return re.search(rf"    def {name}\(.*?(?=\n    @cuda|\n    module)", source, re.S)[0].rstrip()


print(routine("softmax"))

# %% [markdown]
# ### How operands get there
#
# `ldmatrix` brings four 8 × 8 matrices from shared memory to the lanes that want them. Each of its rows is 16
# bytes, and eight of them are fetched at a time: all is well if these are in different banks. In plain order,
# at d = 64, they are all in the same four. So row r keeps its chunk c in the place of c ⊕ r:

# %%
tensor_core.fig_swizzle(tensor_core.data_swizzle())

# %%
for D in step5_tensor_core.SHAPES:
    shift, mask = tensor_ops.swizzling(D)
    n = D // 8
    plain = tensor_core.laid_out("", n, lambda r, c, n=n: n * r + c)
    kept = tensor_core.laid_out("", n, lambda r, c, n=n, s=shift, m=mask: n * r + (c ^ (r >> s & m)))
    turns = [max(layout.conflict(c) for c in range(n)) for layout in (plain, kept)]
    print(f"d = {D:3}: chunk c of row r at c ^ ((r >> {shift}) & {mask}); turns a read: {turns[1]}, plain {turns[0]}")
    assert turns[1] == 1

# %% [markdown]
# ### While this tile is worked on, the next one comes
#
# `cp.async` starts a copy to shared memory and goes on. With two buffers for K and two for V, one barrier a tile
# is enough: past it, tile j has come *and* tile j − 1 has been read, so that its place may be filled.

# %%
body = getsource(step5_tensor_core.make_kernel)
print(re.search(r" +for j in range\(live\):.*?cp_async_commit\(\)\n", body, re.S)[0])

# %% [markdown]
# ## 6 The PTX beside the Python
#
# An instruction is a small Python function; what the compiler emits for it is its PTX, and a plain-Python
# stand-in plays it in the emulator. The kernel is compiled here for an A100, offline, if NVVM is
# installed (the `dev` extra); neither a GPU nor a driver is asked.

# %%
try:
    from flash_cuda.executors.assembler import assemble, numba_type, resources

    half, single = np.zeros((1, 1, 1, 1), np.float16), np.zeros((1, 1, 1), np.float32)
    args = half, half, half, half, single, np.float32(1), 0, 0, np.zeros((0,) * 5, np.float32)
    built = {}
    for d in (64, 128):
        kernel = step5_tensor_core.make_kernel(step5_tensor_core.SHAPES[d], d, "fp16", "whole")
        built[d] = assemble(kernel, tuple(map(numba_type, args)), {"sm_80": (8, 0)})["sm_80"]
    text = built[64][1]
except ImportError as missing:
    built, text = {}, ""
    print(f"no NVVM here ({missing}): install the dev extra to see the PTX")

# %%
PAIRS = {
    "ldmatrix_x4(b, 0, ...)": r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared[^;]*;",
    "ldmatrix_x4_trans(b, 0, ...)": r"ldmatrix[^;]*\.trans[^;]*;",
    "mma_f16(s, ..., q, ..., b, 0), twice": r"mma\.sync[^;]*;",
    "ex2(fma(s[at], scale, -base))": r"ex2\.approx[^;]*;",
    "pack_f16(p0, p1)": r"cvt\.rn\.f16x2[^;]*;",
    "cp_async_16(tile, to, X, ...)": r"cp\.async\.cg[^;]*;",
}
for python, pattern in PAIRS.items() if text else ():
    found = re.findall(pattern, text)
    print(f"{python:38}{len(found):4} ×   {' '.join(found[0].split())}")

# %% [markdown]
# The counts are arithmetic. A warp of 32 rows by 64 keys at d = 64 needs $2 \cdot 32 \cdot 64 \cdot 64 / (16
# \cdot 8 \cdot 16)$ products; a lane has $32 \cdot 64 / 32$ scores, an exponential each, and one more for each
# of its four rows' α.

# %%
rows, Bc, D = step5_tensor_core.SHAPES[64].band, 64, 64
products, exponentials = 2 * rows * Bc * D // (16 * 8 * 16), rows * Bc // 32 + rows // 8
print(f"{products} mma and {exponentials} ex2 expected")
assert not text or len(re.findall(r"mma\.sync", text)) == products
assert not text or len(re.findall(r"ex2\.approx", text)) == exponentials

# %% [markdown]
# ### What fits
#
# A thread has at most 255 registers. In 32 rows a warp's lane holds $d$ of $O_\text{acc}$ and 64 of S:

# %%
print(" d   tile       threads  O and S  registers  shared  stack")
for d in (64, 128):
    shape = step5_tensor_core.SHAPES[d]
    threads, shared = 32 * shape.Br // shape.band, 2 * d * (shape.Br + 4 * shape.Bc)
    found = resources(built[d][0]) if built else {"registers": "unknown", "stack_bytes": "unknown", "shared_bytes": 0}
    shared, state = (shared + found["shared_bytes"]) / 1024, shape.band * (d + shape.Bc) // 32
    print(f"{d:3}  {shape.Br:3} × {shape.Bc:3} {threads:8} {state:8} {found['registers']:>9}", end="")
    print(f" {shared:5.0f} KiB {found['stack_bytes']:>5}")
    assert found["stack_bytes"] in (0, "unknown")

# %% [markdown]
# At d = 128 there are fewer than 64 registers left for addresses, operands, maxima and weights; so $l$ waits in
# shared memory, and Q's fragments are read again for each tile. Other shapes were measured and are slower; the
# kernel's docstring has the numbers:

# %%
print(step5_tensor_core.__doc__.split("What else was tried")[1].split("**Traffic**")[0].strip())

# %% [markdown]
# ## 7 Is it right?
#
# The emulator runs the kernel's own body, lane by lane. Registers really travel by the lane map, tiles are
# really swizzled, a copy is not there before it was waited for. Against the oracle in fp64, and against the
# NumPy twin that rounds as the kernel does:

# %%
for Nq, Nk, d, causal in ((70, 100, 64, True), (33, 65, 80, False)):
    Q, K, V = normal(1, 2, Nq, d), normal(1, 1, Nk, d), normal(1, 1, Nk, d)
    O, lse = step5_tensor_core.attention(Q, K, V, causal=causal, tile=Tile(32, 32), on=Emulator())
    wide = [x.astype(np.float64) for x in (Q, K, V)]
    O_true, lse_true = oracle.attention(*wide, causal=causal)
    O_twin, _ = twin.attention(Q, K, V, causal=causal, tile=Tile(32, 32), dtype=np.float32)
    far, near = (np.abs(O - other).max() for other in (O_true, O_twin.astype(np.float16)))
    print(f"{Nq:3} × {Nk:3}, d = {d}, causal {causal}: from the oracle {far:.1e}, from the twin {near:.1e}", end="")
    print(f", lse {np.abs(lse - lse_true).max():.1e}")
    assert far <= 2**-10 and near <= far and np.abs(lse - lse_true).max() <= 2e-6

# %% [markdown]
# And mistakes are seen. Each of these is an edit of the kernel's source, run in the emulator and judged:

# %%
for name in ("V_not_transposed", "swizzle_not_on_both_sides", "P_rows_exchanged", "copies_not_waited_for"):
    mutant = MUTANTS[name]
    said = trial.attempt(Graft(mutant.edits), mutant.through, mutant.first[0], "fp16", tile=mutant.tile)
    print(f"{mutant.about}:\n    {said.kill}: {said.detail[:100]}")
    assert said.kill

# %% [markdown]
# ## 8 What each idea bought
#
# Measured, on a logarithmic axis: standard attention and the four steps from version 1 to the causal loop use
# no tensor cores, and the data sheet's fp32 rate is their ceiling; step 5 has another one, fifteen times as high.
# `standard_tensor_core` is the honest baseline: step 0's three kernels with step 5's products, so that what lies
# between these two is the way of S and P through HBM and nothing else. Below a line, the same size in PyTorch. A cross
# says that a kernel was changed after it was measured.

# %%
data = ladder.data_rungs()
print(data.note, "| no time on record:", ", ".join(data.missing) or "none")
for d in ladder.DIMS:
    times = {name: rung.ms for name in ladder.RUNGS if (rung := data.best(name, d, False))}
    print(f"d = {d}, no mask, ms:", ", ".join(f"{name.split('_')[0]} {ms:,.2f}" for name, ms in times.items()))
scores = ladder.SIZE["B"] * ladder.SIZE["H"] * ladder.SIZE["N"] ** 2
if data.device:  # S in fp32 is written once and read twice, P in 16 bits once each: 16 bytes a score
    least = 16 * scores / data.device.hbm_gb_per_s / 1e6
    print(f"S and P of the baseline: {16 * scores / 1e9:.0f} GB, at the data sheet's rate {least:.1f} ms")
assert data.device is None or round(data.device.fp16_tflops / data.device.fp32_tflops) in (15, 16)
ladder.fig_rungs(data)

# %% [markdown]
# Version 1's loop order is the slowest by far here, since step 2 carries its state through HBM for the sake of
# the lesson, with one block a head. Skipping dead tiles shows as a ring that moves up to its dot.
#
# ## 9 The chapter on version 2
#
# The ledger has every number of section 18.5, recomputed:

# %%
mine = [claim for claim in LEDGER.values() if claim.section.startswith("18.5")]
counts = {verdict: sum(c.verdict == verdict for c in mine) for verdict in sorted({c.verdict for c in mine})}
print(f"{len(mine)} claims:", ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
judged("18.5-010", "18.5-009", "18.5-035", "18.5-061", "18.5-075", "18.5-078")

# %% [markdown]
# Its listings of the causal loop are run there, on odd lengths: 18.5-090 to 18.5-096.
#
# ## Exercises
#
# 1. With $B_r = 192$ and $B_c = 128$, how many edge tiles has a row of tiles at most? Guess from the claim
#    above, then count.
# 2. The swizzle c ⊕ r is its own inverse. Would (c + r) mod 8 do as well, and what would it cost?
# 3. Version 2's blocks all read the same K and V. At N = 16384 and d = 128, for how many heads do they fit into
#    an L2 of 50 MiB together? What does `step5_tensor_core` do with the answer?
# 4. Leave `cuda.syncthreads()` out of the loop in section 5. Which of its two promises breaks first?
#
# <details><summary>Solutions</summary>
#
# 1. Two, as the cell below counts, although the rule allows three: $192 i$ is 0 or 64 past a multiple of 128, and
#    from neither do 192 rows reach a third tile. With lengths that shift the diagonal they can.
# 2. It would be as free of conflicts. But addition carries: a lane could not reach the next chunk by changing
#    one bit of an address, and would have to compute each address anew.
# 3. K and V of a head take 8 MiB: six heads. The blocks of as many heads as fit are started side by side, the
#    longest tiles first (`together`, with 32 MiB to be safe).
# 4. That tile j has come: `cp.async.wait_group` waits for a thread's own copies only. The emulator says so; the
#    other promise is a race on the buffer that is refilled.
#
# </details>

# %%
print("edge tiles in a row, 192 × 128:", classes(4096, Tile(192, 128))[-1])
print("turns with (c + r) mod 8:", tensor_core.laid_out("", 8, lambda r, c: 8 * r + (c + r) % 8).conflict(2))
print("heads in 50 MiB:", (50 << 20) // (2 * 2 * 16384 * 128))
assert classes(4096, Tile(192, 128))[-1] == 2

# %% [markdown]
# ## Sources
#
# - Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023: sections 3.1 to
#   3.3, algorithm 1.
# - NVIDIA, *Parallel Thread Execution ISA*, 9.0: "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async".
# - NVIDIA, CUTLASS: swizzled layouts of shared memory.
# - In this repository: `refimpl/step3_flash_v2.py`, `refimpl/step4_causal.py`, `refimpl/step5_tensor_core.py`;
#   `numba_cuda/step5_tensor_core.py`, `numba_cuda/parts/tensor_ops.py`, `numba_cuda/ptx/__init__.py`.
