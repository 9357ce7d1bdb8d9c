"""What a mutant is: a named bug, as an edit of the source that it would be a bug of."""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from refimpl.tiling import Tile
from verify.dtypes import DTYPES

FOLDERS = {"numba_cuda": "flash_cuda", "refimpl": "refimpl"}  # folder -> name under which it is imported
AREAS = (
    "softmax", "tiles", "causal", "scale and lse", "heads", "options", "dropout", "backward", "precision",
    "tensor cores",
)  # fmt: skip
STORED = ("fp32", "fp16", "bf16")


class Edit(NamedTuple):
    """One place of the source, changed.

    Attributes
    ----------
    path : str
        From the root of the repository: "numba_cuda/parts/tile_ops.py".
    function : str
        The function that is changed, wherever in the file it is nested; "" for the module's own lines.
    old, new : str
        Text that occurs in the function once and no more, and what stands there instead.
    """

    path: str
    function: str
    old: str
    new: str

    @property
    def module(self) -> str:
        """The dotted name of the file."""
        folder, _, rest = self.path.partition("/")
        return f"{FOLDERS[folder]}.{rest.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"


@dataclass(frozen=True)
class Mutant:
    """A bug with a name.

    Attributes
    ----------
    name : str
        Of the mutant; no other has it.
    about : str
        The bug, in one line.
    section : str
        Of the chapter: where what it breaks is explained.
    area : str
        One of `AREAS`, by which reports sort.
    edits : tuple of Edit
    through : str
        The kernel of `registry.ALL` that it is run in.
    bug : str
        What kind of bug it is, whatever the implementation, by the name that `diagnose` gives it where it has one:
        mutants of one bug differ only in where they were planted.
        The name, if not given.
    first : tuple of str
        Cases that are likely to kill it, run before the others. They shorten the run, not the list.
    dtypes : tuple of str
        Storage types in which it has to be killed: all, but for a bug that is none in some of them.
    tile : Tile, optional
        Where the bug needs another than the emulated 16 x 16.
    by_order : bool
        It breaks an order that the emulator keeps of its own accord, so that no number is wrong there and only its
        faults are looked for.
    """

    name: str
    about: str
    section: str
    area: str
    edits: tuple
    _: KW_ONLY
    through: str
    bug: str = ""
    first: tuple = ()
    dtypes: tuple = STORED
    tile: Tile | None = None
    by_order: bool = False

    def __post_init__(self):
        if self.area not in AREAS:
            raise ValueError(f"{self.name}: area must be one of {', '.join(AREAS)}, got {self.area!r}")
        if not self.edits or not all(isinstance(edit, Edit) for edit in self.edits):
            raise ValueError(f"{self.name}: edits must be a tuple of at least one Edit, got {self.edits!r}")
        if not self.dtypes or not set(self.dtypes) <= set(DTYPES):
            raise ValueError(f"{self.name}: dtypes must be of {', '.join(DTYPES)}, got {self.dtypes!r}")
        object.__setattr__(self, "bug", self.bug or self.name)

    @property
    def path(self) -> str:
        """The file that is changed first of all."""
        return self.edits[0].path

    @property
    def in_numba(self) -> bool:
        """Whether a body that a GPU would run is changed; launch.py only prepares the call."""
        return any(edit.path.startswith("numba_cuda/") and edit.path != "numba_cuda/launch.py" for edit in self.edits)
