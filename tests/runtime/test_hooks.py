"""Stand-ins with the interfaces of other engines compute the same with a shuffle in them; the engines were not run."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from smoe_cli.runtime.counters import LayerCounters
from smoe_cli.runtime.hooks.sglang import SglangShuffle, count_dispatch
from smoe_cli.runtime.hooks.shuffled import ShuffledRows, row_of_place
from smoe_cli.runtime.hooks.vllm import VllmShuffle
from smoe_cli.runtime.slots import Slots
from tests.runtime.test_collectives import noise, random_plan

H, G, LAYERS = 6, 4, 3


class Trace:
    """The rows that each rank had at its experts, layer by layer."""

    def __init__(self):
        self.homes = []

    def experts(self, rows):
        """Something of each row alone."""
        self.homes.append(rows.clone())
        return torch.tanh(3 * rows)


def planner(number, token_ids):
    return random_plan(len(token_ids), G, number)


def pad(rows):
    return nn.functional.pad(rows, (0, 0, 0, -len(rows) % G))


def engine_module():
    """The three functions by the names that vLLM's model files import. All ranks are one process here: shares to be
    summed are [n, G, H], and a scatter gives [G, n / G, H]."""

    def reduce_scatter(rows, dim):
        assert dim == 0
        return rows.sum(dim=1).unflatten(0, (G, -1))

    def all_gather(rows, dim):
        assert dim == 0
        return rows.flatten(0, 1)

    module = ModuleType("deepseek_v2")
    module.tensor_model_parallel_reduce_scatter = reduce_scatter
    module.sequence_parallel_chunk = lambda rows: pad(rows).unflatten(0, (G, -1))
    module.tensor_model_parallel_all_gather = all_gather
    return module


class VllmLayer(nn.Module):
    """Scatters after attention, gathers before that of the next layer, as with sequence-parallel experts."""

    def __init__(self, module, trace):
        super().__init__()
        self.module, self.trace = module, trace

    def forward(self, hidden, residual, tokens):
        if hidden.dim() == 3:  # rows are still scattered
            hidden = self.module.tensor_model_parallel_all_gather(hidden, dim=0)[:tokens]
            residual = self.module.tensor_model_parallel_all_gather(residual, dim=0)[:tokens]
        parts = torch.stack([pad(hidden.sin() * (rank + 1)) for rank in range(G)], dim=1)
        hidden = self.module.tensor_model_parallel_reduce_scatter(parts, dim=0)
        residual = self.module.sequence_parallel_chunk(residual) + hidden
        return self.trace.experts(residual), residual


class VllmModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.module, self.trace = engine_module(), Trace()
        self.layers = nn.ModuleList(VllmLayer(self.module, self.trace) for _ in range(LAYERS))
        self.table = noise(100, H, seed=1)

    def forward(self, input_ids):
        residual = hidden = self.table[input_ids]
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, len(input_ids))
        gather = self.module.tensor_model_parallel_all_gather
        return (gather(hidden, dim=0) + gather(residual, dim=0))[: len(input_ids)]


@pytest.mark.parametrize("tokens", [4, 5, 11, 16])
def test_vllm_layers_compute_the_same_with_rows_at_planned_homes(tokens):
    ids = torch.arange(tokens) * 7 % 100
    plain, shuffled = VllmModel(), VllmModel()
    expected = plain(ids)
    names = dict(vars(shuffled.module))
    hooks = VllmShuffle(shuffled.module, planner, G)
    hooks.install(shuffled, list(shuffled.layers))
    assert torch.equal(shuffled(ids), expected)
    for number, (before, after) in enumerate(zip(plain.trace.homes, shuffled.trace.homes, strict=True)):
        plan = planner(number, ids)
        place = plan.place_of_token.long()
        assert torch.equal(after.flatten(0, 1)[place], before.flatten(0, 1)[:tokens])
    assert torch.equal(shuffled(input_ids=ids), expected)
    hooks.remove()
    assert dict(vars(shuffled.module)) == names
    shuffled.trace.homes.clear()
    assert torch.equal(shuffled(ids), expected)
    assert all(map(torch.equal, shuffled.trace.homes, plain.trace.homes))


def test_vllm_batches_smaller_than_the_ranks_are_left_alone():
    plain, shuffled = VllmModel(), VllmModel()
    VllmShuffle(shuffled.module, planner, G).install(shuffled, list(shuffled.layers))
    ids = torch.arange(3)
    assert torch.equal(shuffled(ids), plain(ids))
    assert all(map(torch.equal, shuffled.trace.homes, plain.trace.homes))


class Boundary:
    """Rows of all ranks scattered before the experts and gathered behind them."""

    def prepare(self, hidden_states, residual, forward_batch):
        assert len(hidden_states) >= len(forward_batch.input_ids)
        rows = pad(hidden_states + residual)
        return rows.unflatten(0, (G, -1)), rows.unflatten(0, (G, -1))

    def finish(self, hidden_states, residual, forward_batch):
        assert hidden_states.shape[0] * hidden_states.shape[1] >= len(forward_batch.input_ids)
        return hidden_states.flatten(0, 1), residual.flatten(0, 1)


class Communicator(Boundary):
    """The same by its older names."""

    prepare_mlp, postprocess_layer = Boundary.prepare, Boundary.finish


class SglangLayer:
    def __init__(self, old, trace):
        self.trace, self.names = trace, ("prepare_mlp", "postprocess_layer") if old else ("prepare", "finish")
        self.boundary = Communicator() if old else Boundary()
        setattr(self, "layer_communicator" if old else "ffn_boundary", self.boundary)

    def forward(self, hidden, residual, batch):
        before, after = (getattr(self.boundary, name) for name in self.names)
        hidden, residual = before(hidden, residual, batch)
        hidden, residual = after(self.trace.experts(hidden), residual, batch)
        return hidden[: len(batch.input_ids)], residual[: len(batch.input_ids)]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("tokens", [4, 5, 16])
def test_sglang_layers_compute_the_same_with_rows_at_planned_homes(old, tokens):
    batch = SimpleNamespace(input_ids=torch.arange(tokens))
    hidden, residual = noise(tokens, H, seed=2), noise(tokens, H, seed=3)
    plain, shuffled = (SglangLayer(old, Trace()) for _ in range(2))
    hooks = SglangShuffle(planner)
    hooks.install(5, shuffled)
    found, expected = shuffled.forward(hidden, residual, batch), plain.forward(hidden, residual, batch)
    assert all(map(torch.equal, found, expected))
    place = planner(5, batch.input_ids).place_of_token.long()
    assert torch.equal(shuffled.trace.homes[0].flatten(0, 1)[place], plain.trace.homes[0].flatten(0, 1)[:tokens])
    hooks.remove()
    assert all(map(torch.equal, shuffled.forward(hidden, residual, batch), expected))
    assert torch.equal(shuffled.trace.homes[1], plain.trace.homes[0])


def test_a_layer_without_a_known_boundary_is_refused():
    with pytest.raises(ValueError, match="object has none of ffn_boundary, layer_communicator"):
        SglangShuffle(planner).install(0, object())


class Dispatcher:
    """Hooks as SGLang's BaseDispatcher keeps them."""

    def __init__(self):
        self.hooks = []

    def register_pre_dispatch_hook(self, hook):
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))

    def dispatch(self, hidden_states, topk_output):
        for hook in self.hooks:
            assert hook(self, hidden_states, topk_output) is None


def test_a_dispatcher_is_counted_without_its_padding():
    dispatcher, counters = Dispatcher(), LayerCounters(enabled=True)
    handle = count_dispatch(dispatcher, Slots.identity(8, 4), counters, rank=1)
    dispatcher.dispatch(noise(3, H), SimpleNamespace(topk_ids=torch.tensor([[2, 3], [0, 7], [-1, -1]])))
    assert counters.sums["needed"].tolist() == [1, 1, 0, 1]
    assert counters.sums["tokens"] == 2
    handle.remove()
    assert dispatcher.hooks == []


def test_empty_places_hold_padding_and_every_row_comes_back():
    plan = random_plan(5, 4, 0)
    order = row_of_place(plan)
    assert order.sort().values.tolist() == list(range(8))
    rows = ShuffledRows(lambda *_: plan)
    rows.plan(0, torch.arange(5))
    given = noise(5, H)
    assert torch.equal(rows.come_back(rows.leave(given))[:5], given)
    with pytest.raises(ValueError, match="9 rows do not fit"):
        rows.leave(noise(9, H))
