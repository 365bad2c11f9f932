"""What a run time looks up: runtime.safetensors on a device, and from it the scores of a batch.

Axes: L MoE layers, E experts, P slots, G ranks, V vocabulary, T tokens, K experts a token, D features. A score is the
expected number of a token's K experts that a rank holds, as u8: 255 is K. Scores equal those of
`smoe_solvers.predictors`; where floats enter, a sum in another order may move a score by one.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smoe_cli.runtime.plan import take_scores
from smoe_cli.runtime_file import check_runtime
from smoe_profiles.errors import InputError

SCORE_MAX = 255
FUSED = ("token", "markov", "early-gate", "linear")
"""What the calibrated mix is made of, in the order of its weights."""
LOOKED_UP = ("token", "markov")
"""Predictors whose scores are rows of a table as they are."""


@dataclass(frozen=True)
class GateTables:
    """What turns logits into scores. affine: [L, 2, E], from an early logit to the true one; linear: [L, D, E];
    both temperatures: [L] float64, of inclusion."""

    affine: Tensor
    early_temperature: Tensor
    linear: Tensor
    linear_temperature: Tensor


@dataclass(frozen=True)
class RuntimeTables:
    """The tables of a placement, by layer in the order of layer_ids.

    layout: `checkpoint`, where the router already yields slots, or `map`; physical_to_logical: [L, P] int64;
    hosts: [L, E, G] float64, 1 where a rank holds an expert; token: [L, V + 1, G] u8, its last row popularity, for ids
    beyond the vocabulary; markov_two: [L, G * G, G] u8 (label two layers before, one before); markov_one: [L, G, G];
    popularity: [L, G]; predictor: each layer's own; fusion: each layer's weights of FUSED.
    """

    layer_ids: tuple[int, ...]
    layout: str
    num_ranks: int
    top_k: int
    physical_to_logical: Tensor
    hosts: Tensor
    token: Tensor
    markov_two: Tensor
    markov_one: Tensor
    popularity: Tensor
    predictor: tuple[str, ...]
    fusion: tuple[tuple[float, ...], ...]
    gates: GateTables | None = None

    @classmethod
    def open(cls, path: Path, device: torch.device | str) -> "RuntimeTables":
        """Reads runtime.safetensors onto a device. Raises InputError if it is none, or of another version."""
        arrays, metadata = _read(path)
        held = arrays["physical_to_logical"].long()
        num_ranks = int(metadata["num_ranks"])
        stored = json.loads(metadata["predictors"])
        popularity = arrays["popularity"]
        gates = None
        if "linear.weight" in arrays:
            gates = GateTables(
                *(
                    arrays[name].to(device, kind)
                    for name, kind in (
                        ("early.affine", torch.float32),
                        ("early.temperature", torch.float64),
                        ("linear.weight", torch.float32),
                        ("linear.temperature", torch.float64),
                    )
                )
            )
        return cls(
            layer_ids=tuple(arrays["layer_ids"].tolist()),
            layout=metadata["layout"],
            num_ranks=num_ranks,
            top_k=int(metadata["top_k"]),
            physical_to_logical=held.to(device),
            hosts=_hosts(held, num_ranks).to(device),
            token=torch.cat([arrays["token_scores"], popularity[:, None]], dim=1).to(device),
            markov_two=arrays["markov2_scores"].to(device),
            markov_one=arrays["markov1_scores"].to(device),
            popularity=popularity.to(device),
            predictor=tuple(stored[number] for number in arrays["predictor"].tolist()),
            fusion=tuple(tuple(weights) for weights in arrays["fusion.weights"].double().tolist()),
            gates=gates,
        )

    def layer_index(self, layer_id: int) -> int:
        """Where a layer of the model stands in the tables. Raises InputError if it has none."""
        if layer_id not in self.layer_ids:
            raise InputError(f"the placement knows no layer {layer_id}; it has {', '.join(map(str, self.layer_ids))}.")
        return self.layer_ids.index(layer_id)


def lookup(
    tables: RuntimeTables,
    layer: int,
    predictor: str,
    token_ids: Tensor,
    labels_one: Tensor | None = None,
    labels_two: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Where a predictor of LOOKED_UP finds its scores: a table [n, G] u8 and each token's row in it, [T] integers, its
    last row for all that lies beyond. Arguments as of `scores`.
    """
    if predictor == "token":
        return tables.token[layer], token_ids
    if labels_one is None:
        return tables.popularity[layer, None], token_ids
    if labels_two is None:
        return tables.markov_one[layer], labels_one
    return tables.markov_two[layer], labels_two.int() * tables.num_ranks + labels_one


def scores(
    tables: RuntimeTables,
    layer: int,
    token_ids: Tensor,
    labels_one: Tensor | None = None,
    labels_two: Tensor | None = None,
    early_logits: Tensor | None = None,
    features: Tensor | None = None,
    predictor: str = "selected",
) -> Tensor:
    """Scores [T, G] u8 of a batch in a layer (its index in the tables), on all rows or on a rank's slice of them.

    token_ids: [T]; labels_one, labels_two: [T] uint8, ranks that held most of a token's experts one and two MoE layers
    before, None where there is no such layer; early_logits: [T, E] of the layer's router on the layer's input, as the
    model numbers experts; features: [T, D] of the linear map.
    Raises ValueError if the predictor is unknown, was not fitted, or lacks its context.
    """
    if predictor == "selected":
        predictor = tables.predictor[layer]
    if predictor in LOOKED_UP:
        return take_scores(*lookup(tables, layer, predictor, token_ids, labels_one, labels_two))
    if predictor == "paper":
        known = (token_ids, labels_one, labels_two)
        token, markov = (take_scores(*lookup(tables, layer, part, *known)) for part in LOOKED_UP)
        return _paper_scores(token, markov)
    if predictor == "early-gate":
        slope, intercept = _gates(tables, predictor).affine[layer]
        logits = _logical(tables, layer, _there(early_logits, predictor)).float() * slope + intercept
        return _inclusion_scores(tables, layer, logits, _gates(tables, predictor).early_temperature[layer])
    if predictor == "linear":
        logits = _there(features, predictor).float() @ _gates(tables, predictor).linear[layer]
        return _inclusion_scores(tables, layer, logits, _gates(tables, predictor).linear_temperature[layer])
    if predictor == "fused":
        mixed = torch.zeros(len(token_ids), tables.num_ranks, dtype=torch.float64, device=tables.token.device)
        context = (token_ids, labels_one, labels_two, early_logits, features)
        for weight, part in zip(tables.fusion[layer], FUSED, strict=True):
            if weight:
                mixed = mixed + weight * scores(tables, layer, *context, part).double()
        return mixed.clamp(0, SCORE_MAX).round().to(torch.uint8)
    raise ValueError(f"no predictor is called {predictor}; known are paper, fused, selected, {', '.join(FUSED)}")


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    metadata = check_runtime(path)
    if metadata["predictors"] == "[]":
        raise InputError(f"{path} is a map alone, of a placement that no tables stand behind; it has no predictors.")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())  # what was opened is no mapping
            return {name: file.get_tensor(name) for name in names}, metadata
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read as run-time tables ({error}).") from error


def _hosts(physical_to_logical: Tensor, num_ranks: int) -> Tensor:
    """Whether a rank holds an expert, [L, E, G] float64; the first P mod G ranks hold one slot more."""
    layers, slots = physical_to_logical.shape
    sizes = [slots // num_ranks + (rank < slots % num_ranks) for rank in range(num_ranks)]
    rank = torch.arange(num_ranks).repeat_interleave(torch.tensor(sizes)).expand(layers, slots)
    held = torch.zeros(layers, int(physical_to_logical.max()) + 1, num_ranks, dtype=torch.float64)
    held[torch.arange(layers)[:, None], physical_to_logical, rank] = 1
    return held


def _paper_scores(token: Tensor, markov: Tensor) -> Tensor:
    """The rank of the more confident table and its confidence there, zero elsewhere."""
    chosen = torch.where((markov.amax(dim=1) > token.amax(dim=1))[:, None], markov, token)
    best = chosen.argmax(dim=1, keepdim=True)
    return torch.zeros_like(chosen).scatter(1, best, chosen.gather(1, best))


def _inclusion_scores(tables: RuntimeTables, layer: int, logits: Tensor, temperature: Tensor) -> Tensor:
    """Expected experts a rank from each expert's chance to be among the top K, [T, G] u8. logits: [T, E]."""
    values = logits.double()
    around = values.sort(dim=1, descending=True).values[:, tables.top_k - 1 : tables.top_k + 1]
    spread = values.std(dim=1, keepdim=True, correction=0) + 1e-12
    distance = (values - around.mean(dim=1, keepdim=True)) / (temperature * spread)
    chance = 1 / (1 + torch.exp(-distance.clamp(-60, 60)))
    chance = chance * (tables.top_k / chance.sum(dim=1, keepdim=True))
    expected = (chance @ tables.hosts[layer]).clamp(0, tables.top_k)
    return (expected * (SCORE_MAX / tables.top_k)).round().to(torch.uint8)


def _logical(tables: RuntimeTables, layer: int, logits: Tensor) -> Tensor:
    """Logits by the experts' own numbers: a regrouped checkpoint's router yields them by slot."""
    if tables.layout == "map":
        return logits
    return logits[:, tables.physical_to_logical[layer].argsort()]


def _gates(tables: RuntimeTables, predictor: str) -> GateTables:
    if tables.gates is None:
        raise ValueError(f"the placement was made without the early gate's record, so it has no {predictor} predictor")
    return tables.gates


def _there(values: Tensor | None, predictor: str) -> Tensor:
    if values is None:
        raise ValueError(f"the predictor {predictor} needs context that was not given")
    return values
