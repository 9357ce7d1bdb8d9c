"""What a kernel is timed against: attention as others ship it, each by name and version, or the reason it is not there.

Peers get the very device memory that our kernels read. torch chooses among its back ends by itself; here each is asked
for alone, so that a name in a table is the code that ran.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from verify.bench.check import GRADIENTS
from verify.bench.limits import FORWARD
from verify.timing import Contender

TORCH_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Peer:
    """One implementation that others ship.

    Attributes
    ----------
    name, about : str
    package : str
        What has to be importable.
    distribution : str
        Under which name its version is found.
    backend : str or None
        torch's name of the back end, for those that are one.
    dtypes : tuple of str
        Storage types that it takes.
    """

    name: str
    about: str
    package: str
    distribution: str
    backend: str | None = None
    dtypes: tuple = ("fp16", "bf16")


_SDPA = "torch's scaled_dot_product_attention, back end"
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("sdpa_flash", f"{_SDPA} FLASH_ATTENTION (FlashAttention-2)", "torch", "torch", "FLASH_ATTENTION"),
        Peer("sdpa_cudnn", f"{_SDPA} CUDNN_ATTENTION", "torch", "torch", "CUDNN_ATTENTION"),
        Peer("sdpa_efficient", f"{_SDPA} EFFICIENT_ATTENTION", "torch", "torch", "EFFICIENT_ATTENTION",
             ("fp16", "bf16", "fp32")),
        Peer("sdpa_math", f"{_SDPA} MATH: S and P in memory", "torch", "torch", "MATH", ("fp16", "bf16", "fp32")),
        Peer("flash_attn_2", "Dao-AILab/flash-attention, version 2", "flash_attn", "flash-attn"),
        Peer("flash_attn_3", "Dao-AILab/flash-attention, hopper/", "flash_attn_interface", "flash-attn-3"),
    )
}  # fmt: skip


@cache
def absent(name: str) -> str | None:
    """Why a peer cannot be measured here; None if it can."""
    peer = PEERS[name]
    for module in dict.fromkeys(("torch", peer.package)):
        try:
            import_module(module)
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            return f"{module} does not import ({type(error).__name__}: {error})".splitlines()[0]
    torch = import_module("torch")
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if peer.backend and not hasattr(_backends(), peer.backend):
        return f"torch {torch.__version__} has no back end {peer.backend}"
    return None


def version_of(name: str) -> str | None:
    """What ran, in words: the package's version, and cuDNN's where that is what computes."""
    if absent(name):
        return None
    peer = PEERS[name]
    try:
        words = f"{peer.distribution} {version(peer.distribution)}"
    except PackageNotFoundError:
        words = f"{peer.package} {getattr(import_module(peer.package), '__version__', 'of no known version')}"
    if peer.backend == "CUDNN_ATTENTION":
        words += f", cuDNN {import_module('torch').backends.cudnn.version()}"
    return words


def contender(name, point, arrays, rows=None):
    """A peer at a point.

    Parameters
    ----------
    name : str
        Of `PEERS`; it is there (see `absent`).
    point : verify.bench.points.Point
    arrays : dict of str to device arrays
        Q, K, V and, backward, dO: (B, H, N, d).
    rows : callable, optional
        Device array (B, H, N, d) -> host array of the sampled rows, for `Contender.outputs`.

    Returns
    -------
    timing.Contender
    """
    import torch

    peer, tensors = PEERS[name], {key: tensor(x, point.dtype) for key, x in arrays.items()}
    within = _chosen(peer.backend) if peer.backend else nullcontext
    attention = _sdpa(point.causal) if peer.backend else _flash_attn(peer.package, point.causal)
    Q, K, V = (tensors[key] for key in "QKV")
    facts = {"version": version_of(name)}
    if point.direction == FORWARD:
        kept = {}

        def work():
            with torch.no_grad():
                kept["O"] = attention(Q, K, V)

        return Contender(name, work, within, lambda: {"O": rows(kept["O"])}, facts)
    inputs = [x.detach().requires_grad_() for x in (Q, K, V)]
    with within():
        O = attention(*inputs)
    kept = {}

    def work():
        kept["gradients"] = torch.autograd.grad(O, inputs, tensors["dO"], retain_graph=True)

    def outputs():
        return {name: rows(x) for name, x in zip(GRADIENTS, kept["gradients"], strict=True)}

    return Contender(name, work, within, outputs, facts)


def tensor(array, dtype):
    """A device array as a tensor on the same memory. Two-byte integers stand in for bf16, which the interface lacks."""
    import torch

    wanted = getattr(torch, TORCH_DTYPES[dtype])
    if wanted is not torch.bfloat16:
        return torch.as_tensor(array, device="cuda")
    return torch.as_tensor(_Bits(array), device="cuda").view(torch.bfloat16)


class _Bits:
    """A device array of two-byte elements as signed integers, which every torch has."""

    def __init__(self, array):
        self._array = array  # keeps the memory alive
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "typestr": "<i2"}


def _backends():
    return import_module("torch.nn.attention").SDPBackend


def _chosen(backend):
    """A function that makes a context in which torch uses this back end alone, and says so if it cannot."""
    attention = import_module("torch.nn.attention")
    return lambda: attention.sdpa_kernel(getattr(attention.SDPBackend, backend))


def _sdpa(causal):
    call = import_module("torch.nn.functional").scaled_dot_product_attention
    return lambda Q, K, V: call(Q, K, V, is_causal=causal)


def _flash_attn(package, causal):
    """flash-attn's function on (B, H, N, d) arrays: a view in its own order, (B, N, H, d)."""
    call = import_module(package).flash_attn_func

    def attention(Q, K, V):
        result = call(*(x.transpose(1, 2) for x in (Q, K, V)), causal=causal)
        O = result[0] if isinstance(result, tuple) else result  # version 3 returned lse as well for a while
        return O.transpose(1, 2)

    return attention
