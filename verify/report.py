"""The report as a terminal table and as Markdown."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verify import summary
from verify.document import judged_otherwise, stale

_STYLE = {"pass": "green", "fail": "bold red", "error": "bold red", "skip": "yellow"}
HEAD = ("kernel", "dtype", "passed", "failed", "skipped", "error / bound", "worst at")


def cells(line) -> tuple[str, ...]:
    """One row of the table, in the order of `HEAD`."""
    n = line.counts
    ratio = "" if line.worst is None else summary.shown(line.worst.ratio)
    return line.kernel, line.dtype, line.passed, str(n["fail"] + n["error"]), str(n["skip"]), ratio, line.where


def record_head(document) -> str:
    """Which record the last column shows, and whether it is of other cases or bounds than today's."""
    return f"{document['device']}, {document['made'][:10]}" + (", older cases" if judged_otherwise(document) else "")


def terminal(results, record=None, console=None, most=12):
    """Print the table, what failed, what was skipped, and what ran.

    Parameters
    ----------
    results : list of Result
    record : dict, optional
        The newest document of a GPU run, shown beside.
    console : rich.console.Console, optional
        Standard output if not given.
    most : int
        Failures listed in full.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120  # a pipe has no width of its own, and 80 would cut names
    before = summary.recorded(record)
    table = Table(title="Attention kernels against fp64", title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for name in HEAD:
        table.add_column(name, justify="left" if name in ("kernel", "dtype", "worst at") else "right", no_wrap=True)
    if record:
        table.add_column(record_head(record), justify="right")
    last = None
    for line in summary.lines(results):
        if last not in (None, line.kernel):
            table.add_section()
        row = list(cells(line))
        row[0] = "" if last == line.kernel else line.kernel
        last = line.kernel
        if record:
            row.append(before.get((line.kernel, line.dtype), "-"))
        bad = line.counts["fail"] + line.counts["error"]
        row[2] = Text(row[2], style="bold red" if bad else "green" if line.ran else "yellow")
        table.add_row(*row)
    console.print(table)
    failed = summary.failures(results)
    for result in failed[:most]:
        text = Text(f"{result.verdict.upper():5} ", style=_STYLE[result.verdict])
        console.print(text, Text(f"{result.kernel} {result.case} {result.dtype}: {result.reason}"), sep="")
    if len(failed) > most:
        console.print(f"... and {len(failed) - most} more; --json has them all")
    if failed:
        console.print(Text(replay(failed[0]), style="dim"))
    for reason, group in summary.skips(results).items():
        console.print(Text("skip  ", style="yellow"), Text(f"{reason} ({len(group)} runs)"), sep="")
    for sentence in sentences(results, record):
        console.print(Text(sentence))


def sentences(results, record) -> list[str]:
    """What ran, what the limits mean, and where GPU results are."""
    said = [summary.what_ran(results), summary.fixed_limits(results)]
    if any(r.executor == "emulated" for r in results):
        said.append("No GPU result is recorded yet." if record is None else _about(record))
    return [sentence[0].upper() + sentence[1:] for sentence in said if sentence]


def _about(record):
    """What the column of recorded results means."""
    old = sorted(stale(record))
    said = f"The last column is recorded: full size on {record_head(record)}; passed, worst error / bound."
    if judged_otherwise(record):
        said += " Cases or bounds were changed since."
    return said + (f" Changed since: {', '.join(old)}." if old else "")


def replay(result) -> str:
    """The command that runs a failing case again and keeps its arrays."""
    return (
        f"again: python -m verify run --kernels {result.kernel} --cases {result.case} --dtype {result.dtype} "
        f"--seed {result.seed} --dump DIR"
    )


def markdown(results, record=None) -> str:
    """The same report as Markdown."""
    before = summary.recorded(record)
    head = [*HEAD, *([record_head(record)] if record else [])]
    out = ["# Attention kernels against fp64", "", md_row(head), md_row(["---"] * len(head))]
    for line in summary.lines(results):
        row = [*cells(line)]
        if record:
            row.append(before.get((line.kernel, line.dtype), "-"))
        out.append(md_row(row))
    failed = summary.failures(results)
    if failed:
        out += ["", "## Failed", ""]
        out += [f"- **{r.kernel}** {r.case} {r.dtype}, {r.verdict}: {r.reason}" for r in failed]
        out += ["", f"`{replay(failed[0])}`"]
    skipped = summary.skips(results)
    if skipped:
        out += ["", "## Skipped", ""]
        out += [f"- {reason} ({len(group)} runs)" for reason, group in skipped.items()]
    out += ["", *(sentence + "\n" for sentence in sentences(results, record))]
    return "\n".join(out).rstrip() + "\n"


def md_row(values):
    return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"
