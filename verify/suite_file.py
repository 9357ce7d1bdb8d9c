"""Reads a conformance file: a JSON list of small inputs, each with the result that is right and where it went wrong."""

import json
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from verify.dtypes import DTYPES
from verify.misuse import Misuse

_KEYS = {"id", "kind", "tier", "input", "params", "expected", "tol"}


@dataclass(frozen=True)
class Task:
    """One call that a case asks for; most cases ask for one.

    Attributes
    ----------
    label : str
        What tells it from the case's other tasks; "" for a single one.
    arrays : dict of str to ndarray
        fp64, bool or int, by the file's names: q, k, v, mask, dO, ...
    params : dict
    expected : list of dict
        Any of these outcomes is right: arrays by name, or {"error": ...}.
    repeat : int
        Calls that must agree to the bit.
    poison : bool
        First run a problem full of NaN.
    """

    label: str
    arrays: dict
    params: dict
    expected: list
    repeat: int = 1
    poison: bool = False


@cache
def load(path) -> dict[str, dict]:
    """Cases by id.

    Raises
    ------
    Misuse
        If the file is not JSON, or not a list of cases.
    """
    try:
        with open(path, encoding="utf-8") as file:
            cases = json.load(file)
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise Misuse(f"FILE: expected JSON, {path} is not ({error})") from None
    except OSError as error:
        raise Misuse(f"FILE: cannot read {path} ({error.strerror})") from None
    if not isinstance(cases, list) or not cases:
        raise Misuse(f"FILE: expected a list of cases in {path}")
    for at, case in enumerate(cases):
        missing = sorted(_KEYS - case.keys()) if isinstance(case, dict) else sorted(_KEYS)
        if missing:
            raise Misuse(f"FILE: case {at} of {path} lacks {', '.join(missing)}")
    return {case["id"]: case for case in cases}


def mix32(shape, seed, mult=1.0):
    """The format's generator: multiples of mult / 16 in [-2 mult, 2 mult)."""
    n = int(np.prod(shape))
    x = _scramble((np.arange(1, n + 1, dtype=np.uint64) + np.uint64(seed * 0x9E3779B9 % 2**32)) % 2**32)
    x ^= x >> np.uint64(16)
    return (((x >> np.uint64(26)).astype(np.float64) - 32) / 16 * mult).reshape(shape)


def rule_mask(rows, columns):
    """The one mask that the format gives in words only: an eighth of all pairs, chosen by a hash of (row, column)."""
    i, j = np.asarray(rows, np.uint64)[:, None], np.arange(columns, dtype=np.uint64)
    x = _scramble((i * np.uint64(2654435761) + j * np.uint64(40503) + np.uint64(12345)) % 2**32)
    return (x >> np.uint64(29)) == 0


def _scramble(x):
    """Bit mixing on 32-bit numbers held in 64."""
    x = x ^ (x >> np.uint64(16))
    x = x * np.uint64(0x85EBCA6B) % 2**32
    x = x ^ (x >> np.uint64(13))
    return x if x.ndim == 2 else x * np.uint64(0xC2B2AE35) % 2**32


def build(array) -> np.ndarray:
    """An array of the file: its values, or its recipe and the assignments after it."""
    if "values" in array:
        kind = {"bool": bool, "int": np.int64, "float": np.float64}[array["type"]]
        return np.array([float(value) for value in array["values"]]).astype(kind).reshape(array["shape"])
    recipe = array["recipe"]
    if recipe["gen"] == "mix32":
        x = mix32(array["shape"], recipe["seed"], recipe["mult"])
    else:
        x = np.full(array["shape"], float(recipe["value"]))
    for change in array.get("set", []):
        index = (slice(None) if i is None else slice(*i) if isinstance(i, list) else i for i in change["index"])
        x[tuple(index)] = float(change["value"])
    return x


def tasks(case) -> list[Task]:
    """The calls that a dense case asks for, with what each must give."""
    expected, params = case["expected"], case["params"]
    large = {name for name, a in case["input"]["arrays"].items() if "rule" in a and not {"values", "recipe"} & a.keys()}
    arrays = {name: build(a) for name, a in case["input"]["arrays"].items() if name not in large}
    one = Task("", arrays, params, expected.get("any_of", [expected]))
    if large or "probe_batches" in expected:
        return [_probed(one, expected, case["input"]["arrays"])]
    if isinstance(params.get("causal_align"), list):
        return [
            replace(one, label=align, params=params | {"causal_align": align}, expected=[expected[align]])
            for align in params["causal_align"]
        ]
    if case["kind"] == "validation" and "variants" in params:
        return _degenerate(one, expected)
    if "variants" in params:
        return [replace(one, label=str(k), params=params | variant) for k, variant in enumerate(params["variants"])]
    if "block_mask" in arrays:
        blocks = np.ones((params["block_q"], params["block_k"]), bool)
        arrays["mask"] = np.kron(arrays.pop("block_mask"), blocks).astype(bool)
    if "dropout_p" in params:
        zero = {name: _zeros(expected[name]) for name in expected if name not in ("lse", "note")}
        dropped = replace(one, label="p = 1", params=params | {"dropout_p": 1.0}, expected=[expected | zero])
        return [one, dropped]
    if "poison" in arrays:
        arrays.pop("poison")
        return [replace(one, repeat=20, poison=True)]
    if "how_to_build" in case["input"]:
        return [replace(one, label=layout) for layout in STRIDES]
    return [one]


def _zeros(array):
    return array | {"values": [0] * int(np.prod(array["shape"]))}


def _probed(task, expected, given):
    """Only the rows or batches that the file has values for: they do not depend on the others."""
    (name,) = [key for key in expected if key.startswith("probe_")]
    probe, arrays = expected[name], dict(task.arrays)
    if name == "probe_batches":
        return replace(task, label="all", expected=[{"probe": probe["batches"], **probe}])
    rows = probe["rows"]
    arrays["q"] = arrays["q"][:, :, rows]
    arrays["mask"] = rule_mask(rows, given["mask"]["shape"][1])
    wanted = {"out": probe["out"] | {"shape": [1, 1, *probe["out"]["shape"]]}}
    wanted["lse"] = probe["lse"] | {"shape": [1, 1, *probe["lse"]["shape"]]}
    return replace(task, label="probed rows", arrays=arrays, expected=[wanted])


def only_probed(task):
    """The task with nothing but the batches that the file has values for."""
    (want,) = task.expected
    arrays = {name: x[want["probe"]] for name, x in task.arrays.items()}
    return replace(task, label="probed batches", arrays=arrays, expected=[want | {"probe": slice(None)}])


def _degenerate(task, expected):
    """Batch 0, no queries, no heads, head dim 0: an empty result of the right shape, or a refusal."""

    def of(q, k):
        return {"q": np.zeros(q), "k": np.zeros(k), "v": np.zeros(k)}

    empty = {"shape": [0], "type": "float", "values": []}

    def shaped(out, lse):
        return {"out": empty | {"shape": out}, "lse": empty | {"shape": lse}}

    refused = {"error": {"kind": "ValueError", "says": "an empty axis"}}
    batch, queries = expected["batch_0"], expected["Sq_0"]
    return [
        replace(task, label="batch 0", expected=[shaped(batch["out_shape"], batch["lse_shape"])]),
        replace(task, label="Nq 0", arrays=of((1, 2, 0, 8), (1, 2, 4, 8)),
                expected=[shaped(queries["out_shape"], queries["lse_shape"])]),
        replace(task, label="heads 0", arrays=of((1, 0, 3, 8), (1, 0, 4, 8)),
                expected=[shaped([1, 0, 3, 8], [1, 0, 3]), refused]),
        replace(task, label="head dim 0", arrays=of((1, 2, 3, 0), (1, 2, 4, 0)),
                expected=[{"error": expected["head_dim_0"]["error"]}]),
    ]  # fmt: skip


def _transposed(x):
    """A view of a (B, N, H, d) buffer."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def _every_second(x):
    """Every second row of a longer buffer."""
    return np.repeat(x, 2, axis=2)[:, :, ::2]


def _backwards(x):
    """Rows in reverse order in memory."""
    return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]


def _fused(x):
    """A slice of a buffer three times as wide."""
    return np.tile(x, 3)[..., x.shape[3] : 2 * x.shape[3]]


STRIDES = {
    "contiguous": np.ascontiguousarray,
    "transposed": _transposed,
    "every second row": _every_second,
    "negative stride": _backwards,
    "fused": _fused,
}


def tolerance(case, name, dtype, wanted) -> float:
    """Allowed absolute error of an output, as the format defines it."""
    size = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    allowed = case["tol"].get(dtype, case["tol"].get("fp32"))
    if name == "lse" and DTYPES[dtype].bytes == 2:
        allowed = 1e-4  # lse is fp32 whatever the inputs are
    return allowed * max(1.0, size)
