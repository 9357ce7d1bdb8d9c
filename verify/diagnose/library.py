"""All faults, in the order in which equals are listed."""

from importlib import import_module

from verify.diagnose.fault import FAULTS, Fault

MODULES = (
    "backward", "backward_options", "inputs", "masks", "windows", "tiles", "options", "precision", "softmax", "lse",
)  # fmt: skip

for _module in MODULES:
    import_module(f"verify.diagnose.faults_{_module}")  # registers its faults

__all__ = ["FAULTS", "Fault"]
