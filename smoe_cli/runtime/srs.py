"""SRS: shuffle fused into reduce-scatter. Each rank stores its share of a row at the row's home, which sums.

Axes: T tokens, G ranks, H hidden size, C = ceil(T / G) home rows of a rank. Rows go in steps: while half of the
blocks store the next rows at their homes, the other half sums those that have come.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoe_cli.runtime.barrier import signal, wait
from smoe_cli.runtime.exchange import Norm
from smoe_cli.runtime.launch import Launch
from smoe_cli.runtime.region import CODES, Region
from smoe_cli.runtime.rows import address, cells, rounded, sum_over_ranks


@triton.jit
def send_shares(
    partial, token_of_place, bases, staged_at, place, rank, cap, spread,
    H: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Store the shares of the tokens at `place` [N] of every other rank there."""
    for turn in tl.range(1, G, loop_unroll_factor=1):
        peer = (rank + turn) % G
        token = tl.load(token_of_place + peer * spread + place, mask=place < cap, other=-1)
        home = address(bases, peer, staged_at, partial)
        for start in range(0, H, W):
            columns = start + tl.arange(0, W)
            live = (token >= 0)[:, None] & (columns < H)[None, :]
            share = tl.load(partial + cells(token, columns, H), mask=live)
            tl.store(home + cells(place + rank * cap, columns, H), share, mask=live)


@triton.jit
def normalise(
    summed, normed, weight, place, squares, cap, epsilon, H: tl.constexpr, W: tl.constexpr, PROTOCOL: tl.constexpr
):  # fmt: skip
    """RMS normalisation of the rows at `place` [N], whose squares [N, W] were summed as they were stored."""
    tl.debug_barrier()
    scale = tl.rsqrt(tl.sum(squares, axis=1) / H + epsilon)[:, None]
    for start in range(0, H, W):
        columns = start + tl.arange(0, W)
        inside = (place < cap)[:, None] & (columns < H)[None, :]
        gain = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
        row = tl.load(summed + cells(place, columns, H), mask=inside, other=0.0).to(tl.float32)
        scaled = rounded(row * scale, summed.dtype.element_ty, PROTOCOL).to(tl.float32)
        product = rounded(scaled * gain, summed.dtype.element_ty, PROTOCOL)
        tl.store(normed + cells(place, columns, H), product, mask=inside)


@triton.jit(do_not_specialize=["staged_at", "rank", "cap", "spread", "tiles", "steps", "code", "timeout"])
def srs_kernel(
    partial, token_of_place, residual, weight, summed, normed, staged, bases, flags, epochs, failures,
    staged_at, rank, cap, spread, tiles, steps, code, timeout, epsilon,
    H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    RESIDUAL: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr, PROTOCOL: tl.constexpr,
):  # fmt: skip
    """partial: [T, H]; token_of_place: rank p's [C] at p * spread; residual: [C, H]; weight: [H].

    Fills summed and normed, [C, H]. staged: this rank's [G * C, H] at byte staged_at of its region, rank p's share of
    place i at p * C + i. Block b sends in step s the shares of the places from (s * blocks + b) * tiles * N on,
    and sums those of the step before; if SPLIT, half of the blocks send and the others sum.
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
                send_shares(partial, token_of_place, bases, staged_at, place, rank, cap, spread, H, W, G)
            signal(bases, block, epoch + step + 1, rank, G, PROTOCOL)
        if sums & (step > 0):
            for tile in range(tiles):
                place = (((step - 1) * blocks + block) * tiles + tile) * N + tl.arange(0, N)
                token = tl.load(token_of_place + rank * spread + place, mask=place < cap, other=-1)
                needs = tl.where(token >= 0, -1, 0)
                squares = tl.zeros([N, W], tl.float32)
                for start in range(0, H, W):
                    columns = start + tl.arange(0, W)
                    inside = (place < cap)[:, None] & (columns < H)[None, :]
                    own = tl.load(partial + cells(token, columns, H), mask=(token >= 0)[:, None] & inside, other=0.0)
                    if (tile == 0) & (start == 0):
                        wait(flags, block, epoch + step, failures, code, timeout, G, PROTOCOL)
                    total = sum_over_ranks(own, staged, place, needs, rank, cap, columns, H, G)
                    if RESIDUAL:
                        total += tl.load(residual + cells(place, columns, H), mask=inside, other=0.0).to(tl.float32)
                    row = rounded(total, summed.dtype.element_ty, PROTOCOL)
                    tl.store(summed + cells(place, columns, H), row, mask=inside)
                    if NORM:
                        squares += row.to(tl.float32) * row.to(tl.float32)
                if NORM:
                    normalise(summed, normed, weight, place, squares, cap, epsilon, H, W, PROTOCOL)
    if sums:
        tl.store(epochs + block, epoch + steps)


def reduce_scatter(
    region: Region, slot: int, launch: Launch, partial: Tensor, token_of_place: Tensor, spread: int, cap: int,
    residual: Tensor | None, norm: Norm | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """partial: [T, H]; token_of_place: rank p's [C] at p * spread; residual: [C, H].

    Returns (summed, normed), each [C, H]; without `norm` the same tensor.
    """
    hidden = partial.shape[1]
    summed = partial.new_empty(cap, hidden)
    normed = summed if norm is None else torch.empty_like(summed)
    staged = region.view(f"pushed{slot}", partial.dtype, region.num_ranks * cap, hidden)
    srs_kernel[(launch.grid,)](
        partial, token_of_place, summed if residual is None else residual,
        summed if norm is None else norm.weight, summed, normed, staged,
        region.bases, region.flags, region.epochs, region.failures, region.offsets[f"pushed{slot}"],
        region.rank, cap, spread, launch.tiles, launch.steps(cap), CODES["reduce_scatter"], region.timeout,
        0.0 if norm is None else norm.epsilon,
        H=hidden, W=launch.width, N=launch.rows, G=region.num_ranks, SPLIT=launch.split,
        RESIDUAL=residual is not None, NORM=norm is not None, PROTOCOL=region.protocol, num_warps=launch.warps,
        maxnreg=launch.registers(region.processors),
    )  # fmt: skip
    return summed, normed
