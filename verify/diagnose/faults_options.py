"""Faults of what changes a score or a weight: ALiBi, softcap, bias, dropout."""

import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.reference import Reference

ALIBI = "18.7.1"


@fault("alibi_ignored", "ALiBi missing", ALIBI, "whether the bias is added", "alibi_slopes")
class _(Reference):
    def alibi(self):
        return 0.0


@fault("alibi_sign", "ALiBi with the wrong sign", ALIBI, "the sign of slope * |i - j|", "alibi_slopes")
class _(Reference):
    def alibi(self):
        return -super().alibi()


@fault(
    "alibi_position", "ALiBi's query position not aligned to the keys", ALIBI, "Nk - Nq in the distance", "alibi_slopes"
)
class _(Reference):
    def distance(self):
        return np.abs(np.arange(self.Nq)[:, None] - self.key())


@fault(
    "alibi_without_abs",
    "i - j in ALiBi without the absolute value",
    ALIBI,
    "the distance of later keys",
    "alibi_slopes",
)
class _(Reference):
    def distance(self):
        return self.row() - self.key()


@fault(
    "alibi_of_key_head",
    "ALiBi's slope of the key head",
    ALIBI,
    "one slope for each query head",
    ("alibi_slopes", "gqa"),
)
class _(Reference):
    def slopes(self):
        return super().slopes()[..., self.key_head(), :, :]


@fault(
    "alibi_of_first_head", "the first head's slope used for all", ALIBI, "one slope for each query head", "alibi_slopes"
)
class _(Reference):
    def slopes(self):
        return super().slopes()[..., :1, :, :]


@fault("alibi_scaled", "ALiBi multiplied by the scale", ALIBI, "the order of scale and bias", "alibi_slopes")
class _(Reference):
    def alibi(self):
        return self.scale() * super().alibi()


@fault("alibi_off_by_one", "ALiBi's distance off by one", ALIBI, "the positions in the distance", "alibi_slopes")
class _(Reference):
    def distance(self):
        return np.abs(self.row() - self.key() + 1)


@fault(
    "alibi_off_by_one",
    "ALiBi's distance off by one, the other way",
    ALIBI,
    "the positions in the distance",
    "alibi_slopes",
)
class _(Reference):
    def distance(self):
        return np.abs(self.row() - self.key() - 1)


@fault("alibi_log2", "ALiBi added to log2 scores as it is", ALIBI, "log2(e) on the bias", "alibi_slopes")
class _(Reference):
    def alibi(self):
        return np.log(2) * super().alibi()


@fault("softcap_ignored", "softcap missing", "18.7.1", "whether softcap is applied", "softcap")
class _(Reference):
    def cap(self, s):
        return s


@fault("softcap_formula", "s tanh(s / c) instead of c tanh(s / c)", "18.7.1", "the factor before tanh", "softcap")
class _(Reference):
    def cap(self, s):
        return s if (c := self.option("softcap")) is None else s * np.tanh(s / c)


@fault("softcap_formula", "c tanh(s) instead of c tanh(s / c)", "18.7.1", "the division before tanh", "softcap")
class _(Reference):
    def cap(self, s):
        return s if (c := self.option("softcap")) is None else c * np.tanh(s)


@fault("softcap_formula", "tanh(s / c) without the factor c", "18.7.1", "the factor after tanh", "softcap")
class _(Reference):
    def cap(self, s):
        return s if (c := self.option("softcap")) is None else np.tanh(s / c)


@fault("softcap_formula", "x tanh(x) of x = s / c", "18.7.1", "the formula of softcap", "softcap")
class _(Reference):
    def cap(self, s):
        return s if (c := self.option("softcap")) is None else s / c * np.tanh(s / c)


@fault("softcap_clamp", "scores clamped at +-c", "18.7.1", "tanh", "softcap")
class _(Reference):
    def cap(self, s):
        return s if (c := self.option("softcap")) is None else np.clip(s, -c, c)


@fault("softcap_before_scale", "softcap before the scale", "18.7.1", "the order of scale and softcap", "softcap")
class _(Reference):
    def scores(self, Q, K):
        return self.add_bias(self.scale() * self.cap(self.product(Q, K)))


@fault("softcap_after_bias", "softcap after the bias", "18.7.1", "the order of softcap and bias", "softcap")
class _(Reference):
    def scores(self, Q, K):
        return self.cap(self.add_bias(self.scale() * self.product(Q, K)))


@fault(
    "softcap_after_mask",
    "softcap after the mask: hidden keys score -c",
    "18.7.1",
    "the order of softcap and mask",
    "softcap",
)
class _(Reference):
    def hidden(self):
        return -np.inf if (c := self.option("softcap")) is None else -c


@fault("bias_ignored", "the bias missing", "18.7.2", "whether the bias is added", "bias")
class _(Reference):
    def bias(self):
        return 0.0


@fault("bias_scaled", "the bias multiplied by the scale", "18.7.2", "the order of scale and bias", "bias")
class _(Reference):
    def bias(self):
        return self.scale() * super().bias()


@fault("bias_sign", "the bias subtracted", "18.7.2", "the sign of the bias", "bias")
class _(Reference):
    def bias(self):
        return -super().bias()


@fault("bias_of_first_head", "the bias of the first head used for all", "18.7.2", "the strides of the bias", "bias")
class _(Reference):
    def bias(self):
        return super().bias()[:, :1]


@fault(
    "bias_of_first_head", "the bias of the first batch entry used for all", "18.7.2", "the strides of the bias", "bias"
)
class _(Reference):
    def bias(self):
        return super().bias()[:1]


@fault("bias_log2", "the bias added to log2 scores as it is", "18.7.2", "log2(e) on the bias", "bias")
class _(Reference):
    def bias(self):
        return np.log(2) * super().bias()


@fault("dropout_ignored", "dropout missing", "18.7.1", "whether dropout is applied", "keep")
class _(Reference):
    def keep(self):
        return None


@fault("dropout_not_scaled", "kept weights not divided by 1 - p", "18.7.1", "the factor 1 / (1 - p)", "keep")
class _(Reference):
    def keep(self):
        return None if (kept := super().keep()) is None else np.where(kept > 0, 1.0, 0.0)


@fault("dropout_scaled_by_p", "kept weights divided by p", "18.7.1", "the factor 1 / (1 - p)", "keep")
class _(Reference):
    def keep(self):
        return None if (kept := super().keep()) is None else np.where(kept > 0, 1 / self.option("dropout_p"), 0.0)


@fault("dropout_inverted", "kept and dropped weights exchanged", "18.7.1", "what true means in the keep mask", "keep")
class _(Reference):
    def keep(self):
        kept = super().keep()
        return None if kept is None else np.where(kept > 0, 0.0, 1 / (1 - self.option("dropout_p")))


@fault(
    "dropout_in_l",
    "dropout applied before the sum: l and lse feel it",
    "18.7.1",
    "the order of l's sum and dropout",
    "keep",
)
class _(Reference):
    def scores(self, Q, K):
        s = super().scores(Q, K)
        kept = super().keep()
        return s if kept is None else np.where(kept > 0, s - np.log(1 - self.option("dropout_p")), -np.inf)

    def keep(self):
        return None


@fault("dropout_in_l", "dropped weights left out of l", "18.7.1", "the order of l's sum and dropout", "keep")
class _(Reference):
    def scores(self, Q, K):
        s = super().scores(Q, K)
        kept = super().keep()
        return s if kept is None else np.where(kept > 0, s, -np.inf)

    def keep(self):
        return None
