"""What the report's document is made of, on arrays alone: sizes are bounded, sums are kept, texts are verbatim."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from smoe_cli.placement import Placement, contiguous_placement
from smoe_cli.report.coactivation import (
    MOST_CELLS,
    MOST_SIDE,
    expected_pairs,
    kept_layers,
    pool_size,
    pools_of,
    quantise,
)
from smoe_cli.report.prediction import pooled
from smoe_cli.report.tokens import token_texts
from smoe_cli.report.writing import MARK, check_page, page_path, write_page
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_solvers.predictors import SCORE_MAX

PUBLISHED = {"DeepSeek-V2-Lite": (26, 64), "DeepSeek-V2": (59, 160), "DeepSeek-V3": (58, 256), "Qwen3-Next": (48, 512)}


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
@pytest.mark.parametrize(("layers", "experts"), PUBLISHED.values(), ids=PUBLISHED)
def test_matrices_of_a_published_model_stay_small(layers, experts, ranks):
    placement = contiguous_placement((0,), experts, ranks)
    cells, _ = pools_of(placement, 0, pool_size(placement))
    assert len(cells) <= MOST_SIDE
    kept = kept_layers(layers, MOST_CELLS // len(cells) ** 2)
    assert len(kept) * len(cells) ** 2 <= MOST_CELLS
    assert len(kept) >= 26


@given(ranks=st.integers(2, 16), held=st.integers(1, 24), extra=st.integers(0, 3), seed=st.integers(0, 99))
def test_pools_hold_every_slot_once_and_never_cross_ranks(ranks, held, extra, seed):
    experts = ranks * held
    slots = np.random.default_rng(seed).permutation(experts)
    copies = np.repeat(np.arange(ranks), extra) % experts
    placement = Placement((0,), np.concatenate([slots, copies])[None], ranks)
    cells, rank_of = pools_of(placement, 0, pool_size(placement))
    assert np.concatenate(cells).tolist() == placement.physical_to_logical[0].tolist()
    assert np.repeat(rank_of, [len(cell) for cell in cells]).tolist() == placement.slot_to_rank.tolist()


@given(layers=st.integers(1, 100), most=st.integers(1, 100))
def test_kept_layers_are_spaced_from_the_first_to_the_last(layers, most):
    kept = kept_layers(layers, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 1)
    assert kept[0] == 0
    if most > 1:
        assert kept[-1] == layers - 1


def test_levels_are_logarithms_of_observed_over_chance():
    observed, expected = np.array([[7.0, 63.0, 511.0, 0.0, 0.0]]), np.array([[7.0, 7.0, 7.0, 7.0, 0.0]])
    assert quantise(observed, expected).tolist() == [[50, 100, 100, 0, -1]]


@given(experts=st.integers(2, 9), seed=st.integers(0, 99))
def test_chance_has_as_many_pairs_as_were_counted(experts, seed):
    upper = np.triu(np.random.default_rng(seed).integers(0, 50, (experts, experts)), 1).astype(float)
    pairs = upper + upper.T
    expected = expected_pairs(pairs)
    assert expected.sum() == pytest.approx(pairs.sum())
    assert not expected.diagonal().any()
    if experts > 2 and pairs.sum(axis=1).all():
        ratio = expected[0, 1] / expected[0, 2]
        assert ratio == pytest.approx(pairs.sum(axis=1)[1] / pairs.sum(axis=1)[2])


def test_layers_without_pairs_have_no_chance():
    assert not expected_pairs(np.zeros((3, 3))).any()


@given(scores=st.lists(st.lists(st.integers(0, SCORE_MAX), min_size=1, max_size=30), min_size=1, max_size=4))
def test_pooled_bins_are_those_of_all_rows_at_once(scores):
    from smoe_cli.evaluation.detail import reliability

    top_k, counts = 6, [np.arange(len(layer)) % 3 for layer in scores]
    arrays = [np.array(layer, np.uint8)[:, None] for layer in scores]
    apart = [
        bin_ for layer, held in zip(arrays, counts, strict=True) for bin_ in reliability(layer, held[:, None], top_k)
    ]
    together = reliability(np.concatenate(arrays), np.concatenate(counts)[:, None], top_k)
    assert np.array(pooled(apart, top_k)) == pytest.approx(np.array(together))


def test_hostile_token_texts_are_kept_and_break_no_json(tmp_path):
    texts = ["</script><script>alert(1)</script>", "\x00\x1b[31m", '"\\\u2028', "\U0001f600", " the", "\u202e"]
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token=texts[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = token_texts(tmp_path / "tokenizer.json", np.arange(len(texts) + 1))
    assert found == [*texts, None]
    assert json.loads(json.dumps(found)) == found


def test_parts_of_a_character_are_shown_as_the_tokenizer_writes_them(tmp_path):
    tokenizer = Tokenizer(models.BPE({"\u00e2": 0, "a": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert token_texts(tmp_path / "tokenizer.json", np.arange(2)) == ["\u00e2", "a"]


def test_a_page_replaces_an_older_page_only(tmp_path):
    page = page_path(tmp_path, "placement-ep8-a")
    assert page.name == "report-ep8-a.html"
    assert page_path(tmp_path, None).name == "report.html"
    check_page(page, force=False)
    write_page(page, f"<html>{MARK.decode()} one \x00")
    check_page(page, force=False)
    write_page(page, f"<html>{MARK.decode()} two")
    assert page.read_text() == f"<html>{MARK.decode()} two"
    assert [path.name for path in tmp_path.iterdir()] == [page.name]
    page.write_text("a diary")
    with pytest.raises(ImpossibleError, match="is not a smoe report; --force replaces it"):
        check_page(page, force=False)
    check_page(page, force=True)


def test_a_page_has_nowhere_to_go(tmp_path):
    with pytest.raises(ImpossibleError, match="is a folder"):
        check_page(tmp_path, force=True)
    with pytest.raises(InputError, match="is no folder"):
        check_page(tmp_path / "absent/page.html", force=True)


def test_a_page_that_cannot_be_written_leaves_the_older_one(tmp_path):
    page = tmp_path / "report.html"
    write_page(page, "before")
    with pytest.raises(UnicodeEncodeError):
        write_page(page, "after \ud800")
    assert page.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
