"""Figures of `smoe evaluate` counted again with plain loops: predicted times, requests and their homes.

RANKS ranks; `ranks` of a row: the rank of each of its experts.
"""

from itertools import pairwise

import numpy as np

from smoe_profiles.models import find_model
from smoe_solvers.assignment import assign_rule

RANKS = 4


def home_of(scores):
    """The served rule, batch by batch."""
    return np.concatenate(
        [assign_rule(scores[i : i + 64], -(-len(scores[i : i + 64]) // RANKS)) for i in range(0, len(scores), 64)]
    )


def held(ranks):
    return [ranks.count(g) for g in range(RANKS)]


def curve_by_hand(points, size):
    """Seconds at `size` bytes: linear between points, no point slower than a larger one, flat below the first."""
    points = sorted(points)
    points = [(x, min(y for later, y in points if later >= x)) for x, _ in points]
    if size <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + (y1 - y0) * (size - x1) / (x1 - x0)


def microseconds_by_hand(stages, flops, width, batches_of_ranks, homes, way):
    """The mean over batches, by rows: what every row moves, dispatch and combine, the busiest rank's experts."""
    hidden = find_model("tiny-mixtral").spec.hidden_size
    total = rows = 0
    for ranks, home in zip(batches_of_ranks, homes, strict=True):
        share = len(ranks) * hidden * 2 * (RANKS - 1) / RANKS
        sent, got, load = [0] * RANKS, [0] * RANKS, [0] * RANKS
        for mine, here in zip(ranks, home, strict=True):
            for rank in mine:
                load[rank] += 1
            for rank in set(mine) - {int(here)}:
                sent[here] += 1
                got[rank] += 1
        wire = max(sent + got) * hidden * 2
        moves = {
            "sp-ep": [("reduce-scatter", share), ("all-gather", share)],
            "speculative": [("reduce-scatter", share), ("all-gather", share)],
            "ar-ep": [("all-reduce", 2 * share), ("all-gather", share)],
        }[way] + [("dispatch", wire), ("combine", wire)]
        seconds = sum(curve_by_hand(stages[stage], size) for stage, size in moves)
        total += len(ranks) * (seconds + max(load) * 6 * hidden * width / flops)
        rows += len(ranks)
    return total / rows * 1e6


def routed_by_hand(wishes):
    """Each request its best rank among those that took none in this round."""
    homes, taken = [], set()
    for wish in wishes:
        if len(taken) == RANKS:
            taken = set()
        homes.append(max((g for g in range(RANKS) if g not in taken), key=lambda g: (wish[g], -g)))
        taken.add(homes[-1])
    return homes


def figures_by_hand(requests, homes, ranks):
    """lar and remote fan-out. requests: row numbers of each; ranks: of each row's experts."""
    local = total = remote = rows = 0
    for mine, home in zip(requests, homes, strict=True):
        for row in mine:
            local += ranks[row].count(home)
            total += len(ranks[row])
            remote += len(set(ranks[row]) - {home})
            rows += 1
    return local / total, remote / rows
