"""Signs that a trace was recorded or imported wrongly: patterns that no router makes.

Axes: n rows of a row group, W ids a row, E experts. Everything is kept as counters, so that a layer costs the same
memory whatever its rows.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.inspection.repetition import DecodeRows, EqualRuns, set_keys
from smoe_profiles.inspection.scan import LayerGroup
from smoe_profiles.trace import TraceLayer, repeats

LABELS = {
    "no-rows": "no rows",
    "row-count": "rows that the manifest does not count",
    "token-range": "token ids outside the vocabulary",
    "wrong-type": "ids that are no whole numbers",
    "wrong-width": "another number of ids a row than K",
    "empty-rows": "rows without ids",
    "out-of-range": "ids outside the layer",
    "zero-filled": "rows filled with expert 0",
    "repeated-ids": "an id twice in a row",
    "always-chosen": "an expert that every row names",
    "equal-rows": "long runs of equal rows over different tokens",
    "constant-decode": "decode rows that never change",
    "mixed-models": "rows of two models",
}
"""Every kind of finding, in the order they are told."""

MIN_ROWS = 100
"""Of fewer rows an expert may well be in every one."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Finding:
    """One sick pattern. layer: its name, None for the whole trace; rows: how many show it; message: what and where."""

    kind: str
    layer: str | None
    rows: int
    message: str


@dataclass
class Tally:
    """How many rows show a fault, and the first of them."""

    rows: int = 0
    first: str = ""

    def add(self, bad: Bools, group: LayerGroup) -> None:
        found = np.flatnonzero(bad)
        if len(found) and not self.rows:
            row, sequence = group.facts.row[found[0]], group.facts.sequence[found[0]]
            self.first = f"first row {row} ({group.file}, sequence {sequence}): {group.ids[found[0]].tolist()}"
        self.rows += len(found)


class LayerLint:
    """Watches one layer's row groups and says what is sick in them."""

    def __init__(self, layer: TraceLayer, decode: int | None) -> None:
        """decode: which phase is `decode`; None: none."""
        self.layer, self.decode = layer, decode
        self.rows = self.empty = 0
        self.widths: dict[str, Counter[int]] = {}
        self.odd_types: set[str] = set()
        self.outside, self.zero, self.twice = Tally(), Tally(), Tally()
        self.runs, self.decoded = EqualRuns(), DecodeRows()

    def add(self, group: LayerGroup) -> None:
        self.empty += group.empty
        self.widths.setdefault(group.file, Counter()).update(group.widths)
        if group.odd_type:
            self.odd_types.add(group.odd_type)
        ids, facts = group.ids, group.facts
        self.rows += len(ids)
        if not len(ids):
            return
        limit = self.layer.num_experts + self.layer.num_zero
        if ids.min() < 0 or ids.max() >= limit:
            self.outside.add(np.asarray(((ids < 0) | (ids >= limit)).any(axis=1)), group)
        twice = repeats(ids)
        zero = twice.copy()  # with K = 1 a row of expert 0 is a choice like any
        zero[twice] = ~ids[twice].any(axis=1)
        self.zero.add(zero, group)
        self.twice.add(twice & ~zero, group)
        if ids.shape[1] >= limit:
            return  # every row names every expert: equal rows are how it must be
        key = set_keys(ids)
        self.runs.add(key, group, zero)
        here = (facts.phase == self.decode) & ~zero
        if here.any():
            self.decoded.add(key[here], facts.token_id[here], facts.sequence[here])

    def findings(self) -> list[Finding]:
        self.runs.finish()
        found = [*self._shape(), *self._rows(), *self._repetition()]
        return [Finding(kind, label(self.layer), rows, message) for kind, rows, message in found]

    def _shape(self) -> Iterable[tuple[str, int, str]]:
        if self.odd_types:
            seen = ", ".join(sorted(self.odd_types))
            yield "wrong-type", 0, f"column {self.layer.column} is {seen}; lists of whole numbers were expected"
        total: Counter[int] = sum(self.widths.values(), Counter())
        odd = sum(rows for width, rows in total.items() if width != self.layer.top_k)
        if odd:
            seen = ", ".join(f"{width} ids in {rows:,} rows" for width, rows in sorted(total.items()))
            hint = "; a shared expert recorded as a routed one?" if self.layer.top_k + 1 in total else ""
            yield "wrong-width", odd, f"{seen}; the manifest says K = {self.layer.top_k}{hint}"
        usual = {name: widths.most_common(1)[0][0] for name, widths in self.widths.items() if widths}
        if len(set(usual.values())) > 1:
            seen = ", ".join(f"{name}: {width}" for name, width in list(usual.items())[:4])
            yield "mixed-models", odd, f"parts differ in K ({seen})"
        if self.empty:
            yield "empty-rows", self.empty, f"{self.empty:,} rows hold no ids, or lack some"

    def _rows(self) -> Iterable[tuple[str, int, str]]:
        limit = self.layer.num_experts + self.layer.num_zero
        share = f"of {self.rows:,} rows"
        if self.outside.rows:
            text = f"{self.outside.rows:,} {share} hold ids outside [0, {limit}); {self.outside.first}"
            yield "out-of-range", self.outside.rows, text
        if self.zero.rows:
            text = f"{self.zero.rows:,} {share} are nothing but expert 0; {self.zero.first}"
            yield "zero-filled", self.zero.rows, text
        if self.twice.rows:
            yield "repeated-ids", self.twice.rows, f"{self.twice.rows:,} {share} repeat an id; {self.twice.first}"

    def _repetition(self) -> Iterable[tuple[str, int, str]]:
        sick = self.runs.sick()
        if sick:
            rows = sum(length * count for length, count in sick.items())
            length, first = self.runs.longest
            count = sum(sick.values())
            runs = f"{count:,} run{'s' if count > 1 else ''} of equal rows over changing tokens"
            text = f"{runs}, the longest of {length:,} from row {first}"
            yield "equal-rows", rows, text
        sequences, rows = self.decoded.constant(self.runs.stay)
        if len(sequences):
            of = f"{len(sequences):,} of {self.decoded.state.shape[1]:,} sequences"
            text = f"{rows:,} decode rows in {of} never change though tokens do; first sequence {sequences[0]}"
            yield "constant-decode", rows, text


def label(layer: TraceLayer) -> str:
    """A layer's name for people and JSON keys: its number, after its stack's prefix if it has one."""
    return f"{layer.stack}{layer.id}"


def lint_load(layer: TraceLayer, count: npt.NDArray[np.int64], rows: int) -> list[Finding]:
    """What counts alone can tell. count: [E + Z] rows that name each expert; rows: of the layer."""
    if not count.sum():
        return [Finding("no-rows", label(layer), 0, "no row names an expert of this layer; was it hooked?")]
    if rows < MIN_ROWS or layer.top_k >= len(count):
        return []
    if layer.top_k > 1 and count[0] == count.sum():
        return [Finding("zero-filled", label(layer), rows, f"all {rows:,} rows are nothing but expert 0")]
    always = np.flatnonzero(count >= rows)
    named = f"expert{'s' if len(always) > 1 else ''} {', '.join(map(str, always[:8]))}"
    message = f"{named} in every one of {rows:,} rows; a shared expert, or a constant?"
    return [Finding("always-chosen", label(layer), rows, message)] if len(always) else []


def lint_token_ids(token_ids: npt.NDArray[Any], vocab_size: int) -> list[Finding]:
    """Ids that the vocabulary does not hold. token_ids: [U], sorted."""
    beyond = token_ids[token_ids >= vocab_size]
    text = f"{len(beyond):,} token ids, up to {beyond.max(initial=0)}; the vocabulary has {vocab_size:,} entries"
    return [Finding("token-range", None, len(beyond), text)] if len(beyond) else []


def judge(findings: Sequence[Finding], rows: int, layers: Sequence[str]) -> str:
    """The verdict in one line. layers: every layer's name, in order."""
    if not findings:
        return f"healthy: none of the known sick patterns in {rows:,} rows of {len(layers)} MoE layers"
    kinds = sorted({finding.kind for finding in findings}, key=list(LABELS).index)
    told = []
    for kind in kinds:
        where = [finding.layer for finding in findings if finding.kind == kind]
        named = [name for name in layers if name in where]
        place = f"layer{'s' if len(named) > 1 else ''} {_ranges(named, layers)}: " if named else ""
        told.append(f"{place}{LABELS[kind]}")
    return f"sick: {'; '.join(told)}"


def _ranges(named: list[str], layers: Sequence[str]) -> str:
    """Names of layers, neighbours in the model joined: 1-26, 30."""
    places = [list(layers).index(name) for name in named]
    starts = [i for i, place in enumerate(places) if not i or place != places[i - 1] + 1]
    stops = [*(i - 1 for i in starts[1:]), len(places) - 1]
    return ", ".join(named[a] if a == b else f"{named[a]}-{named[b]}" for a, b in zip(starts, stops, strict=True))
