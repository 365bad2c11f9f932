"""The hook at the experts' input: which experts each token uses, and with what weight.

The ids are taken where the experts receive them, never rebuilt from router logits, so group limits, selection biases
and normalisation are whatever the model really did.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from smoe_profiles.errors import ImpossibleError
from smoe_profiles.families.config import ModelSpec


@dataclass
class Recorder:
    """Collects (ids, weights) of every MoE layer of one forward pass at a time.

    layer_modules: decoder layer id -> its experts module. Use as a context manager; `take()` after each forward.
    """

    layer_modules: dict[int, nn.Module]
    _captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        for layer, module in self.layer_modules.items():
            hook = self._hook(layer)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, layer: int) -> Any:
        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if layer in self._captured:
                raise RuntimeError(f"the experts of layer {layer} ran twice in one forward pass")
            tensors = [*args, *kwargs.values()]
            ids = next(value for value in tensors[1:] if not value.is_floating_point())
            weights = next(value for value in tensors[1:] if value.is_floating_point())
            self._captured[layer] = (ids.detach(), weights.detach())
            self._inputs[layer] = tensors[0].detach()

        return record

    def inputs(self, layer: int) -> torch.Tensor:
        """What the layer's experts (and its router) were given in the last forward, [T, H]."""
        hidden = self._inputs[layer]
        return hidden.reshape(-1, hidden.shape[-1])

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The last forward's ids [L, T, K] int64 and weights [L, T, K] float32 on the CPU, T = B * S; then forget.

        One copy for all layers. Raises RuntimeError if a layer's experts were never called.
        """
        missing = [layer for layer in self.layer_modules if layer not in self._captured]
        if missing:
            raise RuntimeError(f"the experts of layer {missing[0]} were never called; nothing was recorded there")
        pairs = [self._captured[layer] for layer in self.layer_modules]
        device = pairs[0][0].device
        ids = torch.stack([ids.to(device, torch.int32) for ids, _ in pairs]).cpu().long()
        weights = torch.stack([weights.to(device, torch.float32) for _, weights in pairs]).cpu()
        self._captured.clear()
        return ids, weights


def experts_modules(model: nn.Module, spec: ModelSpec) -> dict[int, nn.Module]:
    """The experts module of each MoE layer, by decoder layer id, found by path and checked.

    Raises ImpossibleError if a layer has no such module (another architecture than the family's row says).
    """
    base: Any = model.base_model
    found = {}
    for layer in spec.layers:
        try:
            module: nn.Module = base.layers[layer.id].get_submodule(f"{spec.family.memory_block}.experts")
        except (AttributeError, IndexError) as error:
            where = f"layers.{layer.id}.{spec.family.memory_block}.experts"
            raise ImpossibleError(
                f"{type(model).__name__} has no {where}; this transformers is not supported."
            ) from error
        found[layer.id] = module
    return found
