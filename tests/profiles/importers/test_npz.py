"""NumPy archives: keys by default and by name, axes in any order, triples, counts, and what is none of them."""

import shutil
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from smoe_profiles.choices import ImportFormat, Level, SplitBy, SplitMode
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.importers.detect import recognise
from smoe_profiles.importers.npz import logger_batches
from smoe_profiles.importers.records import DECODE, PREFILL
from smoe_profiles.importers.store import Wanted
from smoe_profiles.split import PARTS
from smoe_profiles.trace import UNKNOWN_TOKEN
from tests.profiles.importers.helpers import columns, distinct_rows, entries, options, read, store

FIXTURES = Path(__file__).parents[2] / "fixtures/routing"
HELD = Wanted(split=SplitMode.HELDOUT)
IDS = distinct_rows(np.random.default_rng(0), (2, 30, 3), 16).astype(np.uint8)
FACTS = {"layer_ids": np.array([2, 7], np.uint8), "num_experts": np.int32(16), "top_k": np.int32(3)}


def archive(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


def test_default_keys_are_found_by_themselves(tmp_path):
    weights = np.sort(np.random.default_rng(1).random((2, 30, 3)).astype(np.float16), axis=2)
    path = archive(
        *(tmp_path / "a.npz",),
        **FACTS,
        ids=IDS,
        weights=weights,
        tokens=np.arange(30, dtype=np.uint16),
        seq_len=np.array([10, 20], np.int32),
        vocab_size=np.int32(99),
    )
    assert recognise(path) is ImportFormat.NPZ
    found = store(tmp_path, [path], wanted=HELD)
    rows = columns(found.trace, "token_id", "experts_07", "weights_07")
    assert found.trace.vocab_size == 99
    assert rows.sequence.tolist() == [0] * 10 + [1] * 20
    assert rows.position.tolist() == [*range(10), *range(20)]
    assert rows.experts_07.tolist() == IDS[1, :, ::-1].tolist()  # by falling weight
    assert rows.weights_07.tolist() == weights[1, :, ::-1].tolist()
    assert found.trace.artefact.parameters["ordered"] is True


@pytest.mark.parametrize("axes", list(permutations(("layer", "token", "slot"))), ids=",".join)
def test_axes_may_stand_in_any_order_and_keys_have_any_name(axes, tmp_path):
    order = [("layer", "token", "slot").index(name) for name in axes]
    path = archive(tmp_path / "a.npz", chosen=IDS.transpose(order), t=np.arange(30), n=np.array([4, 26]))
    named = options(ids="chosen", axes=",".join(axes), tokens="t", layer_ids="5,9", seq_lens="n")
    found = store(tmp_path, [path], named, HELD)
    rows = columns(found.trace, "token_id", "experts_05", "experts_09")
    assert rows.token_id.tolist() == list(range(30))
    assert rows.experts_05.tolist() == np.sort(IDS[0], axis=1).tolist()
    assert rows.experts_09.tolist() == np.sort(IDS[1], axis=1).tolist()
    assert rows.sequence.tolist() == [0] * 4 + [1] * 26


def test_a_batch_axis_gives_the_sequences(tmp_path):
    ids = np.moveaxis(IDS.reshape(2, 5, 6, 3), 0, 2)  # batch, token, layer, slot
    path = archive(tmp_path / "a.npz", ids=ids, tokens=np.arange(30).reshape(5, 6), layer_ids=FACTS["layer_ids"])
    rows = columns(
        store(tmp_path, [path], options(axes="batch,token,layer,slot"), HELD).trace, "token_id", "experts_02"
    )
    assert rows.sequence.tolist() == np.repeat(np.arange(5), 6).tolist()
    assert rows.token_id.tolist() == list(range(30))
    assert rows.experts_02.tolist() == np.sort(IDS[0], axis=1).tolist()


def test_weights_of_the_first_tokens_only_leave_the_others_without(tmp_path):
    weights = np.random.default_rng(1).random((2, 12, 3)).astype(np.float16)
    found = store(tmp_path, [archive(tmp_path / "a.npz", **FACTS, ids=IDS, weights=weights)], wanted=HELD)
    rows = columns(found.trace, "experts_02", "weights_02")
    order = np.argsort(-weights[0].astype(float), axis=1, kind="stable")
    assert rows.experts_02[:12].tolist() == np.take_along_axis(IDS[0, :12], order, 1).tolist()
    assert rows.experts_02[12:].tolist() == np.sort(IDS[0, 12:], axis=1).tolist()
    assert np.isnan(rows.weights_02[12:].astype(float)).all()
    assert not np.isnan(rows.weights_02[:12].astype(float)).any()
    assert found.trace.artefact.parameters["ordered"] is False


def test_the_largest_token_id_means_not_known(tmp_path):
    tokens = np.arange(30, dtype=np.uint32)
    tokens[[3, 8]] = 4294967295
    found = store(tmp_path, [archive(tmp_path / "a.npz", **FACTS, ids=IDS, tokens=tokens)], wanted=HELD)
    assert columns(found.trace, "token_id").token_id[[2, 3, 8]].tolist() == [2, UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    assert found.trace.vocab_size == 30


def test_without_token_ids_the_vocabulary_has_one_entry(tmp_path):
    assert store(tmp_path, [archive(tmp_path / "a.npz", **FACTS, ids=IDS)]).trace.vocab_size == 1


def test_a_token_id_outside_the_vocabulary_is_refused(tmp_path):
    path = archive(tmp_path / "a.npz", **FACTS, ids=IDS, tokens=np.arange(30), vocab_size=29)
    with pytest.raises(InputError, match="token id 29; the vocabulary has 29 entries"):
        store(tmp_path, [path])


def test_one_long_row_without_borders_is_cut_into_blocks(tmp_path):
    ids = distinct_rows(np.random.default_rng(0), (2, 1000, 3), 16)
    found = store(tmp_path, [archive(tmp_path / "a.npz", **FACTS, ids=ids)], wanted=Wanted(split_by=SplitBy.ORDER))
    assert columns(found.trace).sequence.tolist() == [0] * 1000
    parts = {part: found.trace.read(["position"], part)["position"].tolist() for part in PARTS}
    assert parts["heldout"] == list(range(500, 1000))
    assert sorted(parts["fit"] + parts["validation"]) == list(range(500))
    assert parts["validation"]


def test_sequences_without_token_ids_are_split_by_the_experts_of_their_first_layer(tmp_path):
    ids = np.concatenate([np.tile(IDS[:, :10], (1, 2, 1)), IDS], axis=1)  # sequences 0 and 1 are the same
    path = archive(tmp_path / "a.npz", **FACTS, ids=ids, seq_len=np.array([10, 10, 5, 5, 5, 5, 5, 5]))
    trace = store(tmp_path, [path]).trace
    part_of = {seq: part for part in PARTS for seq in trace.read(["sequence"], part)["sequence"].tolist()}
    assert part_of[0] == part_of[1]
    assert set(part_of.values()) == set(PARTS)


def test_two_archives_are_two_sources_and_may_be_silent_where_the_other_speaks(tmp_path):
    one = archive(tmp_path / "law.npz", **FACTS, ids=IDS, vocab_size=50)
    two = archive(tmp_path / "intent.npz", ids=IDS[:, :8], layer_ids=FACTS["layer_ids"])
    found = store(tmp_path, [two, one], wanted=HELD)
    assert columns(found.trace, "source").source.tolist() == ["intent"] * 8 + ["law"] * 30
    assert (found.trace.vocab_size, found.trace.layers[0].num_experts) == (50, 16)
    three = archive(tmp_path / "other.npz", ids=IDS[:, :8], layer_ids=FACTS["layer_ids"], num_experts=64)
    with pytest.raises(InputError, match=r"num_experts = 64, but .*law\.npz has 16"):
        read([one, three])


def test_no_order_keeps_counts_by_token_id_and_no_sequence(tmp_path):
    tokens = np.arange(30) % 4
    path = archive(tmp_path / "a.npz", **FACTS, ids=IDS, tokens=tokens)
    found = store(tmp_path, [path], wanted=Wanted(split=SplitMode.HELDOUT, order=False))
    assert found.trace.level is Level.TOKEN_COUNT
    wanted: dict[tuple[int, int], int] = {}
    for token, row in zip(tokens.tolist(), IDS[1].tolist(), strict=True):
        for expert in row:
            wanted[token, expert] = wanted.get((token, expert), 0) + 1
    assert entries(found.trace, 1, "heldout") == wanted
    assert {path.name for path in found.trace.artefact.path.iterdir()} == {
        *("counts_02.parquet", "counts_07.parquet", "manifest.json", "run.json")
    }
    with pytest.raises(ImpossibleError, match="no token id is known"):
        store(tmp_path / "b", [archive(tmp_path / "b.npz", **FACTS, ids=IDS)], wanted=Wanted(order=False))


def test_triples_are_counts_by_token_id_and_several_files_add_up(tmp_path):
    path = FIXTURES / "mixtral8x7b_triples.npz"
    with np.load(path) as file:
        triples = {name: file[f"{name}_L7"].astype(int) for name in ("tok", "exp", "cnt")}
    again = shutil.copy(path, tmp_path / "again.npz")
    once, twice = store(tmp_path / "one", [path]), store(tmp_path / "two", [path, again], options(triples=True))
    assert once.trace.level is Level.TOKEN_COUNT
    assert [layer.id for layer in once.trace.layers] == [0, 7, 15]
    keys = zip(triples["tok"].tolist(), triples["exp"].tolist(), strict=True)
    wanted = dict(zip(keys, triples["cnt"].tolist(), strict=True))
    assert entries(once.trace, 1) == wanted
    assert entries(twice.trace, 1) == {key: 2 * count for key, count in wanted.items()}
    assert once.trace.rows("fit") == max(sum(entries(once.trace, layer).values()) for layer in range(3)) // 2


def test_a_file_given_twice_is_refused_by_whatever_path(tmp_path):
    path = archive(tmp_path / "a.npz", **FACTS, ids=IDS)
    (tmp_path / "link.npz").symlink_to(path)
    for again in (path, tmp_path / "link.npz"):
        with pytest.raises(InputError, match="is given twice; its rows would count twice"):
            read([path, again])


def test_of_several_files_the_one_at_fault_is_named(tmp_path):
    sound = archive(tmp_path / "sound.npz", **FACTS, ids=IDS, tokens=np.arange(30), vocab_size=30)
    words = archive(tmp_path / "words.npz", **FACTS, ids=IDS, tokens=np.arange(1, 31))
    with pytest.raises(InputError, match=r"row 29 of .*words\.npz holds token id 30; the vocabulary has 30"):
        store(tmp_path, [sound, words])
    heavy = archive(tmp_path / "heavy.npz", **FACTS, ids=IDS, weights=np.full(IDS.shape, 1e6))
    with pytest.raises(InputError, match=r"heavy\.npz has weights"):
        store(tmp_path, [sound, heavy])
    wrong = IDS.copy()
    wrong[0, 7] = 3
    twice = archive(tmp_path / "twice.npz", **FACTS, ids=wrong)
    with pytest.raises(InputError, match=r"row 7 of .*twice\.npz, layer 2: \[3, 3, 3\]"):
        store(tmp_path, [sound, twice])


def test_counts_alone_are_level_count(tmp_path):
    counts = np.random.default_rng(0).integers(1, 99, (3, 8))
    path = archive(tmp_path / "c4.npz", expert_counts=counts)
    with pytest.raises(InputError, match="3 layers and 0 layer numbers; give --layer-ids"):
        read([path])
    found = store(tmp_path, [path], options(layer_ids="0,7,15"), HELD)
    assert found.trace.level is Level.COUNT
    assert [layer.id for layer in found.trace.layers] == [0, 7, 15]
    assert entries(found.trace, 2, "heldout") == dict(enumerate(counts[2].tolist()))


def test_real_routing_of_a_fixture_comes_back_as_it_is_stored(tmp_path):
    with np.load(FIXTURES / "gptoss20b_layers.npz") as file:
        arrays = {name: file[name] for name in file.files}
    found = store(tmp_path, [FIXTURES / "gptoss20b_layers.npz"])
    rows = columns(found.trace, "token_id", "experts_12")
    assert rows.token_id.tolist() == arrays["tokens"].tolist()
    assert np.sort(rows.experts_12, axis=1).tolist() == np.sort(arrays["ids"][1], axis=1).tolist()
    assert not found.sound.rejected


def test_decode_rows_of_logged_batches_are_told_from_prompts():
    lengths, phase = logger_batches(np.array([65, 21, 3, 2]), np.array([65, 8, 12]))
    assert lengths.tolist() == [65, 1, 8, 12, 3, 2]
    assert phase.tolist() == [PREFILL] * 65 + [DECODE] + [PREFILL] * 20 + [DECODE] * 5


@pytest.mark.parametrize(
    ("arrays", "named", "message"),
    [
        ({"expert_to_rank": np.zeros((2, 8), np.uint8)}, {}, "is a placement of experts on ranks"),
        ({"other": IDS}, {}, "it holds other. Name the expert ids with --ids"),
        ({"ids": IDS}, {"ids": "nope"}, "has no array 'nope'; it holds ids"),
        ({"ids": IDS}, {"triples": True}, "has no triples tok_L0"),
        ({"ids": IDS.astype(np.float32)}, {}, "float32 .*; whole numbers were expected"),
        ({"ids": IDS}, {"axes": "layer,token"}, r"shape \[2, 30, 3\], and its axes are given as 'layer,token'"),
        ({"ids": IDS}, {"axes": "layer,token,expert"}, "axes are given as 'layer,token,expert'"),
        ({"ids": IDS}, {"axes": "token,token,slot"}, "--axes names each once"),
        ({"ids": IDS, "tokens": np.arange(29)}, {}, r"30 rows, but token_id for \[29\]"),
        ({"ids": IDS, "seq_len": np.array([30, 1])}, {}, "30 rows, but its sequences have 31"),
        ({"ids": IDS, "layer_ids": np.array([1, 2, 3])}, {}, "2 layers, but 3 layer numbers"),
        ({"ids": IDS, "top_k": 4}, {}, "3 experts a token, but says top_k = 4"),
        ({"ids": IDS, "num_experts": np.array([1, 2])}, {}, "num_experts is int64 .*; one whole number was expected"),
        ({"ids": IDS, "num_experts": np.float32(3)}, {}, "num_experts is float32"),
        ({"ids": IDS, "layer_ids": np.array([1, 1])}, {}, r"numbers its layers \[1, 1\]"),
        ({"ids": np.empty((2, 0, 3), np.uint8)}, {}, "the files hold no rows"),
        ({"tok_L0": np.arange(3), "exp_L0": np.arange(3), "cnt_L0": np.arange(2)}, {}, "triples of unequal length"),
        ({"tok_L0": np.arange(3), "cnt_L0": np.arange(3)}, {}, "has no array 'exp_L0'"),
        (
            {"tok_L0": np.arange(3), "exp_L0": np.array([0, 1, 9]), "cnt_L0": np.arange(3), "num_experts": 8},
            {},
            r"the files: expert 9 is outside layer 0, which has 8",
        ),
        ({"expert_counts": np.array([[1, -2]]), "layer_ids": np.array([0])}, {}, "expert_counts holds -2; counts were"),
    ],
)
def test_an_archive_that_cannot_be_read_is_named_with_what_it_holds(arrays, named, message, tmp_path):
    path = archive(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=message):
        store(tmp_path, [path], options(**named))
    assert not (tmp_path / "trace").exists()
