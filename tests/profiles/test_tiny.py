"""The bundled models route with structure on texts they never saw; untrained ones do not.

Structure is fan-out on held-out text after co-clustering on fit text, against 30 random balanced placements.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smoe_profiles.capture.loading import load_tokenizer
from smoe_profiles.capture.points import capture_points
from smoe_profiles.capture.recorder import Recorder
from smoe_profiles.models import BUNDLED, bundled_names, find_model
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.problem import build_problem
from smoe_solvers.solve import solve

TEXTS = Path(__file__).parents[1] / "fixtures/texts"
TOKENS, WINDOW = 12_288, 512
WANTED = {"tiny-deepseek": (4, 0.25), "tiny-mixtral": (2, 0.10)}


def token_windows(tokenize, name):
    with gzip.open(TEXTS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        ids = [token for line in file for token in tokenize(json.loads(line)["text"])]
    assert len(ids) >= TOKENS
    return torch.tensor(ids[:TOKENS]).reshape(-1, WINDOW)


def routing(model, network, windows):
    """Expert ids [L, T, K] of a network in fp32."""
    parts = []
    with Recorder(capture_points(network, model.spec)) as recorder, torch.inference_mode():
        for rows in windows.split(8):
            network.base_model(input_ids=rows, use_cache=False)
            captured = recorder.take()
            ids, _ = captured.to_numpy(np.ones(rows.numel(), bool))
            parts.append(np.stack(captured.by_layer(ids)))
    return np.concatenate(parts, axis=1)


def fan_out(experts, expert_to_rank):
    return np.mean([len(set(row)) for row in expert_to_rank[experts]])


def gain(model, network, ranks):
    """How much lower the held-out fan-out is, mean over layers."""
    tokenize = load_tokenizer(model)
    fit, heldout = (routing(model, network, token_windows(tokenize, name)) for name in ("fit", "heldout"))
    num_experts = model.spec.layers[0].num_experts
    generator = np.random.default_rng(0)
    contiguous = np.arange(num_experts) // (num_experts // ranks)
    placed, random = [], []
    for layer in range(len(fit)):
        load = np.bincount(fit[layer].reshape(-1), minlength=num_experts)
        problem = build_problem(Goal.FANOUT, ranks, fit[layer], np.array([0, TOKENS]), load)
        solution = solve(problem, Goal.FANOUT, Method.CE, Effort.FAST, np.random.default_rng(layer))
        placed.append(fan_out(heldout[layer], solution.placement))
        random.append(np.mean([fan_out(heldout[layer], generator.permutation(contiguous)) for _ in range(30)]))
    return 1 - np.mean(placed) / np.mean(random)


@pytest.mark.slow
@pytest.mark.parametrize("name", WANTED)
def test_a_trained_tiny_model_routes_with_structure_and_an_untrained_one_does_not(name):
    model = find_model(name)
    ranks, wanted = WANTED[name]
    trained = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.folder), dtype=torch.float32).eval()
    assert gain(model, trained, ranks) >= wanted
    assert gain(model, untrained, ranks) < wanted


def test_both_tiny_models_are_bundled_and_small():
    assert bundled_names() == ["tiny-deepseek", "tiny-mixtral"]
    for name in bundled_names():
        assert sum(path.stat().st_size for path in (BUNDLED / name).iterdir()) <= 6_000_000
        assert (BUNDLED / name / "README.md").exists()


def test_the_tiny_models_are_what_the_design_asks_for():
    deepseek, mixtral = (find_model(name).spec for name in bundled_names())
    assert {(layer.num_experts, layer.top_k) for layer in deepseek.layers} == {(64, 6)}
    assert deepseek.layers[0].id == 1
    assert {(layer.num_experts, layer.top_k) for layer in mixtral.layers} == {(8, 2)}
    for name in bundled_names():
        assert json.loads((BUNDLED / name / "config.json").read_text())["num_attention_heads"] == 8
