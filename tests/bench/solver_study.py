"""How good the search is on real routing: one row for each layer and number of ranks, METIS x 40 beside it.

`python -m tests.bench.solver_study` solves 13 layers of real traces on 2, 4 and 8 ranks for the goals lar and fanout
(theta 0, true routing), with three solver seeds, and holds each median against a reference: the best placement ever
met on the fitted half. SMOE_DATA names the folder of the traces (default ../shared/data).

Halves: sequences 0, 2, 4, ... are fitted and 1, 3, 5, ... held out; a trace without borders is cut at row 2000. Each
half is cut into batches of 1024 rows, the last one shorter.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.methods.metis import metis_placements
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.problem import Problem, build_problem
from smoe_solvers.solve import solve

DATA = Path(os.environ.get("SMOE_DATA", Path(__file__).parents[3] / "shared/data")).resolve()
BATCH = 1024
CUT_WITHOUT_BORDERS = 2000
LAR_TIE, FANOUT_TIE = 0.003, 0.02
FILES = {
    "intent": ("dsv2lite_esft_intent", (0, 12, 25)),
    "law": ("dsv2lite_esft_law", (0, 12, 25)),
    "summary": ("dsv2lite_esft_summary", (0, 12, 25)),
    "gpt-oss": ("gptoss20b_gen", (0, 12, 23)),
    "olmoe": ("olmoe1b7b_gsm8k_layer0", (0,)),
}

# Held-out lar and fan-out of contiguous, to the digit; then lar and fan-out to reach on the fitted half.
REFERENCE = {
    ("intent", 0, 4): (0.4725, 3.257, 0.6604, 2.196),
    ("intent", 0, 8): (0.3428, 4.520, 0.5195, 2.970),
    ("intent", 12, 4): (0.4692, 3.169, 0.6691, 2.224),
    ("intent", 12, 8): (0.3309, 4.514, 0.5139, 2.917),
    ("intent", 25, 4): (0.4327, 3.466, 0.6853, 2.191),
    ("intent", 25, 8): (0.3313, 4.443, 0.5589, 2.818),
    ("law", 0, 4): (0.4563, 3.374, 0.6668, 2.416),
    ("law", 0, 8): (0.3435, 4.550, 0.5459, 3.202),
    ("law", 12, 4): (0.4585, 3.339, 0.6410, 2.391),
    ("law", 12, 8): (0.3398, 4.624, 0.4944, 3.193),
    ("law", 25, 4): (0.4510, 3.371, 0.6865, 2.250),
    ("law", 25, 8): (0.3411, 4.570, 0.5443, 3.011),
    ("summary", 0, 4): (0.4577, 3.338, 0.6800, 2.299),
    ("summary", 0, 8): (0.3489, 4.493, 0.5631, 3.054),
    ("summary", 12, 4): (0.4589, 3.312, 0.6419, 2.362),
    ("summary", 12, 8): (0.3337, 4.671, 0.4909, 3.197),
    ("summary", 25, 4): (0.4286, 3.456, 0.6389, 2.167),
    ("summary", 25, 8): (0.3240, 4.560, 0.4913, 2.864),
    ("gpt-oss", 0, 4): (0.4651, 3.024, 0.6399, 2.211),
    ("gpt-oss", 0, 8): (0.3601, 3.534, 0.4980, 2.768),
    ("gpt-oss", 12, 4): (0.4447, 3.040, 0.5782, 1.931),
    ("gpt-oss", 12, 8): (0.3367, 3.608, 0.4231, 2.550),
    ("gpt-oss", 23, 4): (0.4216, 3.162, 0.6044, 1.752),
    ("gpt-oss", 23, 8): (0.3009, 3.736, 0.4546, 2.359),
    ("olmoe", 0, 4): (0.4178, 3.736, 0.5462, 2.914),
    ("olmoe", 0, 8): (0.3009, 5.595, 0.4106, 4.106),
}
# Means of the 13 layers by number of ranks: contiguous held out, then lar and fan-out to reach, fitted and held out.
REFERENCE_MEANS = {
    2: (0.6291, 1.979, 0.8048, 0.8037, 1.580, 1.605),
    4: (0.4488, 3.311, 0.6414, 0.6430, 2.254, 2.289),
    8: (0.3334, 4.417, 0.5007, 0.4955, 3.001, 3.056),
}


@dataclass(frozen=True)
class Row:
    """One layer on one number of ranks. Pairs are (fitted, held out); of solver seeds, the median of each."""

    file: str
    position: int
    ranks: int
    contiguous: tuple[float, float]
    metis_lar: tuple[float, float]
    lar: tuple[float, float]
    metis_fanout: tuple[float, float]
    fanout: tuple[float, float]
    seconds: tuple[float, float]

    @property
    def name(self) -> str:
        return f"{self.file} {self.position} {self.ranks}"


def halves(trace: Path, position: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows fitted and held out, [N, K] each, and E."""
    with np.load(trace) as archive:
        rows = archive["ids"][position].astype(np.uint16)
        experts = int(archive["num_experts"])
        if "seq_len" not in archive:
            return rows[:CUT_WITHOUT_BORDERS], rows[CUT_WITHOUT_BORDERS:], experts
        parts = np.split(rows, np.cumsum(archive["seq_len"])[:-1])
    return np.concatenate(parts[0::2]), np.concatenate(parts[1::2]), experts


def problem_of(goal: Goal, rows: np.ndarray, experts: int, ranks: int) -> Problem:
    starts = np.array([*range(0, len(rows), BATCH), len(rows)], np.int64)
    return build_problem(goal, ranks, rows, starts, np.bincount(rows.reshape(-1), minlength=experts), theta=0.0)


def measure(file: str, position: int, ranks: int, effort: Effort, seeds: list[int]) -> Row:
    name, _ = FILES[file]
    fit, held, experts = halves(DATA / f"traces/{name}.npz", position)
    fitted, unseen = (problem_of(Goal.LAR, rows, experts, ranks) for rows in (fit, held))
    joint = coactivation(fitted)
    metis = [(score(fitted, p), score(unseen, p)) for p in metis_placements(joint, ranks)]
    best_lar = max(metis, key=lambda pair: pair[0].lar)
    best_fanout = min(metis, key=lambda pair: pair[0].fanout)
    lars, fanouts, taken = [], [], []
    for goal, found in ((Goal.LAR, lars), (Goal.FANOUT, fanouts)):
        problem = problem_of(goal, fit, experts, ranks)
        started = time.process_time()
        for seed in seeds:
            placement = solve(problem, goal, Method.CE, effort, np.random.default_rng(seed)).placement
            one, other = score(fitted, placement), score(unseen, placement)
            found.append((one.lar, other.lar) if goal is Goal.LAR else (one.fanout, other.fanout))
        taken.append((time.process_time() - started) / len(seeds))
    bare = score(unseen, unseen.contiguous())
    lar, fanout = (tuple(float(value) for value in np.median(found, axis=0)) for found in (lars, fanouts))
    return Row(
        file, position, ranks, (bare.lar, bare.fanout),
        (best_lar[0].lar, best_lar[1].lar), (lar[0], lar[1]),
        (best_fanout[0].fanout, best_fanout[1].fanout), (fanout[0], fanout[1]),
        (taken[0], taken[1]),
    )  # fmt: skip


def cases(only: list[str]) -> Iterator[tuple[str, int, int]]:
    """All layers and numbers of ranks, or those that a pattern file:position:ranks (any part may be *) names."""
    for file, (_, positions) in FILES.items():
        for position in positions:
            for ranks in (2, 4, 8):
                parts = (file, str(position), str(ranks))
                patterns = [pattern.split(":") for pattern in only] or [["*"] * 3]
                if any(all(w in ("*", p) for w, p in zip(wanted, parts, strict=True)) for wanted in patterns):
                    yield file, position, ranks


def shown(pair: tuple[float, float], digits: int = 4) -> str:
    """A pair as the table prints it: 0.1234 is .1234."""
    return " ".join(f"{value:.{digits}f}".removeprefix("0") for value in pair)


def print_row(row: Row) -> None:
    lar = fanout = bare = ""
    if (row.file, row.position, row.ranks) in REFERENCE:
        held_lar, held_fanout, must_lar, must_fanout = REFERENCE[row.file, row.position, row.ranks]
        same = (round(row.contiguous[0], 4), round(row.contiguous[1], 3)) == (held_lar, held_fanout)
        bare = "" if same else f" (expected {held_lar} {held_fanout})"
        lar, fanout = f"{row.lar[0] - must_lar:+.4f}", f"{row.fanout[0] - must_fanout:+.3f}"
    print(
        f"{row.name:<14} {shown(row.contiguous[:1])} {shown(row.contiguous[1:], 3)}{bare}"
        f"  {shown(row.metis_lar)}  {shown(row.lar)} {lar:>7}"
        f"  {shown(row.metis_fanout, 3)}  {shown(row.fanout, 3)} {fanout:>6}  {shown(row.seconds, 1)}",
        flush=True,
    )


def print_means(rows: list[Row]) -> None:
    """Means by number of ranks against the reference, and how many rows reach it on the fitted half."""
    for ranks in (2, 4, 8):
        chosen = [row for row in rows if row.ranks == ranks]
        if len(chosen) != sum(len(positions) for _, positions in FILES.values()):
            continue
        mean = {name: np.mean([getattr(row, name) for row in chosen], axis=0)
                for name in ("contiguous", "metis_lar", "lar", "metis_fanout", "fanout", "seconds")}  # fmt: skip
        contiguous_lar, contiguous_fanout, fit_lar, held_lar, fit_fanout, held_fanout = REFERENCE_MEANS[ranks]
        print(
            f"mean of 13, G={ranks}: contiguous {shown(mean['contiguous'][:1])} {shown(mean['contiguous'][1:], 3)} "
            f"(reference {contiguous_lar} {contiguous_fanout}); lar METIS {shown(mean['metis_lar'])}, "
            f"search {shown(mean['lar'])}, reference {shown((fit_lar, held_lar))}; "
            f"fan-out METIS {shown(mean['metis_fanout'], 3)}, search {shown(mean['fanout'], 3)}, "
            f"reference {shown((fit_fanout, held_fanout), 3)}; seconds {shown(mean['seconds'], 1)}"
        )
    judged = [(row, REFERENCE[key]) for row in rows if (key := (row.file, row.position, row.ranks)) in REFERENCE]
    lar = sum(row.lar[0] >= reference[2] - LAR_TIE for row, reference in judged)
    fanout = sum(row.fanout[0] <= reference[3] + FANOUT_TIE for row, reference in judged)
    exact_lar = sum(round(row.lar[0], 4) >= reference[2] for row, reference in judged)
    exact_fanout = sum(round(row.fanout[0], 3) <= reference[3] for row, reference in judged)
    print(
        f"reached on the fitted half: lar {lar} of {len(judged)} within {LAR_TIE} ({exact_lar} to the digit), "
        f"fan-out {fanout} of {len(judged)} within {FANOUT_TIE} ({exact_fanout} to the digit)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--effort", type=Effort, choices=list(Effort), default=Effort.DEFAULT)
    parser.add_argument("--seeds", default="0,1,2", help="solver seeds; the table shows medians")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="FILE:POSITION:RANKS", help="some rows; * for any part"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    print(
        "file, position, ranks; contiguous held out: lar fan-out; lar (fitted held-out): METIS x 40, search, over the "
        "reference; fan-out likewise; CPU seconds a layer of lar and fanout"
    )
    rows = []
    for case in cases(options.only):
        rows.append(measure(*case, options.effort, [int(seed) for seed in options.seeds.split(",")]))
        print_row(rows[-1])
    print_means(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
