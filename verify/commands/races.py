"""Look for races: other thread orders, repeated runs, spoilt shared memory, sleeping warps, compute-sanitizer."""

import json
from itertools import product

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verify import barriers, executors, options, races, sanitizer
from verify.cases import DEFAULT
from verify.misuse import Misuse, pick
from verify.pool import each
from verify.progress import bar
from verify.registry import CUDA

LIMIT = 300.0  # seconds for one check of one case, compilation included
SANITIZE, SEEN = "verify.sanitizer:sanitize", "verify.races:seen_without"
# One at a time on a GPU: repeated runs want it as it is, and nobody else may use shared memory once it is spoilt. What
# sleeps may sleep longer beside others, a sanitizer sees its own kernels only, and what is emulated is not there.
ALONE = ("verify.races:repeats", "verify.races:poisoned", SEEN)
# In a process of its own: what takes long for one case, and a kernel without a barrier, which may fault.
APART = (SANITIZE, SEEN, "verify.races:delays")


def add_arguments(parser):
    """Declare the options."""
    options.add_kernels(parser)
    parser.add_argument("--dtype", metavar="NAMES", help="comma-separated storage types; fp16 if left out")
    parser.add_argument("--self-test", action="store_true", help="take each barrier out, one at a time, and say which "
                        "check sees it")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write every finding")


def run(args) -> int:
    """Run every check that can run here; 1 if a bit changed, or a removed barrier was seen by none."""
    kernels = pick("--kernels", args.kernels, CUDA, what="kernel")
    dtypes, target = options.dtypes(args, ("fp16",)), options.writable("--json", args.json)
    where = ["emulated"] if executors.gpu_missing() else ["emulated", "gpu"]
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    if args.self_test and len(dtypes) > 1:
        raise Misuse(f"--dtype: the self-test takes one, got {args.dtype}")
    made = _self_test(kernels, dtypes[0], where) if args.self_test else _checks(kernels, dtypes, where)
    if not made:
        raise Misuse(f"--dtype: none of these kernels stores {', '.join(dtypes)}")
    console.print(_barrier_table(made) if args.self_test else _table(made))
    for row in made:
        if row["problem"]:
            console.print(f"FAIL  {_title(row)}: {row['problem']}", markup=False, style="bold red")
    for why in dict.fromkeys(row["skipped"] for row in made if row["skipped"]):
        console.print(f"not run: {why}")
    if target:
        target.write_text(json.dumps(made, indent=1) + "\n")
    return 1 if any(row["problem"] for row in made) else 0


def _checks(kernels, dtypes, where):
    """A row a kernel, type, case and check; those that cannot run have a reason in "skipped"."""
    rows, jobs = [], []
    for kernel in kernels:
        for dtype in dtypes:
            for case in races.cases_of(kernel, dtype):
                for check in races.CHECKS:
                    row = _row(kernel, dtype, case, check.name)
                    rows.append(row)
                    if check.where in where:
                        jobs.append((f"verify.races:{check.name}", (kernel, case, dtype), row))
                    else:
                        row["skipped"] = f"{check.name} ({check.about}): {executors.gpu_missing()}"
            rows += _sanitizer_rows(kernel, dtype, where, jobs)
    _run(jobs, where)
    return rows


def _sanitizer_rows(kernel, dtype, where, jobs):
    """compute-sanitizer's tools on the first case that a kernel takes, and on the first with gradients."""
    if not (cases := races.cases_of(kernel, dtype)):
        return []
    chosen = [*cases[:1], *[case for case in cases if DEFAULT[case].backward][:1]]
    missing = executors.gpu_missing() if "gpu" not in where else None
    if not missing and sanitizer.program() is None:
        missing = "compute-sanitizer is not on this machine (CUDA_HOME, /usr/local/cuda, PATH)"
    rows = []
    for tool, case in product(sanitizer.TOOLS, dict.fromkeys(chosen)):
        rows.append(row := _row(kernel, dtype, case, tool))
        if missing:
            row["skipped"] = f"compute-sanitizer ({', '.join(sanitizer.TOOLS)}): {missing}"
        else:
            jobs.append((SANITIZE, (kernel, case, dtype, tool), row))
    return rows


def _self_test(kernels, dtype, where):
    """A row a barrier: what each check says of the kernel without it, in the first case where one sees that."""
    rows, jobs = [], []
    for kernel in kernels:
        cases = races.cases_of(kernel, dtype, tight=True)
        launches = {case: races.launched(kernel, case, dtype) for case in cases}
        for module in races.own_modules_of(kernel) if cases else ():
            come_by = [case for case in cases if module in launches[case]]
            if not come_by:  # another kernel's, which it only knows of
                continue
            places = [node.lineno for node in barriers.sites(module) if "syncthreads" in barriers.name_of(node)]
            for k, line in enumerate(places):
                name = f"{module.removeprefix('flash_cuda.')}:{line}"
                row = _row(kernel, dtype, come_by[0], name) | {"seen": {}}
                rows.append(row)
                jobs += [(SEEN, (kernel, come_by, dtype, module, k, w), row) for w in where]
    _run(jobs, where)
    for row in rows:
        if not row["problem"] and not any(row["seen"].values()):
            row["problem"] = "no check sees that this barrier is gone"
    return rows


def _run(jobs, where):
    """Run (function, arguments, row) in workers and put the answers into the rows."""
    apart = APART if "gpu" in where else (SANITIZE,)
    with bar("races") as update:
        for function in dict.fromkeys(name for name, *_ in jobs):
            mine = [(arguments, row) for name, arguments, row in jobs if name == function]
            answers = each(
                function,
                [arguments for arguments, _ in mine],
                limit=LIMIT,
                jobs=1 if "gpu" in where and function in ALONE else None,
                groups=range(len(mine)) if function in apart else [arguments[0] for arguments, _ in mine],
                fresh="gpu" in where,
                progress=update,
            )
            for (_, row), (told, failure) in zip(mine, answers, strict=True):
                if isinstance(told, dict):
                    row["case"] = told.pop("case")
                    row["seen"] |= told
                else:
                    row["problem"] = told
                row["problem"] = row["problem"] or failure


def _row(kernel, dtype, case, check):
    return {"kernel": kernel, "dtype": dtype, "case": case, "check": check, "problem": None, "skipped": None}


def _title(row):
    return f"{row['kernel']} {row['dtype']} {row['case']} {row['check']}"


def _table(rows):
    """Kernels by checks: how many cases kept every bit."""
    checks = list(dict.fromkeys(row["check"] for row in rows))
    table = Table(box=SIMPLE_HEAD, title="cases in which no bit changed", title_justify="left")
    table.add_column("kernel")
    table.add_column("dtype")
    for check in checks:
        table.add_column(check, justify="right")
    for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["kernel"], row["dtype"]) == (kernel, dtype)]
        table.add_row(kernel, dtype, *(_cell([row for row in mine if row["check"] == check]) for check in checks))
    return table


def _cell(rows):
    ran = [row for row in rows if not row["skipped"]]
    if not ran:
        return Text("not run", style="dim")
    failed = sum(bool(row["problem"]) for row in ran)
    return Text(f"{len(ran) - failed}/{len(ran)}", style="bold red" if failed else "green")


def _barrier_table(rows):
    """Barriers by checks: what saw that it was gone."""
    checks = list(dict.fromkeys(name for row in rows for name in row["seen"]))
    table = Table(box=SIMPLE_HEAD, title="which check sees that a barrier is gone", title_justify="left")
    for name in ("kernel", "barrier", "case", *checks):
        table.add_column(name)
    for row in rows:
        cells = [_word(row["seen"].get(name)) for name in checks]
        table.add_row(row["kernel"], row["check"], row["case"], *cells)
    return table


def _word(told):
    """What a check saw, in a word or two."""
    word = "-" if not told else "other bits" if told.startswith("run ") else told.split(":")[0]
    return Text(word, style="green" if told else "dim")
