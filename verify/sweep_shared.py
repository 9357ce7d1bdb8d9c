"""How much shared memory a kernel's arrays take, read off its body: the formula as it stands there, and its value."""

import ast
import inspect
import math
import textwrap
from types import ModuleType


def shared_arrays(body) -> tuple[int, str]:
    """Bytes of a body's arrays in shared memory, and the formula.

    The body's text says `cuda.shared.array(shape, type)`; names in the shape are constants of its closure. An array of
    shape 0 is the launch's dynamic memory and counts nothing here. Where shapes are made inside a device function that
    the body calls, that function's own are counted as well.

    Parameters
    ----------
    body : function

    Returns
    -------
    int
    str
        Such as "4 (Br (D + 1))", the terms as they stand in the text.
    """
    total, terms, seen = 0, [], set()
    todo = [body]
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) == "cuda.shared.array":
                shape, kind = (eval(compile(ast.Expression(x), "<shape>", "eval"), known) for x in node.args[:2])
                count = math.prod(shape) if isinstance(shape, tuple) else shape
                total += count * kind.bitwidth // 8
                if count:
                    terms.append(f"{kind.bitwidth // 8} {_as_product(node.args[0])}")
            elif (called := _device_function(node.func, known)) is not None:
                todo.append(called)
    return total, " + ".join(terms)


def _device_function(node, known):
    """The Python function behind a call of a device function, a global or an attribute of a module of them."""
    try:
        value = eval(compile(ast.Expression(node), "<callee>", "eval"), known)
    except Exception:  # a method of an argument or the like: nothing of ours
        return None
    inner = getattr(value, "py_func", None)
    return inner if inner is not None and not isinstance(value, ModuleType) else None


def _as_product(node):
    """A shape as the product of its sides."""
    sides = node.elts if isinstance(node, ast.Tuple) else [node]
    words = [ast.unparse(side) for side in sides]
    return " x ".join(f"({word})" if " " in word else word for word in words)
