"""Bit-exact proofs: (m, l, O_acc) of steps 2 - 6 after every key tile equal fp64, at every tile size."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from verify import exact, executors, options
from verify.misuse import pick
from verify.pool import each
from verify.progress import bar

SEEDS = (1, 2)  # two orders of threads and blocks
LIMIT = 120.0


def add_arguments(parser):
    """Declare the options."""
    options.add_kernels(parser)
    options.add_on(parser)


def run(args) -> int:
    """Prove, print, and return 0 if every bit is right."""
    steps = pick("--kernels", args.kernels, exact.STEPS, what="kernel with a state")
    executor = options.executor(args)
    console = Console(highlight=False, soft_wrap=True)
    wrong = exact.powers_wrong(executor)
    exps = f"exp2 is exact on all {len(exact.POWERS)} integers {exact.POWERS[0]} ... {exact.POWERS[-1]}"
    console.print(f"FAIL  exp2 is not exact at {wrong}" if wrong else exps)
    seeds = SEEDS if executor == "emulated" else SEEDS[:1]
    calls = [
        (step, setting, executor, seed)
        for step in steps
        for setting in exact.settings(executor, step)
        for seed in seeds
    ]
    with bar("exact") as update:
        answers = each("verify.exact:prove", calls, limit=LIMIT, fresh=executor == "gpu", progress=update)
    table = Table(box=SIMPLE_HEAD)
    for name in ("kernel", "tile", "proofs", "equal to the bit"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    failed = []
    tally = {}
    for call, (difference, failure) in zip(calls, answers, strict=True):
        step, setting, _, seed = call
        told = failure or difference
        if told:
            failed.append(f"FAIL  {step} at {setting}, order {seed}: {told}")
        ok, total = tally.get((step, setting.tile), (0, 0))
        tally[step, setting.tile] = ok + (not told), total + 1
    last = None
    for (step, tile), (ok, total) in tally.items():
        if last not in (None, step):
            table.add_section()
        table.add_row("" if last == step else step, f"{tile.Br} x {tile.Bc}", str(total), str(ok))
        last = step
    console.print(table)
    for line in failed:
        console.print(line, markup=False, style="bold red")
    where = executors.device_name(executor)
    how = f"emulated on {where}, {len(seeds)} thread orders" if executor == "emulated" else f"run on {where}"
    console.print(
        f"{len(calls) - len(failed)} of {len(calls)} proofs hold ({how}): m, l and O_acc after each key tile, "
        "and O as the correctly rounded quotient (steps 5, 6: product with 1 / l)."
    )
    return 1 if failed or wrong else 0
