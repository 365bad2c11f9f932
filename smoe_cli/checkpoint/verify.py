"""The proof that a regrouped checkpoint is the same model: every tensor under the map, byte by byte."""

from collections.abc import Callable
from itertools import zip_longest

import numpy as np

from smoe_cli.checkpoint.layouts import Role, new_name
from smoe_cli.checkpoint.rewrite import Rewrite, expected_bytes, read_chunks
from smoe_profiles.tensors import CheckpointFiles, Shard, TensorInfo

LISTED = 8


def compare_tensors(rewrite: Rewrite, written: CheckpointFiles, progress: Callable[[int], None]) -> list[str]:
    """What differs between a written checkpoint and what the source and map say, one line a tensor; empty: nothing.

    progress(bytes) as the source is read.
    """
    found = written.by_name()
    failures = []
    expected_names = set()
    for shard, tensor in rewrite.files:
        name = new_name(tensor.name, rewrite.claims[tensor.name], rewrite.logical_to_physical)
        expected_names.add(name)
        if name not in found:
            failures.append(f"{name}: missing")
        elif (found[name][1].dtype, found[name][1].shape) != (tensor.dtype, tensor.shape):
            failures.append(
                f"{name}: {found[name][1].dtype} {list(found[name][1].shape)}, not {tensor.dtype} {list(tensor.shape)}"
            )
        elif not _same_bytes(rewrite, shard, tensor, *found[name]):
            failures.append(f"{name}: {_where(rewrite, shard, tensor, *found[name])}")
        progress(tensor.nbytes)
    failures += [f"{name}: not in the source" for name in sorted(found.keys() - expected_names)]
    for path in rewrite.side_files():
        copy = written.folder / path
        if not copy.is_file() or copy.read_bytes() != (rewrite.files.folder / path).read_bytes():
            failures.append(f"{path}: not the source's file")
    return failures


def _same_bytes(rewrite: Rewrite, shard: Shard, tensor: TensorInfo, other: Shard, copy: TensorInfo) -> bool:
    pairs = zip_longest(expected_bytes(rewrite, shard, tensor), read_chunks(other, copy))
    if rewrite.claims[tensor.name].role is Role.PERMUTED:
        return b"".join(expected_bytes(rewrite, shard, tensor)) == other.read(copy)
    return all(one == two for one, two in pairs)


def _where(rewrite: Rewrite, shard: Shard, tensor: TensorInfo, other: Shard, copy: TensorInfo) -> str:
    """Which rows differ, for tensors with an expert axis; otherwise just that bytes do."""
    if rewrite.claims[tensor.name].role is not Role.PERMUTED:
        return "bytes differ"
    rows = tensor.shape[0]
    wanted = np.frombuffer(b"".join(expected_bytes(rewrite, shard, tensor)), np.uint8).reshape(rows, -1)
    given = np.frombuffer(other.read(copy), np.uint8).reshape(rows, -1)
    differ = np.flatnonzero((wanted != given).any(axis=1)).tolist()
    more = f" and {len(differ) - LISTED} more" if len(differ) > LISTED else ""
    return f"rows {', '.join(map(str, differ[:LISTED]))}{more}"
