"""What engines do with a placement file, written from their descriptions; nothing here knows how smoe writes one.

Each reader returns {decoder layer or ordinal: one list of experts a rank} and raises AssertionError or KeyError where
the engine would.
"""

import json

import torch
import yaml


def sglang(path, *, hidden_layers, num_experts, redundant, ep_size):
    """`--init-expert-location`: one key, a row for every hidden layer, P divisible by the ranks."""
    text = path.suffix == ".json"
    content = json.loads(path.read_text()) if text else torch.load(path, weights_only=True, map_location="cpu")
    (rows,) = content.values()  # every other key would be passed on as an argument
    assert list(content) == ["physical_to_logical_map"]
    table = torch.as_tensor(rows)
    assert table.dtype == torch.int64
    assert table.shape == (hidden_layers, num_experts + redundant)
    assert table.shape[1] % ep_size == 0
    for row in table.tolist():
        assert set(row) == set(range(num_experts))
    return {layer: chunks(row, ep_size) for layer, row in enumerate(table.tolist())}


def trtllm(path, *, moe_layers, mtp_layers, ep_size):
    """The load balancer's strict model: three keys, one list of num_slots for each MoE layer, MTP layers too."""
    content = yaml.safe_load(path.read_text())
    assert set(content) == {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}
    assert content["num_slots"] % ep_size == 0
    assert content["layer_updates_per_iter"] == 0
    assignments = content["initial_global_assignments"]
    assert all(type(layer) is int for layer in assignments)
    for layer in (*moe_layers, *mtp_layers):
        assert len(assignments[layer]) == content["num_slots"]
    return {layer: chunks(row, ep_size) for layer, row in assignments.items()}


def ascend(path, *, ep_size):
    """Lists by position; every device of the same length."""
    content = json.loads(path.read_text())
    assert content["moe_layer_count"] == len(content["layer_list"])
    found = {}
    for position, layer in enumerate(content["layer_list"]):
        assert layer["device_count"] == len(layer["device_list"]) == ep_size
        held = [device["device_expert"] for device in layer["device_list"]]
        assert len({len(experts) for experts in held}) == 1
        found[position] = held
    return found


def eplb(path, *, num_experts, ep_size):
    """phy2log, log2phy and logcnt as rebalance_experts returns them: each is what the others say."""
    content = torch.load(path, weights_only=True)
    phy2log, log2phy, logcnt = (content[name] for name in ("phy2log", "log2phy", "logcnt"))
    assert {tensor.dtype for tensor in content.values()} == {torch.int64}
    for layer, row in enumerate(phy2log.tolist()):
        for expert in range(num_experts):
            places = [slot for slot, held in enumerate(row) if held == expert]
            assert logcnt[layer, expert] == len(places) >= 1
            padding = [-1] * (log2phy.shape[2] - len(places))
            assert log2phy[layer, expert].tolist() == places + padding
    return {layer: chunks(row, ep_size) for layer, row in enumerate(phy2log.tolist())}


def chunks(row, ep_size):
    """Slot p lies on rank p // (P / ep_size)."""
    size = len(row) // ep_size
    return [row[rank * size : (rank + 1) * size] for rank in range(ep_size)]
