"""The kernels, run by the interpreter in several processes that share memory and really wait for each other."""

import random
from dataclasses import replace

import pytest
import torch

from tests.runtime.emulation import emulated, open_emulated
from tests.runtime.exchange_checks import Inputs, check_all, same, sleepy

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def all_operations(folder, dtype, tokens, hidden):
    exchange = open_emulated(folder, max(tokens), hidden, dtype=dtype)
    for count in tokens:
        inputs = Inputs(exchange.num_ranks, count, hidden, 3, dtype, CPU, count)
        check_all(exchange, inputs, pause=sleepy(exchange.rank, 0.02))
    exchange.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_ranks_sum_gather_dispatch_and_combine_as_the_reference(tmp_path, dtype):
    sizes = (1, 2, 33) if dtype is torch.bfloat16 else (33,)
    emulated(2).run(all_operations, tmp_path, dtype, sizes, 96)


def test_four_ranks_do_with_fewer_tokens_than_ranks_and_with_uneven_ones(tmp_path):
    emulated(4).run(all_operations, tmp_path, torch.bfloat16, (3, 18), 96)


def test_a_hidden_size_that_is_no_power_of_two_and_only_divisible_by_eight_is_moved_whole(tmp_path):
    emulated(2).run(all_operations, tmp_path, torch.bfloat16, (5,), 8 * 13)


def no_tokens(folder):
    exchange = open_emulated(folder, 8)
    inputs = Inputs(exchange.num_ranks, 0, 96, 3, torch.bfloat16, CPU, 0)
    check_all(exchange, inputs)
    assert exchange.region.epochs.sum() == 1, "only the fence of the start was waited for"


def test_no_tokens_move_nothing_and_wait_for_nobody(tmp_path):
    emulated(2).run(no_tokens, tmp_path)


def lopsided(folder):
    """All rows to one rank; a rank whose rows nobody needs; all rows to all."""
    exchange = open_emulated(folder, 10)
    ranks = exchange.num_ranks
    for needs in (1, (1 << ranks) - 1):
        inputs = Inputs(ranks, 10, 96, 3, torch.bfloat16, CPU, 3)
        inputs.needs.fill_(needs)
        check_all(exchange, inputs)
        inputs.needs[0] = 0
        check_all(exchange, inputs)


def test_ranks_that_get_no_rows_or_all_rows_are_served(tmp_path):
    emulated(2).run(lopsided, tmp_path)


def many_steps(folder):
    """A block that moves its rows in several steps, sums the first while the next are under way."""
    from smoe_cli.runtime.launch import Launch

    exchange = open_emulated(folder, 40)
    for launch in (Launch(1, 4, 4, 128), Launch(2, 4, 2, 64, 3, split=True)):
        exchange._launch = lambda *_, launch=launch: launch
        inputs = Inputs(exchange.num_ranks, 23, 96, 3, torch.bfloat16, CPU, 1)
        check_all(exchange, inputs, pause=sleepy(exchange.rank, 0.02))


def test_rows_that_go_in_steps_arrive_like_rows_that_go_at_once(tmp_path):
    emulated(2).run(many_steps, tmp_path)


def fresh_rounds(folder, protocol, rounds):
    """Rows that carry the round's number, with other ranks asleep. Returns the first round with a foreign row."""
    exchange = open_emulated(folder, 16, dtype=torch.float32)
    exchange.region = replace(exchange.region, protocol=protocol)
    inputs = Inputs(exchange.num_ranks, 2 * exchange.num_ranks, 96, 3, torch.float32, CPU, 0)
    pause = sleepy(exchange.rank, 0.05)
    stale = None
    for number in range(1, rounds + 1):
        pause()
        rows = torch.full((exchange.num_ranks, 2, 96), float(number))
        gathered = exchange.all_gather(rows[exchange.rank], inputs.plan)[0]
        if stale is None and bool((gathered != number).any()):
            stale = number
    return stale


def test_no_row_is_torn_or_stale_while_ranks_sleep(tmp_path):
    assert emulated(2).run(fresh_rounds, tmp_path, 1, 30) == [None, None]


def test_without_the_wait_stale_rows_are_seen(tmp_path):
    found = emulated(2).run(fresh_rounds, tmp_path, 2, 10)
    assert found != [None, None]


def any_order(folder):
    """Slots are used in turn, so operations of any order may follow each other."""
    from smoe_cli.runtime import reference

    exchange = open_emulated(folder, 6)
    rank, inputs = exchange.rank, Inputs(exchange.num_ranks, 6, 96, 3, torch.bfloat16, CPU, 8)
    summed = reference.reduce_scatter(inputs.partials, inputs.plan)[0][rank]
    gathered = reference.all_gather(inputs.rows, inputs.plan)
    mixed = reference.combine(inputs.parts, inputs.needs)[rank]
    chance, pause = random.Random(0), sleepy(rank, 0.02)
    for _ in range(25):
        pause()
        match chance.choice(["sum", "gather", "gather", "send", "fence"]):
            case "sum":
                assert torch.equal(exchange.reduce_scatter(inputs.partials[rank], inputs.plan)[0], summed)
            case "gather":
                assert torch.equal(exchange.all_gather(inputs.rows[rank], inputs.plan)[0], gathered)
            case "send":
                exchange.dispatch(inputs.routed(rank))
                assert torch.equal(exchange.combine(inputs.parts[rank], inputs.routed(rank)), mixed)
            case _:
                exchange.fence()


def test_operations_may_follow_each_other_in_any_order(tmp_path):
    emulated(2).run(any_order, tmp_path)


def alone(folder):
    """The other rank stays away."""
    from smoe_profiles.errors import MachineError

    exchange = open_emulated(folder, 4, patience=0.02)
    said = ""
    if exchange.rank == 0:
        exchange.all_gather(torch.zeros(2, 96, dtype=torch.bfloat16), Inputs(2, 4, 96, 3, torch.bfloat16, CPU, 0).plan)
        try:
            exchange.check()
        except MachineError as error:
            said = str(error)
    return said


def test_a_rank_that_stays_away_is_named_and_nobody_hangs(tmp_path):
    said, _ = emulated(2).run(alone, tmp_path)
    assert said.startswith("Rank 0 waited 0.02 s in vain for rank 1 in all_gather.")


def refusal(folder, **options):
    from smoe_profiles.errors import MachineError

    try:
        exchange = open_emulated(folder, 4, **options)
    except MachineError as error:
        return str(error)
    try:
        plan = Inputs(2, 9, 96, 3, torch.bfloat16, CPU, 0).plan
        exchange.reduce_scatter(torch.zeros(9, 96, dtype=torch.bfloat16), plan)
    except MachineError as error:
        return str(error)
    return None


def test_an_allocation_that_fails_on_one_rank_is_refused_by_all(tmp_path):
    first, second = emulated(2).run(refusal_of_rank_one, tmp_path)
    assert first == second
    assert "rank 1: allocating" in first
    assert "no such link" in first


def refusal_of_rank_one(folder):
    return refusal(folder, fail_on=1)


def test_more_tokens_than_the_region_holds_are_refused_before_a_launch(tmp_path):
    assert "the exchange was opened for 4 tokens" in emulated(2).run(refusal, tmp_path)[0]


def ill_fitting(folder):
    """What an exchange says of tensors that are not as long as their plan."""
    from smoe_cli.runtime.exchange import Norm
    from smoe_profiles.errors import MachineError

    exchange, said = open_emulated(folder, 6), []
    inputs = Inputs(exchange.num_ranks, 5, 96, 3, torch.bfloat16, CPU, 0)
    rows, plan, partial = inputs.rows[0], inputs.plan, inputs.partials[0]
    for call in (
        lambda: exchange.all_gather(rows[:2], plan),
        lambda: exchange.all_gather(rows, plan, inputs.labels[0, :2]),
        lambda: exchange.reduce_scatter(partial[:4], plan),
        lambda: exchange.reduce_scatter(partial, plan, rows[:2]),
        lambda: exchange.dispatch(replace(inputs.routed(0), rows=rows[:2])),
        lambda: exchange.reduce_scatter(partial, plan, rows, Norm(inputs.norm.weight.float(), 1e-6)),
        lambda: exchange.all_reduce(partial[:, :48]),
    ):
        with pytest.raises(MachineError) as told:
            call()
        said.append(str(told.value))
    return said


def test_rows_that_are_fewer_than_the_plan_says_are_refused_not_read_beyond_their_end(tmp_path):
    for said in emulated(2).run(ill_fitting, tmp_path):
        assert said[0] == said[4] == "The home rows are [2, 96] where [3, 96] must come."
        assert [text.split(" are ")[0] for text in said[1:4]] == ["The labels", "The shares of sums", "The rows before"]
        assert said[5] == "Weights of a norm are torch.float32, rows torch.bfloat16; give both one type."
        assert said[6].startswith(
            "Rows are torch.bfloat16 of 48 columns; the exchange was opened for torch.bfloat16 of 96"
        )


def marked_rows(folder):
    """One row is marked far up in a sparse file, where its number times H passes 2^31."""
    from tests.runtime.small_kernels import mark_row

    row, hidden = 400_000, 7168
    name = str(folder / f"sparse{torch.distributed.get_rank()}")
    memory = torch.from_file(name, shared=True, size=row * hidden + 8, dtype=torch.int8)
    mark_row[(1,)](memory, torch.tensor([row], dtype=torch.int32), H=hidden)
    return memory[row * hidden :].tolist()


def test_row_times_hidden_does_not_wrap_at_two_to_the_thirty_one(tmp_path):
    assert emulated(2).run(marked_rows, tmp_path) == [[7] * 8] * 2


def all_roundings():
    """Every bf16 and float32 values between it and the next one."""
    from smoe_cli.runtime.barrier import ATOMICS
    from tests.runtime.small_kernels import convert

    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (high | low).to(torch.int32).view(torch.float32)
        found = torch.empty(1 << 16, dtype=torch.bfloat16)
        convert[(1,)](values, found, N=1 << 16, PROTOCOL=ATOMICS.value)
        wanted = values.to(torch.bfloat16)
        numbers = ~wanted.isnan()
        assert torch.equal(found[numbers].view(torch.int16), wanted[numbers].view(torch.int16))
        assert bool(found[~numbers].isnan().all())


def test_the_interpreter_rounds_every_bf16_neighbour_as_torch_does():
    emulated(2).run(all_roundings)


def weighed_alike():
    """The weighing kernel beside plain torch: odd widths, one expert a row, rows with none, products that are NaN."""
    from smoe_cli.runtime.experts import plain_sum
    from smoe_cli.runtime.weighing import weighted_sum

    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    cases = [(0, 2, 16, 4), (5, 1, 24, 3), (33, 6, 96, 50), (7, 3, 100, 20), (3, 2, 5120, 4), (4, 3, 16, 0)]
    for (places, top_k, hidden, made), dtype in zip(cases, DTYPES * 2, strict=True):
        products = torch.randn(made, hidden, generator=generator).to(dtype)
        products[1:2] = torch.nan
        position = torch.randint(0, max(made, 1), (places, top_k), generator=generator)
        here = (torch.rand(places, top_k, generator=generator) < 0.6) & (position != 1) & (made > 0)
        weights = torch.rand(top_k, places, generator=generator).T
        same(weighted_sum(products, position, here, weights), plain_sum(products, position, here, weights), "weighed")


def test_products_are_weighed_and_added_to_the_bits_of_plain_torch():
    emulated(2).run(weighed_alike)


PLANNED = [(8, 64, 256), (4, 64, 256), (2, 64, 256), (8, 5, 256), (4, 5, 9), (2, 1, 256), (3, 65, 4), (4, 1000, 256)]
PLANNED += [(8, 333, 4), (8, 64, 30), (8, 333, 256)]
SEVERAL_CHUNKS = [(4, 0, 256), (8, 150, 256), (4, 90, 256)]
"""Ranks, tokens, scores below; the last of PLANNED need all rounds, or one too many would change them; no tokens;
chunks small enough for the interpreter."""


def planned_alike():
    """The plan's kernel beside plain torch; each rank takes every second case."""
    from smoe_cli.runtime import plan
    from smoe_cli.runtime.plan_kernel import plan_rows

    for number, (count, tokens, high) in enumerate(PLANNED + SEVERAL_CHUNKS):
        generator = torch.Generator().manual_seed(8)
        table = torch.randint(0, high, (200, count), generator=generator, dtype=torch.uint8)
        if number % 4 == 1:
            table[:, 0] = 200 + table[:, 0] // 8  # a hot rank, whose price is beyond most scores
        index = torch.randint(0, 210, (tokens,), generator=generator)
        index = index.to([torch.int64, torch.int32, torch.uint8][number % 3])
        index = torch.stack([index, index + 1], dim=1)[:, 0]  # every second number in memory
        if number % 2 != torch.distributed.get_rank():
            continue
        with pytest.MonkeyPatch.context() as patch:
            if number >= len(PLANNED):
                patch.setattr(plan, "chunk_rows", lambda _ranks: 8)
            scores = table[index.long().clamp(max=199)]
            plain = plan.plain_plan(scores, count)
            for found in [plan_rows(table, index)] + [plan_rows(scores)] * (tokens < 6):
                same(found.place_of_token, plain.place_of_token, f"places of {tokens} tokens on {count} ranks")
                same(found.token_of_place, plain.token_of_place, f"tokens of {tokens} on {count} ranks")


def test_the_plans_kernel_makes_the_plain_plan():
    emulated(2).run(planned_alike)
