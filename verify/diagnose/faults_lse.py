"""Faults of what is said of a row at the end: lse, and rows that see no key."""

import numpy as np

from verify.diagnose.fault import fault
from verify.diagnose.faults_softmax import LSE, ONLINE, Tiled
from verify.diagnose.reference import Reference, pivot


@fault("lse_base_2", "lse in base 2", ONLINE, LSE)
class _(Reference):
    def log_sum(self, m, l):
        return super().log_sum(m, l) / np.log(2)


@fault("lse_without_max", "the maximum not added back in lse", ONLINE, LSE)
class _(Tiled):
    def log_sum(self, m, l):
        return super().log_sum(np.zeros_like(m), l)


@fault("lse_max_base_2", "m of lse in log2 units, log l natural", ONLINE, LSE)
class _(Tiled):
    def log_sum(self, m, l):
        return super().log_sum(m / np.log(2), l)


@fault("lse_log2_of_l", "log2 of l beside a natural m in lse", ONLINE, LSE)
class _(Tiled):
    def log_sum(self, m, l):
        return np.where(l == 0, -np.inf, pivot(m) + np.log2(np.where(l == 0, 1, l)))


@fault("lse_only_max", "lse is only the maximum", ONLINE, LSE)
class _(Reference):
    def log_sum(self, m, l):
        return np.where(l == 0, -np.inf, m)


@fault("lse_without_log", "l itself in the place of log l", ONLINE, LSE)
class _(Tiled):
    def log_sum(self, m, l):
        return np.where(l == 0, -np.inf, pivot(m) + l)


@fault("lse_is_l", "lse is exp of what it should be", ONLINE, LSE)
class _(Reference):
    def log_sum(self, m, l):
        return np.exp(super().log_sum(m, l))


@fault("lse_unscaled_max", "m in lse without the scale", ONLINE, LSE)
class _(Tiled):
    def log_sum(self, m, l):
        return super().log_sum(m / self.scale(), l)


@fault("lse_negated", "lse with the wrong sign", ONLINE, LSE)
class _(Reference):
    def log_sum(self, m, l):
        return -super().log_sum(m, l)


@fault("lse_minus_log", "log l subtracted from m in lse", ONLINE, LSE)
class _(Tiled):
    def log_sum(self, m, l):
        return np.where(l == 0, -np.inf, pivot(m) - np.log(np.where(l == 0, 1, l)))


@fault("lse_one_tile_late", "lse from the state before the last key tile", ONLINE, LSE)
class _(Tiled):
    def forward(self):
        self.before = np.full((self.B, self.Hq, self.Nq), -np.inf), np.zeros((self.B, self.Hq, self.Nq))
        return super().forward()

    def alpha(self, m, m_new, tile_max):
        self.m_before = m
        return super().alpha(m, m_new, tile_max)

    def next_l(self, l, alpha, P):
        self.before = self.m_before, l
        return super().next_l(l, alpha, P)

    def log_sum(self, m, l):
        return super().log_sum(*self.before)


@fault("empty_row_nan", "0 / 0 in rows that see no key", "18.2.2", "the division by l = 0", empty=True)
class _(Reference):
    def divide(self, O, l):
        return O / l

    def log_sum(self, m, l):
        return np.where(l == 0, np.nan, super().log_sum(m, l))


@fault("empty_row_nan", "0 / 0 in O of rows that see no key", "18.2.2", "the division by l = 0", empty=True)
class _(Reference):
    def divide(self, O, l):
        return O / l


@fault("empty_row_nan", "0 / 0 in rows that see none of the keys there are", "18.2.2", "division by l = 0", empty=True)
class _(Reference):
    """As a loop over key tiles has it that divides inside: without any key, it does nothing."""

    def divide(self, O, l):
        return O / l if self.Nk else super().divide(O, l)


for _value in (0.0, np.inf, -1e4, -5e4, -65504.0, -1e9, -1e30, float(np.finfo(np.float32).min)):

    @fault(
        "empty_row_lse",
        f"lse {_value:g} in rows that see no key",
        "18.2.2",
        "what lse is where l = 0: -inf",
        empty=True,
    )
    class _(Reference):
        VALUE = _value

        def log_sum(self, m, l):
            return np.where(l == 0, self.VALUE, super().log_sum(m, l))
