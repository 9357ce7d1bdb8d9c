"""Attention as a node of torch's graph: gradients of q, k, v from the outputs and, unlike flash-attn, from lse too."""

from functools import cache


@cache
def _node():
    """The autograd function; made when first needed, as torch may be absent."""
    import torch
    from torch.autograd.function import once_differentiable

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call, q, k, v):
            results = call.forward(q, k, v)
            ctx.call = call
            ctx.save_for_backward(q, k, v, *results[:2])
            ctx.mark_non_differentiable(*results[2:])
            return results

        @staticmethod
        @once_differentiable
        def backward(ctx, dout, dlse, *_):
            q, k, v, out, lse = ctx.saved_tensors
            return None, *ctx.call.backward(dout, q, k, v, out, lse, dlse)

    return Attention


def differentiable(call, q, k, v):
    """The results of ``call.forward(q, k, v)``, with a way back."""
    return _node().apply(call, q, k, v)
