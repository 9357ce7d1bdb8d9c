"""What failing probes show by themselves: what they share, and outputs that are 0 or lost all over."""

import numpy as np

from verify.diagnose.subject import blank

# What a probe needs -> what it is about, and what to look at.
TRAITS = {
    "gqa": ("fewer key heads than query heads", "which key head a query head reads: h // (Hq / Hk)"),
    "causal_cross": ("causal masking of lengths that differ", "Nk - Nq in the query's position"),
    "causal": ("causal masking", "the causal comparison, and the bounds of the loop over key tiles"),
    "cross": ("numbers of queries and keys that differ", "which of the two lengths is used where"),
    "strides": ("inputs that are views", "where strides are taken from"),
    "scale": ("a scale of one's own", "where the scale is applied"),
    "odd_d": ("an odd head dim", "the tail of the loop over the head dim"),
    "wide_v": ("values wider than keys", "loops over columns of V and O: dv, not d"),
    "no_keys": ("no keys at all", "the division by l = 0"),
    "window": ("a window", "the comparisons of the window"),
    "softcap": ("softcap", "softcap, and its place before masks"),
    "alibi": ("ALiBi", "slopes and distances"),
    "mask": ("a boolean mask", "the mask's strides, and which value hides"),
    "bias": ("an additive bias", "the bias's strides, and its place after the scale"),
    "lengths": ("lengths in use", "what lies past a length"),
    "dropout": ("dropout", "what is dropped and what is divided by 1 - p"),
    "ragged": ("lengths that no tile of 16 divides", "the mask of the last tile of keys, and that of rows"),
}


def hints(found) -> list[str]:
    """Sentences on a diagnosis that has no name, or outputs in which a name cannot show.

    Parameters
    ----------
    found : Diagnosis
    """
    failing = [s for s in found.samples if s.wrong]
    passing = [s for s in found.samples if not s.wrong]
    said = []
    zero, lost = [s for s in failing if blank(s)], [s for s in failing if _lost(s)]
    if len(zero) > max(1, len(failing) // 2):
        said.append(
            f"O is 0 all over on {len(zero)} of {len(failing)} failing probes: no key counts, nothing is written, or "
            "what is not finite is written as 0 (a guard such as l > 0 is false for NaN)"
        )
    if len(lost) > max(1, len(failing) // 2):
        said.append(f"O is NaN or infinite all over on {len(lost)} of {len(failing)} failing probes")
    if not found.names and (shared := _shared(failing, passing)):
        what, look = TRAITS[shared]
        said.append(
            f"what all {len(failing)} failing probes have is {what}, and none of the {len(passing)} that pass has it; "
            f"look at {look}"
        )
    return said


def _lost(sample):
    """Whether O is nowhere finite."""
    O = sample.outputs.get("O")
    return O is not None and O.size > 0 and not np.isfinite(O).any()


def _shared(failing, passing):
    """What every failing probe needs and no passing one, the most telling first; None if there is nothing."""
    if not failing or not passing:
        return None
    needs = set.intersection(*(s.probe.needs for s in failing)).difference(*(s.probe.needs for s in passing))
    return next((word for word in TRAITS if word in needs), None)
