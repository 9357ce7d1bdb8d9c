"""The README's table of others' kernels: what the bounds that ours are held to say of them, by their recorded cards."""

import json
from pathlib import Path

from verify import document, summary

DTYPES = ("fp32", "fp16", "bf16")
NONE = "0/0"  # what a summary says of a type in which nothing ran


def table(folder: Path = document.RECORDS) -> str:
    """Return the table as Markdown, with a line on where it is from; a line of excuse without a card.

    Parameters
    ----------
    folder : Path
        Of records.
    """
    cards = _cards(folder)
    if not cards:
        return "\nNo card of others' kernels has been recorded yet.\n"
    rows = ["| kernel | verdict | fp32 | fp16 | bf16 |", "| --- | --- | --- | --- | --- |"]
    for name, card in sorted(cards.items()):
        found = summary.recorded({**card, "fingerprints": {}})
        cells = ["not taken" if found.get((name, dtype), NONE) == NONE else found[name, dtype] for dtype in DTYPES]
        rows.append(f"| `{name}` | {card['verdict']} | {' | '.join(cells)} |")
    newest = max(cards.values(), key=lambda card: card["made"])
    where = f"{newest['device']}, {newest['made'][:10]}, torch {newest['packages'].get('torch', 'of no version told')}"
    legend = f"Runs passed of runs judged, forward and gradients, and the worst error over its bound: {where}."
    return "\n".join(["", *rows, "", legend, ""])


def _cards(folder) -> dict:
    """The newest card of each kernel that ran on a GPU."""
    found = {}
    for path in sorted(Path(folder).glob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("kind") == "card" and data["executor"] == "gpu":
            found[data["kernel"]] = max(data, found.get(data["kernel"], data), key=lambda card: card["made"])
    return found
