"""Dispatch without duplicates: each rank stores a home row once on every rank that needs it.

Axes: G ranks, H hidden size, K experts a row, C home rows of a rank. A row's place on the receiver is that of its home,
so that nothing is counted or agreed on beforehand and no buffer can run over.
"""

import triton
import triton.language as tl

from smoe_cli.runtime.barrier import meet
from smoe_cli.runtime.exchange import Routed
from smoe_cli.runtime.launch import Launch, power_of_two
from smoe_cli.runtime.region import CODES, Region
from smoe_cli.runtime.rows import address, cells


@triton.jit(do_not_specialize=["rows_at", "needs_at", "experts_at", "weights_at", "rank", "cap", "code", "timeout"])
def dispatch_kernel(
    rows, needs, experts, weights, bases, flags, epochs, failures, rows_at, needs_at, experts_at, weights_at,
    rank, cap, code, timeout,
    H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KW: tl.constexpr,
    PROTOCOL: tl.constexpr,
):  # fmt: skip
    """rows: [C, H]; needs: [C] int32; experts: [C, K] int32; weights: [C, K] fp32. Each region holds the same for
    G * C places at the bytes rows_at, needs_at, experts_at and weights_at; all but needs only where the bit is set.
    """
    chosen = tl.arange(0, KW)
    for first in range(tl.program_id(0).to(tl.int64) * N, cap, tl.num_programs(0) * N):
        place = first + tl.arange(0, N)
        there = place + rank * cap
        here = place < cap
        mask = tl.load(needs + place, mask=here, other=0)
        for start in range(0, H, W):
            columns = start + tl.arange(0, W)
            inside = (columns < H)[None, :]
            tile = tl.load(rows + cells(place, columns, H), mask=(mask != 0)[:, None] & inside)
            for step in tl.static_range(1, G + 1):
                peer = (rank + step) % G
                wanted = (((mask >> peer) & 1) != 0)[:, None]
                tl.store(address(bases, peer, rows_at, rows) + cells(there, columns, H), tile, mask=wanted & inside)
        pick = here[:, None] & (chosen < K)[None, :]
        expert = tl.load(experts + cells(place, chosen, K), mask=pick)
        weight = tl.load(weights + cells(place, chosen, K), mask=pick)
        for peer in tl.static_range(G):
            wanted = (((mask >> peer) & 1) != 0)[:, None] & pick
            tl.store(address(bases, peer, needs_at, needs) + there, mask, mask=here)
            tl.store(address(bases, peer, experts_at, experts) + cells(there, chosen, K), expert, mask=wanted)
            tl.store(address(bases, peer, weights_at, weights) + cells(there, chosen, K), weight, mask=wanted)
    meet(bases, flags, epochs, failures, rank, code, timeout, G, PROTOCOL)


def dispatch(region: Region, slot: int, launch: Launch, routed: Routed) -> None:
    """Fill `pushed`, `needs`, `experts` and `weights` of a slot on the ranks that the rows need."""
    cap, hidden = routed.rows.shape
    top_k = routed.experts.shape[1]
    dispatch_kernel[(launch.blocks,)](
        routed.rows, routed.needs, routed.experts, routed.weights,
        region.bases, region.flags, region.epochs, region.failures,
        *(region.offsets[f"{name}{slot}"] for name in ("pushed", "needs", "experts", "weights")),
        region.rank, cap, CODES["dispatch"], region.timeout,
        H=hidden, W=launch.width, N=launch.rows, G=region.num_ranks, K=top_k, KW=power_of_two(top_k),
        PROTOCOL=region.protocol, num_warps=launch.warps,
    )  # fmt: skip
