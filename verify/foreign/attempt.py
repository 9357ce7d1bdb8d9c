"""What a probe does in the worker: reads what a stranger's file says of itself, and calls its kernel once."""

import numpy as np

from refimpl import oracle
from verify.case import Case
from verify.foreign.call import Malformed, NoGradients, call
from verify.foreign.imports import bf16_excuse, simulated
from verify.foreign.refusal import fatal, one_line, refusal
from verify.foreign.signature import NAMES
from verify.foreign.spec import Spec, load

CLOSE = 0.05  # of max|V|: far above rounding, far below what another convention gives


def describe(spec: Spec) -> dict:
    """What the file says by itself. Runs in the worker."""
    from verify.foreign.arrays import open_arrays

    loaded = load(spec)
    arrays = open_arrays(loaded.arrays)
    gradients = getattr(loaded.backward, "__name__", "") or {"torch": "autograd", "jax": "jax.vjp"}.get(
        loaded.arrays, ""
    )
    return {
        "arrays": loaded.arrays,
        "why_arrays": loaded.why_arrays,
        "says": loaded.says,
        "options": tuple(name for meaning, name in loaded.parameters.items() if meaning in NAMES),
        "meanings": frozenset(loaded.parameters),
        "gradients": gradients if spec.backward else "",
        "unasked": "" if spec.backward else getattr(loaded.backward, "__name__", ""),
        "executor": "simulated" if simulated() else arrays.executor,
        "device": arrays.device,
        "strided": arrays.strided,
        "bf16": bf16_excuse(),
    }


def attempt(spec: Spec, layout: str, case: Case, dtype: str, small: bool) -> dict:
    """One small call. Runs in the worker; what the kernel raises is part of the answer.

    Returns
    -------
    dict
        seconds, lse, notes and agrees (names of conventions whose truth O is near); or error, and whether it was
        raised, and raised as a refusal.
    """
    problem = case.build(dtype, small)
    try:
        answer = call(load(spec), problem, layout)
    except NoGradients as error:
        return {"error": str(error), "refused": True, "raised": True}
    except Malformed as error:
        return {"error": str(error), "refused": False}
    except Exception as error:
        return {"error": one_line(error), "refused": refusal(error), "raised": not fatal(error)}
    agrees = []
    for causal in (False, True):
        for align in ("bottom_right", "top_left"):
            options = problem.options | {"causal": causal, "align": align}
            truth, _ = oracle.attention(problem.Q, problem.K, problem.V, **options)
            far = np.abs(answer.outputs["O"].astype(np.float64) - truth).max(initial=0)
            if far <= CLOSE * np.abs(problem.V.astype(np.float64)).max(initial=0):
                agrees.append(f"causal {align}" if causal else "plain")
    return {"seconds": answer.seconds, "lse": "lse" in answer.outputs, "notes": answer.notes, "agrees": agrees}
