"""Kernels that try one helper each. To be imported where the interpreter is on."""

import triton
import triton.language as tl

from smoe_cli.runtime.rows import cells, rounded


@triton.jit
def mark_row(base, index, H: tl.constexpr):
    """Store 7 in the first eight cells of row index[0]."""
    row = tl.load(index + tl.arange(0, 1))
    tl.store(base + cells(row, tl.arange(0, 8), H), tl.full([1, 8], 7, tl.int8))


@triton.jit
def convert(source, target, N: tl.constexpr, PROTOCOL: tl.constexpr):
    """float32 to bfloat16."""
    at = tl.arange(0, N)
    tl.store(target + at, rounded(tl.load(source + at), tl.bfloat16, PROTOCOL))
