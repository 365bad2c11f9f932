"""Settings that name single experts are renumbered with them, to the byte, or refused."""

import json

import numpy as np
import pytest

from smoe_cli.checkpoint.rewrite import expected_rewrite
from smoe_cli.checkpoint.verify import compare_tensors
from smoe_profiles.errors import ImpossibleError
from smoe_profiles.models import find_model
from smoe_profiles.tensors import open_checkpoint
from tests.checkpoint import synthetic
from tests.checkpoint.conftest import regroup
from tests.checkpoint.synthetic import CASES, Case, E

ORDER = np.stack([np.random.default_rng(2).permutation(E) for _ in range(2)])
SLOT = np.argsort(ORDER, axis=1)


def name(layer, expert, rest=".up_proj"):
    return f"model.layers.{layer}.mlp.experts.{expert}{rest}"


def source(folder, settings, file="config.json", entries=None):
    case = CASES["fp8 blocks"]
    folder = synthetic.write(folder, Case(case.config, entries or case.entries, 2))
    content = json.loads((folder / "config.json").read_text()) if file == "config.json" else {}
    (folder / file).write_text(json.dumps(content | settings, indent=3, ensure_ascii=False))
    return folder


def lists(settings):
    """Where such names stand: lists, keys and nested tables."""
    return {
        "ignored_layers": lambda names: {"quantization_config": {"ignored_layers": names}},
        "modules_to_not_convert": lambda names: {"quantization_config": {"modules_to_not_convert": names}},
        "layer_quant_config": lambda names: {"quantization_config": {"layer_quant_config": {key: {} for key in names}}},
        "targets": lambda names: {"quantization_config": {"config_groups": {"group_0": {"targets": names}}}},
    }[settings]


@pytest.mark.parametrize("kind", ["ignored_layers", "modules_to_not_convert", "layer_quant_config", "targets"])
def test_experts_named_in_full_are_renumbered_wherever_they_stand(kind, tmp_path):
    given = ["lm_head", name(1, 3), name(2, 3), name(2, 7, ".gate_proj.weight"), "re:.*self_attn.*", name(1, 0, "")]
    slots = [
        name(1, SLOT[0][3]),
        name(2, SLOT[1][3]),
        name(2, SLOT[1][7], ".gate_proj.weight"),
        name(1, SLOT[0][0], ""),
    ]
    folder = source(tmp_path / "source", lists(kind)(given))
    copy = regroup(folder, ORDER, tmp_path / "copy")
    wanted = ["lm_head", *slots[:3], "re:.*self_attn.*", slots[3]]
    found = json.loads((copy / "config.json").read_text())
    assert found["quantization_config"] == lists(kind)(wanted)["quantization_config"]
    back = regroup(copy, SLOT, tmp_path / "back")
    assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_an_exclude_list_left_as_it_was_is_found(tmp_path):
    folder = source(tmp_path / "source", {"exclude_modules": [name(1, 3)]}, "hf_quant_config.json")
    copy = regroup(folder, ORDER, tmp_path / "copy")
    rewrite = expected_rewrite(find_model(str(folder)), ORDER)
    assert compare_tensors(rewrite, open_checkpoint(copy), lambda _: None) == []
    (copy / "hf_quant_config.json").write_bytes((folder / "hf_quant_config.json").read_bytes())
    found = compare_tensors(rewrite, open_checkpoint(copy), lambda _: None)
    assert found == ["hf_quant_config.json: not the source's file"]


@pytest.mark.parametrize(
    "text",
    [
        "experts.0",  # of every layer, or of none
        r"-:.*experts\.5\..*",
        r"re:.*experts\.(1|2)\.w1",
        "re:model.layers.1.mlp.experts.[0-3].up_proj",
        "model.layers.9.mlp.experts.3.up_proj",
        "model.layers.1.mlp.experts.8.up_proj",
    ],
)
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", "quantize_config.json"])
def test_names_whose_experts_cannot_be_told_are_refused(text, file, tmp_path):
    folder = source(tmp_path / "source", {"quantization_config": {"ignore": [text]}}, file)
    with pytest.raises(ImpossibleError, match=rf"{file} names single experts"):
        expected_rewrite(find_model(str(folder)), ORDER)


def test_names_of_all_experts_alike_stay_as_they_are(tmp_path):
    settings = {
        "quantization_config": {
            "ignore": ["lm_head", "re:.*mlp.gate$", r"re:.*experts\.\d+\.up"],
            "targets": ["experts"],
        }
    }
    folder = source(tmp_path / "source", settings)
    copy = regroup(folder, ORDER, tmp_path / "copy")
    assert (copy / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_words_of_a_vocabulary_are_no_settings(tmp_path):
    folder = source(tmp_path / "source", {})
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"experts.3": 1}}}')
    copy = regroup(folder, ORDER, tmp_path / "copy")
    assert (copy / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_an_expert_named_as_left_in_16_bits_may_lack_the_scales_of_the_others(tmp_path):
    entries = []
    for tensor, dtype, shape in CASES["fp8 blocks"].entries:
        if tensor.startswith(name(1, 3)):
            if tensor.endswith(".weight"):
                entries.append((tensor, "BF16", shape))
            continue
        entries.append((tensor, dtype, shape))
    settings = {"quantization_config": {"ignored_layers": [name(1, 3)]}}
    folder = source(tmp_path / "source", settings, entries=entries)
    copy = regroup(folder, ORDER, tmp_path / "copy")
    after = synthetic.contents(copy)
    assert after[name(1, SLOT[0][3], ".up_proj.weight")][0] == "BF16"
    assert json.loads((copy / "config.json").read_text())["quantization_config"]["ignored_layers"] == [
        name(1, SLOT[0][3])
    ]
    rewrite = expected_rewrite(find_model(str(folder)), ORDER)
    assert compare_tensors(rewrite, open_checkpoint(copy), lambda _: None) == []
