"""Experts with copies, against loops and all subsets: which copy serves, what is measured, and where copies are put."""

from dataclasses import asdict
from fractions import Fraction
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Effort, Goal
from smoe_solvers.copy_descent import descend, lay_out, slots_of
from smoe_solvers.copy_search import add_copies, relabel_hosts, score_hosts
from smoe_solvers.figures import measure, measure_groups
from smoe_solvers.objectives import score
from smoe_solvers.predictors import local_counts, popularity_by_rank, rank_counts
from smoe_solvers.redundancy import MAX_RANKS, Copies, least_cover, serve, single_hosts
from tests.solvers.reference import clustered_rows, hungarian, layer, placements, routings

some = settings(max_examples=60, deadline=None)
EXPERTS, RANKS, TOP_K = 7, 4, 3


@st.composite
def copied(draw, experts=EXPERTS, ranks=RANKS):
    """Hosts [E, G]: every expert on one rank or more."""
    rows = draw(st.lists(st.integers(1, 2**ranks - 1), min_size=experts, max_size=experts))
    return np.array([[bits >> g & 1 for g in range(ranks)] for bits in rows], np.bool_)


@st.composite
def parts(draw):
    """(rows, hosts, home of each row)."""
    rows = draw(routings(EXPERTS, TOP_K, max_rows=20))
    home = draw(st.lists(st.integers(0, RANKS - 1), min_size=len(rows), max_size=len(rows)))
    return rows, draw(copied()), np.array(home, np.int32)


def covers(wanted, hosts, ranks):
    """The first of the smallest sets of ranks that hold all the wanted experts, in lexicographic order."""
    for size in range(len(wanted) + 1):
        for chosen in combinations(ranks, size):
            if all(any(hosts[e, g] for g in chosen) for e in wanted):
                return chosen
    raise AssertionError("an expert is on no rank")


def served_by(row, home, hosts):
    """The rank that serves each expert of a row."""
    foreign = [e for e in row if not hosts[e, home]]
    chosen = covers(foreign, hosts, [g for g in range(hosts.shape[1]) if g != home])
    return [int(home) if hosts[e, home] else min(g for g in chosen if hosts[e, g]) for e in row]


# Which copy serves.


@some
@given(part=parts())
def test_served_copies_are_at_home_or_on_the_first_least_cover_of_the_others(part):
    rows, hosts, home = part
    found = serve(rows, home, hosts)
    assert found.tolist() == [served_by(row, here, hosts) for row, here in zip(rows, home, strict=True)]


@some
@given(rows=routings(8, 6, max_rows=8), hosts=copied(8, 5))
def test_fan_out_is_the_smallest_of_all_subsets_of_ranks_that_hold_the_experts(rows, hosts):
    sizes = []
    for row in rows:
        holding = [
            s for s in product((0, 1), repeat=5) if all(any(hosts[e, g] and s[g] for g in range(5)) for e in row)
        ]
        sizes.append(min(map(sum, holding)))
    assert least_cover(rows, hosts).tolist() == sizes


def test_ties_go_to_lower_ranks_one_by_one():
    """Experts 0 and 1 are each on ranks 1 and 2, 2 is on 2 and 3, 3 on 1 and 3; from rank 0 two ranks are needed."""
    hosts = np.array([[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 1]], np.bool_)
    rows, home = np.array([[0, 1, 2, 3], [0, 1, 2, 3]]), np.array([0, 3])
    assert serve(rows, home, hosts).tolist() == [[1, 1, 2, 1], [1, 1, 3, 3]]


def test_a_greedy_cover_would_take_three_ranks_where_two_do():
    """Rank 0 holds four of the six experts, but ranks 1 and 2 hold them all between them."""
    hosts = np.zeros((6, 4), np.bool_)
    for rank, held in enumerate([(0, 1, 3, 4), (0, 1, 2), (3, 4, 5)]):
        hosts[list(held), rank] = True
    assert least_cover(np.array([[0, 1, 2, 3, 4, 5]]), hosts).tolist() == [2]
    assert serve(np.array([[0, 1, 2, 3, 4, 5]]), np.array([3]), hosts).tolist() == [[1, 1, 1, 2, 2, 2]]


@some
@given(rows=routings(8, 3), placement=placements(8, 4), data=st.data())
def test_without_copies_every_figure_is_the_plain_one(rows, placement, data):
    home = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))), np.int32)
    hosts = single_hosts(placement, 4)
    assert serve(rows, home, hosts).tolist() == placement[rows].tolist()
    counts = local_counts(rows, hosts)
    assert measure(counts, home, 5, counts, Copies(rows, hosts)) == measure(counts, home, 5, counts)
    group = home % 2
    with_copies, plain = (measure_groups(counts, home, group, 2, c) for c in (Copies(rows, hosts), None))
    for name, values in asdict(plain).items():
        assert np.array_equal(getattr(with_copies, name), values, equal_nan=True)


def test_sixty_four_ranks_have_bits_enough_and_more_are_refused():
    hosts = np.zeros((3, MAX_RANKS), np.bool_)
    hosts[[0, 1, 1, 2], [63, 63, 0, 62]] = True
    assert serve(np.array([[0, 1, 2]]), np.array([5]), hosts).tolist() == [[63, 63, 62]]
    assert serve(np.array([[0, 1, 2]]), np.array([0]), hosts).tolist() == [[63, 0, 62]]
    with pytest.raises(ValueError, match="65 ranks"):
        least_cover(np.array([[0]]), np.ones((1, 65), np.bool_))
    hosts[1] = False
    with pytest.raises(ValueError, match="expert 1 is on no rank"):
        serve(np.array([[0, 1, 2]]), np.array([5]), hosts)


# What is measured.


@some
@given(part=parts(), batch=st.integers(1, 22))
def test_figures_with_copies_equal_loops(part, batch):
    rows, hosts, home = part
    counts = local_counts(rows, hosts)
    found = measure(counts, home, batch, None, Copies(rows, hosts))
    local, needed, remote, load, busiest = 0, 0, 0, [0] * RANKS, 0
    for start in range(0, len(rows), batch):
        sent, received = [0] * RANKS, [0] * RANKS
        for row, here in zip(rows[start : start + batch], home[start : start + batch].tolist(), strict=True):
            ranks = served_by(row, here, hosts)
            local += sum(bool(hosts[e, here]) for e in row)
            needed += len(covers(row, hosts, range(RANKS)))
            remote += len(set(ranks) - {here})
            sent[here] += len(set(ranks) - {here})
            for g in ranks:
                load[g] += 1
            for g in set(ranks) - {here}:
                received[g] += 1
        busiest += max(sent + received)
    assert found.lar == pytest.approx(float(Fraction(local, rows.size)))
    assert found.fanout == pytest.approx(float(Fraction(needed, len(rows))))
    assert found.remote_fanout == pytest.approx(float(Fraction(remote, len(rows))))
    assert found.remote_fanout_busiest == pytest.approx(float(Fraction(busiest * RANKS, len(rows))))
    assert found.load_imbalance == pytest.approx(float(Fraction(max(load) * RANKS, sum(load))))


@some
@given(part=parts(), seed=st.integers(0, 9))
def test_groups_of_rows_with_copies_weighted_by_their_rows_are_the_whole(part, seed):
    rows, hosts, home = part
    counts, copies = local_counts(rows, hosts), Copies(rows, hosts)
    group = np.random.default_rng(seed).integers(0, 3, len(rows))
    found, whole = measure_groups(counts, home, group, 3, copies), measure(counts, home, 8, None, copies)
    for name in ("lar", "remote_fanout"):
        assert np.nansum(getattr(found, name) * found.rows) / len(rows) == pytest.approx(getattr(whole, name))


def test_tables_count_an_expert_with_two_copies_on_both_ranks():
    hosts = np.array([[1, 1], [0, 1]], np.bool_)
    counts = np.array([0, 0, 2]), np.array([0, 1, 0]), np.array([3, 1, 2])
    assert rank_counts(counts, 3, hosts).tolist() == [[3, 4], [0, 0], [2, 2]]
    assert popularity_by_rank(np.array([5, 1]), hosts).tolist() == [5 / 6, 1]
    assert local_counts(np.array([[0, 1], [0, 0]]), hosts).tolist() == [[1, 2], [2, 2]]


# The objective.


def deviation(load, hosts):
    """Summed distance of the ranks' loads from their mean, as a share: copies of an expert share its load equally."""
    ranks = hosts.shape[1]
    by_rank = [
        sum(Fraction(int(load[e]), int(hosts[e].sum())) for e in range(len(load)) if hosts[e, g]) for g in range(ranks)
    ]
    return sum(abs(one - sum(by_rank) / ranks) for one in by_rank) / sum(by_rank)


@settings(max_examples=25, deadline=None)
@given(rows=routings(EXPERTS, TOP_K, min_rows=6, max_rows=14), hosts=copied())
def test_the_objective_with_copies_equals_a_recount(rows, hosts):
    found = score_hosts(layer(Goal.BLEND, RANKS, EXPERTS, rows, 6, theta=0.2, mu=0.5), hosts)
    local = 0
    for start, stop in pairwise([*range(0, len(rows), 6), len(rows)]):
        held = np.array([[sum(int(hosts[e, g]) for e in row) for g in range(RANKS)] for row in rows[start:stop]])
        local += hungarian(held, -(-len(held) // RANKS))
    spread = sum(len(covers(row, hosts, range(RANKS))) for row in rows)
    uneven = deviation(np.bincount(rows.reshape(-1), minlength=EXPERTS), hosts)
    assert found.lar == pytest.approx(local / rows.size)
    assert found.fanout == pytest.approx(spread / len(rows))
    assert found.load_deviation == pytest.approx(float(uneven))
    assert found.objective == pytest.approx(
        0.8 * (1 - local / rows.size) + 0.5 * spread / rows.size + 0.2 * float(uneven)
    )


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT, Goal.BLEND, Goal.ILP])
def test_without_copies_the_objective_is_the_plain_one(goal):
    rows = clustered_rows(np.random.default_rng(1), 300, 12, 3, 4)
    problem = layer(goal, 4, 12, rows, 64)
    placement = np.random.default_rng(2).permutation(problem.contiguous())
    found, plain = score_hosts(problem, single_hosts(placement, 4)), score(problem, placement)
    assert asdict(found) == pytest.approx(asdict(plain))


# Where copies are put.


def problem_of(goal, experts, ranks, seed=0, rows=240, **options):
    return layer(
        goal, ranks, experts, clustered_rows(np.random.default_rng(seed), rows, experts, 3, ranks), 64, **options
    )


def check_slots(hosts, slots):
    assert hosts.sum(axis=0).tolist() == [slots] * hosts.shape[1]
    assert hosts.any(axis=1).all()


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT, Goal.BLEND])
@pytest.mark.parametrize(("experts", "ranks", "redundant"), [(12, 4, 1), (12, 4, 3), (13, 4, 1), (11, 3, 2), (8, 1, 0)])
def test_every_slot_is_filled_every_expert_is_there_and_the_goal_is_never_worse(goal, experts, ranks, redundant):
    """No expert is twice on a rank. Also where ranks cannot share the experts equally."""
    problem = problem_of(goal, experts, ranks, theta=0.0)
    start = problem.contiguous()
    inputs = problem.demand, problem.load, problem.sets, start
    before = [values.copy() for values in inputs]
    slots = experts // ranks + redundant
    hosts, stages = add_copies(problem, start, slots, Effort.FAST, np.random.default_rng(0))
    check_slots(hosts, slots)
    assert score_hosts(problem, hosts).objective <= score(problem, start).objective
    assert stages[-1].objective == score_hosts(problem, hosts).objective == min(stage.objective for stage in stages)
    for kept, values in zip(before, inputs, strict=True):
        assert (kept == values).all()


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT, Goal.BLEND])
def test_no_step_improves_what_a_descent_returns(goal):
    """All single replacements and swaps, each scored anew."""
    problem = problem_of(goal, 9, 3, seed=4, rows=150)
    start = single_hosts(problem.contiguous(), 3)
    start[[3, 6, 0], [0, 1, 2]] = True
    state = descend(lay_out(problem), start, np.random.default_rng(0))
    hosts, best = state.hosts, score_hosts(problem, state.hosts).objective
    check_slots(hosts, 4)
    assert best < score_hosts(problem, start).objective
    for p in range(3):
        for x, y in product(np.flatnonzero(hosts[:, p]), np.flatnonzero(~hosts[:, p])):
            steps = [(y, None)] if hosts[x].sum() > 1 else []
            steps += [(y, q) for q in range(3) if q != p and hosts[y, q] and not hosts[x, q]]
            for _, q in steps:
                other = hosts.copy()
                other[x, p], other[y, p] = False, True
                if q is not None:
                    other[x, q], other[y, q] = True, False
                assert score_hosts(problem, other).objective >= best - 1e-9


def every_placement(experts, ranks, slots):
    """All hosts with `slots` different experts a rank and every expert somewhere."""
    for held in product(list(combinations(range(experts), slots)), repeat=ranks):
        if len(set().union(*held)) == experts:
            hosts = np.zeros((experts, ranks), np.bool_)
            for g, mine in enumerate(held):
                hosts[list(mine), g] = True
            yield hosts


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT])
def test_the_best_of_all_placements_with_copies_is_found(goal):
    reached = 0
    for seed in range(10):
        problem = problem_of(goal, 6, 2, seed=seed, rows=60, theta=0.0)
        best = min(score_hosts(problem, hosts).objective for hosts in every_placement(6, 2, 4))
        _, stages = add_copies(problem, problem.contiguous(), 4, Effort.DEFAULT, np.random.default_rng(seed))
        reached += stages[-1].objective <= best + 1e-9
    assert reached >= 9


def test_copies_are_worth_more_than_those_of_the_hottest_experts():
    problem = problem_of(Goal.LAR, 24, 4, seed=7, rows=600, theta=0.0)
    start = problem.contiguous()
    hosts, _ = add_copies(problem, start, 7, Effort.DEFAULT, np.random.default_rng(0))
    hottest = single_hosts(start, 4)
    for g in range(4):
        hottest[max(np.flatnonzero(~hottest[:, g]), key=lambda e: problem.load[e]), g] = True
    assert score_hosts(problem, hosts).lar > score_hosts(problem, hottest).lar + 0.01


def test_an_expert_that_every_token_uses_is_on_every_rank():
    generator = np.random.default_rng(0)
    others = np.argsort(generator.random((200, 15)), axis=1)[:, :2] + 1
    rows = np.sort(np.concatenate([np.zeros((200, 1), np.int64), others], axis=1), axis=1).astype(np.uint16)
    problem = layer(Goal.LAR, 4, 16, rows, 100, theta=0.0)
    hosts, _ = add_copies(problem, problem.contiguous(), 5, Effort.DEFAULT, generator)
    assert hosts[0].all()


def test_with_all_experts_on_every_rank_all_is_local():
    problem = problem_of(Goal.BLEND, 8, 4, theta=0.0)
    hosts, _ = add_copies(problem, problem.contiguous(), 8, Effort.FAST, np.random.default_rng(0))
    assert hosts.all()
    assert (score_hosts(problem, hosts).lar, score_hosts(problem, hosts).fanout) == (1.0, 1.0)


@pytest.mark.parametrize("slots", [2, 9])
def test_too_few_or_too_many_slots_are_refused(slots):
    problem = problem_of(Goal.LAR, 8, 3)
    with pytest.raises(ValueError, match=f"{slots} slots"):
        add_copies(problem, problem.contiguous(), slots, Effort.FAST, np.random.default_rng(0))


def test_one_seed_gives_one_placement_with_copies():
    problem = problem_of(Goal.BLEND, 12, 4, seed=3)
    found = [
        add_copies(problem, problem.contiguous(), 4, Effort.DEFAULT, np.random.default_rng(5))[0] for _ in range(2)
    ]
    assert (found[0] == found[1]).all()
    assert slots_of(found[0]).reshape(4, 4).tolist() == [[0, 1, 4, 10], [5, 8, 9, 11], [2, 3, 7, 8], [3, 4, 6, 11]]


def test_names_of_ranks_follow_the_layer_before():
    hosts = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 1]], np.bool_)
    towards = np.zeros((4, 3))
    towards[[0, 1, 2, 3], [2, 2, 0, 1]] = 5
    renamed = relabel_hosts(hosts, towards)
    assert renamed.tolist() == hosts[:, [1, 2, 0]].tolist()
    assert relabel_hosts(renamed, towards).tolist() == renamed.tolist()
