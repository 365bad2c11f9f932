"""The kernels on all GPUs of this host, one process each: what the interpreter cannot show. What matters most first."""

import os
import signal
from functools import partial

import pytest
import torch

from tests.gpu.gpus import COUNT, SHARED, device_of, run_on_gpus, shared_allocation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason=f"needs two GPUs of one host, {COUNT} found")]


KEPT = []
"""Shared memory that is given back is paired wrongly when it is asked for again, so none is."""


def opened(rank, tokens, hidden, dtype=torch.bfloat16, patience=10.0):
    from smoe_cli.runtime.region import Sizes
    from smoe_cli.runtime.symmetric import SymmetricExchange

    device, sizes = device_of(rank), Sizes(tokens, hidden, 6, dtype)
    KEPT.append(SymmetricExchange(sizes, device, patience=patience, allocate=shared_allocation(device)))
    return KEPT[-1]


def inputs_of(rank, tokens, hidden, dtype=torch.bfloat16):
    from tests.runtime.exchange_checks import Inputs

    return Inputs(COUNT, tokens, hidden, 6, dtype, device_of(rank), tokens + hidden)


def every_size(rank, dtype, hidden):
    from tests.runtime.exchange_checks import check_all, sleepy

    exchange = opened(rank, 1001, hidden, dtype)
    for tokens in (1001, 333, COUNT + 1, COUNT - 1, 1, 0):
        check_all(exchange, inputs_of(rank, tokens, hidden, dtype), pause=sleepy(rank, 0.002))
    exchange.check()


@pytest.mark.parametrize("hidden", [2048, 7168, 2880, 96])
def test_sums_are_the_bits_of_the_same_order_and_rows_arrive_whole(hidden):
    run_on_gpus(every_size, torch.bfloat16, hidden)


def lopsided(rank):
    """Needs change between replays of one graph: nobody's, everybody's, all rows to one rank."""
    from smoe_cli.runtime import reference
    from smoe_cli.runtime.exchange import Routed

    exchange = opened(rank, 64, 2048)
    inputs = inputs_of(rank, 64, 2048)
    bits = inputs.needs[rank].clone()
    routed = Routed(inputs.rows[rank], inputs.experts[rank], inputs.weights[rank], bits)

    def both():
        return exchange.dispatch(routed), exchange.combine(inputs.parts[rank], routed)

    both()
    graph = torch.cuda.CUDAGraph()
    with exchange.capture(graph):
        got, mixed = both()
    for needs in (0, (1 << COUNT) - 1, 1, 2, 0):
        inputs.needs.fill_(needs)
        bits.fill_(needs)
        graph.replay()
        places = reference.received(inputs.needs, rank)
        assert torch.equal(got.rows[places], inputs.rows.flatten(0, 1)[places])
        assert torch.equal(mixed, reference.combine(inputs.parts, inputs.needs)[rank])
    exchange.check()


def test_a_replayed_graph_follows_masks_that_change():
    run_on_gpus(lopsided)


def random_graphs(rank):
    """Graphs of different sizes, replayed and mixed with eager calls in one random order on all ranks."""
    import random

    from smoe_cli.runtime import reference

    exchange = opened(rank, 4096, 2048)
    held = []
    for tokens in (64, 333, 4096):
        inputs = inputs_of(rank, tokens, 2048)

        def work(inputs=inputs):
            summed = exchange.reduce_scatter(inputs.partials[rank], inputs.plan)[0]
            return summed, exchange.all_gather(inputs.rows[rank], inputs.plan)[0].clone()

        work()
        graph = torch.cuda.CUDAGraph()
        with exchange.capture(graph):
            results = work()
        held.append((inputs, graph, work, results))
    chance = random.Random(3)
    for _ in range(200):
        inputs, graph, work, results = chance.choice(held)
        if chance.random() < 0.3:
            results = work()
        else:
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
        assert torch.equal(results[0], reference.reduce_scatter(inputs.partials, inputs.plan)[0][rank])
        assert torch.equal(results[1], reference.all_gather(inputs.rows, inputs.plan))
    exchange.check()


def test_graphs_and_eager_calls_mix_in_any_order():
    run_on_gpus(random_graphs)


def many_iterations(rank):
    """Rows hold the iteration's number, 10^5 times (1,000 where ranks share a GPU), ranks asleep at random; whole rows
    compared on the device.
    """
    import random

    exchange = opened(rank, 64, 2048)
    inputs = inputs_of(rank, 64, 2048)
    counter = torch.zeros(1, device="cuda")
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    ones = torch.ones(64, 2048, device="cuda")

    def iteration():
        counter.add_(1).remainder_(97)
        summed = exchange.reduce_scatter((ones * (counter + rank)).to(torch.bfloat16), inputs.plan)[0]
        wrong[0] += (summed != COUNT * counter + COUNT * (COUNT - 1) // 2).sum()
        rows = (ones[: 64 // COUNT] * counter).to(torch.bfloat16)
        wrong[1] += (exchange.all_gather(rows, inputs.plan)[0] != counter).sum()

    iteration()
    graph = torch.cuda.CUDAGraph()
    with exchange.capture(graph):
        for _ in range(100):
            iteration()
    chance = random.Random(rank)
    for _ in range(10 if SHARED else 1000):
        torch.cuda._sleep(chance.randrange(100_000))
        graph.replay()
    assert wrong.tolist() == [0, 0]
    exchange.check()


def test_no_row_is_torn_or_stale_in_a_hundred_thousand_iterations():
    run_on_gpus(many_iterations)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types_are_exchanged_as_well(dtype):
    run_on_gpus(every_size, dtype, 2880)


def two_exchanges(rank):
    """Flags are an exchange's own: operations of two exchanges interleave."""
    from tests.runtime.exchange_checks import check_all

    one, other = opened(rank, 333, 2048), opened(rank, 64, 2880)
    for _ in range(10):
        check_all(one, inputs_of(rank, 333, 2048))
        check_all(other, inputs_of(rank, 64, 2880))
    one.check()
    other.check()
    assert SHARED or one.region.keep.multicast_ptr == 0


def test_two_exchanges_do_not_hear_each_others_signals_and_need_no_multicast():
    run_on_gpus(two_exchanges)


def late_to_capture(rank):
    """The last rank comes 5 s late to its capture, the first to its replay."""
    import time

    from tests.runtime.exchange_checks import same

    exchange = opened(rank, 64, 2048, patience=30.0)
    inputs = inputs_of(rank, 64, 2048)
    exchange.all_gather(inputs.rows[rank], inputs.plan)
    time.sleep(5 * (rank == COUNT - 1))
    graph = torch.cuda.CUDAGraph()
    with exchange.capture(graph):
        rows = exchange.all_gather(inputs.rows[rank], inputs.plan)[0]
    time.sleep(5 * (rank == 0))
    graph.replay()
    same(rows, inputs.rows.flatten(0, 1)[inputs.plan.place_of_token.long()], "SAG")
    exchange.check()


def test_ranks_may_come_late_to_a_capture_and_to_a_replay():
    run_on_gpus(late_to_capture)


def while_capturing(rank):
    from smoe_profiles.errors import MachineError

    exchange = opened(rank, 64, 2048)
    inputs = inputs_of(rank, 64, 2048)
    graph = torch.cuda.CUDAGraph()
    word = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        word.add_(1)
        with pytest.raises(MachineError, match="while a CUDA graph is captured"):
            opened(rank, 64, 2048)
        with pytest.raises(MachineError, match="captured without fences"):
            exchange.all_gather(inputs.rows[rank], inputs.plan)


def test_a_capture_allocates_nothing_and_needs_its_fences():
    run_on_gpus(while_capturing)


def one_kernel_for_all(rank):
    """Integers that differ between ranks must not make them compile different kernels."""
    from smoe_cli.runtime.sag import sag_kernel

    exchange, known = opened(rank, 64, 2048), []
    for tokens in (1, 16, 33, 64):
        inputs = inputs_of(rank, tokens, 2048)
        exchange.all_gather(inputs.rows[rank].clone(), inputs.plan)
        known.append(len(sag_kernel.device_caches[device_of(rank).index][0]))
    assert known == known[:1] * 4


def test_rank_and_size_are_not_specialised():
    run_on_gpus(one_kernel_for_all)


def no_peer_access(rank):
    """One probe that fails on one rank: every rank takes torch.distributed, and no shared memory is touched."""
    import warnings

    import torch.distributed._symmetric_memory as symmetric_memory

    from smoe_cli.runtime.collectives import CollectiveExchange
    from smoe_cli.runtime.region import Sizes
    from smoe_cli.runtime.symmetric import open_exchange
    from tests.runtime.exchange_checks import check_all

    if rank == 0:
        torch.cuda.can_device_access_peer = lambda *_: False
    symmetric_memory.empty = partial(pytest.fail, "shared memory was asked for")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exchange = open_exchange(Sizes(64, 2048, 6, torch.bfloat16), torch.device("cuda", rank))
    assert isinstance(exchange, CollectiveExchange)
    assert len([one for one in told if "peer access" in str(one.message)]) == (rank == 0)
    check_all(exchange, inputs_of(rank, 64, 2048))


@pytest.mark.skipif(SHARED, reason="needs a GPU a rank: NCCL takes no two on one")
def test_without_peer_access_all_ranks_fall_back_together_and_give_the_same_rows():
    run_on_gpus(no_peer_access, alone=True)


def left_alone(rank):
    """The last rank dies; the others must name it within their patience."""
    from smoe_profiles.errors import MachineError

    exchange = opened(rank, 64, 2048, patience=1.0)
    inputs = inputs_of(rank, 64, 2048)
    exchange.all_gather(inputs.rows[rank], inputs.plan)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    if rank == COUNT - 1:
        import time

        time.sleep(20)  # its memory must stay mapped while the others store into it
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.all_gather(inputs.rows[rank], inputs.plan)
    with pytest.raises(MachineError, match=f"in vain for rank {COUNT - 1} in all_gather"):
        exchange.check()


def test_a_rank_that_falls_silent_is_named_by_the_others():
    run_on_gpus(left_alone, dead=(COUNT - 1,), alone=True)
