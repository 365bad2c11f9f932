"""Run a model and its regrouped copy as transformers loads them, both whole in memory, in float32.

Axes: B sequences, S positions, T = B * S tokens, K experts a token, E experts, H hidden.

Every family transformers can run is compared this way, under its own loading; each MoE layer of both is given the same
input, so that a fault shows in the layer that has it, and the copy's own pass is compared at the logits. A map has no
copy to load: the model is compared with itself, and a large one fills layer by layer.
"""

import copy
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from smoe_cli.checkpoint.comparison import (
    Choice,
    LayerReport,
    RoutingReport,
    compare_layer,
    hidden_of,
    stopping_after,
    watched,
)
from smoe_cli.checkpoint.layerwise import LayerLoader
from smoe_profiles.capture.loading import LoadOptions, load_model
from smoe_profiles.capture.points import CapturePoint, capture_points
from smoe_profiles.families.schema import Point
from smoe_profiles.models import Model

GENERATED = 64
PROMPT = 32
"""Tokens that greedy decoding starts from."""
FLOAT32 = LoadOptions(dtype="float32")
ROOM = 1.2
"""Memory needed for a run, of that for the weights."""


def fits_in_memory(model: Model, copies: int) -> bool:
    """Whether so many float32 copies of a model fit into what is free now."""
    values = sum(int(np.prod(tensor.shape)) for _, tensor in model.files())
    return values * 4 * copies * ROOM < available_memory()


def available_memory() -> int:
    """Bytes that can be had without swapping; where the system does not say, half of what there is."""
    path = Path("/proc/meminfo")
    if path.exists():
        line = next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def compare_loaded(
    source: Model,
    regrouped: Model,
    physical_to_logical: npt.NDArray[np.int64],
    input_ids: npt.NDArray[np.int64],
    progress: Callable[[int], None],
    *,
    generate: bool = True,
) -> RoutingReport:
    """Routing, layer outputs, logits and greedy continuations of both on the same prompts.

    physical_to_logical: [L, E]; input_ids: [B, S]; progress(1) after each MoE layer.
    """
    one, two = (load_model(model, FLOAT32) for model in (source, regrouped))
    report = RoutingReport()
    tokens = torch.from_numpy(input_ids)
    twins = capture_points(two, regrouped.spec)
    with ExitStack() as hooks, torch.inference_mode():
        for point, twin, row in zip(capture_points(one, source.spec), twins, physical_to_logical, strict=True):
            for handle in _compare_as_it_runs(point, twin, row, report, tokens.shape, progress):
                hooks.callback(handle.remove)
        wanted = _logits(one, tokens)
    with torch.inference_mode():
        report.compare_logits(wanted, _logits(two, tokens))
    if generate and not report.logits_excused:  # a tie may be the start of another text
        pairs = [(_continue(one, row), _continue(two, row)) for row in tokens[:1, :PROMPT]]
        report.generated = min(len(first) for first, _ in pairs)
        report.generated_differ = sum(int(not torch.equal(first, second)) for first, second in pairs)
    return report


def _compare_as_it_runs(
    point: CapturePoint,
    twin: CapturePoint,
    row: npt.NDArray[np.int64],
    report: RoutingReport,
    shape: torch.Size,
    progress: Callable[[int], None],
) -> Iterable[Any]:
    """Hooks that give the twin layer what the source's is given, and compare the two."""
    watching = ExitStack()
    seen: list[Tensor] = []

    def before(*_: Any) -> None:
        nonlocal seen
        seen = watching.enter_context(watched(point))

    def after(_module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        watching.close()
        with watched(twin) as given:
            answer = hidden_of(twin.decoder_layer(*args, **kwargs))
        one, other = Choice(seen[0], seen[1], hidden_of(output)), Choice(given[0], given[1], answer)
        found, ties = compare_layer(point, one, other, row)
        report.add(found, ties, shape)
        progress(1)

    yield point.decoder_layer.register_forward_pre_hook(before)
    yield point.decoder_layer.register_forward_hook(after, with_kwargs=True)


def _logits(model: Any, tokens: Tensor) -> Tensor:
    """[B, S, V] of one pass without a cache."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _continue(model: Any, prompt: Tensor) -> Tensor:
    """The tokens greedy decoding adds to a prompt [S], however the model says they end."""
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=GENERATED, do_sample=False, pad_token_id=0)  # type: ignore[no-untyped-call]
    ids = prompt[None]
    found: Tensor = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return found[0, len(prompt) :]


def compare_mapped(
    model: Model,
    physical_to_logical: npt.NDArray[np.int64],
    input_ids: npt.NDArray[np.int64],
    progress: Callable[[int], None],
    only: Collection[int] | None = None,
) -> list[LayerReport]:
    """A model whose experts lie in slots, reached through the map after routing, against the model itself.

    Loaded whole where memory allows, else one decoder layer at a time.

    physical_to_logical: [L, P]; input_ids: [B, S]; progress(1) after each MoE layer. only: the MoE layers to compare,
    by decoder number; nothing behind the last of them is run. Layers whose experts are not handed their ids (they run
    on every token) are not in the report.
    """
    whole = fits_in_memory(model, 1)
    reports: list[LayerReport] = []
    with ExitStack() as hooks, torch.inference_mode():
        loaded = load_model(model, FLOAT32) if whole else hooks.enter_context(LayerLoader(model).streamed())
        rows = zip(capture_points(loaded, model.spec), physical_to_logical, strict=True)
        chosen = [(point, row) for point, row in rows if only is None or point.layer.id in only]
        for point, row in chosen:
            if point.point is Point.EXPERTS_INPUT:
                hook = _mapped_hook(point, torch.from_numpy(row), reports, progress)
                hooks.callback(point.watched.register_forward_hook(hook, with_kwargs=True).remove)
        hooks.enter_context(stopping_after(chosen[-1][0].decoder_layer))
        _logits(loaded, torch.from_numpy(input_ids))
    return reports


def _mapped_hook(
    point: CapturePoint, slots: Tensor, reports: list[LayerReport], progress: Callable[[int], None]
) -> Callable[..., None]:
    experts = point.layer.num_experts
    first_slot = torch.empty(experts, dtype=torch.long)
    first_slot[slots.flip(0)] = torch.arange(len(slots)).flip(0)
    tail = torch.arange(len(slots), len(slots) + point.layer.num_zero_experts)
    mapped = torch.cat([first_slot, tail])

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        twin = copy.deepcopy(module)
        for parameter in twin.parameters():
            rows = parameter.shape[0]
            if point.family.disk[0].row_blocks and parameter.dim() == 2:
                rows = experts
            if rows in (experts, experts + point.layer.num_zero_experts):
                order = torch.cat([slots, torch.arange(experts, rows)])
                parameter.data = parameter.data.reshape(rows, -1)[order].reshape(-1, *parameter.shape[1:])
        for name in ("num_experts", "num_local_experts"):
            if getattr(twin, name, None) == experts:
                setattr(twin, name, len(slots))
        given = [_renumber(value, mapped) for value in args], {key: _renumber(v, mapped) for key, v in kwargs.items()}
        wanted, found = hidden_of(output), hidden_of(twin.forward(*given[0], **given[1]))
        error = (found - wanted).abs().max() / wanted.abs().max()
        reports.append(LayerReport(point.layer.id, wanted.shape[:-1].numel(), 0, 0, float(error)))
        progress(1)

    return after


def _renumber(value: Any, mapped: Tensor) -> Any:
    whole = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype is not torch.bool
    return mapped.to(value.dtype)[value.long()] if whole else value
