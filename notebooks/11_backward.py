# %% [markdown]
# # 11 · The backward pass on tensor cores
#
# *Chapter 18.2.4, 18.4.4, 18.5.2 and 18.6.4. Five products instead of two, two sums that want opposite loops, and one
# of the products a tile late.*
#
# ## What you'll do
#
# Derive the gradients and watch the loops that compute them move their data. Then follow P and dS through the lanes
# of a tensor core, count what the products cost, and read the Hopper kernel of this repository: its gradients are
# computed here, thread by thread, with its races looked for.
#
# ## What you'll learn
#
# - which five products there are, and what one number a row saves;
# - why no loop order keeps all three gradients on chip, and the three ways out;
# - why the kernels compute $S^T$ and not $S$;
# - what is short: not arithmetic, but shared memory;
# - how two warpgroups that need each other's work do without waiting for each other;
# - where the bits of two runs come to differ, and what it costs that they do not.
#
# ## What you'll need
#
# Notebook 04, section 6, for the trick with $D$; 05 for lanes, 06 for `wgmma` and `mbarrier`. No GPU: times are
# from `verify/records/`, all else runs here.

# %%
import re
from inspect import getsource

import numpy as np

from figures import backward as pictures
from figures import backward_rates, overlap, suite
from figures.products import Products
from flash_cuda import backward_hopper, backward_hopper_kernels, backward_tensor_core
from flash_cuda.executors.emulator import Emulator
from flash_cuda.executors.memory import KernelFault
from flash_cuda.parts import backward_tensor_shapes, hopper_gradient_ops

# %%
from reading import excerpt, judged
from refimpl import backward, oracle
from refimpl.observe import Tally
from refimpl.tiling import Tile, cdiv
from verify import judge
from verify.case import Problem
from verify.mutants import Graft
from verify.mutants.mutant import Edit

rng = np.random.default_rng(18)
KERNEL = getsource(backward_hopper_kernels.make_kernel)

# %% [markdown]
# ## 1 Five products
#
# The loss moves by $\langle dO, \delta O\rangle$, the sum of all products of elements, if O moves by $\delta O$.
# Every rule follows from turning such a sum round. As $O = P V$,
#
# $$\langle dO, P\,\delta V\rangle = \langle P^T dO, \delta V\rangle \quad\text{and}\quad
# \langle dO, \delta P\, V\rangle = \langle dO\,V^T, \delta P\rangle,$$
#
# so $dV = P^T dO$ and $dP = dO\,V^T$. A row of P is a softmax, whose derivative is
# $\delta P_{ij} = P_{ij}(\delta S_{ij} - \sum_k P_{ik}\,\delta S_{ik})$, so
#
# $$dS = P \circ (dP - D), \qquad D_i = \sum_j P_{ij}\, dP_{ij} = \sum_c dO_{ic}\, O_{ic}.$$
#
# At last $S = \text{scale}\; Q K^T$ gives $dQ = \text{scale}\; dS\, K$ and $dK = \text{scale}\; dS^T Q$. Nobody kept
# P, but $P_{ij} = e^{S_{ij} - \text{lse}_i}$. That makes five products of $2 N^2 d$ operations: S, dP, dV, dQ, dK.
# If a gradient *dlse* reaches lse, then $\delta\,\text{lse}_i = \sum_k P_{ik}\,\delta S_{ik}$, and all that changes is
# $D - dlse$ in the place of $D$.

# %%
Q, K, V, dO = (rng.standard_normal((1, 1, 24, 8)) for _ in range(4))
dlse, scale = rng.standard_normal((1, 1, 24)), 1 / np.sqrt(8)
O, lse = oracle.attention(Q, K, V)
P = np.exp(scale * Q @ K.mT - lse[..., None])
D = (dO * O).sum(axis=-1) - dlse
dS = P * (dO @ V.mT - D[..., None])
by_hand = scale * dS @ K, scale * dS.mT @ Q, P.mT @ dO
for name, a, b in zip(("dQ", "dK", "dV"), by_hand, oracle.attention_backward(Q, K, V, dO, dlse=dlse), strict=False):
    print(f"{name}: largest difference from the oracle {np.abs(a - b).max():.1e}")
    assert np.abs(a - b).max() <= 1e-13

# %% [markdown]
# The chapter has the formulas right, and two numbers about them wrong:

# %%
judged("18.4-040", "18.4-048", "18.4-049")

# %% [markdown]
# ## 2 Two sums, one tile
#
# A tile of dS takes part in two sums: $dQ_i$ adds up along its row of tiles, $dK_j$ (with $dV_j$) along its column.
# A loop can keep one of them on chip. `refimpl/backward.py` has two ways out, and says what crosses between HBM and
# chip while it runs. Order v1 has K and V outside, like version 1's forward pass, and sends the sums of dQ round
# through HBM; order v2 goes over all tiles twice, once for dK and dV and once for dQ:

# %%
N, d, tile = 512, 64, Tile(32, 64)
Q, K, V, dO = (rng.standard_normal((1, 1, N, d), np.float32) for _ in range(4))
O, lse = oracle.attention(Q, K, V)
tallies = {}
for order in backward.ORDERS:
    tallies[order] = tally = Tally()
    backward.attention_backward(Q, K, V, O, lse, dO, order=order, tile=tile, observe=tally, dtype=np.float32)
    for way, counts in (("loads", tally.loads), ("stores", tally.stores)):
        print(f"{order} {way:6}", ", ".join(f"{name} {n / (N * d):.3g}" for name, n in counts.items()))
print("in units of N × d elements: of Q, K, ... once")

# %% [markdown]
# The formulas are in the docstring, and hold exactly. Bytes, with 2 an element of inputs and outputs and 4 an element
# of lse, D and sums; `fills_D` is the pass over O and dO before:

# %%
B, Hq, Hk, Nq, Nk, dv, e, f, Tr, Tc = 1, 1, 1, N, N, d, 2, 4, cdiv(N, tile.Br), cdiv(N, tile.Bc)
said = dict(re.findall(r"(fills_\w+) = (.*)", backward.__doc__))
fills = {name: eval(formula) for name, formula in said.items()}
for order, tally in tallies.items():
    counted = tally.hbm_bytes(e)
    print(f"{order}: {counted / 2**20:.2f} MiB counted, {cdiv(N, tile.Bc)} visits of each query tile")
    assert counted == fills["fills_D"] + fills[f"fills_{order}"]
least = e * N * 8 * d + f * N
print(f"Q, K, V, O, dO and lse read once, dQ, dK and dV written once: {least / 2**20:.2f} MiB")

# %% [markdown]
# The third way is the one of version 2's paper, and the fast one: K and V outside, and the tiles' shares of dQ *added
# where they lie*, by an instruction that does so in the L2. Nothing of dQ is loaded, but the order of additions is
# whoever comes first; section 7 is about that.
#
# | | products | dQ | bits of two runs |
# | --- | --- | --- | --- |
# | order v1 | 5 | travels through HBM, key tile by key tile | same |
# | order v2 | 7: S and dP twice | stays on chip | same |
# | atomic | 5 | added up in the L2 | differ |
#
# Kernels here have the last two, and `deterministic` chooses. How many products there are is counted in section 4.

# %%
judged("18.4-047", "18.5-039")

# %% [markdown]
# ## 3 Keys as rows
#
# Notebook 05 has a piece of luck: the forward pass leaves S in just the lanes from which the next product
# takes P. The backward pass has the same luck, but only once, and one can choose where. A product leaves fragments C
# and takes a fragment A whose *rows are rows of the result*. The results with rows of keys are dV and dK, two of the
# three. So the kernels compute $S^T = K Q^T$ and $dP^T = V\,dO^T$, keys as rows, and $P^T$ and $dS^T$ come out
# where $dV \mathrel{+}= P^T dO$ and $dK \mathrel{+}= dS^T Q$ take them:

# %%
left, taken, across = maps = pictures.data_lanes()
for part in maps:
    print(f"{' '.join(part.title.split()):60} {left.in_place(part)} of {part.lane.size} elements where they are")
assert (left.lane == taken.lane).all() and left.in_place(across) < left.lane.size / 4
pictures.fig_lanes(maps)

# %% [markdown]
# The third product, $dQ = dS\,K$, has rows of queries, and wants dS turned over: nearly every element in another
# lane. So dS, and dS alone, goes through shared memory; and as dQ's sum is over keys, which are spread over all warps
# of the block, it would have to meet the others there anyway. On Hopper `wgmma` reads it from there *across*, both
# operands with their rows along the sum; `mma.sync` has `ldmatrix.trans` for it. How dS is made and stored on Hopper:

# %%
def routine(name):
    """The source of one of the routines of a consumer warpgroup."""
    source = getsource(hopper_gradient_ops.hopper_gradient_ops)
    return re.search(rf"    def {name}\(.*?(?=\n\n    @cuda)", source, re.S)[0]


print(routine("gradient"), routine("share_gradient"), sep="\n\n")

# %% [markdown]
# ## 4 What is short
#
# The emulator plays the kernels' own bodies; one that keeps account of their products (`figures/products.py`) says
# what a tile costs. Three kernels at d = 128, with all of a head's tiles whole: the one for Hopper with atomic
# additions, at two query tiles; the same with the deterministic way, whose dQ is step 5's kernel; and the one-pass
# kernel of `mma.sync`.


# %%
def inputs(Nq, Nk, d, Hq=1, Hk=1):
    """Q, K, V and dO in fp16."""
    shapes = (1, Hq, Nq, d), (1, Hk, Nk, d), (1, Hk, Nk, d), (1, Hq, Nq, d)
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


def gradients(module, Q, K, V, dO, *, deterministic=False, causal=False, **how):
    """dQ, dK and dV by a kernel, after a forward pass in fp64."""
    O, lse = oracle.attention(*(x.astype(np.float64) for x in (Q, K, V)), causal=causal)
    O, lse = O.astype(Q.dtype), lse.astype(np.float32)
    return module.attention_backward(Q, K, V, O, lse, dO, causal=causal, deterministic=deterministic, **how)[:3]


# %%
Bc, shape = backward_hopper_kernels.Bc, backward_hopper_kernels.SHAPES[128]
NAMES = re.findall(r"(\w+?)(?:_acc)? = cuda\.local\.array", KERNEL)
RUNS = {"Hopper": (backward_hopper, 2 * shape.Br, Bc, False), "Hopper, same bits": (backward_hopper, 128, Bc, True),
        "mma.sync": (backward_tensor_core, 64, 64, False)}  # fmt: skip
runs = {}
for name, (module, Nq, Nk, same) in RUNS.items():
    arrays, on = inputs(Nq, Nk, 128), Products(NAMES)
    runs[name] = on, arrays, gradients(module, *arrays, on=on, deterministic=same)
    counted = {kernel: flops / (2 * Nq * Nk * 128) for kernel, flops in on.flops.items()}
    for kernel, products in counted.items():
        read = on.read_bytes[kernel] / on.flops[kernel]
        print(f"{name:18} {kernel:16} {products:.2f} products, {1000 * read:.1f} bytes read for 1000 operations")
    assert list(counted.values()) == {"Hopper": [5.5], "mma.sync": [5]}.get(name, [4, 3])

# %% [markdown]
# Five products in one pass, four and three in two. (The half in the first line is a product at the kernel's start, of a
# dS of zeros: one a block, however long its walk.) And now the budget of a multiprocessor, in cycles for a pair of
# tiles: 4096 operations of products a cycle, 16 exponentials as in notebook 06, and 128 bytes of shared memory.

# %%
def budget(name, keys, queries, read):
    """Cycles that each unit needs for a pair of tiles at d = 128, one after the other."""
    area = keys * queries
    written = 2 * area + 2 * 2 * queries * 128  # dS by threads; Q and dO by copies
    cycles = 5 * 2 * area * 128 / overlap.PRODUCT_FLOPS, area / overlap.EXPONENTIALS, (read + written) / 128
    print(f"{name:9} {keys} keys, {queries} queries: products {cycles[0]:,.0f}, exponentials {cycles[1]:,.0f}", end="")
    print(f", shared memory {cycles[2]:,.0f} ({read / 1024:.0f} KiB read, {written / 1024:.0f} written)")
    return cycles[2] / cycles[0]


read, unit = runs["Hopper"][0].read_bytes["backward_hopper"], backward_hopper_kernels.UNIT
zeros = 2 * 2 * (unit * Bc + Bc * unit)  # both operands of the product of zeros, for two warpgroups
on_hopper = budget("Hopper", Bc, shape.Br, (read - zeros) / 2)
by_mma = budget("mma.sync", 64, 64, read_by_mma := runs["mma.sync"][0].read_bytes["backward_keys"])
assert on_hopper < 1 < 2 < by_mma

# %% [markdown]
# The docstring of the `mma.sync` kernel has the way of the data in it, and the same bytes:

# %%
told = backward_tensor_core.__doc__.split("Data moves as follows, ")[1].split("Two blocks share")[0]
print(told)
said = re.search(r"(\d+) KiB are read a tile pair and (\d+) KiB written", told)
assert [int(n) * 1024 for n in said.groups()] == [read_by_mma, 2 * 64 * 64 + 2 * 2 * 64 * 128]
for d in (64, 128):
    of = backward_tensor_shapes.KEYS[d]
    print(f"d = {d}: {of.rows} keys × {of.columns} queries, {of.threads // 32} warps of {of.band} keys", end=", ")
    print(f"{of.shared_bytes(d, True) / 1024:.0f} KiB; registers a thread: dK and dV {2 * of.band * d // 32}", end=", ")
    print(f"S and dP {2 * of.band * of.columns // 32}")

# %% [markdown]
# With `mma.sync` shared memory takes more than twice as long as products would at the full rate, so it is what the
# kernel is bound by, and no order of instructions helps. `wgmma` takes its second operand straight from shared memory,
# once for 64 rows and not once for each warp's 16 or 32; its first comes from registers in the products that section 3
# arranged for. That brings the two just level. Exponentials are a fifth: unlike in the forward pass, they are easy to
# hide. So the whole difficulty is to have a product in flight *always*, and shared memory read by little else.
#
# ## 5 What is in flight
#
# A block of the Hopper kernel is a producer and two consumer warpgroups. Each consumer has 64 keys of the tile, whose
# dK and dV stay in its registers, and both walk over the query tiles that see it. The kernel's docstring:

# %%
text = backward_hopper_kernels.__doc__
print(text.split("step6_flash_v3**: ")[1].split("\n\n")[0], end="\n\n")
print("A block is" + text.split("\n\nA block is")[1].split("\n\nD at most")[0])

# %% [markdown]
# That table as a picture, read off the lines of the loop. A product is a bar from its start to the wait that ends it;
# below stands what the warpgroup does itself:

# %%
flight = pictures.data_flight()
pictures.fig_flight(flight)

# %% [markdown]
# There is one gap, where dV has ended and the warpgroup meets; then the *other* warpgroup's products have the tensor
# cores, if it is not at the same place. The emulator saw the same: what each wait ended, and what went on.

# %%
waits = [wait for wait in runs["Hopper"][0].waits if wait.warpgroup == 0]
for wait in waits[1:6]:  # from the first dP to the second S
    print(f"waits for {', '.join(wait.finished):7} in flight: {', '.join(wait.in_flight) or 'nothing'}")
seen = [(wait.finished, set(wait.in_flight)) for wait in waits[1:6]]
assert seen == [([name], left) for name, left in flight.waits()]

# %% [markdown]
# Now the product that does not fit in. $dQ_i = dS\,K$ sums over all 128 keys, of which each warpgroup has half. To
# compute it at tile i, a warpgroup would have to wait until the other has stored its half of dS: then both are always
# at the same place, and want the same unit at the same time. So at tile i it computes dQ of tile i − 1, whose dS has
# long been there:

# %%
excerpt(KERNEL, "# products: dQ of the tile before", "ptx.wgmma_commit()")

# %% [markdown]
# Before the first tile there is none, and so a buffer of zeros: a branch around a product would make the assembler run
# *all* products one by one. How far apart may the two be? While one writes its half of dS of tile i, the other, almost
# a tile behind, still writes its half of i − 1 and reads i − 2 for dQ: hence three buffers, and one barrier each, whose
# phase bit turns when the round of three begins anew. That a buffer has been *read* needs no barrier; the comment says
# why:

# %%
excerpt(KERNEL, "# That a buffer of dS has been read", "ptx.mbarrier_arrive(uint32(W_bars")
tiles = 2 * (2 * Bc * 128 + 2 * backward_hopper_kernels.STAGES * shape.Br * 128)  # K, V, Q and dO, bytes before dS
places = [min(wait.first_operands) - 1024 - tiles for wait in waits if "dQ" in wait.finished]
buffers = [place // (2 * Bc * shape.Br) for place in places]
print(f"\nthe emulator saw dQ read buffers {buffers}, first the zeros")
assert buffers == [(n - 1) % backward_hopper_kernels.BUFFERS for n in range(len(buffers))]
print("\n" + routine("add_queries"))

# %% [markdown]
# The shares of dQ are added as the lanes hold them: four numbers an instruction, a warp at 512 neighbouring bytes,
# in an array of the tiles' own order that a last kernel turns round, scales and rounds. It is the only thing of the
# loop that leaves the chip. What the emulator counted there, in all kernels of the call: dO is read twice, as a first
# kernel computes D, which also clears the sums.

# %%
counts = runs["Hopper"][0].counts
for name, (loads, stores) in counts.items():
    if loads + stores:
        print(f"{name:7} {loads:6,} elements loaded, {stores:6,} stored or added")
Nq = RUNS["Hopper"][1]
assert counts["Q"] == (Nq * 128, 0) and counts["dQ_sum"] == (Nq * 128, 2 * Nq * 128)

# %% [markdown]
# That is one key tile. Each further one loads Q and dO again, and adds as much to the sums again.
#
# ## 6 Is it right?
#
# The runs of section 4 have also computed gradients. Held against fp64 by the rules of `verify` (the bound is twice
# the plain formula's error in the same precision, and a floor), and a ragged causal one with two heads a K/V head:

# %%
def held(name, arrays, found, **options):
    """Judge gradients and print their share of the bound."""
    problem = Problem(*arrays[:3], {"scale": None, "causal": False, "align": "bottom_right"} | options, dtype="fp16")
    known = judge.reference(problem, arrays[3])
    metrics = {at: judge.measure(at, x, known, "fp16") for at, x in zip(("dQ", "dK", "dV"), found, strict=True)}
    said = (f"{at} off by {m.max_abs:.1e}, bound {m.bound:.1e}" for at, m in metrics.items())
    print(f"{name:17}", ", ".join(said))
    assert all(m.ok for m in metrics.values()), name


for name, (_, arrays, found) in runs.items():
    held(name, arrays, found)
arrays = inputs(70, 50, 64, Hq=2)
held("causal, GQA", arrays, gradients(backward_hopper, *arrays, on=Emulator(), causal=True), causal=True)

# %% [markdown]
# And the mistakes of this kernel are mistakes of order, right a thousand times and wrong once. Three, planted in its
# source; the emulator does not look at the gradients at all, but at what each thread can know:

# %%
KEYS = "backward_hopper"
EDITS = {
    "two buffers of dS": ("", "STAGES, BUFFERS = 2, 3", "STAGES, BUFFERS = 2, 2"),
    "dS stored, but not handed to the products": (KEYS, " " * 24 + "proxy_fence()\n", ""),
    "dP read while it is computed": (KEYS, "wait_dP(dP)", "pass"),
}
arrays = inputs(4 * shape.Br, Bc, 128)
for about, (function, old, new) in EDITS.items():
    graft = Graft([Edit("numba_cuda/backward_hopper_kernels.py", function, old, new)])
    try:
        gradients(graft.load("flash_cuda.backward_hopper"), *arrays, on=Emulator())
        raise AssertionError(f"{about}: nothing was noticed")
    except KernelFault as fault:
        print(f"{about}:\n    {type(fault).__name__}: {str(fault)[:105]}")

# %% [markdown]
# ## 7 The same bits
#
# fp32 addition is not associative, and blocks add to dQ in the order in which they happen to come. The emulator takes
# an order by its seed. Four tiles of keys, made so that every key has another with the same dS and the opposite K:
# the exact dQ is 0, and what comes out is what rounding left of numbers that cancel.

# %%
Q, K, V, dO = inputs(16, 64, 16)
Q, K, V = 0 * Q, np.concatenate([1000 * K[:, :, :32], -1000 * K[:, :, :32]], 2), np.concatenate([V[:, :, :32]] * 2, 2)
for same in (False, True):
    ran = [gradients(backward_tensor_core, Q, K, V, dO, on=Emulator(seed), deterministic=same, tile=Tile(16, 16))
           for seed in range(5)]  # fmt: skip
    dQ, dK, dV = (len({run[k].tobytes() for run in ran}) for k in range(3))
    print(f"deterministic {same!s:5}: different results in {len(ran)} runs: dQ {dQ}, dK {dK}, dV {dV}", end="")
    print(f"; dQ up to {max(np.abs(run[0]).max() for run in ran):.0e}")
    assert (dK, dV) == (1, 1) and (dQ == 1) is same

# %% [markdown]
# dK and dV are the same every run in both: one block owns them, and walks over query tiles, and over the query heads
# of a group, in an order of its own. `deterministic` has dQ computed by blocks that own *it*. That costs two products
# of seven, but no memory: other libraries give each group of blocks a dQ of its own and add these up afterwards.

# %%
judged("18.7-013", "18.7-016")

# %% [markdown]
# ## 8 Registers, shared memory, and the PTX beside the Python
#
# What a thread and a block have, for d = 64 and 128. Compiled here for an H200, offline, if the `dev` extra is there:

# %%
try:
    from flash_cuda.executors.assembler import Assembler, assemble, numba_type, resources
except ImportError as missing:
    Assembler = object
    print(f"no NVVM here ({missing}): install the dev extra to see registers and PTX")


class Kept(Assembler):
    """Assembles the Hopper kernel alone, and keeps its PTX and what it needs."""

    def launch(self, body, blocks, threads, args, shared=0):
        if body.__name__ == KEYS:
            ((cubin, self.ptx),) = assemble(body, tuple(map(numba_type, args)), self.ccs).values()
            self.needs = resources(cubin)


# %%
text, found = "", {}
if Assembler is not object:
    half, lse, on = np.zeros((1, 1, 256, 128), np.float16), np.zeros((1, 1, 256), np.float32), Kept("sm_90a")
    backward_hopper.attention_backward(half, half, half, half, lse, half, deterministic=False, on=on)
    text, found = on.ptx, on.needs
# %%
give, take = (int(re.search(rf'set_registers\("{way}", (\d+)\)', KERNEL)[1]) for way in ("dec", "inc"))
for d, of in backward_hopper_kernels.SHAPES.items():
    print(f"d = {d}: {Bc} keys × {of.Br} queries, {of.shared_bytes / 1024:.0f} KiB of 227 shared; registers a thread")
    print(f"    while dS is made: S {of.Br // 2}, dP {of.Br // 2}, P {of.Br // 4}, dK and dV {of.D}", end=", ")
    print(f"together {of.Br + of.Br // 4 + of.D}; dS takes the places of S and dP")
    print(f"    while dQ is added: S {of.Br // 2}, dS {of.Br // 4}, dQ {unit // 2}, dK and dV {of.D}", end=", ")
    print(f"together {of.Br // 2 + of.Br // 4 + unit // 2 + of.D}")
threads = backward_hopper_kernels.THREADS
print(f"producer {give}, consumers {take}: {128 * give + (threads - 128) * take:,} of 65,536 registers", end="; ")
print(f"compiled at d = 128: {found['registers']}, stack {found['stack_bytes']}" if found else "not compiled")
assert not found or (found["stack_bytes"] == 0 and found["registers"] * threads <= 65536)

# %% [markdown]
# So neither a third consumer fits nor a larger tile. That dQ has only a 64 × 64 part a warpgroup, and that S and dP are
# dead by the time it is needed, is what makes room for it. The instructions, with what the compiler made of the Python:

# %%
PAIRS = {
    "begin_rows(S, K, Q), as dP's": r"wgmma[^;]*p, 1, 1, 0, 0;",
    "multiply_sums(dV, P, k, dO, 1)": r"wgmma[^;]*p, 1, 1, 1;",
    "multiply_across(dQ, dS, K)": r"wgmma[^;]*p, 1, 1, 1, 1;",
    "ex2(S * scale - lse)": r"ex2\.approx[^;]*;",
    "store_word(panel, W[2 * n])": r"st\.shared\.b32[^;]*;",
    "proxy_fence()": r"fence\.proxy\.async\.shared[^;]*;",
    "add_four(at, dQ, 4 * n)": r"red\.global[^;]*;",
    "bulk_load(lse or D, ...)": r"cp\.async\.bulk\.shared[^;]*;",
}
for python, pattern in PAIRS.items() if text else ():
    lines = re.findall(pattern, text)
    shown = re.sub(r"\{%f[^}]*\}", lambda m: f"{{{m[0].count('%')} × f32}}" if m[0].count("%") > 4 else m[0], lines[0])
    print(f"{python:31}{len(lines):3} × ", " ".join(shown.split()))

# %% [markdown]
# The counts are arithmetic again: S and dP are each started before the loop and in it, dK in it and after it, dQ in it
# and twice after it, each time in steps of 16 along their sum.

# %%
along_d, along_keys, along_queries = 128 // 16, Bc // 16, shape.Br // 16
expected = 2 * 2 * along_d, (1 + 2) * along_queries, 3 * along_keys
print("expected: S and dP {}, dV and dK {}, dQ {}".format(*expected))
assert not text or expected == tuple(len(re.findall(pattern, text)) for pattern in list(PAIRS.values())[:3])
assert not text or len(re.findall(PAIRS["ex2(S * scale - lse)"], text)) == 64 * shape.Br // 128
assert ".f64" not in text

# %% [markdown]
# ## 9 What was measured
#
# The backward pass beside step 6 is the Hopper kernel, the one beside step 5 that of `mma.sync`. Five products are
# counted, half of each when causal; dQ is added up atomically. If there is no record, the figure says so.

# %%
data = backward_rates.data_by_length()
print(data.note)
for (name, d, causal), points in sorted(data.lines.items()):
    said = ", ".join(f"{N // 1024}K {rate:.0f}" for N, rate in points)
    print(f"{name:18} d = {d:3}, {'causal ' if causal else 'no mask'}, TFLOP/s: {said}")
backward_rates.fig_by_length(data)

# %%
bars = suite.data_bars()
for at in bars.standings:
    if at.bar.direction == "backward":
        print(f"{at.bar}: {at.mean or 'no record'}; the bar is {at.bar.mean:g}")
for d in (64, 128) if data.lines else ():
    rates = dict(data.lines.get(("step6_flash_v3", d, False), []))
    if rates and data.reached:
        print(f"d = {d}: {max(rates.values()) / data.reached:.0%} of what large products alone reach there")

# %% [markdown]
# The kernel's docstring has what was tried on the way, each as a share of one run:

# %%
print(backward_hopper_kernels.__doc__.split("**Speed**: ")[1].split("**Source**")[0].strip())

# %% [markdown]
# ## 10 The chapter on version 3's backward pass

# %%
judged("18.6-092", "18.6-062", "18.6-065", "18.5-038")

# %% [markdown]
# ## Exercises
#
# 1. Had the kernels queries as rows, S and not $S^T$: which of the three products after dS would find its operand in
#    the right lanes?
# 2. In section 4, let $P^T$ go through shared memory like dS. Which unit is the Hopper kernel bound by then?
# 3. From which N on does the product of zeros cost less than a hundredth?
# 4. Under a causal mask key tile 0 is seen by all query tiles and the last one by one or two. In which order should
#    the blocks start? Notebook 06, section 8, has the question for the forward pass.
# 5. Would a third stage of Q and dO fit into the 227 KiB of shared memory that a block may have?
#
# <details><summary>Solutions</summary>
#
# 1. dQ alone, as the third panel of the figure is its own mirror image: one of three instead of two.
# 2. By shared memory: P would be written once and read once. The cell below has the ratio before and after.
# 3. One product of $5\, T_r + 1$ is below that from 20 query tiles on, $N = 1280$ at d = 128.
# 4. The first key tiles first, which the numbers of the blocks already give: the long ones must not come last.
# 5. At d = 128 yes, at d = 64 no, by very little; see below.
#
# </details>

# %%
extra = 2 * 2 * shape.Br * Bc  # written once, read once
print(f"2: {on_hopper:.2f} of the products' cycles, with P in shared memory", end=" ")
print(f"{on_hopper + extra / 128 / (5 * 2 * shape.Br * Bc * 128 / overlap.PRODUCT_FLOPS):.2f}")
print("3:", next(Tr for Tr in range(1, 100) if 1 / (5 * Tr + 1) < 0.01) * shape.Br)
for d, of in backward_hopper_kernels.SHAPES.items():
    three = of.shared_bytes + 2 * 2 * of.Br * of.D + 2 * 4 * of.Br + 4 * backward_hopper_kernels.BARRIER
    print(f"5: d = {d}: {three / 1024:.1f} KiB, {'fits' if three <= 227 << 10 else 'does not fit'}")

# %% [markdown]
# ## Sources
#
# - Dao, Fu, Ermon, Rudra, Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022:
#   appendix B.2 and B.4, algorithm 4.
# - Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023: section 3.1.2,
#   algorithm 2.
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
#   Low-precision", 2024: section 3.4, appendix B.1, algorithm 3.
# - NVIDIA, *Parallel Thread Execution ISA*, 9.0: "wgmma.mma_async", "red", "fence.proxy.async", "cp.async.bulk".
# - In this repository: `refimpl/backward.py`; `numba_cuda/backward_tensor_core.py`, `numba_cuda/backward_hopper.py`,
#   `numba_cuda/backward_hopper_kernels.py`, `numba_cuda/parts/hopper_gradient_ops.py`; `figures/products.py`.
