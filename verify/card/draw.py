"""The pictures of a card as SVG: where the error sits, the anchors on one axis, growth with N."""

import math
from html import escape
from itertools import pairwise

from verify.html_style import STEPS

CSS = """
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } svg .quiet { fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .plain { stroke: var(--soft); fill: var(--page); stroke-width: 2; } svg .mine { fill: var(--s4); }
svg .mine.bad { fill: var(--bad); } svg .limit { stroke: var(--ink); stroke-width: 3; }
svg .room { fill: var(--panel); } svg .apriori { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 2 2; }
svg .fixed { stroke: #b8860b; stroke-width: 2; }
svg .line { fill: none; stroke-width: 2; } svg .line.mine { stroke: var(--s4); fill: none; }
svg .line.mine.bad { stroke: var(--bad); } svg .line.plain { stroke: var(--soft); fill: none; }
svg .line.limit { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 5 4; fill: none; }
svg .h0 { fill: var(--s0); } svg .h1 { fill: var(--s1); } svg .h2 { fill: var(--s2); } svg .h3 { fill: var(--s3); }
svg .h4 { fill: var(--s4); } svg .h5 { fill: var(--s5); } svg .x1 { fill: var(--bad); fill-opacity: .5; }
svg .x2 { fill: var(--bad); fill-opacity: .75; } svg .x3 { fill: var(--bad); }
"""
LETTER = 7.0  # at most, the mean width of a letter of the pictures' 12 px type
LOW = 1e-9  # where an axis starts for errors of exactly 0


def heat(ratio) -> str:
    """The class of an error over its bound: blues up to 1, reds beyond, three of them a factor of 10 and of 1000 on."""
    if ratio <= 1:
        return f"h{next(k for k, step in enumerate(STEPS) if ratio <= step)}"
    return "x1" if ratio <= 10 else "x2" if ratio <= 1000 else "x3"


def place(found) -> str:
    """Where the error of one output lies: a square for each head, rows by columns of the worst head, and all rows.

    Parameters
    ----------
    found : place.Place
    """
    B, H, N, d = found.shape
    tall, wide = len(found.map), len(found.map[0])
    dx, dy = max(6, min(28, 420 // wide)), max(4, min(16, 420 // tall))
    x0, y0, side = 40 + 30 * H + 70, 44, 26
    heading = f"{found.output} of (batch, head) {found.worst}: rows down, columns across"
    left = x0 + max(wide * dx, LETTER * len(heading)) + 40  # of the profile, clear of the heading
    out = [_text(40, 20, "heads"), _text(x0, 20, heading)]
    for b in range(B):
        out.append(_text(34, y0 + b * 30 + 17, f"b {b}", "quiet", "end"))
        out += [
            _cell(40 + h * 30, y0 + b * 30, side, side, r, f"(batch, head) ({b}, {h})")
            for h, r in enumerate(found.heads[b])
        ]
    out += [_text(40 + h * 30 + side / 2, y0 - 8, f"{h}", "quiet", "middle") for h in range(H)]
    for i, line in enumerate(found.map):
        row = _span(i, found.rows_each, N)
        for j, r in enumerate(line):
            column = _span(j, found.columns_each, d)
            out.append(_cell(x0 + j * dx, y0 + i * dy, dx - 1, dy - (dy > 5), r, f"row {row}, column {column}"))
    for k in _ticks(tall):
        out.append(_text(x0 - 6, y0 + k * dy + min(dy, 11), str(k * found.rows_each), "quiet", "end"))
    for k in _ticks(wide):
        out.append(_text(x0 + k * dx, y0 - 8, str(k * found.columns_each), "quiet"))
    out.append(_text(left, 20, "rows, all heads: error / bound (log)"))
    span = max(1.0, math.log10(max(10.0, max((r for r in found.rows if math.isfinite(r)), default=1))) + 3)
    one = left + 150 * 3 / span
    for i, r in enumerate(found.rows):
        size = 150 if not math.isfinite(r) else max(1.0, 150 * (math.log10(max(r, 1e-3)) + 3) / span)
        out.append(_cell(left, y0 + i * dy, size, dy - (dy > 5), r, f"row {_span(i, found.rows_each, N)}"))
    bottom = y0 + tall * dy
    out += [_line(one, y0 - 4, one, bottom + 4, "axis"), _text(one, bottom + 18, "bound", "quiet", "middle")]
    return _svg(left + 250, max(bottom, y0 + 30 * B) + 26, out, "Where the error lies")


def anchors(found) -> str:
    """Error, plain formula, bound and a-priori bound of each type and output, on one logarithmic axis.

    Parameters
    ----------
    found : list of dict
        As `Card.anchors` gives them.
    """
    finite = [a[k] for a in found for k in ("error", "plain", "bound") if 0 < a[k] < math.inf]
    low, high = math.floor(math.log10(min(finite, default=LOW))), math.ceil(math.log10(max(finite, default=1)) + 0.3)
    x0, x1, step, y0 = 92, 620, 30, 30
    scale = (x1 - x0) / max(1, high - low)

    def at(value):
        if not math.isfinite(value):
            return x1
        return min(x1, max(x0, x0 + (math.log10(max(value, 1e-300)) - low) * scale))

    bottom = y0 + step * len(found)
    each = max(1, -(-(high - low) // 12))
    out = []
    for power in range(low, high + 1, each):
        x = at(10.0**power)
        out += [_line(x, y0 - 6, x, bottom, "grid"), _text(x, bottom + 16, f"1e{power}", "quiet", "middle")]
    for k, a in enumerate(found):
        y = y0 + step * k + step / 2
        out.append(_text(x0 - 10, y + 4, f"{a['dtype']} {a['output']}", anchor="end"))
        out.append(f'<rect class="room" x="{x0}" y="{y - 9}" width="{at(a["bound"]) - x0:.1f}" height="18"/>')
        if a["apriori"] is not None and math.isfinite(a["apriori"]) and a["apriori"] < 10.0**high:
            out.append(_line(at(a["apriori"]), y - 9, at(a["apriori"]), y + 9, "apriori"))
        if a["fixed"]:
            out.append(_line(at(a["fixed"]), y - 9, at(a["fixed"]), y + 9, "fixed"))
        out.append(_line(at(a["bound"]), y - 10, at(a["bound"]), y + 10, "limit"))
        out.append(f'<circle class="plain" cx="{at(a["plain"]):.1f}" cy="{y}" r="5"/>')
        bad = "" if a["ok"] else " bad"
        out.append(f'<circle class="mine{bad}" cx="{at(a["error"]):.1f}" cy="{y}" r="5.5"/>')
        said = f"{_number(a['error'])}, plain {_number(a['plain'])}, bound {_number(a['bound'])}, in {a['case']}"
        out.append(_text(x1 + 12, y + 4, said, "quiet"))
    x = x0
    legend = [
        ("mine", "yours"),
        ("plain", "plain formula, same precision"),
        ("limit", "bound"),
        ("apriori", "a-priori bound"),
    ]
    legend += [("fixed", "fixed limit (blog)")] if any(a["fixed"] for a in found) else []
    for name, words in legend:
        dot = name in ("mine", "plain")
        out.append(f'<circle class="{name}" cx="{x + 5}" cy="12" r="5"/>' if dot else _line(x + 5, 4, x + 5, 20, name))
        out.append(_text(x + 16, 16, words, "quiet"))
        x += 32 + 6.4 * len(words)
    return _svg(x1 + 560, bottom + 26, out, "The anchors")


def growth(found) -> str:
    """Error of O against N, a panel a storage type: this kernel's, the plain formula's, the bound.

    Parameters
    ----------
    found : list of dict
        As `Card.growth` gives them.
    """
    types = list(dict.fromkeys(g["dtype"] for g in found))
    out, wide, tall = [], 250, 170
    for k, dtype in enumerate(types):
        points = [g for g in found if g["dtype"] == dtype]
        values = [g[n] for g in points for n in ("error", "plain", "bound") if 0 < g[n] < math.inf]
        low, high = math.floor(math.log10(min(values, default=LOW))), math.ceil(math.log10(max(values, default=1)))
        x0, y0 = 52 + k * (wide + 134), 34
        first, last = (math.log2(points[m]["N"]) for m in (0, -1))

        def x(N, x0=x0, first=first, last=last):
            return x0 + (math.log2(N) - first) / max(1, last - first) * wide

        def y(value, y0=y0, low=low, high=high):
            value = min(max(value, 10.0**low), 10.0**high)
            return y0 + (high - math.log10(value)) / max(1, high - low) * tall

        out.append(_text(x0, 16, f"{dtype}: largest error of O"))
        for power in range(low, high + 1):
            at = y(10.0**power)
            out += [_line(x0, at, x0 + wide, at, "grid"), _text(x0 - 6, at + 4, f"1e{power}", "quiet", "end")]
        for g in points:
            out.append(_text(x(g["N"]), y0 + tall + 18, str(g["N"]), "quiet", "middle"))
        out.append(_text(x0 + wide / 2, y0 + tall + 36, "N", "quiet", "middle"))
        bad = "" if all(g["ok"] for g in points) else " bad"
        ends = []
        for name, look, words in (
            ("bound", "limit", "bound"),
            ("plain", "plain", "plain formula"),
            ("error", "mine", "yours"),
        ):
            path = " ".join(f"{x(g['N']):.1f},{y(g[name]):.1f}" for g in points)
            out.append(f'<polyline class="line {look}{bad if look == "mine" else ""}" points="{path}"/>')
            ends.append([y(points[-1][name]), words])
        for at, words in _apart(ends):
            out.append(_text(x0 + wide + 6, at + 4, words))
    return _svg(52 + len(types) * (wide + 134), 34 + tall + 44, out, "Growth with N")


def _apart(ends, least=14):
    """Labels moved down until none covers another."""
    ends = sorted(ends)
    for before, after in pairwise(ends):
        after[0] = max(after[0], before[0] + least)
    return ends


def _ticks(n):
    """Every 16th of few, so that tile edges are named; fewer of many."""
    step = 8 if n <= 48 else 16
    return range(0, n, step)


def _span(k, each, n):
    """Which rows a group holds."""
    last = min((k + 1) * each, n) - 1
    return f"{k * each}" if each == 1 else f"{k * each}-{last}"


def _cell(x, y, width, height, ratio, words):
    shown = f"{ratio:.3g}" if math.isfinite(ratio) else "not finite"
    return (
        f'<rect class="{heat(ratio)}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}">'
        f"<title>{escape(words)}: {shown}</title></rect>"
    )


def _line(x1, y1, x2, y2, look):
    return f'<line class="{look}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x, y, words, look="", anchor="start"):
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(str(words))}</text>'


def _number(value):
    return f"{value:.2g}" if math.isfinite(value) else "not finite"


def _svg(width, height, parts, title):
    head = f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img">'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"
