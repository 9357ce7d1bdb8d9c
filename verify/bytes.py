"""The byte ledger: formulas read from the steps' docstrings, held against counts of the very code they describe.

*Compulsory*: Q, K, V read once, O written once. *Fills*: each tile once per visit, counted in refimpl. *Requested*:
every load and store of the kernel's body, counted by the emulator. lse is in the last two, as kernels write it.
"""

import ast
import re
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from inspect import getdoc

import numpy as np

from refimpl.observe import Tally
from refimpl.tiling import Tile, cdiv
from verify.cases import SMALL_THREADS, SMALL_TILE, Problem, Shape, dense
from verify.dtypes import DTYPES
from verify.registry import CUDA

F = 4  # bytes of an fp32: m, l, lse, S, P and an O_acc that lives in HBM
STORED = frozenset("QKVO") | {"weights"}  # arrays of the storage type; everything else in HBM is fp32
KERNELS = {name: kernel for name, kernel in CUDA.items() if kernel.reference}  # those with both formulas
_CALLS = {"sum": sum, "min": min, "max": max, "range": range, "cdiv": cdiv}
_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Call, ast.Name, ast.Constant,
    ast.GeneratorExp, ast.comprehension, ast.IfExp, ast.Compare, ast.cmpop, ast.Load, ast.Store,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What traffic depends on.

    Attributes
    ----------
    shape : Shape
    causal : bool
        Ends aligned.
    tile : Tile
    threads : tuple of int
        (TY, TX) of a block.
    dtype : str
        Storage type.
    """

    shape: Shape
    causal: bool = False
    tile: Tile = field(default=Tile(SMALL_TILE, SMALL_TILE))
    threads: tuple = SMALL_THREADS
    dtype: str = "fp16"

    @property
    def names(self) -> dict:
        """The names a formula may use, with their values."""
        s = self.shape
        return {
            **s._asdict(),
            "Br": self.tile.Br,
            "Bc": self.tile.Bc,
            "Tr": cdiv(s.Nq, self.tile.Br),
            "Tc": cdiv(s.Nk, self.tile.Bc),
            "TY": self.threads[0],
            "TX": self.threads[1],
            "e": DTYPES[self.dtype].bytes,
            "f": F,
            "diag": s.Nk - s.Nq if self.causal else s.Nk,
        }

    def __str__(self):
        s = self.shape
        heads = f"B{s.B} H{s.Hq}" + (f"/{s.Hk}" if s.Hk != s.Hq else "")
        dims = f"d{s.d}" + (f"/{s.dv}" if s.dv != s.d else "")
        mask = " causal" if self.causal else ""
        return f"{heads} {s.Nq}x{s.Nk} {dims} {self.dtype} tile {self.tile.Br}x{self.tile.Bc}{mask}"


@dataclass(frozen=True)
class Entry:
    """One ledger line: a formula's bytes, and the counted ones or None where nothing was counted."""

    kernel: str
    ledger: str
    setting: Setting
    formula: int
    counted: int | None

    @property
    def ok(self) -> bool:
        """Formula and count agree to the byte."""
        return self.counted is None or self.counted == self.formula


# Whole, ragged both ways, causal, empty rows, one key, no keys, grouped heads, dv != d, another tile, four bytes.
EMULATED = (
    Setting(dense(48, d=8)),
    Setting(dense(48, d=8), causal=True),
    Setting(dense(29, 45, B=2, d=8, dv=12)),
    Setting(dense(29, 45, d=8), causal=True),
    Setting(dense(50, 29, d=8), causal=True),
    Setting(dense(17, 33, H=4, Hk=2, d=5), causal=True, tile=Tile(16, 8), dtype="fp32"),
    Setting(dense(40, 1, d=8)),
    Setting(dense(20, 0, d=8)),
)
COUNTED = (
    Setting(dense(512, H=2, d=64), tile=Tile(64, 64)),
    Setting(dense(512, H=2, d=64), causal=True, tile=Tile(64, 64)),
    Setting(dense(203, 512, H=4, Hk=1, d=113), causal=True, tile=Tile(64, 32)),
)


def fitted(kernel: str, setting: Setting) -> Setting:
    """The setting, or the nearest that the kernel takes: a larger tile or head dim, a storage type of its own."""
    entry = KERNELS[kernel]
    dtype = setting.dtype if setting.dtype in entry.dtypes else entry.dtypes[0]
    return replace(setting, shape=entry.fitting(setting.shape), tile=entry.tile(setting.tile), dtype=dtype)


@cache
def formula(kernel: str, ledger: str) -> str:
    """The expression in a step's docstring.

    Parameters
    ----------
    kernel : str
        Out of `KERNELS`.
    ledger : "fills" or "requested"
        Read from the module in refimpl, or in flash_cuda.

    Raises
    ------
    ValueError
        If the docstring does not hold exactly one such line.
    """
    entry = KERNELS[kernel]
    module = import_module(entry.reference if ledger == "fills" else entry.module)
    found = re.findall(rf"^\s*{ledger} = (.+)$", getdoc(module) or "", re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"{module.__name__}: expected one line '{ledger} = ...' in its docstring, found {len(found)}")
    return found[0]


def evaluate(expression: str, setting: Setting) -> int:
    """The value of a formula: arithmetic over the setting's names and sum, min, max, range, cdiv, nothing else.

    Raises
    ------
    ValueError
        For any other syntax or name.
    """
    tree = ast.parse(expression, mode="eval")
    names = setting.names
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"formula {expression!r}: {type(node).__name__} is not arithmetic")
        if isinstance(node, ast.Name) and node.id not in names | _CALLS.keys() | own:
            raise ValueError(f"formula {expression!r}: unknown name {node.id!r}")
    scope = {"__builtins__": {}, **_CALLS, **names}
    return int(eval(compile(tree, "<formula>", "eval"), scope))


def compulsory(setting: Setting) -> int:
    """Bytes that any implementation moves: each input read once, the output written once.

    Without a key there is no score, so only O moves.
    """
    s, e = setting.shape, DTYPES[setting.dtype].bytes
    inputs = s.Hq * s.Nq * s.d + s.Hk * s.Nk * (s.d + s.dv) if s.Nk else 0
    return e * s.B * (inputs + s.Hq * s.Nq * s.dv)


def count_fills(kernel: str, setting: Setting) -> int:
    """Bytes that cross between HBM and SRAM in refimpl, tile by tile."""
    tally, problem = Tally(), _problem(setting)
    attention = import_module(KERNELS[kernel].reference).attention
    attention(problem.Q, problem.K, problem.V, causal=setting.causal, tile=setting.tile, observe=tally)
    moved = tally.loads + tally.stores
    return _in_bytes({name: moved[name] for name in moved}, setting)


def count_requested(kernel: str, setting: Setting) -> int:
    """Bytes of all loads and stores of the kernel's body, under the emulator."""
    from flash_cuda.executors.emulator import Emulator

    on, problem = Emulator(), _problem(setting)
    attention = KERNELS[kernel].attention()
    options = {"causal": setting.causal, "tile": setting.tile, "threads": setting.threads}
    attention(problem.Q, problem.K, problem.V, on=on, **options)
    return _in_bytes({name: loads + stores for name, (loads, stores) in on.counts.items()}, setting)


def ledger(kernels, progress=lambda done, total: None) -> list[Entry]:
    """Every kernel at every setting: fills everywhere, requested bytes at the small ones.

    Parameters
    ----------
    kernels : list of str
    progress : callable
        ``progress(done, total)`` after each count.
    """
    jobs = [(kernel, setting) for kernel in kernels for setting in (*EMULATED, *COUNTED)]
    entries = []
    for done, (kernel, asked) in enumerate(jobs, 1):
        setting = fitted(kernel, asked)
        fills, requested = (evaluate(formula(kernel, name), setting) for name in ("fills", "requested"))
        entries.append(Entry(kernel, "fills", setting, fills, count_fills(kernel, setting)))
        counted = count_requested(kernel, setting) if asked in EMULATED else None
        entries.append(Entry(kernel, "requested", setting, requested, counted))
        progress(done, len(jobs))
    return entries


def _in_bytes(elements, setting):
    e = DTYPES[setting.dtype].bytes
    return sum(n * (e if name in STORED else F) for name, n in elements.items())


def _problem(setting):
    """Inputs of the setting's shape; their values do not matter to traffic."""
    s = setting.shape
    rng = np.random.default_rng(0)
    shapes = ((s.B, s.Hq, s.Nq, s.d), (s.B, s.Hk, s.Nk, s.d), (s.B, s.Hk, s.Nk, s.dv))
    arrays = (rng.standard_normal(shape).astype(DTYPES[setting.dtype].numpy) for shape in shapes)
    return Problem(*arrays, options={})
