"""What extra slots are worth on real routing: copies of the hottest experts, greedily chosen ones, and smoe's.

`python -m tests.bench.solver_redundancy` places the layers of tests/bench/solver_study.py on 4 and 8 ranks (goal lar,
theta 0, true routing), gives every rank one and two extra slots, and prints lar and fan-out, fitted and held out. It
fails if the mean held-out lar with one slot is below that of the greedy choice that the reference was measured with.
SMOE_DATA names the folder of the traces (default ../shared/data).
"""

import argparse
import sys
import time

import numpy as np

from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.copy_descent import lay_out, objective, settle
from smoe_solvers.copy_search import add_copies, score_hosts
from smoe_solvers.problem import Problem
from smoe_solvers.redundancy import single_hosts
from smoe_solvers.solve import solve
from tests.bench.solver_study import DATA, FILES, halves, problem_of

REFERENCE = {4: 0.696, 8: 0.573}
"""Mean held-out lar of the greedy choice with one slot a rank, by number of ranks."""


def hottest(problem: Problem, hosts: np.ndarray, redundant: int) -> np.ndarray:
    """Every rank copies the experts of most activations that it does not hold."""
    hosts = hosts.copy()
    for g in range(problem.num_ranks):
        foreign = [e for e in np.argsort(-problem.load, kind="stable") if not hosts[e, g]]
        hosts[foreign[:redundant], g] = True
    return hosts


def greedy(problem: Problem, hosts: np.ndarray, redundant: int) -> np.ndarray:
    """Every rank copies the experts its tokens miss most; assign again, choose again, while that is better."""
    rows = lay_out(problem)
    state, best, reached = settle(rows, hosts), hosts, np.inf
    while True:
        at_home = np.zeros((rows.demand.shape[1], problem.num_ranks))
        np.add.at(at_home, rows.kind, state.flow)
        missed = np.where(hosts, -1, rows.demand @ at_home)
        found = hosts.copy()
        for g in range(problem.num_ranks):
            found[np.argsort(-missed[:, g], kind="stable")[:redundant], g] = True
        state = settle(rows, found)
        if objective(rows, state) >= reached:
            return best
        best, reached = found, objective(rows, state)


def measure(name: str, position: int, ranks: int, goal: Goal, most: int, effort: Effort) -> list[list[float]]:
    """By number of extra slots from one: (fitted lar and fan-out, held out, of each choice), and seconds a layer."""
    fit, held, experts = halves(DATA / f"traces/{name}.npz", position)
    problem = problem_of(goal, fit, experts, ranks)
    fitted, unseen = (problem_of(Goal.LAR, rows, experts, ranks) for rows in (fit, held))
    placement = solve(problem, goal, Method.CE, effort, np.random.default_rng(0)).placement
    plain = single_hosts(placement, ranks)
    found = []
    for redundant in range(1, most + 1):
        started = time.process_time()
        slots = experts // ranks + redundant
        ours, _ = add_copies(problem, placement, slots, effort, np.random.default_rng(0))
        taken = time.process_time() - started
        chosen = (plain, hottest(fitted, plain, redundant), greedy(fitted, plain, redundant), ours)
        scores = [score_hosts(half, hosts) for hosts in chosen for half in (fitted, unseen)]
        found.append([value for one in scores for value in (one.lar, one.fanout)] + [taken])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--effort", type=Effort, choices=list(Effort), default=Effort.DEFAULT)
    parser.add_argument("--goal", type=Goal, choices=[Goal.LAR, Goal.FANOUT], default=Goal.LAR)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--slots", type=int, default=2, help="up to so many extra slots a rank")
    options = parser.parse_args()
    layers = [(name, position) for name, positions in FILES.values() for position in positions]
    print(f"mean of {len(layers)} layers, goal {options.goal}: lar fan-out, fitted then held out")
    below = []
    for ranks in options.ranks:
        table = np.array([measure(*layer, ranks, options.goal, options.slots, options.effort) for layer in layers])
        for redundant, means in enumerate(table.mean(axis=0), 1):
            for choice, values in zip(("none", "hottest", "greedy", "smoe"), means[:-1].reshape(4, 4), strict=True):
                print(f"G={ranks}, {redundant} extra, {choice:<8}", *(f"{value:.4f}" for value in values), flush=True)
            print(f"G={ranks}, {redundant} extra, CPU seconds a layer: {means[-1]:.1f}")
            if options.goal is Goal.LAR and redundant == 1 and means[-3] < REFERENCE.get(ranks, 0):
                below.append(f"G={ranks}: held-out lar {means[-3]:.4f} is below {REFERENCE[ranks]}")
    if below:
        sys.exit("; ".join(below))


if __name__ == "__main__":
    main()
