"""The judge: runs kernels on named cases and says how far they are from fp64, and whether that is far."""

from importlib import import_module

# Loaded on first use, so that `python -m verify kernels` does not wait for what it does not need.
_HOMES = {
    "assert_attention_close": "verify.testing",
    "check": "verify.testing",
    "DEFAULT": "verify.cases",
    "Case": "verify.cases",
    "KERNELS": "verify.registry",
}
__all__ = ["DEFAULT", "KERNELS", "Case", "assert_attention_close", "check"]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'verify' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
