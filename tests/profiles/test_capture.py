"""What is recorded is what the router chose: recomputed by hand from the router's own inputs, row by row."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from smoe_profiles.capture.loading import LoadOptions, load_model, load_tokenizer
from smoe_profiles.capture.packing import batches, cut
from smoe_profiles.capture.points import capture_points
from smoe_profiles.capture.profile import CaptureOptions, record, trace_layers
from smoe_profiles.capture.recorder import Recorder, sort_layers
from smoe_profiles.choices import Pack
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.models import find_model
from smoe_profiles.split import PARTS, Assigned, Document
from smoe_profiles.trace_writer import TraceWriter
from tests.profiles.tiny_models import CONFIGS, MOE_LAYERS, VOCAB, choose_by_hand

NEAR_TIE = 1e-5


@pytest.fixture(scope="module")
def loaded(tiny):
    """loaded(name): (Model, module in float32, its router weights by layer id as [E, H])."""
    cache = {}

    def load(name):
        if name not in cache:
            model = find_model(str(tiny(name)))
            module = load_model(model, LoadOptions("float32"))
            tensors = load_file(tiny(name) / "model.safetensors")
            block = "block_sparse_moe" if name == "mixtral" else "mlp"
            routers = {
                layer: tensors[f"model.layers.{layer}.{block}.gate.weight"].numpy() for layer in MOE_LAYERS[name]
            }
            cache[name] = (model, module, routers)
        return cache[name]

    return load


def documents(*lengths, part="fit", source="s", seed=0):
    """Documents of ids 1 .. V - 1: id 0 pads."""
    generator = np.random.default_rng(seed)
    return [
        Assigned(Document(generator.integers(1, VOCAB, length).astype(np.uint32), source), part) for length in lengths
    ]


def trace_of(loaded_model, docs, folder, seq_len=64, **options):
    """The rows recorded, read back with pyarrow: a dictionary of arrays."""
    model, module, _ = loaded_model
    folder.mkdir(exist_ok=True)
    sources = list(dict.fromkeys(item.document.source for item in docs))
    writer = TraceWriter(folder, trace_layers(model), sources)
    seen = []
    record(model, module, docs, writer, CaptureOptions(sources, seq_len=seq_len, **options), seen.append)
    writer.close()
    table = pq.read_table(folder / "part-00000.parquet")
    assert sum(seen) == len(table)
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def router_inputs(module, ids):
    """What each gate was given for one row of ids, by decoder layer: [S, H]."""
    found, handles = {}, []
    for index, layer in enumerate(module.base_model.layers):
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None:
            handles.append(
                gate.register_forward_pre_hook(
                    lambda _gate, args, index=index: found.update({index: args[0].reshape(-1, args[0].shape[-1])})
                )
            )
    with torch.inference_mode():
        module(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {index: hidden.numpy() for index, hidden in found.items()}


def by_hand(name, loaded_model, ids):
    """layer -> [(experts, weights, gap)] of one row through the model alone."""
    _, module, routers = loaded_model
    inputs = router_inputs(module, ids)
    return {
        layer: [choose_by_hand(name, router @ hidden) for hidden in inputs[layer]] for layer, router in routers.items()
    }


def compare(rows, layer, expected, at=slice(None)):
    """Ids and weights of some trace rows against choices by hand, near ties left out (few may be)."""
    ids, weights = rows[f"experts_{layer:02d}"][at], rows[f"weights_{layer:02d}"][at]
    assert len(ids) == len(expected)
    compared = 0
    for row, (experts, by_weight, gap) in enumerate(expected):
        if gap > NEAR_TIE:
            assert sorted(ids[row]) == sorted(experts)
            assert weights[row] == pytest.approx(by_weight, rel=2e-3, abs=1e-4)
            compared += 1
    assert compared >= 0.9 * len(expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_experts_and_weights_are_those_of_the_routers_rule(name, loaded, tmp_path):
    docs = documents(23, 9, 31)
    rows = trace_of(loaded(name), docs, tmp_path / "trace")
    expected = [by_hand(name, loaded(name), item.document.token_ids) for item in docs]
    for layer in MOE_LAYERS[name]:
        compare(rows, layer, [row for document in expected for row in document[layer]])


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_ids_are_those_of_the_decoder(name, loaded, tmp_path):
    rows = trace_of(loaded(name), documents(5), tmp_path / "trace")
    assert [column for column in rows if column.startswith("experts_")] == [
        f"experts_{layer:02d}" for layer in MOE_LAYERS[name]
    ]
    points = capture_points(loaded(name)[1], loaded(name)[0].spec)
    assert [point.layer.id for point in points] == MOE_LAYERS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_sorted_by_falling_weight_then_id(name, loaded, tmp_path):
    rows = trace_of(loaded(name), documents(40), tmp_path / "trace")
    for layer in MOE_LAYERS[name]:
        weights = rows[f"weights_{layer:02d}"]
        assert (np.diff(weights, axis=1) <= 0).all()


def test_padding_is_never_recorded(loaded, tmp_path):
    docs = documents(30, 1, 2, 17)
    rows = trace_of(loaded("mixtral"), docs, tmp_path / "trace")
    assert rows["token_id"].tolist() == [int(token) for item in docs for token in item.document.token_ids]
    assert rows["sequence"].tolist() == [0] * 30 + [1] + [2] * 2 + [3] * 17
    assert rows["position"].tolist() == [*range(30), 0, *range(2), *range(17)]


def test_a_document_of_the_padding_id_itself_is_recorded(loaded, tmp_path):
    docs = [Assigned(Document(np.zeros(4, np.uint32), "s"), "fit"), *documents(9)]
    rows = trace_of(loaded("mixtral"), docs, tmp_path / "trace")
    assert rows["token_id"][:4].tolist() == [0] * 4
    assert len(rows["token_id"]) == 13


@pytest.mark.parametrize("name", ["deepseek_v2_grouped", "qwen2_moe", "olmoe"])
def test_a_document_alone_and_among_others_gives_the_same_rows(name, loaded, tmp_path):
    docs = documents(33, 8, 21, 3)
    together = trace_of(loaded(name), docs, tmp_path / "together")
    for number, item in enumerate(docs):
        alone = trace_of(loaded(name), [item], tmp_path / f"alone-{number}")
        expected = by_hand(name, loaded(name), item.document.token_ids)
        mine = together["sequence"] == number
        for layer in MOE_LAYERS[name]:
            clear = np.array([gap > NEAR_TIE for _, _, gap in expected[layer]])
            column = f"experts_{layer:02d}"
            ids = together[column][mine][clear], alone[column][clear]
            assert (np.sort(ids[0], axis=1) == np.sort(ids[1], axis=1)).all()


def test_a_long_document_goes_through_in_chunks_that_do_not_see_each_other(loaded, tmp_path):
    (item,) = docs = documents(50)
    rows = trace_of(loaded("olmoe"), docs, tmp_path / "trace", seq_len=16)
    assert rows["sequence"].tolist() == [0] * 50
    assert rows["position"].tolist() == list(range(50))
    for start in range(0, 50, 16):
        expected = by_hand("olmoe", loaded("olmoe"), item.document.token_ids[start : start + 16])
        for layer in MOE_LAYERS["olmoe"]:
            compare(rows, layer, expected[layer], slice(start, start + 16))


def test_windows_join_documents_of_one_part_and_cut_them(loaded, tmp_path):
    docs = [
        *documents(7, 12, part="fit", source="a", seed=1),
        *documents(10, part="heldout", source="b", seed=2),
        *documents(9, 4, part="fit", source="c", seed=3),
        *documents(8, part="heldout", source="b", seed=4),
    ]
    rows = trace_of(loaded("mixtral"), docs, tmp_path / "trace", pack=Pack.WINDOWS, seq_len=16)
    windows = {}
    for part in ("fit", "heldout"):
        joined = [
            (int(token), item.document.source)
            for item in docs
            if item.part == part
            for token in item.document.token_ids
        ]
        windows |= {
            (part, tuple(token for token, _ in window)): [source for _, source in window]
            for window in (joined[start : start + 16] for start in range(0, len(joined), 16))
        }
    found = {}
    for sequence in np.unique(rows["sequence"]):
        at = rows["sequence"] == sequence
        assert rows["position"][at].tolist() == list(range(at.sum()))
        (part,) = set(rows["split"][at])
        found[part, tuple(rows["token_id"][at].tolist())] = rows["source"][at].tolist()
        expected = by_hand("mixtral", loaded("mixtral"), rows["token_id"][at])
        for layer in MOE_LAYERS["mixtral"]:
            compare(rows, layer, expected[layer], at)
    assert found == windows


def test_isolated_documents_do_not_attend_each_other_but_windows_do(loaded, tmp_path):
    docs = documents(12, 12)
    isolated = trace_of(loaded("mixtral"), docs, tmp_path / "isolated")
    joined = trace_of(loaded("mixtral"), docs, tmp_path / "joined", pack=Pack.WINDOWS, seq_len=24)
    column = "experts_01"
    assert (isolated[column][:12] == joined[column][:12]).all()
    assert (isolated[column][12:] != joined[column][12:]).any()


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=25)


@settings(max_examples=80, deadline=None)
@given(lengths, st.integers(1, 20), st.integers(1, 60), st.sampled_from(list(Pack)))
def test_packing_loses_nothing_and_never_pads_beyond_its_budget(sizes, seq_len, budget, pack):
    docs = [
        Assigned(Document(np.arange(100 * i, 100 * i + size, dtype=np.uint32), f"s{i}"), ("fit", "heldout")[i % 2])
        for i, size in enumerate(sizes)
    ]
    found = list(batches(cut(docs, pack, seq_len, [f"s{i}" for i in range(len(docs))]), budget))
    chunks = [chunk for batch in found for chunk in batch.chunks]
    assert all(1 <= len(chunk.token_ids) == len(chunk.source) <= seq_len for chunk in chunks)
    for part in ("fit", "heldout"):
        wanted = [int(token) for item in docs if item.part == part for token in item.document.token_ids]
        assert [int(token) for chunk in chunks if PARTS[chunk.part] == part for token in chunk.token_ids] == wanted
    for chunk in chunks:
        assert (chunk.source == chunk.token_ids // 100).all()
    for batch in found:
        ids, real = batch.input_ids(), batch.real()
        assert ids.shape == real.shape
        assert len(batch.chunks) == 1 or ids.size <= budget
        assert [ids[row][real[row]].tolist() for row in range(len(ids))] == [
            chunk.token_ids.tolist() for chunk in batch.chunks
        ]


def test_a_layer_whose_experts_never_ran_is_noticed(loaded):
    model, module, _ = loaded("mixtral")
    points = capture_points(module, model.spec)
    absent = replace(points[0], layer=replace(points[0].layer, id=7), watched=torch.nn.Identity())
    with Recorder([*points, absent]) as recorder, torch.inference_mode():
        module(torch.tensor([[1, 2, 3]]))
        with pytest.raises(RuntimeError, match="layer 7 were never called"):
            recorder.take()


def test_experts_that_run_twice_in_a_forward_are_noticed(loaded):
    model, module, _ = loaded("mixtral")
    with Recorder(capture_points(module, model.spec)), torch.inference_mode():
        module(torch.tensor([[1, 2, 3]]))
        with pytest.raises(RuntimeError, match="layer 0 ran twice"):
            module(torch.tensor([[1, 2, 3]]))


def test_a_hook_that_raises_ends_the_run_and_leaves_no_hooks(loaded, tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("smoe_profiles.capture.recorder.read_choice", fail)
    with pytest.raises(ZeroDivisionError):
        trace_of(loaded("mixtral"), documents(5), tmp_path / "trace")
    points = capture_points(loaded("mixtral")[1], loaded("mixtral")[0].spec)
    assert not any(point.watched._forward_pre_hooks for point in points)


def test_hooks_are_gone_after_recording(loaded):
    model, module, _ = loaded("mixtral")
    points = capture_points(module, model.spec)
    with Recorder(points):
        assert all(point.watched._forward_pre_hooks for point in points)
    assert not any(point.watched._forward_pre_hooks for point in points)


def test_one_forward_does_not_leak_into_the_next(loaded):
    model, module, _ = loaded("mixtral")
    with Recorder(capture_points(module, model.spec)) as recorder, torch.inference_mode():
        module(torch.tensor([[1, 2, 3]]))
        first = recorder.take()
        module(torch.tensor([[4, 5]]))
        second = recorder.take()
    assert (tuple(first.ids.shape), tuple(second.ids.shape)) == ((3, 4), (2, 4))
    assert second.widths == (2, 2)
    ids, weights = second.to_numpy(np.array([False, True]))
    assert ids.shape == weights.shape == (1, 4)
    assert [column.shape for column in second.by_layer(ids)] == [(1, 2)] * 2


def test_a_class_without_the_familys_experts_module_is_refused(loaded):
    model, _, _ = loaded("mixtral")
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=2, vocab_size=8)
    other = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ImpossibleError, match=r"LlamaForCausalLM has no layers\.0"):
        capture_points(other, model.spec)


def test_the_model_runs_in_evaluation_mode(loaded):
    assert not any(part.training for part in loaded("deepseek_v2")[1].modules())


def test_the_models_own_tokenizer_is_used(tiny):
    assert load_tokenizer(find_model(str(tiny("mixtral"))))("w3 w200 w17") == [3, 200, 17]


def test_a_model_without_a_tokenizer_is_an_input_error_naming_its_folder(tiny, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny("mixtral") / name).read_bytes())
    model = SimpleNamespace(local_folder=lambda: tmp_path)
    with pytest.raises(InputError, match=str(tmp_path)):
        load_tokenizer(model)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 9))
def test_sorting_is_by_falling_weight_and_ties_go_to_the_lower_id(seed, widths, rows):
    generator = np.random.default_rng(seed)
    experts = [np.stack([generator.permutation(12)[:width] for _ in range(rows)]) for width in widths]
    weights = [generator.integers(0, 3, (rows, width)).astype(np.float32) / 4 for width in widths]
    pairs = [(torch.from_numpy(ids), torch.from_numpy(values)) for ids, values in zip(experts, weights, strict=True)]
    ids, values = sort_layers(pairs)
    for row in range(rows):
        expected = [
            pair
            for layer in range(len(widths))
            for pair in sorted(
                zip(weights[layer][row].tolist(), experts[layer][row].tolist(), strict=True),
                key=lambda pair: (-pair[0], pair[1]),
            )
        ]
        assert list(zip(values[row].tolist(), ids[row].tolist(), strict=True)) == expected
