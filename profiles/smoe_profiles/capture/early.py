"""The early gate: what each layer's router says of the layer's input, before attention.

Axes: T tokens of a forward, E experts, M candidates kept, H hidden, D features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from smoe_profiles.capture.points import CapturePoint, router_input, router_logits


@dataclass(frozen=True)
class LayerView:
    """One layer before its attention. inputs: [T, H] the router's input made of the layer's; logits, truth: [T, E].

    logits are the router's on `inputs`, truth the router's on what it really received; float32.
    """

    inputs: Tensor
    logits: Tensor
    truth: Tensor


@dataclass(frozen=True)
class EarlyView:
    """One forward's layers."""

    layers: list[LayerView]

    def candidates(self, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The best `kept[i]` experts of each layer by falling early logit, ties by id: [T, sum of M] int16 and f16."""
        best = [view.logits.sort(dim=-1, descending=True, stable=True) for view in self.layers]
        ids = [order[:, :count].to(torch.int16) for (_, order), count in zip(best, kept, strict=True)]
        logits = [values[:, :count].half() for (values, _), count in zip(best, kept, strict=True)]
        return torch.cat(ids, dim=1), torch.cat(logits, dim=1)


@dataclass
class EarlyGateHooks:
    """Hooks on each layer's input and on the norm (or block) before its router; they listen while `asked` is set."""

    points: Sequence[CapturePoint]
    asked: bool = False
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _middles: dict[int, Tensor] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        for number, point in enumerate(self.points):
            first = (*point.family.before_router, point.family.memory_block)[0]
            entry = point.decoder_layer.get_submodule(first)
            for module, into in ((point.decoder_layer, self._inputs), (entry, self._middles)):
                hook = self._keep(number, into)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keep(self, number: int, into: dict[int, Tensor]) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.asked:
                into[number] = next(iter([*args, *kwargs.values()])).detach()

        return keep

    def take(self) -> EarlyView:
        """The last forward's view; then forget. Nothing waits for the device here."""
        listening, self.asked = self.asked, False  # the norms run again below
        layers = []
        for number, point in enumerate(self.points):
            early = router_input(point, self._inputs[number])
            truth = router_input(point, self._middles[number])
            layers.append(LayerView(early, router_logits(point, early), router_logits(point, truth)))
        self.asked = listening
        self._inputs.clear()
        self._middles.clear()
        return EarlyView(layers)
