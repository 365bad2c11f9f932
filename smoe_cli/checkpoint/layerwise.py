"""Run a model and its regrouped copy side by side in float32, one decoder layer of each in memory at a time.

Axes: B sequences, S positions, T = B * S tokens, K experts a token, H hidden.

Each layer of both is run on the same input, so that a fault shows in the layer that has it; the copy's own stream runs
beside it down to the logits, unless only some layers are asked for. The source drives the pass, so masks and rotary
embeddings are whatever its class makes.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from smoe_cli.checkpoint.comparison import Choice, RoutingReport, compare_layer, hidden_of, stopping_after, watched
from smoe_profiles.capture.loading import LOCAL
from smoe_profiles.capture.points import capture_points
from smoe_profiles.errors import ImpossibleError
from smoe_profiles.families.config import ModelSpec, MoeLayer
from smoe_profiles.models import Model, disk_names
from smoe_profiles.tensors import Shard, TensorInfo, as_float32

BYTES_ONLY = "smoe verify --tensors-only proves its tensors; without --layers a model that fits in memory is run whole."
"""What is left for a model that cannot be run so."""


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

    @contextmanager
    def streamed(self) -> Iterator[nn.Module]:
        """The module with its embedding, whose decoder layers fill themselves when called and are empty again after.

        A hook put on a layer's end must be prepended to see it filled. Raises ImpossibleError for a model that needs
        more than this to run.
        """
        try:
            self.fill("model.embed_tokens")
            for index, layer in enumerate(self.layers):
                layer.register_forward_pre_hook(partial(self._fill_layer, index))
                layer.register_forward_hook(_empty)
            yield self.module
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ImpossibleError(
                f"{type(self.module).__name__} cannot be run layer by layer ({reason}). {BYTES_ONLY}"
            ) from error

    def _fill_layer(self, index: int, *_: Any) -> None:
        self.fill(f"model.layers.{index}")

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

    def check_names(self) -> None:
        """Raises ImpossibleError, before a value is read, for a tensor of the decoder that the files do not hold."""
        for part in ("model.embed_tokens", "model.layers", "model.norm"):
            for key in self.module.get_submodule(part).state_dict():
                for names in self._on_disk(f"{part}.{key}"):
                    for name in names:
                        self._place(name)

    def _value(self, name: str) -> torch.Tensor:
        """A parameter by its name in memory."""
        found = self._on_disk(name)
        if len(found) == 1:
            return self._read(found[0][0])
        return torch.stack([torch.cat([self._read(part) for part in parts]) for parts in found])

    def _on_disk(self, name: str) -> list[list[str]]:
        """The tensor that a parameter is, or for fused experts each one's projections, to be joined and stacked."""
        for layer in self.spec.layers:
            inside = f"model.layers.{layer.id}."
            if name.startswith(f"{inside}{self.spec.family.memory_block}."):
                return self._in_block(layer, name.removeprefix(inside))
        return [[name]]

    def _in_block(self, layer: MoeLayer, path: str) -> list[list[str]]:
        family, names = self.spec.family, self.disk.router_names(layer.id)
        if path in family.router_in_memory():
            return [[names[family.router_in_memory().index(path)]]]
        block = self.disk.block.format(layer=layer.id)
        inner = path.removeprefix(f"{family.memory_block}.")
        if f"{block}.{inner}" in self.tensors or not self.disk.parts:
            return [[f"{block}.{inner}"]]
        *first, down = (f"{block}.experts.{{}}.{part}" for part in self.disk.parts)
        fused = {"experts.gate_up_proj": first, "experts.up_proj": first, "experts.down_proj": [down]}
        if inner in fused:
            return [[part.format(expert) for part in fused[inner]] for expert in range(layer.num_experts)]
        return [[f"{block}.{inner}"]]

    def _read(self, name: str) -> torch.Tensor:
        shard, tensor = self._place(name)
        return torch.from_numpy(as_float32(tensor, shard.read(tensor)).copy())

    def _place(self, name: str) -> tuple[Shard, TensorInfo]:
        if name not in self.tensors:
            raise ImpossibleError(
                f"the checkpoint has no tensor {name}, which its class needs; a model whose tensors transformers "
                f"renames as it loads them cannot be run layer by layer. {BYTES_ONLY}"
            )
        found: tuple[Shard, TensorInfo] = self.tensors[name]
        return found


def _empty(layer: nn.Module, *_: Any) -> None:
    layer.to("meta")


@dataclass
class _Comparison:
    """The pass in progress of a source that is streamed, and its choice in the layer that runs.

    logical_of: the map's row [E] of each MoE layer to compare. hidden: [B, S, H], the copy's own hidden states; None:
    it has no pass of its own, and of the copy only the layers to compare are loaded.
    """

    source: LayerLoader
    copy: LayerLoader
    logical_of: dict[int, npt.NDArray[np.int64]]
    progress: Callable[[int], None]
    hidden: torch.Tensor | None = None
    report: RoutingReport = field(default_factory=RoutingReport)
    _seen: list[torch.Tensor] = field(default_factory=list)
    _watching: ExitStack = field(default_factory=ExitStack)

    def run(self, tokens: torch.Tensor) -> None:
        """Every layer, and the logits. tokens: [B, S]."""
        self.hidden = self.copy.fill("model.embed_tokens")(tokens)
        self.source.fill("model.norm")
        wanted = self.source.fill_head()(self._run_source(tokens))
        given = self.copy.fill_head()(self.copy.fill("model.norm")(self.hidden))
        self.report.compare_logits(wanted, given)

    def run_some(self, tokens: torch.Tensor) -> None:
        """The layers to compare alone, and in the source those before them."""
        with stopping_after(self.source.layers[max(self.logical_of)]):
            self._run_source(tokens)

    def _run_source(self, tokens: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.source.layers):
            after = partial(self.after, index)
            layer.register_forward_pre_hook(partial(self.before, index))
            layer.register_forward_hook(after, prepend=True, with_kwargs=True)
        last: torch.Tensor = self.source.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return last

    def before(self, index: int, *_: Any) -> None:
        if index in self.logical_of:
            self._seen = self._watching.enter_context(watched(self.source.points[index]))

    def after(self, index: int, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._watching.close()
        if index in self.logical_of or self.hidden is not None:
            twin = self.copy.fill(f"model.layers.{index}")
            if index in self.logical_of:
                self._compare(index, hidden_of(output), lambda: hidden_of(twin(*args, **kwargs)))
            if self.hidden is not None:
                self.hidden = hidden_of(twin(self.hidden, *args[1:], **kwargs))
            twin.to("meta")
        self.progress(1)

    def _compare(self, index: int, wanted: torch.Tensor, run_twin: Callable[[], torch.Tensor]) -> None:
        with watched(self.copy.points[index]) as seen:
            given = run_twin()
        one, other = Choice(self._seen[0], self._seen[1], wanted), Choice(seen[0], seen[1], given)
        report, ties = compare_layer(self.source.points[index], one, other, self.logical_of[index])
        self.report.add(report, ties, given.shape[:2])


def compare_routing(
    source: Model,
    copy: Model,
    physical_to_logical: npt.NDArray[np.int64],
    input_ids: npt.NDArray[np.int64],
    progress: Callable[[int], None],
    only: Collection[int] | None = None,
) -> RoutingReport:
    """Routing, layer outputs and logits of a model and its regrouped copy on the same prompts.

    physical_to_logical: [L, E]; input_ids: [B, S]; progress(1) after each decoder layer. only: the MoE layers to
    compare, by decoder number; nothing behind the last of them is run, so there are no logits.
    """
    one, two = LayerLoader(source), LayerLoader(copy)
    rows = zip(source.spec.layers, physical_to_logical, strict=True)
    logical_of = {layer.id: row for layer, row in rows if only is None or layer.id in only}
    comparison = _Comparison(one, two, logical_of, progress)
    with torch.inference_mode(), one.streamed():
        if only is None:
            comparison.run(torch.from_numpy(input_ids))
        else:
            comparison.run_some(torch.from_numpy(input_ids))
    return comparison.report
