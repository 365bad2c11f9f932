"""The proof that a regrouped checkpoint is the same model: every byte under the map, and nothing beside it.

It shares the layout with the writer, and nothing else: each slot of the copy is looked up in the source through the
map, the other way round from how it was written.
"""

from collections.abc import Callable, Iterator
from itertools import zip_longest

import numpy as np

from smoe_cli.checkpoint.layouts import INTEGERS, Claim, Role
from smoe_cli.checkpoint.rewrite import RECORD, Rewrite, read_chunks
from smoe_profiles.artefact import SCRATCH
from smoe_profiles.tensors import INDEX, CheckpointFiles, Shard, TensorInfo

LISTED = 8


def compare_tensors(rewrite: Rewrite, written: CheckpointFiles, progress: Callable[[int], None]) -> list[str]:
    """What differs between a written checkpoint and what the source and map say, one line a tensor; empty: nothing.

    progress(bytes) as the source is read.
    """
    found = written.by_name()
    failures = []
    expected_names = set()
    for shard, tensor in rewrite.files:
        name = rewrite.new_name(tensor)
        expected_names.add(name)
        if name not in found:
            failures.append(f"{name}: missing")
        elif (found[name][1].dtype, found[name][1].shape) != (tensor.dtype, tensor.shape):
            failures.append(
                f"{name}: {found[name][1].dtype} {list(found[name][1].shape)}, not {tensor.dtype} {list(tensor.shape)}"
            )
        elif difference := _difference(rewrite, shard, tensor, *found[name]):
            failures.append(f"{name}: {difference}")
        progress(tensor.nbytes)
    failures += [f"{name}: not in the source" for name in sorted(found.keys() - expected_names)]
    return failures + _compare_files(rewrite, written)


def _difference(rewrite: Rewrite, shard: Shard, tensor: TensorInfo, other: Shard, copy: TensorInfo) -> str:
    """How a tensor of the copy differs from the source's; empty: not at all."""
    claim = rewrite.layout.claims[tensor.name]
    if claim.role is Role.RENUMBERED:
        return _values_differ(rewrite, claim, shard.read(tensor), other.read(copy), tensor.dtype)
    if claim.role is not Role.PERMUTED:
        pairs = zip_longest(_part(shard, tensor, 0, 1), _part(other, copy, 0, 1))
        return "" if all(one == two for one, two in pairs) else "bytes differ"
    slots = rewrite.physical_to_logical[claim.layer].tolist()
    differ = []
    for row in range(claim.rows):
        wanted = slots[row] if row < len(slots) else row
        pairs = zip_longest(_part(shard, tensor, wanted, claim.rows), _part(other, copy, row, claim.rows))
        if any(one != two for one, two in pairs):
            differ.append(row)
    return _rows(differ) if differ else ""


def _part(shard: Shard, tensor: TensorInfo, row: int, rows: int) -> Iterator[bytes]:
    """One of a tensor's equal parts, in chunks."""
    width = tensor.nbytes // rows
    return read_chunks(shard, tensor, tensor.start + row * width, width)


def _values_differ(rewrite: Rewrite, claim: Claim, wanted: bytes, given: bytes, dtype: str) -> str:
    """A table of expert numbers: the copy's, taken back through the map, are the source's."""
    experts = rewrite.physical_to_logical[claim.layer]
    slots = np.frombuffer(given, INTEGERS[dtype]).astype(np.int64)
    outside = (slots < 0) | (slots >= len(experts))
    logical = np.where(outside, -1, experts[np.where(outside, 0, slots)])
    count = int((logical != np.frombuffer(wanted, INTEGERS[dtype])).sum())
    return f"{count} of {len(slots)} expert numbers differ" if count else ""


def _rows(differ: list[int]) -> str:
    more = f" and {len(differ) - LISTED} more" if len(differ) > LISTED else ""
    return f"rows {', '.join(map(str, differ[:LISTED]))}{more}"


def _compare_files(rewrite: Rewrite, written: CheckpointFiles) -> list[str]:
    """Side files that are not the source's, and files that do not belong into the copy."""
    failures = []
    for path in rewrite.side_files():
        copy = written.folder / path
        if not copy.is_file() or copy.read_bytes() != rewrite.side_bytes(path):
            failures.append(f"{path}: not the source's file")
    known = {path.as_posix() for path in rewrite.side_files()} | {shard.path.name for shard in rewrite.files.shards}
    known |= {shard.path.name for shard in written.shards} | ({INDEX} if written.has_index else set())
    for path in sorted(written.folder.rglob("*")):
        name = path.relative_to(written.folder)
        hidden = name.parts[0].startswith(SCRATCH)
        if path.is_file() and not hidden and name.parts[0] != RECORD and name.as_posix() not in known:
            failures.append(f"{name}: a file that is not the source's")
    return failures
