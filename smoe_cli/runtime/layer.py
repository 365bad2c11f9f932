"""One mixture-of-experts layer over G ranks, run in the five ways of docs/terms.md, which differ in nothing else.

Axes: T tokens, G ranks, H hidden size, C = ceil(T / G) home rows of a rank, E experts, K experts a token.

A layer takes each rank's share of the attention output [T, H] and the residual stream [T, H] that every rank has, and
gives the residual stream after it to every rank. Under `dp-ep` each rank has rows of its own instead, and keeps them.
On the CPU all ways of running give the same bits where no expert has copies: sums go in rank order, and every other
step works on each row alone (`experts.in_tiles`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

from smoe_cli.runtime.collectives import rms_norm
from smoe_cli.runtime.counters import LayerCounters
from smoe_cli.runtime.exchange import Exchange, Norm, Plan, Received, Routed
from smoe_cli.runtime.experts import LocalExperts, in_tiles
from smoe_cli.runtime.slots import Served, Slots


class Mode(StrEnum):
    """How a layer is run (`--mode`): what stands before and after dispatch and combine."""

    SPECULATIVE = "speculative"
    SP_EP = "sp-ep"
    AR_EP = "ar-ep"
    DP_EP = "dp-ep"
    REPLICATED = "replicated"


Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Normed rows [n, H] to (experts [n, K], weights [n, K]), as the model's own router numbers experts."""


@dataclass(frozen=True)
class ExpertLayer:
    """What a rank has of a layer. shared: experts that serve every row, at its home; counters: what was sent."""

    exchange: Exchange
    norm: Norm
    router: Router
    slots: Slots
    experts: LocalExperts
    shared: Callable[[Tensor], Tensor] | None = None
    counters: LayerCounters = field(default_factory=LayerCounters)

    def run(self, mode: Mode, partial: Tensor, residual: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """partial, residual: [T, H]; plan: the identity but for `speculative`. Returns [T, H] and labels [T] uint8."""
        if mode is Mode.REPLICATED:
            return self._run_replicated(partial, residual, plan)
        summed, normed = self._reduce(mode, partial, residual, plan)
        start = self.exchange.rank * plan.rows_per_rank
        occupied = plan.token_of_place[start : start + plan.rows_per_rank] >= 0
        rows, labels = self.run_home(summed, normed, occupied)
        with self.counters.stage("all_gather", rows, (plan.num_ranks - 1) * len(rows)):
            gathered, known = self.exchange.all_gather(rows, plan, labels)
        assert known is not None
        return gathered, known

    def run_own(self, rows: Tensor, capacity: int) -> Tensor:
        """`dp-ep`: this rank's own rows [n, H] of the residual stream, after its attention; capacity: C, the most rows
        that any rank has. Returns [n, H].
        """
        summed = functional.pad(rows, (0, 0, 0, capacity - len(rows)))
        occupied = torch.arange(capacity, device=rows.device) < len(rows)
        return self.run_home(summed, rms_norm(summed, self.norm), occupied)[0][: len(rows)]

    def run_home(self, summed: Tensor, normed: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor]:
        """Router, dispatch, experts, combine. summed, normed: [C, H] home rows; occupied: [C] where there is one.

        Returns the residual stream after the layer, [C, H], and labels [C] uint8.
        """
        rank = self.exchange.rank
        with self.counters.stage("router", normed):
            served, weights = self._route(normed, rank)
            routed = Routed(normed, served.slots, weights, torch.where(occupied, served.needs, 0))
        self.counters.add_routing(served, occupied, rank, dispatched=True)
        with self.counters.stage("dispatch", normed):
            received = self.exchange.dispatch(routed)
        with self.counters.stage("experts", normed):
            parts = self.experts(received, rank)
        with self.counters.stage("combine", normed):
            mixed = self.exchange.combine(parts, routed)
        return self._finish(summed, normed, mixed), served.labels

    def _reduce(self, mode: Mode, partial: Tensor, residual: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Home rows of the residual stream after attention, and those normed, both [C, H]."""
        if mode is Mode.AR_EP:
            everywhere = residual.clone()  # what was gathered holds until the next gather, which may be in here
            everywhere += self._all_reduce(partial)
            normed = rms_norm(everywhere, self.norm)
            return self.exchange.scatter(everywhere, plan), self.exchange.scatter(normed, plan)
        before = self.exchange.scatter(residual, plan)
        with self.counters.stage("reduce_scatter", partial, (plan.num_ranks - 1) * plan.rows_per_rank):
            return self.exchange.reduce_scatter(partial, plan, before, self.norm)

    def _run_replicated(self, partial: Tensor, residual: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """All ranks route all rows, each adds what its own experts make of them, and the parts are summed."""
        rank = self.exchange.rank
        summed = self._all_reduce(partial) + residual
        normed = rms_norm(summed, self.norm)
        with self.counters.stage("router", normed):
            served, weights = self._route(normed, None)
        here = plan.place_of_token // max(plan.rows_per_rank, 1) == rank
        self.counters.add_routing(served, here, rank, dispatched=False)
        with self.counters.stage("experts", normed):
            parts = self.experts(Received(normed, served.slots, weights, served.needs), rank)
        return self._finish(summed, normed, self._all_reduce(parts)), served.labels

    def _all_reduce(self, partial: Tensor) -> Tensor:
        """Two trips of C rows from every rank to every other."""
        ranks = self.exchange.num_ranks
        with self.counters.stage("all_reduce", partial, 2 * (ranks - 1) * -(-len(partial) // ranks)):
            return self.exchange.all_reduce(partial)

    def _route(self, normed: Tensor, home: int | None) -> tuple[Served, Tensor]:
        experts, weights = in_tiles(self.router, normed)
        return self.slots.serve(experts, home), weights.float()

    def _finish(self, summed: Tensor, normed: Tensor, mixed: Tensor) -> Tensor:
        if self.shared is not None:
            with self.counters.stage("shared", normed):
                mixed = mixed + in_tiles(self.shared, normed)
        return summed + mixed
