"""FlashAttention in Triton: a program owns a tile of queries and runs over the keys with an online softmax."""

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N = 32, 32


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, scale_log2,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    H, GROUP, NQ, NK, D, DV,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0) * BLOCK_M
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    rows = start_m + tl.arange(0, BLOCK_M)
    cols, cols_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_ptr += b * sqb + h * sqh
    k_ptr += b * skb + h // GROUP * skh
    v_ptr += b * svb + h // GROUP * svh
    o_ptr += b * sob + h * soh

    q_mask = (rows[:, None] < NQ) & (cols[None, :] < D)
    q = tl.load(q_ptr + rows[:, None] * sqm + cols[None, :] * sqd, mask=q_mask, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    end = NK
    if CAUSAL:  # the last row of the tile sees keys up to here
        end = tl.minimum(NK, start_m + BLOCK_M + NK - NQ)
    for start_n in range(0, end, BLOCK_N):
        keys = start_n + tl.arange(0, BLOCK_N)
        k_mask = (keys[None, :] < NK) & (cols[:, None] < D)
        k = tl.load(k_ptr + keys[None, :] * skn + cols[:, None] * skd, mask=k_mask, other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * scale_log2
        seen = keys[None, :] < NK
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + NK - NQ)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - safe[:, None])
        alpha = tl.exp2(m - safe)
        l = l * alpha + tl.sum(p, 1)
        v_mask = (keys[:, None] < NK) & (cols_v[None, :] < DV)
        v = tl.load(v_ptr + keys[:, None] * svn + cols_v[None, :] * svd, mask=v_mask, other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    o = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    o_mask = (rows[:, None] < NQ) & (cols_v[None, :] < DV)
    tl.store(o_ptr + rows[:, None] * som + cols_v[None, :] * sod, o.to(o_ptr.dtype.element_ty), mask=o_mask)
    tl.store(lse_ptr + tl.program_id(1) * NQ + rows, (m + tl.log2(l)) * 0.6931471805599453, mask=rows < NQ)


def attn(q, k, v, *, scale=None, causal=False):
    """q (B, H, Nq, d), k (B, Hk, Nk, d), v (B, Hk, Nk, dv): returns O and lse."""
    (B, H, Nq, d), (Hk, Nk, dv) = q.shape, v.shape[1:]
    scale = d**-0.5 if scale is None else scale
    o = torch.empty((B, H, Nq, dv), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, Nq), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(Nq, BLOCK_M), B * H)
    _kernel[grid](
        q, k, v, o, lse, scale * 1.4426950408889634,
        *q.stride(), *k.stride(), *v.stride(), *o.stride(), H, H // Hk, Nq, Nk, d, dv,
        CAUSAL=causal, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        BLOCK_D=max(16, triton.next_power_of_2(d)), BLOCK_DV=max(16, triton.next_power_of_2(dv)),
    )  # fmt: skip
    return o, lse
