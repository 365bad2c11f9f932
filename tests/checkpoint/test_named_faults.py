"""Public faults of placing and regrouping that no other test here is named after."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from smoe_cli.checkpoint.rewrite import plan_rewrite
from smoe_cli.checkpoint.writer import write_checkpoint
from smoe_profiles.models import find_model
from tests.checkpoint.conftest import editable, permutations, regroup
from tests.conftest import smoe


@pytest.fixture(scope="module")
def routing(tmp_path_factory):
    """Ids alone: no weights, no token ids, no borders, no model."""
    folder = tmp_path_factory.mktemp("routing")
    generator = np.random.default_rng(0)
    ids = np.stack([[generator.permutation(8)[:2] for _ in range(4000)] for _ in range(2)]).astype(np.uint8)
    np.savez(folder / "ids.npz", ids=ids, num_experts=8, top_k=2, layer_ids=np.array([1, 2], np.uint8))
    smoe("import", "ids.npz", cwd=folder)
    smoe("build-tables", cwd=folder)
    return folder


def test_ranks_that_do_not_divide_the_experts_end_at_the_command_line_with_those_that_do(routing):
    """Workers crashed after the model was loaded."""
    said = smoe("cocluster", "--ep", 3, cwd=routing, code=4).err
    assert "Valid --ep: 2, 4, 8" in said
    assert not (routing / "smoe-out/placement-ep3").exists()


def test_nodes_that_do_not_divide_the_ranks_are_told_with_those_that_do(routing):
    """An assertion in the middle of start-up."""
    assert "Valid --nodes: 1, 2, 4" in smoe("cocluster", "--ep", 4, "--nodes", 3, cwd=routing, code=4).err


def test_what_is_not_asked_for_need_not_be_there(routing):
    """Metadata of a feature was demanded though the feature was off. No weights, ids, borders or model here."""
    smoe("cocluster", "--ep", 4, "--effort", "fast", "--goal", "fanout", "--jobs", "1", cwd=routing)
    smoe("evaluate", cwd=routing)
    said = smoe("cocluster", "--ep", 4, "--goal", "time", "--name", "t", cwd=routing, code=3).err
    assert "name the model to smoe profile or smoe import" in said


def test_permuted_tensors_are_written_whole_and_in_rows(tiny, tmp_path):
    """Views after an index could not be saved, or shared their storage with another tensor."""
    written = load_file(
        regroup(tiny("deepseek_v2"), permutations("deepseek_v2", 3), tmp_path / "copy") / "model.safetensors"
    )
    assert all(tensor.is_contiguous() for tensor in written.values())
    places = [tensor.untyped_storage().data_ptr() for tensor in written.values() if tensor.numel()]
    assert len(places) == len(set(places))


def test_a_correction_bias_in_fp32_among_bf16_weights_keeps_its_type_and_every_value(tiny, tmp_path):
    """Stored as bf16, 238 of its values fell together to 8, and most tokens changed experts."""
    source = editable(tiny("deepseek_v3"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    bias = next(name for name in tensors if name.endswith("e_score_correction_bias"))
    close = 1 + torch.arange(8, dtype=torch.float32) * 1e-4  # one value in bf16, eight in fp32
    tensors = {name: tensor if name == bias else tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(tensors | {bias: close}, source / "model.safetensors", {"format": "pt"})
    order = permutations("deepseek_v3", 5)
    written = load_file(regroup(source, order, tmp_path / "copy") / "model.safetensors")
    assert written[bias].dtype == torch.float32
    assert written[bias].tolist() == close[order[0]].tolist()
    assert {name: tensor.dtype for name, tensor in written.items()} == {
        name: torch.float32 if name == bias else torch.bfloat16 for name in tensors
    }


def test_writing_twice_from_one_plan_gives_the_same_bytes_and_leaves_the_map_alone(tiny, tmp_path):
    """A variable shared by a loop was changed in place, and the second tensor was turned twice."""
    order = permutations("mixtral", 7)
    before = order.copy()
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        rewrite = plan_rewrite(find_model(str(tiny("mixtral"))), order, tmp_path / name)
        write_checkpoint(rewrite, tmp_path / name, lambda _count: None)
        found.append((tmp_path / name / "model.safetensors").read_bytes())
    assert found[0] == found[1]
    assert (order == before).all()
