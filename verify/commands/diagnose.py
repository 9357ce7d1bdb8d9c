"""Name the likeliest bug of a kernel, with the evidence, where it starts, and where to read on."""

from dataclasses import replace

from rich.console import Console

from verify import options
from verify.cases import DEFAULT
from verify.diagnose import in_examples, report, self_test, subjects
from verify.diagnose.diagnosis import NONE, diagnose
from verify.foreign import probe as foreign_probe
from verify.foreign import spec as foreign
from verify.foreign.arrays import KINDS
from verify.foreign.facts import usual
from verify.misuse import Misuse, pick
from verify.progress import bar
from verify.registry import ALL


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--kernel", metavar="NAME|FILE.py:FUNC", help="a registered kernel, or one's own")
    parser.add_argument("--arrays", choices=KINDS, help="what one's own takes; by the file's imports if left out")
    parser.add_argument("--layout", choices=foreign.LAYOUTS, help="of its arrays; tried out if left out")
    parser.add_argument("--backward", action="store_true", help="look at FUNC_backward beside it, or autograd, too")
    options.add_dtype(parser)
    options.add_on(parser)
    parser.add_argument("--self-test", action="store_true", help="diagnose kernels whose bugs are known; print figures")
    parser.add_argument("--all", action="store_true", help="with --self-test: all mutants of our kernels, not a sample")


def run(args) -> int:
    """Diagnose, print, and return 0 if nothing is wrong."""
    if args.self_test == (args.kernel is not None):
        raise Misuse("--kernel: expected a kernel to diagnose, or --self-test" if not args.self_test
                     else "--self-test: brings its own kernels; leave --kernel out")  # fmt: skip
    if args.all and not args.self_test:
        raise Misuse("--all: goes with --self-test")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if args.self_test:
        with bar("diagnose") as update:
            trials = self_test.run(args.all, progress=update)
        for line in report.self_test_lines(trials, in_examples.left_out()):
            console.print(line)
        return 0 if self_test.score(trials).passed else 1
    ours = args.kernel in ALL
    subject, source, notes, died = (*_ours(args), (), ()) if ours else _foreign(args)
    with subjects.apart(subject, source) as kernel, bar(f"diagnose {subject.name}", log=True) as update:
        found = diagnose(kernel, progress=update)
    for line in report.lines(found, notes):
        console.print(line)
    return 0 if found.verdict == NONE and not died else 1


def _ours(args):
    """A registered kernel and how to reach it from another process."""
    for name in ("arrays", "layout", "backward"):
        if getattr(args, name):
            raise Misuse(f"--{name}: goes with a kernel of one's own, FILE.py:FUNC")
    executor = options.executor(args)
    subject = subjects.registered(args.kernel, executor)
    wanted = subject.dtypes if args.dtype is None else pick("--dtype", args.dtype, subject.dtypes, what="storage type")
    wanted = tuple(dtype for dtype in wanted if dtype != "fp64")
    if not wanted:
        raise Misuse("--dtype: expected fp32, fp16 or bf16: faults are compared in their roundings")
    where = executor if ALL[args.kernel].runs == "cuda" else "numpy"
    return replace(subject, dtypes=wanted), ("ours", args.kernel, where)


def _foreign(args):
    """A stranger's kernel, after finding out what it takes; how to reach it, what else is worth saying, what died."""
    if args.on is not None:
        raise Misuse("--on: where a kernel of one's own runs is its own choice; leave it out")
    spec = foreign.parse(args.kernel, args.arrays, args.layout, args.backward)
    dtypes = options.dtypes(args)
    with bar(f"{spec.name}: what it takes", log=True) as update:
        facts = foreign_probe.probe(spec, list(DEFAULT.values()), dtypes, progress=update)
    if facts.failure:
        raise Misuse(f"--kernel {args.kernel}: {facts.failure}")
    if args.backward and (why := facts.refused.get("backward")):
        raise Misuse(f"--backward: {spec.name} {why}; leave it out to look at the forward pass")
    if facts.always_causal:
        raise Misuse(f"--kernel {args.kernel}: is always causal, and most probes are not")
    subject = subjects.foreign(spec, facts, [dtype for dtype in dtypes if dtype != "fp64"])
    if not subject.dtypes:
        raise Misuse(f"--dtype: {spec.name} takes none of {', '.join(dtypes)}")
    return subject, ("foreign", spec, facts.layout), _notes(facts, dtypes), facts.died


def _notes(facts, dtypes):
    """What was found out before the first probe, and bears on what the probes can show."""
    notes = [*facts.hints, *facts.died]
    notes += [f"probes have head dim {facts.d}, as it does not take {usual(facts.small)}"] if facts.d else []
    reasons = (facts.refused.get(("dtype", dtype)) for dtype in dtypes)
    notes += [f"not looked at: {dtype} ({why})" for dtype, why in zip(dtypes, reasons, strict=True) if why]
    # What its signature lacks it was not meant to take; how it refused the rest is worth a second look.
    probed = [why for word, why in facts.refused.items() if isinstance(word, str) and "(probed: " in why]
    return notes + [f"not looked at: {why}" for why in dict.fromkeys(probed)]
