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

from flash_cuda.backward_tensor_rules_kernels import make_keys_kernel, make_queries_kernel
from flash_cuda.parts.backward_tensor_call import launch, launch_round, launch_rows, outputs, results, set_up
from flash_cuda.parts.backward_tensor_shapes import KEYS, QUERIES
from flash_cuda.parts.tensor_layout import side_by_side
from flash_cuda.parts.vocabulary import device
from flash_cuda.tensor_core_rules import changes, joined, listed, send
from refimpl.masks import UNBOUNDED
from refimpl.rule import undecided
from refimpl.tiling import cdiv


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
    on=None, keys=None, queries=None, rules=(), softcap=None, alibi_slopes=None, bias=None, dropout=None, **options,
):  # fmt: skip
    """Gradients under every option; `backward_tensor_core.attention_backward` comes here when it is given any.

    Parameters
    ----------
    Q, K, V, O, lse, dO, scale, causal, align, dlse, deterministic, tile, on, keys, queries
        As there.
    mask, window, softcap, alibi_slopes, lengths_q, lengths_k, dropout, rules
        As `flash_cuda.parts.rules.bind`: NumPy arrays and numbers.

    Returns
    -------
    dQ, dK, dV : shapes and dtype of Q, K, V
        As there.
    None

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As there, and as the rules; a score rule without a derivative; a bias, whose gradient is not made here.
    """
    if bias is not None:
        raise ValueError("bias: expected None, for its gradient is not made on tensor cores; backward makes it")
    rules = listed(rules)
    changed = changes(rules, softcap, alibi_slopes)
    p, given, setting = set_up(Q, K, V, O, lse, dO, dlse, scale, causal, align, on, tile)
    D, dtype, fill, vector = setting[:4]
    functions, arguments = bind(p, rules, changed, causal, align, dropout, **options)
    dQ, dK, dV = outputs(p, Q, K, V)
    keys, queries = setting.shapes(keys, queries, KEYS[D], QUERIES[D])
    stats, sums = launch_rows(p, given, setting, keys, deterministic)

    inputs, scales = (p.Q, p.K, p.V, given.dO, stats), (p.scale, p.scale_log2)
    skewed, dropping = arguments[0] < UNBOUNDED, dropout is not None
    blocks, shared = p.B * p.Hk * cdiv(p.Nk, keys.rows), keys.shared_bytes(D, True)
    together = side_by_side(p.B * p.Hk, 2 * p.Nq * (p.d + p.dv) * p.Hq // p.Hk) if skewed else 1
    for of_k, of_v in setting.passes:
        kernel = make_keys_kernel(
            keys, D, dtype, fill, functions, dropping, of_k, of_v, of_k and not deterministic, vector
        )  # fmt: skip
        launch(p, kernel, blocks, keys.threads, *inputs, sums, dK, dV, *scales, together, *arguments, shared=shared)
    if deterministic:
        blocks, shared = p.B * p.Hq * cdiv(p.Nq, queries.rows), queries.shared_bytes(D, False)
        together = side_by_side(p.B * p.Hq, 2 * p.Nk * (p.d + p.dv) * p.Hk // p.Hq) if skewed else 1
        kernel = make_queries_kernel(queries, D, dtype, fill, functions, dropping)
        launch(p, kernel, blocks, queries.threads, *inputs, dQ, *scales, together, *arguments, shared=shared)
    else:
        launch_round(p, setting, keys, sums, dQ)
    return results(p, dQ, dK, dV)
