"""The weighted sum of what a rank's experts made of a row, in one pass: products are found, weighed and added in order.

Axes: P rows, K experts a row, H hidden size, m products; a tile has N rows and W columns. The plain form, which gives
the same bits, is `experts.plain_sum`.
"""

import triton
import triton.language as tl
from torch import Tensor

from smoe_cli.runtime.barrier import ATOMICS, PTX
from smoe_cli.runtime.launch import power_of_two, tile_width
from smoe_cli.runtime.rows import cells, rounded

ELEMENTS, WARPS = 4096, 8
"""Of a tile, and of its block; not tuned."""


@triton.jit(do_not_specialize=["places"])
def weighing_kernel(
    products, position, here, weights, total, places,
    H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PROTOCOL: tl.constexpr,
):  # fmt: skip
    """products: [m, H]; position: [P, K] int64; here: [P, K] bool; weights: [P, K] fp32. Fills total, [P, H]."""
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    columns = tl.program_id(1) * W + tl.arange(0, W)
    inside = columns < H
    found = tl.zeros([N, W], tl.float32)
    for k in tl.static_range(K):
        entry = place * K + k
        there = tl.load(here + entry, mask=place < places, other=0) != 0
        row = tl.load(position + entry, mask=there, other=0)
        weight = tl.load(weights + entry, mask=there, other=0.0)
        product = tl.load(products + cells(row, columns, H), mask=there[:, None] & inside[None, :], other=0.0)
        found = tl.where(there[:, None], found + product.to(tl.float32) * weight[:, None], found)
    kept = (place < places)[:, None] & inside[None, :]
    tl.store(total + cells(place, columns, H), rounded(found, total.dtype.element_ty, PROTOCOL), mask=kept)


def weighted_sum(products: Tensor, position: Tensor, here: Tensor, weights: Tensor) -> Tensor:
    """As `experts.plain_sum`, in one launch. products: [m, H]; position: [P, K] int64; here, weights: [P, K]."""
    (places, top_k), hidden = position.shape, products.shape[1]
    total = products.new_empty(places, hidden)
    width = tile_width(hidden, ELEMENTS)
    rows = min(ELEMENTS // width, power_of_two(places))
    if total.numel():
        weighing_kernel[(triton.cdiv(places, rows), triton.cdiv(hidden, width))](
            products.contiguous(), position.contiguous(), here.contiguous(), weights.float().contiguous(), total,
            places, H=hidden, W=width, N=rows, K=top_k, PROTOCOL=(PTX if total.is_cuda else ATOMICS).value,
            num_warps=WARPS, enable_fp_fusion=False,  # a product is rounded before it is added, as in plain torch
        )  # fmt: skip
    return total
