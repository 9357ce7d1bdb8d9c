"""A card for the terminal and as Markdown."""

import math

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verify import summary
from verify.card import pattern as card_pattern
from verify.card.card import Card, times
from verify.card.verdict import FAIL, NO_GRADIENTS, NOTHING, PASS
from verify.report import md_row as row

HEAD = ("dtype", "passed", "failed", "skipped", "error / bound", "worst at")
_STYLE = {PASS: "bold green", FAIL: "bold red", "error": "bold red"} | dict.fromkeys(
    (NOTHING, NO_GRADIENTS), "bold yellow"
)
MOST = 8
NO = "its signature has no "


def lines(card: Card) -> list[tuple]:
    """One row of the table for each storage type, in the order of `HEAD`."""
    rows = []
    for line in summary.lines(card.results):
        n = line.counts
        ratio = "" if line.worst is None else summary.shown(line.worst.ratio)
        rows.append((line.dtype, line.passed, str(n["fail"] + n["error"]), str(n["skip"]), ratio, line.where))
    return rows


def failures(card: Card) -> list[tuple[str, str, str]]:
    """(verdict, what, why) of what failed: runs that failed in the very same way are one line."""
    out = []
    for runs in card.failed().values():
        first = runs[0].result
        s = first.size
        what = f"{first.case} ({s['Nq']} x {s['Nk']}), {first.dtype}" if len(runs) == 1 else _runs(runs)
        out.append((first.verdict, what, _why(first)))
    return out


def _why(result):
    """What is wrong with a run, in short: its outputs that are out of bound, and whatever else the judge says."""
    wrong = {name: m for name, m in result.outputs.items() if not m.ok}
    told = [
        f"{name} {_how(m)} in {m.share_out:.1%} of its elements, "
        f"at {list(m.worst_index)} {m.got:.6g} for {m.wanted:.6g}"
        for name, m in wrong.items()
    ]
    # The judge's own line begins with the first output that is out.
    rest = result.reason.split(f"{next(iter(wrong))} of case")[0] if wrong else result.reason
    return "; ".join(filter(None, [rest.strip("; "), *told]))


def _how(m):
    """In what way an output is wrong."""
    if math.isfinite(m.ratio):
        return f"up to {times(m.ratio)} its bound"
    if math.isnan(m.got):
        return f"wrong, with {m.nan} NaN,"
    return f"wrong, with {m.inf} inf," if math.isinf(m.got) else f"wrong, finite where {m.wanted:g} is right,"


def skips(card: Card) -> list[str]:
    """Why runs were skipped. Options that the signature lacks are one line."""
    lacking, out = {}, []
    for reason, group in card.skipped().items():
        what, colon, names = reason.partition(f": {NO}")
        if colon:
            lacking[what.removeprefix("does not take ")] = (names.split(" and no "), len(group))
        else:
            out.append(f"{reason} ({_runs(group)})")
    if lacking:
        names = ", ".join(name for names, _ in lacking.values() for name in names)
        runs = sum(n for _, n in lacking.values())
        counted = "1 run" if runs == 1 else f"{runs} runs"
        out.insert(0, f"does not take {', '.join(lacking)}: {NO}{names} ({counted})")
    return out


def where(card: Card) -> list[str]:
    """What the failing runs have in common, and where in the output of one of them the error sits."""
    worst = card.worst
    said = [card_pattern.pattern(card)]
    if worst and worst.place.text:
        said.append(f"Where, in {worst.result.case}, {worst.result.dtype}: {worst.place.text}")
    return [sentence for sentence in said if sentence]


def terminal(card: Card, console=None):
    """Print a card.

    Parameters
    ----------
    card : Card
    console : rich.console.Console, optional
        Standard output if not given.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120  # a pipe has no width of its own, and 80 would cut names
    console.print(Text(f"{card.name}: "), Text(card.verdict.upper(), style=_STYLE[card.verdict]), sep="", end="")
    console.print(Text(f". {capital(card.headline())}"))
    for sentence in card.call():
        console.print(Text(f"  {sentence}", style="dim"))
    if card.plan.facts.failure:
        return
    table = Table(header_style="bold", box=SIMPLE_HEAD)
    for name in HEAD:
        table.add_column(name, justify="left" if name in ("dtype", "worst at") else "right", no_wrap=True)
    for cells in lines(card):
        table.add_row(*cells)
    console.print(table)
    told = failures(card)
    for verdict, what, why in told[:MOST]:
        console.print(Text(f"{verdict.upper():5} ", style=_STYLE[verdict]), Text(f"{what}: {why}"), sep="")
    if len(told) > MOST:
        console.print(f"... and {len(told) - MOST} more; --html and --json have them all")
    for sentence in where(card):
        console.print(Text(f"{sentence}."))
    if card.again():
        console.print(Text(f"again: {card.again()}", style="dim"))
    for reason in skips(card):
        console.print(Text("skip  ", style="yellow"), Text(reason), sep="")
    if card.why():
        console.print("\nWhy is it not equal?")
        for sentence in card.why():
            console.print(Text(f"  {sentence}"))


def markdown(card: Card) -> str:
    """The same card as Markdown."""
    out = [f"# {card.name}: {card.verdict}", "", capital(card.headline()) + ".", "", *_bullets(card.call())]
    if card.plan.facts.failure:
        return "\n".join(out).rstrip() + "\n"
    out += ["", row(HEAD), row(["---"] * len(HEAD)), *(row(cells) for cells in lines(card))]
    if told := failures(card):
        out += ["", "## What failed", ""]
        out += [f"- **{verdict}** {what}: {why}" for verdict, what, why in told]
        out += ["", *(f"{sentence}.\n" for sentence in where(card))]
        out += [f"`{card.again()}`"] if card.again() else []
    if card.why():
        out += ["", "## Why is it not equal?", "", *_bullets(card.why())]
    out += ["", "## The anchors, where each output comes nearest to its bound", ""]
    head = ("dtype", "output", "case", "error", "plain formula", "bound", "a-priori bound", "error / bound")
    out += [row(head), row(["---"] * len(head))]
    for a in card.anchors():
        numbers = [f"{a[name]:.3g}" for name in ("error", "plain", "bound", "apriori")]
        out.append(row([a["dtype"], a["output"], a["case"], *numbers, summary.shown(a["ratio"])]))
    if grown := card.growth():
        out += ["", "## Growth with N", ""]
        head = ("dtype", "N", "error of O", "plain formula", "bound")
        out += [row(head), row(["---"] * len(head))]
        out += [row([g["dtype"], g["N"], *(f"{g[name]:.3g}" for name in ("error", "plain", "bound"))]) for g in grown]
    if card.skipped():
        out += ["", "## Skipped, which is not a pass", "", *_bullets(skips(card))]
    return "\n".join(out).rstrip() + "\n"


def _bullets(sentences):
    return [f"- {sentence}" for sentence in sentences]


def _runs(group):
    return f"{len(group)} run{'' if len(group) == 1 else 's'}"


def capital(text):
    """The text with a capital at its head."""
    return text[0].upper() + text[1:]
