"""Run a model and its regrouped copy side by side in float32, one decoder layer of each in memory at a time.

Axes: B sequences, S positions, T = B * S tokens, K experts a token, H hidden.

Each layer of both is run on the same input, so that a fault shows in the layer that has it; the copy's own stream runs
beside it down to the logits. The source drives the pass, so masks and rotary embeddings are whatever its class makes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from smoe_cli.checkpoint.comparison import Choice, RoutingReport, compare_layer, hidden_of, watched
from smoe_profiles.capture.loading import LOCAL
from smoe_profiles.capture.points import capture_points
from smoe_profiles.errors import ImpossibleError
from smoe_profiles.families.config import ModelSpec, MoeLayer
from smoe_profiles.models import Model, disk_names
from smoe_profiles.tensors import Shard, TensorInfo, as_float32

BYTES_ONLY = "smoe verify --tensors-only proves its tensors."


class LayerLoader:
    """A model on the meta device whose parts are filled from its files, in float32, and emptied again."""

    def __init__(self, model: Model) -> None:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model.local_folder(), **LOCAL)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or model.spec.family.nested:
            raise ImpossibleError(
                f"a model of {model.spec.family.model_type} cannot be run layer by layer. {BYTES_ONLY}"
            )
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
        if f"{block}.{inner}" in self.tensors or not self.disk.parts:
            return self._read(f"{block}.{inner}")
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
    """The pass in progress: the copy's own hidden states [B, S, H], and the source's choice in the layer that runs."""

    source: LayerLoader
    copy: LayerLoader
    logical_of: dict[int, npt.NDArray[np.int64]]
    progress: Callable[[int], None]
    hidden: torch.Tensor
    report: RoutingReport = field(default_factory=RoutingReport)
    _seen: list[torch.Tensor] = field(default_factory=list)
    _watching: ExitStack = field(default_factory=ExitStack)

    def before(self, index: int) -> None:
        self.source.fill(f"model.layers.{index}")
        if index in self.logical_of:
            self._seen = self._watching.enter_context(watched(self.source.points[index]))

    def after(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._watching.close()
        twin = self.copy.fill(f"model.layers.{index}")
        if index in self.logical_of:
            with watched(self.copy.points[index]) as seen:
                given = hidden_of(twin(*args, **kwargs))
            one = Choice(self._seen[0], self._seen[1], hidden_of(output))
            other = Choice(seen[0], seen[1], given)
            report, ties = compare_layer(self.source.points[index], one, other, self.logical_of[index])
            self.report.add(report, ties, given.shape[:2])
        self.hidden = hidden_of(twin(self.hidden, *args[1:], **kwargs))
        self.source.layers[index].to("meta")
        twin.to("meta")
        self.progress(1)


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
    one, two = LayerLoader(source), LayerLoader(copy)
    logical_of = {layer.id: physical_to_logical[i] for i, layer in enumerate(source.spec.layers)}
    try:
        with torch.inference_mode():
            return _run(one, two, logical_of, torch.from_numpy(input_ids), progress)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ImpossibleError(
            f"{type(one.module).__name__} cannot be run layer by layer ({reason}). {BYTES_ONLY}"
        ) from error


def _run(
    one: LayerLoader,
    two: LayerLoader,
    logical_of: dict[int, npt.NDArray[np.int64]],
    tokens: torch.Tensor,
    progress: Callable[[int], None],
) -> RoutingReport:
    one.fill("model.embed_tokens")
    comparison = _Comparison(one, two, logical_of, progress, hidden=two.fill("model.embed_tokens")(tokens))
    for index, layer in enumerate(one.layers):
        layer.register_forward_pre_hook(lambda _module, _args, i=index: comparison.before(i))
        layer.register_forward_hook(
            lambda _module, args, kwargs, output, i=index: comparison.after(i, args, kwargs, output), with_kwargs=True
        )
    one.fill("model.norm")
    last = one.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    wanted = one.fill_head()(last)
    given = two.fill_head()(two.fill("model.norm")(comparison.hidden))
    comparison.report.compare_logits(wanted, given)
    return comparison.report
