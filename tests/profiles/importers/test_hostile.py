"""Files that were cut short, changed or made to harm: an InputError, never a traceback, never code."""

import json
import os
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from smoe_profiles.choices import ImportFormat
from smoe_profiles.errors import InputError
from smoe_profiles.importers.detect import read_records
from tests.profiles.importers.helpers import options, read
from tests.profiles.importers.test_engines import base64_npy, pass_record, routing, save_records


def samples(folder):
    """One sound file of every kind."""
    folder.mkdir(parents=True)
    np.savez_compressed(folder / "a.npz", ids=np.moveaxis(routing(20), 0, 1), tokens=np.arange(20))
    np.save(folder / "b.npy", routing(20).astype(np.uint8))
    np.save(folder / "c.npy", routing(20)[:, :, 0])
    save_records(folder / "d.pt", [pass_record(1, 9)])
    torch.save({"rank": 0, "logical_count": torch.ones(3, 3, 8, dtype=torch.int32)}, folder / "e.pt")
    torch.save([torch.from_numpy(routing(20)[:, layer]) for layer in range(3)], folder / "f.pt")
    reply = {"prompt_token_ids": list(range(21)), "routed_experts": base64_npy(routing(20))}
    (folder / "g.json").write_text(json.dumps(reply))
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": 8, "num_experts_per_token": 2}))
    save_file({"0_3": np.ones(8, np.int64)}, folder / "rank0.safetensors")
    return [path for path in sorted(folder.iterdir()) if path.name != "meta_info.json"]


def read_or_refuse(path):
    """Reading may work or be refused; anything else fails the test."""
    try:
        read([path], chosen_options=options("tiny-mixtral"))
    except InputError:
        return False
    return True


def test_every_sample_is_read_as_it_is(tmp_path):
    assert all(read_or_refuse(path) for path in samples(tmp_path / "sound"))


@pytest.mark.parametrize("index", range(8))
def test_a_truncated_file_is_refused(index, tmp_path):
    path = samples(tmp_path / "sound")[index]
    content = path.read_bytes()
    for length in sorted({0, 1, 7, 9, 64, len(content) // 2, len(content) - 40, len(content) - 1}):
        path.write_bytes(content[: max(length, 0)])
        assert not read_or_refuse(path), length


@pytest.mark.parametrize("index", range(8))
def test_a_file_with_changed_bytes_is_read_or_refused(index, tmp_path):
    path = samples(tmp_path / "sound")[index]
    content, generator = path.read_bytes(), random.Random(index)
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(generator.choice([1, 1, 3, 20])):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        path.write_bytes(changed)
        read_or_refuse(path)


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path):
    with (tmp_path / "bad.pt").open("wb") as file:
        pickle.dump({"records": Harm(tmp_path / "harmed")}, file)
    torch.save({"records": Harm(tmp_path / "harmed")}, tmp_path / "worse.pt")
    for name in ("bad.pt", "worse.pt"):
        with pytest.raises(InputError, match=r"not a readable \.pt file of tensors"):
            read([tmp_path / name])
    assert not (tmp_path / "harmed").exists()


def test_an_array_of_objects_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", ids=np.array([Harm(tmp_path / "harmed")], object))
    with pytest.raises(InputError, match="array ids"):
        read([tmp_path / "a.npz"])
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("shape", ["(1000000000000, 3)", "(-4, -3)", "(2, 3"])
def test_an_array_that_claims_more_than_it_holds_allocates_nothing(shape, tmp_path):
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(96)
    (tmp_path / "a.npy").write_bytes(npy)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("ids.npy", npy)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(InputError, match=r"a\.np"):
            read([tmp_path / name])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{}",
        "[1, 2]",
        '{"routed_experts": 5}',
        '{"routed_experts": "no base64!"}',
        '{"routed_experts": "k05VTVBZ"}',
        '{"routed_experts": "", "start": -1}',
        '{"routed_experts": "", "input_ids": "text"}',
        '{"routed_experts": "", "input_ids": [1.5]}',
        '{"routed_experts": "", "input_ids": [' + "9" * 400 + "]}",
        '{"start": ' + "9" * 5000 + "}",
        '{"choices": [{"routed_experts": {}}]}',
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
    ids=range(13),
)
def test_json_that_is_no_reply_is_refused(text, tmp_path):
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    for kind in (ImportFormat.AUTO, ImportFormat.VLLM):
        with pytest.raises(InputError):
            read_records([tmp_path / "a.json"], kind, options("tiny-mixtral"))


@pytest.mark.parametrize(
    "content",
    [
        {"records": []},
        {"records": [1]},
        {"records": [{"forward_pass_id": "1", "rank": 0}]},
        {"records": [pass_record(1, 3) | {"input_ids": None}]},
        {"records": [pass_record(1, 3) | {"input_ids": [0.5]}]},
        {"records": [pass_record(1, 3) | {"topk_ids_of_layer": [1]}]},
        {"records": [pass_record(1, 3) | {"topk_ids_of_layer": torch.zeros(3, 3, 8)}]},
        {"records": [pass_record(1, 3) | {"positions": [0, -5, 2**70]}]},
        {"records": [pass_record(1, 3)], "last_physical_to_logical_map": torch.full((3, 8), -1)},
        {"records": [{"forward_pass_id": 1, "rank": 0, "global_physical_count": torch.ones(2, 2, dtype=torch.int32)}]},
        {"logical_count": torch.ones(4)},
        {"logical_count": torch.ones(4, dtype=torch.bfloat16)},
        {"logical_count": "many"},
        {"logical_count": torch.full((2, 3, 8), -1, dtype=torch.int32)},
        {"records": [pass_record(1, 3) | {"positions": None}]},
        {"records": [pass_record(1, 3) | {"positions": [0, 1]}]},
        {"records": [pass_record(1, 3) | {"extend_seq_lens": [1, 1]}]},
        {"records": [pass_record(1, 3) | {"extend_seq_lens": [4, -1]}]},
        {"records": [pass_record(1, 3) | {"extend_seq_lens": [3], "positions": [0, 1, 1]}]},
        {"something": torch.ones(4)},
        torch.ones(3, 3, 3, 3, 3, dtype=torch.int32),
        [torch.ones(3, dtype=torch.int32)],
        [],
        5,
        None,
    ],
    ids=range(25),
)
def test_a_pt_file_that_is_no_record_is_refused(content, tmp_path):
    if isinstance(content, dict) and "records" in content:
        content = {"last_physical_to_logical_map": torch.arange(8).repeat(3, 1)} | content
    torch.save(content, tmp_path / "a.pt")
    for kind in (ImportFormat.AUTO, ImportFormat.SGLANG, ImportFormat.REPLAY):
        with pytest.raises(InputError):
            read_records([tmp_path / "a.pt"], kind, options("tiny-mixtral"))


def test_a_tensor_file_with_a_flipped_bit_fails_its_checksum(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"logical_count": torch.full((3, 3, 8), 77, dtype=torch.int32)}, path)
    content = path.read_bytes()
    place = content.index(np.full(8, 77, "<i4").tobytes())
    path.write_bytes(content[:place] + bytes([78]) + content[place + 1 :])
    with pytest.raises(InputError, match=r"a\.pt is damaged: .*data/0 does not match its checksum"):
        read([path], chosen_options=options("tiny-mixtral"))


def test_replies_nested_in_each_other_are_no_replies(tmp_path):
    (tmp_path / "a.json").write_text("[" * 400 + '{"routed_experts": ""}' + "]" * 400)
    with pytest.raises(InputError, match="has no routed_experts"):
        read([tmp_path / "a.json"])


def test_files_of_two_formats_are_imported_apart(tmp_path):
    one, two = samples(tmp_path / "sound")[:2]
    with pytest.raises(InputError, match=r"a\.npz is of format npz, but .*b\.npy is of vllm"):
        read([one, two])


@pytest.mark.parametrize("content", [b"", b"GGUF....", b"\x00" * 64])
def test_a_file_of_no_known_kind_is_named(content, tmp_path):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(InputError, match="no record of routing that smoe knows"):
        read([tmp_path / "a.bin"])
    with pytest.raises(InputError, match="is missing"):
        read([tmp_path / "b.bin"])
