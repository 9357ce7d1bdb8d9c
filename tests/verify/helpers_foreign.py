"""Kernels of others for tests: files with a right kernel to start from, probed and run as `verify` does."""

import textwrap
from importlib import import_module

from verify.cases import DEFAULT
from verify.foreign import probe as foreign_probe
from verify.foreign import run as foreign_run
from verify.foreign.refusal import one_line
from verify.foreign.spec import Spec

RIGHT = """
import numpy as np

def plain(q, k, v, scale=None, causal=False, shift=None):
    stored, d = q.dtype, q.shape[-1]
    q, k, v = (np.asarray(x).astype(np.float32) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * np.float32(d**-0.5 if scale is None else scale)
    if causal:
        shift = s.shape[-1] - s.shape[-2] if shift is None else shift
        s = np.where(np.tri(*s.shape[-2:], shift, dtype=bool), s, -np.inf)
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    l = e.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return ((e @ v) / np.where(l == 0, 1, l)).astype(stored), (m + np.log(l))[..., 0]
"""


def writer(folder):
    """`make(source)`: a Spec of a new file in a folder with that text after `RIGHT`, its function `attn`."""

    def make(source, **spec):
        path = folder / f"k{len(list(folder.iterdir()))}.py"
        path.write_text(RIGHT + textwrap.dedent(source))
        return Spec(f"{path}:attn", **spec)

    return make


def probe(spec, cases=("square",), dtypes=("fp32",), **more):
    return foreign_probe.probe(spec, [DEFAULT[name] for name in cases], dtypes, small=True, **more)


def run(spec, cases, dtypes=("fp32",), facts=None, limit=10.0):
    """Results of a run in workers, with nothing probed."""
    facts = facts or foreign_probe.Facts(arrays="numpy", small=True)
    plan = foreign_run.Plan(spec, facts, tuple(DEFAULT[name] for name in cases), dtypes, limit=limit, jobs=1)
    return [one.result for one in foreign_run.run(plan)]


class Here:
    """A worker in this process: for what neither hangs nor dies."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, function, *args, limit):
        module, name = function.split(":")
        try:
            return getattr(import_module(module), name)(*args)
        except Exception as error:
            raise RuntimeError(one_line(error)) from error
