"""SAG: shuffle fused into all-gather. Each rank stores its home rows where their tokens stand, on every rank.

Axes: T tokens, G ranks, H hidden size, C = ceil(T / G) home rows of a rank.
"""

import triton
import triton.language as tl
from torch import Tensor

from smoe_cli.runtime.barrier import meet
from smoe_cli.runtime.exchange import Plan
from smoe_cli.runtime.launch import Launch
from smoe_cli.runtime.region import CODES, Region
from smoe_cli.runtime.rows import address, cells


@triton.jit(do_not_specialize=["gathered_at", "labels_at", "rank", "cap", "code", "timeout"])
def sag_kernel(
    rows, labels, token_of_place, bases, flags, epochs, failures, gathered_at, labels_at, rank, cap, code, timeout,
    H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, G: tl.constexpr, LABELS: tl.constexpr, PROTOCOL: tl.constexpr,
):  # fmt: skip
    """rows: [C, H]; labels: [C] uint8, if LABELS; token_of_place: [G * C]. Byte gathered_at of each region holds
    [T, H], labels_at [T] uint8. Tiles of N rows are read once and stored G times, W columns at a time.
    """
    for first in range(tl.program_id(0).to(tl.int64) * N, cap, tl.num_programs(0) * N):
        place = first + tl.arange(0, N)
        token = tl.load(token_of_place + rank * cap + place, mask=place < cap, other=-1)
        for start in range(0, H, W):
            columns = start + tl.arange(0, W)
            live = (token >= 0)[:, None] & (columns < H)[None, :]
            tile = tl.load(rows + cells(place, columns, H), mask=live)
            for step in tl.static_range(1, G + 1):
                peer = (rank + step) % G
                tl.store(address(bases, peer, gathered_at, rows) + cells(token, columns, H), tile, mask=live)
        if LABELS:
            label = tl.load(labels + place, mask=token >= 0)
            for peer in tl.static_range(G):
                tl.store(address(bases, peer, labels_at, labels) + token, label, mask=token >= 0)
    meet(bases, flags, epochs, failures, rank, code, timeout, G, PROTOCOL)


def all_gather(region: Region, slot: int, launch: Launch, rows: Tensor, plan: Plan, labels: Tensor | None) -> None:
    """Fill `gathered` and `labels` of a slot on every rank. rows: [C, H]; labels: [C] uint8."""
    cap, hidden = rows.shape
    sag_kernel[(launch.blocks,)](
        rows, rows if labels is None else labels, plan.token_of_place,
        region.bases, region.flags, region.epochs, region.failures,
        region.offsets[f"gathered{slot}"], region.offsets[f"labels{slot}"],
        region.rank, cap, CODES["all_gather"], region.timeout,
        H=hidden, W=launch.width, N=launch.rows, G=region.num_ranks,
        LABELS=labels is not None, PROTOCOL=region.protocol, num_warps=launch.warps,
    )  # fmt: skip
