"""What any exchange must do, run inside each rank: by the interpreter, by gloo, by NCCL and by the kernels on GPUs.

Every rank draws the inputs of all ranks from one seed, so that each knows what should come without asking.
Axes: G ranks, T tokens, C = ceil(T / G), H hidden size, K experts a row.
"""

import random
import time

import torch

from smoe_cli.runtime import reference
from smoe_cli.runtime.exchange import Norm, Plan, Routed


class Inputs:
    """Random inputs of all ranks, on a device, and the plan of a random shuffle."""

    def __init__(self, num_ranks, tokens, hidden, top_k, dtype, device, seed):
        drawn = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
        cap = -(-tokens // num_ranks)
        places = torch.randperm(num_ranks * cap, **drawn)[:tokens].to(torch.int32)
        token_of_place = torch.full((num_ranks * cap,), -1, dtype=torch.int32, device=device)
        token_of_place[places.long()] = torch.arange(tokens, dtype=torch.int32, device=device)
        self.plan = Plan(token_of_place, places, num_ranks)

        def noise(*shape):
            return torch.randn(*shape, **drawn).to(dtype)

        def numbers(high, *shape):
            return torch.randint(high, shape, dtype=torch.int32, **drawn)

        self.partials = noise(num_ranks, tokens, hidden)
        self.rows = noise(num_ranks, cap, hidden)
        self.parts = noise(num_ranks, num_ranks * cap, hidden)
        self.norm = Norm(noise(hidden), 1e-6)
        self.labels = numbers(256, num_ranks, cap).to(torch.uint8)
        self.experts = numbers(1 << 14, num_ranks, cap, top_k)
        self.weights = torch.rand(num_ranks, cap, top_k, **drawn)
        self.needs = numbers(1 << num_ranks, num_ranks, cap)

    def routed(self, rank):
        return Routed(self.rows[rank], self.experts[rank], self.weights[rank], self.needs[rank])


def same(found, wanted, what):
    """Equal to the last bit."""
    wrong = int((found != wanted).sum())
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    assert not wrong, f"{what}: {wrong} of {found.numel()} elements differ"


def near(found, truth, what):
    """Within the rounding of the type: relative to the whole, in float64."""
    limit = {torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float32: 1e-6}[found.dtype]
    truth = truth.to(torch.float64)
    error = float((found.to(torch.float64) - truth).norm() / truth.norm().clamp(min=1e-30)) if truth.numel() else 0.0
    assert error < limit, f"{what}: relative error {error:.2e}"


def check_all(exchange, inputs, *, pause=lambda: None):
    """One call of every operation against the reference: sums in float32 order to the bit and near float64."""
    rank, plan = exchange.rank, inputs.plan
    home = inputs.rows[rank]
    pause()
    for residual, norm in ((None, None), (home, inputs.norm)):
        residuals = None if residual is None else inputs.rows
        summed, normed = exchange.reduce_scatter(inputs.partials[rank], plan, residual, norm)
        wanted, normed_wanted = reference.reduce_scatter(inputs.partials, plan, residuals, norm)
        same(summed, wanted[rank], "SRS")
        truth, normed_truth = reference.reduce_scatter(inputs.partials, plan, residuals, norm, torch.float64)
        near(summed, truth[rank], "SRS")
        if norm is not None:
            near(normed, normed_wanted[rank], "norm")
            if normed.dtype is torch.float32:
                near(normed, normed_truth[rank], "norm")
    pause()
    gathered, labels = exchange.all_gather(home, plan, inputs.labels[rank])
    same(gathered, reference.all_gather(inputs.rows, plan), "SAG")
    same(labels, reference.all_gather(inputs.labels, plan), "labels")
    assert exchange.all_gather(home, plan)[1] is None
    pause()
    routed = inputs.routed(rank)
    got = exchange.dispatch(routed)
    places = reference.received(inputs.needs, rank)
    same((got.needs >> rank) & 1, (inputs.needs.flatten() >> rank) & 1, "needs")
    for name in ("rows", "experts", "weights"):
        same(getattr(got, name)[places], getattr(inputs, name).flatten(0, 1)[places], f"dispatched {name}")
    pause()
    mixed = exchange.combine(inputs.parts[rank], routed)
    same(mixed, reference.combine(inputs.parts, inputs.needs)[rank], "combine")
    near(mixed, reference.combine(inputs.parts, inputs.needs, torch.float64)[rank], "combine")
    pause()
    total = sum((part.float() for part in inputs.partials[1:]), inputs.partials[0].float())
    same(exchange.all_reduce(inputs.partials[rank]), total.to(home.dtype), "all-reduce")
    same(exchange.scatter(inputs.partials[0], plan), reference.home_rows(inputs.partials[0], plan)[rank], "scatter")


def sleepy(rank, seconds):
    """A pause of random length, other for each rank."""
    chance = random.Random(rank)
    return lambda: time.sleep(chance.random() * seconds)
