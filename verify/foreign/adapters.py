"""Attention as others ship it, ready to be judged: `--kernel sdpa:flash`, `flash-attn`, `triton-tutorial:FILE.py`."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from verify.foreign.import_file import import_file
from verify.misuse import Misuse

BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
}
# Beyond what they refuse by themselves. Seen on an H200 with PyTorch 2.11: a negative scale gives NaN; rows off 16-byte
# boundaries a misaligned address (flash) or NaN (cuDNN); a row whose mask hides every key the mean of V (cuDNN).
SAYS = {
    "flash": {"negative_scale": False, "unaligned": False},
    "cudnn": {"negative_scale": False, "unaligned": False, "empty_rows": False},
}
NAMES = (*(f"sdpa:{name}" for name in BACKENDS), "flash-attn", "triton-tutorial:FILE.py")
FAMILIES = ("sdpa", "flash-attn", "triton-tutorial")


def check(text):
    """See that an adapter's name is complete and what it needs is installed.

    Raises
    ------
    Misuse
    """
    family, _, rest = text.partition(":")
    if family == "sdpa" and rest not in BACKENDS:
        raise Misuse(f"--kernel: expected sdpa:{'|'.join(BACKENDS)}, got {text!r}")
    if family == "flash-attn" and rest:
        raise Misuse(f"--kernel: expected flash-attn alone, got {text!r}")
    if family == "triton-tutorial" and not Path(rest).is_file():
        raise Misuse(f"--kernel: expected triton-tutorial:FILE.py, there is no file {rest!r}")
    for package in {"flash-attn": ("torch", "flash_attn"), "triton-tutorial": ("torch", "triton")}.get(
        family, ("torch",)
    ):
        if not find_spec(package):
            raise Misuse(f"--kernel: {family} needs {package}, which is not installed")


def load(text):
    """(an object with CAPABILITIES, the function) of an adapter's name."""
    family, _, rest = text.partition(":")
    return {"sdpa": _sdpa, "flash-attn": _flash_attn, "triton-tutorial": _triton_tutorial}[family](rest)


def _sdpa(backend):
    """torch.nn.functional.scaled_dot_product_attention with one back end alone. Its causal aligns top left."""
    torch = import_module("torch")
    chosen = import_module("torch.nn.attention")
    call = torch.nn.functional.scaled_dot_product_attention
    only = getattr(chosen.SDPBackend, BACKENDS[backend])

    def attention(q, k, v, *, scale=None, is_causal=False, attn_mask=None, attn_bias=None):
        if is_causal and (attn_mask is not None or attn_bias is not None):  # torch takes one or the other
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            attn_mask, is_causal = seen if attn_mask is None else attn_mask & seen, False
        if attn_bias is not None:
            attn_bias = attn_bias.to(q.dtype).expand(*q.shape[:3], k.shape[2])
            attn_mask = attn_bias if attn_mask is None else attn_bias.masked_fill(~attn_mask, -torch.inf)
        try:
            with chosen.sdpa_kernel(only):
                return call(q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise NotImplementedError(f"PyTorch's {backend} back end has no kernel for this") from None

    says = {"arrays": "torch", "layout": "bhsd"} | SAYS.get(backend, {})
    return SimpleNamespace(CAPABILITIES=says), attention


def _flash_attn(_):
    """Dao-AILab's flash_attn_func, with its lse."""
    call = import_module("flash_attn").flash_attn_func

    def attention(q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
        options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        return call(q, k, v, **options, alibi_slopes=alibi_slopes, return_attn_probs=True)

    says = {"arrays": "torch", "layout": "bshd", "dtypes": ("fp16", "bf16")}
    return SimpleNamespace(CAPABILITIES=says), attention


def _triton_tutorial(path):
    """A file with the signature of Triton's tutorial 06: attention(q, k, v, causal, sm_scale), positional."""
    module = import_file(Path(path))
    if not callable(getattr(module, "attention", None)):
        raise ValueError(f"{Path(path).name} has no function 'attention', which Triton's tutorial has")
    extra = max(0, _forward_parameters(module.attention) - 5)

    def attention(q, k, v, *, causal, sm_scale):
        # Newer tutorials have switches for warp specialisation after the scale: all off.
        return module.attention(q, k, v, causal, sm_scale, *[False] * extra)

    says = {"arrays": "torch", "layout": "bhsd", "gqa": False}
    return SimpleNamespace(CAPABILITIES=says | getattr(module, "CAPABILITIES", {})), attention


def _forward_parameters(fn):
    """How many arguments an autograd function's forward takes that must be given; 5 where that cannot be told."""
    forward = getattr(getattr(fn, "__self__", None), "forward", None) or fn
    try:
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return 5
    given = [p for p in found if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(given) - (given[0].name == "ctx" if given else 0)
