"""The experts of one rank: what they make of the rows that reached it, summed over them before anything is sent back.

Axes: n rows, P = G * C places of received rows, S slots of this rank, K experts a token, H hidden size, I expert width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from smoe_cli.runtime.exchange import Received

TILE = 8
"""Rows of one matrix product on the CPU. Its result for a row depends on how many rows come along, but not on which and
not on the row's place among them; so with a constant number the same row gives the same bits in any batch."""

FEW_ENTRIES = 4096
"""Up to this many (row, expert) entries all are taken along, wanted here or not; above it the host asks how many are.
"""


Made = TypeVar("Made", Tensor, tuple[Tensor, Tensor])


def in_tiles(function: Callable[[Tensor], Made], rows: Tensor) -> Made:
    """function(rows), on the CPU in tiles. function: [n, H] to [n, ...], or to two of them, row by row."""
    if rows.is_cuda or not len(rows):
        return function(rows)
    padded = functional.pad(rows, (0, 0, 0, -len(rows) % TILE))
    made = [function(tile) for tile in torch.split(padded, TILE)]
    if isinstance(made[0], Tensor):
        return torch.cat(made)[: len(rows)]
    first, second = (torch.cat(parts)[: len(rows)] for parts in zip(*made, strict=True))
    return first, second


@dataclass(frozen=True)
class LocalExperts:
    """gate_up: [S, 2 I, H]; down: [S, H, I]; first_slot: the rank's first; activation: of the gate."""

    gate_up: Tensor
    down: Tensor
    first_slot: int
    activation: Callable[[Tensor], Tensor] = functional.silu

    def __call__(self, received: Received, rank: int) -> Tensor:
        """Each row's weighted sum over its experts here, [P, H], zero where there are none; fp32 in the order of the
        row's experts, rounded once. rank: whose bit in needs says that a row is here.
        """
        slots, top_k = len(self.gate_up), received.experts.shape[1]
        local = received.experts - self.first_slot
        here = ((received.needs >> rank) & 1).bool()[:, None] & (local >= 0) & (local < slots)
        key = torch.where(here, local, slots).flatten()
        by_slot, entries = key.sort(stable=True)
        bounds = torch.arange(slots, device=key.device, dtype=key.dtype)
        ends = torch.searchsorted(by_slot, bounds, right=True, out_int32=True)
        capturing = received.rows.is_cuda and torch.cuda.is_current_stream_capturing()
        if slots and not capturing and len(entries) > FEW_ENTRIES:
            entries = entries[: int(ends[-1])]
        products = self._products(received.rows, entries // top_k, ends)
        position = torch.zeros_like(key, dtype=torch.int64).scatter_(
            0, entries, torch.arange(len(entries), device=key.device)
        )
        return _weighted_sum(products, position.view(-1, top_k), here, received.weights)

    def _products(self, rows: Tensor, picked: Tensor, ends: Tensor) -> Tensor:
        """Rows through their experts. picked: [m] row of each entry, by slot; ends: [S] where each slot's stop.

        Returns [m, H]; what lies behind the last end is not defined.
        """
        if not len(picked) or not len(self.gate_up):
            return rows.new_empty(0, rows.shape[1])
        if rows.is_cuda and rows.dtype is torch.bfloat16:
            gathered = rows.index_select(0, picked)
            inner = self._gated(torch._grouped_mm(gathered, self.gate_up.mT, offs=ends))
            return torch._grouped_mm(inner, self.down.mT, offs=ends)
        found = rows.new_zeros(len(picked), rows.shape[1])
        start = 0
        for slot, end in enumerate(ends.tolist()):
            if end > start:
                found[start:end] = in_tiles(partial(self._one, slot), rows[picked[start:end]])
            start = end
        return found

    def _one(self, slot: int, rows: Tensor) -> Tensor:
        inner = self._gated(functional.linear(rows, self.gate_up[slot]))
        return functional.linear(inner, self.down[slot])

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.activation(gate) * up


def _weighted_sum(products: Tensor, position: Tensor, here: Tensor, weights: Tensor) -> Tensor:
    """As `plain_sum`; on a GPU by its kernel."""
    if products.is_cuda:
        from smoe_cli.runtime.weighing import weighted_sum

        return weighted_sum(products, position, here, weights)
    return plain_sum(products, position, here, weights)


def plain_sum(products: Tensor, position: Tensor, here: Tensor, weights: Tensor) -> Tensor:
    """Each row's products weighed and added in the order of its entries, in fp32, rounded once; [P, H], zero for none.

    products: [m, H]; position: [P, K] where each entry's product lies; here: [P, K] whether it has one.
    """
    total = torch.zeros(len(position), products.shape[1], dtype=torch.float32, device=products.device)
    if len(products):
        for k in range(position.shape[1]):
            found = products.index_select(0, position[:, k]).float() * weights[:, k, None]
            total = torch.where(here[:, k, None], total + found, total)
    return total.to(products.dtype)
