"""`run --kernel`: judges kernels that are not ours, one card each."""

import argparse
import json
import sys

from verify import options
from verify.card import card
from verify.card import cases as card_cases
from verify.card import html as card_html
from verify.card import text as card_text
from verify.card.verdict import FAIL, NO_GRADIENTS, NOTHING
from verify.cases import DEFAULT
from verify.foreign import facts as foreign_facts
from verify.foreign import probe as foreign_probe
from verify.foreign import run as foreign_run
from verify.foreign import spec as foreign
from verify.foreign.arrays import KINDS, missing
from verify.misuse import Misuse, pick
from verify.pool import cores
from verify.progress import bar

EPILOG = """\
A kernel of one's own may say what it does not take in a dict beside it, CAPABILITIES = {"head_dims": [64, 128],
"ragged": False}. Its words:

%s

The rest is True or False, taken or not:

%s

What the dict does not say is found out by small calls. NotImplementedError, TypeError, RuntimeError, and ValueError or
AssertionError that a raise or an assert line of its own throws, mean that something is not taken. An option that the
signature names is promised: there an accident is a failure. In a run NotImplementedError alone is a refusal.

Exit status with --kernel: 0 all that ran passed; 1 something failed, died or never answered; 2 nothing was judged, or
gradients were asked for by --backward and none were.
"""

UNASKED = ("varlen", "rules", "paged")  # words of the registry that no stranger's kernel is asked for
# Each process has a CUDA context, half a GiB of the device. More than one, as judging a run takes longer than the run.
ON_ONE_GPU = 4


def add_arguments(parser):
    """Declare the options that go with --kernel, and the words that its file may say."""
    asked = {word: what for word, what in foreign.WORDS.items() if word not in UNASKED}
    said = ("\n".join(f"  {word:16}{what}" for word, what in words.items()) for words in (foreign.SAYS, asked))
    parser.epilog = EPILOG % tuple(said)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    group = parser.add_argument_group("a kernel of one's own")
    group.add_argument(
        "--kernel", metavar="FILE.py:FUNC", action="append", help="or sdpa:math, sdpa:flash, flash-attn ...; repeatable"
    )
    group.add_argument("--arrays", choices=KINDS, help="what it takes; by the file's imports if left out")
    group.add_argument("--layout", choices=foreign.LAYOUTS, help="of its arrays; tried out if left out")
    group.add_argument("--backward", action="store_true", help="judge FUNC_backward beside it, or autograd, too")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", default=None, help="run the small shapes")
    size.add_argument("--full", action="store_false", dest="small", help="run the full shapes, however long they take")


def misused(args):
    """Options that say nothing without --kernel, and those that say nothing with it.

    Raises
    ------
    Misuse
    """
    if args.kernel is None:
        given = {"arrays": args.arrays, "layout": args.layout, "backward": args.backward, "small": args.small}
        given["full"] = args.small is False
        for name in (name for name, value in given.items() if value):
            raise Misuse(f"--{name}: goes with --kernel FILE.py:FUNC")
    elif args.kernels is not None:
        raise Misuse("--kernels: names kernels of ours; leave it out with --kernel")
    elif args.on is not None:
        raise Misuse("--on: where a kernel given by --kernel runs is its own choice; leave it out")


def run(args, to_json, to_html, to_md) -> int:
    """Judge each kernel, report, and return 0 if all that was asked for was judged and nothing failed."""
    specs = [foreign.parse(text, args.arrays, args.layout, args.backward) for text in args.kernel]
    if args.arrays and (reason := missing(args.arrays)):
        raise Misuse(f"--arrays {args.arrays}: {reason}")
    dtypes = options.dtypes(args)
    chosen = [case for case in _chosen(args) if args.backward or not case.backward]
    if not chosen:
        raise Misuse("--cases: all of these judge gradients; say --backward, too")
    # What is drawn needs a full matrix beside the default cases.
    drawn = any((args.json, to_html, to_md)) and args.cases is None
    cards = [judge(spec, chosen, dtypes, args, drawn) for spec in specs]
    if args.json == "-":
        json.dump(_document(cards), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        for made in cards:
            card_text.terminal(made)
            print()
    if to_json:
        to_json.write_text(json.dumps(_document(cards), indent=1, allow_nan=False) + "\n")
    if to_html:
        to_html.write_text(card_html.page(cards), encoding="utf-8")
    if to_md:
        to_md.write_text("\n".join(map(card_text.markdown, cards)), encoding="utf-8")
    verdicts = {made.verdict for made in cards}
    if verdicts == {NOTHING} and not cards[0].plan.facts.failure:
        raise Misuse(f"--cases, --dtype: every run was skipped ({cards[0].results[0].reason})")
    return 1 if FAIL in verdicts else 2 if verdicts & {NOTHING, NO_GRADIENTS} else 0


def judge(spec, cases, dtypes, args, drawn) -> card.Card:
    """Probe a kernel, run it, and make its card."""
    wanted = [*cases, *(card_cases.matrix() if drawn else ())]
    with bar(f"{spec.name}: what it takes", log=True) as update:
        facts = foreign_probe.probe(spec, wanted, dtypes, small=args.small, limit=args.limit, progress=update)
    if drawn:
        # Where numbers of queries and keys differ, the matrix follows the kernel's own alignment.
        align = "top_left" if "bottom_right" in facts.refused else "bottom_right"
        cases = [*cases, *(c for c in card_cases.matrix(align) if taken(facts, c))]
    if args.cases is None:
        # A stranger's tiles may be longer than any of the default cases' sequences.
        cases = [*cases, *card_cases.growth()]
    cases = [foreign_facts.fitted(case, facts.d, facts.small) for case in cases]
    jobs = args.jobs or cores(most=ON_ONE_GPU if facts.executor == "gpu" else 16)
    plan = foreign_run.Plan(spec, facts, tuple(cases), tuple(dtypes), args.seed, args.limit, jobs, args.dump)
    with bar(f"{spec.name}: {len(plan.keys)} runs", log=True) as update:
        return card.build(plan, foreign_run.run(plan, update))


def _chosen(args):
    """The cases that are named, be they default ones or a card's own; else the default ones."""
    if args.cases is None:
        return list(DEFAULT.values())
    known = DEFAULT | {case.id: case for case in (*card_cases.matrix(), *card_cases.growth())}
    return [known[name] for name in pick("--cases", args.cases, known, what="case", listed="--cases list")]


def taken(facts, case) -> bool:
    """Whether the matrix has a row for a mask: a kernel that does not know it needs none."""
    return not (case.needs & {"causal", "window", "mask"} & facts.refused.keys())


def _document(cards):
    """One card, or a list of several."""
    made = [one.to_dict() for one in cards]
    return made[0] if len(made) == 1 else made
