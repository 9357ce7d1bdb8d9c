"""JAX arrays for `arrays`: they have no strides and cannot be written to, so there is nothing to band."""

import jax
import numpy as np

from verify.foreign.arrays_numpy import Arrays


class JaxArrays(Arrays):
    """Arrays of JAX, on its default device."""

    name = "jax"
    strided = False

    def __init__(self):
        super().__init__()
        self._on = jax.devices()[0]
        self.executor = "cpu" if self._on.platform == "cpu" else "gpu"

    @property
    def device(self):
        return super().device if self.executor == "cpu" else self._on.device_kind

    def put(self, x, what="an input"):
        if x.dtype == np.float64 and not jax.config.jax_enable_x64:
            raise TypeError("jax stores fp64 only with jax_enable_x64")
        return jax.device_put(np.ascontiguousarray(x), self._on)

    def get(self, array):
        return np.asarray(array)


MAKERS = {"jax": JaxArrays}
