"""Attention-DP's request router: each request goes to the rank with most of its experts, and stays there.

Axes: L MoE layers, V vocabulary, G ranks. G consecutive requests make a round, in which every rank takes one; the same
rule as `smoe_solvers.requests.route`.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class RequestRouter:
    """scores: [V + 1, G] int64, the token table summed over layers; its last row is popularity, for unknown ids.

    ranks: where each live request is; taken: the ranks that had one in this round.
    """

    scores: Tensor
    ranks: dict[Hashable, int] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    @classmethod
    def of_tables(cls, token: Tensor) -> "RequestRouter":
        """token: [L, V + 1, G] uint8, as `RuntimeTables` has it."""
        return cls(token.sum(dim=0, dtype=torch.int64))

    def rank(self, request: Hashable, prompt: Tensor) -> int:
        """The request's rank: the one it has, else the best for its prompt that is free in this round, ties to the
        lower. prompt: [n] token ids.
        """
        if request not in self.ranks:
            wishes = self.scores[prompt.long().clamp(max=len(self.scores) - 1)].sum(dim=0)
            free = [rank for rank in range(len(wishes)) if rank not in self.taken]
            best = max(free, key=lambda rank: (int(wishes[rank]), -rank))
            self.ranks[request] = best
            self.taken = self.taken | {best} if len(free) > 1 else set()
        return self.ranks[request]

    def finish(self, request: Hashable) -> None:
        """Forget a request."""
        del self.ranks[request]
