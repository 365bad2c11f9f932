"""A shuffle inside SGLang's layers, and counters at its dispatchers. Experimental: written from descriptions of SGLang
0.5.23 and tested against stand-ins of its interfaces; it has not been run inside the engine.

Between attention and experts a layer hands its rows to a boundary that scatters them over the attention's ranks, and
after the experts to one that gathers them: `ffn_boundary.prepare` and `.finish`, in older releases
`layer_communicator.prepare_mlp` and `.postprocess_layer`. All take hidden states, residual and a batch with `input_ids`
first and return hidden states and residual. Rows are reordered before the one and put back after the other.

Only where the layer gathers its rows again before the next attention, with one token a row: two-batch overlap, padding
rows of CUDA graphs and layers whose rows stay scattered are not handled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smoe_cli.runtime.counters import LayerCounters
from smoe_cli.runtime.hooks.shuffled import Planner, ShuffledRows
from smoe_cli.runtime.slots import Slots

BOUNDARIES = (("ffn_boundary", "prepare", "finish"), ("layer_communicator", "prepare_mlp", "postprocess_layer"))
"""Where a decoder layer keeps its boundary, and the methods that scatter and gather, newest first."""


@dataclass
class SglangShuffle:
    """Wrapped boundaries of MoE layers until `remove`. planner: see `shuffled`."""

    planner: Planner
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def install(self, number: int, layer: Any) -> None:
        """layer: a decoder layer, the number-th. Raises ValueError if it has no boundary that is known."""
        for place, scatter, gather in BOUNDARIES:
            boundary = getattr(layer, place, None)
            if boundary is not None and hasattr(boundary, scatter):
                rows = ShuffledRows(self.planner)
                self._replace(boundary, scatter, _before(getattr(boundary, scatter), rows, number))
                self._replace(boundary, gather, _after(getattr(boundary, gather), rows))
                return
        raise ValueError(f"{type(layer).__name__} has none of {', '.join(place for place, *_ in BOUNDARIES)}")

    def remove(self) -> None:
        """Leave the engine as it was."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, boundary: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(boundary, name, method)  # shadows the class's method on this one object
        self._undo.append(lambda: delattr(boundary, name))


Moved = tuple[Tensor, Tensor | None]


def _before(scatter: Callable[..., Moved], rows: ShuffledRows, number: int) -> Callable[..., Moved]:
    def prepare(hidden_states: Tensor, residual: Tensor | None, batch: Any, *more: Any, **named: Any) -> Moved:
        rows.plan(number, batch.input_ids)
        kept = None if residual is None else rows.leave(residual)
        return scatter(rows.leave(hidden_states), kept, batch, *more, **named)

    return prepare


def _after(gather: Callable[..., Moved], rows: ShuffledRows) -> Callable[..., Moved]:
    def finish(hidden_states: Tensor, residual: Tensor | None, batch: Any, *more: Any, **named: Any) -> Moved:
        hidden, kept = gather(hidden_states, residual, batch, *more, **named)
        tokens = len(batch.input_ids)
        back = None if kept is None else rows.come_back(kept)[:tokens]
        return rows.come_back(hidden)[:tokens], back

    return finish


def count_dispatch(dispatcher: Any, slots: Slots, counters: LayerCounters, rank: int) -> Any:
    """Count what a dispatcher sends, as our layers do. Returns the engine's handle, whose `remove` ends it.

    Rows of padding (-1) are left out.
    """

    def count(_dispatcher: Any, _hidden_states: Tensor, topk_output: Any) -> None:
        experts = topk_output.topk_ids
        here = (experts >= 0).all(dim=1)
        counters.add_routing(slots.serve(torch.where(here[:, None], experts, 0), rank), here, rank, dispatched=True)

    return dispatcher.register_pre_dispatch_hook(count)
