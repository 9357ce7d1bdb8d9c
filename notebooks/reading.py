"""What the notebooks print of this repository: claims of the chapter as recomputed, and lines of a source."""

from verify.claims.ledger import load

LEDGER = load()


def judged(*ids):
    """Recompute claims of the chapter and print what came of them."""
    for id in ids:
        claim = LEDGER[id]
        assert claim.recompute().verdict == claim.verdict, id
        print(f"{id} {claim.verdict:12} says: {claim.paraphrase}")
        if claim.right:
            print(f"{'':21} right: {claim.right}")


def excerpt(text, first, last):
    """Print the lines of a source from one that holds ``first`` to the next that holds ``last``."""
    lines = text.splitlines()
    start = next(k for k, line in enumerate(lines) if first in line)
    stop = next(k for k in range(start, len(lines)) if last in lines[k])
    print("\n".join(lines[start : stop + 1]))
