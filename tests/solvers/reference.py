"""What the solvers claim, done slowly: loops, enumeration, and a Hungarian on replicated columns.

Written from docs/terms.md alone. Rows are tuples of expert ids, placements are lists of ranks.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise, product

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from smoe_solvers.problem import Problem, build_problem

UNIT = 1024


def routings(experts: int, top_k: int, min_rows: int = 1, max_rows: int = 24):
    """Rows of K distinct experts, [N, K] uint16 as sample blocks hold them."""
    row = st.sampled_from(list(combinations(range(experts), top_k)))
    rows = st.lists(row, min_size=min_rows, max_size=max_rows)
    return rows.map(lambda drawn: np.array(drawn, np.uint16).reshape(-1, top_k))


def placements(experts: int, ranks: int):
    """Balanced placements with any rank names."""
    start = [e // (experts // ranks) for e in range(experts)]
    return st.permutations(start).map(lambda drawn: np.array(drawn, np.int32))


def score_rows(max_rows: int, max_ranks: int, low: int, high: int):
    """Scores [T, G], all shapes from one row on one rank up."""
    return st.integers(1, max_ranks).flatmap(
        lambda ranks: st.lists(
            st.lists(st.integers(low, high), min_size=ranks, max_size=ranks), min_size=1, max_size=max_rows
        ).map(lambda rows: np.array(rows, np.int32))
    )


def clustered_rows(generator: np.random.Generator, rows: int, experts: int, top_k: int, clusters: int) -> np.ndarray:
    """Rows that mostly use the experts of one hidden cluster, scattered over the ids; hot experts as in real layers."""
    cluster = generator.permutation(np.arange(experts) % clusters)
    heat = 1 / (1 + generator.permutation(experts)) ** 0.5
    weight = heat * np.where(cluster == generator.integers(clusters, size=rows)[:, None], 6.0, 1.0)
    return np.argsort(-np.log(weight) - generator.gumbel(size=weight.shape), axis=1)[:, :top_k].astype(np.uint16)


def popularity_of(rows: np.ndarray, experts: int) -> np.ndarray:
    return np.bincount(rows.reshape(-1), minlength=experts).astype(np.int64)


def layer(goal, ranks: int, experts: int, rows: np.ndarray, block: int = 1024, **options) -> Problem:
    """The problem of rows cut into blocks of `block`, with the popularity of the same rows."""
    starts = np.array([*range(0, len(rows), block), len(rows)], np.int64)
    return build_problem(goal, ranks, rows, starts, popularity_of(rows, experts), **options)


def cut_down(goal, ranks: int, case: int, **options) -> Problem:
    """Twelve experts in 3, 4 or 5 hidden clusters: few enough to try all placements."""
    rows = clustered_rows(np.random.default_rng(case), 400, 12, 2, 3 + case % 3)
    return layer(goal, ranks, 12, rows, block=128, **options)


def in_blocks(goal, block: int) -> Problem:
    """Twelve experts on three ranks; 400 rows in blocks of `block`."""
    return layer(goal, 3, 12, clustered_rows(np.random.default_rng(6), 400, 12, 2, 4), block=block)


def clusters(placement: np.ndarray) -> set[frozenset[int]]:
    """Which experts stand together, whatever their ranks are called."""
    return {frozenset(np.flatnonzero(placement == g).tolist()) for g in set(placement.tolist())}


def balanced(experts: int, ranks: int) -> Iterator[list[int]]:
    """Every balanced placement once, up to the names of the ranks: a new rank appears only after all lower ones."""
    for placement in product(range(ranks), repeat=experts):
        firsts = [placement.index(g) for g in range(ranks) if g in placement]
        equal = all(placement.count(g) == experts // ranks for g in range(ranks))
        if equal and firsts == sorted(firsts):
            yield list(placement)


def swaps(placement: np.ndarray) -> Iterator[np.ndarray]:
    """Every placement that one swap of two experts on different ranks leads to."""
    for a, b in combinations(range(len(placement)), 2):
        if placement[a] != placement[b]:
            swapped = placement.copy()
            swapped[a], swapped[b] = placement[b], placement[a]
            yield swapped


def hungarian(scores: np.ndarray, quota: int) -> int:
    """Highest total score under the quota: one column for each place on a rank."""
    columns = np.repeat(np.asarray(scores, np.int64), quota, axis=1)
    row, column = linear_sum_assignment(columns, maximize=True)
    return int(columns[row, column].sum())


def best_with_charges(scores: np.ndarray, quota: int, charge: int) -> int:
    """Highest total score less `charge` for each row off the quota, over all assignments there are."""
    tokens, ranks = scores.shape
    best = None
    for to_rank in product(range(ranks), repeat=tokens):
        value = sum(int(scores[t, g]) for t, g in enumerate(to_rank))
        value -= charge * sum(abs(to_rank.count(g) - quota) for g in range(ranks))
        best = value if best is None else max(best, value)
    return best


def total(scores: np.ndarray, to_rank) -> int:
    return sum(int(scores[t, g]) for t, g in enumerate(to_rank))


def noise(position: int, rank: int) -> int:
    """Eight bits for a token and a rank that split tokens of equal scores: one of four bytes that ranks share."""
    bits = (2 * position + rank // 4 % 2 + 1 + rank // 8 * 65536) * 0x1E3779B1 % 2**32
    bits = (bits ^ bits // 2**16) * 0x05EBCA6B % 2**32
    return (bits ^ bits // 2**16).to_bytes(4, "little")[rank % 4]


def priced(scores: np.ndarray, quota: int) -> np.ndarray:
    """Scores, in 256ths, less prices found in 18 rounds of smaller and smaller steps. [T, G]"""
    tokens, ranks = scores.shape
    price = np.zeros(ranks, np.int64)

    def offers(width: int) -> np.ndarray:
        noisy = [[width * noise(t, g) for g in range(ranks)] for t in range(tokens)]
        return 256 * scores.astype(np.int64) + noisy - price

    step = 640
    for _ in range(18):
        load = [list(offers(max(step // 16, 4)).argmax(axis=1)).count(g) for g in range(ranks)]
        if max(load) > quota:
            price += [min(load[g] - quota, 4 * quota) * (step * (65536 // quota)) // 4096 for g in range(ranks)]
        step = 13 * step // 16
    return offers(4)


def moved(value: np.ndarray, quota: int) -> list[int]:
    """Best ranks first; then ranks beyond the quota give up their cheapest tokens to the best open rank.

    value: [T, G] scores less prices. Costs of an octave of whole score units count alike, and those from 127 on; of
    equal costs the first position goes. Between two ranks all costs differ.
    """

    def level(cost: int) -> int:
        return cost if value.shape[1] == 2 else min((cost // 256 + 1).bit_length(), 8)

    tokens, ranks = value.shape
    to_rank = [int(row.argmax()) for row in value]
    while max(to_rank.count(g) for g in range(ranks)) > quota:
        load = [to_rank.count(g) for g in range(ranks)]
        open_ranks = [g for g in range(ranks) if load[g] < quota]
        target = [max(open_ranks, key=lambda g, t=t: value[t, g]) for t in range(tokens)]
        for g in range(ranks):
            here = [t for t in range(tokens) if load[g] > quota and to_rank[t] == g]
            here.sort(key=lambda t: level(int(value[t, to_rank[t]] - value[t, target[t]])))
            for t in here[: load[g] - quota]:
                to_rank[t] = target[t]
    return to_rank


def rule(scores: np.ndarray, quota: int) -> list[int]:
    """The served assignment of one chunk."""
    return moved(priced(scores, quota) if scores.shape[1] > 2 else scores.astype(np.int64), quota)


def local_activations(demand: np.ndarray, kinds, placement, ranks: int) -> np.ndarray:
    """Activations of each row on each rank, [rows, G]. demand: [U, E]; kinds: the rows' rows of it."""
    local = np.zeros((len(kinds), ranks))
    for row, kind in enumerate(kinds):
        for expert, amount in enumerate(demand[kind]):
            local[row, placement[expert]] += amount
    return local


def one_hot(rows: np.ndarray, experts: int) -> np.ndarray:
    """True routing as demand: one activation for each expert a row used. Returns [N, E]."""
    demand = np.zeros((len(rows), experts))
    for row, used in enumerate(rows):
        for expert in used:
            demand[row, expert] += 1
    return demand


def lar_of_exact_shuffle(demand, kinds, block_start, placement, ranks: int) -> float:
    """Share of activations that stay local when each block is shuffled by a Hungarian under its quota."""
    kept = asked = 0.0
    for start, stop in pairwise(block_start):
        local = local_activations(demand, kinds[start:stop], placement, ranks)
        quota = -(-len(local) // ranks)
        columns = np.repeat(local, quota, axis=1)
        row, column = linear_sum_assignment(columns, maximize=True)
        kept += columns[row, column].sum()
        asked += stop - start
    return kept / asked  # still to be divided by K


def mean_fanout(rows, placement) -> Fraction:
    return Fraction(sum(len({int(placement[e]) for e in row}) for row in rows), len(rows))


def load_deviation(popularity, placement, ranks: int) -> Fraction:
    """Summed distance of the ranks' activations from their mean, as a share of all activations."""
    load = [0] * ranks
    for expert, activations in enumerate(popularity):
        load[placement[expert]] += int(activations)
    return sum(abs(Fraction(one) - Fraction(sum(load), ranks)) for one in load) / sum(load)


def ilp_objective(demand, kinds, placement, ranks: int, theta: float, top_k: int) -> float:
    """The paper's programme for a placement, by trying every assignment of the rows."""
    local = local_activations(demand, kinds, placement, ranks)
    tokens = len(kinds)
    best = np.inf
    for to_rank in product(range(ranks), repeat=tokens):
        unbalance = sum(abs(to_rank.count(g) - tokens / ranks) for g in range(ranks)) / tokens
        remote = sum(top_k - local[t, g] for t, g in enumerate(to_rank)) / (tokens * top_k)
        best = min(best, theta * unbalance + (1 - theta) * remote)
    return best
