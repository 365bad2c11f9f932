"""Every quantised and published form of a checkpoint, regrouped and verified tensor by tensor."""

import re

import numpy as np
import pytest

from smoe_cli.checkpoint.rewrite import expected_rewrite
from smoe_cli.checkpoint.verify import compare_tensors
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.models import find_model
from smoe_profiles.tensors import open_checkpoint
from tests.checkpoint import synthetic
from tests.checkpoint.conftest import regroup
from tests.checkpoint.synthetic import CASES, PER_EXPERT, E

EXPERT = re.compile(r"(.*layers\.(\d+)\..*experts\.)(\d+)(\..*)")


def random_map(case, seed=5):
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(E) for _ in range(case.layers)])


def failures(source, written, order):
    return compare_tensors(expected_rewrite(find_model(str(source)), order), open_checkpoint(written), lambda _: None)


def by_hand(case, tensors, order):
    """What the copy must hold, tensor by tensor. tensors: name to (dtype, shape, bytes)."""
    layers = sorted(
        {int(found[2]) for name in tensors if (found := re.match(r"(.*)layers\.(\d+)\..*gate\.weight", name))}
    )
    layers = [layer for layer in layers if not _further(f"layers.{layer}.")]
    layers = layers or sorted({int(found[1]) for name in tensors if (found := re.search(r"layers\.(\d+)", name))})
    expected = dict(tensors)
    for name, (dtype, shape, data) in tensors.items():
        number = re.search(r"layers\.(\d+)\.", name)
        if not number or _further(name) or "share" in name:
            continue
        index = layers.index(int(number[1])) if int(number[1]) in layers else -1
        expert = EXPERT.fullmatch(name)
        if expert:
            expected[name] = tensors[f"{expert[1]}{order[index][int(expert[3])]}{expert[4]}"]
        elif name.endswith("tid2eid"):
            slots = {int(logical): slot for slot, logical in enumerate(order[index])}
            values = [slots[value] for value in np.frombuffer(data, "<i8").tolist()]
            expected[name] = (dtype, shape, np.array(values, "<i8").tobytes())
        elif (name.endswith(case.fused) and case.fused and "self_attn" not in name) or re.search(
            r"(gate|router)\.(weight|bias|e_score_correction_bias)$|router_bias$", name
        ):
            rows = np.frombuffer(data, np.uint8).reshape(E, -1)
            expected[name] = (dtype, shape, b"".join(rows[logical].tobytes() for logical in order[index]))
    return expected


def _further(name):
    number = re.search(r"layers\.(\d+)\.", name)
    return name.startswith("mtp") or (number is not None and int(number[1]) >= synthetic.SIZES["num_hidden_layers"])


@pytest.mark.parametrize("name", CASES)
def test_every_form_is_regrouped_byte_for_byte_verified_and_undone(name, tmp_path):
    case = CASES[name]
    source = synthetic.write(tmp_path / "source", case)
    order = random_map(case)
    copy = regroup(source, order, tmp_path / "copy")
    before, after = synthetic.contents(source), synthetic.contents(copy)
    assert after == by_hand(case, before, order)
    assert sum(after[key] != before[key] for key in before) > E
    assert failures(source, copy, order) == []
    back = regroup(copy, np.argsort(order, axis=1), tmp_path / "back")
    assert synthetic.contents(back) == before


@pytest.mark.parametrize("form", [name for name, parts in PER_EXPERT.items() if len(parts) > 1])
def test_a_scale_left_behind_is_found_by_its_name(form, tmp_path):
    """The weights of two experts moved, one of their scales did not."""
    case = CASES[form]
    source, order = synthetic.write(tmp_path / "source", case), random_map(case)
    copy = regroup(source, order, tmp_path / "copy")
    tensors = synthetic.contents(copy)
    for suffix, _, shape in PER_EXPERT[form][1:]:
        if -1 in shape:  # sizes differ, so the header would too
            continue
        names = [f"model.layers.2.mlp.experts.{slot}.up_proj.{suffix}" for slot in (1, 6)]
        synthetic.put(copy, dict(zip(names, [tensors[name][2] for name in reversed(names)], strict=True)))
        assert sorted(failures(source, copy, order)) == sorted(f"{name}: bytes differ" for name in names)
        synthetic.put(copy, {name: tensors[name][2] for name in names})
    assert failures(source, copy, order) == []


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("mxfp4 gpt-oss", "model.layers.1.mlp.experts.gate_up_proj_scales"),
        ("mxfp4 gpt-oss", "model.layers.1.mlp.router.bias"),
        (
            "fp8 fused, further experts under mtp",
            "model.language_model.layers.2.mlp.experts.down_proj_activation_scale",
        ),
        ("fp8 in three fused tensors", "model.layers.2.moe.up_proj.weight_scale_inv"),
    ],
)
def test_two_rows_of_a_fused_tensor_exchanged_are_found_by_row(name, tensor, tmp_path):
    case = CASES[name]
    source, order = synthetic.write(tmp_path / "source", case), random_map(case)
    copy = regroup(source, order, tmp_path / "copy")
    rows = np.frombuffer(synthetic.contents(copy)[tensor][2], np.uint8).reshape(E, -1).copy()
    rows[[2, 5]] = rows[[5, 2]]
    synthetic.put(copy, {tensor: rows.tobytes()})
    assert failures(source, copy, order) == [f"{tensor}: rows 2, 5"]


def test_a_fused_tensor_larger_than_a_chunk_is_read_row_by_row(tmp_path, monkeypatch):
    from smoe_cli.checkpoint import rewrite

    monkeypatch.setattr(rewrite, "CHUNK", 64)
    case = CASES["mxfp4 gpt-oss"]
    source, order = synthetic.write(tmp_path / "source", case), random_map(case)
    copy = regroup(source, order, tmp_path / "copy")
    assert synthetic.contents(copy) == by_hand(case, synthetic.contents(source), order)
    assert failures(source, copy, order) == []


def test_layers_that_predict_further_tokens_keep_their_experts_and_router(tmp_path):
    """Index from the config, never 61; another E under mtp.*; no map of the main stack's."""
    for name, prefix in (("fp8 blocks", "model.layers.3."), ("fp8 fused, further experts under mtp", "mtp.")):
        case = CASES[name]
        source, order = synthetic.write(tmp_path / name / "source", case), random_map(case)
        model = find_model(str(source))
        rewrite = expected_rewrite(model, order)
        assert set(rewrite.layout.further) == {key for key, *_ in case.entries if key.startswith(prefix)}
        before = synthetic.contents(source)
        after = synthetic.contents(regroup(source, order, tmp_path / name / "copy"))
        for key in rewrite.layout.further:
            assert after[key] == before[key]


@pytest.mark.parametrize("value", [-1, E, 2**40])
def test_a_token_table_that_names_no_expert_stops_by_its_name(value, tmp_path):
    """Integers stay integers, and every one is an expert."""
    case = CASES["deepseek_v4 as published"]
    source = synthetic.write(tmp_path / "source", case)
    table = np.frombuffer(synthetic.contents(source)["layers.0.ffn.gate.tid2eid"][2], "<i8").copy()
    table[7] = value
    synthetic.put(source, {"layers.0.ffn.gate.tid2eid": table.tobytes()})
    with pytest.raises(InputError, match=rf"tid2eid holds {value}, which is none of 8 experts"):
        regroup(source, random_map(case), tmp_path / "copy")


def test_a_token_table_with_one_other_number_is_found(tmp_path):
    case = CASES["deepseek_v4 as published"]
    source, order = synthetic.write(tmp_path / "source", case), random_map(case)
    copy = regroup(source, order, tmp_path / "copy")
    for value in (3, 255):
        table = np.frombuffer(synthetic.contents(copy)["layers.0.ffn.gate.tid2eid"][2], "<i8").copy()
        table[5] = value if table[5] != value else 4
        synthetic.put(copy, {"layers.0.ffn.gate.tid2eid": table.tobytes()})
        assert failures(source, copy, order) == ["layers.0.ffn.gate.tid2eid: 1 of 128 expert numbers differ"]


def without(case, *names):
    return synthetic.Case(case.config, [entry for entry in case.entries if entry[0] not in names], case.layers)


def test_an_fp8_weight_without_its_scales_stops_by_its_expert(tmp_path):
    """The same suffixes for each expert."""
    case = without(CASES["fp8 blocks"], "model.layers.2.mlp.experts.5.up_proj.weight_scale_inv")
    with pytest.raises(InputError, match=r"experts\.5 does not have the same tensors as experts\.0"):
        regroup(synthetic.write(tmp_path / "source", case), random_map(case), tmp_path / "copy")


def test_one_expert_of_another_dtype_stops_by_its_number(tmp_path):
    entries = [
        (name, "BF16" if "experts.3.up_proj.weight" in name and "layers.1" in name else dtype, shape)
        for name, dtype, shape in CASES["bf16"].entries
    ]
    entries = [(n, "F16" if "layers.1.mlp.experts.3.up" in n else d, s) for n, d, s in entries]
    case = synthetic.Case(CASES["bf16"].config, entries, 2)
    with pytest.raises(InputError, match=r"experts\.3 does not have the same tensors"):
        regroup(synthetic.write(tmp_path / "source", case), random_map(case), tmp_path / "copy")


@pytest.mark.parametrize("shape", [(6, H := 32), (E * 36, 4), (H, E)])
def test_a_fused_tensor_whose_first_axis_is_not_that_of_the_experts_stops(shape, tmp_path):
    """The axis is the family's, and exactly E long; no shape is guessed at."""
    name = "model.layers.1.mlp.experts.down_proj_extra"
    case = CASES["mxfp4 gpt-oss"]
    case = synthetic.Case(case.config, [*case.entries, (name, "BF16", shape)], 3)
    with pytest.raises(ImpossibleError, match=name.replace(".", r"\.")):
        regroup(synthetic.write(tmp_path / "source", case), random_map(case), tmp_path / "copy")


def test_one_number_for_all_experts_is_copied(tmp_path):
    name = "model.layers.1.mlp.experts.gate_up_proj_input_scale"
    case = CASES["mxfp4 gpt-oss"]
    case = synthetic.Case(case.config, [*case.entries, (name, "F32", (1,))], 3)
    source, order = synthetic.write(tmp_path / "source", case), random_map(case)
    copy = regroup(source, order, tmp_path / "copy")
    assert synthetic.contents(copy)[name] == synthetic.contents(source)[name]
    assert failures(source, copy, order) == []


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.experts.2.up_proj.weight", "vision.blocks.0.experts.gate_up_proj", "experts.0.weight"]
)
def test_an_experts_tensor_outside_every_moe_layer_stops_by_its_name(name, tmp_path):
    """Every source tensor is accounted for; what looks like an expert is never copied by default."""
    case = CASES["bf16"]
    case = synthetic.Case(case.config, [*case.entries, (name, "BF16", (4, 4))], 2)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        regroup(synthetic.write(tmp_path / "source", case), random_map(case), tmp_path / "copy")


def test_a_second_stack_beside_the_block_is_left_alone(tiny, tmp_path):
    """JetMoE's attention has experts and a router of its own, of the same number."""
    order = np.stack([np.arange(8)[::-1]] * 2)
    before = synthetic.contents(tiny("jetmoe"))
    after = synthetic.contents(regroup(tiny("jetmoe"), order, tmp_path / "copy"))
    stack = [name for name in before if "self_attention.experts" in name]
    assert len(stack) == 8
    assert all(after[name] == before[name] for name in stack)
    assert after["model.layers.0.mlp.router.layer.weight"] != before["model.layers.0.mlp.router.layer.weight"]
