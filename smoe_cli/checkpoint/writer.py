"""The streaming writer: shards first, side files next, the index last, each hashed as it is written.

A shard that is whole is noted beside it, fsynced before its note, so that a run after an interruption goes on with the
next one. Shards go to threads; the bytes do not depend on how many.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Lock
from typing import Any

from smoe_cli.checkpoint.rewrite import Rewrite
from smoe_profiles.artefact import SCRATCH
from smoe_profiles.errors import InputError
from smoe_profiles.tensors import INDEX, Shard, encode_header, read_json

Progress = Callable[[int], None]


def write_checkpoint(rewrite: Rewrite, folder: Path, progress: Progress, jobs: int = 1) -> dict[str, str]:
    """Write a checkpoint into a staging folder; progress(bytes of tensors). Returns the sha256 of every file.

    Raises InputError if the source turns out shorter or changed, OSError if the disk is full.
    """
    shards, stop, lock = rewrite.files.shards, Event(), Lock()

    def advance(count: int) -> None:
        with lock:
            progress(count)
        if stop.is_set():
            raise StoppedError

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_shard, rewrite, shard, folder, advance) for shard in shards]
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            written = [future.result() for future in running if future in ended]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    hashes = {shard.path.name: found for shard, found in zip(shards, written, strict=True)}
    weight_map = {rewrite.new_name(tensor): shard.path.name for shard, tensor in rewrite.files}
    rewrite.check_unchanged()
    for path in rewrite.side_files():
        hashes[path.as_posix()] = _write(folder / path, [rewrite.side_bytes(path)])
    if rewrite.files.has_index:
        index = read_json(rewrite.files.folder / INDEX)
        index["weight_map"] = dict(sorted(weight_map.items()))
        hashes[INDEX] = _write(folder / INDEX, [(json.dumps(index, indent=2) + "\n").encode()])
    return hashes


class StoppedError(Exception):
    """Another thread failed; this one gives up."""


def _shard(rewrite: Rewrite, shard: Shard, folder: Path, progress: Progress) -> str:
    """Write one shard unless it is there already; its sha256."""
    path, note = folder / shard.path.name, folder / f"{SCRATCH}{shard.path.name}.json"
    noted = _read_note(note)
    if noted and path.is_file() and not path.is_symlink() and path.stat().st_size == noted["bytes"]:
        progress(sum(tensor.nbytes for tensor in shard.tensors))
        return str(noted["sha256"])
    found = _write(path, _shard_bytes(rewrite, shard, progress))
    _write(note, [json.dumps({"bytes": path.stat().st_size, "sha256": found}).encode()])
    return found


def _shard_bytes(rewrite: Rewrite, shard: Shard, progress: Progress) -> Iterable[bytes]:
    entries = [(rewrite.new_name(tensor), tensor.dtype, tensor.shape, tensor.nbytes) for tensor in shard.tensors]
    yield encode_header({"format": "pt"} | shard.metadata, entries)
    for tensor in shard.tensors:
        for chunk in rewrite.expected_bytes(shard, tensor):
            yield chunk
            progress(len(chunk))


def _read_note(path: Path) -> dict[str, Any] | None:
    try:
        note = read_json(path)
    except InputError:  # none, or cut short by a kill
        return None
    return note if isinstance(note, dict) and {"bytes", "sha256"} <= note.keys() else None


def _write(path: Path, chunks: Iterable[bytes]) -> str:
    """Write a new file, whatever an earlier run left at its name, and force it to disk. Returns its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            write_all(file.fileno(), chunk)
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_all(descriptor: int, data: bytes) -> None:
    """os.write until nothing is left: one call may take less than it was given."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
