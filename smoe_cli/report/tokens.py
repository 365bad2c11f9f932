"""Which token ids are most at home on each rank: what the token table rests on, in words where a tokenizer is at hand.

An id's share of a rank is the part of its activations that lies there; its lift is that share over the rank's part of
all activations. Ids are ordered by a lift that PSEUDO rows of the average are mixed into: rare ids do not lead.

Axes: L MoE layers, E experts, G ranks, U token ids seen often enough.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from smoe_cli.report.coactivation import kept_layers
from smoe_cli.report.gathering import Found
from smoe_profiles.artefact import Artefact, file_hash
from smoe_profiles.errors import SmoeError
from smoe_profiles.models import find_model
from smoe_profiles.tables import FIT_PARTS, Tables
from smoe_profiles.trace import TraceLayer

MIN_COUNT = 16
PSEUDO = 16.0
MOST, MOST_BY_LAYER = 12, 5
MOST_LISTED = 4000
"""Token ids listed by layer, in all layers and ranks; with more ranks fewer layers are listed."""

FloatArray = npt.NDArray[np.float64]
UNREADABLE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Ids:
    """Token ids seen often enough. id, count: [U], ids rising; text: [U], None where it is not known."""

    id: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    text: list[str | None]

    def listed(self, score: FloatArray, share: FloatArray, base: float, most: int) -> list[dict[str, Any]]:
        """The ids of highest score above 1, ties to lower ids. score, share: [U]."""
        order = np.argsort(-score, kind="stable")[:most]
        return [
            {
                "id": int(self.id[at]),
                "text": self.text[at],
                "count": int(self.count[at]),
                "share": float(share[at]),
                "lift": float(share[at] / base),
            }
            for at in order
            if score[at] > 1
        ]


def tokens_section(found: Found) -> dict[str, Any] | None:
    """By rank over all layers, whose ranks are named so that tokens stay; and layer by layer."""
    tables, placed = found.tables, found.placed
    if tables is None or placed is None:
        return None
    occurrences = tables.vocabulary()[0].sum(axis=0)
    seen = np.flatnonzero(occurrences >= MIN_COUNT)
    if not len(seen):
        return None
    texts = token_texts(_tokenizer(found), seen)
    ids = Ids(seen, occurrences[seen], texts or [None] * len(seen))
    hosts = placed.placement.hosts
    shares = [rank_shares(tables, layer, hosts[index], seen) for index, layer in enumerate(tables.layers)]
    share, base = (np.mean([one[side] for one in shares], axis=0) for side in (0, 1))
    ranks = placed.placement.num_ranks
    kept = kept_layers(len(tables.layers), max(1, MOST_LISTED // (ranks * MOST_BY_LAYER)))
    return {
        "min_count": MIN_COUNT,
        "note": (
            f"ids seen at least {MIN_COUNT} times, by the part of their activations on a rank over that of all tokens, "
            f"with {PSEUDO:g} average rows mixed in"
        ),
        "texts": texts is not None,
        "base": base.tolist(),
        "ranks": _by_rank(ids, share, base, MOST),
        "layers": [tables.layers[index].id for index in kept],
        "by_layer": [_by_rank(ids, *shares[index], MOST_BY_LAYER) for index in kept],
    }


def _by_rank(ids: Ids, share: FloatArray, base: FloatArray, most: int) -> list[list[dict[str, Any]]]:
    """share: [U, G]; base: [G]."""
    known = (ids.count / (ids.count + PSEUDO))[:, None]
    score = known * share / base + (1 - known)
    return [ids.listed(score[:, rank], share[:, rank], float(base[rank]), most) for rank in range(len(base))]


def rank_shares(
    tables: Tables, layer: TraceLayer, hosts: npt.NDArray[np.bool_], seen: npt.NDArray[np.int64]
) -> tuple[FloatArray, FloatArray]:
    """Part of each id's activations by rank, [U, G], and of all activations, [G]; copies share equally.

    hosts: [E, G]; seen: [U].
    """
    parts = [tables.counts(layer, [part]) for part in FIT_PARTS]
    token_id, expert, count = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("token_id", "expert", "count")
    )
    routed = expert < layer.num_experts
    known = routed & np.isin(token_id, seen)
    weight = hosts / hosts.sum(axis=1, keepdims=True)
    where = (np.searchsorted(seen, token_id[known]), expert[known])
    held = csr_matrix((count[known], where), shape=(len(seen), layer.num_experts)) @ weight
    load = np.bincount(expert[routed], weights=count[routed], minlength=layer.num_experts)
    base = load @ weight / load.sum()
    total = held.sum(axis=1, keepdims=True)
    return np.where(total > 0, held / np.maximum(total, 1), base), base


def _tokenizer(found: Found) -> Path | None:
    """The traced model's tokenizer.json, if it is here and still the one its identity names."""
    traced: Artefact | None = found.trace.artefact if found.trace else None
    name = traced.run().get("model") if traced else None
    if not name or found.tables is None:
        return None
    try:
        folder = find_model(str(name), download=False).folder
    except SmoeError:
        return None
    path = folder / "tokenizer.json" if folder else None
    if path is None or not path.exists():
        return None
    return path if file_hash(path) == found.tables.artefact.model.get("tokenizer_sha256") else None


def token_texts(path: Path | None, ids: npt.NDArray[np.integer]) -> list[str | None] | None:
    """What ids stand for, verbatim; a part of a character as the tokenizer writes it. None without a tokenizer."""
    if path is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def text(number: int) -> str | None:
        decoded: str = tokenizer.decode([number], skip_special_tokens=False)
        stored: str | None = tokenizer.id_to_token(number)
        return stored if UNREADABLE in decoded or not decoded else decoded

    return [text(int(number)) for number in ids]
