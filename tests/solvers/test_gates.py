"""From logits known before attention to scores, and how scores are mixed and calibrated, against loops."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Predictor
from smoe_solvers.linear import choose_ridge, fit_affine, fit_linear
from smoe_solvers.predictors import (
    FUSED,
    SCORE_MAX,
    Context,
    LayerPredictors,
    MarkovTables,
    by_rank,
    choose_temperature,
    fit_fusion,
    inclusion,
    local_counts,
    markov_scores,
    paper_scores,
    quantise,
    score,
)
from smoe_solvers.redundancy import single_hosts

some = settings(max_examples=60, deadline=None)
EXPERTS, RANKS, TOP_K, VOCAB = 8, 4, 2, 6
PLACE = np.array([0, 1, 2, 3, 3, 2, 1, 0])
HOSTS = single_hosts(PLACE, RANKS)


def logits_of(seed, tokens=12):
    return np.random.default_rng(seed).normal(size=(tokens, EXPERTS)).astype(np.float32)


@some
@given(st.integers(0, 10**6), st.floats(0.05, 3))
def test_inclusion_equals_loops_and_sums_to_k(seed, temperature):
    logits = logits_of(seed)
    found = inclusion(logits, TOP_K, temperature)
    for row, values in zip(found, logits.astype(np.float64).tolist(), strict=True):
        ordered = sorted(values, reverse=True)
        border = (ordered[TOP_K - 1] + ordered[TOP_K]) / 2
        mean = sum(values) / EXPERTS
        spread = (sum((value - mean) ** 2 for value in values) / EXPERTS) ** 0.5
        plain = [1 / (1 + np.exp(-(value - border) / (temperature * spread))) for value in values]
        assert row == pytest.approx([value * TOP_K / sum(plain) for value in plain], rel=1e-6, abs=1e-9)
        assert row.sum() == pytest.approx(TOP_K)
    assert (np.argsort(found, axis=1) == np.argsort(logits, axis=1)).all()


def test_a_sharp_inclusion_is_the_top_k():
    logits = logits_of(1)
    hard = np.zeros_like(logits)
    np.put_along_axis(hard, np.argsort(-logits, axis=1)[:, :TOP_K], 1, axis=1)
    assert inclusion(logits, TOP_K, 1e-6) == pytest.approx(hard, abs=1e-6)


def test_inclusion_does_not_change_with_the_scale_of_the_logits():
    logits = logits_of(2)
    assert inclusion(logits * 7 + 3, TOP_K, 0.3) == pytest.approx(inclusion(logits, TOP_K, 0.3), rel=1e-5)


@some
@given(st.integers(0, 10**6))
def test_scores_by_rank_are_sums_over_its_experts(seed):
    chances = np.random.default_rng(seed).random((5, EXPERTS))
    found = by_rank(chances, HOSTS)
    for row, mine in zip(found, chances, strict=True):
        assert row == pytest.approx([sum(mine[e] for e in range(EXPERTS) if PLACE[e] == g) for g in range(RANKS)])


def noisy_choice(seed, tokens, noise):
    """Logits, and the experts a router chooses from the same logits with noise on them."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(tokens, EXPERTS)).astype(np.float32)
    seen = logits + noise * generator.normal(size=logits.shape)
    return logits, np.argsort(-seen, axis=1)[:, :TOP_K]


def test_the_temperature_grows_with_the_noise_and_expected_counts_are_reliable():
    chosen = []
    for noise in (0.05, 0.3, 1.0):
        logits, experts = noisy_choice(0, 20_000, noise)
        counts = local_counts(experts, HOSTS)
        temperature = choose_temperature(logits, counts, HOSTS, TOP_K)
        chosen.append(temperature)
        fresh, fresh_experts = noisy_choice(1, 20_000, noise)
        expected = by_rank(inclusion(fresh, TOP_K, temperature), HOSTS).reshape(-1)
        true = local_counts(fresh_experts, HOSTS).reshape(-1)
        for low in np.arange(0, 2, 0.25):
            mine = (expected >= low) & (expected < low + 0.25)
            if mine.sum() > 300:
                assert true[mine].mean() == pytest.approx(expected[mine].mean(), abs=0.12)
    assert chosen == sorted(chosen)


def test_the_linear_fit_is_ridge_regression_on_standardised_rows():
    generator = np.random.default_rng(0)
    raw = generator.normal(size=(300, 5)) * [1, 10, 0.1, 3, 1] + [0, 5, 0, -2, 1]
    x = np.concatenate([raw, np.ones((300, 1))], axis=1)
    y = raw @ generator.normal(size=(5, 3)) + generator.normal(size=(300, 3)) + 4
    z = (raw - raw.mean(axis=0)) / raw.std(axis=0)
    slopes = np.linalg.solve(z.T @ z + 10 * np.eye(5), z.T @ (y - y.mean(axis=0)))
    expected = z @ slopes + y.mean(axis=0)
    assert x @ fit_linear(x.T @ x, x.T @ y, 10.0) == pytest.approx(expected, rel=1e-9)


def test_the_affine_fit_is_least_squares_expert_by_expert():
    generator = np.random.default_rng(2)
    early = generator.normal(size=(200, 3)) * [1, 2, 0.5] + [0, 1, -3]
    y = early * [0.5, 1.2, 2] + [1, 0, -1] + 0.3 * generator.normal(size=(200, 3))
    x = np.concatenate([generator.normal(size=(200, 2)), early, np.ones((200, 1))], axis=1)
    slopes, intercepts = fit_affine(x.T @ x, x.T @ y, 2)
    for e in range(3):
        assert [slopes[e], intercepts[e]] == pytest.approx(np.polyfit(early[:, e], y[:, e], 1), rel=1e-9)


def test_a_constant_feature_does_no_harm_and_a_true_map_is_found():
    generator = np.random.default_rng(1)
    x = np.concatenate([generator.normal(size=(500, 3)), np.full((500, 1), 2.0), np.ones((500, 1))], axis=1)
    weights = generator.normal(size=(5, 2))
    y = x @ weights
    ridge, found = choose_ridge(x.T @ x, x.T @ y, x, y)
    assert ridge == 1.0
    assert x @ found == pytest.approx(y, abs=0.05)


@some
@given(st.integers(0, 10**6))
def test_the_mix_is_calibrated_and_leaves_out_what_is_noise(seed):
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(TOP_K, [1 / RANKS] * RANKS, size=400).astype(np.int32)
    good = quantise(np.clip(counts * 0.5 + 0.25, 0, TOP_K), TOP_K)
    noise = quantise(generator.random((400, RANKS)), TOP_K)
    weights = fit_fusion([good, noise, None, None], counts, TOP_K)
    assert weights[2:] == (0.0, 0.0)
    assert min(weights) >= 0
    mixed = (weights[0] * good.astype(float) + weights[1] * noise) * TOP_K / SCORE_MAX
    for g in range(RANKS):
        assert ((mixed[:, g] - counts[:, g]) ** 2).mean() <= (
            (good[:, g] * TOP_K / SCORE_MAX - counts[:, g]) ** 2
        ).mean()
    assert weights[0] > weights[1]


@pytest.fixture
def layer():
    generator = np.random.default_rng(0)
    markov = MarkovTables(*(generator.integers(0, 128, shape).astype(np.uint8) for shape in ((16, 4), (4, 4), (4,))))
    return LayerPredictors(
        token=generator.integers(0, 128, (VOCAB, RANKS)).astype(np.uint8),
        markov=markov,
        early_temperature=0.2,
        linear_temperature=0.3,
        early=np.stack([np.full(EXPERTS, 2.0), np.arange(EXPERTS) / 10]).astype(np.float32),
        linear=generator.normal(size=(3, EXPERTS)).astype(np.float32),
        fusion=(0.5, 0.0, 0.25, 0.25),
        chosen=Predictor.LINEAR,
    )


@pytest.fixture
def context():
    generator = np.random.default_rng(1)
    return Context(
        token_id=np.array([0, 5, 3, 2**32 - 1], np.uint32),
        two=np.array([0, 1, 2, 3], np.uint8),
        one=np.array([3, 2, 1, 0], np.uint8),
        early=logits_of(3, 4),
        features=generator.normal(size=(4, 3)).astype(np.float32),
    )


def test_every_predictor_scores_what_its_name_says(layer, context):
    def found(predictor):
        return score(layer, predictor, context, HOSTS, TOP_K)

    token = np.concatenate([layer.token[[0, 5, 3]], layer.markov.none[None]])
    markov = markov_scores(layer.markov, context.two, context.one, 4)
    early = quantise(
        by_rank(inclusion(context.early * 2 + np.arange(EXPERTS, dtype=np.float32) / 10, TOP_K, 0.2), HOSTS),
        TOP_K,
    )
    linear = quantise(by_rank(inclusion(context.features @ layer.linear, TOP_K, 0.3), HOSTS), TOP_K)
    assert (found(Predictor.TOKEN) == token).all()
    assert (found(Predictor.MARKOV) == markov).all()
    assert (found(Predictor.PAPER) == paper_scores(token, markov)).all()
    assert (found(Predictor.EARLY_GATE) == early).all()
    assert (found(Predictor.LINEAR) == linear).all()
    assert (found(Predictor.SELECTED) == linear).all()
    parts = {Predictor.TOKEN: token, Predictor.MARKOV: markov, Predictor.EARLY_GATE: early, Predictor.LINEAR: linear}
    mixed = sum(weight * parts[part].astype(float) for part, weight in zip(FUSED, layer.fusion, strict=True))
    assert (found(Predictor.FUSED) == np.rint(np.clip(mixed, 0, 255))).all()


def test_a_mix_in_which_no_part_has_a_weight_scores_every_rank_0(layer, context):
    """As the fit leaves it where no part foretells anything of the few validation rows."""
    mixed = score(replace(layer, fusion=(0.0, 0.0, 0.0, 0.0)), Predictor.FUSED, context, HOSTS, TOP_K)
    assert mixed.tolist() == np.zeros((4, RANKS)).tolist()


@pytest.mark.parametrize("predictor", [Predictor.EARLY_GATE, Predictor.LINEAR, Predictor.FUSED])
def test_a_context_without_the_early_gate_is_refused(predictor, layer, context):
    bare = Context(context.token_id, context.two, context.one)
    with pytest.raises(ValueError, match="early gate"):
        score(layer, predictor, bare, HOSTS, TOP_K)


def test_a_placement_without_the_early_gate_carries_only_tables():
    tables = MarkovTables(*(np.zeros(shape, np.uint8) for shape in ((16, 4), (4, 4), (4,))))
    plain = LayerPredictors(np.zeros((VOCAB, RANKS), np.uint8), tables)
    assert plain.available() == [Predictor.TOKEN, Predictor.MARKOV, Predictor.PAPER, Predictor.FUSED]
