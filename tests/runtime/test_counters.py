"""What the counters say was sent is what was sent, and is what evaluate foretells for the same rows."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from smoe_cli.runtime.collectives import CollectiveExchange, rms_norm
from smoe_cli.runtime.counters import gather_counters
from smoe_cli.runtime.exchange import Norm
from smoe_cli.runtime.layer import Mode
from smoe_cli.runtime.plan import identity_plan, make_plan
from smoe_solvers.figures import home_without_shuffle, measure
from tests.runtime.layers import E, H, build_layer, noise, route, weights
from tests.runtime.ranks import ranks

T = 37
MAP = torch.randperm(E, generator=torch.Generator().manual_seed(8))


def rank_counts(physical_to_logical, number, tokens=T):
    """n_g of the rows that `run_counted` routes, [T, G], without anything of the run time but the router."""
    summed = noise(number, tokens, H, seed=30).sum(dim=0) + noise(tokens, H, seed=31)
    experts, _ = route(rms_norm(summed, Norm(weights()["norm"], 1e-6)))
    slot = np.argsort(physical_to_logical.numpy())[experts.numpy()]
    sizes = E // number + (np.arange(number) < E % number)
    rank = np.repeat(np.arange(number), sizes)[slot]
    return np.stack([(rank == g).sum(axis=1) for g in range(number)], axis=1).astype(np.int32)


def run_counted(physical_to_logical, mode, scores, tokens=T):
    """One layer; scores [T, G] uint8 make the plan, None: no shuffle. Returns the document and the bytes handed to the
    backend for other ranks."""
    sent = []
    whole = dist.all_to_all_single

    def counted(output, given, output_sizes, input_sizes, group):
        rank = dist.get_rank()
        width = given.shape[1]
        sent.append(width * sum(size for other, size in enumerate(input_sizes) if other != rank))
        return whole(output, given, output_sizes, input_sizes, group=group)

    dist.all_to_all_single = counted
    try:
        exchange = CollectiveExchange()
        number = exchange.num_ranks
        partial, residual = noise(number, tokens, H, seed=30)[exchange.rank], noise(tokens, H, seed=31)
        layer = build_layer(physical_to_logical, exchange, counted=True)
        plan = identity_plan(tokens, number, "cpu") if scores is None else make_plan(scores, number)
        if scores is not None:
            layer.counters.add_plan(plan, scores, exchange.rank)
        layer.run(mode, partial, residual, plan)
    finally:
        dist.all_to_all_single = whole
    return gather_counters({3: layer.counters}), sum(sent)


def document(number, physical_to_logical, mode=Mode.SP_EP, scores=None):
    found = ranks(number).run(run_counted, physical_to_logical, mode, scores)
    assert all(told == found[0][0] for told, _ in found)
    return found[0][0]["layers"]["3"], sum(sent for _, sent in found)


@pytest.mark.parametrize("number", [2, 4])
def test_figures_equal_those_of_evaluate_on_the_same_rows(number):
    counts = rank_counts(MAP, number)
    generator = np.random.default_rng(0)
    scores = torch.from_numpy(generator.integers(0, 256, (T, number), dtype=np.uint8))
    plan = make_plan(scores, number)
    shuffled = (plan.place_of_token // plan.rows_per_rank).numpy()
    cases = [(Mode.SP_EP, None, home_without_shuffle(T, number, T)), (Mode.SPECULATIVE, scores, shuffled)]
    for mode, given, home in cases:
        expected = measure(counts, home, T, None)
        layer, _ = document(number, MAP, mode, given)
        assert layer["tokens"] == T
        for name in ("lar", "fanout", "remote_fanout", "load_imbalance"):
            assert layer[name] == pytest.approx(getattr(expected, name)), name
        assert layer["busiest_rows"]["dispatch"] * number / T == pytest.approx(expected.remote_fanout_busiest)
    best = scores.numpy().max(axis=1)
    assert layer["overflow"] == pytest.approx((scores.numpy()[np.arange(T), shuffled] < best).mean())


@pytest.mark.parametrize("number", [2, 4])
def test_rows_counted_are_the_bytes_that_the_backend_was_given(number):
    """Counts read from what torch.distributed was asked to send to other ranks, its all-gathers aside."""
    layer, sent = document(number, MAP)
    parts = ("reduce_scatter", "dispatch", "combine")
    assert all(layer["rows"][name] > 0 for name in (*parts, "all_gather"))
    assert sum(layer["bytes"][name] for name in parts) == sent
    assert layer["rows"]["reduce_scatter"] == number * (number - 1) * -(-T // number)
    assert layer["rows"]["dispatch"] == layer["rows"]["combine"]
    assert all(layer["seconds"][name] > 0 for name in (*parts, "router", "experts", "all_gather"))


def test_a_rank_that_holds_every_expert_is_found():
    """Rows are sent to it alone, and it says so: all load, and a fan-out of one."""
    told = ranks(2).run(run_one_sided)
    layer = told[0]["layers"]["0"]
    assert layer["load_imbalance"] == 2
    assert layer["fanout"] == 1
    assert layer["rows"]["dispatch"] == T // 2
    with pytest.raises(AssertionError):
        check_shared(layer)
    check_shared(document(2, MAP)[0])


def check_shared(layer):
    """What holds of a layer whose experts lie on several ranks."""
    assert layer["rows"]["dispatch"] > 0
    assert layer["fanout"] > 1
    assert layer["load_imbalance"] < 2


def run_one_sided():
    """Rank 0 has all experts."""
    from dataclasses import replace

    from smoe_cli.runtime.experts import LocalExperts
    from smoe_cli.runtime.slots import Slots

    exchange = CollectiveExchange()
    found, held = weights(), slice(0, E if exchange.rank == 0 else 0)
    slot_on_rank = torch.stack([torch.arange(E), torch.full((E,), -1)], dim=1).int()
    layer = replace(
        build_layer(MAP, exchange, counted=True),
        slots=Slots(slot_on_rank),
        experts=LocalExperts(found["gate_up"][held], found["down"][held], 0),
    )
    partial, residual = noise(2, T, H, seed=30)[exchange.rank], noise(T, H, seed=31)
    layer.run(Mode.SP_EP, partial, residual, identity_plan(T, 2, "cpu"))
    return gather_counters({0: layer.counters})


@pytest.mark.parametrize("number", [2, 4])
def test_an_oracle_plan_sends_fewer_bytes_than_a_random_one(number):
    counts = rank_counts(MAP, number)
    oracle = torch.from_numpy((counts * 85).astype(np.uint8))
    chance = torch.randint(0, 256, (T, number), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    best, told = (document(number, MAP, Mode.SPECULATIVE, scores) for scores in (oracle, chance))
    assert best[0]["bytes"]["dispatch"] < told[0]["bytes"]["dispatch"]
    assert best[1] < told[1]
    assert best[0]["lar"] > told[0]["lar"]


def test_replicated_sends_no_rows_to_experts():
    layer, _ = document(2, MAP, Mode.REPLICATED)
    assert layer["rows"]["dispatch"] == layer["rows"]["combine"] == layer["rows"]["reduce_scatter"] == 0
    assert layer["rows"]["all_reduce"] == 2 * 2 * 2 * -(-T // 2)
    assert layer["remote_fanout"] > 0


def test_nothing_is_counted_unless_asked():
    assert ranks(2).run(run_uncounted) == [({}, {})] * 2


def run_uncounted():
    layer = build_layer(MAP)
    layer.run(Mode.SP_EP, noise(T, H, seed=1), noise(T, H, seed=2), identity_plan(T, 2, "cpu"))
    return layer.counters.sums, dict(layer.counters.rows)
