"""What rows travel between ranks that are not equally far apart: judged where a placement was made for such ranks.

Axes: G ranks.
"""

from collections.abc import Sequence

import numpy as np

from smoe_cli.evaluation.breakdown import Shuffle
from smoe_cli.evaluation.detail import rank_pairs
from smoe_solvers.hierarchy import Links


def layer_travel(shuffles: Sequence[Shuffle], links: Links) -> dict[str, dict[str, dict[str, float]]]:
    """state -> predictor -> what a layer's rows travel to the ranks they need, a token, by the served rule.

    travel: in units of the least cost between two ranks; crossing: rows sent to another node, where there are nodes.
    """
    node = links.node_of_rank()
    weight = {"travel": links.excess + ~np.eye(links.num_ranks, dtype=np.bool_)}
    if node.any():
        weight["crossing"] = (node[:, None] != node[None, :]).astype(np.float64)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shuffle in shuffles:
        pairs = rank_pairs(shuffle)
        figures = {name: float((pairs * each).sum() / len(shuffle.counts)) for name, each in weight.items()}
        found.setdefault(shuffle.state, {})[shuffle.predictor] = figures
    return found
