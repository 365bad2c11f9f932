"""Tokens to ranks: the exact assignment, its prices, the charged form, and the rule that is served."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smoe_solvers.assignment import HARD, assign_exact, assign_rule, chunk_rows, row_chunks, transport
from tests.solvers.reference import (
    best_with_charges,
    clustered_rows,
    hungarian,
    local_activations,
    one_hot,
    rule,
    score_rows,
    total,
)

many = settings(max_examples=80, deadline=None)


def solve(scores, multiplicity, quota, charge=HARD, price=None):
    """A block with one entry a row. Returns (value, prices, flow)."""
    entries, ranks = scores.shape
    prices = np.zeros(ranks, np.int64) if price is None else price.copy()
    flow = np.zeros((entries, ranks), np.int32)
    counts = np.asarray(multiplicity, np.int64)
    kinds = np.arange(entries)
    value = transport(np.ascontiguousarray(scores), kinds, counts, np.int64(quota), np.int64(charge), prices, flow)
    return int(value), prices, flow


def dual_value(scores, multiplicity, quota, price):
    """What the prices prove: no assignment under the quota can be worth more."""
    best = (scores.astype(np.int64) - price).max(axis=1)
    return int((best * multiplicity).sum() + quota * price.sum())


def tight(scores):
    return -(-len(scores) // scores.shape[1])


@many
@given(scores=score_rows(max_rows=14, max_ranks=4, low=-6, high=6), room=st.integers(0, 3))
def test_exact_assignment_is_worth_as_much_as_a_hungarian(scores, room):
    quota = tight(scores) + room
    to_rank = assign_exact(scores, quota)
    assert total(scores, to_rank) == hungarian(scores, quota)
    assert np.bincount(to_rank, minlength=scores.shape[1]).max() <= quota


@pytest.mark.parametrize(("tokens", "ranks"), [(256, 8), (250, 8), (97, 16), (64, 2), (5, 8), (1, 4)])
def test_exact_assignment_of_a_real_sized_batch_is_worth_as_much_as_a_hungarian(tokens, ranks):
    generator = np.random.default_rng(tokens)
    rows = clustered_rows(generator, tokens, 32, 4, 6)
    local = local_activations(one_hot(rows, 32), range(tokens), generator.permutation(np.arange(32) % ranks), ranks)
    scores = local.astype(np.int32)
    quota = -(-tokens // ranks)
    assert total(scores, assign_exact(scores, quota)) == hungarian(scores, quota)


def test_no_tokens_get_no_ranks():
    assert assign_exact(np.zeros((0, 4), np.int32), 0).tolist() == []
    assert assign_rule(np.zeros((0, 4), np.uint8), 0).tolist() == []


def test_one_rank_takes_all():
    scores = np.array([[3], [0], [7]], np.int32)
    assert assign_exact(scores, 3).tolist() == [0, 0, 0]
    assert assign_rule(scores.astype(np.uint8), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("assign", [assign_exact, assign_rule])
@pytest.mark.parametrize(("tokens", "ranks", "quota"), [(9, 4, 2), (1, 1, 0), (3, 2, 1)])
def test_tokens_beyond_every_quota_are_refused(assign, tokens, ranks, quota):
    with pytest.raises(ValueError, match=f"{ranks} ranks .*{quota}.* {tokens} tokens"):
        assign(np.zeros((tokens, ranks), np.uint8), quota)


@pytest.mark.parametrize("assign", [assign_exact, assign_rule])
def test_assignment_leaves_its_scores_alone(assign):
    scores = np.random.default_rng(1).integers(0, 256, (40, 4)).astype(np.uint8)
    before = scores.copy()
    first = assign(scores, 10)
    assert (scores == before).all()
    assert assign(scores, 10).tobytes() == first.tobytes()
    assert first.dtype == np.int32


@st.composite
def blocks(draw, low=-9, high=9, full=None):
    """(scores [M, G], multiplicity [M], quota): entries that stand for several rows."""
    ranks = draw(st.integers(1, 4))
    entries = draw(st.integers(1, 7))
    row = st.lists(st.integers(low, high), min_size=ranks, max_size=ranks)
    scores = np.array(draw(st.lists(row, min_size=entries, max_size=entries)), np.int32)
    multiplicity = draw(st.lists(st.integers(1, 5), min_size=entries, max_size=entries))
    multiplicity[0] += -sum(multiplicity) % ranks if full else 0
    return scores, np.array(multiplicity), -(-sum(multiplicity) // ranks)


@many
@given(block=blocks())
def test_entries_that_stand_for_several_rows_are_worth_their_rows(block):
    scores, multiplicity, quota = block
    value, _, flow = solve(scores, multiplicity, quota)
    assert value == hungarian(np.repeat(scores, multiplicity, axis=0), quota)
    assert (flow >= 0).all()
    assert flow.sum(axis=1).tolist() == multiplicity.tolist()
    assert flow.sum(axis=0).max() <= quota
    assert value == (flow.astype(np.int64) * scores).sum()


@many
@given(block=blocks())
def test_prices_prove_the_assignment_best(block):
    scores, multiplicity, quota = block
    value, price, flow = solve(scores, multiplicity, quota)
    assert dual_value(scores, multiplicity, quota, price) == value
    assert price.min() == 0
    assert not price[flow.sum(axis=0) < quota].any()


@many
@given(block=blocks(full=True), other=st.integers(0, 2**32 - 1))
def test_prices_of_a_similar_full_block_lead_to_the_same_value(block, other):
    scores, multiplicity, quota = block
    similar = scores + np.random.default_rng(other).integers(-4, 5, scores.shape, dtype=np.int32)
    cold, _, _ = solve(similar, multiplicity, quota)
    _, price, _ = solve(scores, multiplicity, quota)
    warm, warm_price, flow = solve(similar, multiplicity, quota, price=price)
    assert warm == cold
    assert dual_value(similar, multiplicity, quota, warm_price) == cold
    assert (flow.sum(axis=0) == quota).all()


@settings(max_examples=200, deadline=None)
@example(np.array([[0, 1, 0], [1, 0, 0], [1, 0, 0], [-1, 0, 0]], np.int32), 1, -1)  # not the nearest full rank first
@given(scores=score_rows(max_rows=6, max_ranks=3, low=-5, high=5), charge=st.integers(0, 7), room=st.integers(-1, 1))
def test_charged_assignment_equals_the_best_of_all_assignments(scores, charge, room):
    quota = tight(scores) + room
    value, _, flow = solve(scores, np.ones(len(scores)), quota, charge)
    assert value == best_with_charges(scores, quota, charge)
    assert (flow.sum(axis=1) == 1).all()


@many
@given(
    scores=score_rows(max_rows=6, max_ranks=3, low=-5, high=5),
    charge=st.sampled_from([0, 1, 3, 6, int(HARD)]),
    other=st.integers(0, 2**32 - 1),
)
def test_prices_bound_what_other_scores_can_gain(scores, charge, other):
    quota = tight(scores)
    changed = np.random.default_rng(other).integers(-5, 6, scores.shape, dtype=np.int32)
    value, price, _ = solve(scores, np.ones(len(scores)), quota, charge)
    after, _, _ = solve(changed, np.ones(len(scores)), quota, charge)
    bound = ((changed - price).max(axis=1) - (scores - price).max(axis=1)).sum()
    assert after - value <= bound


@pytest.mark.parametrize(("charge", "value"), [(2, 12 - 4), (3, 12 - 6), (4, 6), (9, 6)])
def test_a_row_moves_when_that_costs_less_than_both_its_charges(charge, value):
    """Two rows want rank 0, which takes one: the other pays there and for the empty place, or 6 to move."""
    scores = np.array([[6, 0], [6, 0]], np.int32)
    assert solve(scores, np.ones(2), 1, charge)[0] == value


def test_without_a_charge_every_row_goes_where_it_scores_most():
    scores = np.random.default_rng(0).integers(0, 99, (50, 4), dtype=np.int32)
    value, _, _ = solve(scores, np.ones(50), 13, charge=0)
    assert value == scores.max(axis=1).sum()


@many
@given(scores=score_rows(max_rows=24, max_ranks=5, low=0, high=5), room=st.integers(0, 2))
def test_rule_is_prices_and_moves(scores, room):
    quota = tight(scores) + room
    assert assign_rule(scores.astype(np.uint8), quota).tolist() == rule(scores, quota)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 96, 101])
def test_rule_on_bytes_is_prices_and_moves(tokens, ranks):
    scores = np.random.default_rng(tokens).integers(0, 256, (tokens, ranks)).astype(np.uint8)
    assert assign_rule(scores, tight(scores)).tolist() == rule(scores.astype(np.int32), tight(scores))


@many
@given(scores=score_rows(max_rows=24, max_ranks=6, low=0, high=255), room=st.integers(0, 2))
def test_rule_keeps_the_quota(scores, room):
    quota = tight(scores) + room
    to_rank = assign_rule(scores.astype(np.uint8), quota)
    assert np.bincount(to_rank, minlength=scores.shape[1]).max() <= quota
    assert total(scores, to_rank) <= hungarian(scores, quota)


@pytest.mark.parametrize(("rows", "mean_loss"), [(1, 0.1), (3, 0.03), (8, 0.012), (32, 0.003)])
def test_rule_stays_near_the_best_in_small_batches(rows, mean_loss):
    """rows: places of a rank. With one or two a rank, prices have hardly anything to balance."""
    generator, losses = np.random.default_rng(rows), []
    for _ in range(60):
        ranks = int(generator.choice([3, 4, 8]))
        scores = generator.integers(0, 256, (rows * ranks - int(generator.integers(0, ranks)), ranks)).astype(np.uint8)
        best = total(scores, assign_exact(scores, rows))
        losses.append(1 - total(scores, assign_rule(scores, rows)) / best)
    assert np.mean(losses) < mean_loss


@many
@given(scores=score_rows(max_rows=30, max_ranks=2, low=0, high=255), room=st.integers(0, 2))
def test_rule_is_exact_between_two_ranks(scores, room):
    quota = tight(scores) + room
    assert total(scores, assign_rule(scores.astype(np.uint8), quota)) == hungarian(scores, quota)


@pytest.mark.parametrize("tokens", [1000, 8192])
def test_rule_is_exact_between_two_ranks_up_to_a_whole_chunk(tokens):
    scores = np.random.default_rng(0).integers(0, 256, (tokens, 2)).astype(np.uint8)
    assert total(scores, assign_rule(scores, tight(scores))) == total(scores, assign_exact(scores, tight(scores)))


@pytest.mark.parametrize("scores", [np.full((24, 4), 7), np.zeros((25, 8)), np.tile([0, 255, 0], (30, 1))])
def test_equal_tokens_fill_every_rank(scores):
    load = np.bincount(assign_rule(scores.astype(np.uint8), tight(scores)), minlength=scores.shape[1])
    assert load.max() == tight(scores)
    assert load.sum() == len(scores)


def test_a_full_rank_keeps_the_tokens_that_would_lose_most():
    scores = np.array([[9, 8], [9, 0], [9, 5], [9, 7]], np.uint8)
    assert assign_rule(scores, 2).tolist() == [1, 0, 0, 1]


def test_scores_at_the_top_of_a_byte_do_not_wrap():
    scores = np.array([[255, 0], [255, 254], [0, 255], [1, 255]], np.uint8)
    assert assign_rule(scores, 2).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_other_names_of_the_ranks_are_worth_the_same(ranks):
    """Prices meet ties that scores do not have, and those go to the lower rank: a few tokens, at next to no loss."""
    generator = np.random.default_rng(ranks)
    scores = generator.integers(0, 256, (1000, ranks)).astype(np.uint8)
    names = generator.permutation(ranks)
    value = total(scores, assign_rule(scores, tight(scores)))
    renamed = total(scores[:, names], assign_rule(scores[:, names], tight(scores)))
    assert abs(renamed - value) < 0.002 * value


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1024, 1000])
def test_rule_keeps_nearly_all_that_an_exact_assignment_keeps(tokens, ranks):
    """Expected activations of clustered tokens, true counts, a few kinds of token, and any bytes."""
    generator = np.random.default_rng(ranks)
    rows = clustered_rows(generator, tokens, 64, 6, 10)
    local = local_activations(one_hot(rows, 64), range(tokens), generator.permutation(np.arange(64) % ranks), ranks)
    kinds = np.rint(255 * generator.dirichlet(np.ones(ranks), ranks))
    batches = [
        np.rint(local * 255 / 6),
        generator.integers(0, 256, local.shape),
        kinds[generator.integers(0, ranks, tokens)],
        np.where(local == local.max(axis=1, keepdims=True), local * 40, 0),
    ]
    for scores in batches:
        as_bytes = scores.astype(np.uint8)
        best = total(as_bytes, assign_exact(as_bytes, tight(as_bytes)))
        assert total(as_bytes, assign_rule(as_bytes, tight(as_bytes))) >= 0.99 * best


@pytest.mark.parametrize("ranks", [7, 8, 16])
def test_rule_keeps_nearly_all_where_all_tokens_want_one_rank(ranks):
    """Prices once rose by all that the rank had too much, left it empty, and could not come back."""
    generator = np.random.default_rng(ranks)
    lead = generator.integers(0, 256, (1000, ranks)) // 2
    lead[:, 0] = lead.max(axis=1) + generator.integers(0, 60, 1000)
    used = generator.multinomial(6, generator.dirichlet(np.r_[8, np.full(ranks - 1, 0.5)], 1000))
    for scores in (lead, np.rint(used * 255 / 6)):
        as_bytes = scores.clip(0, 255).astype(np.uint8)
        best = total(as_bytes, assign_exact(as_bytes, tight(as_bytes)))
        assert total(as_bytes, assign_rule(as_bytes, tight(as_bytes))) >= 0.99 * best


@pytest.mark.parametrize(("tokens", "ranks"), [(2040, 8), (2049, 8), (5000, 8), (4097, 4), (4100, 3), (8193, 2)])
def test_chunks_share_the_places_of_every_rank_evenly(tokens, ranks):
    quota = -(-tokens // ranks)
    chunk_of_row = row_chunks(quota, ranks, quota)
    sizes = np.bincount(chunk_of_row)
    assert len(sizes) == -(-quota // chunk_rows(ranks))
    assert sizes.sum() == quota
    assert sizes.max() - sizes.min() <= 1


def test_a_chunk_is_assigned_as_if_alone():
    scores = np.random.default_rng(5).integers(0, 256, (5003, 8)).astype(np.uint8)
    chunk_of_row = row_chunks(626, 8, 626)
    chunk = chunk_of_row[np.arange(5003) // 8]
    to_rank = assign_rule(scores, 626)
    assert chunk.max() == 2
    for number in range(3):
        alone = assign_rule(scores[chunk == number], int((chunk_of_row == number).sum()))
        assert (to_rank[chunk == number] == alone).all()


def test_a_text_that_repeats_itself_does_not_fill_one_chunk():
    """Rows that come again after as many as there are chunks would, were the order of the chunks always the same."""
    chunks = row_chunks(2048, 8, 2048)
    repeated = np.bincount(chunks[:: chunks.max() + 1], minlength=chunks.max() + 1)
    assert repeated.max() < 2 * repeated.mean()
