"""Combine: each rank stores what its experts made of a row at the row's home, which sums over the ranks it needed.

Axes: G ranks, H hidden size, C home rows of a rank. In steps, as SRS: rows go out while earlier ones are summed.
"""

import triton
import triton.language as tl
from torch import Tensor

from smoe_cli.runtime.barrier import signal, wait
from smoe_cli.runtime.launch import Launch
from smoe_cli.runtime.region import CODES, Region
from smoe_cli.runtime.rows import address, cells, rounded, sum_over_ranks


@triton.jit
def send_parts(
    parts, needs, bases, staged_at, place, rank, cap, H: tl.constexpr, W: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """Store this rank's sums for the rows at `place` [N] of every other rank there, where they needed this rank."""
    for turn in tl.range(1, G, loop_unroll_factor=1):
        peer = (rank + turn) % G
        mask = tl.load(needs + peer * cap + place, mask=place < cap, other=0)
        home = address(bases, peer, staged_at, parts)
        for start in range(0, H, W):
            columns = start + tl.arange(0, W)
            live = (((mask >> rank) & 1) != 0)[:, None] & (columns < H)[None, :]
            part = tl.load(parts + cells(place + peer * cap, columns, H), mask=live)
            tl.store(home + cells(place + rank * cap, columns, H), part, mask=live)


@triton.jit(do_not_specialize=["staged_at", "rank", "cap", "tiles", "steps", "code", "timeout"])
def combine_kernel(
    parts, needs, mixed, staged, bases, flags, epochs, failures, staged_at, rank, cap, tiles, steps, code, timeout,
    H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr,
    PROTOCOL: tl.constexpr,
):  # fmt: skip
    """parts: [G * C, H], this rank's sums by place; needs: [G * C] int32, bit g: the row needs rank g.

    Fills mixed, [C, H]. staged, blocks and steps: as in srs_kernel.
    """
    blocks = tl.num_programs(0) // 2 if SPLIT else tl.num_programs(0)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    sends = tl.program_id(0) < blocks
    sums = tl.program_id(0) >= (blocks if SPLIT else 0)
    epoch = tl.load(epochs + block)
    for step in range(steps + 1):
        if sends & (step < steps):
            for tile in range(tiles):
                place = ((step * blocks + block) * tiles + tile) * N + tl.arange(0, N)
                send_parts(parts, needs, bases, staged_at, place, rank, cap, H, W, G)
            signal(bases, block, epoch + step + 1, rank, G, PROTOCOL)
        if sums & (step > 0):
            for tile in range(tiles):
                place = (((step - 1) * blocks + block) * tiles + tile) * N + tl.arange(0, N)
                mask = tl.load(needs + rank * cap + place, mask=place < cap, other=0)
                for start in range(0, H, W):
                    columns = start + tl.arange(0, W)
                    inside = (place < cap)[:, None] & (columns < H)[None, :]
                    live = (((mask >> rank) & 1) != 0)[:, None] & inside
                    own = tl.load(parts + cells(place + rank * cap, columns, H), mask=live, other=0.0)
                    if (tile == 0) & (start == 0):
                        wait(flags, block, epoch + step, failures, code, timeout, G, PROTOCOL)
                    total = sum_over_ranks(own, staged, place, mask, rank, cap, columns, H, G)
                    row = rounded(total, mixed.dtype.element_ty, PROTOCOL)
                    tl.store(mixed + cells(place, columns, H), row, mask=inside)
    if sums:
        tl.store(epochs + block, epoch + steps)


def combine(region: Region, slot: int, launch: Launch, parts: Tensor, needs: Tensor) -> Tensor:
    """parts: [G * C, H]; needs: [G * C] int32, as received. Returns [C, H]."""
    cap, hidden = len(parts) // region.num_ranks, parts.shape[1]
    mixed = parts.new_empty(cap, hidden)
    staged = region.view(f"pushed{slot}", parts.dtype, region.num_ranks * cap, hidden)
    combine_kernel[(launch.grid,)](
        parts, needs, mixed, staged,
        region.bases, region.flags, region.epochs, region.failures, region.offsets[f"pushed{slot}"],
        region.rank, cap, launch.tiles, launch.steps(cap), CODES["combine"], region.timeout,
        H=hidden, W=launch.width, N=launch.rows, G=region.num_ranks, SPLIT=launch.split,
        PROTOCOL=region.protocol, num_warps=launch.warps,
        maxnreg=launch.registers(region.processors),
    )  # fmt: skip
    return mixed
