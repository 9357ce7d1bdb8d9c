"""Step 5: both products on tensor cores, fed by copies that run beside them.

**Idea**: a warp multiplies 16 x 16 by 16 x 8 matrices of 16-bit numbers in one instruction, from registers. So
everything else must keep up: Q, K and V stay in 16 bits on their way, scores and weights never leave the registers
between the two products, and the next tiles are copied while this one is worked on.

**Changed from step4_causal**: the tile routines (``tensor_ops`` in the place of ``tile_ops``); two K tiles and two V
tiles in shared memory, so that one barrier a tile is enough; a warp leaves out the tiles that none of its own rows
sees; blocks with the most work start first. Data moves as follows, at d = 128 with tiles of 128 x 64 on 4 warps:

    global -> shared   Q_i 32 KiB once, K_j and V_j 16 KiB each, a tile ahead     cp.async, 16 bytes a thread
    shared -> registers  a warp's 32 rows of Q_i, 8 KiB, all of K_j and V_j, 32 KiB     ldmatrix, 512 bytes a warp
    registers          S = Q K^T (128 mma), max and exp2 in quads, P rounded, O += P V (128 mma)
    registers -> shared -> global   O_i into Q_i's place, then out, once          16 bytes a thread

With 32 rows a warp each fragment of K and V serves two products: 40 KiB of shared memory read for 256 mma, which at 128
bytes a cycle is 320 cycles of the multiprocessor; 16 rows would need 64 KiB for as many. A lane has 128 registers of O
and 64 of S, which leaves fewer than 64 for all else: Q's fragments are read again for each tile (at d up to 64 they
stay), addresses are computed anew, and l waits in shared memory. The weights of 16 keys are ready before those of the
next, so that the compiler mixes the exponentials with the products P V.

What else was tried on an H200, in shares of the rate of `SHAPES` in the same run (fp16, N = 16384, no mask, d = 64 and
128): 16 rows a warp 0.86 and 0.84; a block of 64 rows 0.92 and 0.89; tiles of 32 keys at d = 128 0.94; of 128 keys at
d = 64, with 16 rows a warp, 0.81; a third block a multiprocessor at d = 64, in 168 registers a lane, 0.94.

**Traffic**: as step 4, but tiles are always copied whole: in the place of rows past the end the last one is read again,
which costs no memory traffic, only requests.

requested = B*Hq*(f*Nq+e*(dv*Nq+d*Br*Tr+(d+dv)*Bc*sum(max(0,cdiv(min(Nk,Nq+diag,i*Br+Br+diag),Bc)) for i in range(Tr))))

**Numerics**: products of 16-bit numbers are exact and summed in fp32, in an order and with a rounding of the hardware's
own; the weights are rounded to 16 bits for the second product, after l has been summed from them in fp32. A positive
scale is multiplied in where the maximum is subtracted, one rounding for both; O is multiplied by 1 / l, rounded. In a
tile with hidden keys a weight of 0 meets its value, so a NaN in V reaches all rows of the query tiles that visit it.

**Source**: Dao, "FlashAttention-2" (2023), sections 3.2 and 3.3; NVIDIA, "CUTLASS" (swizzled layouts); for the
instructions ``ptx``.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import float32, int32, uint16, uint32

from flash_cuda.launch import prepare, storage
from flash_cuda.parts.tensor_layout import filling, side_by_side
from flash_cuda.parts.tensor_ops import tensor_ops
from flash_cuda.ptx import cp_async_commit, cp_async_wait
from refimpl.tiling import Tile


class Shape(NamedTuple):
    """How a block works: the choices that only speed depends on."""

    Br: int
    Bc: int
    band: int = 32  # rows of a warp, 16 or 32: with 32 a fragment of K or V serves two products
    hold: bool = False  # the fragments of Q stay in registers
    fresh: bool = False  # addresses are computed anew for each tile, to free registers
    blocks: int | None = None  # that a multiprocessor shall run at once: bounds the registers


# Head room D -> shape. Shared memory holds Q_i and two each of K_j and V_j, at most 97 KiB: two blocks share an H200's.
SHAPES = {
    16: Shape(128, 64, hold=True), 32: Shape(128, 64, hold=True, fresh=True), 64: Shape(128, 64, hold=True),
    96: Shape(128, 64), 128: Shape(128, 64, fresh=True), 192: Shape(64, 32, 16), 256: Shape(64, 32, 16),
}  # fmt: skip
TILES = {D: Tile(shape.Br, shape.Bc) for D, shape in SHAPES.items()}


@cache
def make_kernel(shape, D, dtype, fill, late_scale=True, tracing=False, apart=False):
    """The kernel for one tile shape; grid (B * Hq * Tr), 32 threads a warp.

    Parameters
    ----------
    shape : Shape
    D : int
        Head room, a multiple of 16.
    dtype : "fp16" or "bf16"
    fill : "whole", "padded" or "single"
    apart : bool
        As `tensor_ops.tensor_ops`.
    late_scale : bool
        The scale is positive, so that it can wait until after the maximum.
    tracing : bool
        Record the state after each key tile.
    """
    Br, Bc, band, hold, fresh, _ = shape
    fresh = fresh or fill == "single" or apart
    warps, M = Br // band, band // 16
    tile = tensor_ops(Br, Bc, D, warps, dtype, fill, hold, fresh, apart)
    K_AT, V_AT, STAGE = Br * D, Br * D + 2 * Bc * D, Bc * D  # where the first of K and of V are, and one's size
    q_size = M * D // 4
    s_size, p_size, o_size, rows, threads = M * Bc // 2, M * Bc // 4, M * D // 2, 2 * M, 32 * warps

    def step5_tensor_core(Q, K, V, O, lse, scale_log2, diag, together, trace):
        tiles = cuda.shared.array(0, uint16, alignment=128)  # Q_i, two K_j, two V_j
        l_s = cuda.shared.array((rows, threads), float32)  # each thread's own: only once a tile, and registers are few
        note = cuda.shared.array(5, int32)  # likewise, and the same for all
        q = cuda.local.array(q_size, uint32)
        s = cuda.local.array(s_size, float32)
        p = cuda.local.array(p_size, uint32)
        O_acc = cuda.local.array(o_size, float32)
        m = cuda.local.array(rows, float32)
        alpha = cuda.local.array(rows, float32)

        Hq, Nq = int32(Q.shape[1]), int32(Q.shape[2])
        Hk, Nk = int32(K.shape[1]), int32(K.shape[2])
        Tr = int32(uint32(Nq + Br - 1) // uint32(Br))
        # Blocks start in this order: ``together`` heads side by side, of them the last query tiles first, since under a
        # causal mask those are the longest.
        group = int32(uint32(cuda.blockIdx.x) // uint32(together * Tr))
        heads = int32(min(together, int32(Q.shape[0]) * Hq - group * together))
        at = int32(cuda.blockIdx.x - group * together * Tr)
        turn = int32(uint32(at) // uint32(heads))
        head = int32(group * together + at - turn * heads)
        i = int32(Tr - 1 - turn)
        b = int32(uint32(head) // uint32(Hq))
        h = int32(head - b * Hq)
        h_k = int32(uint32(h) // uint32(uint32(Hq) // uint32(Hk)))

        # Row r sees keys 0 .. r + diag: the tile's last row bounds what is live, its first row what is full.
        seen_by_last = int32(min(min((i + 1) * Br, Nq) + diag, Nk))
        live = int32(uint32(max(seen_by_last, 0) + Bc - 1) // uint32(Bc))
        seen_by_first = int32(min(i * Br + 1 + diag, Nk))

        if cuda.threadIdx.x == 0:
            note[0], note[1], note[2], note[3], note[4] = b, h, i * Br, seen_by_first, diag

        # load: Q_i, Br x d elements, once; K_0 and V_0
        tile.load_queries(tiles, 0, Q[b, h], i * Br, Nq)
        if live > 0:
            tile.load(tiles, K_AT, K[b, h_k], 0, seen_by_last)
            tile.load(tiles, V_AT, V[b, h_k], 0, seen_by_last)
        cp_async_commit()
        q_at, k_at, v_at = tile.starts(tiles)
        tile.start(m, l_s, O_acc)

        for j in range(live):
            cp_async_wait()
            cuda.syncthreads()  # K_j and V_j are whole, and K_j-1 and V_j-1 have been read
            if hold and j == 0:
                tile.hold_queries(q, tiles, q_at)
            col0, col1, at = int32(j * Bc), int32(j * Bc + Bc), int32((j & 1) * STAGE)
            # load: K_j+1 and V_j+1, Bc x (d + dv) elements, while this tile is worked on
            if int32(j + 1) < live:
                tile.load(tiles, int32(K_AT + STAGE - at), K[b, h_k], col1, seen_by_last)
                tile.load(tiles, int32(V_AT + STAGE - at), V[b, h_k], col1, seen_by_last)
            cp_async_commit()

            if fresh:  # registers are dearer than a dozen instructions
                q_at, k_at, v_at = tile.starts(tiles)
            row_w = int32(note[2] + (tile.thread() >> 5) * (16 * M))  # this warp's first row
            reach = note[4] if apart else diag
            if col0 < int32(row_w + 16 * M + reach):  # this warp's last row sees one of these keys
                # scores
                tile.scores(q, tiles, q_at, int32(k_at + 2 * at), s)
                if not late_scale:
                    tile.rescore(s, scale_log2)
                if col1 > note[3]:  # an edge tile: the first row does not see all of it
                    tile.mask(s, row_w, col0, Nk, reach)

                # softmax
                tile.softmax(s, scale_log2 if late_scale else float32(1.0), m, l_s, alpha, p)

                # accumulate
                tile.rescale(O_acc, alpha)
                if fresh and apart:
                    v_at = tile.starts(tiles)[2]
                tile.accumulate(p, tiles, int32(v_at + 2 * at), O_acc)
            if tracing:
                tile.record(trace[note[0], note[1], j], m, l_s, O_acc, row_w)

        # write: O_i and lse_i, once
        cp_async_wait()
        cuda.syncthreads()  # Q_i has been read: O_i may take its place
        b, h, row0 = note[0], note[1], note[2]
        tile.stage(O_acc, m, l_s, lse[b, h], row0, tiles)
        cuda.syncthreads()  # O_i is whole
        tile.write(tiles, O[b, h], row0)

    step5_tensor_core.jit_options = {"launch_bounds": (32 * warps, shape.blocks) if shape.blocks else 32 * warps}
    return step5_tensor_core


def tile_for(d, causal=False):
    """The tile for a head dim, where d = dv."""
    return TILES[next(room for room in TILES if d <= room)]


class Setting(NamedTuple):
    """What a kernel is made for and launched with, besides its shape."""

    D: int
    dtype: str
    fill: str
    apart: bool
    together: int  # heads whose longest query tiles come first, under a causal mask
    shared_bytes: int


def set_up(Q, K, V, scale, causal, align, tile, on, trace, shape, shapes):
    """Check a call as `attention` says; (launch.Problem, Shape, `Setting`), the shape from ``shapes`` if not given."""
    tiles = {D: Tile(usual.Br, usual.Bc) for D, usual in shapes.items()}
    tile = Tile(shape.Br, shape.Bc) if shape else tile
    p = prepare(Q, K, V, scale, causal, align, tile, (1, 1), on, trace, tiles)
    dtype = storage("Q", Q)
    if dtype == "fp32":
        raise TypeError("Q: expected dtype fp16 or bf16 for tensor cores, got fp32; step4_causal takes it")
    if p.tile.Br % 16 or p.tile.Bc % 16:
        raise ValueError(f"tile: expected Br, Bc multiples of 16, got ({p.tile.Br}, {p.tile.Bc})")
    major, minor = getattr(p.on, "capability", (8, 0))
    if major < 8:
        raise RuntimeError(f"on: expected a GPU of compute capability 8.0 or more, got {major}.{minor}; step4_causal "
                           "runs there")
    D = next(room for room in shapes if max(p.d, p.dv) <= room)
    if shape is None:
        band = 32 if p.tile.Br % 32 == 0 and D <= 128 else 16
        shape = shapes[D]._replace(Br=p.tile.Br, Bc=p.tile.Bc, band=band)
    if shape.band not in (16, 32) or shape.Br % shape.band:
        raise ValueError(f"shape: expected Br a multiple of a band of 16 or 32, got Br {shape.Br}, band {shape.band}")
    p.threads = shape.Br // shape.band, 32
    fill = filling(D, (p.d, p.dv), (p.Q, p.K, p.V), written=(p.dv,))
    # The last query tiles of as many heads as fit the L2.
    together = side_by_side(p.B * p.Hq, 2 * p.Nk * (p.d + p.dv) * p.Hk // p.Hq)
    return p, shape, Setting(D, dtype, fill, major >= 10, together, 2 * D * (shape.Br + 4 * shape.Bc))


def attention(Q, K, V, *, scale=None, causal=False, align="bottom_right", tile=None, threads=None, on=None, trace=None,
              shape=None, **options):
    """softmax(scale Q K^T) V on the executor ``on``; arguments, shapes and errors as ``flash_cuda.launch.prepare``.

    Parameters
    ----------
    Q, K, V
        fp16 or bf16. Rows that do not begin on 16-byte boundaries, or whose columns are not adjacent, are read element
        by element: right, and slow.
    tile : refimpl.tiling.Tile, optional
        Multiples of 16; by `SHAPES` if not given.
    threads
        Taken as every step does, and of no effect: a block has 32 threads for each 16 or 32 rows of its tile.
    shape : Shape, optional
        In the place of ``tile``: everything that was chosen for speed.
    **options
        mask, bias, window, softcap, alibi_slopes, lengths_q, lengths_k, dropout, rules: a call with any of them takes
        the kernel of `tensor_core_rules`.

    Returns
    -------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm

    Raises
    ------
    TypeError, ValueError
        As `prepare`; fp32 inputs; a tile that is no multiple of 16; as the rules.
    RuntimeError
        As `prepare`; a GPU without these instructions.
    """
    options = {name: x for name, x in options.items() if x is not None and not (name == "rules" and x in ((), []))}
    if options:
        from flash_cuda.tensor_core_rules import attention as with_rules

        return with_rules(Q, K, V, scale=scale, causal=causal, align=align, tile=tile, on=on, trace=trace, shape=shape,
                          **options)
    p, shape, setting = set_up(Q, K, V, scale, causal, align, tile, on, trace, shape, SHAPES)
    kernel = make_kernel(shape, setting.D, setting.dtype, setting.fill, p.scale > 0, p.tracing, setting.apart)
    together = setting.together if causal else 1
    arguments = p.Q, p.K, p.V, p.O, p.lse, p.scale_log2, p.diag, together, p.trace
    p.launch(kernel, p.B * p.Hq * p.Tr, *arguments, shared=setting.shared_bytes)
    return p.results()
