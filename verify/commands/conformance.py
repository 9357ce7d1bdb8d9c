"""Run a file of reported faults, each with its right result, against the oracle, refimpl and the kernels."""

import json
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from verify import conformance, executors, options, suite_file
from verify.misuse import pick
from verify.pool import each
from verify.progress import bar
from verify.registry import ALL, CUDA

LIMIT = 300.0


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("file", metavar="FILE.json", help="cases in the conformance format")
    parser.add_argument("--kernels", metavar="NAMES", help="comma-separated; everything in the registry if left out")
    parser.add_argument("--cases", metavar="IDS", help="comma-separated; all of the file if left out")
    options.add_on(parser)
    parser.add_argument("--json", metavar="FILE", help="write every outcome")


def run(args) -> int:
    """Run, print, and return 0 if nothing was wrong."""
    path = str(options.readable("FILE.json", args.file))
    suite = suite_file.load(path)
    chosen = pick("--cases", args.cases, suite, what="case in the file")
    kernels = pick("--kernels", args.kernels, ALL, what="kernel")
    to_json = options.writable("--json", args.json)
    executor = options.executor(args)
    outcomes, calls = [], []
    for case_id in chosen:
        case = suite[case_id]
        subjects = [name for name in conformance.subjects(case) if name not in ALL or name in kernels]
        if not conformance.subjects(case):
            outcomes.append(conformance.Outcome(case_id, "-", "-", "refused", "nothing here has such a function yet"))
        for name in subjects:
            for dtype in dtypes_of(name):
                if reason := conformance.refusal(case, name, dtype, executor):
                    outcomes.append(conformance.Outcome(case_id, name, dtype, "refused", reason))
                else:
                    calls.append((path, case_id, name, dtype, executor))
    with bar("conformance") as update:
        answers = each("verify.conformance:run_case", calls, limit=LIMIT, progress=update)
    for call, (outcome, failure) in zip(calls, answers, strict=True):
        outcomes.append(outcome or conformance.Outcome(*call[1:4], "wrong", failure))
    outcomes.sort(key=lambda o: chosen.index(o.case))
    _print(outcomes, suite, executor)
    if to_json:
        to_json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 1 if any(o.verdict == "wrong" for o in outcomes) else 0


def dtypes_of(name) -> tuple[str, ...]:
    """Storage types in which a subject is judged: NumPy ones by their arithmetic, kernels by what they store."""
    if name in CUDA:
        return CUDA[name].dtypes
    if name == conformance.COMPARISON or name == "oracle":
        return ("fp64",)
    return ("fp64", "fp32")


def _print(outcomes, suite, executor):
    """Counts by subject, what is wrong, and what was refused and why."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    columns = ("subject", "dtype", "right", "wrong", "refused", "right of core")
    for name in columns:
        table.add_column(name, justify="left" if name in ("subject", "dtype") else "right", no_wrap=True)
    groups = {}
    for outcome in outcomes:
        groups.setdefault((outcome.kernel, outcome.dtype), []).append(outcome)
    order = [conformance.COMPARISON, conformance.MERGE, "oracle", *ALL]
    for name, dtype in sorted((key for key in groups if key[0] != "-"), key=lambda key: order.index(key[0])):
        group = groups[name, dtype]
        n = {verdict: sum(o.verdict == verdict for o in group) for verdict in ("right", "wrong", "refused")}
        core = [o for o in group if suite[o.case]["tier"] == "core" and o.verdict != "refused"]
        right = f"{sum(o.verdict == 'right' for o in core)}/{len(core)}"
        table.add_row(name, dtype, str(n["right"]), str(n["wrong"]), str(n["refused"]), right)
    console.print(table)
    for outcome in outcomes:
        if outcome.verdict == "wrong":
            line = f"WRONG {outcome.kernel} {outcome.case} {outcome.dtype}: {outcome.reason}"
            console.print(line, markup=False, style="bold red")
    reasons = {}
    for outcome in outcomes:
        if outcome.verdict == "refused":
            group = "kernels" if outcome.kernel in CUDA else outcome.kernel.split(".")[0]
            reasons.setdefault((group, outcome.reason), {})[outcome.case] = None
    for (group, reason), cases in reasons.items():
        console.print(f"refused  {group}: {reason} ({', '.join(cases)})", markup=False)
    where = executors.device_name(executor)
    how = "emulated on" if executor == "emulated" else "run on"
    console.print(f"{len(suite)} cases in the file; kernels {how} {where}.")
