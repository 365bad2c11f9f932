"""What the search costs at the size of DeepSeek-V2, and how cost grows: planted routing, no files needed.

`python -m tests.bench.solver_scale` solves 59 layers x 160 experts, K = 6, on 8 ranks, from 48 batches of 1024 rows of
a 102,400-entry vocabulary, with the token table as demand: seconds and memory with compilation, then lar and fan-out
beside METIS x 40 on some layers. `--curves` prints the cost of one layer against E, G and rows. With SMOE_DATA (default
../shared/data) it also shows how well planted routing matches the popularity and fan-out of real DeepSeek-V2-Lite.

Planted routing: expert e of token t has logit heat[e] + PULL * topic[id, cluster(e)] + OWN * taste[id, e] + NOISE *
gumbel, all normal; ids follow Zipf's law.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np

from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.methods.metis import metis_placements
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.problem import Problem, build_problem, token_demand
from smoe_solvers.solve import solve

LAYERS, EXPERTS, TOP_K, RANKS, VOCABULARY = 59, 160, 6, 8, 102_400
BATCH, BATCHES = 1024, 48
CLUSTERS, HEAT, PULL, OWN, NOISE = 10, 1.0, 2.1, 0.88, 0.74
PSEUDO = 4.0
SHARES = (0.0, 0.03, 0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True)
class Planted:
    """Rows of one layer. experts: [N, K] uint16; token_id: [N]."""

    experts: np.ndarray
    token_id: np.ndarray
    num_experts: int

    def problem(self, goal: Goal, ranks: int, **options: float) -> Problem:
        """The problem as cocluster builds it: what is known of an id is the table's row, here counted on these rows."""
        starts = np.array([*range(0, len(self.experts), BATCH), len(self.experts)], np.int64)
        popularity = np.bincount(self.experts.reshape(-1), minlength=self.num_experts)
        kinds, kind = np.unique(self.token_id, return_inverse=True)
        key = np.repeat(kind, self.experts.shape[1]) * self.num_experts + self.experts.reshape(-1)
        pairs, count = np.unique(key, return_counts=True)
        counts = (kinds[pairs // self.num_experts], pairs % self.num_experts, count)
        demand = token_demand(kinds, counts, popularity, self.experts.shape[1], PSEUDO)
        return build_problem(
            goal, ranks, self.experts, starts, popularity, token_id=self.token_id, demand=demand, **options
        )


def planted(seed: int, experts: int, rows: int, top_k: int = TOP_K) -> Planted:
    """Routing with hidden clusters of experts."""
    generator = np.random.default_rng(seed)
    weight = 1 / np.arange(1, VOCABULARY + 1)
    token_id = generator.choice(VOCABULARY, size=rows, p=weight / weight.sum())
    kinds, kind = np.unique(token_id, return_inverse=True)
    cluster = generator.permutation(np.arange(experts) % CLUSTERS)
    topic = generator.standard_normal((len(kinds), CLUSTERS), np.float32)
    taste = generator.standard_normal((len(kinds), experts), np.float32)
    likes = HEAT * generator.standard_normal(experts, np.float32) + PULL * topic[:, cluster] + OWN * taste
    chosen = np.empty((rows, top_k), np.uint16)
    for start in range(0, rows, 8192):
        logit = likes[kind[start : start + 8192]]
        logit += NOISE * generator.gumbel(size=logit.shape).astype(np.float32)
        chosen[start : start + 8192] = np.argpartition(-logit, top_k - 1, axis=1)[:, :top_k]
    return Planted(chosen, token_id, experts)


def match() -> None:
    """Planted routing of 64 experts beside nine real layers: load of the experts at SHARES of the order, fan-out."""
    from tests.bench.solver_study import DATA, FILES, halves

    real = [
        curves(halves(DATA / f"traces/{FILES[file][0]}.npz", position)[0], 64)
        for file in ("intent", "law", "summary")
        for position in (0, 12, 25)
    ]
    made = [curves(planted(seed, 64, 3600).experts, 64) for seed in range(9)]
    listed = ", ".join(f"{share:g}" for share in SHARES)
    print(f"load over mean at {listed} of the experts; fan-out on 2, 4, 8 ranks contiguous, then METIS")
    for name, found in (("real", real), ("planted", made)):
        print(f"{name:<8}", " ".join(f"{value:.2f}" for value in np.mean(found, axis=0)))


def curves(rows: np.ndarray, experts: int) -> np.ndarray:
    load = np.sort(np.bincount(rows.reshape(-1), minlength=experts))[::-1] / rows.size * experts
    fanout = []
    for ranks in (2, 4, 8):
        starts = np.array([0, len(rows)], np.int64)
        problem = build_problem(Goal.FANOUT, ranks, rows, starts, np.bincount(rows.reshape(-1), minlength=experts))
        best = min(score(problem, p).fanout for p in metis_placements(coactivation(problem), ranks, 4))
        fanout.append((score(problem, problem.contiguous()).fanout, best))
    return np.concatenate([[load[int(share * experts)] for share in SHARES], *zip(*fanout, strict=True)])


def solve_one(layer: int, goal: Goal, effort: Effort, layers: int) -> tuple[np.ndarray, dict[str, int]]:
    problem = planted(layer, EXPERTS, BATCH * BATCHES).problem(goal, RANKS)
    solution = solve(problem, goal, Method.CE, effort, np.random.default_rng([0, layer]), layers=layers)
    return solution.placement, solution.settings


def solve_all(goal: Goal, effort: Effort, layers: int, jobs: int) -> None:
    """All layers in worker processes, from a cold compilation cache: wall and CPU seconds, peak memory."""
    from joblib import Parallel, delayed

    started = time.perf_counter()
    found = Parallel(n_jobs=jobs)(delayed(solve_one)(layer, goal, effort, layers) for layer in range(layers))
    wall = time.perf_counter() - started
    made = time.process_time()
    planted(0, EXPERTS, BATCH * BATCHES).problem(goal, RANKS)
    making = time.process_time() - made
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    peak = (own.ru_maxrss + jobs * workers.ru_maxrss) / 2**20
    print(
        f"goal {goal}, effort {effort}, {layers} layers, {jobs} jobs: {wall:.1f} s wall, CPU of workers "
        f"{workers.ru_utime + workers.ru_stime:.1f} s, of which about {making * layers:.1f} s make the planted rows; "
        f"peak at most {peak:.2f} GiB; {found[0][1]}",
        flush=True,
    )


def timed(goal: Goal, effort: Effort, layers: int, jobs: int) -> None:
    """`solve_all` in a new process with an empty compilation cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "tests.bench.solver_scale", "--timed", goal, "--effort", effort]
        command += ["--layers", str(layers), "--jobs", str(jobs)]
        subprocess.run(command, check=True, env=os.environ | {"NUMBA_CACHE_DIR": cache})


def quality(effort: Effort, layers: int, shown: list[int]) -> None:
    """lar of goal lar and fan-out of goal fanout beside METIS x 40, on all rows and their table, theta 0."""
    for layer in shown:
        rows = planted(layer, EXPERTS, BATCH * BATCHES)
        for goal in (Goal.LAR, Goal.FANOUT):
            problem = rows.problem(goal, RANKS, theta=0.0)
            metis = [score(problem, p) for p in metis_placements(coactivation(problem), RANKS)]
            started = time.process_time()
            found = [
                score(problem, solve(problem, goal, Method.CE, effort, np.random.default_rng([0, layer]),
                                     metis_seeds=seeded, layers=layers).placement)
                for seeded in (False, True)
            ]  # fmt: skip
            taken = (time.process_time() - started) / 2
            term, best, digits = ("lar", max, 4) if goal is Goal.LAR else ("fanout", min, 3)
            value = [best(getattr(one, term) for one in metis), *(getattr(one, term) for one in found)]
            print(f"layer {layer}: {term} METIS x 40 {value[0]:.{digits}f}, search {value[1]:.{digits}f}, "
                  f"with METIS seeds {value[2]:.{digits}f}; {taken:.1f} s", flush=True)  # fmt: skip


def cost_curves(effort: Effort) -> None:
    """CPU seconds of one layer, alone and as one of 59, against experts, ranks and rows; the rest as DeepSeek-V2."""
    usual = {"experts": EXPERTS, "ranks": RANKS, "rows": BATCH * BATCHES}
    print("experts ranks rows: CPU seconds of one layer (lar, fanout), then as one of 59; rounds")
    for axis, values in (("experts", (32, 64, 160, 256)), ("ranks", (2, 4, 8, 16)),
                         ("rows", (4096, 16_384, 49_152, 131_072))):  # fmt: skip
        for value in values:
            size = usual | {axis: value}
            rows = planted(0, size["experts"], size["rows"])
            taken, rounds = [], []
            for layers in (1, LAYERS):
                for goal in (Goal.LAR, Goal.FANOUT):
                    problem = rows.problem(goal, size["ranks"])
                    started = time.process_time()
                    solution = solve(problem, goal, Method.CE, effort, np.random.default_rng(0), layers=layers)
                    taken.append(time.process_time() - started)
                    rounds.append(solution.settings["rounds"])
            print(f"{size['experts']:>4} {size['ranks']:>3} {size['rows']:>7}: "
                  f"{' '.join(f'{seconds:6.2f}' for seconds in taken)}; {rounds}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--effort", type=Effort, choices=list(Effort), default=Effort.DEFAULT)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--curves", action="store_true", help="cost of one layer against experts, ranks and rows")
    parser.add_argument("--timed", type=Goal, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.timed:
        solve_all(options.timed, options.effort, options.layers, options.jobs)
    elif options.curves:
        cost_curves(options.effort)
    else:
        match()
        for goal in (Goal.LAR, Goal.FANOUT, Goal.BLEND):
            timed(goal, options.effort, options.layers, options.jobs)
        quality(options.effort, options.layers, [0, 20, 40])


if __name__ == "__main__":
    main()
