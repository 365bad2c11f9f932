"""What is known of a token before a layer's attention: the router's answer to the layer's input, and features.

Axes: B sequences, S positions, n rows of them, H hidden size, E experts, V vocabulary, R recent tokens, P width of the
router's input and Q of an embedding after projection, D = P + E + R * Q + 1 features.

The same as `smoe_profiles.capture.linear` records and `smoe_solvers.linear` fits: wide vectors pass a fixed random
projection, a token comes with the four before it, and the last feature is 1.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

INPUT_WIDTH, EMBEDDING_WIDTH = 512, 256
RECENT = 5


@cache
def projection(width: int, into: int, seed: int, device: torch.device) -> Tensor | None:
    """[width, into], or None where a vector is short enough as it is. Kept on the device: to bring it there in every
    layer would take longer than to use it, and no CUDA graph could.
    """
    if width <= into:
        return None
    drawn = np.random.default_rng(seed).standard_normal((width, into), np.float32)
    return torch.from_numpy(drawn / np.float32(np.sqrt(into))).to(device)


def project(rows: Tensor, into: int, seed: int) -> Tensor:
    """rows: [n, width] to at most `into` columns."""
    drawn = projection(rows.shape[1], into, seed, rows.device)
    return rows if drawn is None else rows @ drawn


@dataclass
class RecentTokens:
    """The tokens of running sequences with those before them. unknown: stands before the first.

    tail: [B, R - 1] the last ones so far.
    """

    unknown: int
    tail: Tensor | None = None

    def take(self, token_ids: Tensor, *, fresh: bool) -> Tensor:
        """Each token and the four before it, newest first: [B * S, R]. token_ids: [B, S]; fresh: sequences begin."""
        if fresh or self.tail is None:
            self.tail = token_ids.new_full((len(token_ids), RECENT - 1), self.unknown)
        together = torch.cat([self.tail, token_ids], dim=1)
        self.tail = together[:, together.shape[1] - RECENT + 1 :]
        return together.unfold(1, RECENT, 1).flip(-1).flatten(0, 1)


@dataclass(frozen=True)
class EarlyGate:
    """routers: decoder layer -> [E, H] router weights; embedding: [V + 1, Q] float16 as recorded, the last row zero."""

    routers: dict[int, Tensor]
    embedding: Tensor

    @classmethod
    def of_model(cls, routers: dict[int, Tensor], embedding: Tensor) -> "EarlyGate":
        """embedding: [V, H] the model's."""
        table = project(embedding.float(), EMBEDDING_WIDTH, 1).half()
        return cls(routers, torch.cat([table, torch.zeros_like(table[:1])]))

    def view(self, number: int, inputs: Tensor, recent: Tensor, logical: Tensor | None) -> tuple[Tensor, Tensor]:
        """Early logits [n, E], as the model numbers experts, and features [n, D], as the trace did, of a decoder layer.

        inputs: [n, H] the layer's input under the norm before the router; recent: [n, R]; logical: [E] where the model
        has each of the trace's experts, None for the same.
        """
        wide = inputs.float()
        logits = functional.linear(wide, self.routers[number].float())
        known = self.embedding[recent].flatten(1).float()
        ones = torch.ones_like(logits[:, :1])
        traced = logits if logical is None else logits[:, logical]
        return logits, torch.cat([project(wide, INPUT_WIDTH, 0), traced, known, ones], dim=1)
