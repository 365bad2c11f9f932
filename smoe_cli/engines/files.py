"""Engine files by content: which engine's form a file has, and the map in it. Nothing in a file is trusted."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from smoe_cli.engines import archive, ascend, eplb, sglang, trtllm
from smoe_cli.engines.choices import Target
from smoe_cli.engines.engine_map import EngineMap, ModelLayers
from smoe_profiles.errors import InputError, reason
from smoe_profiles.importers.files import ZIP_MAGIC, Archive, first_bytes, load_torch
from smoe_profiles.tensors import read_json

Writer = Callable[[Path, EngineMap, ModelLayers], None]
FORMS: tuple[ModuleType, ...] = (sglang, trtllm, ascend, eplb, archive)
WRITERS: dict[Target, tuple[ModuleType, Writer, str]] = {
    Target.SGLANG: (sglang, sglang.write_json, ".json"),
    Target.SGLANG_PT: (sglang, sglang.write_pt, ".pt"),
    Target.TRTLLM: (trtllm, trtllm.write, ".yaml"),
    Target.EPLB: (eplb, eplb.write, ".pt"),
    Target.ASCEND: (ascend, ascend.write, ".json"),
}
"""The module, its writer and the file's suffix. vLLM takes no static map."""

MOST_YAML = 64 << 20
MOST_ENTRIES = 1 << 22
SHAPE_ERRORS = (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError)


def read_engine_map(path: Path) -> EngineMap:
    """The placement in an engine's file. Raises InputError if it is none that is known, or is broken."""
    content = _content(path)
    form = next((form for form in FORMS if form.matches(content)), None)
    if form is None:
        raise InputError(
            f"{path} is no placement that smoe knows; SGLang (.json, .pt), TensorRT-LLM (.yaml), vllm-ascend (.json), "
            "EPLB (.pt) and NumPy archives with expert_to_rank are."
        )
    try:
        return _checked(form.parse(content))
    except SHAPE_ERRORS as error:
        raise InputError(f"{path} cannot be read as a placement ({reason(error)}).") from error


def is_engine_map(path: Path) -> bool:
    """Whether a file looks like an engine's placement. Raises InputError if it cannot be read at all."""
    content = _content(path)
    return any(form.matches(content) for form in FORMS)


def _content(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path} is {'a folder' if path.is_dir() else 'missing'}; a placement file was expected.")
    head = first_bytes(path)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path)
    if head.startswith(ZIP_MAGIC) and path.suffix != ".pt":
        return Archive(path)
    if head.startswith((ZIP_MAGIC, b"\x80")):
        content = load_torch(path)
        try:
            return (
                {key: np.asarray(value) for key, value in content.items()} if isinstance(content, Mapping) else content
            )
        except SHAPE_ERRORS as error:  # of a type that NumPy does not have, or rows of several lengths
            raise InputError(f"{path} holds no arrays of whole numbers ({reason(error)}).") from error
    return read_json(path)


def _yaml(path: Path) -> Any:
    import yaml

    if path.stat().st_size > MOST_YAML:
        raise InputError(f"{path} is larger than a placement can be ({MOST_YAML >> 20} MiB).")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not _countable(content):
            raise ValueError(f"its names stand for more than {MOST_ENTRIES} entries")
        return content
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{path} cannot be read as YAML ({error}).") from error


def _countable(content: Any) -> bool:
    """Whether a tree has at most MOST_ENTRIES entries: in YAML a few names may stand for very many of them."""
    waiting, seen = [content], 0
    while waiting and seen <= MOST_ENTRIES:
        node = waiting.pop()
        found = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
        waiting += found
        seen += len(found)
    return not waiting


def _checked(found: EngineMap) -> EngineMap:
    """Whole numbers [rows, slots], at least one of each, no layer twice."""
    slots = found.slots
    if slots.ndim != 2 or not slots.size or not np.issubdtype(slots.dtype, np.integer):
        raise ValueError(f"its map is {slots.dtype} {list(slots.shape)}; whole numbers [layers, slots] were expected")
    if slots.max() >= 1 << 16 or slots.min() < 0:
        raise ValueError(f"it names expert {slots.max() if slots.min() >= 0 else slots.min()}")
    if found.layer_ids is not None and (
        len(found.layer_ids) != len(slots) or len(set(found.layer_ids)) != len(slots) or min(found.layer_ids) < 0
    ):
        raise ValueError(f"{len(found.layer_ids)} layer ids for {len(slots)} rows, each once, were expected")
    return EngineMap(slots.astype(np.int64), found.layer_ids, found.every_layer, found.num_ranks)
