"""Cards as one HTML file that needs nothing else: verdict, why it is not equal, error matrix, where, growth."""

import json
import math
from html import escape

from verify.card import cases as card_cases
from verify.card import draw as card_draw
from verify.card import text as card_text
from verify.card.card import Card
from verify.card.verdict import FAIL, NO_GRADIENTS, NOTHING
from verify.html import legend, shade
from verify.html_style import CSS, JS

MOST = 6  # failures shown unfolded, so that the pictures stay on the first screens
_CSS = """
.badge { font-size: 15px; padding: 2px 12px; border-radius: 12px; vertical-align: middle; margin-left: 10px;
  background: var(--s4); color: var(--off); } .badge.fail { background: var(--bad); color: var(--badink); }
.badge.none { background: var(--none); color: var(--soft); }
ul { margin: 4px 0; padding-left: 20px; max-width: 90ch; } li { margin: 3px 0; }
.map .first td, .map .first th { border-top: 1px solid var(--line); }
.map .group { text-align: left; font-weight: 600; }
.map td { white-space: nowrap; } .map th.turn { font-size: 11px; max-width: 52px; }
.blocks { columns: 3 330px; column-gap: 28px; } .blocks table { break-inside: avoid; margin-bottom: 14px; }
.blocks .map td { min-width: 50px; } .blocks caption { text-align: left; font-size: 11px; color: var(--soft);
  text-transform: uppercase; letter-spacing: .06em; }
hr { border: 0; border-top: 2px solid var(--line); margin: 56px 0 32px; }
"""


def page(cards: list[Card]) -> str:
    """The whole page: one card below the other.

    Parameters
    ----------
    cards : list of Card

    Returns
    -------
    str
        HTML with style, script and data inside.
    """
    data, parts = [], []
    for card in cards:
        made = card.to_dict()
        parts.append(_card(card, made, len(data)))
        data += made["results"]
    title = ", ".join(card.name for card in cards)
    # "</" would end the script element wherever it stands.
    runs = json.dumps(data, allow_nan=False).replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} against fp64</title><style>{CSS}{_CSS}{card_draw.CSS}</style></head><body>
{"<hr>".join(parts)}
<div id="card" role="tooltip"></div>
<script type="application/json" id="runs">{runs}</script><script>{JS}</script>
</body></html>
"""


def _card(card, made, start):
    """One card; its runs begin at `start` among those of the page."""
    at = {
        (case.id, run.result.dtype): (start + k, run)
        for k, ((case, _), run) in enumerate(zip(card.plan.keys, card.runs, strict=True))
    }
    look = {FAIL: "fail", NOTHING: "none", NO_GRADIENTS: "none"}.get(card.verdict, "")
    n = card.counts
    tiles = "".join(
        f'<div class="tile{" alarm" if name in ("fail", "error") and n[name] else ""}"><b>{n[name]}</b>{word}</div>'
        for name, word in (("pass", "passed"), ("fail", "failed"), ("error", "raised or died"), ("skip", "skipped"))
    )
    origin = f"{made['device']}, {made['made']}" + (f", commit {made['commit'][:12]}" if made["commit"] else "")
    versions = ", ".join(f"{name} {v}" for name, v in made["packages"].items() if v)
    sections = [
        f"<h1>{escape(card.name)}<span class='badge {look}'>{escape(card.verdict)}</span></h1>",
        f'<p class="soft">{escape(origin)}</p>',
        f"<p>{escape(card_text.capital(card.headline()))}.</p>",
        f'<div class="tiles">{tiles}</div>',
        _list(card.call()),
    ]
    if not card.plan.facts.failure:
        sections += [
            _failures(card),
            _why(card),
            _matrix(card, at),
            _place(card),
            _growth(card),
            _cases(card, at),
            _skips(card),
        ]
    sections.append(f'<p class="soft">Python {escape(made["python"])}; {escape(versions)}</p>')
    return "\n".join(filter(None, sections))


def _failures(card):
    told = [
        f'<p class="why"><b>{escape(what)}</b> {escape(f"{verdict}: {why}")}</p>'
        for verdict, what, why in card_text.failures(card)
    ]
    if not told:
        return ""
    more = "".join(told[MOST:])
    folded = f"<details><summary>and {len(told) - MOST} more</summary>{more}</details>" if more else ""
    again = f"<p><code>{escape(card.again())}</code></p>" if card.again() else ""
    common = "".join(f"<p>{escape(sentence)}.</p>" for sentence in card_text.where(card)[:1])
    return f"<h2>What failed</h2>{common}{''.join(told[:MOST])}{folded}{again}"


def _why(card):
    if not card.why():
        return ""
    return (
        f"<h2>Why is it not equal?</h2>{_list(card.why())}"
        "<p>For each type and output, the run that comes nearest to its bound or goes furthest past it. The shaded "
        f'range is what is allowed.</p><div class="scroll">{card_draw.anchors(card.anchors())}</div>'
    )


def _matrix(card, at):
    """Masks and shapes down, types and input classes across."""
    cases = [case for case, _ in dict.fromkeys((case, None) for case, _ in card.of_kind(card_cases.MATRIX))]
    if not cases:
        return ""
    ids, dtypes, recipes = {case.id for case in cases}, card.plan.dtypes, card_cases.RECIPES
    gap = '<td class="gap"></td>'
    types = gap.join(f'<th class="type" colspan="{len(recipes)}">{dtype}</th>' for dtype in dtypes)
    names = gap.join("".join(f'<th class="turn">{escape(words)}</th>' for words in recipes.values()) for _ in dtypes)
    rows = []
    for mask in card_cases.MASKS:
        for k, shape in enumerate(card_cases.SHAPES):
            if not any(name.startswith(f"{shape}-{mask}-") for name in ids):
                continue
            size = next(c for c in cases if c.id.startswith(f"{shape}-{mask}-")).shape(card.plan.facts.small)
            groups = gap.join(
                "".join(_cell(at.get((card_cases.name(shape, mask, recipe), t))) for recipe in recipes) for t in dtypes
            )
            head = (
                f'<th class="group">{"" if k else mask.replace("_", " ")}</th>'
                f"<th>{shape.replace('_', ' ')}, {size.Nq} × {size.Nk}</th>"
            )
            rows.append(f"<tr{'' if k else ' class=first'}>{head}{groups}</tr>")
    table = (
        f'<table class="map"><thead><tr><th colspan="2"></th>{types}</tr><tr><th colspan="2"></th>{names}</tr></thead>'
    )
    return (
        "<h2>Error matrix</h2><p>A cell is the largest error of a run over its bound, of O or of lse, whichever is "
        "worse. Hover or tab to a cell for its numbers.</p>"
        f'{legend()}<div class="scroll">{table}<tbody>{"".join(rows)}</tbody></table></div>'
    )


def _place(card):
    worst = card.worst
    if worst is None or card.of_kind(None) == []:
        return ""
    said = worst.place.text or "Nothing is out of bound; this is the run that comes nearest to it"
    head = f"{worst.result.case}, {worst.result.dtype}, {worst.place.output}"
    return (
        f"<h2>Where the error sits</h2><p><b>{escape(head)}.</b> {escape(said)}.</p>"
        f'<div class="scroll">{card_draw.place(worst.place)}</div>'
    )


def _growth(card):
    found = card.growth()
    if not found:
        return ""
    return (
        "<h2>Growth with N</h2><p>N(0, 1) inputs, one head. Sums grow longer and weights smaller, for every kernel: "
        f'what counts is the distance from the plain formula.</p><div class="scroll">{card_draw.growth(found)}</div>'
    )


def _cases(card, at):
    """The default cases, a block a kind, a column a type."""
    kinds = {}
    for case, _ in card.of_kind(None):
        kinds.setdefault(case.kind, {})[case.id] = case
    blocks = []
    for kind, cases in kinds.items():
        head = "".join(f"<th>{dtype}</th>" for dtype in card.plan.dtypes)
        rows = "".join(
            f'<tr><th title="{escape(case.about, quote=True)}">{escape(name)}</th>'
            + "".join(_cell(at.get((name, dtype))) for dtype in card.plan.dtypes)
            + "</tr>"
            for name, case in cases.items()
        )
        blocks.append(f'<table class="map"><caption>{escape(kind)}</caption><tr><th></th>{head}</tr>{rows}</table>')
    return (
        "<h2>Default cases</h2><p>Each stands for a way in which kernels have been wrong; hover over its name.</p>"
        f'<div class="blocks">{"".join(blocks)}</div>'
    )


def _skips(card):
    told = card_text.skips(card)
    return f"<h2>Skipped, which is not a pass</h2>{_list(told)}" if told else ""


def _cell(found):
    """A cell of a matrix for (number of the run on the page, run); an empty one for None."""
    if found is None:
        return "<td></td>"
    k, run = found
    look, text = shade(run.result)
    ratio = run.result.ratio
    if look == "fail" and ratio is not None and math.isfinite(ratio) and ratio >= 10:
        text = f"✕ {ratio:.0f}" if ratio < 1e4 else f"✕ {ratio:.0e}".replace("e+0", "e").replace("e+", "e")
    label = escape(f"{run.result.case}, {run.result.dtype}: {run.result.verdict}", quote=True)
    return f'<td class="{look}" data-run="{k}" tabindex="0" aria-label="{label}">{text}</td>'


def _list(sentences):
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>" if sentences else ""
