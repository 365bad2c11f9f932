"""Held-out figures taken apart: by phase, by source, by how often the tables saw the token, and expert by expert.

Axes: N held-out rows, E experts, G ranks, K experts a token, U distinct token ids.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smoe_profiles.errors import InputError
from smoe_profiles.gates import GateRecord
from smoe_profiles.tables import Counts, load_arrays
from smoe_profiles.trace import ExpertIds, Trace
from smoe_solvers.choices import Assignment
from smoe_solvers.expert_prediction import SetScores, hottest_sets, mean_by_type, top_k_hits
from smoe_solvers.figures import Figures, measure_groups
from smoe_solvers.redundancy import Copies

NONE, ORACLE = "none", "oracle"
CEILINGS = {
    "contiguous": "contiguous+oracle",
    "placed": "oracle",
    "shuffled": "contiguous+oracle",
    "placed+shuffled": "oracle",
    "contiguous+oracle": "contiguous+oracle",
    "oracle": "oracle",
}
"""Every state, and that of the same placement whose shuffle knows the true routing."""

BANDS = {"unseen": 0, "1-9": 1, "10-99": 10, "100-999": 100, "1000+": 1000}
"""How often the tables saw a token id, and where each band begins."""

WIRE_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class RowFacts:
    """Where held-out rows stand; all [N], phase and source as names."""

    sequence: npt.NDArray[np.integer]
    position: npt.NDArray[np.integer]
    phase: npt.NDArray[Any]
    source: npt.NDArray[Any]


@dataclass(frozen=True)
class Shuffle:
    """One layer in one state.

    counts: [N, G] n_g; scores: [N, G] u8 that rows went by, or None; homes: [N] each; copies: the rows where experts
    have several copies.
    """

    state: str
    predictor: str
    counts: npt.NDArray[np.int32]
    scores: npt.NDArray[np.uint8] | None
    homes: dict[str, npt.NDArray[np.int32]]
    copies: Copies | None = None

    def served(self, how: str = Assignment.RULE.value) -> npt.NDArray[np.integer]:
        """Activations that each rank serves of a row, [N, G], with homes by this assignment."""
        return self.copies.served(self.homes[how]) if self.copies else self.counts


@dataclass(frozen=True)
class Grouping:
    """A partition of held-out rows. code: [N] index into names."""

    names: tuple[str, ...]
    code: npt.NDArray[np.integer]

    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, np.bincount(self.code, minlength=len(self.names)).tolist(), strict=True))

    def share(self, name: str) -> float:
        """The part of all rows that one group has."""
        return self.sizes()[name] / len(self.code)


def row_facts(trace: Trace, record: GateRecord | None, rows: int) -> RowFacts:
    """Facts of the first held-out rows of a trace, or of its early-gate sample, found by sequence and position.

    Raises InputError if a sampled row is not in the trace.
    """
    facts = trace.read(["sequence", "position", "phase", "source"], "heldout")
    if record is None:
        return RowFacts(**{name: values[:rows] for name, values in facts.items()})
    sampled = load_arrays(record.folder / "rows.safetensors")
    wanted = _place(sampled["heldout.sequence"][:rows], sampled["heldout.position"][:rows])
    present = _place(facts["sequence"], facts["position"])
    order = np.argsort(present, kind="stable")
    at = order[np.searchsorted(present, wanted, sorter=order).clip(max=len(order) - 1)]
    if (present[at] != wanted).any():
        raise InputError(f"{record.folder} samples rows that {trace.artefact.path} does not hold.")
    return RowFacts(**{name: values[at] for name, values in facts.items()})


def _place(sequence: npt.NDArray[np.integer], position: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """One number for a sequence and a position in it, [N]."""
    return (sequence.astype(np.uint64) << np.uint64(32)) | position.astype(np.uint64)


def groupings(
    facts: RowFacts, token_id: npt.NDArray[np.integer], occurrences: npt.NDArray[np.integer]
) -> dict[str, Grouping]:
    """The partitions that figures are told by. token_id: [N]; occurrences: [V] rows of each id in the tables."""
    return {
        "by_phase": _by_name(facts.phase),
        "by_source": _by_name(facts.source),
        "by_frequency": by_frequency(token_id, occurrences),
    }


def _by_name(names: npt.NDArray[Any]) -> Grouping:
    encoded = pa.array(names, pa.string()).dictionary_encode()  # a hash: sorting as many strings as rows takes minutes
    return Grouping(tuple(encoded.dictionary.to_pylist()), encoded.indices.to_numpy())


def by_frequency(token_id: npt.NDArray[np.integer], occurrences: npt.NDArray[np.integer]) -> Grouping:
    """Rows by how often the tables saw their id; an id that is not known counts as unseen."""
    known = token_id < len(occurrences)
    seen = np.where(known, occurrences[np.where(known, token_id, 0)], 0)
    return Grouping(tuple(BANDS), np.searchsorted(list(BANDS.values()), seen, side="right") - 1)


def group_layer(grouping: Grouping, shuffles: Sequence[Shuffle]) -> dict[str, dict[str, dict[str, Any]]]:
    """One layer by the served rule: group -> state -> predictor -> figures, groups without rows left out."""
    found = {
        (shuffle.state, shuffle.predictor): measure_groups(
            shuffle.counts, shuffle.homes["rule"], grouping.code, len(grouping.names), shuffle.copies
        )
        for shuffle in shuffles
    }
    layer: dict[str, dict[str, dict[str, Any]]] = {}
    for number, (group, rows) in enumerate(grouping.sizes().items()):
        if not rows:
            continue
        layer[group] = {}
        for (state, predictor), figures in found.items():
            lar, ceiling = figures.lar[number], found[CEILINGS[state], ORACLE].lar[number]
            layer[group].setdefault(state, {})[predictor] = {
                "lar": float(lar),
                "oracle_share": share(lar, ceiling),
                "remote_fanout": float(figures.remote_fanout[number]),
            }
    return layer


def share(lar: float, ceiling: float) -> float | None:
    """lar as a share of the oracle's; None where the oracle keeps nothing local."""
    return float(lar / ceiling) if ceiling else None


def group_document(
    grouping: Grouping, layers: dict[str, dict[str, dict[str, dict[str, Any]]]]
) -> dict[str, dict[str, Any]]:
    """group -> {rows, total, layers}. layers: what `group_layer` gives, by layer id."""
    document: dict[str, dict[str, Any]] = {}
    for group, rows in grouping.sizes().items():
        mine = {layer: found[group] for layer, found in layers.items() if rows}
        document[group] = {"rows": rows, "total": mean_tree(list(mine.values())) if mine else {}, "layers": mine}
    return document


# Experts, whatever the placement.


def hottest_of_ids(counts: Counts, ids: npt.NDArray[np.integer], num_experts: int, top_k: int) -> npt.NDArray[np.bool_]:
    """The K experts that the tables saw each id use most, [U, E]; none for an id never seen. ids: [U], rising."""
    mine = np.isin(counts.token_id, ids)
    dense = np.zeros((len(ids), num_experts), np.int64)
    dense[np.searchsorted(ids, counts.token_id[mine]), counts.expert[mine]] = counts.count[mine]
    return hottest_sets(dense, top_k)


def score_logits(logits: npt.NDArray[np.floating], experts: ExpertIds) -> SetScores:
    """Each row's K experts against the K of highest logit, [N]: sets of one size, so that all three scores agree."""
    hits = top_k_hits(logits, experts) / experts.shape[1]
    return SetScores(hits, hits, hits)


def expert_figures(scores: SetScores, index: npt.NDArray[np.integer], ids: int) -> dict[str, dict[str, float]]:
    """Means over rows (traffic) and over token ids of their rows' mean (types). scores, index: [N]."""
    by_id = SetScores(*(mean_by_type(values, index, ids) for values in (scores.precision, scores.recall, scores.f1)))
    return {"traffic": _means(scores), "types": _means(by_id)}


def _means(scores: SetScores) -> dict[str, float]:
    """Means over entries for which something is predicted, and their share."""
    predicted = float((~np.isnan(scores.precision)).mean())
    names = ("precision", "recall", "f1") if predicted else ()
    return {"predicted": predicted} | dict(zip(names, scores.means(), strict=False))


# Documents.


def plain_figures(
    figures: Figures, wire_rows: dict[str, float], hidden_size: int | None, microseconds: dict[str, float]
) -> dict[str, Any]:
    """Figures as a plain dictionary with what travels: rows, bytes where a row's size is known, and predicted times."""
    found = asdict(figures) | {"wire_rows": wire_rows}
    if microseconds:
        found["microseconds"] = {str(way): time for way, time in microseconds.items()}
    if hidden_size:
        found["wire_bytes"] = {way: rows * hidden_size * WIRE_ELEMENT_BYTES for way, rows in wire_rows.items()}
    return found


def mean_tree(trees: Sequence[Any]) -> Any:
    """The mean, leaf by leaf, of documents of one shape; over the leaves that are not None."""
    if isinstance(trees[0], dict):
        return {key: mean_tree([tree[key] for tree in trees]) for key in trees[0]}
    values = [value for value in trees if value is not None]
    return float(np.mean(values)) if values else None
