"""The ledger as data, terminal table and Markdown."""

import math
from collections import Counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verify.claims import second_reading
from verify.claims.inventory import TITLES, coverage
from verify.claims.ledger import VERDICTS, Bound, Range, disagreements, leaves, recomputed

STYLE = {
    "wrong": "bold red",
    "inconsistent": "red",
    "units": "yellow",
    "depends": "cyan",
    "unverifiable": "dim",
    "confirmed": "green",
}


def plain(value):
    """A JSON form: ranges as {"lo", "hi"}, infinities as null, NumPy scalars as Python ones."""
    if isinstance(value, dict):
        return {str(key): plain(sub) for key, sub in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(sub) for sub in value]
    if isinstance(value, Range):
        return {"lo": value.lo, "hi": value.hi}
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value) -> str:
    """One leaf as a reader wants it."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, Range):
        return f"{number(value.lo)} to {number(value.hi)}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        # Years and four-digit lengths read better without a comma.
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return "no limit" if math.isinf(value) else "NaN"
        if value == 0 or 1e-3 <= abs(value) < 1e4:
            return f"{value:.4g}"
        if 1e4 <= abs(value) < 1e6 or (abs(value) < 1e9 and value.is_integer()):
            return f"{value:,.0f}"
        return f"{value:.3g}"
    return str(value)


def short(value, width=46) -> str:
    """A value on one line, cut to `width`."""
    flat = leaves(value)
    text = "; ".join(f"{path}: {number(leaf)}" if path else number(leaf) for path, leaf in flat.items())
    return text if len(text) <= width else text[: width - 1] + "…"


def entry(claim, outcome) -> dict:
    """One entry with its outcome, ready for JSON."""
    return {
        "id": claim.id,
        "group": claim.group,
        "section": claim.section,
        "where": claim.where,
        "kind": claim.kind,
        "title_en": claim.title_en,
        "title_zh": claim.title_zh,
        "paraphrase": claim.paraphrase,
        "stated": plain(claim.stated),
        "unit": claim.unit,
        "verdict": outcome.verdict,
        "declared": claim.verdict,
        "recomputed": plain(outcome.value),
        "disagrees": list(outcome.off),
        "why": outcome.detail,
        "right": claim.right,
        "severity": claim.severity,
        "reading_is_guess": claim.reading_is_guess,
        "conflicts_with": list(claim.conflicts_with),
        "source": claim.source,
        "mended": claim.mended is not None,
        "second_reading": second_reading.told(claim.id),
    }


def document(results) -> dict:
    """Everything as one JSON document; `results` is a list of (claim, outcome)."""
    return {
        "schema": 1,
        "kind": "claims",
        "counts": counts(results),
        "titles": {group: list(titles) for group, titles in TITLES.items()},
        "entries": [entry(claim, outcome) for claim, outcome in results],
        "coverage": {group: {item: plain(ids) for item, ids in rows.items()} for group, rows in coverage().items()},
    }


def counts(results) -> dict[str, dict[str, int]]:
    """How many entries of each section have each verdict."""
    tally = Counter((claim.group, outcome.verdict) for claim, outcome in results)
    groups = [group for group in TITLES if any(g == group for g, _ in tally)]
    return {group: {verdict: tally[group, verdict] for verdict in VERDICTS} for group in groups}


def ranked(results) -> list:
    """Worst first: by verdict, then severity, then id."""
    return sorted(results, key=lambda pair: (VERDICTS.index(pair[1].verdict), -pair[0].severity, pair[0].id))


def console() -> Console:
    """A console that does not cut tables when its output is piped."""
    made = Console(highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 150
    return made


def terminal(results):
    """Print the table, worst first, and the counts."""
    out = console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    least = {"id": 8, "verdict, severity": 14, "where": 12}
    for name in ("id", "verdict, severity", "where", "claim", "stated", "recomputed"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=least.get(name))
    for claim, outcome in ranked(results):
        stated, value = telling(claim, outcome)
        table.add_row(
            claim.id,
            f"[{STYLE[outcome.verdict]}]{outcome.verdict} {claim.severity}[/]",
            escape(claim.where),
            escape(claim.title_en),
            escape(short(stated)),
            escape(short(value)),
        )
    out.print(table)
    out.print(_count_table(results))
    if {claim.id for claim, _ in results} >= second_reading.IDS:
        out.print(f"{second_reading.summary()} (verify/claims/second_reading.md)")
    differ = [claim.id for claim, outcome in results if claim.verdict != outcome.verdict]
    if differ:
        out.print(f"[bold red]declared and recomputed verdicts differ:[/] {', '.join(differ)}")


def excludes_nothing(bound) -> bool:
    """Does a bound admit every value that is not negative?"""
    low, high = set(leaves(bound.lo).values()), set(leaves(bound.hi).values())
    return low <= {0, -math.inf} and high == {math.inf}


def shown(claim, outcome):
    """The recomputed value as a reader wants it: the ends of a bound named, and words where there is none."""
    truth = recomputed(claim)
    if not isinstance(truth, Bound):
        return outcome.value
    return "not recomputable" if excludes_nothing(truth) else {"at least": truth.lo, "at most": truth.hi}


def telling(claim, outcome) -> tuple:
    """Stated and recomputed value, cut to the leaves that disagree where some do and the shapes are alike."""
    stated, value = leaves(claim.stated), leaves(outcome.value)
    if stated.keys() != value.keys():
        return claim.stated, shown(claim, outcome)
    off = disagreements(claim.stated, outcome.value, claim.tol)
    if not off:
        return claim.stated, outcome.value
    return {path: stated[path] for path in off}, {path: value[path] for path in off}


def _count_table(results) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("section", *VERDICTS, "all"):
        table.add_column(name, justify="left" if name == "section" else "right")
    by_group = counts(results)
    for group, row in by_group.items():
        english, chinese = TITLES[group]
        table.add_row(f"{group} {english} {chinese}", *(str(row[v] or "") for v in VERDICTS), str(sum(row.values())))
    total = {v: sum(row[v] for row in by_group.values()) for v in VERDICTS}
    table.add_section()
    table.add_row("all", *(str(total[v]) for v in VERDICTS), str(sum(total.values())))
    return table


def full(claim, outcome):
    """Print one entry in full."""
    out = console()
    out.print(
        f"[bold]{claim.id}[/] {escape(claim.title_en)} {escape(claim.title_zh)}  "
        f"[{STYLE[outcome.verdict]}]{outcome.verdict}[/], severity {claim.severity}, {claim.kind}"
    )
    guess = " (our reading of a displaced formula)" if claim.reading_is_guess else ""
    lines = {
        "where": f"{claim.section}, {claim.where}",
        "text says": claim.paraphrase + guess,
        "stated": f"{short(claim.stated, 4000)} {claim.unit}",
        "recomputed": short(shown(claim, outcome), 4000),
        "disagrees": ", ".join(part for part in outcome.off if part),
        "why": outcome.detail,
        "right": claim.right,
        "see also": ", ".join(claim.conflicts_with),
        "source": claim.source,
        "2nd reading": second_reading.told(claim.id),
    }
    for name, text in lines.items():
        if text:
            out.print(f"  {name:11}{escape(text)}")


def coverage_table():
    """Print the inventory with its entries or reasons."""
    out = console()
    for group, rows in coverage().items():
        table = Table(title=f"{group} {' '.join(TITLES[group])}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("item")
        table.add_column("entries, or why there are none")
        for item, ids in rows.items():
            table.add_row(escape(item), escape(ids if isinstance(ids, str) else ", ".join(ids)))
        out.print(table)


def markdown(results) -> str:
    """The counts, then every entry that is not confirmed, worst first, then the confirmed ones in short."""
    lines = [
        "# Claims ledger",
        "",
        "| section | " + " | ".join(VERDICTS) + " | all |",
        "|---|" + "--:|" * (len(VERDICTS) + 1),
    ]
    for group, row in counts(results).items():
        numbers = " | ".join(str(row[v]) for v in VERDICTS)
        lines.append(f"| {group} {' '.join(TITLES[group])} | {numbers} | {sum(row.values())} |")
    lines += [
        "",
        "| id | verdict | where | claim | stated | recomputed | what is right |",
        "|---|---|---|---|---|---|---|",
    ]
    for claim, outcome in ranked(results):
        cells = (
            claim.id,
            outcome.verdict,
            f"{claim.section} {claim.where}",
            f"{claim.paraphrase} ({claim.title_zh})",
            f"{short(claim.stated, 160)} {claim.unit}",
            short(shown(claim, outcome), 160),
            claim.right,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|").strip() for cell in cells) + " |")
    return "\n".join(lines) + "\n"
