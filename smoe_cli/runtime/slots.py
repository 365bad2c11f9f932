"""Which slot serves each expert of a row, and so which ranks the row needs (docs/terms.md: served copy, n_g, label).

Axes: n rows, E experts as the router numbers them, P slots, G ranks, K experts a token.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

import torch
from torch import Tensor

from smoe_profiles.errors import ImpossibleError

MAX_RANKS = 32
"""Which ranks a row needs is told in the bits of an int32."""

MAX_RANKS_OF_COPIES = 10
"""Least covers are found among all 2^G sets of ranks."""


def slot_bounds(slots: int, num_ranks: int) -> list[int]:
    """Where each rank's run of slots begins, and the end: G + 1 numbers; the first P mod G ranks hold one more."""
    bounds = [0]
    for rank in range(num_ranks):
        bounds.append(bounds[-1] + slots // num_ranks + (rank < slots % num_ranks))
    return bounds


@dataclass(frozen=True)
class Served:
    """slots: [n, K] int32; counts: [n, G] int32 n_g, by served copies."""

    slots: Tensor
    counts: Tensor

    @property
    def needs(self) -> Tensor:
        """[n] int32, bit g set where n_g > 0."""
        ranks = torch.arange(self.counts.shape[1], device=self.counts.device, dtype=torch.int32)
        return ((self.counts > 0).int() << ranks).sum(dim=1, dtype=torch.int32)

    @property
    def labels(self) -> Tensor:
        """[n] uint8: the rank that serves most of a row's experts, ties to the lower."""
        return self.counts.argmax(dim=1).to(torch.uint8)


@dataclass(frozen=True)
class Slots:
    """slot_on_rank: [E, G] int32, the slot of the expert's copy on that rank, -1 where it has none."""

    slot_on_rank: Tensor

    @classmethod
    def of_map(cls, physical_to_logical: Tensor, num_ranks: int) -> "Slots":
        """The router yields logical numbers (layout `map`). physical_to_logical: [P].

        Raises ImpossibleError if rows cannot be served on so many ranks.
        """
        if num_ranks > MAX_RANKS:
            raise ImpossibleError(f"an expert-parallel layer runs on up to {MAX_RANKS} ranks here, not on {num_ranks}.")
        experts = physical_to_logical.long().cpu()
        bounds = slot_bounds(len(experts), num_ranks)
        found = torch.full((int(experts.max()) + 1, num_ranks), -1, dtype=torch.int32)
        for rank, (start, stop) in enumerate(pairwise(bounds)):
            found[experts[start:stop], rank] = torch.arange(start, stop, dtype=torch.int32)
        if len(experts) > len(found) and num_ranks > MAX_RANKS_OF_COPIES:
            raise ImpossibleError(
                f"experts have copies and there are {num_ranks} ranks; the run time serves copies on up to "
                f"{MAX_RANKS_OF_COPIES}. Place without --redundant."
            )
        return cls(found.to(physical_to_logical.device))

    @classmethod
    def identity(cls, num_experts: int, num_ranks: int, device: torch.device | str = "cpu") -> "Slots":
        """The router yields physical numbers (layout `checkpoint`), or nothing was placed."""
        return cls.of_map(torch.arange(num_experts, device=device), num_ranks)

    @property
    def num_ranks(self) -> int:
        return self.slot_on_rank.shape[1]

    def serve(self, experts: Tensor, home: int | None) -> Served:
        """experts: [n, K] what the router chose; home: the rank on which all these rows lie (None: on none).

        A copy on the home rank if there is one, the rest by the least set of other ranks that holds them all, of equal
        ones the first by their lowest ranks; there by the lowest.
        """
        ranks = torch.arange(self.num_ranks, device=experts.device)
        experts = experts.long()
        rank = self._cover(experts, home) if self._copied else self._rank[experts]
        slots = self.slot_on_rank[experts, rank]
        return Served(slots, (rank[:, :, None] == ranks).sum(dim=1, dtype=torch.int32))

    @cached_property
    def _copied(self) -> bool:
        return bool(((self.slot_on_rank >= 0).sum(dim=1) > 1).any())

    @cached_property
    def _rank(self) -> Tensor:
        """The first rank of every expert, [E] int64."""
        return (self.slot_on_rank >= 0).int().argmax(dim=1)

    @cached_property
    def _hosts(self) -> Tensor:
        """[E] int64, bit g set where rank g has a copy."""
        return ((self.slot_on_rank >= 0).long() << torch.arange(self.num_ranks, device=self.slot_on_rank.device)).sum(1)

    @cached_property
    def _covers(self) -> Tensor:
        """All sets of ranks as bit masks, small ones first, equal ones by their lowest ranks: [2^G] int64."""
        sizes = range(self.num_ranks + 1)
        sets = [sum(1 << rank for rank in one) for size in sizes for one in combinations(range(self.num_ranks), size)]
        return torch.tensor(sets, device=self.slot_on_rank.device)

    def _cover(self, experts: Tensor, home: int | None) -> Tensor:
        """The rank that serves each expert, [n, K]."""
        hosts = self._hosts[experts]
        if home is not None:
            hosts = torch.where((hosts >> home) & 1 > 0, 1 << home, hosts)
        at_home = 0 if home is None else 1 << home
        covered = ((hosts[:, :, None] & (self._covers | at_home)) != 0).all(dim=1)
        cover = self._covers[covered.int().argmax(dim=1)] | at_home
        ranks = torch.arange(self.num_ranks, device=experts.device)
        return (((hosts & cover[:, None])[:, :, None] >> ranks) & 1).argmax(dim=2)
