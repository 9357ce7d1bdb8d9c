"""Any mask and any change of scores on tensor cores: step 5's loop with rules in the place of the diagonal.

**Idea**: rules are asked about a tile where it is cheapest. Its class before it is copied, so that an empty one is
stepped over; the mask of its pairs before the product, while the registers of the scores are free; a change of scores
after it, where they stand.

**Changed from step5_tensor_core**: the loop goes from live tile to live tile, as that of ``general`` does, and the next
live one is copied while this one is worked on; a warp asks for the class of its own rows' part of the tile, and leaves
out what none of them sees. With a score rule the scores are natural until it has seen them; without one they are what
they were. What rules need travels as ``aux`` arguments.

**Traffic**: as step 5 with the live tiles in the place of those before the diagonal's end, and what ``general`` says of
the arrays of rules. Keys past the sequence's end, or past the mask's right bound for the tile's last row, are not read.

**Numerics**: as step 5; a score rule sees the scaled score in fp32, rounded, and log2(e) is multiplied in where the
maximum is subtracted. Dropped weights are 0 after l has been summed; 1 / (1 - p) comes in at the end. In a tile with
hidden keys a weight of 0 meets its value, as there.

**Source**: Dong et al., "Flex Attention" (2024), sections 3 and 4 (rules, tile classes); the loop as in step 5.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, uint16, uint32, uint64

from flash_cuda.parts.rules import NAMES, as_float32
from flash_cuda.parts.tensor_ops import tensor_ops
from flash_cuda.parts.tensor_rule_ops import tensor_rule_ops
from flash_cuda.parts.vocabulary import arguments, device
from flash_cuda.ptx import ballot, cp_async_commit, cp_async_wait
from flash_cuda.step5_tensor_core import SHAPES, set_up
from refimpl import scores
from refimpl.frame import Frame
from refimpl.masks import UNBOUNDED
from refimpl.philox import Dropout
from refimpl.rule import Rule, and_, then, undecided
from refimpl.standard import standard

# With a change of scores, or dropout, half as many keys, and Q's fragments in registers only where they are few: what
# rules need for each of its scores, a lane has to hold besides.
NARROW = {D: shape._replace(Bc=32, hold=D <= 32) for D, shape in SHAPES.items()}


class Functions(NamedTuple):
    """What a kernel is made for: device functions; score is None where scores stay as they are."""

    mask: object
    tiles: object
    score: object


@cache
def make_kernel(shape, D, dtype, fill, late_scale, rules, dropping=False, tracing=False, apart=False):
    """The kernel for one tile shape and one pair of rules; parameters as `step5_tensor_core.make_kernel`.

    Parameters
    ----------
    rules : Functions
    dropping : bool
        Weights are dropped.
    """
    Br, Bc, band, hold, fresh, _ = shape
    fresh = fresh or fill == "single" or apart
    warps, M = Br // band, band // 16
    tile = tensor_ops(Br, Bc, D, warps, dtype, fill, hold, fresh, apart)
    rule = tensor_rule_ops(Br, Bc, warps, *rules)
    K_AT, V_AT, STAGE = Br * D, Br * D + 2 * Bc * D, Bc * D  # where the first of K and of V are, and one's size
    q_size = M * D // 4
    s_size, p_size, o_size, rows, threads = M * Bc // 2, M * Bc // 4, M * D // 2, 2 * M, 32 * warps
    scored, LOG2E = rules.score is not None, math.log2(math.e)

    def step5_with_rules(
        Q, K, V, O, lse, scale, together, right, ends, offsets, mask_aux, score_aux, drop_aux, trace
    ):  # fmt: skip
        tiles = cuda.shared.array(0, uint16, alignment=128)  # Q_i, two K_j, two V_j
        l_s = cuda.shared.array((rows, threads), float32)  # each thread's own: only once a tile, and registers are few
        note = cuda.shared.array(6, int32)  # likewise, and the same for all
        live_s = cuda.shared.array(warps, int32)
        whole_s = cuda.shared.array(warps, int32)
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
        offset = int32(offsets[b])
        # What lies past the keys in use, or past what the tile's last row may see, is not read, whatever it holds.
        end = int32(min(min((i + 1) * Br, Nq) + offset + right, ends[b]))

        if cuda.threadIdx.x == 0:
            note[0], note[1], note[2], note[3], note[4], note[5] = b, h, i * Br, offset, end, h_k

        # load: Q_i, Br x d elements, once; the first live K_j and V_j
        tile.load_queries(tiles, 0, Q[b, h], i * Br, Nq)
        j, whole = rule.seek(live_s, whole_s, b, h, int32(i * Br), int32(0), Nq, Nk, offset, mask_aux)
        if int32(j * Bc) < Nk:
            tile.load(tiles, K_AT, K[b, h_k], int32(j * Bc), end)
            tile.load(tiles, V_AT, V[b, h_k], int32(j * Bc), end)
        cp_async_commit()
        q_at, k_at, v_at = tile.starts(tiles)
        tile.start(m, l_s, O_acc)

        at, first = int32(0), True
        while int32(j * Bc) < Nk:
            cp_async_wait()
            cuda.syncthreads()  # K_j and V_j are whole, and those before them have been read
            if hold and first:
                tile.hold_queries(q, tiles, q_at)
            first = False
            b, h, offset, h_k = note[0], note[1], note[3], note[5]
            # load: the next live K_j and V_j, Bc x (d + dv) elements, while this tile is worked on
            j_next, whole_next = rule.seek(live_s, whole_s, b, h, note[2], int32(j + 1), Nq, Nk, offset, mask_aux)
            if int32(j_next * Bc) < Nk:
                tile.load(tiles, int32(K_AT + STAGE - at), K[b, h_k], int32(j_next * Bc), note[4])
                tile.load(tiles, int32(V_AT + STAGE - at), V[b, h_k], int32(j_next * Bc), note[4])
            cp_async_commit()

            if fresh:  # registers are dearer than a dozen instructions
                q_at, k_at, v_at = tile.starts(tiles)
            col0 = int32(j * Bc)
            row_w = int32(note[2] + (tile.thread() >> 5) * (16 * M))  # this warp's first row
            kind = rule.kind_of(b, h, row_w, col0, Nq, Nk, offset, whole, mask_aux)
            if kind > 0:  # the same for all lanes of the warp
                edge = kind == 1 or int32(col0 + Bc) > Nk
                seen = uint64(0xFFFFFFFFFFFFFFFF)
                if edge:
                    seen = rule.visible(b, h, row_w, col0, Nq, Nk, offset, kind == 2, mask_aux)
                if ballot(seen != uint64(0)) != 0:  # a class may be too careful: some lane has something to do
                    # scores
                    tile.scores(q, tiles, q_at, int32(k_at + 2 * at), s)
                    if scored:
                        rule.change(s, scale, b, h, row_w, col0, Nq, Nk, offset, score_aux)
                    elif not late_scale:
                        tile.rescore(s, scale)
                    if edge:
                        rule.hide(s, seen)

                    # softmax
                    factor = scale
                    if scored:
                        factor = float32(LOG2E)
                    elif not late_scale:
                        factor = float32(1.0)
                    tile.softmax(s, factor, m, l_s, alpha, p)
                    if dropping:  # after the sums: dropout does not touch the softmax
                        rule.drop(p, rule.kept(b, h, row_w, col0, Nq, Nk, drop_aux))

                    # accumulate
                    tile.rescale(O_acc, alpha)
                    if fresh and apart:
                        v_at = tile.starts(tiles)[2]
                    tile.accumulate(p, tiles, int32(v_at + 2 * at), O_acc)
            if tracing:
                tile.record(trace[b, h, j], m, l_s, O_acc, row_w)
            j, whole, at = j_next, whole_next, int32(STAGE - at)

        # write: O_i and lse_i, once
        cp_async_wait()
        cuda.syncthreads()  # Q_i has been read: O_i may take its place
        b, h, row0 = note[0], note[1], note[2]
        if dropping:
            for r in range(rows):
                alpha[r] = drop_aux[0]
            tile.rescale(O_acc, alpha)
        tile.stage(O_acc, m, l_s, lse[b, h], row0, tiles)
        cuda.syncthreads()  # O_i is whole
        tile.write(tiles, O[b, h], row0)

    step5_with_rules.jit_options = {"launch_bounds": (32 * warps, shape.blocks) if shape.blocks else 32 * warps}
    return step5_with_rules


class Bound(NamedTuple):
    """Rules bound to one call."""

    functions: Functions
    arguments: tuple  # right, ends, offsets, mask aux, score aux, drop aux
    dropping: bool


def changes(rules, softcap=None, alibi_slopes=None, bias=None):
    """The score rules of a call, in the order in which they apply.

    They make kernels of their own, where those of ``general`` are data of one: a lane has too many scores to ask for
    each of them which changes there are.
    """
    given = (scores.softcap, softcap or None), (scores.alibi, alibi_slopes), (scores.bias, bias)
    made = [make(value) for make, value in given if value is not None]
    return made + [rule for rule in rules if rule.kind == "score"]


def joined(p, rules, changed, causal, align, dropout, *, window=None, lengths_q=None, lengths_k=None, mask=None):
    """A call's options as (Frame, mask rule, score rule or None, aux of dropout, right bound), rules at that frame.

    Parameters
    ----------
    p : launch.Problem
    rules, changed : list of Rule
        The call's own, and those that change scores.
    causal, align, dropout, window, lengths_q, lengths_k, mask
        As `flash_cuda.parts.rules.bind`.
    """
    if not isinstance(dropout, Dropout | None):
        raise TypeError(f"dropout: expected a Dropout or None, got {dropout!r}")
    frame = Frame(p.B, p.Hq, p.Nq, p.Nk, lengths_q, lengths_k, align)
    usual, _ = standard(causal=causal, window=window, mask=mask)
    right = usual.at(frame).aux[1]
    seen = and_(usual, *(rule for rule in rules if rule.kind == "mask")).at(frame)
    change = then(*changed).at(frame) if changed else None
    drop_aux = 1.0, 0, 0, 0, np.empty((0,) * 4, bool)
    if dropout is not None:
        keep = dropout.at(frame).keep
        drop_aux = dropout.scale, *dropout.arguments, drop_aux[-1] if keep is None else keep
    return frame, seen, change, drop_aux, right


def send(p, per_batch, seen, change, drop_aux):
    """The arguments of rules on the executor: arrays with a number a batch entry, aux of mask, score and dropout."""
    sent = per_batch, seen.aux, change.aux if change else (0,), drop_aux
    first, *rest = (arguments(p.on, aux, name) for aux, name in zip(sent, NAMES, strict=True))
    return *first, *(as_float32(aux) for aux in rest)


def bind(p, rules, changed, causal, align, dropout, **options):
    """Make one mask rule and one score rule of a call's options, and send their arguments; parameters as `joined`."""
    frame, seen, change, drop_aux, right = joined(p, rules, changed, causal, align, dropout, **options)
    offsets, ends, *rest = send(p, (frame.offsets, frame.lengths_k), seen, change, drop_aux)
    functions = Functions(device(seen.fn), device(seen.tiles or undecided), device(change.fn) if change else None)
    return Bound(functions, (right, ends, offsets, *rest), dropout is not None)


def listed(rules):
    """Rules of a call as a list, each one checked."""
    try:
        rules = [rules] if isinstance(rules, Rule) else list(rules)
    except TypeError:
        raise TypeError(f"rules: expected Rule objects, got {rules!r}") from None
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules: expected Rule objects, got {rule!r}")
    return rules


def attention(
    Q, K, V, *, scale=None, causal=False, align="bottom_right", tile=None, on=None, trace=None, shape=None,
    rules=(), softcap=None, alibi_slopes=None, bias=None, dropout=None, **options,
):  # fmt: skip
    """Attention with every option, on tensor cores; `step5_tensor_core.attention` comes here when it is given any.

    Parameters
    ----------
    Q, K, V, scale, causal, align, tile, on, trace, shape
        As there.
    mask, bias, window, softcap, alibi_slopes, lengths_q, lengths_k, dropout, rules
        As `flash_cuda.parts.rules.bind`: NumPy arrays and numbers.

    Returns
    -------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As there, and as the rules; before any launch.
    """
    rules = listed(rules)
    changed = changes(rules, softcap, alibi_slopes, bias)
    shapes = NARROW if changed or dropout is not None else SHAPES
    p, shape, setting = set_up(Q, K, V, scale, causal, align, tile, on, trace, shape, shapes)
    bound = bind(p, rules, changed, causal, align, dropout, **options)
    right, late_scale = bound.arguments[0], bool(changed) or bool(p.scale > 0)  # a change sees the scaled score anyway
    kernel = make_kernel(
        shape, setting.D, setting.dtype, setting.fill, late_scale, bound.functions, bound.dropping, p.tracing,
        setting.apart,
    )  # fmt: skip
    given = (
        p.Q, p.K, p.V, p.O, p.lse, p.scale if changed else p.scale_log2,
        setting.together if right < UNBOUNDED else 1, *bound.arguments, p.trace,
    )  # fmt: skip
    p.launch(kernel, p.B * p.Hq * p.Tr, *given, shared=setting.shared_bytes)
    return p.results()
