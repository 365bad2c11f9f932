"""A transformers model run by G ranks: its own embedding, attention, cache and norms; the reductions and experts ours.

Axes: B sequences, S positions, T = B * S tokens, H hidden size, V vocabulary, G ranks.

The model is built without weights, each rank fills in its share, and every decoder layer is replaced by one that puts
the sum over heads, and what follows it, in our hands; everything around the layers stays the library's.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smoe_cli.runtime.counters import LayerCounters
from smoe_cli.runtime.early import EarlyGate
from smoe_cli.runtime.exchange import Exchange, Norm, Plan
from smoe_cli.runtime.experts import LocalExperts
from smoe_cli.runtime.layer import ExpertLayer, Mode, Router
from smoe_cli.runtime.loading import Share, Weights, empty_model, load_experts, load_share
from smoe_cli.runtime.shuffle import Shuffle
from smoe_cli.runtime.slots import Slots, slot_bounds

Finish = Callable[[Tensor], Tensor]
"""From this rank's share of a layer's attention output, [T, H], to the residual stream after the layer, [T, H]."""

Begin = Callable[[Tensor], Finish]
"""What is done before the attention, with the residual stream before the layer, [T, H]; gives what is done after it."""


class ParallelLayer(nn.Module):
    """A decoder layer: `begin`, attention over this rank's heads, and what `begin` gave to finish with."""

    def __init__(self, layer: Any, begin: Begin) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn, self.begin = layer.input_layernorm, layer.self_attn, begin

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        finish = self.begin(hidden_states.flatten(0, 1))
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        return finish(attended.flatten(0, 1)).view_as(hidden_states)


@dataclass
class ParallelModel:
    """A rank's part of a model. model: the library's, its layers replaced; layers: the expert layers by decoder layer;
    bytes_read: from the checkpoint by this rank; capacity: under `dp-ep`, the most tokens that any rank has now.
    """

    model: Any
    exchange: Exchange
    mode: Mode
    shuffle: Shuffle
    layers: dict[int, ExpertLayer] = field(default_factory=dict)
    bytes_read: int = 0
    capacity: int = 0

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, cache: Any = None, *, last: bool = True) -> tuple[Tensor, Any]:
        """token_ids: [B, S], the same on every rank; cache: what the call before returned.

        Returns logits [B, S, V], with `last` of the last position alone, [B, 1, V], and the cache.
        """
        self.shuffle.begin(token_ids, fresh=cache is None)
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        found = self.model(input_ids=token_ids, use_cache=True, logits_to_keep=int(last), **{name: cache})
        return found.logits, found[name]

    def forward_own(self, token_ids: Tensor, cache: Any, capacity: int) -> tuple[Tensor | None, Any]:
        """`dp-ep`: as `forward` for this rank's own request [1, S]. All ranks call it together, those without a token
        too ([1, 0], answered by None); capacity: the most tokens that any has.
        """
        self.capacity = capacity
        if token_ids.numel():
            return self.forward(token_ids, cache)
        weight = self.model.get_input_embeddings().weight
        for layer in self.layers.values():
            layer.run_own(weight.new_empty(0, weight.shape[1]), capacity)
        return None, cache

    def begin_experts(self, number: int, residual: Tensor) -> Finish:
        """A decoder layer with experts."""
        if self.mode is Mode.DP_EP:
            return partial(self._finish_own, number, residual)
        mode = self.shuffle.mode_for(self.mode, len(residual))
        layer = self.layers[number]
        with layer.counters.stage("plan", residual):
            planned = self.shuffle.begin_plan(number, mode, residual, layer)
        return partial(self._finish_experts, number, mode, residual, planned)

    def begin_dense(self, norm: nn.Module, mlp: nn.Module, residual: Tensor) -> Finish:
        """A decoder layer with a dense part, whose width is shared like the heads."""
        return partial(self._finish_dense, norm, mlp, residual)

    def _finish_experts(
        self, number: int, mode: Mode, residual: Tensor, planned: Callable[[], Plan], attended: Tensor
    ) -> Tensor:
        layer = self.layers[number]
        with layer.counters.stage("plan", residual):
            plan = planned()
        rows, labels = layer.run(mode, attended, residual, plan)
        self.shuffle.learn(labels)
        return rows

    def _finish_own(self, number: int, residual: Tensor, attended: Tensor) -> Tensor:
        return self.layers[number].run_own(residual + attended, self.capacity)

    def _finish_dense(self, norm: nn.Module, mlp: nn.Module, residual: Tensor, attended: Tensor) -> Tensor:
        if self.mode is Mode.DP_EP:
            summed = residual + attended
            own: Tensor = mlp(norm(summed))
            return summed + own
        summed = residual.clone()  # what was gathered holds until the next gather, which may be in here
        summed += self.exchange.all_reduce(attended)
        return summed + self.exchange.all_reduce(mlp(norm(summed)))


def load_model(
    folder: Path,
    mode: Mode,
    shuffle: Shuffle,
    *,
    dtype: torch.dtype,
    device: torch.device,
    counted: bool = False,
) -> ParallelModel:
    """This rank's part of the model in a folder, run through the shuffle's exchange. counted: with counters.

    Raises what `loading` raises, and InputError for tables of another model.
    """
    from transformers.activations import ACT2FN

    model: Any = empty_model(folder, dtype)
    weights, exchange = Weights(folder), shuffle.exchange
    decoder = model.model.layers
    held = {number: layer.mlp.experts.num_experts for number, layer in enumerate(decoder) if _sparse(layer)}
    shuffle.check(held)
    for number in held:
        del decoder[number].mlp.experts
    load_share(model, weights, Share() if mode is Mode.DP_EP else Share(exchange.rank, exchange.num_ranks), device)
    loaded = ParallelModel(model, exchange, mode, shuffle)
    if mode is Mode.SPECULATIVE and shuffle.needs_gate:
        routers = {number: decoder[number].mlp.gate.weight for number in held}
        shuffle.gate = EarlyGate.of_model(routers, model.get_input_embeddings().weight)
    for number, layer in enumerate(decoder):
        if number in held:
            slots, in_slot = shuffle.slots(number, held[number], device)
            start, stop = slot_bounds(len(in_slot), exchange.num_ranks)[exchange.rank : exchange.rank + 2]
            stacks = load_experts(weights, model.config.model_type, number, in_slot[start:stop], dtype, device)
            experts = LocalExperts(*stacks, start, ACT2FN[model.config.hidden_act])
            loaded.layers[number] = _expert_layer(layer, exchange, slots, experts, LayerCounters(enabled=counted))
            begin: Begin = partial(loaded.begin_experts, number)
        else:
            begin = partial(loaded.begin_dense, layer.post_attention_layernorm, layer.mlp)
        decoder[number] = ParallelLayer(layer, begin)
    loaded.bytes_read = weights.bytes_read
    return loaded


def _sparse(layer: Any) -> bool:
    return hasattr(layer.mlp, "experts")


def _expert_layer(
    layer: Any, exchange: Exchange, slots: Slots, experts: LocalExperts, counters: LayerCounters
) -> ExpertLayer:
    """Our layer with the norm, router and shared experts of the model's."""
    norm, shared = layer.post_attention_layernorm, getattr(layer.mlp, "shared_experts", None)
    return ExpertLayer(
        exchange, Norm(norm.weight, norm.variance_epsilon), _router(layer.mlp.gate), slots, experts, shared, counters
    )


def _router(gate: nn.Module) -> Router:
    """The model's own router, its answer in our order."""

    def route(rows: Tensor) -> tuple[Tensor, Tensor]:
        _, weights, experts = gate(rows)
        return experts, weights

    return route
