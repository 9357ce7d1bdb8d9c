"""Time kernels on this GPU by the protocol of `verify.timing` and print, or record, the table."""

import json

from rich.console import Console
from rich.table import Table

from verify import options, timing
from verify.misuse import Misuse
from verify.progress import bar
from verify.registry import KERNELS

MAX_DIM, MAX_LENGTH = 256, 1 << 20
MASKS = {"full": (False,), "causal": (True,), "both": (False, True)}


def add_arguments(parser):
    """Declare the options."""
    options.add_kernels(parser)
    options.add_dtype(parser)
    parser.add_argument("--N", default="1024,2048,4096,8192,16384", help="comma-separated sequence lengths")
    parser.add_argument("--d", default="64", help="comma-separated head dims")
    parser.add_argument("--heads", default="16", help="number of heads; batch 1")
    parser.add_argument("--mask", default="both", help="full, causal or both")
    parser.add_argument("--json", metavar="FILE", help="write a record, in the form of verify/records")


def run(args) -> int:
    """Measure every point; 2 where there is no GPU."""
    names = [name for name in options.kernels(args) if name in KERNELS]
    lengths, dims, heads = _positive("--N", args.N), _positive("--d", args.d), _positive("--heads", args.heads)
    if args.mask not in MASKS:
        raise Misuse(f"--mask: expected one of {', '.join(MASKS)}, got {args.mask!r}")
    target, kinds = options.writable("--json", args.json), options.dtypes(args)
    if max(dims) > MAX_DIM or max(lengths) > MAX_LENGTH:
        raise Misuse(f"--d, --N: expected head dims up to {MAX_DIM} and lengths up to {MAX_LENGTH}")
    if reason := timing.missing():
        raise Misuse(f"bench: a GPU is needed to time anything, and {reason}")
    todo = timing.points(names, lengths, dims, kinds, MASKS[args.mask], heads[0])
    clock, rows = timing.Clock(), []
    copy_gb_per_s = clock.copy_gb_per_s()
    with bar("bench") as update:
        for done, point in enumerate(todo):
            update(done, len(todo))
            rows.append(timing.measure(point, clock))
            if target:  # a measurement that was paid for is kept, whatever comes after it
                target.write_text(json.dumps(timing.record(rows, copy_gb_per_s), indent=1) + "\n")
    record = timing.record(rows, copy_gb_per_s)
    if target:
        target.write_text(json.dumps(record, indent=1) + "\n")
    Console().print(table(record))
    return 0


def table(record):
    """The rows as a table, rates by the convention of 4 B H Nq Nk d operations (half when causal)."""
    out = Table(title=f"{record['device']}, {record['protocol']['l2']} L2, {record['copy_gb_per_s']:.0f} GB/s copy")
    for name in ("kernel", "dtype", "mask", "d", "N", "median ms", "P90 ms", "runs", "TFLOP/s"):
        out.add_column(name, justify="left" if name in ("kernel", "dtype", "mask") else "right")
    for row in record["rows"]:
        size = row["size"]
        flops = 4 * size["Hq"] * size["Nq"] * size["Nk"] * size["d"] / (2 if row["causal"] else 1)
        out.add_row(
            row["kernel"], row["dtype"], "causal" if row["causal"] else "full", str(size["d"]), str(size["Nq"]),
            *(f"{row[name]:.3f}" for name in ("median_ms", "p90_ms")), str(row["runs"]),
            f"{flops / row['median_ms'] / 1e9:.2f}",
        )  # fmt: skip
    return out


def _positive(option, text):
    """Comma-separated positive integers, or Misuse."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise Misuse(f"{option}: expected positive integers, got {text!r}")
    return numbers
