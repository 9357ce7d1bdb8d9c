"""The registry: every kernel with its chapter, idea and capabilities, and its newest GPU result."""

import json

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from verify import document, report, summary
from verify.registry import ALL, CUDA


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args) -> int:
    """Print the registry."""
    if args.json:
        print(json.dumps([_plain(kernel) for kernel in ALL.values()], indent=1))
        return 0
    record = document.newest_gpu()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 180
    table = Table(box=SIMPLE_HEAD)
    head = ["kernel", "chapter", "idea", "types", "head dims", "takes", "GPU from"]
    for name in [*head, *([f"on {report.record_head(record)}"] if record else [])]:
        table.add_column(name, no_wrap=name not in ("idea", "takes"))
    before = summary.recorded(record)
    for kernel in ALL.values():
        dims = f"{kernel.d_min} - {kernel.d_max}" if kernel.name in CUDA else "any"
        cc = f"sm_{kernel.min_cc[0]}{kernel.min_cc[1]}" if kernel.runs == "cuda" else "none"
        row = [kernel.name, kernel.chapter, kernel.idea, ", ".join(kernel.dtypes), dims]
        row += [", ".join(sorted(kernel.options)), cc]
        if record:
            found = {dtype: before.get((kernel.name, dtype)) for dtype in kernel.dtypes}
            row.append("\n".join(f"{dtype} {cell}" for dtype, cell in found.items() if cell) or "-")
        table.add_row(*row)
    console.print(table)
    console.print("NaN or inf in an input reaches")
    for spreads in dict.fromkeys(kernel.spreads for kernel in ALL.values()):
        names = [kernel.name for kernel in ALL.values() if kernel.spreads == spreads]
        all_others = len(names) > len(ALL) // 2
        console.print(f"  {spreads}: {'all others' if all_others else ', '.join(names)}", markup=False)
    return 0


def _plain(kernel):
    """A kernel for JSON."""
    names = ("name", "chapter", "idea", "module", "reference", "runs", "dtypes", "d_min", "d_max", "min_cc", "spreads")
    back = kernel.gradients and vars(kernel.gradients) | {"options": sorted(kernel.gradients.options)}
    facts = {name: getattr(kernel, name) for name in names} | {"options": sorted(kernel.options)}
    return facts | ({"gradients": back} if back else {})
