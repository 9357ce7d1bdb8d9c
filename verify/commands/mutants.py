"""Plant every known bug, one at a time, and see that the default cases find it and that no correct kernel is failed."""

import json
import secrets
import sys
from difflib import get_close_matches

from rich.console import Console

from verify import options
from verify.misuse import Misuse, pick
from verify.mutants import AREAS, MUTANTS, campaign, report
from verify.progress import bar


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--only", metavar="NAMES", help="comma-separated mutants or areas; no controls then")
    parser.add_argument("--list", action="store_true", help="print the catalogue and run nothing")
    options.add_dtype(parser)
    parser.add_argument("--full", action="store_true", help="every mutant on every case: an hour of two cores")
    parser.add_argument("--seed", type=int, metavar="N", help="first of the fresh seeds; drawn if left out")
    parser.add_argument("--json", metavar="FILE", help="write every run; - is standard output, without the table")
    parser.add_argument("--html", metavar="FILE", help="write a page with the kill matrix, a column a case")
    parser.add_argument("--jobs", type=int, help="processes at a time; the number of cores, at most 8")


def run(args) -> int:
    """Run, report, and return 0 if all mutants are killed and no correct kernel is failed."""
    names = chosen(args.only)
    if args.list:
        listing(names)
        return 0
    dtypes = options.dtypes(args)
    to_json = None if args.json == "-" else options.writable("--json", args.json)
    to_html = options.writable("--html", args.html)
    for option, least in (("seed", 0), ("jobs", 1)):
        given = getattr(args, option)
        if given is not None and given < least:
            raise Misuse(f"--{option}: expected an integer of at least {least}, got {given}")
    # Drawn, so that they are fresh: a judge could be tuned to fixed ones. Printed, so that a failure can be seen again.
    start = secrets.randbelow(10**6) if args.seed is None else args.seed
    seeds = () if args.only else tuple(range(start, start + campaign.FRESH))
    with bar("mutants") as update:
        found = campaign.run(names, dtypes, seeds=seeds, full=args.full, jobs=args.jobs, progress=update)
    if not found.rows:
        raise Misuse(f"--only, --dtype: none of these mutants is a bug in {args.dtype}")
    told = report.build(found)  # once: it says when it was made
    if args.json == "-":
        json.dump(told, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        report.terminal(found)
    if to_json:
        to_json.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n")
    if to_html:
        from verify.mutants import page

        to_html.write_text(page.page(told, report.sentences(found)), encoding="utf-8")
    return 0 if found.passed else 1


def chosen(text) -> list[str]:
    """Mutants by name or area; all if nothing is named.

    Raises
    ------
    Misuse
    """
    if text is None:
        return list(MUTANTS)
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in MUTANTS and word not in AREAS:
            near = get_close_matches(word, [*MUTANTS, *AREAS], 1)
            hint = f"did you mean {near[0]!r}?" if near else "--list has the names"
            raise Misuse(f"--only: there is no mutant or area {word!r}; {hint}")
    names = [name for name, mutant in MUTANTS.items() if name in words or mutant.area in words]
    return pick("--only", ",".join(names), MUTANTS, what="mutant")


def listing(names):
    """Print what each mutant is and where."""
    console = Console(highlight=False, soft_wrap=True)
    area = None
    for name in names:
        mutant = MUTANTS[name]
        if mutant.area != area:
            area = mutant.area
            console.print(f"\n{area}", style="bold", markup=False)
        console.print(f"  {name:30} {mutant.section:7} {report.where(mutant):40} {mutant.about}", markup=False)
    numba = sum(MUTANTS[name].in_numba for name in names)
    console.print(f"\n{len(names)} mutants, {numba} of them in the kernels' bodies", markup=False)
