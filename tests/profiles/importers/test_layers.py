"""The layer axis: three ways of numbering, dense layers by config only, and a model that must agree."""

import numpy as np
import pytest

from smoe_profiles.errors import InputError
from smoe_profiles.importers.layers import choose_layers
from smoe_profiles.importers.records import Facts, LayerAxis, Piece, join
from smoe_profiles.models import find_model
from tests.profiles.importers.helpers import DEEPSEEK, MIXTRAL, distinct_rows


def tokens(facts, layers, experts=64, top_k=6):
    return join([Piece(distinct_rows(np.random.default_rng(1), (layers, 20, top_k), experts), "dump.bin")], facts)


def hidden(layers=4, dense=(0,), axis=LayerAxis.HIDDEN):
    found = tokens(Facts(axis), layers)
    for layer in dense:
        found.ids[layer][:] = 0
    return found


def chosen(records, model=None):
    return choose_layers(records, find_model(model) if model else None, "dump.bin")


def test_dense_layers_of_a_hidden_layer_axis_are_dropped_by_the_models_config():
    found = chosen(hidden(), DEEPSEEK)
    assert [layer.id for layer in found.layers] == [1, 2, 3]
    assert found.entries == (1, 2, 3)
    assert found.expected == 3


def test_a_zero_layer_needs_a_model_to_be_known_as_dense():
    with pytest.raises(InputError, match="layer 0 is zero throughout, so it may be dense; give --model"):
        chosen(hidden(axis=LayerAxis.ORDINAL))


@pytest.mark.parametrize("dense", [(), (0,)])
def test_a_list_of_all_decoder_layers_needs_a_model_whether_one_is_zero_or_not(dense):
    with pytest.raises(InputError, match="every decoder layer is listed, but not which of them have experts; give"):
        chosen(hidden(dense=dense))


def test_experts_in_a_dense_layer_are_another_models():
    with pytest.raises(InputError, match=r"layer 0, but tiny-deepseek has none there \(first: row 0 of dump\.bin\)"):
        chosen(hidden(dense=()), DEEPSEEK)


@pytest.mark.parametrize("facts", [Facts(LayerAxis.NUMBERED, (0,)), Facts(LayerAxis.NUMBERED, (0,), 2**16 + 1)])
def test_more_experts_than_a_trace_can_name_are_refused(facts):
    records = join([Piece(np.array([[[3, 2**16]]]), "dump.bin")], facts)
    with pytest.raises(InputError, match="65537 experts in layer 0; a trace can name 65536"):
        chosen(records)


def test_mlp_layers_in_order_get_the_decoders_numbers_from_the_model():
    records = tokens(Facts(LayerAxis.ORDINAL), 3)
    assert [layer.id for layer in chosen(records, DEEPSEEK).layers] == [1, 2, 3]
    found = chosen(records)
    assert [layer.id for layer in found.layers] == [0, 1, 2]
    assert any("give --model" in note for note in found.notes)


def test_a_replay_that_holds_every_decoder_layer_is_matched_too():
    records = hidden()
    assert chosen(join([Piece(np.stack(records.ids), "a")], Facts(LayerAxis.ORDINAL)), DEEPSEEK).entries == (1, 2, 3)


@pytest.mark.parametrize(
    ("records", "model", "message"),
    [
        (lambda: hidden(layers=5), DEEPSEEK, "5 layers, but tiny-deepseek has 4 layers"),
        (lambda: tokens(Facts(LayerAxis.ORDINAL), 2), DEEPSEEK, "2 layers, but tiny-deepseek has 3 MoE layers"),
        (lambda: tokens(Facts(LayerAxis.NUMBERED, (0, 1, 2)), 3), DEEPSEEK, "experts in layer 0, but"),
        (lambda: tokens(Facts(LayerAxis.NUMBERED, (1,), 32), 1), DEEPSEEK, "32 experts in layer 1, but .* has 64"),
        (lambda: tokens(Facts(LayerAxis.NUMBERED, (1,)), 1), MIXTRAL, "6 experts a token in layer 1, but .* has 2"),
        (lambda: tokens(Facts(LayerAxis.NUMBERED, (1, 1)), 2), None, r"numbers its layers \[1, 1\]"),
    ],
)
def test_a_model_that_does_not_fit_is_named_with_both_sides(records, model, message):
    with pytest.raises(InputError, match=message):
        chosen(records(), model)


def test_some_of_the_models_layers_are_enough_where_the_file_numbers_them():
    found = chosen(tokens(Facts(LayerAxis.NUMBERED, (3, 1)), 2), DEEPSEEK)
    assert [layer.id for layer in found.layers] == [3, 1]
    assert found.expected == 3


def test_experts_are_counted_from_the_largest_id_where_nobody_says_how_many():
    records = tokens(Facts(LayerAxis.NUMBERED, (4,)), 1, experts=64)
    largest = int(records.ids[0].max())
    found = chosen(records)
    assert found.layers[0].num_experts == largest + 1
    assert any(f"{largest + 1} from the largest id" in note for note in found.notes)
