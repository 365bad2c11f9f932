"""What naming ranks alike from layer to layer is worth to the Markov predictor.

`python -m tests.bench.solver_labels`: eight adjacent layers of real routing, placed on even sequences (goal blend,
fast), the Markov tables fitted on them too; lar of the exact shuffle by the Markov scores on odd sequences, with ranks
named so that tokens stay, and named at random. With SMOE_DATA (default ../shared/data).
"""

import numpy as np

from smoe_solvers.assignment import assign_exact
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.cross_entropy import relabel
from smoe_solvers.figures import batches, quota
from smoe_solvers.predictors import local_counts, markov_scores, markov_tables, rank_labels
from smoe_solvers.problem import build_problem
from smoe_solvers.redundancy import single_hosts
from smoe_solvers.solve import solve
from tests.bench.solver_study import BATCH, DATA, FILES, halves

LAYERS = range(10, 18)


def place(rows: np.ndarray, experts: int, ranks: int, seed: int) -> np.ndarray:
    starts = np.array([*range(0, len(rows), BATCH), len(rows)], np.int64)
    problem = build_problem(Goal.BLEND, ranks, rows, starts, np.bincount(rows.reshape(-1), minlength=experts))
    return solve(problem, Goal.BLEND, Method.CE, Effort.FAST, np.random.default_rng(seed)).placement


def aligned(placements: list[np.ndarray], fit: list[np.ndarray], ranks: int) -> list[np.ndarray]:
    """Each layer's ranks named so that its tokens stay where the layer before had most of their experts."""
    found = [placements[0]]
    for index in range(1, len(placements)):
        before = rank_labels(fit[index - 1], single_hosts(found[-1], ranks))
        towards = np.zeros((len(placements[index]), ranks))
        np.add.at(towards, (fit[index], before[:, None]), 1)
        capacity = np.full(ranks, len(placements[index]) // ranks)
        found.append(relabel(placements[index], towards, capacity))
    return found


def local_rate(placements: list[np.ndarray], fit: list[np.ndarray], held: list[np.ndarray], ranks: int) -> float:
    """Mean lar over the layers that have two before them."""
    hosts = [single_hosts(placement, ranks) for placement in placements]
    labels = [[rank_labels(rows, host) for rows, host in zip(part, hosts, strict=True)] for part in (fit, held)]
    found = []
    for index in range(2, len(placements)):
        top_k = fit[index].shape[1]
        tables = markov_tables(
            labels[0][index - 2], labels[0][index - 1], local_counts(fit[index], hosts[index]), top_k
        )
        scores = markov_scores(tables, labels[1][index - 2], labels[1][index - 1], len(held[index]))
        counts = local_counts(held[index], hosts[index])
        kept = 0
        for part in batches(len(scores), BATCH):
            rank = assign_exact(scores[part], quota(len(scores[part]), ranks))
            kept += int(counts[part][np.arange(len(rank)), rank].sum())
        found.append(kept / counts.sum())
    return float(np.mean(found))


def main() -> None:
    print("markov lar, held out: ranks named alike, at random (mean of 3 draws)")
    for name in ("law", "intent", "summary", "gpt-oss"):
        pairs = [halves(DATA / f"traces/{FILES[name][0]}.npz", layer) for layer in LAYERS]
        fit, held = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        experts = 32 if name == "gpt-oss" else 64
        for ranks in (4, 8):
            placements = [place(rows, experts, ranks, layer) for layer, rows in enumerate(fit)]
            generator = np.random.default_rng(0)
            shuffled = [[generator.permutation(ranks)[one] for one in placements] for _ in range(3)]
            by_chance = np.mean([local_rate(one, fit, held, ranks) for one in shuffled])
            alike = local_rate(aligned(placements, fit, ranks), fit, held, ranks)
            print(f"{name:8} EP{ranks}: {alike:.3f} {by_chance:.3f}", flush=True)


if __name__ == "__main__":
    main()
