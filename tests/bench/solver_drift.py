"""What a placement keeps of its gain on traffic it was not fitted on, and what mixing and robust weights give back.

`python -m tests.bench.solver_drift`: three tasks of DeepSeek-V2-Lite, layers 1, 13, 26, fitted on even sequences, held
lar of the exact shuffle on odd ones (goal lar, theta 0, true routing). With SMOE_DATA (default ../shared/data).
"""

import numpy as np

from smoe_cli.placing.mixing import chosen_blocks, equal_mix, robust_mix
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.objectives import score
from smoe_solvers.solve import solve
from tests.bench.solver_study import BATCH, DATA, FILES, halves, problem_of

TASKS = ("intent", "law", "summary")
EXPERTS = 64


def mixed(parts: dict[str, np.ndarray], mix: dict[str, float]) -> np.ndarray:
    """Whole batches of the tasks, as often as the mix asks for."""
    blocks = [
        (name, rows[start : start + BATCH]) for name, rows in parts.items() for start in range(0, len(rows), BATCH)
    ]
    blocks = [(name, rows) for name, rows in blocks if len(rows) == BATCH]
    return np.concatenate([blocks[block][1] for block in chosen_blocks([name for name, _ in blocks], mix)])


def placed(rows: np.ndarray, ranks: int) -> np.ndarray:
    problem = problem_of(Goal.LAR, rows, EXPERTS, ranks)
    return solve(problem, Goal.LAR, Method.CE, Effort.FAST, np.random.default_rng(0)).placement


def local_rate(rows: np.ndarray, placement: np.ndarray, ranks: int) -> float:
    return score(problem_of(Goal.LAR, rows, EXPERTS, ranks), placement).lar


def candidates(fit: dict[str, np.ndarray], ranks: int) -> dict[str, dict[str, np.ndarray]]:
    """How a target may be fitted -> target -> placement."""
    alone = {name: placed(fit[name], ranks) for name in TASKS}
    pairs = {name: placed(mixed(fit, equal_mix([other for other in TASKS if other != name])), ranks) for name in TASKS}
    contiguous = np.repeat(np.arange(ranks), EXPERTS // ranks)

    def judge(mix: dict[str, float]) -> dict[str, float]:
        placement = placed(mixed(fit, mix), ranks)
        return {
            name: local_rate(fit[name], placement, ranks) - local_rate(fit[name], contiguous, ranks) for name in TASKS
        }

    best = max(robust_mix(list(TASKS), judge), key=lambda one: one.worst)
    return {
        "contiguous": dict.fromkeys(TASKS, contiguous),
        "own task": alone,
        "equal mix of three": dict.fromkeys(TASKS, placed(mixed(fit, equal_mix(TASKS)), ranks)),
        "robust mix": dict.fromkeys(TASKS, placed(mixed(fit, best.mix), ranks)),
        "mix of the other two": pairs,
        **{f"{other} alone": {name: alone[other] for name in TASKS if name != other} for other in TASKS},
    }


def main() -> None:
    for ranks in (4, 8):
        found: dict[str, dict[str, list[float]]] = {}
        for position in (0, 12, 25):
            pairs = {name: halves(DATA / f"traces/{FILES[name][0]}.npz", position) for name in TASKS}
            fit, held = {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}
            for how, by_target in candidates(fit, ranks).items():
                for target, placement in by_target.items():
                    rate = local_rate(held[target], placement, ranks)
                    found.setdefault(how, {}).setdefault(target, []).append(rate)
        print(f"EP{ranks}: held lar of {', '.join(TASKS)}; mean and worst")
        for how, by_target in found.items():
            means = {target: float(np.mean(rates)) for target, rates in by_target.items()}
            shown = " ".join(f"{means[target]:.3f}" if target in means else " own " for target in TASKS)
            print(f"{how:22} {shown}  {np.mean(list(means.values())):.3f} {min(means.values()):.3f}", flush=True)


if __name__ == "__main__":
    main()
