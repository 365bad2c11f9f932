"""Rows in the order of a plan around an engine's own reduce-scatter and all-gather.

Axes: T tokens, n >= T rows as the engine padded them, G ranks, C = ceil(T / G).

An engine gives rank r the r-th run of C rows. Reordered by a plan before that, its rows are the plan's home rows, and
put back after the gather, nobody else sees a difference.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smoe_cli.runtime.exchange import Plan

Planner = Callable[[int, Tensor], Plan]
"""From a decoder layer's number and the batch's token ids [T] to its plan."""


@dataclass
class ShuffledRows:
    """order: [G * C] the row for each place, of the layer that scattered last; tokens behind a number are padding."""

    planner: Planner
    order: Tensor | None = None

    def plan(self, layer: int, token_ids: Tensor) -> None:
        """Rows scattered from now on lie as this layer's plan says."""
        self.order = row_of_place(self.planner(layer, token_ids))

    def leave(self, rows: Tensor) -> Tensor:
        """Rows [n, ...] in token order to [G * C, ...] by place."""
        assert self.order is not None, "no layer has a plan yet"
        missing = len(self.order) - len(rows)
        if missing < 0:
            raise ValueError(f"{len(rows)} rows do not fit a plan of {len(self.order)} places")
        padding = rows.new_zeros(missing, *rows.shape[1:])
        return torch.cat([rows, padding]).index_select(0, self.order)

    def come_back(self, rows: Tensor) -> Tensor:
        """Rows [G * C, ...] by place to token order, padding last."""
        assert self.order is not None, "no layer has a plan yet"
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def row_of_place(plan: Plan) -> Tensor:
    """A permutation of G * C rows, int64: tokens where the plan has them, padding in its empty places."""
    order = plan.token_of_place.long()
    empty = order < 0
    padding = len(plan.place_of_token) - 1 + empty.cumsum(0)
    return torch.where(empty, padding, order)
