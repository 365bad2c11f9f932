"""For token ids never seen, the seen id that is nearest in the model's input embedding.

Axes: V vocabulary, V' rows of the embedding, H width.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from smoe_profiles.tables import NO_NEIGHBOUR, UInt32Array
from smoe_profiles.tensors import Shard, TensorInfo, as_float32

TILE = 4096
"""Rows of the embedding in memory at a time, twice: bf16 rows of H = 7168 take 120 MB as float32."""


class Embedding(Protocol):
    """[V', H] float32, read by runs of rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True)
class StoredEmbedding:
    """An embedding of which only the rows asked for are read from its file."""

    shard: Shard
    tensor: TensorInfo

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def __getitem__(self, rows: slice, /) -> npt.NDArray[np.float32]:
        start, stop, _ = rows.indices(len(self))
        width = self.tensor.nbytes // len(self)
        first = self.tensor.start
        wanted = replace(
            self.tensor,
            shape=(stop - start, *self.tensor.shape[1:]),
            start=first + start * width,
            stop=first + stop * width,
        )
        return as_float32(wanted, self.shard.read(wanted))


def nearest_neighbours(embedding: Embedding | None, seen: npt.NDArray[np.bool_], tile: int = TILE) -> UInt32Array:
    """For every id the id itself if seen, else the seen id of highest cosine, ties to the lower. Returns [V] uint32.

    NO_NEIGHBOUR where there is none: without an embedding, without seen ids in it, for ids beyond its rows.
    embedding: [V', H]; seen: [V]. Cost: unseen ids times seen ids times H.
    """
    neighbour = np.where(seen, np.arange(len(seen)), NO_NEIGHBOUR).astype(np.uint32)
    height = 0 if embedding is None else min(len(embedding), len(seen))
    for start in range(0, height, tile):
        unknown = start + np.flatnonzero(~seen[start : min(start + tile, height)])
        if embedding is None or not len(unknown):
            continue
        asked = _unit(embedding[start : min(start + tile, height)])[unknown - start]
        best = np.full(len(unknown), -np.inf, np.float32)
        for first in range(0, height, tile):
            known = first + np.flatnonzero(seen[first : min(first + tile, height)])
            if len(known):
                cosine = asked @ _unit(embedding[first : min(first + tile, height)])[known - first].T
                closest = np.argmax(cosine, axis=1)
                value = cosine[np.arange(len(unknown)), closest]
                neighbour[unknown] = np.where(value > best, known[closest], neighbour[unknown])
                best = np.maximum(best, value)
    return neighbour


def _unit(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    unit: npt.NDArray[np.float32] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit
