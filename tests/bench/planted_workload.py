"""A workload of DeepSeek-V2's size for smoe_cli.runtime.bench, from planted routing (`solver_scale`), since no trace of
that model is at hand: `python -m tests.bench.planted_workload --ranks 2 --out v2.safetensors`.

Half of the rows fit the placement and the token table, the other half is replayed.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from smoe_cli.runtime.workload import CONTIGUOUS, PLACED, Shape, Workload
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.predictors import (
    TokenChoice,
    local_counts,
    popularity_by_rank,
    quantise,
    rank_counts,
    token_table,
)
from smoe_solvers.solve import solve
from tests.bench.solver_scale import EXPERTS, TOP_K, VOCABULARY, Planted, planted

HIDDEN, WIDTH, ROWS = 5120, 1536, 32_768


def made(ranks: int, seed: int) -> Workload:
    rows = planted(seed, EXPERTS, ROWS)
    fit = Planted(rows.experts[: ROWS // 2], rows.token_id[: ROWS // 2], EXPERTS)
    held, token_id = rows.experts[ROWS // 2 :], rows.token_id[ROWS // 2 :]
    problem = fit.problem(Goal.BLEND, ranks)
    placement = solve(problem, Goal.BLEND, Method.CE, Effort.FAST, np.random.default_rng(seed)).placement
    to_rank = {CONTIGUOUS: problem.contiguous(), PLACED: placement}
    scores = {}
    for name, ranked in to_rank.items():
        hosts = np.eye(ranks, dtype=bool)[ranked]
        scores[name, "token"] = token_scores(fit, hosts)[token_id]
        scores[name, "oracle"] = quantise(local_counts(held, hosts), TOP_K)
    own = np.arange(len(held)).reshape(-1, ranks).T
    return Workload(
        shape=Shape(HIDDEN, WIDTH, EXPERTS, TOP_K),
        num_ranks=ranks,
        experts=torch.from_numpy(held.astype(np.int32)),
        weights=torch.full(held.shape, 1 / TOP_K),
        slots={
            name: torch.from_numpy(np.argsort(ranked, kind="stable").astype(np.int32))
            for name, ranked in to_rank.items()
        },
        scores={key: torch.from_numpy(found) for key, found in scores.items()},
        own_rows=dict.fromkeys(to_rank, torch.from_numpy(own.astype(np.int32))),
        origin=f"planted routing of DeepSeek-V2's size with V2-Lite's popularity and fan-out, {len(held):,} rows",
    )


def token_scores(fit: Planted, hosts: np.ndarray) -> np.ndarray:
    """The token table [V, G] u8 of the fitted rows. hosts: [E, G]."""
    token_id, expert = np.repeat(fit.token_id, TOP_K), fit.experts.reshape(-1)
    activations = rank_counts((token_id, expert, np.ones(len(expert))), VOCABULARY, hosts)
    share = popularity_by_rank(np.bincount(expert, minlength=EXPERTS), hosts)
    seen, nobody = np.bincount(fit.token_id, minlength=VOCABULARY), np.full(VOCABULARY, VOCABULARY)
    table = token_table(activations, seen, share, nobody, TOP_K, TokenChoice(4.0, "popularity"))
    return quantise(table, TOP_K)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    workload = made(given.ranks, given.seed)
    workload.save(given.out)
    print(workload.origin, workload.shape)


if __name__ == "__main__":
    main()
