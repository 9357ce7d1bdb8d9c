"""Faults of the backward pass that concern an option: forgotten there, or other than in the forward pass."""

import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.faults_backward import BACK
from verify.diagnose.gradients import Gradients


class _InOne(Gradients):
    """Only one of the two passes has the fault, where dQ has a loop of its own, and dK and dV another."""

    RIGHT = ()

    def backward(self):
        right = Gradients(self.probe, self.tiling).backward()
        return super().backward() | {name: right[name] for name in self.RIGHT}


PASSES = {"dQ": ("dK", "dV"), "dK and dV": ("dQ",)}  # what is wrong -> what is right then


def _forgets(name, what, look, needs, alone=tuple(PASSES), **steps):
    """A backward pass in which an option of the forward is missing or wrong; in all of it, or in one of two passes.

    ``alone`` are those passes in which that is not what another name says already.
    """
    fault(name, what, BACK, look, needs)(type(name, (Gradients,), steps))
    for says in alone:
        right = PASSES[says]
        model = type(name, (_InOne,), steps | {"RIGHT": right})
        fault(name, f"{what}, for {says} alone", BACK, look, needs)(model)


def _all(self):
    """Nothing is hidden."""
    return np.True_


_forgets(
    "causal_missing_in_backward",
    "the causal mask missing in the backward pass",
    "the mask where P is recomputed",
    "causal",
    causal=_all,
)
_forgets(
    "mask_missing_in_backward",
    "the mask missing in the backward pass",
    "the mask where P is recomputed",
    "mask",
    mask=_all,
)
_forgets(
    "window_missing_in_backward",
    "the window missing in the backward pass",
    "the window where P is recomputed",
    "window",
    window=_all,
)
_forgets(
    "lengths_missing_in_backward",
    "lengths missing in the backward pass",
    "lengths where P is recomputed",
    "lengths_k",
    in_length=_all,
)
_forgets(
    "alibi_missing_in_backward",
    "ALiBi missing in the backward pass",
    "the bias where P is recomputed",
    "alibi_slopes",
    alibi=lambda self: 0.0,
)
_forgets(
    "bias_missing_in_backward",
    "the bias missing in the backward pass",
    "the bias where P is recomputed",
    "bias",
    bias=lambda self: 0.0,
)
_forgets(
    "softcap_missing_in_backward",
    "softcap missing in the backward pass",
    "softcap where P is recomputed",
    "softcap",
    cap=lambda self, s: s,
    cap_slope=lambda self, raw: 1.0,
)
_forgets(
    "softcap_slope_missing",
    "softcap's derivative missing in dS",
    "1 - tanh^2",
    "softcap",
    cap_slope=lambda self, raw: 1.0,
)
_forgets(
    "softcap_slope_wrong",
    "1 - tanh in the place of 1 - tanh^2",
    "1 - tanh^2",
    "softcap",
    cap_slope=lambda self, raw: 1 - np.tanh(raw / c) if (c := self.option("softcap")) else 1.0,
)
_forgets(
    "softcap_slope_of_capped",
    "softcap's derivative at the capped score",
    "where 1 - tanh^2 is taken",
    "softcap",
    cap_slope=lambda self, raw: 1 - np.tanh(np.tanh(raw / c)) ** 2 if (c := self.option("softcap")) else 1.0,
)
_forgets("dropout_missing_in_dV", "dropout missing in dV", "the weights in dV", "keep", keep_values=lambda self: None)
_forgets(
    "dropout_missing_in_dP",
    "dropout missing in dP",
    "dP, before D is subtracted",
    "keep",
    keep_products=lambda self: None,
)
_forgets(
    "dropout_missing_in_backward",
    "dropout missing in the backward pass",
    "dropout where P is recomputed",
    "keep",
    alone=("dK and dV",),  # in dQ alone it is missing in dP
    keep_values=lambda self: None,
    keep_products=lambda self: None,
)
_forgets(
    "dropout_mask_differs",
    "another dropout mask in the backward than in the forward pass",
    "seed and indices of the mask",
    "keep",
    keep_values=lambda self: np.roll(self.keep(), 1, -1),
    keep_products=lambda self: np.roll(self.keep(), 1, -1),
)
_forgets(
    "dropout_mask_differs",
    "kept and dropped exchanged in the backward pass",
    "what true means in the mask",
    "keep",
    keep_values=lambda self: 1 / (1 - self.option("dropout_p")) - self.keep(),
    keep_products=lambda self: 1 / (1 - self.option("dropout_p")) - self.keep(),
)
_forgets(
    "dropout_not_scaled_in_backward",
    "1 / (1 - p) missing in the backward pass",
    "the factor 1 / (1 - p)",
    "keep",
    keep_values=lambda self: self.keep() * (1 - self.option("dropout_p")),
    keep_products=lambda self: self.keep() * (1 - self.option("dropout_p")),
)


@fault(
    "dropout_in_whole_dS", "dS from the dropped weights", BACK, "dS takes the whole weight, dV the dropped one", "keep"
)
class _(Gradients):
    def d_scores(self, P, dP, D):
        return super().d_scores(P * self.keep(), dP, D) if self.keep() is not None else super().d_scores(P, dP, D)


for _shift, _name in ((-1, "short"), (1, "far")):
    _forgets(
        f"diagonal_one_{_name}_in_backward",
        f"the diagonal one key too {_name} in the backward pass",
        "the mask where P is recomputed",
        "causal",
        causal=lambda self, by=_shift: self.key() <= self.row() + by if self.option("causal") else np.True_,
    )
_forgets(
    "aligned_top_left_in_backward",
    "causal aligned top left in the backward pass",
    "Nk - Nq where P is recomputed",
    "causal",
    causal=lambda self: self.key() <= np.arange(self.Nq)[:, None] if self.option("causal") else np.True_,
)
