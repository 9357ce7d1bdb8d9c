"""Every mutant, by name. A new one is an entry in one of the modules listed here, and nothing else."""

from importlib import import_module

ENTRIES_IN = (
    "softmax", "tiles", "causal", "heads", "options", "dropout", "backward", "precision", "tensor_core", "hopper",
    "backward_tensor_core", "tensor_rules", "backward_hopper", "reference",
)  # fmt: skip


def gathered() -> dict:
    """The mutants of all modules, in their order.

    Raises
    ------
    ValueError
        Two mutants have one name.
    """
    found = {}
    for module in ENTRIES_IN:
        for mutant in import_module(f"verify.mutants.{module}").ENTRIES:
            if mutant.name in found:
                raise ValueError(f"name: there are two mutants {mutant.name}")
            found[mutant.name] = mutant
    return found


MUTANTS = gathered()
