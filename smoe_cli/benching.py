"""From artefacts to a workload: one layer's held-out routing, and what each plan would know of it.

Axes: N held-out rows, E experts, P slots, G ranks, K experts a token.
"""

import json

import numpy as np
import numpy.typing as npt
import torch

from smoe_cli.breakdown import CEILINGS, ORACLE, row_facts
from smoe_cli.evaluation import LayerRun, held_out, walk_layers
from smoe_cli.placement import layer_predictors, read_placement, read_runtime
from smoe_cli.request_routing import held_out_requests
from smoe_cli.runtime.workload import CONTIGUOUS, PLACED, Shape, Workload
from smoe_profiles.artefact import Artefact
from smoe_profiles.errors import InputError
from smoe_profiles.tables import Tables
from smoe_profiles.trace import Trace, TraceLayer
from smoe_solvers.choices import Predictor
from smoe_solvers.predictors import TokenChoice
from smoe_solvers.requests import route, route_in_turn

PREDICTORS = (Predictor.TOKEN, Predictor.MARKOV)
BATCH = 1024


def record_workload(
    chosen: Artefact, tables: Tables, trace: Trace, *, layer_id: int | None, hidden: int, width: int
) -> Workload:
    """The held-out routing of one layer (None: the middle one) under a placement and under contiguous ranks.

    hidden, width: sizes to run it at, H and I. Raises InputError if the placement has no such layer.
    """
    placement = read_placement(chosen)
    arrays, metadata = read_runtime(chosen)
    served = [layer_predictors(arrays, metadata, index) for index in range(len(placement.layer_ids))]
    wanted = placement.layer_ids[len(placement.layer_ids) // 2] if layer_id is None else layer_id
    if wanted not in placement.layer_ids:
        raise InputError(f"{chosen.path} has no layer {wanted}; it has {', '.join(map(str, placement.layer_ids))}.")
    rows = held_out(trace, PREDICTORS, served[0], None)
    choice = TokenChoice(**json.loads(metadata["token_table"]))
    votes: dict[str, npt.NDArray[np.int64]] = {}
    kept: LayerRun | None = None
    for run in walk_layers(rows, tables, placement, served, choice, predictors=PREDICTORS, batch=BATCH):
        for name, scores in run.token_scores.items():
            votes[name] = votes.get(name, np.zeros(scores.shape, np.int64)) + scores
        kept = run if run.layer.id == wanted else kept
    assert kept is not None
    index, ranks = placement.layer_ids.index(wanted), placement.num_ranks
    contiguous = np.arange(placement.num_experts)
    return Workload(
        shape=Shape(hidden, width, placement.num_experts, kept.layer.top_k),
        num_ranks=ranks,
        experts=torch.from_numpy(kept.experts.astype(np.int32)),
        weights=torch.from_numpy(_weights(trace, kept.layer, len(rows.token_id))),
        slots={
            CONTIGUOUS: torch.from_numpy(contiguous.astype(np.int32)),
            PLACED: torch.from_numpy(placement.physical_to_logical[index].astype(np.int32)),
        },
        scores=_scores(kept),
        own_rows=_own_rows(trace, votes[PLACED], ranks),
        origin=f"layer {wanted} of {trace.artefact.path.parent.name}, {len(rows.token_id):,} held-out rows",
    )


def _scores(run: LayerRun) -> dict[tuple[str, str], torch.Tensor]:
    """Scores of every predictor, and of the oracle, under each placement: [N, G] uint8."""
    placement_of = {"shuffled": CONTIGUOUS, "placed+shuffled": PLACED, **{CEILINGS[p]: p for p in (CONTIGUOUS, PLACED)}}
    return {
        (placement_of[shuffle.state], shuffle.predictor): torch.from_numpy(shuffle.scores)
        for shuffle in run.shuffles
        if shuffle.scores is not None and (shuffle.predictor == ORACLE) == (shuffle.state in CEILINGS.values())
    }


def _weights(trace: Trace, layer: TraceLayer, rows: int) -> npt.NDArray[np.float32]:
    """The gate's weights, [N, K]; equal ones where they were not recorded."""
    column = layer.column.replace("experts", "weights")
    weights: npt.NDArray[np.float32] = trace.read([column], "heldout")[column][:rows].astype(np.float32)
    return np.where(np.isnan(weights), np.float32(1 / layer.top_k), weights)


def _own_rows(trace: Trace, votes: npt.NDArray[np.int64], ranks: int) -> dict[str, torch.Tensor]:
    """Rows of the requests on every rank, [G, N // G]: in turn, and by a router that follows the token table's votes.

    A rank with fewer rows than that starts over.
    """
    requests = held_out_requests(row_facts(trace, None, len(votes)))
    sums = requests.sums(votes, requests.prompt)
    routed = {CONTIGUOUS: route_in_turn(len(sums), ranks), PLACED: route(sums)}
    owner = np.empty(len(votes), np.int64)
    found = {}
    for name, rank in routed.items():
        owner[requests.order] = np.repeat(rank, np.diff(requests.start))
        rows = [np.flatnonzero(owner == g) for g in range(ranks)]
        if not all(map(len, rows)):
            raise InputError(f"{trace.artefact.path} has too few held-out sequences for {ranks} ranks.")
        found[name] = torch.from_numpy(np.stack([np.resize(own, len(votes) // ranks) for own in rows]).astype(np.int32))
    return found
