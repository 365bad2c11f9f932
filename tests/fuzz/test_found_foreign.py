"""What `make fuzz` found in the readers of files that others write: prompts, routing, engines' placements, options."""

import numpy as np
import pytest
import torch

from smoe_cli.engines.files import read_engine_map
from smoe_cli.hardware import read_rank_cost
from smoe_profiles.datasets import read_documents
from smoe_profiles.errors import InputError
from tests.profiles.importers.helpers import read


@pytest.mark.parametrize("batch", [[-1, 56], [2**62, 2**62, 55]])
def test_batches_of_a_logger_that_are_negative_or_add_up_by_overflow(batch, tmp_path):
    """The second asked for 8 GiB."""
    np.savez(tmp_path / "log.npz", ids=np.zeros((1, 55, 2), int), batch_size=np.array(batch), prompt_len=np.array([1]))
    with pytest.raises(InputError, match="batch_size"):
        read([tmp_path / "log.npz"])


def test_sequences_that_add_up_to_the_rows_by_overflow(tmp_path):
    lengths = np.array([2**63 - 1, 2**63 - 1, 2 + 55])
    np.savez(tmp_path / "trace.npz", ids=np.zeros((1, 55, 2), int), seq_len=lengths)
    with pytest.raises(InputError, match="has a sequence of 9223372036854775807 tokens"):
        read([tmp_path / "trace.npz"])


def test_routing_of_no_rows(tmp_path):
    np.savez(tmp_path / "a.npz", ids=np.zeros((3, 5, 0), int))
    np.savez(tmp_path / "d.npz", ids=np.zeros((3, 5, 2), int), weights=np.zeros((3, 5, 0)))
    torch.save(torch.zeros((2, 0, 3, 2), dtype=torch.int64), tmp_path / "b.pt")
    torch.save({"logical_count": torch.zeros((1, 4, 0), dtype=torch.int64)}, tmp_path / "c.pt")
    for name in ("a.npz", "b.pt", "c.pt", "d.npz"):
        with pytest.raises(InputError, match=name):
            read([tmp_path / name])


def test_an_expert_on_a_rank_of_more_digits_than_there_are_ranks(tmp_path):
    """It asked for 64 TiB."""
    np.savez(tmp_path / "archive.npz", expert_to_rank=np.array([[0, 2**43]]))
    with pytest.raises(InputError, match="names ranks 0 to 8796093022208"):
        read_engine_map(tmp_path / "archive.npz")


def test_a_data_set_nested_so_deep_that_its_reader_would_end_the_process(tmp_path):
    (tmp_path / "deep.jsonl").write_text('{"a":' * 20_000 + '{"input_ids": [1]}' + "}" * 20_000)
    with pytest.raises(InputError, match="line 1 is nested too deep"):
        list(read_documents(str(tmp_path / "deep.jsonl"), "x", list, 50))


def test_a_line_of_a_data_set_that_is_null_which_would_end_the_process(tmp_path):
    (tmp_path / "null.jsonl").write_text('null\n{"input_ids": [4, 5]}\n')
    with pytest.raises(InputError, match="line 1 is null"):
        list(read_documents(str(tmp_path / "null.jsonl"), "x", list, 50))


def test_a_placement_of_half_precision_numbers(tmp_path):
    torch.save({"phy2log": torch.zeros(3, 8, dtype=torch.bfloat16)}, tmp_path / "eplb.pt")
    with pytest.raises(InputError, match="no arrays of whole numbers"):
        read_engine_map(tmp_path / "eplb.pt")


def test_costs_between_ranks_whose_header_does_not_end(tmp_path):
    np.save(tmp_path / "cost.npy", np.ones((4, 4)))
    content = (tmp_path / "cost.npy").read_bytes()
    (tmp_path / "cost.npy").write_bytes(content.replace(b")", b"("))
    with pytest.raises(InputError, match=r"cost\.npy"):
        read_rank_cost(tmp_path / "cost.npy", 4)


def test_a_config_nested_deeper_than_python_goes(run_smoe, tmp_path):
    (tmp_path / "smoe.toml").write_text("a = " + "[" * 20_000)
    said = run_smoe("models", "--config", "smoe.toml", cwd=tmp_path, code=2).err
    assert "cannot be read as TOML" in said
