"""Time kernels and peers on this GPU in turns, by the protocol of `verify.timing`, and print or record the times."""

import json
from contextlib import nullcontext

from rich.console import Console

from verify import document, executors, options, timing
from verify.bench import points as bench_points
from verify.bench import report as bench_report
from verify.bench import start
from verify.bench import suite as bench_suite
from verify.bench.limits import BACKWARD, FORWARD
from verify.bench.peers import PEERS
from verify.bench.record import Bench, merged, same_run
from verify.bench.stats import LEAST_ROUNDS
from verify.bench.suite import SUITES
from verify.misuse import Misuse, pick
from verify.progress import bar
from verify.registry import CUDA, KERNELS

MAX_DIM, MAX_LENGTH = 256, 1 << 20
LENGTHS = "1024,2048,4096,8192,16384"
MASKS = {"full": (False,), "causal": (True,), "both": (False, True)}
DIRECTIONS = {"forward": (FORWARD,), "backward": (BACKWARD,), "both": (FORWARD, BACKWARD)}


def add_arguments(parser):
    """Declare the options."""
    options.add_kernels(parser)
    options.add_dtype(parser)
    parser.add_argument("--peers", metavar="NAMES", help=f"comma-separated, all or none: {', '.join(PEERS)}")
    parser.add_argument("--N", metavar="LENGTHS", help=f"comma-separated sequence lengths; {LENGTHS} if left out")
    parser.add_argument("--d", metavar="DIMS", help="comma-separated head dims; 64 if left out")
    parser.add_argument("--heads", default="16", help="number of heads")
    parser.add_argument("--tokens", metavar="T", help="tokens of all sequences: a batch of T / N; batch 1 if left out")
    parser.add_argument("--mask", choices=MASKS, default="both")
    parser.add_argument("--direction", choices=DIRECTIONS, help="forward if left out; with --suite, both")
    parser.add_argument("--rounds", default=str(timing.ROUNDS), help=f"cold runs of each, in turns; {timing.ROUNDS}")
    parser.add_argument("--seconds", default="3", help="bound on the rounds of one point")
    parser.add_argument("--suite", choices=SUITES, help="a fixed set of points with bars, see --check")
    parser.add_argument("--check", action="store_true", help="measure nothing: 1 if the suite's newest record misses a "
                        "bar or is of older kernels")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write a record, in the form of verify/records; a suite writes "
                        "its own there if left out")  # fmt: skip


def run(args) -> int:
    """Measure every point: 1 if something was refused or failed, or a bar was missed; 2 where there is no GPU."""
    if args.check:
        options.alone("--check", args, add_arguments, "suite")
        return check(args.suite or "h200")
    rounds = options.one("--rounds", args.rounds)
    if rounds < LEAST_ROUNDS:
        raise Misuse(f"--rounds: expected at least {LEAST_ROUNDS}, below which there is no 95 % interval; got {rounds}")
    seconds = options.one("--seconds", args.seconds)
    suite = SUITES.get(args.suite)
    if suite and rounds != timing.ROUNDS:
        raise Misuse(f"--rounds: a suite has {timing.ROUNDS}, leave it out")
    if suite and not timing.missing() and suite.device not in (name := executors.device_name("gpu")):
        raise Misuse(f"--suite: its bars are for an {suite.device}, and this is an {name}; leave it out")
    points, alone = _suite_points(suite, args) if suite else (_points(args), [])
    kernels = _kernels(suite, args)
    others = _peers(args.peers, suite.peers if suite else tuple(PEERS))
    path = suite_record(suite.name) if suite else None
    target = options.writable("--json", args.json) or path
    if reason := timing.missing():
        raise Misuse(f"bench: a GPU is needed to time anything, and {reason}")
    bench = Bench(timing.Clock(), kernels, others, rounds, seconds, LEAST_ROUNDS if suite else 1)
    older = _read(path) if path else None
    if older and not args.json and not same_run(bench.record("suite", []), older):
        raise Misuse(f"--suite: {path} is of another machine, other versions or another protocol; name another file "
                     "with --json, or move that one away")  # fmt: skip
    with start.empty_cache() if suite else nullcontext():
        rows, record = _measured(bench, points, alone, suite, older, target)
    console = _console()
    console.print(bench_report.times({**record, "rows": rows}))
    console.print(bench_report.ratios({**record, "rows": rows}, kernels))
    if target:
        console.print(f"written: {target}")
    met = _bars(console, record) if suite else True
    return 0 if met and not unfinished(rows, kernels) else 1


def _measured(bench, points, alone, suite, older, target):
    """The rows of all points, those of our kernels against themselves the last, and the record; kept in a file.

    A measurement that was paid for is kept, whatever comes after it.
    """
    rows, restarts = [], []

    def keep():
        record = bench.record("suite" if suite else "times", rows, restarts)
        record = merged(record, older) if suite else record
        if target:
            target.write_text(document.lines(record, "rows"))
        return record

    with bar("bench") as update:
        for done, point in enumerate([*points, *alone]):
            update(done, len(points) + len(alone))
            rows += bench.measure(point, suite.dtype if point in alone else None)
            record = keep()
    if suite:
        restarts += start.restarts(rows, list(dict.fromkeys(bar.kernel for bar in bench_suite.BARS)))
        record = keep()
    return rows, record


def check(name) -> int:
    """Hold the newest record of a suite against its bars: 0 if it meets all and no kernel was changed since."""
    path = suite_record(name)
    record, console = _read(path), _console()
    if record is None:
        console.print(f"no record of the suite {name} at {path}: run `python -m verify bench --suite {name}` on a GPU")
        return 1
    met, old = _bars(console, record), bench_suite.stale(record)
    for kernel, why in old.items():
        console.print(f"stale: {kernel} was changed since the record was made ({why})", style="red")
    return 0 if met and not old else 1


def unfinished(rows, kernels) -> list[str]:
    """What should have been timed and was not: refused times of anyone, and our kernels where they failed."""
    refused = [f"{row['name']}: {row['refused']}" for row in rows if "refused" in row]
    failed = [row for row in rows if row["name"] in kernels and row.get("failed")]
    return refused + [f"{row['name']}: {row['not_measured']}" for row in failed]


def suite_record(name):
    """Where the suite's record is."""
    return document.RECORDS / f"{name}_suite.json"


def _bars(console, record):
    table, met = bench_report.bars(record)
    console.print(table)
    return met


def _console():
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 230
    return console


def _read(path):
    return json.loads(path.read_text()) if path.is_file() else None


def _points(args):
    """The points that the options name."""
    lengths, dims = options.positive("--N", args.N or LENGTHS), options.positive("--d", args.d or "64")
    if max(dims) > MAX_DIM or max(lengths) > MAX_LENGTH:
        raise Misuse(f"--d, --N: expected head dims up to {MAX_DIM} and lengths up to {MAX_LENGTH}")
    heads, tokens = (
        options.one("--heads", args.heads),
        options.one("--tokens", args.tokens) if args.tokens else None,
    )
    ways = DIRECTIONS[args.direction or "forward"]
    return bench_points.points(ways, lengths, dims, options.dtypes(args), MASKS[args.mask], heads, tokens)


def _suite_points(suite, args):
    """The suite's points, or those that the options choose, and those in its other storage type, of our kernels alone.

    What the suite fixes cannot be chosen.
    """
    for option, value, default in (("--dtype", args.dtype, None), ("--tokens", args.tokens, None),
                                   ("--heads", args.heads, "16")):  # fmt: skip
        if value != default:
            raise Misuse(f"{option}: a suite has its own, leave it out")
    dims, lengths = (value and options.positive(name, value) for name, value in (("--d", args.d), ("--N", args.N)))
    chosen = DIRECTIONS[args.direction or "both"], dims, MASKS[args.mask], lengths
    return suite.points(*chosen), suite.other_points(*chosen)


def _kernels(suite, args):
    """The kernels to time: of a suite those that are registered."""
    if suite is None or args.kernels is not None:
        return pick("--kernels", args.kernels, CUDA, what="kernel") if args.kernels else list(KERNELS)
    return [name for name in suite.kernels if name in CUDA]


def _peers(text, default):
    """The peers to time against."""
    if text in (None, "all", "none"):
        return {None: list(default), "all": list(PEERS), "none": []}[text]
    return pick("--peers", text, PEERS, what="peer")
