"""Safetensors headers and indexes from strangers: nothing claimed is trusted, and every refusal names its file."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from smoe_profiles.errors import InputError
from smoe_profiles.tensors import (
    ITEM_BYTES,
    TensorInfo,
    as_float32,
    encode_header,
    open_checkpoint,
    read_json,
    read_shard,
)

INDEX = "model.safetensors.index.json"


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


MALFORMED = {
    "empty": b"",
    "seven bytes": b"1234567",
    "ten gigabytes of header claimed in a kilobyte": raw(b"{" + b" " * 1000, length=10 * 2**30),
    "length of all ones": raw(b"{}", length=2**64 - 1),
    "header one byte longer than the file": raw(b"{}", length=3),
    "not JSON": raw(b"\x80\x05pickle"),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "a list": raw([]),
    "a number": raw(b"5"),
    "nesting": raw(b'{"a":' + b"[" * 200_000),
    "duplicate keys": raw(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"1234"),
    "duplicate keys inside an entry": raw(
        b'{"a":{"dtype":"F32","shape":[2],"shape":[1],"data_offsets":[0,4]}}', b"1234"
    ),
    "a hole": raw({"a": entry(), "b": entry(offsets=(8, 12))}, b"0" * 12),
    "a hole at the start": raw({"a": entry(offsets=(4, 8))}, b"0" * 8),
    "overlap": raw({"a": entry(shape=(2,), offsets=(0, 8)), "b": entry(offsets=(4, 8))}, b"0" * 8),
    "the same bytes twice": raw({"a": entry(), "b": entry()}, b"1234"),
    "data missing": raw({"a": entry(shape=(1000,), offsets=(0, 4000))}, b"1234"),
    "data left over": raw({"a": entry()}, b"1234!"),
    "shape larger than its bytes": raw({"a": entry(shape=(2,))}, b"1234"),
    "dtype wider than its bytes": raw({"a": entry(dtype="F64")}, b"1234"),
    "shape overflowing 64 bits": raw({"a": entry(shape=(2**40, 2**40, 2**40))}, b"1234"),
    "negative shape": raw({"a": entry(shape=(-1, -1))}, b"1234"),
    "negative offset": raw({"a": entry(offsets=(-4, 0))}, b"1234"),
    "offsets backwards": raw({"a": entry(offsets=(4, 0))}, b"1234"),
    "offsets as text": raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}, b"1234"),
    "offsets as fractions": raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}, b"1234"),
    "three offsets": raw({"a": entry(offsets=(0, 2, 4))}, b"1234"),
    "offsets missing": raw({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
    "shape as a number": raw({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, b"1234"),
    "dtype as a list": raw({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
    "dtype as null": raw({"a": {"dtype": None, "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
    "an entry that is null": raw({"a": None}),
    "an entry that is a list": raw({"a": [1, 2, 3]}),
    "metadata as text": raw({"__metadata__": "pt", "a": entry()}, b"1234"),
    "metadata as a number": raw({"__metadata__": 5, "a": entry()}, b"1234"),
    "metadata with values that are no text": raw({"__metadata__": {"format": 1}, "a": entry()}, b"1234"),
    "a name that is no valid text": raw(b'{"\\ud800":%s}' % json.dumps(entry()).encode(), b"1234"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_file_is_refused_by_name(fault, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(MALFORMED[fault])
    with pytest.raises(InputError, match=re.escape(str(path))):
        read_shard(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_to_a_good_header_makes_anything_but_an_input_error(tmp_path_factory, data):
    good = raw({"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("I8", (2, 2), (4, 8))}, b"12345678")
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(good) - 9))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damaged)
    try:
        shard = read_shard(path)
    except InputError:
        return
    assert sum(tensor.nbytes for tensor in shard.tensors) == path.stat().st_size - shard.data_start


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_a_file_cut_short_is_found_before_any_tensor_is_read(cut, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(100.0)}, path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        read_shard(path)


def test_a_file_cut_after_its_header_was_read_is_an_input_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(100.0)}, path)
    shard = read_shard(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=re.escape(str(path))):
        shard.read(shard.tensors[0])


TENSORS = {
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 4),
    "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "half": torch.arange(5, dtype=torch.float16),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "long": torch.arange(3),
    "flag": torch.tensor([True, False]),
    "fp8": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
}


def test_every_tensor_of_a_library_file_is_found_with_its_bytes(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt", "who": "me"})
    shard = read_shard(path)
    assert shard.metadata == {"format": "pt", "who": "me"}
    assert {tensor.name for tensor in shard.tensors} == set(TENSORS)
    for tensor in shard.tensors:
        wanted = TENSORS[tensor.name]
        assert tensor.shape == tuple(wanted.shape)
        assert shard.read(tensor) == bytes(wanted.reshape(-1).view(torch.uint8).numpy())


def test_every_bf16_value_is_widened_exactly():
    bits = np.arange(2**16, dtype="<u2")
    found = as_float32(TensorInfo("a", "BF16", (256, 256), 0, 2**17), bits.tobytes())
    assert found.shape == (256, 256)
    assert (found.view(np.uint32).reshape(-1) == np.arange(2**16, dtype=np.uint32) * 2**16).all()
    wanted = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(found.reshape(-1), wanted, equal_nan=True)


@pytest.mark.parametrize(("dtype", "numpy"), [("F16", "<f2"), ("F32", "<f4"), ("F64", "<f8")])
def test_other_floats_keep_their_values(dtype, numpy):
    values = np.array([[0.5, -3.0], [65504.0, 2.0**-14]], numpy)
    found = as_float32(TensorInfo("a", dtype, (2, 2), 0, values.nbytes), values.tobytes())
    assert found.dtype == np.float32
    assert found.tolist() == values.tolist()


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F8_E8M0", "U8", "F4"])
def test_a_router_that_is_not_plain_floats_is_refused_by_name(dtype):
    with pytest.raises(InputError, match=r"layers\.3\.gate.*" + dtype):
        as_float32(TensorInfo("layers.3.gate", dtype, (4,), 0, 4), b"1234")


names = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
library_dtypes = st.sampled_from(sorted(set(ITEM_BYTES) - {"F8_E8M0"}))
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(names, st.tuples(library_dtypes, shapes), max_size=5),
    st.dictionaries(st.text("abc", min_size=1), st.text("xyz/ é"), max_size=3),
)
def test_an_encoded_header_is_read_by_the_library_and_by_us(tmp_path_factory, tensors, metadata):
    entries = [
        (name, dtype, shape, int(np.prod(shape, dtype=int)) * ITEM_BYTES[dtype])
        for name, (dtype, shape) in tensors.items()
    ]
    head = encode_header(metadata, entries)
    assert len(head) % 8 == 0
    assert head == encode_header(dict(reversed(metadata.items())), entries)
    path = tmp_path_factory.getbasetemp() / "encoded.safetensors"
    path.write_bytes(head + bytes(sum(nbytes for *_, nbytes in entries)))
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert (file.metadata() or {}) == metadata
        for name, (dtype, shape) in tensors.items():
            piece = file.get_slice(name)
            assert (piece.get_dtype(), tuple(piece.get_shape())) == (dtype, shape)
    shard = read_shard(path)
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in shard.tensors} == tensors
    assert shard.metadata == metadata


def folder_with(tmp_path, weight_map, shards=("a", "b")):
    """Shards `a` and `b` hold tensors of their own names; the index says what it is told."""
    for name in shards:
        save_file({f"tensor_{name}": torch.zeros(3)}, tmp_path / f"{name}.safetensors", metadata={"format": "pt"})
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (tmp_path / INDEX).write_text(text)
    return tmp_path


GOOD = {"tensor_a": "a.safetensors", "tensor_b": "b.safetensors"}


def test_a_sharded_folder_gives_every_tensor_with_its_shard(tmp_path):
    found = open_checkpoint(folder_with(tmp_path, GOOD))
    assert found.has_index
    assert {name: shard.path.name for name, (shard, _) in found.by_name().items()} == GOOD
    assert found.nbytes == 24


BAD_INDEX = {
    "a parent folder": ({**GOOD, "tensor_c": "../../x"}, "../../x"),
    "a parent folder inside a path": ({**GOOD, "tensor_c": "sub/../../x.safetensors"}, "x.safetensors"),
    "an absolute path": ({**GOOD, "tensor_c": "/etc/passwd"}, "/etc/passwd"),
    "a sub-folder": ({**GOOD, "tensor_c": "sub/c.safetensors"}, "sub/c.safetensors"),
    "two dots": ({**GOOD, "tensor_c": ".."}, INDEX),
    "no name at all": ({**GOOD, "tensor_c": ""}, INDEX),
    "a name with a zero byte": ({**GOOD, "tensor_c": "c\0.safetensors"}, INDEX),
    "a missing shard": ({**GOOD, "tensor_c": "c.safetensors"}, "c.safetensors"),
    "a tensor that its shard does not hold": ({**GOOD, "tensor_c": "b.safetensors"}, "tensor_c"),
    "a tensor left out": ({"tensor_a": "a.safetensors", "x": "b.safetensors"}, "tensor_b|x"),
    "two tensors exchanged": ({"tensor_a": "b.safetensors", "tensor_b": "a.safetensors"}, "tensor_a|tensor_b"),
    "a number for a shard": ({**GOOD, "tensor_c": 5}, INDEX),
    "no weight_map": ("{}", INDEX),
    "a list": ("[]", INDEX),
    "no JSON": ("{", INDEX),
    "a duplicate key": ('{"weight_map": {"tensor_a": "a.safetensors", "tensor_a": "b.safetensors"}}', "tensor_a"),
    "endless nesting": ("[" * 200_000, INDEX),
}


@pytest.mark.parametrize("fault", BAD_INDEX)
def test_an_index_that_cannot_be_true_is_refused(fault, tmp_path):
    weight_map, named = BAD_INDEX[fault]
    with pytest.raises(InputError, match=named):
        open_checkpoint(folder_with(tmp_path, weight_map))


def test_a_tensor_in_two_shards_is_refused_with_both_names(tmp_path):
    folder_with(tmp_path, {**GOOD, "shared": "a.safetensors"})
    for name in "ab":
        save_file({f"tensor_{name}": torch.zeros(3), "shared": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InputError, match=r"shared stands in a\.safetensors and b\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_folder_without_safetensors_says_what_smoe_reads(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors checkpoints only"):
        open_checkpoint(tmp_path)


def test_a_shard_that_links_into_a_hub_cache_is_read(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(TENSORS, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    found = open_checkpoint(tmp_path / "snapshot")
    assert not found.has_index
    wanted = load_file(tmp_path / "blobs" / "0123")
    assert set(found.by_name()) == set(wanted)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[" * 200_000, "{'a': 1}", ""])
def test_json_that_is_ambiguous_or_broken_is_refused_by_file_name(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(str(path))):
        read_json(path)
