"""Which model is meant: short names, bundled models, hub ids, folders; and a model's identity.

A short name carries the layer table of a published model, so that `smoe profile --dry-run` can answer
without a network. Numbers are those of the published config.json files.
"""

import hashlib
import os
from collections.abc import Container
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError, MachineError
from smoe_profiles.families.config import ModelSpec, read_spec
from smoe_profiles.families.schema import Disk
from smoe_profiles.families.table import FAMILIES
from smoe_profiles.tensors import CheckpointFiles, Shard, TensorInfo, as_float32, open_checkpoint, read_json, read_shard

BUNDLED = Path(__file__).parent / "tiny"
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
UNKNOWN_FAMILY = "unknown"
"""Stands in the identity of a trace whose model is not known."""


@dataclass(frozen=True)
class ShortName:
    """A published model under a short name: its hub id, size, and the config keys its layer table comes from."""

    hub_id: str
    billions: float
    config: dict[str, Any]


def _config(
    model_type: str, sizes: tuple[int, int, int], experts: int, top_k: int, width: int, **more: Any
) -> dict[str, Any]:
    """A config as published. sizes: hidden size, decoder layers, vocabulary; width: of one expert."""
    family = FAMILIES[model_type]
    keys = (family.hidden_key, family.layers_keys[0], "vocab_size", family.experts_keys[0], family.top_k_keys[0])
    found = dict(zip(keys, (*sizes, experts, top_k), strict=True))
    return {"model_type": model_type, "moe_intermediate_size": width} | found | more


_V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "first_k_dense_replace": 1}
_V2 = _config("deepseek_v2", (5120, 60, 102400), 160, 6, 1536, **_V2_GROUPS)
_V2_LITE = _config("deepseek_v2", (2048, 27, 102400), 64, 6, 1408, first_k_dense_replace=1)
_V3 = _config("deepseek_v3", (7168, 61, 129280), 256, 8, 2048, n_group=8, topk_group=4, first_k_dense_replace=3)
_NEXT = _config("qwen3_next", (2048, 48, 151936), 512, 10, 512)
_SCOUT = {"model_type": "llama4", "text_config": _config("llama4_text", (5120, 48, 202048), 16, 1, 8192)}
_GLM_AIR = _config("glm4_moe", (4096, 46, 151552), 128, 8, 1408, first_k_dense_replace=1)
_LFM2 = _config("lfm2_moe", (2048, 24, 65536), 32, 4, 1792, num_dense_layers=2)
_DBRX = {"model_type": "dbrx", "d_model": 6144, "n_layers": 40, "vocab_size": 100352}
_DBRX_EXPERTS = {"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752}}

SHORT_NAMES: dict[str, ShortName] = {
    "deepseek-v2": ShortName("deepseek-ai/DeepSeek-V2", 235.7, _V2),
    "deepseek-v2-chat": ShortName("deepseek-ai/DeepSeek-V2-Chat", 235.7, _V2),
    "deepseek-v2-lite": ShortName("deepseek-ai/DeepSeek-V2-Lite", 15.7, _V2_LITE),
    "deepseek-v2-lite-chat": ShortName("deepseek-ai/DeepSeek-V2-Lite-Chat", 15.7, _V2_LITE),
    "deepseek-v3": ShortName("deepseek-ai/DeepSeek-V3", 671.0, _V3),
    "deepseek-r1": ShortName("deepseek-ai/DeepSeek-R1", 671.0, _V3),
    "mixtral-8x7b": ShortName("mistralai/Mixtral-8x7B-v0.1", 46.7, _config("mixtral", (4096, 32, 32000), 8, 2, 14336)),
    "mixtral-8x22b": ShortName(
        "mistralai/Mixtral-8x22B-v0.1", 140.6, _config("mixtral", (6144, 56, 32768), 8, 2, 16384)
    ),
    "qwen1.5-moe-a2.7b": ShortName(
        "Qwen/Qwen1.5-MoE-A2.7B", 14.3, _config("qwen2_moe", (2048, 24, 151936), 60, 4, 1408)
    ),
    "qwen3-30b-a3b": ShortName("Qwen/Qwen3-30B-A3B", 30.5, _config("qwen3_moe", (2048, 48, 151936), 128, 8, 768)),
    "qwen3-235b-a22b": ShortName("Qwen/Qwen3-235B-A22B", 235.1, _config("qwen3_moe", (4096, 94, 151936), 128, 8, 1536)),
    "qwen3-next-80b-a3b": ShortName("Qwen/Qwen3-Next-80B-A3B-Instruct", 81.3, _NEXT),
    "olmoe-1b-7b": ShortName("allenai/OLMoE-1B-7B-0924", 6.9, _config("olmoe", (2048, 16, 50304), 64, 8, 1024)),
    "gpt-oss-20b": ShortName("openai/gpt-oss-20b", 20.9, _config("gpt_oss", (2880, 24, 201088), 32, 4, 2880)),
    "gpt-oss-120b": ShortName("openai/gpt-oss-120b", 116.8, _config("gpt_oss", (2880, 36, 201088), 128, 4, 2880)),
    "llama-4-scout": ShortName("meta-llama/Llama-4-Scout-17B-16E-Instruct", 108.6, _SCOUT),
    "glm-4.5-air": ShortName("zai-org/GLM-4.5-Air", 110.5, _GLM_AIR),
    "minimax-m2": ShortName("MiniMaxAI/MiniMax-M2", 228.7, _config("minimax_m2", (3072, 62, 200064), 256, 8, 1536)),
    "phi-3.5-moe": ShortName("microsoft/Phi-3.5-MoE-instruct", 41.9, _config("phimoe", (4096, 32, 32064), 16, 2, 6400)),
    "lfm2-8b-a1b": ShortName("LiquidAI/LFM2-8B-A1B", 8.3, _LFM2),
    "dbrx": ShortName("databricks/dbrx-instruct", 131.6, _DBRX | _DBRX_EXPERTS),
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
    def size(self) -> str:
        """`nbytes` as people say it."""
        return readable_size(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the weights as stored; of a model that is not here, two bytes a parameter."""
        if self.folder is None:
            return int((self.billions or 0) * 2e9)
        return self.files().nbytes


def readable_size(nbytes: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point: `93.4 GB`.

    >>> readable_size(93.44e9), readable_size(3_221_504), readable_size(512)
    ('93.4 GB', '3.2 MB', '512 bytes')
    """
    unit, name = next(((size, name) for size, name in UNITS if nbytes >= size), (1, "bytes"))
    return f"{nbytes / unit:,.{0 if unit == 1 else 1}f} {name}"


def bundled_names() -> list[str]:
    return sorted(path.name for path in BUNDLED.glob("tiny-*") if (path / "config.json").exists())


def find_model(name: str, *, download: bool = True) -> Model:
    """Resolve a short name, hub id or folder.

    download: fetch a hub model that is not cached, where the network is not switched off; otherwise the answer
    for a short name comes from its table, with `folder` None.
    Raises InputError for what does not exist, MachineError for what is not cached, ImpossibleError for a dense model.

    >>> spec = find_model("tiny-mixtral").spec
    >>> spec.family.model_type, spec.vocab_size, [layer.id for layer in spec.layers]
    ('mixtral', 6144, [0, 1, 2])
    >>> find_model("deepseek-v2", download=False).spec.layers[0].num_experts
    160
    """
    if name in bundled_names():
        return _local(name, BUNDLED / name, name)
    if name in SHORT_NAMES:
        return _published(name, SHORT_NAMES[name], download)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _local(name, folder.resolve(), str(folder.resolve()))
    if folder.exists():
        raise InputError(f"model {name!r} is a file; name the folder that holds its config.json.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"model {name!r}: there is no such folder.")
    if "/" not in name:
        near = get_close_matches(name.lower(), [*bundled_names(), *SHORT_NAMES], n=1)
        meant = f"did you mean {near[0]}? smoe models" if near else "smoe models"
        raise InputError(f"model {name!r} is no folder, hub id or short name; {meant} lists the short names.")
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
    """What makes two copies of a model the same model (docs/formats/artefacts.md).

    The router rows of a regrouped checkpoint are hashed in logical order, so that router_sha256 is the source
    model's own and map_sha256 tells the two apart.
    Returns {family, vocab_size, layers, router_sha256, map_sha256, tokenizer_sha256}.

    >>> identity = model_identity(find_model("tiny-mixtral"))
    >>> identity["family"], identity["router_sha256"][:12], identity["map_sha256"]
    ('mixtral', '8fa0319e1a95', None)
    """
    files = model.files().by_name()
    digest = hashlib.sha256()
    record = recorded_map(model.local_folder(), len(model.spec.layers), model.spec.layers[0].num_experts)
    for index, layer in enumerate(model.spec.layers):
        name = disk_names(model, files).router_names(layer.id)[0]
        if name not in files:
            raise InputError(f"{model.local_folder()} has no tensor {name}, the router of layer {layer.id}.")
        shard, tensor = files[name]
        expected = model.spec.router_shape(layer)
        if tensor.shape != expected:
            raise InputError(f"{name} has shape {list(tensor.shape)}; config.json says {list(expected)}.")
        rows = as_float32(tensor, shard.read(tensor))
        if record is not None:  # rows behind the experts' own stay where they are
            rows = np.concatenate([rows[np.argsort(record[index])], rows[layer.num_experts :]])
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
    """Whether two identities name the same weights; the tokenizer is compared apart.

    An identity without router hash, as imports have it, agrees with every model of the same layers, E and K.

    >>> identity = model_identity(find_model("tiny-mixtral"))
    >>> imported = identity | {"family": UNKNOWN_FAMILY, "router_sha256": None}
    >>> same_model(identity, imported), same_model(identity, identity | {"router_sha256": "0" * 64})
    (True, False)
    """
    if is_unknown(one) or is_unknown(other):
        families = {identity.get("family") for identity in (one, other)} - {UNKNOWN_FAMILY}
        return len(families) < 2 and _layer_sizes(one) == _layer_sizes(other)
    keys = ("family", "vocab_size", "layers", "router_sha256", "map_sha256")
    return all(one.get(key) == other.get(key) for key in keys)


def is_unknown(identity: dict[str, Any]) -> bool:
    """Whether an identity says nothing of the weights."""
    return identity.get("router_sha256") is None


def _layer_sizes(identity: dict[str, Any]) -> list[tuple[Any, ...]]:
    keys = ("id", "num_experts", "top_k")
    return [tuple(layer.get(key) for key in keys) for layer in identity.get("layers") or [] if isinstance(layer, dict)]


def describe_identity(identity: dict[str, Any]) -> str:
    if is_unknown(identity):
        family = identity.get("family", UNKNOWN_FAMILY)
        named = "an unknown model" if family == UNKNOWN_FAMILY else f"a {family} model whose weights were not read"
        kinds = dict.fromkeys((experts, top_k) for _, experts, top_k in _layer_sizes(identity))
        sizes = [f"{experts} experts{f', top {top_k}' if top_k else ''}" for experts, top_k in kinds]
        return f"{named} ({len(_layer_sizes(identity))} MoE layers, {'; '.join(sizes)})"
    mapped = f", regrouped by map {identity['map_sha256'][:12]}" if identity.get("map_sha256") else ""
    return f"{identity.get('family')} with routers {str(identity['router_sha256'])[:12]}{mapped}"


def disk_names(model: Model, names: Container[str]) -> Disk:
    """How this checkpoint's tensors are called: the family's names whose first router is among `names`."""
    family, first = model.spec.family, model.spec.layers[0].id
    return next((disk for disk in family.disk if disk.router_names(first)[0] in names), family.disk[0])


def input_embedding(model: Model) -> tuple[Shard, TensorInfo]:
    """The shard and tensor of the input embedding, [V, H]."""
    files = model.files().by_name()
    name = disk_names(model, files).embedding
    if name not in files:
        raise InputError(f"{model.local_folder()} has no tensor {name}.")
    return files[name]
