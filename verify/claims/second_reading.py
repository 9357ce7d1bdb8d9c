"""Entries recomputed a second time from the texts alone, before the ledger's recomputation was read.

`second_reading.md` tells how; this is the same outcome as data, for the reports.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """The second reader's verdict where it was not the ledger's, and what was run to settle it."""

    second: str
    settled: str


# The draw: random.Random(SEED).sample over the sorted ids of each section in turn, PER_SECTION of 18.1 to 18.8 each,
# then PER_BLOG of the blog.
SEED, PER_SECTION, PER_BLOG = 18, 4, 2

AGREED = (
    "18.1-012", "18.1-051",
    "18.2-013", "18.2-016", "18.2-023", "18.2-033",
    "18.3-012", "18.3-031", "18.3-032", "18.3-041",
    "18.4-019", "18.4-028", "18.4-040", "18.4-077",
    "18.5-008", "18.5-031",
    "18.6-027", "18.6-070",
    "18.7-031", "18.7-032", "18.7-035", "18.7-040",
    "18.8-047", "18.8-051", "18.8-065",
    "blog-007", "blog-044",
)  # fmt: skip

DIFFERED = {
    "18.1-008": Difference(
        "depends",
        "The ratios 19 and 37 follow from 8 FLOP/byte, but no traffic of the listed operations gives 8: three kernels "
        "give 31.0, six kernels 12.6 (FP16, N = 2048, d = 64). Wrong stays.",
    ),
    "18.1-033": Difference(
        "wrong",
        "The announcement found names other people and the author's own list of honours does not name the award, but "
        "the complete list of mentions was not at hand. Unverifiable stays; what was found is now in the entry.",
    ),
    "18.5-035": Difference(
        "wrong",
        "A trace of the tile visits has Q tiles outside, K and V inside: both readings say so. 18.5.1 of the same text "
        "says it as well, so that inconsistent is the sharper word and stays.",
    ),
    "18.5-077": Difference(
        "confirmed",
        "1.4 x 1.3 x 1.7 = 3.09 does confirm the running product, which is entry 18.5-076. This entry compares with "
        "Table 18-17 at the same sizes: 1.15 / 0.48 = 2.40. Inconsistent stays.",
    ),
    "18.6-045": Difference(
        "depends",
        "The sources of November 2024 and of v2.8.3 have two stages in FP16; only the FP8 kernel for d = 64 had four, "
        "until the end of 2024. Confirmed stays; the exception is now in the entry.",
    ),
    "18.6-065": Difference(
        "wrong",
        "Of the three pairs with equal N and d the last has 1.80 backward against 1.90 forward: both readings say so. "
        "The numbers are the text's own table, so that inconsistent stays.",
    ),
    "18.8-033": Difference(
        "wrong",
        "64 x 64 (batch, head) pairs fill 108 SMs at any length: both readings say so. The text gives the right "
        "condition for vLLM, so that inconsistent stays.",
    ),
}


IDS = {*AGREED, *DIFFERED}


def told(id) -> str:
    """One sentence about the second reading of an entry; "" if it had none."""
    if id in AGREED:
        return "recomputed from the text alone, with the same verdict and numbers"
    if id in DIFFERED:
        return f"judged {DIFFERED[id].second} at first. {DIFFERED[id].settled}"
    return ""


def summary() -> str:
    """The outcome in one line."""
    return (
        f"{len(IDS)} entries, drawn at random, were recomputed a second time from the texts alone: {len(AGREED)} "
        f"agreed, {len(DIFFERED)} differed and were settled"
    )
