"""The byte ledger: compulsory, fills and requested bytes, each count held against its formula."""

import json

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from verify import bytes as ledger
from verify import options
from verify.misuse import pick
from verify.progress import bar


def add_arguments(parser):
    """Declare the options."""
    options.add_kernels(parser)
    parser.add_argument("--json", metavar="FILE", help="write every formula and count")


def run(args) -> int:
    """Count, print, and return 0 if every count equals its formula."""
    kernels = pick("--kernels", args.kernels, ledger.KERNELS, what="kernel with formulas")
    to_json = options.writable("--json", args.json)
    with bar("bytes") as update:
        entries = ledger.ledger(kernels, update)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120
    for kernel in kernels:
        console.print(_table(kernel, [entry for entry in entries if entry.kernel == kernel]))
        for name in ("fills", "requested"):
            console.print(f"  {name} = {ledger.formula(kernel, name)}", markup=False)
        console.print()
    wrong = [entry for entry in entries if not entry.ok]
    for entry in wrong:
        line = (
            f"FAIL  {entry.kernel} {entry.ledger} at {entry.setting}: formula {entry.formula}, counted {entry.counted}"
        )
        console.print(line, markup=False, style="bold red")
    counted = sum(entry.counted is not None for entry in entries)
    console.print(
        f"{counted - len(wrong)} of {counted} counts equal their formula to the byte; "
        f"{len(entries) - counted} larger sizes from the formula alone (marked ~). x: multiples of compulsory."
    )
    if to_json:
        to_json.write_text(json.dumps([_plain(entry) for entry in entries], indent=1) + "\n")
    return 1 if wrong else 0


def _table(kernel, entries):
    """One row a setting."""
    table = Table(title=f"{kernel}, bytes", title_justify="left", box=SIMPLE_HEAD)
    for name in ("size", "compulsory", "fills", "x", "requested", "x"):
        table.add_column(name, justify="left" if name == "size" else "right", no_wrap=True)
    for setting in dict.fromkeys(entry.setting for entry in entries):
        least = ledger.compulsory(setting)
        row = [str(setting), f"{least:,}"]
        for entry in (e for e in entries if e.setting == setting):
            row += [_shown(entry), f"{entry.formula / least:.2f}"]
        table.add_row(*row)
    return table


def _shown(entry):
    if entry.counted is None:
        return f"~{entry.formula:,}"
    return f"{entry.counted:,}" if entry.ok else f"[bold red]{entry.counted:,} != {entry.formula:,}[/]"


def _plain(entry):
    """An entry for JSON."""
    s = entry.setting
    return {
        "kernel": entry.kernel,
        "ledger": entry.ledger,
        "size": s.shape._asdict(),
        "causal": s.causal,
        "tile": [s.tile.Br, s.tile.Bc],
        "dtype": s.dtype,
        "expression": ledger.formula(entry.kernel, entry.ledger),
        "formula": entry.formula,
        "counted": entry.counted,
        "compulsory": ledger.compulsory(s),
        "ok": entry.ok,
    }
