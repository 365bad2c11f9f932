"""Routing records as a format file hands them over, and the check that every row has to pass.

Axes: L entries of the layer axis, N rows (tokens), K slots, S sequences. Ids stay in the file's own dtype until a
layer is looked at; where files of several dtypes are joined they are widened first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.importers.files import whole_numbers
from smoe_profiles.levels import Entries
from smoe_profiles.models import Model
from smoe_profiles.trace import UNKNOWN_TOKEN, repeats

PREFILL, DECODE = 0, 1
"""Indices into smoe_profiles.trace.PHASES."""

CONSTANT_ROWS = 8
"""A sequence of at least so many rows, all equal, was not routed: one step of a split server gives zeros.

A shorter one may be a token said again and again. Of 88,000 recorded rows of four models at most 6 neighbours are equal
in every layer (one layer recorded), and in three layers or more at most 2; within one layer of many it goes up to 14.
"""

MAX_WEIGHT = float(np.finfo(np.float16).max)
"""Traces keep weights as f16."""

IdArray = npt.NDArray[np.integer[Any]]
Weights = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class ReadOptions:
    """What a user may say of the files; names of arrays and axes are for NumPy archives only."""

    model: Model | None = None
    ids: str | None = None
    axes: str | None = None
    tokens: str | None = None
    weights: str | None = None
    layer_ids: str | None = None
    seq_lens: str | None = None
    triples: bool = False


def require_model(model: Model | None, where: str) -> Model:
    """The model, for files whose layer axis has every decoder layer. Raises InputError if it was not given."""
    if model is None:
        raise InputError(f"{where}: every decoder layer is listed, but not which of them have experts; give --model.")
    return model


class LayerAxis(StrEnum):
    """What an entry of the layer axis is: numbered by the file, every decoder layer, or every MoE layer in order."""

    NUMBERED = "numbered"
    HIDDEN = "hidden"
    ORDINAL = "ordinal"


class Fault(StrEnum):
    """Why a row is not taken, in the order in which a row is judged."""

    PADDING = "padding"
    PARTLY_NEGATIVE = "partly -1"
    OUT_OF_RANGE = "id out of range"
    ZERO_FILLED = "zero-filled"
    REPEATED = "repeated id"
    CONSTANT = "sequence of equal rows"
    UNMATCHED = "rows and tokens differ"


FAULTS = tuple(Fault)


@dataclass(frozen=True)
class Rejected:
    """Rows of one fault: how many, and the first of them in words."""

    rows: int
    first: str


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one file. ids: [L, N, K]; where: the file or reply, for messages; source: index of the file.

    seq_len: [S], None: one sequence. token_id: [N] int64, -1 or UNKNOWN_TOKEN where not known. position: [N], no two
    alike in a sequence, None: counted from 0 in each. phase: [N], None: all prefill. weights: [L, N', K], of the first
    N' <= N rows.
    """

    ids: IdArray
    where: str
    source: int = 0
    seq_len: npt.NDArray[np.int64] | None = None
    token_id: npt.NDArray[np.int64] | None = None
    position: npt.NDArray[np.int64] | None = None
    phase: npt.NDArray[np.int16] | None = None
    weights: Weights | None = None


@dataclass(frozen=True)
class Facts:
    """What a file says of its model; None: nothing."""

    axis: LayerAxis
    layer_ids: tuple[int, ...] = ()
    num_experts: int | None = None
    top_k: int | None = None
    vocab_size: int | None = None
    id_space: str = "logical"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenRecords:
    """Each token's experts. ids: L times [N, K]; weights: L times [N, K], NaN where not known, or None.

    seq_len: [S]; token_id, position, phase, source: [N]. starts: first row of each piece, with its name in `names`.
    rejected: rows a format file left out itself.
    """

    facts: Facts
    ids: list[IdArray]
    weights: list[Weights] | None
    seq_len: npt.NDArray[np.int64]
    token_id: npt.NDArray[np.uint32]
    position: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int16]
    source: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    names: tuple[str, ...]
    rejected: dict[Fault, Rejected] = field(default_factory=dict)

    @property
    def num_entries(self) -> int:
        return len(self.ids)

    @property
    def top_k(self) -> int | None:
        return int(self.ids[0].shape[1])

    def largest(self, entry: int) -> int:
        """The highest expert id of a layer."""
        return int(self.ids[entry].max(initial=0))

    def blank(self, entry: int) -> bool:
        """Whether a layer is zero or -1 throughout, as engines leave dense ones."""
        return self.largest(entry) == 0

    def row_name(self, row: int) -> str:
        piece = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"row {row - self.starts[piece]} of {self.names[piece]}"


@dataclass(frozen=True)
class CountRecords:
    """Counts below level `token`: one Entries for each entry of the layer axis."""

    facts: Facts
    level: Level
    entries: list[Entries]

    @property
    def num_entries(self) -> int:
        return len(self.entries)

    @property
    def top_k(self) -> int | None:
        return self.facts.top_k

    def largest(self, entry: int) -> int:
        table = self.entries[entry]
        return max(int(table[name].max(initial=0)) for name in ("expert", "other") if name in table)

    def blank(self, entry: int) -> bool:
        return not self.entries[entry]["count"].any()


Records = TokenRecords | CountRecords


def count_entries(counts: npt.NDArray[np.int64]) -> Entries:
    """Counts by expert [E] or by pair [E, E] as entries."""
    index = np.indices(counts.shape).reshape(counts.ndim, -1)
    return dict(zip(("expert", "other"), index, strict=False)) | {"count": counts.reshape(-1)}


def join(pieces: Sequence[Piece], facts: Facts, rejected: dict[Fault, Rejected] | None = None) -> TokenRecords:
    """Pieces one after another. Raises InputError if their layers or slots differ, or a piece contradicts itself."""
    if not any(piece.ids.size for piece in pieces):
        raise InputError("the files hold no rows of routing; there is nothing to import.")
    for piece in pieces:
        _check_piece(piece, pieces[0], facts)
    lengths = np.array([piece.ids.shape[1] for piece in pieces], np.int64)
    seq_len = [_or(piece.seq_len, np.array([rows], np.int64)) for piece, rows in zip(pieces, lengths, strict=True)]
    return TokenRecords(
        facts=facts,
        ids=[np.concatenate([piece.ids[layer] for piece in pieces]) for layer in _axis(pieces)],
        weights=_join_weights(pieces),
        seq_len=np.concatenate(seq_len),
        token_id=np.concatenate([_token_ids(piece) for piece in pieces]),
        position=np.concatenate(
            [_or(piece.position, _counted(lens)) for piece, lens in zip(pieces, seq_len, strict=True)]
        ),
        phase=np.concatenate([_or(piece.phase, np.zeros(piece.ids.shape[1], np.int16)) for piece in pieces]),
        source=np.repeat(np.array([piece.source for piece in pieces], np.int64), lengths),
        starts=np.cumsum(lengths) - lengths,
        names=tuple(piece.where for piece in pieces),
        rejected=rejected or {},
    )


def _axis(pieces: Sequence[Piece]) -> range:
    return range(len(pieces[0].ids))


def _or(array: Any, default: Any) -> Any:
    return default if array is None else array


def _counted(seq_len: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Places counted from 0 in each sequence, [N]."""
    starts = np.cumsum(seq_len) - seq_len
    return np.arange(seq_len.sum(), dtype=np.int64) - np.repeat(starts, seq_len)


def _check_piece(piece: Piece, first: Piece, facts: Facts) -> None:
    whole_numbers(piece.ids, piece.where, 3)
    layers, rows, slots = piece.ids.shape
    if (layers, slots) != (first.ids.shape[0], first.ids.shape[2]):
        raise InputError(
            f"{piece.where} has {layers} layers and {slots} experts a token; "
            f"{first.where} has {first.ids.shape[0]} and {first.ids.shape[2]}."
        )
    if facts.top_k is not None and facts.top_k != slots:
        raise InputError(f"{piece.where} has {slots} experts a token, but says top_k = {facts.top_k}.")
    if facts.layer_ids and len(facts.layer_ids) != layers:
        raise InputError(f"{piece.where} has {layers} layers, but {len(facts.layer_ids)} layer numbers.")
    for name in ("token_id", "position", "phase"):
        values = getattr(piece, name)
        if values is not None and values.shape != (rows,):
            raise InputError(f"{piece.where} has {rows} rows, but {name} for {list(values.shape)}.")
    if piece.position is not None and not 0 <= piece.position.min(initial=0) <= piece.position.max(initial=0) < 2**32:
        raise InputError(
            f"{piece.where} has positions {piece.position.min()} to {piece.position.max()}; 0 to 2^32 - 1 is possible."
        )
    if piece.seq_len is not None and not 0 <= piece.seq_len.min(initial=0) <= piece.seq_len.max(initial=0) <= rows:
        longest = piece.seq_len.min() if piece.seq_len.min() < 0 else piece.seq_len.max()
        raise InputError(f"{piece.where} has a sequence of {longest} tokens, and {rows} rows.")
    if piece.seq_len is not None and piece.seq_len.sum() != rows:
        raise InputError(f"{piece.where} has {rows} rows, but its sequences have {piece.seq_len.sum()}.")
    if piece.weights is not None:
        _check_weights(piece, piece.weights)


def _check_weights(piece: Piece, weights: Weights) -> None:
    layers, rows, slots = piece.ids.shape
    found = weights.shape
    if weights.dtype.kind != "f" or len(found) != 3 or (found[0], found[2]) != (layers, slots) or found[1] > rows:
        raise InputError(
            f"{piece.where} has weights {weights.dtype} {list(found)} for ids {list(piece.ids.shape)}; "
            "the same axes with at most as many tokens were expected."
        )
    for layer, values in enumerate(weights):
        sound = ((values >= 0) & (values <= MAX_WEIGHT)).all(axis=1)
        if not sound.all():
            row = int(np.argmin(sound))
            raise InputError(
                f"{piece.where} has weights {values[row].tolist()} in row {row}, entry {layer} of its layers; numbers "
                f"from 0 to {MAX_WEIGHT:.0f} (half precision) were expected."
            )


def _token_ids(piece: Piece) -> npt.NDArray[np.uint32]:
    rows = piece.ids.shape[1]
    if piece.token_id is None:
        return np.full(rows, UNKNOWN_TOKEN, np.uint32)
    known = np.where(piece.token_id == -1, UNKNOWN_TOKEN, piece.token_id)
    if known.size and (known.min() < 0 or known.max() > UNKNOWN_TOKEN):
        bad = known.min() if known.min() < 0 else known.max()
        raise InputError(f"{piece.where} holds token id {bad}; ids are whole numbers below {UNKNOWN_TOKEN}.")
    return known.astype(np.uint32)


def _join_weights(pieces: Sequence[Piece]) -> list[Weights] | None:
    if all(piece.weights is None for piece in pieces):
        return None
    return [np.concatenate([_layer_weights(piece, layer) for piece in pieces]) for layer in _axis(pieces)]


def _layer_weights(piece: Piece, layer: int) -> Weights:
    """One layer's weights of every row, [N, K]; NaN where the file has none."""
    weights = np.full(piece.ids.shape[1:], np.nan, np.float32)
    if piece.weights is not None:
        weights[: piece.weights.shape[1]] = piece.weights[layer]
    return weights


@dataclass(frozen=True)
class RowCheck:
    """What a check found of each row, [N]: fault, an index into FAULTS or -1 where it is sound; layer: where first."""

    fault: npt.NDArray[np.int8]
    layer: npt.NDArray[np.int64]


def check_rows(ids: Sequence[IdArray], num_ids: Sequence[int]) -> RowCheck:
    """Every row must name K distinct ids in [0, num_ids) in every layer.

    ids: per layer [N, K]; num_ids: per layer E + Z. A row of -1 in every layer is padding. Of several faults the first
    in the order of Fault counts, of its layers the lowest.
    """
    rows = len(ids[0])
    worst, where = np.full(rows, len(FAULTS), np.int8), np.zeros(rows, np.int64)
    padding = np.ones(rows, np.bool_)
    for layer, (chosen, count) in enumerate(zip(ids, num_ids, strict=True)):
        negative = chosen == -1
        padding &= negative.all(axis=1)
        found = _layer_faults(chosen, negative.any(axis=1), count)
        where[found < worst] = layer
        worst = np.minimum(worst, found)
    worst[padding] = FAULTS.index(Fault.PADDING)
    worst[worst == len(FAULTS)] = -1
    return RowCheck(worst, where)


def _layer_faults(chosen: IdArray, negative: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.int8]:
    fault = np.full(len(chosen), len(FAULTS), np.int8)
    outside = ((chosen < 0) | (chosen >= count)).any(axis=1)
    zeros = ~chosen.any(axis=1) if chosen.shape[1] > 1 else np.zeros(len(chosen), np.bool_)
    found = (
        (Fault.REPEATED, repeats(chosen)),
        (Fault.ZERO_FILLED, zeros),
        (Fault.OUT_OF_RANGE, outside),
        (Fault.PARTLY_NEGATIVE, negative),
    )
    for name, hit in found:
        fault[hit] = FAULTS.index(name)
    return fault


def constant_sequences(ids: Sequence[IdArray], seq_len: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which sequences repeat one row throughout, [S]; shorter ones than CONSTANT_ROWS may. ids: per layer [N, K]."""
    differs = np.zeros(len(ids[0]), np.int64)
    for chosen in ids:
        differs[1:] |= (chosen[1:] != chosen[:-1]).any(axis=1)
    stops = np.cumsum(seq_len)
    starts = stops - seq_len
    total = np.concatenate([[0], np.cumsum(differs)])
    inside = total[stops] - total[np.minimum(starts + 1, stops)]
    constant: npt.NDArray[np.bool_] = (seq_len >= CONSTANT_ROWS) & (inside == 0)
    return constant
