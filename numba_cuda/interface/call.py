"""One call of the flash-attn interface with its arguments checked: choose a kernel, run it forward or backward.

Everything here is in flash-attn's layout, (B, N, H, d), on arrays of the caller's kind. Kernels take any strides, so
their (B, H, N, d) is a view of it; results are written in theirs, and copied once into the other order.
"""

from dataclasses import dataclass, replace

import numpy as np

from flash_cuda.interface import checks as check
from flash_cuda.interface.steps import BACKWARD, Asked, choose
from flash_cuda.launch import head_room
from flash_cuda.parts.tensor_map import address_of, obstacle
from refimpl.philox import Dropout


@dataclass(frozen=True)
class Call:
    """What one call asks for; run it with `forward` and `backward`.

    lengths_q, lengths_k : (B,) of int, or None where all rows and keys are in use
    on : executor, or None for the GPU on which the arrays are
    """

    name: str
    kind: object
    sizes: dict
    scale: float = None
    causal: bool = False
    window: tuple = (None, None)
    softcap: float = None
    alibi_slopes: np.ndarray = None
    dropout: Dropout = None
    lengths_q: np.ndarray = None
    lengths_k: np.ndarray = None
    on: object = None
    tile: object = None
    threads: tuple = None
    explain: object = False
    probabilities: bool = False
    deterministic: bool = False

    @property
    def needs(self):
        """Names of the options in use; a bound that no row reaches is none."""
        left, right = self.bounds
        used = {"causal": right == 0, "window_size": left is not None or (right or 0) > 0, "softcap": self.softcap,
                "alibi_slopes": self.alibi_slopes is not None, "dropout_p": self.dropout,
                "lengths": self.lengths_q is not None or self.lengths_k is not None}  # fmt: skip
        return frozenset(name for name, on in used.items() if on)

    @property
    def bounds(self):
        """(left, right) of the window, causal as a right bound of 0; None where none is in reach."""
        left, right = self.window
        right = 0 if self.causal else right
        # A left bound of Nk - 1 hides nothing where the last row stands at the last key or before it; with a right
        # bound of Nq - 1 the first row sees the last key. Shorter sequences reach less.
        left = None if left is None or left >= self.sizes["Nk"] - 1 else left
        return left, None if right is None or right >= self.sizes["Nq"] - 1 else right

    def check_room(self):
        """Refuse a tile that `forward` would refuse."""
        step, _ = choose(self.needs)
        check.room(self.sizes["d"], self.sizes["dv"], self.tile, self.threads, step.tiles)

    def executor(self):
        """Where this runs."""
        on = self.on or self.kind.gpu()
        if not self.kind.host and getattr(on, "where", "gpu") != "gpu":
            raise TypeError(f"on: expected a Gpu executor for {self.kind.name} in GPU memory, got {type(on).__name__}")
        return on

    def say(self, chosen, reason, on, order="deterministic: no atomics"):
        """One line on which kernel runs, where, and why, to whoever asked with ``explain``."""
        line = f"{self.name}: {chosen} ({getattr(on, 'where', 'custom')}): {reason}; {order}"
        if self.explain:
            (self.explain if callable(self.explain) else print)(line)

    def options(self, needs):
        """The keyword arguments of a kernel for these options, those that are in use."""
        left, right = self.bounds
        window = (left, None if right == 0 else right) if "window_size" in needs else None
        options = {
            "window": window, "softcap": self.softcap, "alibi_slopes": self.alibi_slopes, "dropout": self.dropout,
            "lengths_q": self.lengths_q, "lengths_k": self.lengths_k,
        }  # fmt: skip
        always = {"scale": self.scale, "causal": right == 0, "tile": self.tile, "threads": self.threads}
        return always | {name: value for name, value in options.items() if value is not None}

    def asked(self, on, **arrays):
        """What a step for tensor cores depends on; None where there is none to be had, or a tile was given."""
        capability = getattr(on, "capability", None)
        if capability is None or self.tile or self.threads:
            return None
        found = (None if isinstance(x, np.ndarray) else (name, obstacle(x.shape, x.strides, address_of(x), 2))
                 for name, x in arrays.items())  # fmt: skip
        words = next((f"{name}: {why}" for name, why in filter(None, found) if why), None)
        q, v = arrays["q"], arrays["v"]
        return Asked(capability, q.dtype, q.shape[-1], v.shape[-1], words)

    def heads_first(self, x):
        """(B, N, H, d) as an executor takes it, (B, H, N, d)."""
        return self.kind.enter(x).transpose(0, 2, 1, 3)

    def forward(self, q, k, v):
        """(out (B, Nq, H, dv), softmax_lse (B, H, Nq)), and S_dmask (B, H, Nq, Nk) if asked for."""
        needs = self.needs
        with self.kind.device():
            on = self.executor()
            arrays = [self.heads_first(x) for x in (q, k, v)]
            step, reason = choose(needs, self.asked(on, **dict(zip("qkv", arrays, strict=True))))
            self.say(step.module, reason, on)
            O, lse = step.attention(*arrays, on=on, **self.options(needs))
            out, lse = self.kind.leave(O, 0, 2, 1, 3), self.kind.leave(lse)
            return (out, lse, self.kind.from_host(self.signed_weights(q, k, on))) if self.probabilities else (out, lse)

    def backward(self, dout, q, k, v, out, lse, dlse=None):
        """(dq, dk, dv)."""
        needs = self.needs
        with self.kind.device():
            on = self.executor()
            q, k, v, out, dout = map(self.heads_first, (q, k, v, out, dout))
            step, reason = choose(needs, self.asked(on, q=q, k=k, v=v, dout=dout), BACKWARD)
            if self.deterministic:
                self.say(step.module, reason, on)
            else:
                name = "backward_atomic" if step.module == "backward" else step.module
                self.say(name, reason, on, "not deterministic: dq by atomic additions")
            rows = None if dlse is None else self.kind.enter(dlse)
            *grads, _ = step.attention_backward(
                q, k, v, out, self.kind.enter(lse), dout, dlse=rows, on=on, deterministic=self.deterministic,
                **self.options(needs),
            )  # fmt: skip
            return tuple(self.kind.leave(x, 0, 2, 1, 3) for x in grads)

    def signed_weights(self, q, k, on):
        """S_dmask on the host, N x N: the softmax, with the sign bit set where dropout drops a weight.

        The weights are what the kernel gives for V = the identity, some columns at a time.
        """
        Q, K = (np.asarray(self.kind.to_host(x)).transpose(0, 2, 1, 3) for x in (q, k))
        (B, H, Nq, d), (Hk, Nk) = Q.shape, K.shape[1:3]
        plain = replace(self, dropout=None)
        step, _ = choose(plain.needs)
        S, width = np.zeros((B, H, Nq, Nk), Q.dtype), head_room(d, 1)
        for first in range(0, Nk, width):
            columns = np.eye(Nk, min(width, Nk - first), -first).astype(Q.dtype)
            V = np.broadcast_to(columns, (B, Hk, *columns.shape))
            S[..., first : first + width], _ = step.attention(Q, K, V, on=on, **plain.options(plain.needs))
        if self.dropout:
            for b, h in np.ndindex(B, H):
                kept = self.dropout.mask(b, h, slice(0, Nq), slice(0, Nk))
                S[b, h] = np.where(kept, S[b, h], -S[b, h])
        return S


def make_call(
    name, kind, sizes, *, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, rng_state=None, on=None, tile=None, threads=None,
    explain=False, lengths_q=None, lengths_k=None,
):  # fmt: skip
    """Check the arguments that all functions share, and make a `Call` of them."""
    scale, causal = check.softmax_scale(softmax_scale), check.flag("causal", causal)
    window = tuple(None if n < 0 else n for n in check.pair("window_size", window_size, -1))
    cap, dropout = check.softcap(softcap), check.dropout(dropout_p, rng_state, kind.random)
    slopes = check.alibi_slopes(alibi_slopes, sizes["B"], sizes["H"])
    deterministic = check.flag("deterministic", deterministic)
    probabilities = check.flag("return_attn_probs", return_attn_probs)
    check.extras(on, tile, threads, explain)
    return Call(
        name, kind, sizes, scale, causal, window, cap, slopes, dropout, used(lengths_q, sizes["Nq"]),
        used(lengths_k, sizes["Nk"]), on, tile, threads, explain, probabilities, deterministic,
    )  # fmt: skip


def used(lengths, N):
    """Lengths of a padded axis, or None where nothing is padding."""
    return None if lengths is None or (lengths == N).all() else lengths


def run(call, *arrays):
    """Run a call; where torch wants gradients, as a node of its graph."""
    if any(call.kind.wants_gradient(x) for x in arrays):
        from flash_cuda.interface.torch_autograd import differentiable

        return differentiable(call, *arrays)
    return call.forward(*arrays)

