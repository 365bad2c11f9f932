"""Documents to batches of equal-length rows, and back to trace rows.

Axes: B rows of a batch, S positions. Padding is on the right, where a causal model never sees it, or, to generate, on
the left.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from smoe_profiles.choices import BATCH_TOKENS, Pack
from smoe_profiles.split import PARTS, Assigned, TokenIds


@dataclass(frozen=True)
class Chunk:
    """One row of a batch. token_ids: [n]; source: [n] indices of data sets; part: index into PARTS.

    first_position: where it stands in its sequence; last: whether the sequence ends with it.
    """

    token_ids: TokenIds
    sequence: int
    first_position: int
    source: npt.NDArray[np.int16]
    part: int
    last: bool = True


@dataclass(frozen=True)
class Batch:
    """Chunks that run through the model together, as many as fit BATCH_TOKENS padded positions."""

    chunks: list[Chunk]

    def input_ids(self, *, left: bool = False) -> npt.NDArray[np.int64]:
        """[B, S] int64, padded with id 0 on the right, or on the left."""
        real = self.real(left=left)
        ids = np.zeros(real.shape, np.int64)
        ids[real] = np.concatenate([chunk.token_ids for chunk in self.chunks])
        return ids

    def real(self, *, left: bool = False) -> npt.NDArray[np.bool_]:
        """[B, S]: which positions are tokens, not padding."""
        lengths = np.array([len(chunk.token_ids) for chunk in self.chunks])
        position = np.arange(lengths.max())
        return position >= lengths.max() - lengths[:, None] if left else position < lengths[:, None]


def cut(documents: Iterable[Assigned], pack: Pack, seq_len: int, sources: Sequence[str]) -> Iterator[Chunk]:
    """Cut documents into rows of at most seq_len tokens; `sequence` numbers documents, or windows."""
    codes = {name: code for code, name in enumerate(sources)}
    if pack is Pack.WINDOWS:
        yield from _windows(documents, seq_len, codes)
        return
    for sequence, item in enumerate(documents):
        ids = item.document.token_ids
        for start in range(0, len(ids), seq_len):
            piece = ids[start : start + seq_len]
            source = np.full(len(piece), codes[item.document.source], np.int16)
            yield Chunk(piece, sequence, start, source, PARTS.index(item.part), start + seq_len >= len(ids))


@dataclass
class _Open:
    """A window being filled."""

    token_ids: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)

    def take(self, count: int) -> tuple[TokenIds, npt.NDArray[np.int16]]:
        found = np.array(self.token_ids[:count], np.uint32), np.array(self.source[:count], np.int16)
        del self.token_ids[:count], self.source[:count]
        return found


def _windows(documents: Iterable[Assigned], seq_len: int, codes: dict[str, int]) -> Iterator[Chunk]:
    """Documents of one part joined and cut; the last window of a part may be shorter."""
    open_windows: dict[str, _Open] = {}
    sequence = 0
    for item in documents:
        window = open_windows.setdefault(item.part, _Open())
        window.token_ids.extend(item.document.token_ids.tolist())
        window.source.extend([codes[item.document.source]] * len(item.document.token_ids))
        while len(window.token_ids) >= seq_len:
            ids, source = window.take(seq_len)
            yield Chunk(ids, sequence, 0, source, PARTS.index(item.part))
            sequence += 1
    for part, window in open_windows.items():
        if window.token_ids:
            ids, source = window.take(seq_len)
            yield Chunk(ids, sequence, 0, source, PARTS.index(part))
            sequence += 1


def batches(rows: Iterable[Chunk], batch_tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
    """Consecutive chunks, as many as fit `batch_tokens` padded positions (at least one)."""
    waiting: list[Chunk] = []
    longest = 0
    for chunk in rows:
        longest = max(longest, len(chunk.token_ids))
        if waiting and longest * (len(waiting) + 1) > batch_tokens:
            yield Batch(waiting)
            waiting, longest = [], len(chunk.token_ids)
        waiting.append(chunk)
    if waiting:
        yield Batch(waiting)
