"""The claims ledger: every number, formula and listing of the texts, recomputed."""

import json
import sys

from verify import options
from verify.claims import html, inventory, ledger, report
from verify.misuse import Misuse, pick
from verify.progress import bar


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--section", metavar="NAMES", help="such as 18.4, 18.4.2 or blog; comma-separated")
    parser.add_argument("--verdict", metavar="NAMES", help=f"comma-separated, of {', '.join(ledger.VERDICTS)}")
    parser.add_argument("--id", metavar="IDS", help="print these entries in full")
    parser.add_argument(
        "--coverage", action="store_true", help="print which entries judge which table, figure, listing"
    )
    parser.add_argument("--json", metavar="FILE", help="write entries and coverage; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write a searchable page")
    parser.add_argument("--md", metavar="FILE", help="write counts and entries as Markdown")


def run(args) -> int:
    """Recompute the chosen entries, report them, and return 0: a wrong text is a finding, not a failure."""
    chosen = choose(args)
    to_json = None if args.json == "-" else options.writable("--json", args.json)
    to_html, to_md = options.writable("--html", args.html), options.writable("--md", args.md)
    if args.coverage:
        report.coverage_table()
        return _gaps()
    with bar("claims") as update:
        results = []
        for done, claim in enumerate(chosen):
            update(done, len(chosen))
            results.append((claim, claim.recompute()))
    if args.json == "-":
        json.dump(report.document(results), sys.stdout, ensure_ascii=False, indent=1, allow_nan=False)
        print()
    elif args.id:
        for claim, outcome in results:
            report.full(claim, outcome)
    else:
        report.terminal(results)
    if to_json:
        text = json.dumps(report.document(results), ensure_ascii=False, indent=1, allow_nan=False)
        to_json.write_text(text + "\n", encoding="utf-8")
    if to_html:
        to_html.write_text(html.page(results, to_html.resolve().parent), encoding="utf-8")
    if to_md:
        to_md.write_text(report.markdown(results), encoding="utf-8")
    return 0


def choose(args) -> list:
    """The entries that the options name.

    Raises
    ------
    Misuse
        For an unknown section, verdict or id, or if nothing is left.
    """
    claims = ledger.load()
    if args.id is not None:
        return [claims[id] for id in pick("--id", args.id, claims, what="entry")]
    known = list(inventory.TITLES) + sorted({claim.section for claim in claims.values()})
    sections = pick("--section", args.section, dict.fromkeys(known), what="section")
    verdicts = pick("--verdict", args.verdict, ledger.VERDICTS, what="verdict")
    chosen = [c for c in claims.values() if (c.group in sections or c.section in sections) and c.verdict in verdicts]
    if not chosen:
        raise Misuse("--section, --verdict: no entry has both")
    return chosen


def _gaps() -> int:
    """Print what the coverage table leaves unexplained; 1 if anything."""
    found = inventory.gaps()
    for line in found:
        print(f"gap: {line}")
    return 1 if found else 0
