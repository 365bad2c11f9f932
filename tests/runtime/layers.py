"""Small expert layers over ranks, and the same layer computed in one place."""

import torch
from torch.nn import functional

from smoe_cli.runtime.collectives import CollectiveExchange, rms_norm
from smoe_cli.runtime.counters import LayerCounters
from smoe_cli.runtime.exchange import Norm
from smoe_cli.runtime.experts import LocalExperts
from smoe_cli.runtime.layer import ExpertLayer
from smoe_cli.runtime.slots import Slots, slot_bounds

H, E, K, WIDTH = 40, 14, 3, 16
"""E is no multiple of four: of four ranks two have a slot more."""


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights():
    """norm [H], router [E, H], gate_up [E, 2 I, H], down [E, H, I], shared [H, H]: the same everywhere."""
    return {
        "norm": 1 + 0.1 * noise(H, seed=1),
        "router": noise(E, H, seed=2),
        "gate_up": 0.2 * noise(E, 2 * WIDTH, H, seed=3),
        "down": 0.2 * noise(E, H, WIDTH, seed=4),
        "shared": 0.2 * noise(H, H, seed=5),
    }


def route(rows):
    """Top K of a softmax, as the families do."""
    scores = functional.linear(rows, weights()["router"]).softmax(dim=-1)
    top, experts = scores.topk(K, dim=-1)
    return experts, top


def shared(rows):
    return functional.linear(rows, weights()["shared"])


def build_layer(physical_to_logical, exchange=None, counted=False):
    """This rank's layer of a placement [P] that is applied after routing."""
    exchange = exchange or CollectiveExchange()
    found = weights()
    start, stop = slot_bounds(len(physical_to_logical), exchange.num_ranks)[exchange.rank : exchange.rank + 2]
    held = physical_to_logical[start:stop].long()
    return ExpertLayer(
        exchange,
        Norm(found["norm"], 1e-6),
        route,
        Slots.of_map(physical_to_logical, exchange.num_ranks),
        LocalExperts(found["gate_up"][held], found["down"][held], start),
        shared,
        LayerCounters(enabled=counted),
    )


def in_one_place(summed):
    """The residual stream after the layer, [T, H] float64, from that after attention."""
    found = {name: value.double() for name, value in weights().items()}
    normed = rms_norm(summed, Norm(weights()["norm"], 1e-6))
    experts, shares = route(normed)
    rows = normed.double()
    out = summed.double() + rows @ found["shared"].T
    for row in range(len(rows)):
        for expert, share in zip(experts[row], shares[row], strict=True):
            gate, up = (rows[row] @ found["gate_up"][expert].T).chunk(2)
            out[row] += share.double() * (found["down"][expert] @ (functional.silu(gate) * up))
    return out
