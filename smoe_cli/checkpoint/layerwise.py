"""Run a model and its regrouped copy side by side in float32, one decoder layer of each in memory at a time.

Axes: B sequences, S positions, T = B * S tokens, K experts a token, H hidden.

Each layer of both is run on the same input, so that a fault shows in the layer that has it; the copy's own stream runs
beside it down to the logits. The source drives the pass, so masks and rotary embeddings are whatever its class makes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from smoe_profiles.capture.points import capture_points
from smoe_profiles.capture.recorder import Recorder
from smoe_profiles.errors import ImpossibleError
from smoe_profiles.families.config import ModelSpec, MoeLayer
from smoe_profiles.models import Model, disk_names
from smoe_profiles.tensors import Shard, TensorInfo, as_float32

TOLERANCE = 1e-5
"""Largest accepted difference, of the largest magnitude: summation order differs after a permutation."""
BYTES_ONLY = "smoe verify --tensors-only proves its tensors."


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


@dataclass
class RoutingReport:
    """All MoE layers, and the logits at the end of both streams (tokens after a tie are left out, and counted)."""

    layers: list[LayerReport] = field(default_factory=list)
    logit_tokens: int = 0
    logits_excused: int = 0
    logit_max_error: float = 0.0

    @property
    def passed(self) -> bool:
        return self.logit_max_error <= TOLERANCE and all(layer.passed for layer in self.layers)


class LayerLoader:
    """A model on the meta device whose parts are filled from its files, in float32, and emptied again."""

    def __init__(self, model: Model) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model.local_folder(), local_files_only=True).get_text_config()
        config.dtype = torch.float32
        with torch.device("meta"):
            self.module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
        self.spec: ModelSpec = model.spec
        self.tensors = model.files().by_name()
        self.disk = disk_names(model, self.tensors)
        self.points = {point.layer.id: point for point in capture_points(self.module, model.spec)}
        base = self.module.base_model
        if not all(hasattr(base, part) for part in ("embed_tokens", "layers", "norm")):
            raise ImpossibleError(f"{type(base).__name__} cannot be run layer by layer. {BYTES_ONLY}")
        self.layers: nn.ModuleList = base.layers
        for name, part in list(self.module.named_modules()):
            if (
                any(buffer.is_meta for buffer in part.buffers(recurse=False))
                and "RotaryEmbedding" in type(part).__name__
            ):
                self.module.set_submodule(name, type(part)(config=config))

    def fill(self, name: str) -> nn.Module:
        """Load one sub-module by its name in memory. Raises ImpossibleError for a tensor the files do not hold."""
        part: nn.Module = self.module.get_submodule(name)
        state = {key: self._value(f"{name}.{key}") for key in part.state_dict()}
        part.load_state_dict(state, assign=True)
        return part

    def fill_head(self) -> nn.Module:
        """Load the output head, or the input embedding it is tied to."""
        head: nn.Module = self.module.get_submodule("lm_head")
        tied = "lm_head.weight" not in self.tensors
        weight = self._value(self.disk.embedding if tied else "lm_head.weight")
        head.load_state_dict({"weight": weight}, assign=True)
        return head

    def router(self, layer: MoeLayer) -> torch.Tensor:
        """A layer's router weights, [E, H]."""
        return self._read(self.disk.router_names(layer.id)[0])

    def _value(self, name: str) -> torch.Tensor:
        """A parameter by its name in memory."""
        for layer in self.spec.layers:
            inside = f"model.layers.{layer.id}."
            if name.startswith(f"{inside}{self.spec.family.memory_block}."):
                return self._in_block(layer, name.removeprefix(inside))
        return self._read(name)

    def _in_block(self, layer: MoeLayer, path: str) -> torch.Tensor:
        """A parameter of an MoE block; fused experts are stacked from one tensor an expert and projection."""
        family, names = self.spec.family, self.disk.router_names(layer.id)
        if path in family.router_in_memory():
            return self._read(names[family.router_in_memory().index(path)])
        block = self.disk.block.format(layer=layer.id)
        inner = path.removeprefix(f"{family.memory_block}.")
        *first, down = (f"{block}.experts.{{}}.{part}" for part in self.disk.parts)
        if inner in ("experts.gate_up_proj", "experts.up_proj"):
            experts = [[self._read(part.format(e)) for part in first] for e in range(layer.num_experts)]
            return torch.stack([torch.cat(parts) for parts in experts])
        if inner == "experts.down_proj":
            return torch.stack([self._read(down.format(e)) for e in range(layer.num_experts)])
        return self._read(f"{block}.{inner}")

    def _read(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise ImpossibleError(
                f"the checkpoint has no tensor {name}, which its class needs; a model whose tensors transformers "
                f"renames as it loads them cannot be run layer by layer. {BYTES_ONLY}"
            )
        shard: Shard
        tensor: TensorInfo
        shard, tensor = self.tensors[name]
        return torch.from_numpy(as_float32(tensor, shard.read(tensor)).copy())


@dataclass
class _Comparison:
    """The pass in progress: the copy's own hidden states [B, S, H], and which tokens [B, S] a tie has touched."""

    source: LayerLoader
    copy: LayerLoader
    logical_of: dict[int, npt.NDArray[np.int64]]
    progress: Callable[[int], None]
    hidden: torch.Tensor
    report: RoutingReport = field(default_factory=RoutingReport)
    excused: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    _recorder: Recorder | None = None

    def before(self, index: int) -> None:
        self.source.fill(f"model.layers.{index}")
        if index in self.logical_of:
            self._recorder = Recorder([self.source.points[index]])
            self._recorder.__enter__()

    def after(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        wanted = _hidden(output)
        chosen, inputs = None, None
        if self._recorder is not None:
            chosen, inputs = self._recorder.take().ids.long(), self._recorder.inputs(0)
            self._recorder.__exit__()
            self._recorder = None
        twin = self.copy.fill(f"model.layers.{index}")
        if chosen is not None and inputs is not None:
            with Recorder([self.copy.points[index]]) as recorder:
                given = _hidden(twin(args[0], *args[1:], **kwargs))
                physical = recorder.take().ids.long()
            logical = torch.from_numpy(self.logical_of[index])[physical]
            self._compare(index, chosen, logical, inputs, wanted, given)
        self.hidden = _hidden(twin(self.hidden, *args[1:], **kwargs))
        self.source.layers[index].to("meta")
        twin.to("meta")
        self.progress(1)

    def _compare(
        self,
        index: int,
        chosen: torch.Tensor,
        logical: torch.Tensor,
        inputs: torch.Tensor,
        wanted: torch.Tensor,
        given: torch.Tensor,
    ) -> None:
        """Same input, both layers. chosen, logical: [T, K] expert ids; inputs: [T, H] of the router."""
        layer = next(layer for layer in self.source.spec.layers if layer.id == index)
        differ = (chosen.sort(dim=1).values != logical.sort(dim=1).values).any(dim=1)
        ties = torch.zeros_like(differ)
        for row in differ.nonzero()[:, 0]:
            ties[row] = _is_tie(chosen[row], logical[row], inputs[row] @ self.source.router(layer).T)
        error = (given - wanted).abs().reshape(len(differ), -1).max(dim=1).values / wanted.abs().max()
        self.report.layers.append(
            LayerReport(
                layer=index,
                tokens=len(differ),
                mismatches=int((differ & ~ties).sum()),
                ties=int(ties.sum()),
                max_error=float(error[~ties].max()) if (~ties).any() else 0.0,
            )
        )
        touched = ties.reshape(wanted.shape[:2]).cumsum(dim=1) > 0
        self.excused = touched if self.excused is None else self.excused | touched


def _hidden(output: Any) -> torch.Tensor:
    value: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return value


def _is_tie(one: torch.Tensor, other: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether two choices of experts differ only among experts of equal logits, within rounding."""
    odd = torch.tensor(sorted(set(one.tolist()) ^ set(other.tolist())))
    return bool(logits[odd].max() - logits[odd].min() <= TOLERANCE * logits.abs().max())


def compare_routing(
    source: Model,
    copy: Model,
    physical_to_logical: npt.NDArray[np.int64],
    input_ids: npt.NDArray[np.int64],
    progress: Callable[[int], None],
) -> RoutingReport:
    """Routing, layer outputs and logits of a model and its regrouped copy on the same prompts.

    physical_to_logical: [L, E]; input_ids: [B, S]; progress(1) after each decoder layer.
    """
    logical_of = {layer.id: physical_to_logical[i] for i, layer in enumerate(source.spec.layers)}
    one, two = LayerLoader(source), LayerLoader(copy)
    tokens = torch.from_numpy(input_ids)
    one.fill("model.embed_tokens")
    with torch.inference_mode():
        comparison = _Comparison(one, two, logical_of, progress, hidden=two.fill("model.embed_tokens")(tokens))
    for index, layer in enumerate(one.layers):
        layer.register_forward_pre_hook(lambda _module, _args, i=index: comparison.before(i))
        layer.register_forward_hook(
            lambda _module, args, kwargs, output, i=index: comparison.after(i, args, kwargs, output), with_kwargs=True
        )
    one.fill("model.norm")
    with torch.inference_mode():
        try:
            last = one.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        except NotImplementedError as error:
            raise ImpossibleError(f"{type(one.module).__name__} cannot be run layer by layer ({error}).") from error
        wanted = one.fill_head()(last)
        given = two.fill_head()(two.fill("model.norm")(comparison.hidden))
    excused = comparison.excused if comparison.excused is not None else torch.zeros(wanted.shape[:2], dtype=torch.bool)
    difference = (wanted - given).abs().max(dim=-1).values / wanted.abs().max()
    report = comparison.report
    report.logit_tokens, report.logits_excused = excused.numel(), int(excused.sum())
    report.logit_max_error = float(difference[~excused].max()) if (~excused).any() else 0.0
    return report
