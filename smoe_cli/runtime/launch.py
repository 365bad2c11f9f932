"""How kernels are launched: a table, so that all ranks launch alike; nothing is tuned while ranks wait for each other.

Axes: C home rows of a rank, H hidden size.
"""

from dataclasses import dataclass

MIB = 1 << 20

MAX_BLOCKS = 1022
"""Blocks that have a flag; no launch comes near."""


@dataclass(frozen=True)
class Launch:
    """blocks: that store; split: as many again sum, else the same do; warps: of a block; rows, width: of a tile; tiles:
    that a block stores before it signals.
    """

    blocks: int
    warps: int
    rows: int
    width: int
    tiles: int = 1
    split: bool = False

    @property
    def grid(self) -> int:
        """Blocks in all."""
        return self.blocks * (2 if self.split else 1)

    def registers(self, processors: int) -> int | None:
        """Most registers of a thread with which all blocks run at once on so many multiprocessors; blocks that send and
        sum need it, for they wait for each other's. Split ones do not: those that send wait for nobody and start first.
        """
        if self.split:
            return None
        most: int = 65_536 // (-(-self.blocks // processors) * self.warps * 32) // 8 * 8
        return min(most, 255)

    def steps(self, cap: int) -> int:
        """How often a block signals until C rows are stored."""
        return -(-cap // (self.blocks * self.tiles * self.rows))


@dataclass(frozen=True)
class Form:
    """A launch for any hidden size. elements: of a tile; whole: a tile has whole rows; step: bytes that a block stores
    before it signals.
    """

    blocks: int
    warps: int
    elements: int
    whole: bool = False
    step: int = 1
    split: bool = False


SMALL, MEDIUM = 1 * MIB, 8 * MIB

FORMS: dict[str, tuple[Form, Form, Form, Form]] = {
    "reduce_scatter": (
        Form(32, 16, 4096, whole=True),
        Form(128, 16, 8192),
        Form(128, 16, 8192, split=True),
        Form(256, 8, 4096),
    ),
    "reduce_scatter_norm": (
        Form(32, 16, 4096, whole=True),
        Form(128, 16, 8192),
        Form(128, 8, 8192, split=True),
        Form(64, 16, 8192, split=True),
    ),
    "all_gather": (
        Form(32, 8, 4096, whole=True),
        Form(64, 8, 8192),
        Form(256, 8, 8192),
        Form(256, 8, 8192),
    ),
    "dispatch": (
        Form(64, 8, 4096, whole=True),
        Form(128, 16, 8192),
        Form(256, 16, 8192),
        Form(256, 16, 8192),
    ),
    "combine": (
        Form(64, 8, 4096, whole=True),
        Form(64, 8, 8192, step=64 << 10),
        Form(512, 8, 8192),
        Form(128, 16, 4096, split=True),
    ),
}
"""Operation -> the form for up to SMALL bytes [G * C, H] in all, up to MEDIUM, above, and above where a row is cut into
several tiles. Measured on two H200s, see docs/results.md."""


def launch_for(operation: str, cap: int, num_ranks: int, hidden: int, itemsize: int) -> Launch:
    """The launch of an operation on C rows a rank; the same on every rank."""
    total = cap * num_ranks * hidden * itemsize
    small, medium, large, cut = FORMS[operation]
    if total > MEDIUM:
        return fitted(cut if tile_width(hidden, cut.elements) < hidden else large, cap, hidden, itemsize)
    return fitted(small if total <= SMALL else medium, cap, hidden, itemsize)


def fitted(form: Form, cap: int, hidden: int, itemsize: int) -> Launch:
    """A form at this size: no more tiles and blocks than there is work for."""
    width = power_of_two(hidden) if form.whole else tile_width(hidden, form.elements)
    rows = max(1, form.elements // width)
    tiles = max(1, form.step // (rows * hidden * itemsize))
    tiles = min(tiles, -(-cap // (rows * form.blocks)))
    return Launch(max(1, min(form.blocks, -(-cap // (rows * tiles)))), form.warps, rows, width, tiles, form.split)


def tile_width(hidden: int, most: int) -> int:
    """Columns of a tile: the widest power of two that leaves at most an eighth of the last tile's lanes idle."""
    width = min(power_of_two(hidden), most)
    while width > 64 and -(-hidden // width) * width > hidden * 9 // 8:
        width //= 2
    return width


def power_of_two(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()
