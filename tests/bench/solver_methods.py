"""The papers' claims, measured: methods at equal time on 13 real layers, held out. About ten minutes on one core.

Claims: lar +14.2 % and imbalance -10.2 % for Cross-Entropy over METIS and 2-D balanced k-means (first paper); lar
+15.4 % and imbalance -36.7 % (max / median load) for the later one over its best baseline. Instances, halves and
batches are those of tests/bench/solver_study.py. Every method searches goal lar (theta .1) on the fit half for as long
as `ce` takes by its own counts, plain Cross-Entropy also for four times as long, and is measured on the other half.
Names given as arguments choose instances (law, gptoss, ...). Traces lie outside the repository; SMOE_DATA names their
folder (default ../shared/data). Set OMP_NUM_THREADS=1: processor time counts every thread.
"""

import os
import sys
from pathlib import Path

import numpy as np

from smoe_solvers.bounds import largest_sum
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.equal_time import run_for, search_timed
from smoe_solvers.methods.metis import metis_placements
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.problem import Problem, build_problem
from smoe_solvers.seeds import pair_cut

DATA = Path(os.environ.get("SMOE_DATA", Path(__file__).parents[3] / "shared/data")).resolve()
BATCH = 1024
MORE = 4
INSTANCES = [
    *((f"dsv2lite_esft_{task}", pos) for task in ("intent", "law", "summary") for pos in (0, 12, 25)),
    *(("gptoss20b_gen", pos) for pos in (0, 12, 23)),
    ("olmoe1b7b_gsm8k_layer0", 0),
]
OTHERS = (
    Method.CONTIGUOUS,
    Method.LOAD,
    Method.SPECTRAL,
    Method.METIS,
    Method.KMEANS2D,
    Method.ALTERNATING,
    Method.CE_PLAIN,
    Method.ILS,
)
BOUNDED = (("dsv2lite_esft_law", 12), ("gptoss20b_gen", 12))
FIGURES = ("lar", "fanout", "max/mean", "max/median")


def halves(name: str, pos: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Fit rows, held rows [N, K] and E: even and odd sequences, or the first 2000 rows where borders are not known."""
    with np.load(DATA / "traces" / f"{name}.npz") as archive:
        rows, experts = archive["ids"][pos].astype(np.uint16), int(archive["num_experts"])
        if "seq_len" not in archive.files:
            return rows[:2000], rows[2000:], experts
        sequences = np.split(rows, np.cumsum(archive["seq_len"])[:-1])
        return np.concatenate(sequences[0::2]), np.concatenate(sequences[1::2]), experts


def problem_of(rows: np.ndarray, experts: int, ranks: int) -> Problem:
    starts = np.array([*range(0, len(rows), BATCH), len(rows)], np.int64)
    load = np.bincount(rows.reshape(-1), minlength=experts).astype(np.int64)
    return build_problem(Goal.LAR, ranks, rows, starts, load)


def figures(problem: Problem, placement: np.ndarray) -> list[float]:
    scored, load = score(problem, placement), np.bincount(placement, problem.load, problem.num_ranks)
    return [scored.lar, scored.fanout, load.max() / load.mean(), load.max() / np.median(load)]


def measure(name: str, pos: int, ranks: int) -> dict[str, list[float]]:
    """Held-out figures and seconds of every method on one instance."""
    fit, held, experts = halves(name, pos)
    problem, judge = problem_of(fit, experts, ranks), problem_of(held, experts, ranks)
    search = search_timed(problem, Goal.LAR, Effort.DEFAULT, np.random.default_rng(0))
    once = metis_placements(coactivation(problem), ranks, seeds=1)[0]
    found = {"ce": [*figures(judge, search.placement), search.seconds], "metis once": [*figures(judge, once), 0.0]}
    for method in OTHERS:
        timed = run_for(problem, method, search.seconds, [0, pos])
        assert timed
        found[method.value] = [*figures(judge, timed.placement), timed.seconds]
    longer = run_for(problem, Method.CE_PLAIN, MORE * search.seconds, [0, pos])
    assert longer
    found[f"ce-plain x{MORE}"] = [*figures(judge, longer.placement), longer.seconds]
    return found


def compare(instances: list[tuple[str, int]], ranks: int) -> None:
    measured = [measure(name, pos, ranks) for name, pos in instances]
    means = {method: np.mean([one[method] for one in measured], axis=0) for method in measured[0]}
    print(f"\nEP{ranks}, goal lar, {len(instances)} layers, held-out halves, equal time")
    print(f"{'method':<12}" + "".join(f"{name:>12}" for name in (*FIGURES, "seconds")))
    for method, values in sorted(means.items(), key=lambda item: item[1][0]):
        print(f"{method:<12}" + "".join(f"{value:>12.3f}" for value in values))
    for method in ("ce-plain", f"ce-plain x{MORE}", "ce", "alternating"):
        for baseline in ("metis once", "metis", "kmeans2d"):
            change = means[method][: len(FIGURES)] / means[baseline][: len(FIGURES)] - 1
            listed = ", ".join(f"{name} {value:+.1%}" for name, value in zip(FIGURES, change, strict=True))
            print(f"{method} against {baseline}: {listed}")


def bounds(name: str, pos: int, ranks: int) -> None:
    """Co-activation kept inside ranks: the best of 100 pair-cut descents, and the most there could be."""
    fit, _, experts = halves(name, pos)
    problem = problem_of(fit, experts, ranks)
    joint = coactivation(problem).astype(np.float64)
    generator = np.random.default_rng(0)
    kept = []
    for _ in range(100):
        placement = pair_cut(problem, generator)
        kept.append(joint[placement[:, None] == placement].sum() / joint.sum())
    most = largest_sum(joint / joint.sum(), ranks)[0]
    print(f"{name} pos {pos}, EP{ranks}: kept {max(kept):.3f}, bound {most:.3f}, gap {1 - max(kept) / most:.1%}")


def main() -> None:
    wanted = sys.argv[1:] or [""]
    chosen = [(name, pos) for name, pos in INSTANCES if any(part in name for part in wanted)]
    measure(*chosen[0], 4)  # compiles
    print("pair weight inside ranks")
    for name, pos in BOUNDED:
        for ranks in (4, 8):
            bounds(name, pos, ranks)
    for ranks in (4, 8):
        compare(chosen, ranks)


if __name__ == "__main__":
    main()
