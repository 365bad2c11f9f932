"""A shuffle inside vLLM's sequence-parallel MoE layers. Experimental: written from a description of vLLM 0.33 and
tested against stand-ins of its interfaces; it has not been run inside the engine.

With `use_sequence_parallel_moe`, a decoder layer of the model's module (`vllm.model_executor.models.deepseek_v2`) pads
its rows to the tensor-parallel size, calls `tensor_model_parallel_reduce_scatter` on the attention output and
`sequence_parallel_chunk` on the residual, and the next layer `tensor_model_parallel_all_gather`, then trims. Rows are
reordered around these three calls, so that the reduce-scatter sends each row to its planned home. Where attention was
all-reduced already (`Qwen3MoeSparseMoeBlock`), the chunk alone is called, and a shuffle only selects rows.

Not for CUDA graphs (a plan is new tensors every step), pipeline parallelism, LoRA or speculative drafts, all of which
rely on the order of rows; batches smaller than the tensor-parallel size are left alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from smoe_cli.runtime.hooks.shuffled import Planner, ShuffledRows

SCATTERS = ("tensor_model_parallel_reduce_scatter", "sequence_parallel_chunk")
GATHER = "tensor_model_parallel_all_gather"


@dataclass
class VllmShuffle:
    """Hooks on one model until `remove`. module: where the model's class is defined; planner: see `shuffled`;
    num_ranks: the tensor-parallel size.
    """

    module: ModuleType
    planner: Planner
    num_ranks: int
    rows: ShuffledRows = field(init=False)
    token_ids: Tensor | None = None
    layer: int | None = None
    _undo: list[Callable[[], Any]] = field(default_factory=list)

    def install(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """model: called with input_ids; layers: its MoE decoder layers by number, dense ones as nn.Identity."""
        self.rows = ShuffledRows(self.planner)
        self._undo.append(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        for number, layer in enumerate(layers):
            if not isinstance(layer, nn.Identity):
                self._undo.append(layer.register_forward_pre_hook(self._enter(number)).remove)
        for name in SCATTERS:
            self._wrap(name, lambda original: lambda rows, *more, **named: original(self._leave(rows), *more, **named))
        self._wrap(GATHER, lambda original: lambda rows, *more, **named: self._back(original(rows, *more, **named)))

    def remove(self) -> None:
        """Leave the engine as it was."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, name: str, around: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        original = getattr(self.module, name, None)
        if original is not None:
            setattr(self.module, name, around(original))
            self._undo.append(lambda: setattr(self.module, name, original))

    def _begin(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.token_ids = ids.flatten() if isinstance(ids, torch.Tensor) and len(ids) >= self.num_ranks else None
        self.layer, self.rows.order = None, None

    def _enter(self, number: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self.layer = number

        return enter

    def _leave(self, rows: Tensor) -> Tensor:
        """The first scatter of a layer makes its plan; the layer before has gathered its rows by then."""
        if self.token_ids is None:
            return rows
        if self.layer is not None:
            self.rows.plan(self.layer, self.token_ids)
            self.layer = None
        return rows if self.rows.order is None else self.rows.leave(rows)

    def _back(self, rows: Tensor) -> Tensor:
        return rows if self.rows.order is None else self.rows.come_back(rows)
