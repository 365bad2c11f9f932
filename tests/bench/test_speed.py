"""Speed, as ratios of things timed side by side in one run, medians of several. `make bench`; not part of `make test`.

Figures printed here belong in docs/results.md with date and machine.
"""

import subprocess
import sys
from statistics import median
from time import perf_counter

import numpy as np
from scipy.optimize import linear_sum_assignment

from smoe_profiles.tables import count_tokens
from smoe_solvers.assignment import assign_exact, assign_rule

REPEATS = 5


def seconds(work, repeats=REPEATS):
    work()
    taken = []
    for _ in range(repeats):
        started = perf_counter()
        work()
        taken.append(perf_counter() - started)
    return median(taken)


def shell(*arguments):
    return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def test_help_starts_within_four_tenths_of_a_second():
    taken, bare = seconds(shell("-m", "smoe_cli", "--help")), seconds(shell("-c", "pass"))
    print(f"\nsmoe --help {taken:.3f} s; a bare interpreter {bare:.3f} s")
    assert taken <= 0.4


def test_exact_assignment_against_a_hungarian_on_replicated_columns():
    scores = np.random.default_rng(0).integers(0, 256, (1024, 8)).astype(np.uint8)
    exact = seconds(lambda: assign_exact(scores, 128))
    rule = seconds(lambda: assign_rule(scores, 128))
    hungarian = seconds(lambda: linear_sum_assignment(np.repeat(scores.astype(int), 128, axis=1), maximize=True))
    print(f"\n1024 x 8: exact {exact * 1e3:.2f} ms, rule {rule * 1e3:.2f} ms, Hungarian {hungarian * 1e3:.1f} ms")
    assert exact < hungarian / 5


def test_counting_against_a_dense_bincount():
    generator = np.random.default_rng(0)
    token_id = generator.integers(0, 20_000, 200_000).astype(np.uint32)
    experts = generator.integers(0, 64, (200_000, 6)).astype(np.uint16)
    keys = (token_id.astype(np.int64)[:, None] * 64 + experts).reshape(-1)
    ours = seconds(lambda: count_tokens(token_id, experts, 64))
    dense = seconds(lambda: np.bincount(keys, minlength=20_000 * 64))
    print(f"\n1.2 M activations: sparse counts {1.2 / ours:.0f} M/s, dense bincount {1.2 / dense:.0f} M/s")
