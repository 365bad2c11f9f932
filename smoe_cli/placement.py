"""Placements between files and arrays: placement.parquet and runtime.safetensors (docs/formats/placement.md).

Axes: L MoE layers, E experts, P slots, G ranks, V vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from smoe_cli.runtime_file import RUNTIME_VERSION, STORED, check_runtime
from smoe_profiles.artefact import Artefact
from smoe_profiles.errors import InputError
from smoe_profiles.models import map_hash
from smoe_profiles.parquet import read_parquet
from smoe_profiles.tables import load_arrays, save_arrays
from smoe_solvers.choices import Predictor
from smoe_solvers.predictors import SCORE_MAX, LayerPredictors, MarkovTables, TokenChoice

RUNTIME = "runtime.safetensors"
PLACEMENT_FILE = "placement.parquet"
PLACEMENT_SCHEMA = pa.schema(
    [pa.field(name, pa.uint16(), nullable=False) for name in ("layer", "physical", "logical", "rank")]
)
ASSIGNMENT_RULE = "prices+moves/2"

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Placement:
    """Which expert every slot holds. layer_ids: [L]; physical_to_logical: [L, P] int64; num_ranks: G.

    Slots go to ranks in order, as equally as can be: the first P mod G ranks hold one more. P exceeds E where experts
    have copies.
    """

    layer_ids: tuple[int, ...]
    physical_to_logical: npt.NDArray[np.int64]
    num_ranks: int

    @classmethod
    def of_ranks(
        cls, layer_ids: tuple[int, ...], expert_to_rank: npt.NDArray[np.integer], num_ranks: int
    ) -> "Placement":
        """The placement that puts every expert on one rank, ascending inside it. expert_to_rank: [L, E]."""
        return cls(layer_ids, np.argsort(expert_to_rank, axis=1, kind="stable").astype(np.int64), num_ranks)

    @property
    def num_experts(self) -> int:
        return int(self.physical_to_logical.max()) + 1

    @property
    def slot_to_rank(self) -> npt.NDArray[np.int32]:
        """The rank of every slot, [P], alike in all layers."""
        return slot_ranks(self.physical_to_logical.shape[1], self.num_ranks)

    @property
    def equal_ranks(self) -> bool:
        """Whether every rank has as many slots, as every engine's map needs."""
        return bool(self.physical_to_logical.shape[1] % self.num_ranks == 0)

    @property
    def redundant(self) -> bool:
        """Whether some expert has more than one slot."""
        return bool(self.physical_to_logical.shape[1] > self.num_experts)

    @property
    def contiguous(self) -> bool:
        """Whether every slot holds what it would without placing: see contiguous_placement."""
        slots = self.physical_to_logical.shape[1]
        return bool((self.physical_to_logical == np.arange(slots) % self.num_experts).all())

    @property
    def hosts(self) -> npt.NDArray[np.bool_]:
        """[L, E, G]: whether a rank holds a copy of an expert."""
        layers = len(self.physical_to_logical)
        held = np.zeros((layers, self.num_experts, self.num_ranks), np.bool_)
        held[np.arange(layers)[:, None], self.physical_to_logical, self.slot_to_rank[None, :]] = True
        return held

    @property
    def expert_to_rank(self) -> npt.NDArray[np.int32]:
        """The one rank of every expert, [L, E]. Raises ValueError where experts have copies."""
        if self.redundant:
            raise ValueError("experts with several copies have no one rank")
        return self.slot_to_rank[np.argsort(self.physical_to_logical, axis=1)]

    @property
    def map_sha256(self) -> str:
        return map_hash(self.physical_to_logical)


def slot_ranks(slots: int, num_ranks: int) -> npt.NDArray[np.int32]:
    """The rank of every slot, [P]: equal runs, the first P mod G ranks one slot longer (every engine's linear rule)."""
    sizes = slots // num_ranks + (np.arange(num_ranks) < slots % num_ranks)
    return np.repeat(np.arange(num_ranks, dtype=np.int32), sizes)


def contiguous_placement(layer_ids: tuple[int, ...], num_experts: int, num_ranks: int, redundant: int = 0) -> Placement:
    """What every engine starts from: slot p holds expert p, and with extra slots on every rank p mod E."""
    slots = num_ranks * (num_experts // num_ranks + redundant) if redundant else num_experts
    return Placement(layer_ids, np.tile(np.arange(slots) % num_experts, (len(layer_ids), 1)), num_ranks)


def write_placement(path: Path, placement: Placement) -> None:
    """placement.parquet: one row a slot (layer, physical, logical, rank)."""
    layers, slots = placement.physical_to_logical.shape
    table = pa.table(
        {
            "layer": np.repeat(np.array(placement.layer_ids, np.uint16), slots),
            "physical": np.tile(np.arange(slots, dtype=np.uint16), layers),
            "logical": placement.physical_to_logical.astype(np.uint16).reshape(-1),
            "rank": np.tile(placement.slot_to_rank.astype(np.uint16), layers),
        }
    )
    pq.write_table(table, path, compression="zstd")


def read_placement(artefact: Artefact) -> Placement:
    """The placement of an artefact (or of a regrouped checkpoint), checked to hold every expert in every layer.

    Raises InputError if it does not, if slots are missing, or if a rank holds an expert twice.
    """
    path = artefact.record / PLACEMENT_FILE
    table = read_parquet(path, PLACEMENT_SCHEMA)
    layer, physical, logical, rank = (table[name].to_numpy().astype(np.int64) for name in PLACEMENT_SCHEMA.names)
    if not len(layer):
        raise InputError(f"{path} holds no layers.")
    num_ranks = int(rank.max()) + 1
    layer_ids = tuple(int(number) for number in np.unique(layer))
    rows = []
    for number in layer_ids:
        here = layer == number
        order = np.argsort(physical[here])
        expert, slot, host = logical[here][order], physical[here][order], rank[here][order]
        if (slot != np.arange(len(slot))).any() or len(np.unique(expert)) <= expert.max():
            raise InputError(f"{path}: layer {number} does not name every expert, and every slot exactly once.")
        if (host != slot_ranks(len(slot), num_ranks)).any():
            raise InputError(f"{path}: layer {number} does not give its slots to ranks in order.")
        if len(np.unique(host * len(slot) + expert)) < len(slot):
            raise InputError(f"{path}: layer {number} holds an expert twice on one rank.")
        rows.append(expert)
    if len({(len(row), int(row.max())) for row in rows}) != 1:
        raise InputError(f"{path}: layers differ in their number of experts.")
    return Placement(layer_ids, np.stack(rows), num_ranks)


def write_runtime(
    path: Path,
    placement: Placement,
    layers: list[LayerPredictors],
    *,
    top_k: int,
    choice: TokenChoice,
    model: dict[str, object],
    layout: str,
) -> dict[str, int]:
    """runtime.safetensors: everything a run time looks up, contracted to ranks. Returns each tensor's bytes."""
    token = np.stack([layer.token for layer in layers])
    best = token.max(axis=2)
    arrays = {
        "layer_ids": np.array(placement.layer_ids, np.int32),
        "physical_to_logical": placement.physical_to_logical.astype(np.uint16),
        "token_scores": token,
        "token_rank": token.argmax(axis=2).astype(np.uint8),
        "token_confidence": best,
        "markov2_scores": np.stack([layer.markov.two for layer in layers]),
        "markov1_scores": np.stack([layer.markov.one for layer in layers]),
        "popularity": np.stack([layer.markov.none for layer in layers]),
        "predictor": np.array([STORED.index(layer.chosen) for layer in layers], np.uint8),
        "fusion.weights": np.array([layer.fusion for layer in layers], np.float32),
    }
    maps = [layer.linear for layer in layers if layer.linear is not None]
    if len(maps) == len(layers):
        arrays["linear.weight"] = np.stack(maps).astype(np.float32)
        arrays["linear.temperature"] = np.array([layer.linear_temperature for layer in layers], np.float32)
        arrays["early.affine"] = np.array([layer.early for layer in layers], np.float32)
        arrays["early.temperature"] = np.array([layer.early_temperature for layer in layers], np.float32)
    metadata = {
        "format_version": str(RUNTIME_VERSION),
        "layout": layout,
        "num_ranks": str(placement.num_ranks),
        "top_k": str(top_k),
        "vocab_size": str(token.shape[1]),
        "score_scale": repr(SCORE_MAX / top_k),
        "assignment": ASSIGNMENT_RULE,
        "predictors": json.dumps(STORED),
        "token_table": json.dumps({"pseudo": choice.pseudo, "unseen": choice.unseen}, sort_keys=True),
        "model": json.dumps(model, sort_keys=True),
    }
    save_arrays(path, arrays, metadata)
    return {name: array.nbytes for name, array in arrays.items()}


def write_map(path: Path, placement: Placement) -> None:
    """A runtime.safetensors that holds the map alone: of a placement that no tables stand behind."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "layer_ids": np.array(placement.layer_ids, np.int32),
        "physical_to_logical": placement.physical_to_logical.astype(np.uint16),
    }
    metadata = {
        "format_version": str(RUNTIME_VERSION),
        "layout": "map",
        "num_ranks": str(placement.num_ranks),
        "predictors": "[]",
    }
    save_arrays(path, arrays, metadata)


def read_runtime(artefact: Artefact) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, str]]:
    """Arrays and metadata of a runtime.safetensors. Raises InputError for another version, or a damaged file."""
    path = artefact.record / RUNTIME
    metadata = check_runtime(path)
    arrays = load_arrays(path)
    if "predictor" in arrays and arrays["predictor"].max(initial=0) >= len(json.loads(metadata["predictors"])):
        raise InputError(f"{path} numbers a predictor {arrays['predictor'].max()}, which it does not name.")
    return arrays, metadata


def layer_predictors(
    arrays: dict[str, npt.NDArray[np.generic]], metadata: dict[str, str], index: int
) -> LayerPredictors:
    """One layer's tables out of what `read_runtime` returns. Raises InputError where it holds a map alone."""
    if "token_scores" not in arrays:
        raise InputError("the placement is a map alone, no tables stand behind it; import it again beside its tables.")
    markov = MarkovTables(
        *(arrays[name][index].astype(np.uint8) for name in ("markov2_scores", "markov1_scores", "popularity"))
    )
    names = json.loads(metadata["predictors"])
    mapped = "linear.weight" in arrays
    return LayerPredictors(
        token=arrays["token_scores"][index].astype(np.uint8),
        markov=markov,
        early_temperature=float(arrays["early.temperature"].astype(np.float64)[index]) if mapped else 0.0,
        linear_temperature=float(arrays["linear.temperature"].astype(np.float64)[index]) if mapped else 0.0,
        early=arrays["early.affine"][index].astype(np.float32) if mapped else None,
        linear=arrays["linear.weight"][index].astype(np.float32) if mapped else None,
        fusion=tuple(float(weight) for weight in arrays["fusion.weights"].astype(np.float64)[index]),
        chosen=Predictor(names[int(arrays["predictor"].astype(np.int64)[index])]),
    )
