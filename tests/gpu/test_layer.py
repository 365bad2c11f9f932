"""Whole layers on the GPUs of this host: plans made beside the attention, and the weighing of what experts made."""

from dataclasses import replace

import pytest
import torch

from tests.gpu.gpus import COUNT, DEVICES, device_of, run_on_gpus
from tests.gpu.test_kernels import opened

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN = 1024, 2048
WEIGHED = [(4096, 6, 2048), (1001, 8, 5120), (333, 2, 2880), (64, 1, 100)]
"""Places, experts a row, hidden size."""


def beside(rank):
    """Layers whose plan is made on a second stream, eager and replayed, with new scores every time and ranks late."""
    from smoe_cli.runtime.bench import attended_layers, random_experts
    from smoe_cli.runtime.replay import Case, make_batch
    from smoe_cli.runtime.workload import Shape
    from tests.runtime.exchange_checks import near
    from tests.runtime.test_replay import workload

    device, exchange = device_of(rank), opened(rank, TOKENS, HIDDEN)
    load = replace(workload(TOKENS, COUNT), shape=Shape(HIDDEN, 64, 8, 2))
    batch = make_batch(load, Case("speculative", "placed", "oracle"), TOKENS, rank, device, torch.bfloat16)
    scores = batch.scores
    assert scores is not None
    layers = attended_layers(batch, exchange, random_experts(load, rank, device))
    for once in layers.values():
        once()
    graph = torch.cuda.CUDAGraph()
    with exchange.capture(graph):
        replayed = layers["beside"]()
    assert torch.equal(layers["first"](), layers["free"]())
    for number in range(60):
        generator = torch.Generator(device).manual_seed(number)
        scores.copy_(torch.randint(0, 256, scores.shape, generator=generator, device=device, dtype=torch.uint8))
        expected = layers["first"]().clone()
        torch.cuda._sleep(10_000 * (number % 7) * (rank % 2))
        assert torch.equal(layers["beside"](), expected), number
        graph.replay()
        near(replayed, expected, f"replay {number}")
    exchange.check()


@pytest.mark.skipif(COUNT < 2, reason=f"needs two GPUs of one host, {COUNT} found")
def test_a_plan_made_beside_the_attention_is_the_one_made_before_it():
    run_on_gpus(beside)


@pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("places", "top_k", "hidden"), [(4096, 6, 2048), (1001, 8, 5120), (333, 2, 2880), (64, 1, 100)]
)
def test_products_are_weighed_and_added_to_the_bits_of_plain_torch(places, top_k, hidden, dtype):
    from smoe_cli.runtime.experts import plain_sum
    from smoe_cli.runtime.weighing import weighted_sum

    generator = torch.Generator("cuda").manual_seed(places)
    drawn = {"generator": generator, "device": "cuda"}
    products = torch.randn(places * top_k, hidden, **drawn).to(dtype)
    position = torch.randperm(places * top_k, **drawn).view(places, top_k)
    here = torch.rand(places, top_k, **drawn) < 0.4
    weights = torch.rand(places, top_k, **drawn)
    products[position[~here]] = torch.nan
    found = weighted_sum(products, position, here, weights)
    assert torch.equal(found, plain_sum(products.nan_to_num(0), position, here, weights))
