"""Style and behaviour of the ledger's page: a colour and a word for each verdict, search, light and dark."""

CSS = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --page: #ffffff; --panel: #f4f6f9; --line: #d5dbe3;
  --wrong: #b3261e; --inconsistent: #b4530a; --units: #8a6d00; --depends: #1f6fa8; --unverifiable: #6b7480;
  --confirmed: #2b7a3d; --off: #fbe3e1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa6b5; --page: #12161c; --panel: #1b212a;
  --line: #333d4a; --wrong: #ff8a80; --inconsistent: #ffb074; --units: #e6c84c; --depends: #86c5ec;
  --unverifiable: #a3adba; --confirmed: #7ed492; --off: #4a2320; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 24px 20px 80px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Noto Sans CJK SC", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
p { margin: 4px 0; max-width: 84ch; } .soft { color: var(--soft); } a { color: var(--depends); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
.counts td, .counts th { padding: 3px 12px; text-align: right; border-bottom: 1px solid var(--line); font-weight: 400; }
.counts td:first-child, .counts th:first-child { text-align: left; }
.counts button { all: unset; cursor: pointer; min-width: 2ch; text-align: right; }
.counts button:hover, .counts button:focus-visible { text-decoration: underline; outline: 1px solid var(--soft); }
.bar { position: sticky; top: 0; z-index: 1; background: var(--page); padding: 10px 0; margin-top: 20px; display: flex;
  flex-wrap: wrap; gap: 8px; align-items: center; border-bottom: 1px solid var(--line); }
.bar input, .bar select { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line);
  border-radius: 4px; padding: 5px 8px; } .bar input { flex: 1 1 260px; }
.entry { border: 1px solid var(--line); border-left: 5px solid var(--mark); border-radius: 4px; padding: 10px 16px 12px;
  margin: 12px 0; scroll-margin-top: 70px; } .entry[hidden], h2[hidden] { display: none; }
.entry h3 { font-size: 16px; margin: 0; } .entry h3 .zh { font-weight: 400; color: var(--soft); }
.head { display: flex; flex-wrap: wrap; gap: 4px 12px; font-size: 13px; color: var(--soft); align-items: baseline; }
.verdict { color: var(--mark); font-weight: 700; } .head a { margin-left: auto; }
.values { margin: 8px 0; font-size: 14px; max-width: 100%; display: block; overflow-x: auto; }
.values th { font-weight: 400; color: var(--soft); text-align: left; padding: 1px 20px 1px 0; }
.values td { padding: 1px 20px 1px 0; white-space: nowrap; }
.values td.off { background: var(--off); font-weight: 600; }
.note { font-size: 14px; overflow-wrap: anywhere; } .note b { font-weight: 600; }
.wrong { --mark: var(--wrong); } .inconsistent { --mark: var(--inconsistent); } .units { --mark: var(--units); }
.depends { --mark: var(--depends); } .unverifiable { --mark: var(--unverifiable); }
.confirmed { --mark: var(--confirmed); }
details { margin: 12px 0; } summary { cursor: pointer; } .list td { padding: 2px 16px 2px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); font-size: 14px; }
"""

JS = """
const box = document.getElementById('find'), section = document.getElementById('section'),
  verdict = document.getElementById('verdict'), shown = document.getElementById('shown');
const entries = [...document.querySelectorAll('.entry')], heads = [...document.querySelectorAll('h2[data-verdict]')];
for (const e of entries) e.words = e.textContent.toLowerCase();
function filter() {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let n = 0;
  for (const e of entries) {
    e.hidden = !(words.every(w => e.words.includes(w)) && (!section.value || e.dataset.section === section.value)
      && (!verdict.value || e.dataset.verdict === verdict.value));
    n += !e.hidden;
  }
  for (const h of heads) h.hidden = !entries.some(e => !e.hidden && e.dataset.verdict === h.dataset.verdict);
  shown.textContent = n + ' of ' + entries.length;
}
for (const control of [box, section, verdict]) control.addEventListener('input', filter);
for (const b of document.querySelectorAll('.counts button')) b.addEventListener('click', () => {
  section.value = b.dataset.section; verdict.value = b.dataset.verdict; filter();
  document.querySelector('.bar').scrollIntoView();
});
for (const a of document.querySelectorAll('a[data-id]')) a.addEventListener('click', () => {
  box.value = section.value = verdict.value = ''; filter();
});
filter();
"""
