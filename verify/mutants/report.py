"""A campaign as a table, in sentences, and as one JSON document."""

from collections import Counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verify import document
from verify.mutants.campaign import ENOUGH
from verify.mutants.catalogue import MUTANTS
from verify.mutants.trial import KILLS

_STYLE = {"killed": "green", "weak": "bold yellow"} | dict.fromkeys(
    ("lives", "equivalent", "error", "unfair"), "bold red"
)


def cell(row) -> str:
    """What a row says in a few characters: 2/2, lives 0/40, equivalent 0/40."""
    if row.verdict == "error":
        return "error"
    count = f"{len(row.kills)}/{len(row.trials)}"
    return count if row.verdict == "killed" else f"{row.verdict} {count}"


def where(mutant) -> str:
    """File and function of the edit: tile_ops.rescale, with the folder where it is refimpl's."""
    edit = mutant.edits[-1] if mutant.edits[0].function == "" else mutant.edits[0]
    return f"{edit.path.removeprefix('numba_cuda/').removesuffix('.py')}: {edit.function or 'module'}"


def first(rows) -> str:
    """The case that killed it first and how, in the first type; other ways of other types after it."""
    found = [row.kills[0] for row in rows if row.kills]
    if not found:
        return next((row.failure for row in rows if row.failure), "")
    ways = dict.fromkeys(t.kill for t in found)
    alone = "" if all(row.by_numbers for row in rows) else ", numbers alone do not"
    return f"{found[0].case} ({', '.join(ways)}{alone})"


def grouped(campaign) -> dict:
    """Mutant name -> its rows, in the order of the catalogue."""
    found = {}
    for row in campaign.rows:
        found.setdefault(row.mutant, []).append(row)
    return found


def terminal(campaign, console=None):
    """Print the kill matrix, a line a mutant, then what lives, what was unfair, and what ran."""
    console = console or Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    dtypes = list(dict.fromkeys(row.dtype for row in campaign.rows))
    table = Table(
        title="Mutants: cases that killed / cases that were run", title_justify="left", header_style="bold",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    for name in ("mutant", "changed", "seen through", *dtypes, "first killed by"):
        table.add_column(name, justify="right" if name in dtypes else "left", no_wrap=True)
    last = None
    for name, rows in grouped(campaign).items():
        mutant, by_dtype = MUTANTS[name], {row.dtype: row for row in rows}
        if last not in (None, mutant.area):
            table.add_section()
        last = mutant.area
        cells = [
            Text(cell(by_dtype[d]), style=_STYLE[by_dtype[d].verdict]) if d in by_dtype else Text("-") for d in dtypes
        ]
        table.add_row(name, where(mutant), mutant.through, *cells, first(rows))
    console.print(table)
    for row in campaign.bad:
        said = row.failure or f"{MUTANTS[row.mutant].about}: {row.verdict} ({cell(row)})"
        _say(console, row.verdict, f"{row.mutant} {row.dtype}: {said}")
    for name, t in campaign.unfair:
        _say(console, "unfair", f"{name} {t.case} {t.dtype} seed {t.seed}: {t.detail}")
        console.print(Text(replay(name, t), style="dim"))
    for failure in campaign.failures:
        _say(console, "error", failure)
    for sentence in sentences(campaign):
        console.print(Text(sentence))


def _say(console, word, text):
    """One line of what is wrong."""
    console.print(Text(f"{word.upper():10} ", style=_STYLE[word]), Text(text), sep="")


def replay(name, t) -> str:
    """The command that runs a correct kernel that was failed again."""
    return f"again: python -m verify run --kernels {name} --cases {t.case} --dtype {t.dtype} --seed {t.seed}"


def sentences(campaign) -> list[str]:
    """What was killed, by what, how much of the matrix was run, and how correct kernels fared."""
    rows, names = campaign.rows, grouped(campaign)
    said = []
    if rows:
        numba = sum(MUTANTS[name].in_numba for name in names)
        tally = Counter(row.verdict for row in rows)
        count = ", ".join(f"{n} {verdict}" for verdict, n in tally.items())
        said.append(f"{len(names)} mutants, {numba} of them in the kernels' bodies; by storage type: {count}.")
        least = min(len(row.kills) for row in rows)
        said.append(
            f"Each was killed by at least {least} case{'s' * (least != 1)} in each of its types ({ENOUGH} are asked)."
        )
        ways = Counter(t.kill for row in rows for t in row.kills)
        said.append(f"Kills: {', '.join(f'{n} {kill} ({KILLS[kill]})' for kill, n in ways.most_common())}.")
        blind = [name for name, group in names.items() if not all(row.by_numbers for row in group)]
        said.append(
            f"By numbers alone, races let run in one order of threads: {len(names) - len(blind)} of {len(names)}"
            + (f"; not {', '.join(blind)}." if blind else ".")
        )
        ran, of = sum(len(row.trials) for row in rows), sum(row.of for row in rows)
        said.append(
            f"All {ran} runs of the matrix were made." if ran == of else
            f"{ran} of the matrix's {of} runs were made: a mutant's cases end when {ENOUGH} have killed it, one of "
            "them by numbers where numbers can; --full runs all."
        )  # fmt: skip
    if campaign.controls:
        ran = Counter("NumPy" if name.startswith("refimpl") else "emulated" for name, _ in campaign.controls)
        said.append(
            f"Correct kernels on {len(campaign.seeds)} fresh seeds, {campaign.seeds[0]} ... {campaign.seeds[-1]}: "
            f"{', '.join(f'{n} runs {how}' for how, n in ran.items())}; {len(campaign.unfair)} failed."
        )
    return said


def build(campaign) -> dict:
    """Everything a reader or a figure needs, as plain data.

    Returns
    -------
    dict
        head as `document.head` ("mutants"); cases: names of the matrix's columns; mutants: for each its entry, and
        `rows` by dtype with verdict, kills, by_numbers, run, of and trials; controls; passed.
    """
    from verify.cases import DEFAULT

    mutants = []
    for name, rows in grouped(campaign).items():
        mutant = MUTANTS[name]
        mutants.append({
            **{key: getattr(mutant, key) for key in ("name", "about", "bug", "section", "area", "through", "in_numba")},
            "edits": [edit._asdict() for edit in mutant.edits],
            "rows": {
                row.dtype: {
                    "verdict": row.verdict, "kills": len(row.kills), "by_numbers": row.by_numbers,
                    "run": len(row.trials), "of": row.of, "failure": row.failure,
                    "trials": [t.to_dict() for t in row.trials],
                }
                for row in rows
            },
        })  # fmt: skip
    return {
        **document.head("mutants", "emulated"),
        "passed": campaign.passed,
        "full": campaign.full,
        "enough": ENOUGH,
        "cases": {name: {"kind": case.kind, "about": case.about} for name, case in DEFAULT.items()},
        "mutants": mutants,
        "controls": {
            "seeds": list(campaign.seeds),
            "runs": len(campaign.controls),
            "failed": [{"kernel": name, **t.to_dict()} for name, t in campaign.unfair],
            "errors": list(campaign.failures),
        },
    }
