"""Each layer's plan in one forward: which predictor is asked, what it is told, and when speculation is off.

Axes: T tokens in B sequences, G ranks, C = ceil(T / G), H hidden size, E experts, P slots.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from smoe_cli.runtime.aside import aside
from smoe_cli.runtime.collectives import gather_equal, rms_norm
from smoe_cli.runtime.early import EarlyGate, RecentTokens
from smoe_cli.runtime.exchange import Exchange, Plan
from smoe_cli.runtime.layer import ExpertLayer, Mode
from smoe_cli.runtime.plan import identity_plan, make_plan, plan_hash, rows_per_rank, take_scores
from smoe_cli.runtime.slots import Slots
from smoe_cli.runtime.tables import FUSED, LOOKED_UP, RuntimeTables, lookup, scores
from smoe_profiles.errors import InputError, MachineError

GATES = ("early-gate", "linear")
"""Predictors in floats: each rank scores a slice of the tokens, and scores are gathered, so that all have the same."""

SPECULATE_FROM, BELOW_THAT = 1024, Mode.REPLICATED
"""Tokens of a forward on GPUs from which a shuffle pays, and the mode of smaller ones. Between two H200s the exchanges
of a layer of 64 tokens take 11.7 us replicated and 20.0 us shuffled; at 1,024 the whole layer is faster shuffled."""

PREDICTORS = ("selected", "paper", "fused", *FUSED)


@dataclass
class Shuffle:
    """tables: of the placement, None without one; predictor: `selected` is each layer's own; below, instead: a forward
    of fewer tokens than that runs in the other mode; debug: compare every plan over the ranks.

    gate: what float predictors look at, set when the model is loaded. token_ids: [T] of this forward, recent: [T, R]
    with those before; labels: [T] uint8 of the MoE layers behind, the nearest first, at most two.
    """

    exchange: Exchange
    tables: RuntimeTables | None = None
    predictor: str = "selected"
    below: int = 0
    instead: Mode = BELOW_THAT
    debug: bool = False
    gate: EarlyGate | None = None
    token_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    recent: Tensor | None = None
    labels: list[Tensor] = field(default_factory=list)
    _history: RecentTokens | None = None

    def begin(self, token_ids: Tensor, *, fresh: bool) -> None:
        """A new forward. token_ids: [B, S]; fresh: its sequences begin here."""
        self.token_ids, self.labels = token_ids.flatten(), []
        if self.gate is not None:
            if self._history is None:
                self._history = RecentTokens(len(self.gate.embedding) - 1)
            self.recent = self._history.take(token_ids, fresh=fresh)

    def learn(self, labels: Tensor) -> None:
        """What a layer's all-gather brought along, [T] uint8: the context of the two MoE layers to come."""
        self.labels = [labels.clone(), *self.labels[:1]]  # an exchange uses its memory again

    def mode_for(self, mode: Mode, tokens: int) -> Mode:
        """The way in which a forward of T tokens is run when `mode` is asked for."""
        return self.instead if mode is Mode.SPECULATIVE and tokens < self.below else mode

    def begin_plan(self, number: int, mode: Mode, residual: Tensor, layer: ExpertLayer) -> Callable[[], Plan]:
        """Where the tokens of this forward go in a layer: begun before its attention, beside which it is made, because
        all that it needs is known by then. number: as the decoder has it; residual: [T, H] before the layer.

        Returns what waits for the plan.
        """
        if mode is not Mode.SPECULATIVE:
            plan = _unshuffled(len(residual), self.exchange.num_ranks, residual.device)
            return lambda: plan
        return aside(residual.device).begin(lambda: self._plan(number, residual, layer))

    def _plan(self, number: int, residual: Tensor, layer: ExpertLayer) -> Plan:
        table, index = self._wished(number, residual, layer)
        plan = make_plan(table, self.exchange.num_ranks, index)
        if layer.counters.enabled:
            layer.counters.add_plan(plan, take_scores(table, index), self.exchange.rank)
        if self.debug:
            _compare(plan, number, self.exchange.group)
        return plan

    def slots(self, number: int, num_experts: int, device: torch.device) -> tuple[Slots, list[int]]:
        """How a layer's choices are served, and which expert, as the checkpoint numbers them, each slot holds: [P]."""
        ranks = self.exchange.num_ranks
        if self.tables is None or self.tables.layout == "checkpoint":
            return Slots.identity(num_experts, ranks, device), list(range(num_experts))
        held = self.tables.physical_to_logical[self.tables.layer_index(number)]
        return Slots.of_map(held.to(device), ranks), held.tolist()

    def check(self, num_experts: Mapping[int, int]) -> None:
        """Raises InputError if the tables are of another model or number of ranks, or lack the predictor.

        num_experts: by decoder layer.
        """
        if self.tables is None:
            return
        if self.tables.num_ranks != self.exchange.num_ranks:
            raise InputError(
                f"the placement is for {self.tables.num_ranks} ranks, {self.exchange.num_ranks} run; use "
                f"torchrun --nproc-per-node {self.tables.num_ranks}."
            )
        held = int(self.tables.physical_to_logical.max()) + 1
        if tuple(num_experts) != self.tables.layer_ids or set(num_experts.values()) != {held}:
            raise InputError(
                f"the placement is for {held} experts in layers {list(self.tables.layer_ids)}; this model has "
                f"{sorted(set(num_experts.values()))} in {list(num_experts)}."
            )
        if self.predictor in GATES and self.tables.gates is None:
            raise InputError(
                f"the placement has no {self.predictor} predictor, because its trace was recorded without --early-gate."
            )

    @property
    def needs_gate(self) -> bool:
        """Whether some layer's predictor looks at the layer's input."""
        return self.tables is not None and any(map(self._in_floats, range(len(self.tables.layer_ids))))

    def _predictor(self, index: int) -> str:
        assert self.tables is not None
        return self.tables.predictor[index] if self.predictor == "selected" else self.predictor

    def _in_floats(self, index: int) -> bool:
        assert self.tables is not None
        predictor = self._predictor(index)
        mixed = zip(FUSED, self.tables.fusion[index], strict=True)
        return predictor in GATES or (predictor == "fused" and any(weight for part, weight in mixed if part in GATES))

    def _wished(self, number: int, residual: Tensor, layer: ExpertLayer) -> tuple[Tensor, Tensor | None]:
        """Scores of all tokens, [T, G] uint8, the same on every rank; or a table and each token's row in it."""
        assert self.tables is not None
        index, tokens = self.tables.layer_index(number), len(residual)
        predictor = self._predictor(index)
        one, two = [*self.labels, None, None][:2]
        if predictor in LOOKED_UP:
            return lookup(self.tables, index, predictor, self.token_ids, one, two)
        if not self._in_floats(index):
            return scores(self.tables, index, self.token_ids, one, two, predictor=predictor), None
        assert self.gate is not None
        assert self.recent is not None
        capacity = rows_per_rank(tokens, self.exchange.num_ranks)
        own = slice(self.exchange.rank * capacity, (self.exchange.rank + 1) * capacity)
        inputs = rms_norm(residual[own], layer.norm)
        logits, features = self.gate.view(number, inputs, self.recent[own], self._logical(index))
        found = scores(
            self.tables,
            index,
            self.token_ids[own],
            labels_one=None if one is None else one[own],
            labels_two=None if two is None else two[own],
            early_logits=logits,
            features=features,
            predictor=predictor,
        )
        padded = functional.pad(found, (0, 0, 0, capacity - len(found)))
        with layer.counters.stage("scores", residual):
            return gather_equal(padded, self.exchange.group)[:tokens], None

    def _logical(self, index: int) -> Tensor | None:
        """Where each expert's logit stands, [E]; None where the model numbers experts as the trace did."""
        assert self.tables is not None
        return None if self.tables.layout == "map" else self.tables.physical_to_logical[index].argsort()


def _unshuffled(tokens: int, num_ranks: int, device: torch.device) -> Plan:
    """The same in every layer, so made once; anew in a capture, whose memory is written only when its graph runs."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return identity_plan(tokens, num_ranks, device)
    return _kept_identity(tokens, num_ranks, device)


_kept_identity = lru_cache(maxsize=4)(identity_plan)


def _compare(plan: Plan, number: int, group: dist.ProcessGroup | None) -> None:
    """Raises MachineError if any rank has another plan."""
    found: list[int] = [0] * plan.num_ranks
    dist.all_gather_object(found, int(plan_hash(plan)), group)
    if len(set(found)) > 1:
        raise MachineError(f"the ranks made different plans for layer {number} (hashes {found}).")
