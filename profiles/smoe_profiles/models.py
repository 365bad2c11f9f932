"""Which model is meant: short names, bundled models, hub ids, folders; and a model's identity.

A short name carries the layer table of a published model, so that `smoe profile --dry-run` can answer
without a network. Numbers are those of the published config.json files.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError, MachineError
from smoe_profiles.families.config import ModelSpec, read_spec
from smoe_profiles.families.table import EMBEDDING
from smoe_profiles.tensors import CheckpointFiles, Shard, TensorInfo, as_float32, open_checkpoint, read_json, read_shard

BUNDLED = Path(__file__).parent / "tiny"


@dataclass(frozen=True)
class ShortName:
    """A published model under a short name: its hub id, size, and the config keys its layer table comes from."""

    hub_id: str
    billions: float
    config: dict[str, Any]


def _config(model_type: str, hidden: int, layers: int, vocab: int, **moe: Any) -> dict[str, Any]:
    return {"model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab, **moe}


_V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "first_k_dense_replace": 1}
_V2 = _config("deepseek_v2", 5120, 60, 102400, n_routed_experts=160, num_experts_per_tok=6, **_V2_GROUPS)
_V2_LITE = _config("deepseek_v2", 2048, 27, 102400, n_routed_experts=64, num_experts_per_tok=6, first_k_dense_replace=1)
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}

SHORT_NAMES: dict[str, ShortName] = {
    "deepseek-v2": ShortName("deepseek-ai/DeepSeek-V2", 235.7, _V2),
    "deepseek-v2-chat": ShortName("deepseek-ai/DeepSeek-V2-Chat", 235.7, _V2),
    "deepseek-v2-lite": ShortName("deepseek-ai/DeepSeek-V2-Lite", 15.7, _V2_LITE),
    "deepseek-v2-lite-chat": ShortName("deepseek-ai/DeepSeek-V2-Lite-Chat", 15.7, _V2_LITE),
    "mixtral-8x7b": ShortName("mistralai/Mixtral-8x7B-v0.1", 46.7, _config("mixtral", 4096, 32, 32000, **_MIXTRAL)),
    "mixtral-8x22b": ShortName("mistralai/Mixtral-8x22B-v0.1", 140.6, _config("mixtral", 6144, 56, 32768, **_MIXTRAL)),
    "qwen1.5-moe-a2.7b": ShortName(
        "Qwen/Qwen1.5-MoE-A2.7B",
        14.3,
        _config("qwen2_moe", 2048, 24, 151936, num_experts=60, num_experts_per_tok=4),
    ),
    "qwen3-30b-a3b": ShortName(
        "Qwen/Qwen3-30B-A3B",
        30.5,
        _config("qwen3_moe", 2048, 48, 151936, num_experts=128, num_experts_per_tok=8),
    ),
    "olmoe-1b-7b": ShortName(
        "allenai/OLMoE-1B-7B-0924", 6.9, _config("olmoe", 2048, 16, 50304, num_experts=64, num_experts_per_tok=8)
    ),
}


@dataclass(frozen=True)
class Model:
    """A model the user named: where its files are (None: not on this machine) and its layer table.

    location: what finds it again from anywhere: a short name, hub id or absolute folder.
    described_by: where the layer table was read.
    """

    name: str
    folder: Path | None
    spec: ModelSpec
    location: str
    described_by: str
    billions: float | None = None

    def files(self) -> CheckpointFiles:
        """The checkpoint's tensors. Raises MachineError if the model is not on this machine."""
        return open_checkpoint(self.local_folder())

    def local_folder(self) -> Path:
        if self.folder is None:
            raise MachineError(
                f"model {self.name} is not in the cache and cannot be downloaded (offline). "
                f"Where there is a network: hf download {SHORT_NAMES[self.name].hub_id}; or give --model a folder."
            )
        return self.folder

    @property
    def nbytes(self) -> int:
        """Size of the weights as stored; of a model that is not here, two bytes a parameter."""
        if self.folder is None:
            return int((self.billions or 0) * 2e9)
        return self.files().nbytes


def bundled_names() -> list[str]:
    return sorted(path.name for path in BUNDLED.glob("tiny-*") if (path / "config.json").exists())


def find_model(name: str, *, download: bool = True) -> Model:
    """Resolve a short name, hub id or folder.

    download: fetch a hub model that is not cached, where the network is not switched off; otherwise the answer
    for a short name comes from its table, with `folder` None.
    Raises InputError for what does not exist, MachineError for what is not cached, ImpossibleError for a dense model.
    """
    if name in bundled_names():
        return _local(name, BUNDLED / name, name)
    if name in SHORT_NAMES:
        return _published(name, SHORT_NAMES[name], download)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _local(name, folder.resolve(), str(folder.resolve()))
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        known = ", ".join([*bundled_names(), *SHORT_NAMES])
        raise InputError(f"model {name!r} is no folder, hub id or short name. Short names: {known}.")
    cached = _snapshot(name, download)
    if cached is None:
        raise MachineError(f"model {name} is neither a folder nor in the hub cache, and the hub was not reachable.")
    return _local(name, cached, name)


def _local(name: str, folder: Path, location: str) -> Model:
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise InputError(f"{folder / 'config.json'} is not a JSON object.")
    where = str(folder / "config.json")
    return Model(name, folder, read_spec(config, where), location, where)


def _published(name: str, entry: ShortName, download: bool) -> Model:
    cached = _snapshot(entry.hub_id, download)
    if cached is not None:
        return _local(name, cached, name)
    described_by = f"the short name's own table, for {entry.hub_id}"
    return Model(name, None, read_spec(entry.config, f"short name {name}"), name, described_by, entry.billions)


def _snapshot(hub_id: str, download: bool) -> Path | None:
    """The newest cached snapshot of a hub model that has a config, or a download where allowed; None if neither."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        found = Path(snapshot_download(hub_id, local_files_only=True))
        if (found / "config.json").exists():
            return found
    except LocalEntryNotFoundError:
        pass
    if not download or HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE") == "1":
        return None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "tokenizer*", "*.txt"]))
    except RepositoryNotFoundError as error:
        raise InputError(f"the hub has no model {hub_id}, or it needs a login (hf auth login).") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError):
        return None


def recorded_map(folder: Path, layers: int, experts: int) -> npt.NDArray[np.int64] | None:
    """The map that made a regrouped checkpoint, physical_to_logical [L, E]; None for any other folder."""
    path = folder / "smoe" / "runtime.safetensors"
    if not path.exists():
        return None
    shard = read_shard(path)
    tensor = next((tensor for tensor in shard.tensors if tensor.name == "physical_to_logical"), None)
    if tensor is None or tensor.dtype != "U16" or len(tensor.shape) != 2:
        raise InputError(f"{path} has no physical_to_logical [layers, slots]; the checkpoint's record is damaged.")
    recorded = np.frombuffer(shard.read(tensor), "<u2").astype(np.int64).reshape(tensor.shape)
    if recorded.shape != (layers, experts) or (np.sort(recorded, axis=1) != np.arange(experts)).any():
        raise InputError(f"{path} records no permutation of {experts} experts in {layers} layers.")
    return recorded


def map_hash(physical_to_logical: npt.NDArray[np.int64]) -> str:
    """sha256 of a map [L, P], MoE layers in model order."""
    return hashlib.sha256(np.ascontiguousarray(physical_to_logical, "<u2").tobytes()).hexdigest()


def model_identity(model: Model) -> dict[str, Any]:
    """What makes two copies of a model the same model (design 3).

    The router rows of a regrouped checkpoint are hashed in logical order, so that router_sha256 is the source
    model's own and map_sha256 tells the two apart.
    Returns {family, vocab_size, layers, router_sha256, map_sha256, tokenizer_sha256}.
    """
    files = model.files().by_name()
    digest = hashlib.sha256()
    record = recorded_map(model.local_folder(), len(model.spec.layers), model.spec.layers[0].num_experts)
    for index, layer in enumerate(model.spec.layers):
        name = f"{model.spec.family.block.format(layer=layer.id)}.{model.spec.family.router[0]}"
        if name not in files:
            raise InputError(f"{model.local_folder()} has no tensor {name}, the router of layer {layer.id}.")
        shard, tensor = files[name]
        expected = (layer.num_experts, model.spec.hidden_size)
        if tensor.shape != expected:
            raise InputError(f"{name} has shape {list(tensor.shape)}; config.json says {list(expected)}.")
        rows = as_float32(tensor, shard.read(tensor))
        if record is not None:
            rows = rows[np.argsort(record[index])]
        digest.update(rows.tobytes())
    return {
        "family": model.spec.family.model_type,
        "vocab_size": model.spec.vocab_size,
        "layers": model.spec.layer_table(),
        "router_sha256": digest.hexdigest(),
        "map_sha256": None if record is None else map_hash(record),
        "tokenizer_sha256": _tokenizer_hash(model.local_folder()),
    }


def _tokenizer_hash(folder: Path) -> str | None:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).exists():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return None


def same_model(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two identities name the same weights; the tokenizer is compared apart."""
    keys = ("family", "vocab_size", "layers", "router_sha256", "map_sha256")
    return all(one.get(key) == other.get(key) for key in keys)


def describe_identity(identity: dict[str, Any]) -> str:
    mapped = f", regrouped by map {identity['map_sha256'][:12]}" if identity.get("map_sha256") else ""
    return f"{identity['family']} with routers {str(identity['router_sha256'])[:12]}{mapped}"


def input_embedding(model: Model) -> tuple[Shard, TensorInfo]:
    """The shard and tensor of the input embedding, [V, H]."""
    files = model.files().by_name()
    if EMBEDDING not in files:
        raise InputError(f"{model.local_folder()} has no tensor {EMBEDDING}.")
    return files[EMBEDDING]
