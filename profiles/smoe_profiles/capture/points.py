"""Where a model's routing is read: one point a MoE layer, found by path from the family's row.

Axes: B sequences, S positions, T = B * S tokens, E experts, Z zero experts, K experts a token, H hidden.

The choice is taken where the model acts on it, never rebuilt from router logits where that can be helped, so group
limits, selection biases and normalisation are whatever the model really did.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from smoe_profiles.errors import ImpossibleError
from smoe_profiles.families.config import ModelSpec, MoeLayer
from smoe_profiles.families.schema import Family, Point


@dataclass(frozen=True)
class CapturePoint:
    """Where one MoE layer's routing is read.

    decoder_layer: its first input is what the early gate sees.
    watched: the module whose call shows the choice; its input or output, as `family.point` says.
    """

    layer: MoeLayer
    family: Family
    decoder_layer: nn.Module
    watched: nn.Module

    @property
    def point(self) -> Point:
        """EXPERTS_INPUT wants a forward pre-hook (with kwargs), ROUTER_OUTPUT a forward hook."""
        return self.family.point


def capture_points(model: nn.Module, spec: ModelSpec) -> list[CapturePoint]:
    """The capture point of every MoE layer, in layer order, by the decoder's own layer numbers.

    Raises ImpossibleError if a layer has no such module (another architecture than the family's row says).
    """
    family = spec.family
    if hasattr(model, "_orig_mod"):
        raise ImpossibleError(
            "the model is compiled, and hooks on a compiled model may never run; record it uncompiled."
        )
    points = []
    for layer in spec.layers:
        path = f"{family.layers}.{layer.id}"
        watched = f"{path}.{family.in_memory(family.watched)}"
        points.append(CapturePoint(layer, family, _module(model, path), _module(model, watched)))
    return points


def _module(model: nn.Module, path: str) -> nn.Module:
    base: Any = model.base_model
    try:
        found: nn.Module = base.get_submodule(path)
    except AttributeError as error:
        raise ImpossibleError(f"{type(model).__name__} has no {path}; this transformers is not supported.") from error
    return found


def read_choice(
    point: CapturePoint, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
) -> tuple[Tensor, Tensor]:
    """What one call of the watched module shows, as the model used it: ids [T, K] integer, weights [T, K] floating.

    args, kwargs: the call's inputs; output: what it returned (unused at the experts' input).
    A zero expert's id is at least E. Raises ImpossibleError if the call does not show K experts a token.
    """
    ids, weights = _chosen(point, output) if point.point is Point.ROUTER_OUTPUT else _handed_over(args, kwargs)
    if ids is None or weights is None or ids.shape != weights.shape or ids.shape[-1] != point.layer.top_k:
        raise ImpossibleError(
            f"layer {point.layer.id}: {type(point.watched).__name__} does not show {point.layer.top_k} experts a "
            f"token ({[None if found is None else list(found.shape) for found in (ids, weights)]}); this transformers "
            "is not supported."
        )
    ids, weights = ids.reshape(-1, point.layer.top_k), weights.reshape(-1, point.layer.top_k)
    if point.family.zero_by_weight:
        ids = torch.where(weights == 0, point.layer.num_experts, ids)
    return ids, weights


def _handed_over(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """The first integer and the first floating tensor behind the hidden states, whatever their names and order."""
    inputs = [value.detach() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)][1:]
    ids = next((value for value in inputs if not value.is_floating_point()), None)
    weights = next((value for value in inputs if value.is_floating_point()), None)
    return ids, weights


def _chosen(point: CapturePoint, output: Any) -> tuple[Tensor | None, Tensor | None]:
    """The top-k of a router's logits [T, E], and weights made of the chosen logits alone."""
    logits: Tensor = output[point.family.logits_at] if isinstance(output, tuple) else output
    top, ids = logits.detach().float().topk(point.layer.top_k, dim=-1)
    return ids, top.softmax(dim=-1) if point.family.weigh == "softmax" else top.sigmoid()


def router_input(point: CapturePoint, hidden: Tensor) -> Tensor:
    """What the router would be given if the layer had no attention: [T, width] float32.

    hidden: the decoder layer's first input, [B, S, H] ([B, S, streams, H] or [B, S, streams * H] where a model keeps
    several). It passes the norm that stands before the router.
    """
    family, layer = point.family, point.decoder_layer
    for path in family.before_router:
        module = layer.get_submodule(path)
        found = module(hidden.to(next((weight.dtype for weight in module.parameters()), hidden.dtype)))
        hidden = found[family.hidden_at] if isinstance(found, tuple) else found
    if family.router_scale:
        hidden = hidden * layer.get_parameter(family.router_scale) * hidden.shape[-1] ** -0.5
    return hidden.float().reshape(-1, hidden.shape[-1])


def router_logits(point: CapturePoint, inputs: Tensor) -> Tensor:
    """The router's logits [T, E] float32 of its inputs [T, width]; no selection bias, no columns of zero experts."""
    family, layer = point.family, point.decoder_layer
    weight = layer.get_parameter(family.router_in_memory()[0])
    if weight.is_meta:
        raise ImpossibleError("the early gate needs the routers in memory; this device map keeps them on disk.")
    bias = layer.get_parameter(family.in_memory(family.router_bias)).float() if family.router_bias else None
    return functional.linear(inputs, weight.float(), bias)[:, : point.layer.num_experts]
