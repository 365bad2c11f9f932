"""Which program wrote a file, told by its content."""

import os
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from smoe_profiles.choices import ImportFormat
from smoe_profiles.errors import InputError, reason
from smoe_profiles.importers import exflow, npz, replay, replies, sglang, trtllm
from smoe_profiles.importers.files import NPY_MAGIC, READ_ERRORS, ZIP_MAGIC, first_bytes, load_npy, load_torch
from smoe_profiles.importers.records import ReadOptions, Records

FORMATS: dict[ImportFormat, Callable[[Sequence[Path], ReadOptions], Records]] = {
    ImportFormat.SGLANG: sglang.read,
    ImportFormat.VLLM: replies.read,
    ImportFormat.TRTLLM: trtllm.read,
    ImportFormat.REPLAY: replay.read,
    ImportFormat.EXFLOW: exflow.read,
    ImportFormat.NPZ: npz.read,
}
NPY_BASE64 = "k05VTVBZ"
"""How base64 of a .npy begins: b"\\x93NUMPY" is six bytes."""


def read_records(paths: Sequence[Path], wanted: ImportFormat, options: ReadOptions) -> tuple[ImportFormat, Records]:
    """Read files of one format, recognised by content for `auto`.

    Raises InputError for files of several formats, or one that is given twice, by itself or with its folder.
    """
    places = [Path(os.path.realpath(path)) for path in paths]  # which a loop of links does not stop
    times = Counter(places)
    for path, place in zip(paths, places, strict=True):
        if not path.exists():
            raise InputError(f"{path} is missing.")
        if times[place] > 1 or place.parent in times:
            raise InputError(f"{path} is given twice; its rows would count twice.")
    if wanted is not ImportFormat.AUTO:
        return wanted, FORMATS[wanted](paths, options)
    found = [recognise(path) for path in paths]
    for path, other in zip(paths, found, strict=True):
        if other is not found[0]:
            raise InputError(f"{paths[0]} is of format {found[0]}, but {path} is of {other}; import them apart.")
    return found[0], FORMATS[found[0]](paths, options)


def recognise(path: Path) -> ImportFormat:
    """The format of a file or folder. Raises InputError for one that is none of them."""
    if path.is_dir():
        return ImportFormat.TRTLLM
    head = first_bytes(path)
    if head.startswith(NPY_MAGIC):
        return ImportFormat.EXFLOW if load_npy(path).ndim == 2 else ImportFormat.VLLM
    if head.startswith(ZIP_MAGIC):
        return _zipped(path)
    if path.suffix == ".safetensors" or (head[8:9] == b"{" and head[4:8] == bytes(4)):
        return ImportFormat.TRTLLM
    if head.lstrip()[:1] in (b"{", b"["):
        vllm = str(replies.load_replies(path)[0].routed).startswith(NPY_BASE64)
        return ImportFormat.VLLM if vllm else ImportFormat.SGLANG
    if head.startswith(b"\x80"):
        return _pickled(path)
    seen = head[:8].decode("latin-1").strip()
    seen = f"the text {seen!r}" if seen.isascii() and seen.isprintable() else f"the bytes {head[:8].hex(' ')}"
    raise InputError(
        f"{path} is no record of routing that smoe knows: it begins with {seen}; .pt, .npy, .npz, .json, .jsonl or a "
        "TensorRT-LLM folder was expected."
    )


def _zipped(path: Path) -> ImportFormat:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except READ_ERRORS as error:
        raise InputError(f"{path} begins like a .npz or .pt file, but cannot be read ({reason(error)}).") from error
    return _pickled(path) if any(name.endswith("data.pkl") for name in names) else ImportFormat.NPZ


def _pickled(path: Path) -> ImportFormat:
    content = load_torch(path)
    recorded = isinstance(content, dict) and not {"logical_count", "records"}.isdisjoint(content)
    return ImportFormat.SGLANG if recorded else ImportFormat.REPLAY
