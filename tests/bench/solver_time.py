"""Predicted layer time of every goal's placement, held out, on the shipped hardware models; bytes against imbalance.

    PYTHONPATH=. python -m tests.bench.solver_time [fast|default|thorough]

Real routing, as tests/bench/solver_study.py reads it (even sequences fit, odd ones held out, batches of 1,024 rows),
one process. SMOE_DATA names the data (default ../shared/data). Homes under `speculative` are an exact shuffle's by true
routing. Every time is a share of contiguous experts' under the same mode. Ends with status 1 if goal time loses to
another goal by more than two standard errors over the instances of a table row.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smoe_cli.hardware import SHIPPED, LayerShape, load_hardware
from smoe_solvers.assignment import Int32Array
from smoe_solvers.choices import Effort, Goal, Mode
from smoe_solvers.cross_entropy import cross_entropy
from smoe_solvers.figures import imbalance
from smoe_solvers.layer_time import LayerCost, count_traffic
from smoe_solvers.problem import Problem, build_problem
from smoe_solvers.timed import Compromise, Rows, Timing, homes, other_goals, rank_counts, reweighted, solve_time
from smoe_solvers.timed import predicted_times as predict

DATA = Path(os.environ.get("SMOE_DATA", Path(__file__).parents[3] / "shared/data")).resolve() / "traces"
BATCH = 1024
LARGE = 4096
RANKS = (4, 8)
MODES = (Mode.SPECULATIVE, Mode.SP_EP, Mode.DP_EP)
V2_LITE, GPT_OSS, OLMOE = LayerShape(2048, 1408), LayerShape(2880, 2880), LayerShape(2048, 1024)

INSTANCES = [
    *((f"dsv2lite_esft_{task}", place, V2_LITE) for task in ("intent", "law", "summary") for place in (0, 12, 25)),
    *(("gptoss20b_gen", place, GPT_OSS) for place in (0, 12, 23)),
    ("olmoe1b7b_gsm8k_layer0", 0, OLMOE),
]
PLOTTED = [("dsv2lite_esft_law", 12, V2_LITE), ("dsv2lite_esft_summary", 12, V2_LITE), ("gptoss20b_gen", 12, GPT_OSS)]
SWEEP = [
    Compromise(goal, theta, mu)
    for goal, mu in ((Goal.LAR, 0.0), (Goal.BLEND, 1.0))
    for theta in (0, 0.1, 0.25, 0.5, 0.75)
]


@dataclass(frozen=True)
class Case:
    """One layer of one trace: its problem on the fit half, and both halves as rows in batches."""

    name: str
    shape: LayerShape
    problem: Problem
    fit: Rows
    held: Rows

    def cost(self, hardware: str, mode: Mode) -> LayerCost:
        return load_hardware(hardware).layer_cost(mode, self.problem.num_ranks, self.shape)

    def held_time(self, placement: Int32Array, cost: LayerCost) -> float:
        return float(predict(self.held, placement, cost).mean())


def build_case(file: str, place: int, shape: LayerShape, ranks: int, batch: int = BATCH) -> Case:
    with np.load(DATA / f"{file}.npz") as archive:
        experts, count = archive["ids"][place].astype(np.uint16), int(archive["num_experts"])
        borders = np.cumsum(archive["seq_len"])[:-1] if "seq_len" in archive else [2000]
    sequences = np.split(experts, borders)
    halves = [np.concatenate(sequences[part::2]) for part in (0, 1)]
    popularity = np.bincount(halves[0].reshape(-1), minlength=count).astype(np.int64)
    starts = [np.array([*range(0, len(half), batch), len(half)], np.int64) for half in halves]
    built = [
        build_problem(Goal.LAR, ranks, half, start, popularity) for half, start in zip(halves, starts, strict=True)
    ]
    fit, held = (Rows.of_problem(*found) for found in zip(built, halves, starts, strict=True))
    return Case(f"{file} {place}", shape, built[0], fit, held)


def compare(ranks: int, effort: Effort, batch: int) -> dict[tuple[str, Mode], dict[str, np.ndarray]]:
    """Held-out time as a share of contiguous by hardware and mode, then by goal: one number an instance."""
    shares: dict[tuple[str, Mode], dict[str, list[float]]] = {}
    for file, place, shape in INSTANCES:
        case = build_case(file, place, shape, ranks, batch)
        candidates = other_goals(case.problem, effort, np.random.default_rng(0))
        for hardware in SHIPPED:
            for mode in MODES:
                cost = case.cost(hardware, mode)
                found = solve_time(case.problem, Timing(case.fit, cost), effort, np.random.default_rng(0), candidates)
                base = case.held_time(candidates["contiguous"], cost)
                for name, placement in [*candidates.items(), ("time", found.placement)]:
                    share = case.held_time(placement, cost) / base
                    shares.setdefault((hardware, mode), {}).setdefault(name, []).append(share)
    return {key: {name: np.array(values) for name, values in row.items()} for key, row in shares.items()}


def show(ranks: int, rows: dict[tuple[str, Mode], dict[str, np.ndarray]], title: str) -> list[str]:
    """Print one table; returns the rows in which time loses by more than two standard errors."""
    names = list(next(iter(rows.values())))
    print(f"\n{title}, G = {ranks}: mean share of contiguous, {len(INSTANCES)} instances")
    print("hardware, mode".ljust(26) + "".join(name.rjust(27) for name in names[1:]))
    lost = []
    for (hardware, mode), row in rows.items():
        cells = []
        for name in names[1:]:
            gap = row["time"] - row[name]
            error = 2 * gap.std(ddof=1) / len(gap) ** 0.5
            worse = int((gap > 0.001).sum())
            cells.append(
                f"{row[name].mean():.4f}" + ("" if name == "time" else f" ({gap.mean():+.4f}±{error:.4f}, {worse})")
            )
            if gap.mean() > error:
                lost.append(f"{hardware}, {mode}, G = {ranks}: {name}")
        print(f"{hardware}, {mode.value}".ljust(26) + "".join(cell.rjust(27) for cell in cells))
    print("in brackets: goal time less that goal, mean ± 2 standard errors, and instances where time is worse")
    return lost


def trade(effort: Effort, ranks: int) -> None:
    """A plot in text: rows through the busiest direction against the busiest rank's load, for several theta."""
    points = []
    for compromise in SWEEP:
        rows, loads = [], []
        for file, place, shape in PLOTTED:
            case = build_case(file, place, shape, ranks)
            found = cross_entropy(
                reweighted(case.problem, compromise), compromise.goal, effort, np.random.default_rng(0)
            )
            counts = rank_counts(case.held, found.placement, ranks)
            home = homes(case.held, found.placement, Mode.SPECULATIVE, ranks)
            traffic = count_traffic(counts, home, case.held.block_start)
            rows.append(traffic.busiest_rows.sum() * ranks / traffic.rows.sum())
            loads.append(imbalance(counts.sum(axis=0)))
        points.append((float(np.mean(loads)), float(np.mean(rows))))
    marks = "01234abcde"
    width, height = 64, 18
    (left, low), (right, high) = np.min(points, axis=0), np.max(points, axis=0)
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    print(f"\nG = {ranks}, held out, mean of {', '.join(f'{file} {place}' for file, place, _ in PLOTTED)}; speculative")
    for mark, compromise, (load, row) in zip(marks, SWEEP, points, strict=True):
        x, y = round((load - left) / (right - left) * width), round((high - row) / (high - low) * height)
        grid[y][x] = mark
        print(f"  {mark}: {compromise.goal.value}, mu {compromise.mu:g}, theta {compromise.theta:g}: "
              f"busiest rows {row:.3f}, load imbalance {load:.3f}")  # fmt: skip
    print(f"rows a token through the busiest direction x G, {high:.2f} (top) to {low:.2f}")
    print("\n".join("|" + "".join(line) for line in grid))
    print("+" + "-" * (width + 1) + f"\nload imbalance, {left:.2f} to {right:.2f}")


def main(arguments: list[str]) -> int:
    effort = Effort(arguments[0]) if arguments else Effort.FAST
    lost = []
    for ranks in RANKS:
        lost += show(ranks, compare(ranks, effort, BATCH), f"batches of {BATCH} rows, effort {effort}")
    lost += show(8, compare(8, effort, LARGE), f"batches of {LARGE} rows, effort {effort}")
    trade(effort, 8)
    print("\n" + ("\n".join(f"time loses: {row}" for row in lost) if lost else "time loses nowhere beyond noise"))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
