"""The kill matrix as one HTML file that needs nothing else: a row a mutant, a column a case."""

from html import escape

from verify.html_style import CSS

LETTERS = {"number": "n", "nan": "N", "modified": "m", "race": "r", "uninitialised": "u", "bounds": "b", "barrier": "d",
           "deadlock": "l", "fault": "f", "error": "e"}  # fmt: skip
MORE = """
body { max-width: none; }
.kill { border-spacing: 1px; font-size: 11px; }
.kill th { font-weight: 500; } .kill tbody th { text-align: right; padding-right: 6px; white-space: nowrap;
  position: sticky; left: 0; background: var(--page); }
.kill thead th { height: 132px; vertical-align: bottom; padding: 0; width: 17px; }
.kill thead th span { writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap; color: var(--soft); }
.kill td { width: 17px; height: 17px; text-align: center; border-radius: 2px; }
.kill td.area { text-align: left; color: var(--soft); text-transform: uppercase; letter-spacing: .06em; }
.k3 { background: var(--s5); color: var(--off); } .k2 { background: var(--s4); color: var(--off); }
.k1 { background: var(--s3); color: var(--on); } .k0 { background: var(--none); color: var(--soft); }
.alarm th { color: var(--bad) !important; font-weight: 700 !important; }
"""


def page(document, sentences) -> str:
    """The whole page.

    Parameters
    ----------
    document : dict
        As `report.build` makes it.
    sentences : list of str
        As `report.sentences` makes them.

    Returns
    -------
    str
        HTML with its style inside.
    """
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    verdict = "Every mutant is killed" if document["passed"] else "Not every mutant is killed as it should be"
    legend = "".join(
        f'<span class="{look}">{text}</span>'
        for look, text in (
            ("k3", "killed in all types"), ("k1", "in some of them"), ("k0", "· lived"), ("words", "blank: not run"),
        )
    )  # fmt: skip
    letters = ", ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())
    packages = ", ".join(f"{name} {v}" for name, v in document["packages"].items() if v)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Kill matrix of the mutants</title><style>{CSS}{MORE}</style></head><body>
<h1>{verdict}</h1>
<p class="soft">{escape(document["device"])}, {document["made"]}</p>
{said}
<h2>Kill matrix</h2>
<p>A row is a bug planted in the shipped source, a column a default case. The letter says how the case killed it:
{letters}. Hover for the types, and for where and what the bug is.</p>
<div class="legend">{legend}</div>
<div class="scroll">{_matrix(document)}</div>
<p class="soft">Python {escape(document["python"])}; {escape(packages)}</p>
</body></html>
"""


def _matrix(document):
    cases = document["cases"]
    head = "".join(
        f'<th title="{escape(case["about"], quote=True)}"><span>{escape(name)}</span></th>'
        for name, case in cases.items()
    )
    rows, area = [], None
    for mutant in document["mutants"]:
        if mutant["area"] != area:
            area = mutant["area"]
            rows.append(f'<tr><th></th><td class="area" colspan="{len(cases)}">{escape(area)}</td></tr>')
        edits = "; ".join(f"{e['path']}, {e['function'] or 'module'}" for e in mutant["edits"])
        about = f"{mutant['about']} ({edits}; through {mutant['through']}; chapter {mutant['section']})"
        about = escape(about, quote=True)
        killed = all(row["verdict"] == "killed" for row in mutant["rows"].values())
        alarm = "" if killed else ' class="alarm"'
        cells = "".join(_cell(mutant, name) for name in cases)
        rows.append(f'<tr{alarm}><th title="{about}">{escape(mutant["name"])}</th>{cells}</tr>')
    return f'<table class="kill"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _cell(mutant, case):
    """A case's runs of a mutant, of all types together."""
    found = {d: t for d, row in mutant["rows"].items() for t in row["trials"] if t["case"] == case}
    if not found:
        return "<td></td>"
    kills = [t["kill"] for t in found.values() if t["kill"]]
    look = "k0" if not kills else "k3" if len(kills) == len(found) else "k1"
    told = escape(f"{case}: " + ", ".join(f"{d} {t['kill'] or 'lived'}" for d, t in found.items()), quote=True)
    return f'<td class="{look}" title="{told}">{LETTERS[kills[0]] if kills else "·"}</td>'
