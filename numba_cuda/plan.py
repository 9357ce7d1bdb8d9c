"""A call prepared once and made many times: for short sequences, where the host takes longer than the kernel.

A step's ``attention`` checks its arguments, allocates and packs what its kernel needs each time it is called. A `Plan`
has done all that: calling it gives the kernels other pointers and launches them.

    plan = Plan(step6_flash_v3.attention, Q, K, V, causal=True)
    O, lse = plan(Q, K, V)                          # or any arrays of these shapes, strides and dtype
    plan.launch(q_address, k_address, v_address)    # the same from raw pointers, such as torch's X.data_ptr()

O and lse are the plan's own, and each call overwrites them, which is why `interface` has no use for it. Nothing waits:
they are there for whatever comes next on the plan's stream.
"""

from flash_cuda.executors.gpu import Gpu
from flash_cuda.interface.arrays import kind_of
from flash_cuda.interface.memory import DeviceView
from flash_cuda.parts.tensor_map import ALIGNMENT, address_of

NAMES = "Q", "K", "V"
KEPT_MAPS = 256  # sets of tensor maps, for as many sets of addresses


class Plan:
    """``attention(Q, K, V, **options)`` of a step, ready to be launched on other arrays.

    Parameters
    ----------
    attention : callable
        Of a step, such as ``step5_tensor_core.attention``.
    Q : (B, Hq, Nq, d), K : (B, Hk, Nk, d), V : (B, Hk, Nk, dv)
        Arrays on a GPU: of torch, CuPy or numba. The first call is made on them.
    stream : numba.cuda stream, optional
        The stream of all launches: that on which the arrays' library works now, if not given.
    on : executor, optional
        A `Gpu` that has launched nothing, in the place of ``stream``.
    **options
        More arguments of ``attention``, the same for all calls.

    Attributes
    ----------
    O : (B, Hq, Nq, dv), dtype of Q
    lse : (B, Hq, Nq), float32, natural logarithm
        As numba device arrays; bf16 as the uint16 that holds it.

    Raises
    ------
    TypeError
        An array is in host memory; and as ``attention``.
    ValueError
        As ``attention``; or a kernel is given something that was made of Q, K or V on the way, so that other arrays
        would need more than a launch.
    """

    def __init__(self, attention, Q, K, V, *, stream=None, on=None, **options):
        self._kinds = [kind_of(name, x) for name, x in zip(NAMES, (Q, K, V), strict=True)]
        for name, kind in zip(NAMES, self._kinds, strict=True):
            if kind.host:
                raise TypeError(f"{name}: expected an array on a GPU, got {kind.name} in host memory")
        kind = self._kinds[0]
        with kind.device():
            on = on or (kind.gpu() if stream is None else Gpu(stream=stream))
            views = [kind.enter(x) for kind, x in zip(self._kinds, (Q, K, V), strict=True)]
            self._own = [kind.layout(x) for kind, x in zip(self._kinds, (Q, K, V), strict=True)]
            self.O, self.lse = attention(*views, on=on, **options)[:2]
        self._on, self._launches = on, list(on.launches)
        self._at = tuple(address_of(view) for view in views)
        sent = {id(on.inputs[name]): k for k, name in enumerate(NAMES)}
        self._tiles = [[(sent.get(id(tile[0])), tile) for tile in tiles] for _, tiles in on.maps]
        self._moves = [(launch, place, sent[id(array)])
                       for launch in self._launches for array, place in launch.arrays if id(array) in sent]  # fmt: skip
        of_maps = {id(maps): n for n, (maps, _) in enumerate(on.maps)}
        self._map_moves = [(launch, place, of_maps[id(array)])
                           for launch in self._launches for array, place in launch.arrays
                           if id(array) in of_maps]  # fmt: skip
        self._maps = {self._at: [maps for maps, _ in on.maps]}
        self._check(views)

    def __call__(self, Q, K, V):
        """Launch on these arrays; (O, lse).

        Raises
        ------
        TypeError, ValueError
            An array is not of the planned library; its shape, strides or dtype are not the plan's.
        """
        for k, x in enumerate((Q, K, V)):
            kind, planned = self._kinds[k], self._own[k]
            if not kind.holds(x):
                raise TypeError(f"{NAMES[k]}: expected {kind.name}, as planned, got a {type(x).__name__}")
            if kind.layout(x) != planned:
                raise ValueError(f"{NAMES[k]}: expected shape, strides and dtype {planned}, as planned, got "
                                 f"{kind.layout(x)}")  # fmt: skip
        at_Q, at_K, at_V = self._kinds
        return self.launch(at_Q.address(Q), at_K.address(K), at_V.address(V))

    def launch(self, q, k, v):
        """The same for arrays of the planned layout at these addresses; only their alignment is checked."""
        at = q, k, v
        if at != self._at:
            if ((q ^ self._at[0]) | (k ^ self._at[1]) | (v ^ self._at[2])) % ALIGNMENT:
                raise ValueError(f"address: expected as far from a multiple of {ALIGNMENT} as planned, got {at}")
            for launch, place, which in self._moves:
                launch.move(place, at[which])
            if self._map_moves:
                maps = self._maps.get(at) or self._new_maps(at)
                for launch, place, n in self._map_moves:
                    launch.move(place, address_of(maps[n]))
            self._at = at
        for launch in self._launches:
            launch()
        return self.O, self.lse

    def _new_maps(self, at):
        """Tensor maps of arrays at addresses not met before; those of the set that was made first go, past a number."""
        made = []
        for tiles in self._tiles:
            moved = [(array if which is None else _moved(array, at[which]), *box) for which, (array, *box) in tiles]
            made.append(self._on.tensor_maps(*moved))
        del self._on.maps[len(self._tiles):]
        if len(self._maps) >= KEPT_MAPS:
            del self._maps[next(iter(self._maps))]
        self._maps[at] = made
        return made

    def _check(self, views):
        """Refuse a step that gives its kernels copies or parts of Q, K or V, which would stay what they are."""
        for launch in self._launches:
            for array, _ in launch.arrays:
                if id(array) in {id(sent) for sent in map(self._on.inputs.get, NAMES)}:
                    continue
                for name, start, view in zip(NAMES, self._at, views, strict=True):
                    steps = zip(view.shape, view.strides, strict=True)
                    end = start + sum((n - 1) * step for n, step in steps) + view.dtype.itemsize
                    if array.size and start <= address_of(array) < end:
                        raise ValueError(f"attention: expected a step that gives {name} to its kernels as it is")


def _moved(array, address):
    """The array's layout somewhere else."""
    return DeviceView(None, address, array.shape, array.strides, array.dtype)
