"""How blocks of the backward kernels on tensor cores work: the choices that only speed depends on."""

from typing import NamedTuple


class Shape(NamedTuple):
    """The tiles of a block and the warps that share them."""

    rows: int  # of the tile that a block keeps: keys, or queries in the kernel for dQ
    columns: int  # of the tiles that it walks over, a power of two from 16 on
    band: int = 16  # rows of a warp, 16 or 32
    hold: bool = False  # fragments of the kept tiles stay in registers
    fresh: bool = False  # the thread's number is read anew for each tile, to free registers
    blocks: int | None = None  # that a multiprocessor shall run at once: bounds the registers

    @property
    def threads(self):
        """Threads of a block."""
        return 32 * self.rows // self.band

    def shared_bytes(self, D, keys):
        """Dynamic shared memory of a block: what it keeps, two of what it walks over, with keys as rows also dS."""
        return 2 * (D * (2 * self.rows + 4 * self.columns) + (self.rows * self.columns if keys else 0))


# Head room D -> shape of the kernels with keys as rows, and of the one with queries as rows.
KEYS = {
    16: Shape(64, 64, hold=True), 32: Shape(64, 64, hold=True), 64: Shape(128, 32, 32), 96: Shape(128, 64),
    128: Shape(64, 64), 192: Shape(64, 32), 256: Shape(64, 32),
}  # fmt: skip
# Without the fifth product 64 queries at d = 128 need more registers than there are.
KEYS_ALONE = KEYS | {64: Shape(128, 64, hold=True), 128: Shape(128, 32)}
# Sums that are added to one by one, as before sm_90, take registers for their addresses.
KEYS_BEFORE_90 = KEYS | {128: KEYS[128]._replace(fresh=True)}
# The compiler for sm_100 and later keeps more from one tile to the next.
KEYS_FROM_100 = KEYS | {256: KEYS[256]._replace(fresh=True)}
# Where tiles are filled element by element, and dK and dV are summed apart.
KEYS_BY_ELEMENT = KEYS | {128: Shape(128, 64)}
# Under rules the compiler needs some registers more, and more yet where each score is looked up in an array or drawn
# for, and for any change of scores without the fifth product, where its sums are added to one by one, or from sm_100
# on.
KEYS_BY_RULE = KEYS | {128: KEYS[128]._replace(fresh=True)}
KEYS_BY_ARRAY = KEYS | {64: Shape(128, 64), 128: Shape(64, 32, fresh=True)}
QUERIES = {
    16: Shape(64, 64, hold=True), 32: Shape(64, 64, hold=True), 64: Shape(128, 64, hold=True), 96: Shape(128, 64),
    128: Shape(128, 64), 192: Shape(64, 32), 256: Shape(64, 32),
}  # fmt: skip

# What a block may have on an H100 or H200, where the shapes were chosen; an A100 has 163 KiB, smaller GPUs 99 KiB.
SHARED_LIMIT = 227 * 1024


def fitting(shape, D, keys, limit):
    """The shape, or the next smaller one for which ``limit`` bytes of shared memory are enough, as long as there is."""

    def fits(shape):
        return shape.shared_bytes(D, keys) + 16 * shape.columns <= limit  # lse and D of two tiles are there, too

    while not fits(shape) and shape.columns > 16:
        shape = shape._replace(columns=shape.columns // 2)
    while not fits(shape) and shape.rows > shape.band:
        shape = shape._replace(rows=shape.rows // 2)
    return shape


def usual_keys(setting, deterministic):
    """The `Shape` of the kernel with keys as rows, if none is given."""
    if deterministic:
        return KEYS_ALONE[setting.D]
    if setting.fill == "single":
        return KEYS_BY_ELEMENT[setting.D]
    return (KEYS_FROM_100 if setting.later else KEYS if setting.vector else KEYS_BEFORE_90)[setting.D]


def chosen(name, given, usual, tile, D, keys, limit):
    """The shape that is given; or the usual one with the tile (rows, columns), or as far as shared memory allows."""
    return usable(name, given or (usual._replace(rows=tile[0], columns=tile[1], band=16) if tile else
                                  fitting(usual, D, keys, limit)))


def usable(name, shape):
    """The shape, or an error that says what it lacks."""
    rows, columns, band = shape[:3]
    if rows < 1 or band not in (16, 32) or rows % band or columns < 16 or columns & (columns - 1):
        raise ValueError(f"{name}: expected rows a multiple of a band of 16 or 32, columns a power of two from 16 on, "
                         f"got {tuple(shape[:3])}")
    return shape
