"""One layer of a model and of its regrouped copy on the same input: do they choose the same experts, and agree?

Axes: B sequences, S positions, T = B * S tokens, K experts a token, E experts, H hidden.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from smoe_profiles.capture.points import CapturePoint, router_logits
from smoe_profiles.capture.recorder import Recorder
from smoe_profiles.families.config import TOKEN_HASH

TOLERANCE = 1e-5
"""Largest accepted difference, of the largest magnitude: summation order differs after a permutation."""


@dataclass(frozen=True)
class LayerReport:
    """One MoE layer: tokens whose experts differ, tokens excused as ties, largest output difference of the scale."""

    layer: int
    tokens: int
    mismatches: int
    ties: int
    max_error: float

    @property
    def passed(self) -> bool:
        return not self.mismatches and self.max_error <= TOLERANCE


def layer_failures(layers: list[LayerReport]) -> list[str]:
    """One line a layer that did not pass."""
    return [
        f"layer {layer.layer}: {layer.mismatches} tokens choose other experts, outputs differ by {layer.max_error:.1e}"
        for layer in layers
        if not layer.passed
    ]


@dataclass
class RoutingReport:
    """MoE layers, and the logits at the end of both streams (tokens after a tie are left out, and counted).

    excused: [B, S], tokens that a tie has touched. logits_excused, logit_max_error: None where no pass went to its end.
    generated: tokens of each continuation by greedy decoding; 0: none.
    """

    layers: list[LayerReport] = field(default_factory=list)
    logit_tokens: int = 0
    logits_excused: int | None = None
    logit_max_error: float | None = None
    generated: int = 0
    generated_differ: int = 0
    excused: Tensor | None = None

    @property
    def passed(self) -> bool:
        return not self.failures()

    def failures(self) -> list[str]:
        """What differs, one line each; the logits and the text only where no layer explains them."""
        failures = layer_failures(self.layers)
        if failures:
            return failures
        if self.logit_max_error is not None and not self.logit_max_error <= TOLERANCE:
            failures.append(f"logits differ by {self.logit_max_error:.1e} of their scale")
        if self.generated_differ:
            failures.append(f"greedy decoding gives other text within {self.generated} tokens")
        return failures

    def add(self, report: LayerReport, ties: Tensor, shape: torch.Size) -> None:
        """One layer's report; what follows a tie is excused from here on. ties: [T]; shape: [B, S]."""
        self.layers.append(report)
        touched = ties.reshape(shape).cumsum(dim=1) > 0
        self.excused = touched if self.excused is None else self.excused | touched

    def compare_logits(self, wanted: Tensor, given: Tensor) -> None:
        """wanted, given: [B, S, V]."""
        excused = self.excused if self.excused is not None else torch.zeros(wanted.shape[:2], dtype=torch.bool)
        difference = (wanted - given).abs().amax(dim=-1) / wanted.abs().max()
        self.logit_tokens, self.logits_excused = excused.numel(), int(excused.sum())
        self.logit_max_error = float(difference[~excused].max()) if (~excused).any() else 0.0


@dataclass(frozen=True)
class Choice:
    """What a layer did. ids: [T, K] experts; logits: [T, E] of its router; output: [B, S, H]."""

    ids: Tensor
    logits: Tensor
    output: Tensor


class _EndOfPass(BaseException):
    """The last layer that is wanted has run; no handler of a model's own may take it."""


@contextmanager
def stopping_after(layer: nn.Module) -> Iterator[None]:
    """A forward pass within ends behind this layer; what it would have returned is never made."""

    def stop(*_: Any) -> None:
        raise _EndOfPass

    handle = layer.register_forward_hook(stop)
    with suppress(_EndOfPass):
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def watched(point: CapturePoint) -> Iterator[list[Tensor]]:
    """Record one call of a layer: afterwards the list holds its expert ids [T, K] and its router's logits [T, E]."""
    seen: list[Tensor] = []
    inputs: dict[str, Tensor] = {}
    owner = point.family.router_in_memory()[0].rpartition(".")[0]
    places = (owner, owner.rpartition(".")[0])  # some routers use the weight of a module within that is never called
    with ExitStack() as hooks, Recorder([point]) as recorder:
        for place in places:
            hook = partial(_note_input, inputs, place)
            module = point.decoder_layer.get_submodule(place)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield seen
        seen.append(recorder.take().ids.long())
        given = next(inputs[place] for place in places if place in inputs)
        seen.append(router_logits(point, given.float().flatten(0, -2)))


def _note_input(
    inputs: dict[str, Tensor], place: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    inputs[place] = next(iter([*args, *kwargs.values()]))


def hidden_of(output: Any) -> Tensor:
    """The hidden states in what a decoder layer returned."""
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value


def compare_layer(
    point: CapturePoint, one: Choice, other: Choice, map_row: npt.NDArray[np.int64]
) -> tuple[LayerReport, Tensor]:
    """A layer's report and its ties [T]. point: the source's; map_row: [E], the source's expert in each slot."""
    layer = point.layer
    tail = np.arange(len(map_row), len(map_row) + layer.num_zero_experts)
    logical = torch.from_numpy(np.concatenate([map_row, tail]))[other.ids]
    differ = (one.ids.sort(dim=1).values != logical.sort(dim=1).values).any(dim=1)
    ties = torch.zeros_like(differ)
    if layer.rule != TOKEN_HASH:
        biases = _selection_rows(point)
        for row in differ.nonzero()[:, 0]:
            ties[row] = _is_tie(one.ids[row], logical[row], one.logits[row], biases)
    error = (other.output - one.output).abs().reshape(len(differ), -1).amax(dim=1) / one.output.abs().max()
    report = LayerReport(
        layer=layer.id,
        tokens=len(differ),
        mismatches=int((differ & ~ties).sum()),
        ties=int(ties.sum()),
        max_error=float(error[~ties].max()) if (~ties).any() else 0.0,
    )
    return report, ties


def _selection_rows(point: CapturePoint) -> list[Tensor]:
    """The router's tensors besides its weight, one value an expert each."""
    state = dict(point.decoder_layer.named_parameters()) | dict(point.decoder_layer.named_buffers())
    names = point.family.router_in_memory()[1:]
    return [state[name].detach().reshape(-1) for name in names if name in state]


def _is_tie(one: Tensor, other: Tensor, logits: Tensor, biases: list[Tensor]) -> bool:
    """Whether two choices differ only among experts of equal logits, within rounding, and of equal biases."""
    odd = torch.tensor(sorted(set(one.tolist()) ^ set(other.tolist())))
    if odd.max() >= len(logits):  # a zero expert has no logit here
        return False
    equal = logits[odd].max() - logits[odd].min() <= TOLERANCE * logits.abs().max()
    return bool(equal) and all(bool((bias[odd] == bias[odd[0]]).all()) for bias in biases)
