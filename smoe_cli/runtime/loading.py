"""A rank's part of a Hugging Face folder: its heads, its experts, and what every rank has. Nothing else is read.

Axes: G ranks, S slots of a rank, H hidden size, I expert width.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from smoe_profiles.errors import ImpossibleError, InputError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Family:
    """How a model type names things on disk. block: the MoE block (in memory `mlp`); projections: an expert's gate, up
    and down.
    """

    block: str
    projections: tuple[str, str, str]


FAMILIES = {
    "deepseek_v2": Family("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": Family("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": Family("mlp", ("gate_proj", "up_proj", "down_proj")),
}

QUERY, KEY = "num_attention_heads", "num_key_value_heads"
ROWS, COLUMNS = 0, 1

CUTS: dict[str, tuple[int, str]] = {
    "self_attn.q_proj": (ROWS, QUERY),
    "self_attn.q_b_proj": (ROWS, QUERY),
    "self_attn.kv_b_proj": (ROWS, QUERY),
    "self_attn.k_proj": (ROWS, KEY),
    "self_attn.v_proj": (ROWS, KEY),
    "self_attn.o_proj": (COLUMNS, QUERY),
    "mlp.gate_proj": (ROWS, ""),
    "mlp.up_proj": (ROWS, ""),
    "mlp.down_proj": (COLUMNS, ""),
}
"""Tensor parallelism: the axis along which a linear module of a decoder layer is cut, and the config's heads that stay
whole ("": any row or column is its own). Every other module is whole on every rank."""


@dataclass(frozen=True)
class Share:
    """Which part of the heads and of a dense layer's width a rank has; (0, 1) is all of it."""

    rank: int = 0
    ranks: int = 1

    def of(self, parts: int) -> tuple[int, int]:
        """First and last + 1 of this rank's parts; of fewer parts than ranks, each is had by several ranks."""
        start = self.rank * parts // self.ranks
        return start, max((self.rank + 1) * parts // self.ranks, start + 1)

    def check_heads(self, config: Any) -> None:
        """Raises ImpossibleError if the heads cannot be shared equally."""
        heads, keys = getattr(config, QUERY), getattr(config, KEY)
        if heads % self.ranks or (keys % self.ranks and self.ranks % keys):
            fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
            raise ImpossibleError(
                f"{heads} attention heads ({keys} of keys and values) cannot be shared equally by {self.ranks} ranks; "
                f"run on {', '.join(map(str, fitting))}, or with --mode dp-ep, where every rank has all heads."
            )


@dataclass
class Weights:
    """A folder's tensors, read by name and piece by piece. bytes_read: of all pieces so far."""

    folder: Path
    bytes_read: int = 0
    _files: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        index = self.folder / INDEX
        if index.exists():
            self._shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            self._shards = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def shape(self, name: str) -> list[int]:
        return list(self._slice(name).get_shape())

    def read(self, name: str, axis: int = ROWS, bounds: tuple[int, int] | None = None) -> Tensor:
        """A tensor, or what lies within bounds along an axis. Raises InputError if the folder has none of the name."""
        piece = self._slice(name)
        if bounds is None:
            found: Tensor = piece[:]
        else:
            part = slice(*bounds)
            found = piece[part] if axis == ROWS else piece[:, part]
        self.bytes_read += found.nbytes
        return found

    def _slice(self, name: str) -> Any:
        if name not in self._shards:
            raise InputError(f"{self.folder} holds no tensor {name}; the run time reads experts one tensor each.")
        return self._open(self._shards[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]


def empty_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model of a folder without its weights. Raises ImpossibleError for a model that the run time does not run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type not in FAMILIES:
        raise ImpossibleError(
            f"the run time does not run {config.model_type} ({folder}); it runs {', '.join(FAMILIES)}."
        )
    if getattr(config, "quantization_config", None):
        raise ImpossibleError(f"{folder} is quantised; the run time runs fp32, fp16 and bf16 weights.")
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = factory.from_config(config, dtype=dtype)
    return model.eval()


def load_share(model: nn.Module, weights: Weights, share: Share, device: torch.device) -> None:
    """Fill an empty model, from which the experts were taken, with this rank's share."""
    config: Any = model.config
    head: Any = model.lm_head
    base: Any = model.model
    share.check_heads(config)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        owner, _, kind = name.rpartition(".")
        tensor = _read_share(weights, config, name, share).to(device, parameter.dtype)
        setattr(model.get_submodule(owner), kind, nn.Parameter(tensor, requires_grad=False))
    if config.tie_word_embeddings:
        head.weight = base.embed_tokens.weight
    base.rotary_emb = type(base.rotary_emb)(config).to(device)  # its tables are computed, not loaded
    for layer in base.layers:
        if hasattr(layer.self_attn, "k_proj"):
            local = [share.of(getattr(config, heads)) for heads in (QUERY, KEY)]
            queries, keys = (stop - start for start, stop in local)
            layer.self_attn.num_key_value_groups = queries // keys


def _read_share(weights: Weights, config: Any, name: str, share: Share) -> Tensor:
    """What a rank has of a parameter. name: as the model has it."""
    on_disk = name if name in weights else name.replace(".mlp.", f".{FAMILIES[config.model_type].block}.")
    module, _, kind = name.partition(".layers.")[2].partition(".")[2].rpartition(".")
    if module not in CUTS or share.ranks == 1:
        return weights.read(on_disk)
    axis, heads = CUTS[module]
    if axis == COLUMNS and kind == "bias":  # the sum over ranks adds it once
        return weights.read(on_disk) * (share.rank == 0)
    size = weights.shape(on_disk)[axis]
    parts = getattr(config, heads) if heads else size
    start, stop = share.of(parts)
    return weights.read(on_disk, axis, (start * size // parts, stop * size // parts))


def load_experts(
    weights: Weights, model_type: str, layer: int, experts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """These experts of a layer: gate and up [S, 2 I, H], down [S, H, I]."""
    if not experts:  # fewer than ranks
        return torch.empty(0, 0, 0, dtype=dtype, device=device), torch.empty(0, 0, 0, dtype=dtype, device=device)
    family = FAMILIES[model_type]

    def read(expert: int, projection: str) -> Tensor:
        name = f"model.layers.{layer}.{family.block}.experts.{expert}.{projection}.weight"
        return weights.read(name).to(device, dtype)

    gate, up, down = family.projections
    gate_up = [torch.cat([read(expert, gate), read(expert, up)]) for expert in experts]
    return torch.stack(gate_up), torch.stack([read(expert, down) for expert in experts])
