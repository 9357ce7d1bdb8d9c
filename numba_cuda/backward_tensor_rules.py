"""The gradients under any mask and any change of scores, on tensor cores.

**Idea**: what rules say of a pair of tiles is a word of bits and one factor a weight. Its class is asked before it is
copied, its mask before the product S; the slope of a change of scores is multiplied into the weight as soon as that has
been rounded for dV. So nothing is held longer than without rules.

**Changed from backward_tensor_core**: blocks go from live pair to live pair, through all query heads that read a key
head, and the next live one is copied while this one is worked on; a warp leaves out the pairs of which none of its own
rows is seen, all but its part of dS, 0. dV takes the weights before dP is computed: P, rounded, and then P times the
slope stand where there they stand side by side. What rules need travels as ``aux`` arguments, as in
``tensor_core_rules``.

**Traffic**: as backward_tensor_core with the live pairs in the place of those below the diagonal, and what ``general``
says of the arrays of rules. Rows and keys past the lengths in use are not read, nor are keys past the right bound of
the last row.

**Numerics**: as backward_tensor_core. With a change of scores log2(e) is multiplied in where lse is subtracted, and
dS = (P slope) (dP - D). Under dropout dV takes the weights that are kept, rounded as they were, and 1 / (1 - p) at the
end; dP is multiplied by it in fp32, and D subtracted then.

**Source**: Dao, "FlashAttention-2" (2023), section 3.1.2 and Algorithm 2; Dong et al., "Flex Attention" (2024),
sections 3 and 4 (rules, tile classes).
"""

from typing import NamedTuple

import numpy as np

from flash_cuda.backward import _keeps_dS, _relative
from flash_cuda.backward_bias import backward_dbias, backward_dtable
from flash_cuda.backward_tensor_rules_kernels import backward_clear, make_keys_kernel, make_queries_kernel
from flash_cuda.parts.backward_tensor_call import launch, launch_round, launch_rows, outputs, results, set_up
from flash_cuda.parts.backward_tensor_shapes import KEYS_BY_ARRAY, KEYS_BY_ELEMENT, KEYS_BY_RULE, QUERIES
from flash_cuda.parts.tensor_layout import side_by_side
from flash_cuda.parts.vocabulary import device
from flash_cuda.tensor_core_rules import changes, joined, listed, send
from refimpl.frame import Frame
from refimpl.masks import UNBOUNDED
from refimpl.rule import undecided
from refimpl.tiling import cdiv

THREADS = 128  # of the kernels that clear dS and add it up


class Functions(NamedTuple):
    """What a kernel is made for: device functions; score and its derivative are None where scores stay as they are."""

    mask: object
    tiles: object
    score: object
    slope: object


def bind(p, rules, changed, causal, align, dropout, **options):
    """Functions and kernel arguments of a call's options: (`Functions`, arguments); as `tensor_core_rules.joined`.

    The arguments are right, offsets, ends of queries and of keys, and aux of mask, score and dropout.
    """
    frame, seen, change, drop_aux, right = joined(p, rules, changed, causal, align, dropout, **options)
    if change and change.grad is None:
        raise ValueError("rules: expected a score rule with a derivative (grad) for the backward pass")
    sent = send(p, (frame.offsets, frame.lengths_q, frame.lengths_k), seen, change, drop_aux)
    of_score = (device(change.fn), device(change.grad)) if change else (None, None)
    return Functions(device(seen.fn), device(seen.tiles or undecided), *of_score), (right, *sent)


def attention_backward(
    Q, K, V, O, lse, dO, *, scale=None, causal=False, align="bottom_right", dlse=None, deterministic=True, tile=None,
    on=None, keys=None, queries=None, rules=(), softcap=None, alibi_slopes=None, bias=None, dropout=None, dtable=False,
    **options,
):  # fmt: skip
    """Gradients under every option; `backward_tensor_core.attention_backward` comes here when it is given any.

    Parameters
    ----------
    Q, K, V, O, lse, dO, scale, causal, align, dlse, deterministic, tile, on, keys, queries
        As there.
    mask, bias, window, softcap, alibi_slopes, lengths_q, lengths_k, dropout, rules
        As `flash_cuda.parts.rules.bind`: NumPy arrays and numbers.
    dtable : bool
        As `backward.attention_backward`.

    Returns
    -------
    dQ, dK, dV : shapes and dtype of Q, K, V
        As there.
    dbias : shape of bias, float32, or None without a bias
        As `backward.attention_backward`.
    dtable : (Hq, 2 R + 1), float32; if asked for
        Likewise.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As there, and as the rules; a score rule without a derivative; the gradient of a bias or table is wanted and a
        rule after it does more than add.
    """
    rules = listed(rules)
    changed = changes(rules, softcap, alibi_slopes, bias)
    keeping = _keeps_dS(rules, bias, dtable)
    alone = deterministic or keeping  # dQ by a kernel of its own
    p, given, setting = set_up(Q, K, V, O, lse, dO, dlse, scale, causal, align, on, tile)
    D, dtype, fill, vector = setting[:4]
    functions, arguments = bind(p, rules, changed, causal, align, dropout, **options)
    dQ, dK, dV = outputs(p, Q, K, V)
    looked_up = dropout is not None or bias is not None or any(rule.kind == "score" for rule in rules)
    wide = not (looked_up or (changed and (alone or not vector or setting.later)))
    table = KEYS_BY_ELEMENT if fill == "single" else KEYS_BY_RULE if wide else KEYS_BY_ARRAY
    keys, queries = setting.shapes(keys, queries, table[D], QUERIES[D])
    stats, sums = launch_rows(p, given, setting, keys, alone)

    inputs, scales = (p.Q, p.K, p.V, given.dO, stats), (p.scale, p.scale_log2)
    skewed, dropping = arguments[0] < UNBOUNDED, dropout is not None
    blocks, shared = p.B * p.Hk * cdiv(p.Nk, keys.rows), keys.shared_bytes(D, True)
    together = side_by_side(p.B * p.Hk, 2 * p.Nq * (p.d + p.dv) * p.Hq // p.Hk) if skewed else 1
    for of_k, of_v in setting.passes:
        adding = of_k and not alone
        kernel = make_keys_kernel(
            keys, D, dtype, fill, functions, dropping, of_k, of_v, adding, vector, adding and setting.later
        )  # fmt: skip
        launch(p, kernel, blocks, keys.threads, *inputs, sums, dK, dV, *scales, together, *arguments, shared=shared)
    if not alone:
        launch_round(p, setting, keys, sums, dQ)
        return results(p, dQ, dK, dV)
    dS = p.empty("dS", *((p.B, p.Hq, p.Nq, p.Nk) if keeping else (p.B, p.Hq, 0, 0)))
    if keeping:
        launch(p, backward_clear, p.B * p.Hq * p.Nq, THREADS, dS)
    blocks, shared = p.B * p.Hq * cdiv(p.Nq, queries.rows), queries.shared_bytes(D, False)
    together = side_by_side(p.B * p.Hq, 2 * p.Nk * (p.d + p.dv) * p.Hk // p.Hq) if skewed else 1
    kernel = make_queries_kernel(queries, D, dtype, fill, functions, dropping, keeping)
    launch(p, kernel, blocks, queries.threads, *inputs, dQ, dS, *scales, together, *arguments, shared=shared)
    return *results(p, dQ, dK, dV)[:3], *_of_added(p, dS, arguments, rules, bias, dtable)


def _of_added(p, dS, arguments, rules, bias, dtable):
    """The gradients of what was added to scores: dbias or None, and dtable if asked for."""
    dbias = table = None
    if bias is not None:
        full = p.empty("dbias", *((1,) * (4 - np.ndim(bias)) + np.shape(bias)))
        launch(p, backward_dbias, cdiv(full.size, THREADS), THREADS, dS, full)
        dbias = p.on.result(full).reshape(np.shape(bias))
    if dtable:
        bins = np.shape(_relative(rules)[0].at(Frame(p.B, p.Hq, p.Nq, p.Nk)).aux[0])
        table = p.empty("dtable", *bins)
        launch(p, backward_dtable, cdiv(table.size, THREADS), THREADS, dS, arguments[1], table)
    return (dbias, p.on.result(table)) if dtable else (dbias,)
