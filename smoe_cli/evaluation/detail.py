"""What a report draws of held-out rows: loads, traffic between ranks, and how far scores can be trusted.

Axes: N rows, E experts, G ranks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.evaluation.breakdown import NONE, ORACLE, Shuffle
from smoe_solvers.choices import Assignment
from smoe_solvers.predictors import SCORE_MAX

BINS = 20


def layer_detail(
    experts: npt.NDArray[np.integer], num_experts: int, top_k: int, shuffles: Sequence[Shuffle], shown: str
) -> dict[str, Any]:
    """One layer's. experts: [N, K]; shown: the predictor whose shuffle traffic is told of, by the served rule."""
    told = [shuffle for shuffle in shuffles if shuffle.predictor in (NONE, ORACLE, shown)]
    return {
        "expert_load": np.bincount(experts.reshape(-1), minlength=num_experts)[:num_experts].tolist(),
        "rank_load": {
            shuffle.state: shuffle.served().sum(axis=0).tolist() for shuffle in told if shuffle.scores is None
        },
        "pairs": {shuffle.state: rank_pairs(shuffle).tolist() for shuffle in told},
        "reliability": {
            shuffle.predictor: reliability(shuffle.scores, shuffle.counts, top_k)
            for shuffle in shuffles
            if shuffle.state == "placed+shuffled" and shuffle.scores is not None
        },
    }


def rank_pairs(shuffle: Shuffle) -> npt.NDArray[np.int64]:
    """Rows that a de-duplicating dispatch sends from rank to rank by the served rule, [G, G]; the diagonal is rows
    that find work at home.
    """
    needed, home = shuffle.served() > 0, shuffle.homes[Assignment.RULE.value]
    return np.stack([needed[home == rank].sum(axis=0) for rank in range(needed.shape[1])]).astype(np.int64)


def reliability(scores: npt.NDArray[np.uint8], counts: npt.NDArray[np.integer], top_k: int) -> list[list[float]]:
    """[predicted local activations, their measured mean, rows times ranks] of at most BINS bins.

    scores: [N, G] by which rows went; counts: [N, G] n_g.
    """
    predicted = scores.reshape(-1) * (top_k / SCORE_MAX)
    bins = np.minimum(scores.reshape(-1).astype(np.int64) * BINS // (SCORE_MAX + 1), BINS - 1)
    size, said, held = (
        np.bincount(bins, weights=weights, minlength=BINS) for weights in (None, predicted, counts.reshape(-1))
    )
    full = np.flatnonzero(size)
    return [[float(said[i] / size[i]), float(held[i] / size[i]), int(size[i])] for i in full]
