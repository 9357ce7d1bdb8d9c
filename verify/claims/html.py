"""The ledger as one HTML file that needs nothing else: searchable, the wrong entries first."""

import os
from html import escape
from pathlib import Path

from verify.claims import second_reading
from verify.claims.inventory import TITLES, coverage
from verify.claims.ledger import VERDICTS, Bound, Cases, disagreements, leaves, recomputed
from verify.claims.page_style import CSS, JS
from verify.claims.report import counts, excludes_nothing, number, ranked, shown

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
MEANING = {
    "wrong": "does not hold",
    "inconsistent": "contradicts another place of the same text",
    "units": "right number, wrong unit (mostly MiB called MB)",
    "depends": "true under one reading or assumption, false under another",
    "unverifiable": "possible, but not recomputable",
    "confirmed": "holds",
}
LEGEND = """<p class="note"><b>How to read an entry.</b> The line under the title is what the text says, in our words.
The table sets what it states, or what must hold if it is right, beside what a recomputation gives; shaded cells
disagree. "yes" beside an input of a listing means: right on that input. Then come why, what holds instead, and the
source. Severity 1 is harmless, 2 misleads, 3 leads to wrong results or decisions.</p>
<p class="note"><b>Symbols.</b> N or n: sequence length; d: head dimension; h or H: heads; Br x Bc: tile of query rows
by keys; M: fast memory; S, P: scores and their softmax; m, l: running maximum and sum; v1, v2, v3: FlashAttention 1,
2 and 3.</p>"""


def notebook(group) -> Path | None:
    """The notebook of a section, if this installation has notebooks."""
    pattern = "*verif*.ipynb" if group == "blog" else f"{int(group.split('.')[1]):02d}_*.ipynb"
    return next(iter(sorted(NOTEBOOKS.glob(pattern))), None)


def page(results, folder=None) -> str:
    """The whole page.

    Parameters
    ----------
    results : list of (Claim, Outcome)
    folder : path, optional
        Where the page will lie; links to notebooks are relative to it.

    Returns
    -------
    str
        HTML with style and script inside.
    """
    links = {}
    for group in TITLES:
        path = notebook(group)
        links[group] = os.path.relpath(path, folder or Path.cwd()) if path else None
    parts, last = [], None
    for claim, outcome in ranked(results):
        if outcome.verdict != last:
            last = outcome.verdict
            head = f'{last.capitalize()} <span class="soft">{MEANING[last]}</span>'
            parts.append(f'<h2 data-verdict="{last}">{head}</h2>')
        parts.append(_entry(claim, outcome, links[claim.group]))
    sections = "".join(f'<option value="{g}">{g} {escape(" ".join(TITLES[g]))}</option>' for g in counts(results))
    verdicts = "".join(f"<option>{v}</option>" for v in VERDICTS)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Claims ledger</title><style>{CSS}</style>
<h1>Claims ledger <span class="soft">数值核对</span></h1>
<p>{len(results)} statements of a chapter on FlashAttention and of a companion blog, each recomputed. Paraphrases are
ours; the texts' own terms stand beside the titles.</p>
{_counts(results)}
{LEGEND}
<p class="note soft">{second_reading.summary()}.</p>
<div class="bar"><input id="find" type="search" placeholder="search: id, words, 中文" aria-label="search">
<select id="section" aria-label="section"><option value="">all sections</option>{sections}</select>
<select id="verdict" aria-label="verdict"><option value="">all verdicts</option>{verdicts}</select>
<span id="shown" class="soft" aria-live="polite"></span></div>
{"".join(parts)}
{_coverage()}
<script>{JS}</script></html>
"""


def _counts(results) -> str:
    by_group = counts(results)

    def cell(n, group, verdict):
        return f'<td><button data-section="{group}" data-verdict="{verdict}">{n}</button></td>' if n else "<td></td>"

    head = "".join(f'<th class="{v}"><span class="verdict">{v}</span></th>' for v in VERDICTS)
    rows = "".join(
        f"<tr><td>{group} {escape(TITLES[group][0])} <span class='soft' lang='zh'>{TITLES[group][1]}</span></td>"
        + "".join(cell(row[v], group, v) for v in VERDICTS)
        + cell(sum(row.values()), group, "")
        + "</tr>"
        for group, row in by_group.items()
    )
    totals = {v: sum(row[v] for row in by_group.values()) for v in VERDICTS}
    total = "".join(cell(totals[v], "", v) for v in VERDICTS) + cell(sum(totals.values()), "", "")
    body = f"<tr><th></th>{head}<th>all</th></tr>{rows}<tr><td>all</td>{total}</tr>"
    return f'<div class="wide"><table class="counts">{body}</table></div>'


def _entry(claim, outcome, link) -> str:
    english, chinese = TITLES[claim.group]
    tags = [
        f'<span class="verdict">{outcome.verdict}</span>',
        f"<span>{claim.id}</span>",
        f"<span>{claim.section} {escape(claim.where)}</span>",
        f"<span>{english} <span lang='zh'>{chinese}</span></span>",
        f"<span>{claim.kind}</span>",
    ]
    if outcome.verdict != "confirmed":
        tags.append(f"<span>severity {claim.severity} of 3</span>")
    if claim.reading_is_guess:
        tags.append("<span>reading of the formula is a guess</span>")
    if link:
        tags.append(f'<a href="{escape(link)}">notebook {claim.group}</a>')
    notes = [("Why", escape(outcome.detail)), ("Right", escape(claim.right)), ("Source", escape(claim.source))]
    if claim.mended:
        notes.insert(2, ("Mended", "the repaired version passes every case above"))
    see = ", ".join(f'<a data-id href="#c{id}">{id}</a>' for id in claim.conflicts_with)
    notes += [("See", see), ("Second reading", escape(second_reading.told(claim.id)))]
    told = "".join(f'<p class="note"><b>{name}:</b> {text}</p>' for name, text in notes if text)
    return (
        f'<div class="entry {outcome.verdict}" id="c{claim.id}" data-section="{claim.group}" '
        f'data-verdict="{outcome.verdict}"><div class="head">{"".join(tags)}</div>'
        f'<h3>{escape(claim.title_en)} <span class="zh" lang="zh">{escape(claim.title_zh)}</span></h3>'
        f"<p>{escape(claim.paraphrase)}</p>{_values(claim, outcome)}{told}</div>"
    )


def _values(claim, outcome) -> str:
    """Stated and recomputed leaves side by side; those that disagree are marked."""
    stated = leaves(claim.stated)
    columns = _columns(claim, outcome)
    off = {name: _off(claim, outcome, name, values) for name, values in columns.items()}
    unit = f" ({escape(claim.unit)})" if claim.unit else ""
    head = f"<tr><th></th><th>stated{unit}</th>" + "".join(f"<th>{escape(name)}</th>" for name in columns) + "</tr>"
    rows = "".join(
        f"<tr><th>{escape(path)}</th><td>{escape(number(leaf))}</td>"
        + "".join(
            f"<td{' class=off' if path in off[name] else ''}>{escape(number(values[path]))}</td>"
            for name, values in columns.items()
        )
        + "</tr>"
        for path, leaf in stated.items()
    )
    return f'<table class="values">{head}{rows}</table>'


def _columns(claim, outcome) -> dict[str, dict]:
    """Recomputed values as columns of leaves: one for a value, one per case, or the two ends of a bound."""
    paths, truth = leaves(claim.stated), recomputed(claim)
    if isinstance(truth, Cases):
        return {name: leaves(value) for name, value in truth.values.items()}
    if isinstance(truth, Bound):
        if excludes_nothing(truth):
            return {"recomputed": dict.fromkeys(paths, shown(claim, outcome))}
        ends = {"at least": truth.lo, "at most": truth.hi}
        return {name: leaves(end) if isinstance(end, dict) else dict.fromkeys(paths, end) for name, end in ends.items()}
    return {"recomputed": leaves(outcome.value)}


def _off(claim, outcome, name, values) -> set[str]:
    """Which leaves of one column to mark: those that disagree, or lie beyond that end of a bound."""
    stated = leaves(claim.stated)
    if not isinstance(recomputed(claim), Bound):
        return set(disagreements(stated, values, claim.tol))
    side = "lo" if name == "at least" else "hi"
    ends = {path: getattr(stated[path], side, stated[path]) for path in outcome.off}
    return {path for path, end in ends.items() if (end < values[path] if side == "lo" else end > values[path])}


def _coverage() -> str:
    parts = []
    for group, rows in coverage().items():
        body = "".join(
            f"<tr><td>{escape(item)}</td><td>"
            + (escape(ids) if isinstance(ids, str) else ", ".join(f'<a data-id href="#c{id}">{id}</a>' for id in ids))
            + "</td></tr>"
            for item, ids in rows.items()
        )
        parts.append(f'<h3>{group} {escape(" ".join(TITLES[group]))}</h3><table class="list">{body}</table>')
    return f"<h2>Coverage</h2><details><summary>Every table, figure, listing and formula, and the entries that judge \
it</summary>{''.join(parts)}</details>"
