"""The report as one HTML file that needs nothing else: an error matrix of kernels and cases, every cell explained."""

import json
from html import escape

from verify import report, summary
from verify.cases import DEFAULT
from verify.html_style import CSS, JS, STEPS

MOST = 6  # failures shown unfolded, so that the matrix stays on the first screens


def page(document, results, record=None) -> str:
    """The whole page.

    Parameters
    ----------
    document : dict
        As `document.build` makes it.
    results : list of Result
        The ones in the document.
    record : dict, optional
        The newest document of a GPU run, shown beside.

    Returns
    -------
    str
        HTML with style, script and data inside.
    """
    n = document["counts"]
    tiles = "".join(
        f'<div class="tile{" alarm" if name in ("fail", "error") and n[name] else ""}"><b>{n[name]}</b>{word}</div>'
        for name, word in (("pass", "passed"), ("fail", "failed"), ("error", "errors"), ("skip", "skipped"))
    )
    failed = summary.failures(results)
    reasons = [
        f'<p class="why"><b>{escape(r.kernel)}</b> {escape(f"{r.case} {r.dtype}, {r.verdict}: {r.reason}")}</p>'
        for r in failed
    ]
    reasons, more = "".join(reasons[:MOST]), "".join(reasons[MOST:])
    if more:
        reasons += f"<details><summary>and {len(failed) - MOST} more</summary>{more}</details>"
    again = f"<p><code>{escape(report.replay(failed[0]))}</code></p>" if failed else ""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in report.sentences(results, record))
    versions = ", ".join(f"{name} {v}" for name, v in document["packages"].items() if v)
    # "</" would end the script element wherever it stands.
    data = json.dumps(document["results"], allow_nan=False).replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Attention kernels against fp64</title><style>{CSS}</style></head><body>
<h1>Attention kernels against fp64</h1>
<p class="soft">{escape(_origin(document))}</p>
<div class="tiles">{tiles}</div>
{said}
{f"<h2>What failed</h2>{reasons}{again}" if failed else ""}
<h2>Error matrix</h2>
<p>A cell is the largest error of a run over its bound, of the output that is worst. The bound is
{document["factor"]:g} times the error of the plain formula at the same precision, plus a floor. Hover or tab to a
cell for its numbers.</p>
{legend()}
<div class="scroll">{_matrix(results)}</div>
<h2>Kernels</h2>
<div class="scroll">{_lines(results, record)}</div>
<p class="soft">Python {escape(document["python"])}; {escape(versions)}</p>
<div id="card" role="tooltip"></div>
<script type="application/json" id="runs">{data}</script><script>{JS}</script>
</body></html>
"""


def shade(result) -> tuple[str, str]:
    """Class and text of a cell."""
    if result.verdict == "skip":
        return "skip", "–"
    if result.verdict == "error" or not result.outputs:
        return "error", "!"
    ratio = summary.shown(result.ratio)
    if result.verdict == "fail":
        return "fail", f"✕ {ratio}"
    return f"s{next(k for k, step in enumerate(STEPS) if result.ratio <= step)}", ratio


def _origin(document):
    """Where and when, and of which commit if there is one."""
    commit = document["commit"]
    return f"{document['device']}, {document['made']}" + (f", commit {commit[:12]}" if commit else "")


def legend():
    """What the colours of the matrix mean."""
    low = ["0", *(f"to {step:g}" for step in STEPS[1:])]
    steps = "".join(f'<span class="s{k}">{word}</span>' for k, word in enumerate(low))
    return (
        f'<div class="legend">{steps}<span class="fail">✕ failed</span><span class="error">! did not finish</span>'
        '<span class="skip">– skipped</span><span class="words">error / bound</span></div>'
    )


def _matrix(results):
    """One row a case, one column a kernel, one group of columns a storage type."""
    kernels = list(dict.fromkeys(r.kernel for r in results))
    dtypes = list(dict.fromkeys(r.dtype for r in results))
    cases = list(dict.fromkeys(r.case for r in results))
    at = {(r.kernel, r.case, r.dtype): k for k, r in enumerate(results)}
    gap = '<td class="gap"></td>'
    types = gap.join(f'<th class="type" colspan="{len(kernels)}">{dtype}</th>' for dtype in dtypes)
    names = gap.join("".join(f"<th>{escape(_short(k))}</th>" for k in kernels) for _ in dtypes)
    rows, kind = [], None
    for case in cases:
        known = DEFAULT.get(case)
        if known and known.kind != kind:
            kind = known.kind
            width = len(dtypes) * (len(kernels) + 1)
            rows.append(f'<tr class="kind"><th></th><td colspan="{width}">{escape(kind)}</td></tr>')
        groups = []
        for dtype in dtypes:
            cells = []
            for kernel in kernels:
                k = at.get((kernel, case, dtype))
                if k is None:
                    cells.append("<td></td>")
                    continue
                look, text = shade(results[k])
                label = escape(f"{kernel}, {case}, {dtype}: {results[k].verdict}", quote=True)
                cells.append(f'<td class="{look}" data-run="{k}" tabindex="0" aria-label="{label}">{text}</td>')
            groups.append("".join(cells))
        about = escape(known.about, quote=True) if known else ""
        rows.append(f'<tr><th title="{about}">{escape(case)}</th>{gap.join(groups)}</tr>')
    head = f"<thead><tr><th></th>{types}</tr><tr><th></th>{names}</tr></thead>"
    return f'<table class="map">{head}<tbody>{"".join(rows)}</tbody></table>'


def _short(kernel):
    """A column head of two short lines at most: step3 flash_v2."""
    return kernel.removeprefix("refimpl.").replace("_", " ", 1)


def _lines(results, record):
    before = summary.recorded(record)
    head = [*report.HEAD, *([report.record_head(record)] if record else [])]
    out = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for line in summary.lines(results):
        cells = [f"<td>{escape(cell)}</td>" for cell in report.cells(line)]
        cells[-1] = cells[-1].replace("<td>", '<td class="at">')
        if record:
            cells.append("<td>" + escape(before.get((line.kernel, line.dtype), "-")) + "</td>")
        out.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="lines">{"".join(out)}</table>'
