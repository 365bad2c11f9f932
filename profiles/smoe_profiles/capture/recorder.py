"""The hooks that record which experts each token uses, and with what weight, as the model itself runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from smoe_profiles.capture.early import EarlyGateHooks, EarlyView
from smoe_profiles.capture.points import CapturePoint, read_choice
from smoe_profiles.families.schema import Point


@dataclass(frozen=True)
class Captured:
    """One forward's choices, on their way to the CPU: each layer's K columns side by side, sorted by falling weight.

    ids: [T, sum of K] int16; weights: the same shape, float16; widths: K of each layer; ties go to the lower id.
    copied: what to wait for before reading either; None: nothing. early: what the early gate saw, where it was asked.
    """

    ids: Tensor
    weights: Tensor
    widths: tuple[int, ...]
    copied: torch.cuda.Event | None = None
    early: EarlyView | None = None

    def to_numpy(self, kept: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float16]]:
        """Ids and weights of the kept rows, [N, sum of K]. kept: [T]. Waits for the device."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.ids.numpy().view(np.uint16)[kept], self.weights.numpy()[kept]

    def by_layer(self, wide: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """[N, sum of K] as one [N, K] a layer."""
        return np.split(wide, np.cumsum(self.widths)[:-1], axis=1)


@dataclass
class Recorder:
    """Collects the choices of every MoE layer of one forward pass at a time.

    A context manager; `take()` after each forward. early: hooks of the early gate, listening where they are asked to.
    """

    points: Sequence[CapturePoint]
    early: EarlyGateHooks | None = None
    _captured: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        for number, point in enumerate(self.points):
            hook = self._hook(number, point)
            if point.point is Point.EXPERTS_INPUT:
                handle = point.watched.register_forward_pre_hook(hook, with_kwargs=True)
            else:
                handle = point.watched.register_forward_hook(hook, with_kwargs=True)
            self._handles.append(handle)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, number: int, point: CapturePoint) -> Any:
        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
            if number in self._captured:
                raise RuntimeError(f"the experts of layer {point.layer.id} ran twice in one forward pass")
            self._captured[number] = read_choice(point, args, kwargs, output)
            self._inputs[number] = next(iter([*args, *kwargs.values()])).detach()

        return record

    def inputs(self, number: int) -> Tensor:
        """What the watched module of points[number] was given in the last forward, [T, H]."""
        hidden = self._inputs[number]
        return hidden.reshape(-1, hidden.shape[-1])

    def take(self) -> Captured:
        """The last forward's choices, T = B * S; then forget. Nothing waits for the device here.

        Raises RuntimeError if a layer's experts were never called.
        """
        missing = [point.layer.id for number, point in enumerate(self.points) if number not in self._captured]
        if missing:
            raise RuntimeError(f"the experts of layer {missing[0]} were never called; nothing was recorded there")
        pairs = [self._captured[number] for number in range(len(self.points))]
        self._captured.clear()
        ids, weights = sort_layers(pairs)
        on_gpu = ids.is_cuda
        return Captured(
            ids.to("cpu", non_blocking=True),
            weights.to("cpu", non_blocking=True),
            tuple(ids.shape[-1] for ids, _ in pairs),
            torch.cuda.current_stream(ids.device).record_event() if on_gpu else None,
            self.early.take() if self.early and self.early.asked else None,
        )


def sort_layers(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Each layer's ids and weights [T, K] sorted by falling weight, ties by id; [T, sum of K] int16 and float16.

    Sorted here, so that bytes do not depend on a kernel's order; layers of one K go through the device together.
    """
    device = pairs[0][0].device
    columns: list[tuple[Tensor, Tensor]] = [pairs[0]] * len(pairs)
    widths = [ids.shape[-1] for ids, _ in pairs]
    for width in set(widths):
        numbers = [number for number, found in enumerate(widths) if found == width]
        ids = torch.stack([pairs[number][0].to(device) for number in numbers], dim=1)
        weights = torch.stack([pairs[number][1].to(device) for number in numbers], dim=1).float()
        by_id, order = ids.sort(dim=-1)
        by_weight, order = weights.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        ids, weights = by_id.gather(-1, order).to(torch.int16), by_weight.half()
        if len(numbers) == len(pairs):
            return ids.flatten(1), weights.flatten(1)
        for place, number in enumerate(numbers):
            columns[number] = ids[:, place], weights[:, place]
    return torch.cat([ids for ids, _ in columns], dim=1), torch.cat([weights for _, weights in columns], dim=1)
