"""What a record of times says, as tables for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from verify.bench import suite as bench_suite
from verify.bench.record import by_point
from verify.bench.stats import paired
from verify.timing import ADDITIONS

# The host's time: when, of the usual batch or of the least, which is held to the bar, and the entries of a row.
PLAIN = f"{ADDITIONS} additions"  # in Python, which launch nothing
IN_A_ROW = {"launches": "queued_us", "as a graph": "graph_queued_us", PLAIN: "plain_queued_us"}
AFTER_A_WAIT = {"launches": "latency_us", "as a graph": "graph_us", PLAIN: "plain_us"}
HOST = (
    ("in a row", False, IN_A_ROW),
    ("after a wait", False, AFTER_A_WAIT),
    ("after a wait, usually", True, AFTER_A_WAIT),
)


def head(record) -> str:
    """Where a record was made, and the ceilings of that machine."""
    words = [record["device"], record["made"][:10], f"{record['protocol']['rounds']} rounds, cold L2"]
    ceiling = record["ceilings"]["measured"]
    product = f"product {ceiling['tflops']:.0f} TFLOP/s, " if ceiling["tflops"] else ""
    return f"{', '.join(words)}; measured ceilings: {product}copy {ceiling['gb_per_s']:.0f} GB/s"


def times(record) -> Table:
    """Every row: times, rates, shares of the measured ceilings; or why it has none."""
    table = Table(box=SIMPLE_HEAD, title=head(record), title_justify="left")
    left = ("point", "name")
    columns = (*left, "median ms", "P90", "warm L2", "launch us", "TFLOP/s", "of product", "GB/s", "of copy", "RMSE")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    last = None
    for row in record["rows"]:
        where = _point(row)
        first, last = ("" if where == last else where), where
        if "ms" not in row:
            reason = f"refused: {row['refused']}" if "refused" in row else f"not measured: {row['not_measured']}"
            table.add_row(first, row["name"], Text(reason, style="dim", overflow="ellipsis"))
            continue
        shares = row["of_measured"]
        table.add_row(
            first, row["name"], f"{row['median_ms']:.3f}", f"{row['p90_ms']:.3f}", _ms(row["warm_ms"]),
            f"{row['latency_us']:.0f}", f"{row['tflops']:.1f}", _percent(shares["tflops"]), f"{row['gb_per_s']:.0f}",
            _percent(shares["gb_per_s"]), f"{row['rmse']:.1e}",
        )  # fmt: skip
    return table


def ratios(record, ours) -> Table:
    """How many times as fast each of our kernels is as each other contender, with the 95 % interval.

    Parameters
    ----------
    record : dict
    ours : list of str
        The kernels to compare, in the rows of the table.
    """
    others = list(dict.fromkeys(row["name"] for row in record["rows"] if "ms" in row))
    table = Table(box=SIMPLE_HEAD, title="times as fast as ..., median of paired ratios [95 %]", title_justify="left")
    table.add_column("point", no_wrap=True)
    table.add_column("name", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for rows in by_point(record["rows"]).values():
        timed = {name: row for name, row in rows.items() if "ms" in row}
        for name in (name for name in ours if name in timed):
            cells = [
                str(paired(timed[name]["ms"], timed[other]["ms"])) if other in timed and other != name else ""
                for other in others
            ]
            table.add_row(_point(timed[name]), name, *cells)
    return table


def bars(record) -> tuple[Table, bool]:
    """The suite's bars and where the record stands; and whether it meets them all."""
    table = Table(box=SIMPLE_HEAD, title=head(record), title_justify="left")
    for name in ("what", "bar", "geometric mean [95 %]", "no single under", "worst point [95 %]", "RMSE ratio", ""):
        table.add_column(name, no_wrap=True)
    met = True
    for bar in (*bench_suite.BARS, *bench_suite.OWN_BARS):
        standing, error = bench_suite.standing(bar, record), bench_suite.accuracy(bar, record)
        problems = list(standing.problems)
        if error and not error.met:
            problems.append(f"RMSE {error.ratio:.3f} x the peer's, {bench_suite.ERROR_BAR} allowed")
        met &= not problems
        worst = f"{standing.worst[1]} at {_sizes(standing.worst[0])}" if standing.worst else "-"
        table.add_row(
            str(bar), f"{bar.mean:.3g}", str(standing.mean or "-"), f"{bar.single:.3g}" if bar.single else "-", worst,
            f"{error.ratio:.3f}" if error else "-",
            Text("; ".join(problems) or "met", style="red" if problems else "green"),
        )  # fmt: skip
    for kernel in dict.fromkeys(bar.kernel for bar in bench_suite.BARS):
        for rows, verdict in (_latency(kernel, record), _starts(kernel, record)):
            met &= not verdict
            for row in rows:
                table.add_row(*row)
    return table, met


def _starts(kernel, record):
    """As `_latency`, of the seconds of a first call: compiling, and finding the kernel compiled by another process."""
    rows, missed = [], []
    for what, took, bar in (
        ("first call, compiled", bench_suite.first_call_s(kernel, record), bench_suite.FIRST_CALL_BAR_S),
        ("first call, restarted", bench_suite.restart_s(kernel, record), bench_suite.RESTART_BAR_S),
    ):
        verdict = "not measured" if took is None else "" if took <= bar else f"{took:.2f} s misses {bar} s"
        missed += [verdict] * bool(verdict)
        said = Text(verdict or "met", style="red" if verdict else "green")
        rows.append((f"{kernel}, {what}", f"{bar} s", "-", "-", "-" if took is None else f"{took:.2f} s", "-", said))
    return rows, "; ".join(missed)


def _latency(kernel, record):
    """Rows of cells on the host's time for a call, none if it was not measured; and what misses the bar, "" if nothing.

    Both times are held to it, at the worst point: of calls in a row, and of calls after a wait. What a call usually
    took there is told as well, with whatever else ran on the machine, and so is what a little Python takes that
    launches nothing.
    """
    rows, missed = [], []
    for when, usual, entries in HOST:
        took = {way: bench_suite.latency_us(kernel, record, entry, usual) for way, entry in entries.items()}
        took = {way: us for way, us in took.items() if us is not None}
        calls = [us for way, us in took.items() if way != PLAIN]
        if not calls:
            continue
        bar, said = f"{bench_suite.LATENCY_BAR_US} us", Text("-")
        if not usual:
            verdict = "" if min(calls) <= bench_suite.LATENCY_BAR_US else f"{min(calls):.1f} us misses {bar}"
            missed += [verdict] * bool(verdict)
            said = Text(verdict or "met", style="red" if verdict else "green")
        told = ", ".join(f"{way} {us:.1f}" for way, us in took.items()) + " us"
        rows.append((f"{kernel}, host a call {when}", "-" if usual else bar, "-", "-", told, "-", said))
    return rows, "; ".join(missed)


def _point(row):
    mask = "causal" if row["causal"] else "full"
    return f"{row['direction']} {row['dtype']} d{row['d']} {mask} {row['B']}x{row['H']} N {row['N']}"


def _sizes(key):
    _, _, causal, d, N, *_ = key
    return f"d{d} {'causal' if causal else 'full'} N {N}"


def _ms(time):
    return "-" if time is None else f"{time:.3f}"


def _percent(share):
    return "-" if share is None else f"{100 * share:.0f} %"
