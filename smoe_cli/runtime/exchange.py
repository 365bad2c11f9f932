"""What the ranks of an expert-parallel layer exchange, as one interface with several implementations.

Axes: T tokens of a batch, G ranks, H hidden size, K experts a token, C = ceil(T / G) rows of a rank. Row i of rank r
has the global place r * C + i. A home row is a token's row on the rank that a plan gave it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Where the T tokens of a batch lie after a shuffle; the same on every rank.

    token_of_place: [G * C] int32, -1 where no row lies; place_of_token: [T] int32, its inverse.
    """

    token_of_place: Tensor
    place_of_token: Tensor
    num_ranks: int

    @property
    def rows_per_rank(self) -> int:
        """C."""
        return len(self.token_of_place) // self.num_ranks


@dataclass(frozen=True)
class Norm:
    """What follows the residual sum: RMS normalisation with these weights [H]."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class Routed:
    """A rank's home rows and what its router chose. rows: [C, H]; experts: [C, K] int32, physical slots;
    weights: [C, K] float32; needs: [C] int32, bit g set where rank g serves one of the row's experts (0: no row).
    """

    rows: Tensor
    experts: Tensor
    weights: Tensor
    needs: Tensor


@dataclass(frozen=True)
class Received:
    """Rows that need this rank, addressed by place. rows: [G * C, H], written only where the rank's bit is set in
    needs [G * C]; experts, weights: [G * C, K] as routed.
    """

    rows: Tensor
    experts: Tensor
    weights: Tensor
    needs: Tensor


class Exchange(Protocol):
    """The collectives of a layer. All ranks call the same ones in the same order with the same T.

    Sums are fp32, in rank order 0 .. G-1, rounded once; so every implementation gives the same bits. What `dispatch`
    returns holds until `combine`, what `all_gather` returns until the next `all_gather`: copy what must last longer.
    """

    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None

    def reduce_scatter(
        self, partial: Tensor, plan: Plan, residual: Tensor | None = None, norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """SRS. partial: [T, H], this rank's share of the sum; residual: [C, H], this rank's home rows before.

        Returns (summed, normed), each [C, H]: home rows plus residual, and those after `norm` (without it the same
        tensor). Places without a token are zero.
        """
        ...

    def scatter(self, rows: Tensor, plan: Plan) -> Tensor:
        """This rank's home rows of a tensor that every rank has. rows: [T, ...]. Returns [C, ...], zero where empty."""
        ...

    def all_gather(self, rows: Tensor, plan: Plan, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """SAG. rows: [C, H] home rows; labels: [C] uint8, one byte a row that travels along.

        Returns ([T, H], [T] uint8 or None) in token order, on every rank.
        """
        ...

    def dispatch(self, routed: Routed) -> Received:
        """Every home row once to each rank whose bit is set in its needs."""
        ...

    def combine(self, parts: Tensor, routed: Routed) -> Tensor:
        """parts: [G * C, H], this rank's weighted sum over its experts for each row it received, by place.

        Returns [C, H]: each home row's sum over the ranks it needed, in rank order.
        """
        ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks of [T, H], on every rank."""
        ...
