"""A layer run in five ways is one function: equal to the layer in one place, and to each other to the last bit."""

import itertools

import numpy as np
import pytest
import torch

from smoe_cli.runtime.collectives import CollectiveExchange
from smoe_cli.runtime.exchange import Received
from smoe_cli.runtime.experts import TILE, LocalExperts, in_tiles
from smoe_cli.runtime.layer import Mode
from smoe_cli.runtime.plan import identity_plan
from smoe_cli.runtime.slots import Slots, slot_bounds
from smoe_profiles.errors import ImpossibleError
from smoe_solvers.redundancy import serve
from tests.runtime.layers import WIDTH, E, H, K, build_layer, in_one_place, noise, weights
from tests.runtime.ranks import ranks
from tests.runtime.test_collectives import SIZES, random_plan

SHUFFLED_MODES = [mode for mode in Mode if mode is not Mode.DP_EP]
MAPS = {
    "contiguous": torch.arange(E),
    "permuted": torch.randperm(E, generator=torch.Generator().manual_seed(3)),
}


def run_modes(physical_to_logical, tokens):
    """Every mode on the same input. Returns mode -> ([T, H], labels [T])."""
    exchange = CollectiveExchange()
    rank, number = exchange.rank, exchange.num_ranks
    partial, residual = noise(number, tokens, H, seed=10)[rank], noise(tokens, H, seed=11)
    layer = build_layer(physical_to_logical, exchange)
    plans = {mode: identity_plan(tokens, number, torch.device("cpu")) for mode in SHUFFLED_MODES}
    plans[Mode.SPECULATIVE] = random_plan(tokens, number, 5)
    return {mode: layer.run(mode, partial, residual, plan) for mode, plan in plans.items()}


def run_own(physical_to_logical, held):
    """dp-ep; held: rows of each rank. Returns this rank's rows after the layer."""
    exchange = CollectiveExchange()
    start = sum(held[: exchange.rank])
    rows = noise(sum(held), H, seed=12)[start : start + held[exchange.rank]]
    return build_layer(physical_to_logical, exchange).run_own(rows, max(held))


def check_modes(number, physical_to_logical, tokens):
    summed = noise(number, tokens, H, seed=10).sum(dim=0) + noise(tokens, H, seed=11)
    expected = in_one_place(summed)
    found = ranks(number).run(run_modes, physical_to_logical, tokens)
    rows, labels = found[0][Mode.SP_EP]
    assert torch.allclose(rows.double(), expected, atol=2e-5, rtol=1e-4)
    for by_mode in found:
        for mode, (same, known) in by_mode.items():
            assert torch.equal(same, rows), mode
            assert torch.equal(known, labels), mode
    return rows, labels


@pytest.mark.parametrize("number", [2, 4])
def test_every_mode_gives_the_same_bits_on_every_rank(number):
    for tokens in SIZES:
        check_modes(number, MAPS["permuted"], tokens)


def test_a_placement_changes_no_row_by_more_than_rounding():
    rows = {name: check_modes(4, MAPS[name], 17)[0] for name in ("contiguous", "permuted")}
    assert torch.allclose(rows["contiguous"], rows["permuted"], atol=1e-5)


def test_ranks_may_have_unequal_slots():
    assert slot_bounds(E, 4) == [0, 4, 8, 11, 14]
    assert Slots.identity(E, 4).serve(torch.tensor([[7, 8, 13]]), 0).needs.tolist() == [0b1110]


def test_rows_of_own_requests_equal_the_layer_in_one_place():
    for held in ([3, 5], [0, 4], [1, 0], [0, 0]):
        found = ranks(2).run(run_own, MAPS["permuted"], held)
        assert torch.allclose(
            torch.cat(found).double(), in_one_place(noise(sum(held), H, seed=12)), atol=2e-5, rtol=1e-4
        )


def test_copies_serve_at_home_and_give_the_same_rows_but_for_rounding():
    bounds = slot_bounds(E, 4)
    held = [MAPS["permuted"][start:stop] for start, stop in itertools.pairwise(bounds)]
    copied = torch.cat([torch.cat([own, other[:1]]) for own, other in zip(held, held[1:] + held[:1], strict=True)])
    found = ranks(4).run(run_modes, copied, 9)
    expected = in_one_place(noise(4, 9, H, seed=10).sum(dim=0) + noise(9, H, seed=11))
    for rows, _ in found[0].values():
        assert torch.allclose(rows.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("copies", [0, 3, 9])
def test_the_served_copy_is_the_one_that_evaluate_counts(copies):
    generator = np.random.default_rng(copies)
    number, experts = 5, 20
    hosts = np.zeros((experts, number), bool)
    hosts[np.arange(experts), np.arange(experts) % number] = True
    for _ in range(copies):
        hosts[generator.integers(experts), generator.integers(number)] = True
    slot_on_rank = np.where(hosts, hosts.cumsum().reshape(hosts.shape) - 1, -1)
    slots = Slots(torch.from_numpy(slot_on_rank.astype(np.int32)))
    chosen = np.stack([generator.permutation(experts)[:6] for _ in range(300)])
    for home in range(number):
        rank = serve(chosen, np.full(300, home), hosts)
        served = slots.serve(torch.from_numpy(chosen), home)
        assert np.array_equal(served.slots.numpy(), slot_on_rank[chosen, rank])
        counts = (rank[:, :, None] == np.arange(number)).sum(axis=1)
        assert np.array_equal(served.counts.numpy(), counts)
        assert np.array_equal(served.labels.numpy(), counts.argmax(axis=1))
        assert np.array_equal(served.needs.numpy(), ((counts > 0) << np.arange(number)).sum(axis=1))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 30])
def test_a_row_gives_the_same_bits_in_any_batch(rows):
    """Without tiles a product of fewer than seven rows differs from one of more in its last bits."""
    found = weights()
    inputs = noise(30, H, seed=20)

    def product(some):
        return torch.nn.functional.linear(some, found["gate_up"][0])

    whole = in_tiles(product, inputs)
    for trial in range(20):
        chosen = torch.randperm(30, generator=torch.Generator().manual_seed(trial))[:rows]
        assert torch.equal(in_tiles(product, inputs[chosen]), whole[chosen])
    assert torch.allclose(whole, product(inputs), atol=1e-6)


def test_experts_leave_rows_alone_that_are_not_theirs():
    """A row is here only if its bit says so, whatever its expert numbers are; other rows may hold anything."""
    found = weights()
    experts = LocalExperts(found["gate_up"][4:8], found["down"][4:8], first_slot=4)
    rows = noise(6, H, seed=21)
    chosen = torch.tensor([[4, 5, 6], [0, 4, 9], [0, 1, 2], [4, 5, 6], [7, 8, 3], [4, 5, 7]], dtype=torch.int32)
    shares = noise(6, K, seed=22)
    needs = torch.tensor([2, 2, 1, 1, 3, 2], dtype=torch.int32)
    poisoned = rows.clone()
    poisoned[2:4] = torch.nan
    made = experts(Received(poisoned, chosen, shares, needs), rank=1)
    for row in range(6):
        expected = torch.zeros(H)
        for expert, share in zip(chosen[row].tolist(), shares[row], strict=True):
            if needs[row] & 2 and 4 <= expert < 8:
                gate, up = (found["gate_up"][expert] @ rows[row]).chunk(2)
                expected += share * (found["down"][expert] @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(made[row], expected, atol=1e-5)
    assert TILE >= 8
    assert WIDTH % 8 == 0


def test_a_rank_without_experts_makes_nothing_of_a_row():
    nothing = LocalExperts(torch.empty(0, 0, 0), torch.empty(0, 0, 0), first_slot=3)
    chosen, shares = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32), torch.ones(2, 2)
    made = nothing(Received(torch.ones(2, H), chosen, shares, torch.full((2,), 15, dtype=torch.int32)), rank=3)
    assert torch.equal(made, torch.zeros(2, H))


def test_more_ranks_than_a_row_can_name_are_refused():
    with pytest.raises(ImpossibleError, match="up to 32 ranks here, not on 33"):
        Slots.identity(66, 33)
    with pytest.raises(ImpossibleError, match="experts have copies and there are 11 ranks"):
        Slots.of_map(torch.arange(33) % 22, 11)


def attended(tokens):
    """One layer with its attention and the three ways of coming by its plan, on this rank."""
    from smoe_cli.runtime.bench import attended_layers
    from smoe_cli.runtime.replay import Case, make_batch
    from tests.runtime.test_replay import CPU, workload

    exchange, case = CollectiveExchange(), Case("speculative", "placed", "oracle")
    batch = make_batch(workload(), case, tokens, exchange.rank, CPU, torch.float32)
    experts = LocalExperts(torch.ones(4, 16, 16), torch.ones(4, 16, 8), 4 * exchange.rank)
    return {name: once() for name, once in attended_layers(batch, exchange, experts).items()}


def test_a_layer_gives_the_same_rows_however_it_comes_by_its_plan():
    for found in ranks(2).run(attended, 21):
        assert found.keys() == {"free", "beside", "first"}
        assert found["free"].shape == (21, 16)
        assert torch.equal(found["beside"], found["free"])
        assert torch.equal(found["first"], found["free"])
