"""Judge kernels on cases against fp64, in every storage type, and print a table."""

import argparse
import json
import sys
from pathlib import Path

from verify import document, html, options, report, runner, summary
from verify.cases import DEFAULT
from verify.foreign import verb as foreign_verb
from verify.misuse import Misuse
from verify.progress import bar
from verify.registry import ALL, JUDGED


def add_arguments(parser):
    """Declare the options."""
    options.add_kernels(parser)
    parser.add_argument(
        "--cases", "--case", metavar="NAMES", help="comma-separated; all default cases if left out; list prints them"
    )
    options.add_dtype(parser)
    options.add_on(parser)
    parser.add_argument("--seed", type=_natural, help="of all cases, instead of their own")
    parser.add_argument("--json", metavar="FILE", help="write every result; - is standard output, without the table")
    parser.add_argument("--html", metavar="FILE", help="write a page with the error matrix")
    parser.add_argument("--md", metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--dump", metavar="DIR", help="write inputs, outputs and truth of every run as .npz")
    parser.add_argument("--limit", type=_positive, default=120.0, metavar="SECONDS", help="for one run; 120")
    parser.add_argument("--jobs", type=_positive_int, help="processes; a core each, at most 16 (--kernel, GPU: 4)")
    foreign_verb.add_arguments(parser)


def run(args) -> int:
    """Run, report, and return 0 if nothing failed."""
    if args.cases == "list":
        print("\n".join(f"{case.id:24}{case.about}" for case in DEFAULT.values()))
        return 0
    foreign_verb.misused(args)
    to_json = None if args.json == "-" else options.writable("--json", args.json)
    to_html, to_md = options.writable("--html", args.html), options.writable("--md", args.md)
    given = [path.absolute() for path in (to_json, to_html, to_md) if path]
    if len(set(given)) < len(given):
        raise Misuse(f"--json, --html, --md: expected different files, got {given[0].name} twice")
    if args.dump is not None:
        _folder("--dump", args.dump)
    if args.kernel:
        return foreign_verb.run(args, to_json, to_html, to_md)
    kernels, cases, dtypes = options.kernels(args, JUDGED), options.cases(args), options.dtypes(args)
    executor = options.executor(args)
    plan = runner.Plan(
        tuple(ALL[name] for name in kernels),
        tuple(cases),
        tuple(dtypes),
        executor=executor,
        small=executor != "gpu",
        seed=args.seed,
        limit=args.limit,
        dump=args.dump,
        **({"jobs": args.jobs} if args.jobs else {}),
    )
    with bar("verify") as update:
        results = runner.run(plan, update)
    record = document.newest_gpu()
    made = document.build(results, executor)
    if args.json == "-":
        json.dump(made, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        report.terminal(results, record)
    if to_json:
        to_json.write_text(document.lines(made, "results"))
    if to_html:
        to_html.write_text(html.page(made, results, record), encoding="utf-8")
    if to_md:
        to_md.write_text(report.markdown(results, record), encoding="utf-8")
    if not any(r.verdict != "skip" for r in results):
        # Nothing was judged: that must not read as success.
        raise Misuse(f"--kernels, --cases, --dtype: every run was skipped ({results[0].reason})")
    return 1 if summary.failures(results) else 0


def _folder(argument, path):
    """Make a folder to write to, or say that it cannot be."""
    try:
        if not path:
            raise OSError("no name")
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise Misuse(f"{argument}: expected a folder to write, {path!r} cannot be one ({reason})") from None


def _natural(text):
    """An integer from 0 on."""
    return _number(text, int, 0, "an integer of at least 0")


def _positive_int(text):
    """An integer from 1 on."""
    return _number(text, int, 1, "an integer of at least 1")


def _positive(text):
    """A number of seconds above 0."""
    return _number(text, float, 1e-3, "a number of seconds above 0 and up to a day", most=86_400)


def _number(text, kind, least, expected, most=float("inf")):
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value
