"""Functions with one thing wrong: an operator, a number or a comparison, edited in their source."""

import ast
import copy
import inspect

SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip


def edits(node):
    """Yield functions that each change one thing about a node of the syntax tree, in place."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield lambda n: setattr(n, "op", SWAPS[type(n.op)]())
    if isinstance(node, ast.Compare):
        yield lambda n: n.ops.__setitem__(0, SWAPS[type(n.ops[0])]())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.UnaryOp):
        yield lambda n: setattr(n, "op", ast.UAdd())
    if isinstance(node, ast.IfExp):
        yield lambda n: setattr(n, "body", n.orelse)


def mutants(fn):
    """Return every mutant of a function, with its source."""
    tree = ast.parse(inspect.getsource(fn))
    found = []
    for place, node in enumerate(ast.walk(tree)):
        for number, _ in enumerate(edits(node)):
            changed = copy.deepcopy(tree)
            target = list(ast.walk(changed))[place]
            list(edits(target))[number](target)
            scope = dict(fn.__globals__)
            exec(compile(ast.fix_missing_locations(changed), fn.__name__, "exec"), scope)
            found.append((ast.unparse(changed), scope[fn.__name__]))
    return found
