"""Some MoE layers instead of the whole model: what `smoe verify --layers` runs, and what it leaves alone."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoe_cli.checkpoint import loaded
from smoe_cli.checkpoint.comparison import stopping_after
from smoe_cli.checkpoint.layerwise import compare_routing
from smoe_cli.checkpoint.loaded import compare_mapped
from smoe_cli.errors import UsageError
from smoe_cli.layer_numbers import name_layers, parse_layers
from smoe_profiles.errors import MachineError
from smoe_profiles.models import find_model
from tests.checkpoint.conftest import edit_tensors, editable, permutations, regroup
from tests.conftest import smoe
from tests.e2e.regroup_paths import make_path
from tests.profiles.tiny_models import CONFIGS, EXPERTS, MOE_LAYERS, VOCAB

PROMPTS = np.random.default_rng(1).integers(0, VOCAB, (3, 16))
LITE = list(range(1, 27))
"""The MoE layers of a model whose first layer is dense."""


# Numbers and ranges.


@pytest.mark.parametrize(
    ("text", "there", "chosen"),
    [
        ("1-4,9", LITE, [1, 2, 3, 4, 9]),
        ("9,1-4", LITE, [1, 2, 3, 4, 9]),
        (" 3 , 1 - 2", LITE, [1, 2, 3]),
        ("2-4,3,4-5", LITE, [2, 3, 4, 5]),
        ("7-7", LITE, [7]),
        ("1-26", LITE, LITE),
        ("1-5", [1, 3, 5, 7], [1, 3, 5]),
    ],
)
def test_numbers_and_ranges_name_moe_layers(text, there, chosen):
    assert parse_layers(text, there) == chosen


@pytest.mark.parametrize(
    "text",
    ["", "0", "27", "1,,2", "1-", "-1", "4-1", "0-3", "20-27", "1-2-3", "all", "1.0", "1;2", "²", "9" * 5000, "1-1e9"],
)
def test_what_is_no_moe_layer_is_refused_with_those_there_are(text):
    with pytest.raises(UsageError, match=r"is no MoE layer and no range of them; the model's MoE layers are 1-26\."):
        parse_layers(text, LITE)


def test_a_dense_layer_between_moe_layers_is_no_end_of_a_range():
    with pytest.raises(UsageError, match=r"'1-4' is no .* are 1, 3, 5, 7\."):
        parse_layers("1-4", [1, 3, 5, 7])


@given(st.sets(st.integers(0, 30), min_size=1), st.data())
def test_layers_are_read_as_they_are_named(there, data):
    there = sorted(there)
    chosen = sorted(data.draw(st.sets(st.sampled_from(there), min_size=1)))
    assert parse_layers(name_layers(chosen), there) == chosen


# A checkpoint.


def routing(source, copy, order, only):
    done = []
    report = compare_routing(find_model(str(source)), find_model(str(copy)), order, PROMPTS, done.append, only)
    assert sum(done) == max(only) + 1
    return report


@pytest.mark.parametrize("name", CONFIGS)
def test_a_right_copy_passes_layer_by_layer_and_each_is_what_the_whole_comparison_found(name, tiny, tmp_path):
    order = np.tile(np.arange(EXPERTS), (len(MOE_LAYERS[name]), 1)) if "grouped" in name else permutations(name, 5)
    source, copy = tiny(name), regroup(tiny(name), order, tmp_path / "copy")
    whole = compare_routing(find_model(str(source)), find_model(str(copy)), order, PROMPTS, lambda _: None)
    for layer, found in zip(MOE_LAYERS[name], whole.layers, strict=True):
        report = routing(source, copy, order, [layer])
        assert report.layers == [found]
        assert report.passed


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_fault_is_found_in_a_chosen_layer_and_not_in_another(name, place, tiny, tmp_path):
    """Each layer is given the source's hidden states, so a fault before it is not its own."""
    order, layers = permutations(name, 3), MOE_LAYERS[name]
    copy = regroup(tiny(name), order, tmp_path / "copy")

    def change(tensors):
        (router,) = (key for key in tensors if key.startswith(f"model.layers.{layers[place]}.") and ".gate.w" in key)
        tensors[router][[1, 4]] = tensors[router][[4, 1]].clone()

    edit_tensors(copy, change)
    assert routing(tiny(name), copy, order, [layers[1 - place]]).passed
    for only in ([layers[place]], layers):
        report = routing(tiny(name), copy, order, only)
        assert [found.layer for found in report.layers] == only
        assert [found.layer for found in report.layers if not found.passed] == [layers[place]]
        assert not report.passed


def test_a_fault_behind_the_chosen_layers_is_not_looked_for(tiny, tmp_path):
    order = permutations("mixtral", 3)
    copy = regroup(tiny("mixtral"), order, tmp_path / "copy")
    edit_tensors(copy, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] * 1.1}))
    report = routing(tiny("mixtral"), copy, order, [0, 1])
    assert report.passed
    assert (report.logit_tokens, report.logits_excused, report.logit_max_error) == (0, None, None)


def keep(folder, *starts):
    """Leave only tensors whose names start so."""

    def change(tensors):
        for name in [name for name in tensors if not name.startswith(starts)]:
            del tensors[name]

    edit_tensors(folder, change)
    return folder


@pytest.mark.parametrize(("name", "layer"), [("mixtral", 0), ("deepseek_v2", 1), ("qwen3_moe", 1), ("qwen2_moe", 2)])
def test_of_the_source_nothing_behind_the_last_layer_is_loaded_and_of_the_copy_no_other_layer(
    name, layer, tiny, tmp_path
):
    """All other tensors are gone from the files."""
    order = permutations(name, 4)
    copy = keep(regroup(tiny(name), order, tmp_path / "copy"), f"model.layers.{layer}.")
    before = [f"model.layers.{index}." for index in range(layer + 1)]
    source = keep(editable(tiny(name), tmp_path / "source"), "model.embed_tokens.", *before)
    report = routing(source, copy, order, [layer])
    assert [found.layer for found in report.layers] == [layer]
    assert report.passed


# A map.


def broken(folder, layer):
    """No expert of this layer gives numbers, in the model and in every right copy alike."""

    def change(tensors):
        for expert in range(EXPERTS):
            tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"].fill_(np.nan)

    edit_tensors(folder, change)


@pytest.mark.parametrize("free", [None, 1000], ids=["whole", "layer by layer"])
def test_a_map_is_applied_in_the_chosen_layers_alone(free, tiny, tmp_path, monkeypatch):
    if free:
        monkeypatch.setattr(loaded, "available_memory", lambda: free)
    folder, order = editable(tiny("mixtral"), tmp_path / "model"), permutations("mixtral", 9)
    broken(folder, 1)
    for only, passed in (([0], [True]), ([1], [False]), (None, [True, False])):
        done = []
        reports = compare_mapped(find_model(str(folder)), order, PROMPTS, done.append, only)
        assert [report.layer for report in reports] == (only or [0, 1])
        assert [report.passed for report in reports] == passed
        assert len(done) == len(passed)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_map_gives_the_same_figures_whole_and_layer_by_layer(name, tiny, monkeypatch):
    model, order = find_model(str(tiny(name))), permutations(name, 9)
    whole = compare_mapped(model, order, PROMPTS, lambda _: None)
    monkeypatch.setattr(loaded, "available_memory", lambda: 1000)
    found = compare_mapped(model, order, PROMPTS, lambda _: None)
    assert [report.layer for report in found] == MOE_LAYERS[name]
    assert all(report.passed for report in found)
    assert [(report.layer, report.tokens) for report in found] == [(report.layer, report.tokens) for report in whole]


def test_a_map_needs_nothing_of_the_model_behind_the_last_chosen_layer(tiny, tmp_path, monkeypatch):
    """The tensors there have no shape of this model: whoever loads them stops."""
    folder, order = editable(tiny("deepseek_v2"), tmp_path / "model"), permutations("deepseek_v2", 9)

    def change(tensors):
        for name in tensors:
            if name.startswith(("model.layers.2.", "model.norm.", "lm_head.")):
                tensors[name] = torch.zeros(7)

    edit_tensors(folder, change)
    with pytest.raises(MachineError, match="could not be put on cpu"):
        compare_mapped(find_model(str(folder)), order, PROMPTS, lambda _: None, [1])
    monkeypatch.setattr(loaded, "available_memory", lambda: 1)
    (report,) = compare_mapped(find_model(str(folder)), order, PROMPTS, lambda _: None, [1])
    assert (report.layer, report.passed) == (1, True)


def test_a_pass_that_was_ended_early_ends_by_itself_the_next_time():
    ran = []
    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(3)))
    for index, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, i=index: ran.append(i))
    with stopping_after(model[1]):
        model(torch.zeros(1))
    assert ran == [0, 1]
    model(torch.zeros(1))
    assert ran == [0, 1, 0, 1, 2]


# The command.


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory):
    """A placement with its checkpoint and its map, of a Mixtral whose layer 1 is broken."""
    folder = tmp_path_factory.mktemp("work")
    model = editable(tiny("mixtral"), folder / "model")
    make_path(folder, model, permutations("mixtral", 2))
    broken(model, 1)
    smoe("regroup", "-q", cwd=folder)
    smoe("regroup", "--layout", "map", "-q", cwd=folder)
    return folder


def test_equal_bytes_that_do_not_run_alike_fail_only_where_their_layer_is_run(work):
    assert "layer 1: 0 tokens choose other experts" in smoe("verify", cwd=work, code=5).err
    assert "layer 1: 0 tokens choose other experts" in smoe("verify", "--layers", "0-1", cwd=work, code=5).err
    found = smoe("verify", "--layers", "0", "--json", cwd=work).json()
    assert found["passed"]
    assert found["tensors"] > 50
    for document in (found, found["map"]):
        assert [layer["layer"] for layer in document["routing"]["layers"]] == [0]
    assert (found["routing"]["logit_max_error"], found["routing"]["logits_excused"]) == (None, None)
    assert found["routing"]["generated"] == 0


def test_the_sentence_names_the_layers_and_says_what_was_not_compared(work):
    checkpoint, mapped = smoe("verify", "--layers", "0", cwd=work).out.splitlines()[:2]
    assert "experts, 0 ties, in MoE layer 0; no other layer was compared, and no logits (--layers)." in checkpoint
    assert "applied after routing in MoE layer 0 it changes no output" in mapped


def test_a_layer_that_is_none_is_refused_before_anything_is_compared(work, tmp_path):
    folder = shutil.copytree(work, tmp_path / "copy")
    edit_tensors(folder / "smoe-out/checkpoint-ep4", lambda tensors: tensors.pop("lm_head.weight"))
    failed = smoe("verify", "--layers", "1-2", cwd=folder, code=2)
    assert "'1-2' is no MoE layer and no range of them; the model's MoE layers are 0-1." in failed.err


def test_a_model_whose_layers_cannot_be_filled_is_refused_before_its_bytes_are_compared(tiny, tmp_path):
    """transformers renames this family's tensors as it loads them; whole, it runs."""
    make_path(tmp_path, tiny("granitemoe"), permutations("granitemoe", 2))
    smoe("regroup", "-q", cwd=tmp_path)
    assert "verified" in smoe("verify", cwd=tmp_path).out
    edit_tensors(tmp_path / "smoe-out/checkpoint-ep4", lambda tensors: tensors.pop("model.norm.weight"))
    failed = smoe("verify", "--layers", "0", cwd=tmp_path, code=4)
    assert "cannot be run layer by layer" in failed.err
    assert "without --layers a model that fits in memory is run whole" in failed.err


def test_bytes_alone_and_some_layers_are_two_wishes(work):
    failed = smoe("verify", "--layers", "0", "--tensors-only", cwd=work, code=2)
    assert "--tensors-only" in failed.err
