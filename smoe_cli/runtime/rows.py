"""What the kernels do with rows: find them, sum them over ranks, round the sum.

Axes: a tile has N rows and W columns of H; G ranks.
"""

import triton
import triton.language as tl

from smoe_cli.runtime.barrier import PTX


@triton.jit
def address(bases, peer, offset, like):
    """The pointer, of the type of `like`, to byte `offset` of a rank's region. Regions are aligned to 16 bytes, which
    must be said: without it every access is two bytes wide."""
    return tl.multiple_of((tl.load(bases + peer) + offset).to(like.dtype), 16)


@triton.jit
def cells(index, columns, H: tl.constexpr):
    """Offsets [N, W] in rows of H, in int64: a row number times H passes 2^31. index: [N]; columns: [W]."""
    return index[:, None].to(tl.int64) * H + columns[None, :]


@triton.jit
def sum_over_ranks(own, staged, place, needs, rank, cap, columns, H: tl.constexpr, G: tl.constexpr):
    """[N, W] fp32 sums in rank order over the ranks whose bit is set in needs [N].

    own: [N, W], this rank's share; staged: [G * cap, H], rank p's share at row p * cap + place [N].
    """
    inside = (columns < H)[None, :]
    total = tl.zeros([place.shape[0], columns.shape[0]], tl.float32)
    for peer in tl.range(0, G, loop_unroll_factor=2):
        needed = (needs >> peer) & 1
        mine = (tl.where(peer == rank, needed, 0) != 0)[:, None]
        theirs = (tl.where(peer == rank, 0, needed) != 0)[:, None]
        share = tl.load(staged + cells(place + peer * cap, columns, H), mask=theirs & inside, other=0.0)
        total += tl.where(mine, own, share).to(tl.float32)
    return total


@triton.jit
def rounded(x, like: tl.constexpr, PROTOCOL: tl.constexpr):
    """x in the type of `like`, to the nearest, ties to even. The interpreter truncates to bf16, so there it is done by
    hand: add half a unit and the lowest bit kept, keep NaN a NaN, shift."""
    if (PROTOCOL != PTX) and (like == tl.bfloat16):
        bits = x.to(tl.int32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(x != x, (bits >> 16) | 0x40, up)
        return kept.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(like)
