"""What a fault is: a name, what it says, where to read on, and a reference with one step replaced."""

from dataclasses import dataclass

from verify.diagnose.gradients import Gradients
from verify.diagnose.reference import Reference

FAULTS: dict[str, "Fault"] = {}


@dataclass(frozen=True)
class Fault:
    """One way to be wrong.

    Attributes
    ----------
    name : str
        The class of all faults that no input tells apart from it.
    what : str
        Completes "equals the reference with ...".
    chapter : str
        Section to read.
    look : str
        What to look at in the kernel.
    model : type
        Subclass of Reference or, with `backward`, of Gradients.
    needs : tuple of str
        Options without which it changes nothing.
    backward : bool
        Of the backward pass.
    noisy : bool
        A matter of rounding: its error has a known size, but not known digits, except on exact probes.
    empty : bool
        It is about rows that see no key. What others say of such rows is not held against them.
    """

    name: str
    what: str
    chapter: str
    look: str
    model: type
    needs: tuple = ()
    backward: bool = False
    noisy: bool = False
    empty: bool = False

    @property
    def tiled(self) -> str:
        """What its predictions depend on."""
        return self.model.backward_tiled if self.backward else self.model.tiled

    def concerns(self, probe) -> bool:
        """Whether it can change a probe's outputs."""
        options = probe.options
        return (probe.dO is not None) == self.backward and all(
            probe.Q.shape[1] != probe.K.shape[1] if need == "gqa" else need in options for need in self.needs
        )

    def predict(self, probe, tiling):
        """Outputs by name, in the types that store them; rows that are only called wrong; rows that may be anything."""
        made = self.model(probe, tiling)
        outputs = made.backward() if self.backward else made.forward()
        return probe.stored(outputs), made.wild, made.unknown


def fault(name, what, chapter, look, needs=(), noisy=False, empty=False):
    """Decorate a model: register it as a fault. Several models of one name are variants of one class."""

    def register(model):
        backward = issubclass(model, Gradients)
        if not issubclass(model, Reference):
            raise TypeError(f"model: expected a Reference, got {model!r}")
        key = name if name not in FAULTS else f"{name}#{sum(k.split('#')[0] == name for k in FAULTS)}"
        needed = (needs,) if isinstance(needs, str) else tuple(needs)
        FAULTS[key] = Fault(name, what, chapter, look, model, needed, backward, noisy, empty)
        return model

    return register
