"""Tables contracted to ranks: what the run time will look up, refitted on fit and validation together.

Axes: V vocabulary, G ranks, N sample rows, K experts a token.
"""

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from smoe_cli.placement import LayerRuntime, Placement
from smoe_profiles.tables import Samples, Tables
from smoe_solvers.assignment import assign_exact
from smoe_solvers.figures import quota
from smoe_solvers.predictors import (
    TokenChoice,
    local_counts,
    markov_tables,
    popularity_by_rank,
    quantise,
    rank_counts,
    rank_labels,
    token_table,
)

PSEUDO_CHOICES = (1.0, 2.0, 4.0, 8.0, 16.0)
UNSEEN_CHOICES = ("neighbour", "popularity")

FloatArray = npt.NDArray[np.float64]


def choose_smoothing(tables: Tables, placement: Placement) -> TokenChoice:
    """The token table's smoothing that keeps most validation activations local, fitted on the fit part alone.

    One choice for all layers; ties go to the first in order.
    """
    _, neighbour = tables.vocabulary()
    choices = [TokenChoice(pseudo, unseen) for unseen, pseudo in product(UNSEEN_CHOICES, PSEUDO_CHOICES)]
    kept = np.zeros(len(choices))
    for index, (layer, samples) in enumerate(zip(tables.layers, tables.samples("validation"), strict=True)):
        to_rank = placement.expert_to_rank[index]
        counts = tables.counts(layer, ["fit"])
        activations = rank_counts(
            (counts.token_id, counts.expert, counts.count), len(neighbour), to_rank, placement.num_ranks
        )
        share = popularity_by_rank(tables.statistics(layer)["popularity"][0], to_rank, placement.num_ranks)
        local = local_counts(samples.experts, to_rank, placement.num_ranks)
        for number, choice in enumerate(choices):
            table = quantise(token_table(activations, share, neighbour, layer.top_k, choice), layer.top_k)
            kept[number] += _local_activations(table, samples, local) / samples.experts.size
    return choices[int(kept.argmax())]


def _local_activations(table: npt.NDArray[np.uint8], samples: Samples, local: npt.NDArray[np.int32]) -> int:
    """Activations kept local by an exact assignment on the table's scores. table: [V, G]; local: [N, G]."""
    total = 0
    for start, stop in pairwise(samples.block_start):
        rank = assign_exact(table[samples.token_id[start:stop]], quota(int(stop - start), local.shape[1]))
        total += int(local[np.arange(start, stop), rank].sum())
    return total


def contract_tables(tables: Tables, placement: Placement, choice: TokenChoice) -> Iterator[LayerRuntime]:
    """Each layer's run-time tables for a placement, in order, one layer in memory at a time."""
    _, neighbour = tables.vocabulary()
    ranks = placement.num_ranks
    labels: list[npt.NDArray[np.uint8]] = []
    samples = zip(tables.samples("fit"), tables.samples("validation"), strict=True)
    for index, (layer, (fit, validation)) in enumerate(zip(tables.layers, samples, strict=True)):
        to_rank = placement.expert_to_rank[index]
        counts = tables.counts(layer)
        activations = rank_counts((counts.token_id, counts.expert, counts.count), len(neighbour), to_rank, ranks)
        share = popularity_by_rank(tables.statistics(layer)["popularity"].sum(axis=0), to_rank, ranks)
        table = token_table(activations, share, neighbour, layer.top_k, choice)
        experts = np.concatenate([fit.experts, validation.experts])
        before = labels[-2:]
        markov = markov_tables(
            before[0] if len(before) == 2 else None,
            before[-1] if before else None,
            local_counts(experts, to_rank, ranks),
            layer.top_k,
        )
        labels.append(rank_labels(experts, to_rank, ranks))
        yield LayerRuntime(quantise(table, layer.top_k), markov)
