"""Style and behaviour of the HTML report: one hue for size, another colour and a sign for failure, light and dark."""

# Steps of error / bound that share a colour. Above the last, the run has failed.
STEPS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)

CSS = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --page: #ffffff; --panel: #f4f6f9; --line: #d5dbe3;
  --s0: #eaf2f8; --s1: #cde1ef; --s2: #9fc7e0; --s3: #66a5cc; --s4: #2f7fb3; --s5: #0f5a8c;
  --on: #10202c; --off: #ffffff; --bad: #b3261e; --badink: #ffffff; --none: #eceff3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa6b5; --page: #12161c; --panel: #1b212a;
  --line: #333d4a; --s0: #17242f; --s1: #1b3547; --s2: #204b68; --s3: #27678f; --s4: #3d8fc0; --s5: #86c5ec;
  --on: #dfeaf3; --off: #06121b; --bad: #ff8a80; --badink: #2b0503; --none: #232a34; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px 20px 80px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
p { margin: 4px 0; max-width: 80ch; } .soft { color: var(--soft); }
.tiles { display: flex; gap: 12px; flex-wrap: wrap; margin: 16px 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 8px 16px;
  min-width: 96px; }
.tile b { display: block; font-size: 24px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile.alarm b { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 2px; font-variant-numeric: tabular-nums; }
table.lines { border-collapse: collapse; } table.lines td, table.lines th { padding: 3px 12px; text-align: right;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
table.lines td:nth-child(-n+2), table.lines th:nth-child(-n+2), table.lines td.at { text-align: left; }
.map th { font-weight: 500; font-size: 12px; color: var(--soft); }
.map thead th { padding: 2px 4px; vertical-align: bottom; }
.map .type { color: var(--ink); font-size: 14px; font-weight: 600; }
.map tbody th { text-align: right; padding-right: 8px; color: var(--ink); white-space: nowrap;
  position: sticky; left: 0; background: var(--page); }
.map td { min-width: 44px; height: 24px; text-align: center; font-size: 12px; border-radius: 3px; cursor: default; }
.map td:focus, .map td:hover { outline: 2px solid var(--ink); outline-offset: -1px; }
.map .gap { min-width: 12px; width: 12px; background: none; }
.map .kind td { height: 22px; text-align: left; font-size: 11px; color: var(--soft); text-transform: uppercase;
  letter-spacing: .06em; vertical-align: bottom; }
.map .kind td:hover { outline: none; }
.s0, .s1, .s2 { color: var(--on); } .s3 { color: var(--on); } .s4, .s5 { color: var(--off); }
.s0 { background: var(--s0); } .s1 { background: var(--s1); } .s2 { background: var(--s2); }
.s3 { background: var(--s3); }
.s4 { background: var(--s4); } .s5 { background: var(--s5); }
.fail, .error { background: var(--bad); color: var(--badink); font-weight: 700; }
.skip { background: var(--none); color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 4px; align-items: center; margin: 8px 0; font-size: 12px; }
.legend span { padding: 2px 8px; border-radius: 3px; } .legend .words { padding-left: 12px; color: var(--soft); }
.why { border-left: 4px solid var(--bad); background: var(--panel); padding: 6px 12px; margin: 6px 0; font-size: 14px;
  overflow-wrap: anywhere; }
#card { position: fixed; z-index: 2; display: none; max-width: 520px; background: var(--panel); color: var(--ink);
  border: 1px solid var(--line); border-radius: 6px; padding: 10px 14px; font-size: 13px; box-shadow: 0 4px 16px #0004;
  pointer-events: none; }
#card b { font-size: 14px; } #card table { border-spacing: 0; margin-top: 6px; }
#card td, #card th { padding: 1px 8px 1px 0; text-align: left; font-weight: 400; vertical-align: top; }
#card th { color: var(--soft); }
code { font: 13px ui-monospace, monospace; }
"""

JS = """
const runs = JSON.parse(document.getElementById('runs').textContent);
const card = document.getElementById('card');
const text = (tag, content) => { const e = document.createElement(tag); e.textContent = content; return e; };
const short = x => x === 0 ? '0' : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(2)
  : String(Number(x.toPrecision(4)));
const show = x => typeof x === 'number' ? short(x) : x === null ? '-' : String(x);
const whole = x => typeof x === 'number' ? String(Number(x.toPrecision(9))) : String(x);
const ROWS = [['largest error', 'max_abs'], ['bound', 'bound'], ['plain formula', 'plain'],
  ['a-priori bound', 'apriori'], ['fixed limit (blog)', 'fixed'], ['largest relative', 'max_rel'],
  ['RMSE / plain', 'rmse_ratio'], ['cosine', m => whole(m.cosine)], ['NaN, inf', m => m.nan + ', ' + m.inf],
  ['out of bound', m => (100 * m.share_out).toFixed(1) + ' %'],
  ['worst at', m => '[' + m.worst_index.join(', ') + ']'], ['got', m => whole(m.got)],
  ['wanted', m => whole(m.wanted)]];
function open(cell) {
  const r = runs[cell.dataset.run], names = Object.keys(r.outputs), s = r.size;
  card.replaceChildren(text('b', `${r.kernel}, ${r.case}, ${r.dtype}: ${r.verdict}`));
  card.append(text('div', `${r.executor} at B ${s.B}, heads ${s.Hq}/${s.Hk}, N ${s.Nq} x ${s.Nk}, d ${s.d}/${s.dv}`
    + (r.tile ? `, tile ${r.tile.join(' x ')}` : '') + `, ${r.seconds.toFixed(2)} s`));
  if (r.reason) card.append(text('div', r.reason));
  if (names.length) {
    const t = document.createElement('table'), head = t.insertRow();
    head.append(text('th', ''), ...names.map(n => text('td', n)));
    for (const [label, key] of ROWS) {
      const row = t.insertRow();
      row.append(text('th', label), ...names.map(n => text('td',
        typeof key === 'string' ? show(r.outputs[n][key]) : key(r.outputs[n]))));
    }
    card.append(t);
  }
  card.style.display = 'block';
  const at = cell.getBoundingClientRect(), w = card.offsetWidth, h = card.offsetHeight;
  card.style.left = Math.max(8, Math.min(at.right + 8, innerWidth - w - 8)) + 'px';
  card.style.top = Math.max(8, Math.min(at.bottom + 4, innerHeight - h - 8)) + 'px';
}
const close = () => { card.style.display = 'none'; };
for (const cell of document.querySelectorAll('[data-run]')) {
  cell.onmouseenter = cell.onfocus = () => open(cell);
  cell.onmouseleave = cell.onblur = close;
}
addEventListener('keydown', e => { if (e.key === 'Escape') close(); });
"""
