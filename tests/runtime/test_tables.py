"""Scores at run time against those of smoe_solvers, from a file that smoe_cli wrote."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from smoe_cli.placement import Placement, write_runtime
from smoe_cli.runtime.tables import RuntimeTables, scores
from smoe_profiles.errors import InputError
from smoe_solvers.choices import Predictor
from smoe_solvers.predictors import Context, LayerPredictors, MarkovTables, TokenChoice, score

RANKS, EXPERTS, TOP_K, VOCAB, TOKENS, FEATURES = 4, 16, 3, 50, 200, 9
LAYERS = (2, 5, 7)
EXACT = [Predictor.TOKEN, Predictor.MARKOV, Predictor.PAPER]


def chance(generator, *shape):
    return generator.integers(0, 256, shape).astype(np.uint8)


def layers_of(generator, gates=True):
    made = []
    for chosen in (Predictor.FUSED, Predictor.MARKOV, Predictor.LINEAR if gates else Predictor.TOKEN):
        markov = MarkovTables(
            chance(generator, RANKS**2, RANKS), chance(generator, RANKS, RANKS), chance(generator, RANKS)
        )
        layer = LayerPredictors(chance(generator, VOCAB, RANKS), markov, chosen=chosen, fusion=(0.5, 0.25, 0.0, 0.0))
        if gates:
            layer = replace(
                layer,
                early=generator.normal(1, 0.2, (2, EXPERTS)).astype(np.float32),
                linear=generator.normal(0, 1, (FEATURES, EXPERTS)).astype(np.float32),
                early_temperature=0.25,
                linear_temperature=0.5,
                fusion=(0.40625, 0.0, 0.3125, 0.34375),
            )
        made.append(layer)
    return made


def written(path, layers, layout="map", copies=0, seed=1):
    generator = np.random.default_rng(seed)
    order = np.stack([generator.permutation(EXPERTS) for _ in LAYERS])
    order = np.concatenate([order, order[:, :copies]], axis=1)
    placement = Placement(LAYERS, order, RANKS)
    write_runtime(path, placement, layers, top_k=TOP_K, choice=TokenChoice(4.0, "popularity"), model={}, layout=layout)
    return placement


def context_of(generator, two=True, one=True):
    return Context(
        token_id=generator.integers(0, VOCAB + 5, TOKENS),
        two=generator.integers(0, RANKS, TOKENS).astype(np.uint8) if two else None,
        one=generator.integers(0, RANKS, TOKENS).astype(np.uint8) if one else None,
        early=generator.normal(0, 2, (TOKENS, EXPERTS)).astype(np.float32),
        features=generator.normal(0, 1, (TOKENS, FEATURES)).astype(np.float32),
    )


def at_run_time(tables, index, context, predictor, early=None):
    def tensor(values):
        return None if values is None else torch.from_numpy(values)

    early = tensor(context.early if early is None else early)
    labels = tensor(context.one), tensor(context.two)
    ids = torch.from_numpy(context.token_id)
    return scores(tables, index, ids, *labels, early, tensor(context.features), predictor).numpy()


@pytest.mark.parametrize("predictor", list(Predictor))
@pytest.mark.parametrize("copies", [0, 4])
def test_scores_are_those_of_the_solvers(tmp_path, predictor, copies):
    generator = np.random.default_rng(0)
    layers = layers_of(generator)
    placement = written(tmp_path / "runtime.safetensors", layers, copies=copies)
    tables = RuntimeTables.open(tmp_path / "runtime.safetensors", "cpu")
    for index, layer in enumerate(layers):
        context = context_of(generator)
        expected = score(layer, predictor, context, placement.hosts[index], TOP_K).astype(int)
        found = at_run_time(tables, index, context, predictor)
        assert (found.dtype, found.shape) == (np.uint8, (TOKENS, RANKS))
        # sums of floats in another order may fall on the other side of a half
        asked = layer.chosen if predictor is Predictor.SELECTED else predictor
        assert np.abs(found - expected).max() <= (asked not in EXACT)
        assert (found != expected).mean() < 0.01


@pytest.mark.parametrize(("two", "one"), [(False, True), (False, False)])
@pytest.mark.parametrize("predictor", [Predictor.MARKOV, Predictor.PAPER])
def test_layers_without_labels_behind_them_fall_back(tmp_path, predictor, two, one):
    generator = np.random.default_rng(3)
    layers = layers_of(generator, gates=False)
    placement = written(tmp_path / "runtime.safetensors", layers)
    tables = RuntimeTables.open(tmp_path / "runtime.safetensors", "cpu")
    context = context_of(generator, two, one)
    expected = score(layers[1], predictor, context, placement.hosts[1], TOP_K)
    assert (at_run_time(tables, 1, context, predictor) == expected).all()


def test_a_regrouped_router_yields_its_early_logits_by_slot(tmp_path):
    generator = np.random.default_rng(4)
    layers, context = layers_of(generator), context_of(generator)
    placement = written(tmp_path / "runtime.safetensors", layers, "checkpoint")
    tables = RuntimeTables.open(tmp_path / "runtime.safetensors", "cpu")
    by_slot = context.early[:, placement.physical_to_logical[0]]
    expected = score(layers[0], Predictor.EARLY_GATE, context, placement.hosts[0], TOP_K).astype(int)
    found = at_run_time(tables, 0, context, Predictor.EARLY_GATE, by_slot)
    assert np.abs(found - expected).max() <= 1


def test_a_slice_of_the_rows_has_the_scores_of_those_rows(tmp_path):
    generator = np.random.default_rng(5)
    layers, context = layers_of(generator), context_of(generator)
    written(tmp_path / "runtime.safetensors", layers)
    tables = RuntimeTables.open(tmp_path / "runtime.safetensors", "cpu")
    whole = at_run_time(tables, 0, context, Predictor.FUSED)
    for part in (slice(0, 50), slice(50, 120), slice(120, 200)):
        some = Context(
            context.token_id[part],
            context.two[part],
            context.one[part],
            context.early[part],
            context.features[part],
        )
        assert np.abs(at_run_time(tables, 0, some, Predictor.FUSED) - whole[part].astype(int)).max() <= 1


def test_what_a_predictor_lacks_is_named(tmp_path):
    generator = np.random.default_rng(6)
    written(tmp_path / "with.safetensors", layers_of(generator))
    written(tmp_path / "without.safetensors", layers_of(generator, gates=False))
    gated = RuntimeTables.open(tmp_path / "with.safetensors", "cpu")
    plain = RuntimeTables.open(tmp_path / "without.safetensors", "cpu")
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="linear needs context"):
        scores(gated, 0, ids, predictor="linear")
    with pytest.raises(ValueError, match="no early-gate predictor"):
        scores(plain, 0, ids, early_logits=torch.zeros(3, EXPERTS), predictor="early-gate")
    with pytest.raises(ValueError, match="no predictor is called oracle"):
        scores(plain, 0, ids, predictor="oracle")


def test_layers_are_found_by_the_number_they_have_in_the_model(tmp_path):
    written(tmp_path / "runtime.safetensors", layers_of(np.random.default_rng(7)))
    tables = RuntimeTables.open(tmp_path / "runtime.safetensors", "cpu")
    assert [tables.layer_index(number) for number in LAYERS] == [0, 1, 2]
    assert (tables.layout, tables.num_ranks, tables.top_k, tables.predictor[1]) == ("map", RANKS, TOP_K, "markov")
    with pytest.raises(InputError, match="no layer 3; it has 2, 5, 7"):
        tables.layer_index(3)


def test_files_that_are_no_tables_of_this_version_are_refused(tmp_path):
    path = tmp_path / "runtime.safetensors"
    with pytest.raises(InputError, match="is missing"):
        RuntimeTables.open(path, "cpu")
    path.write_bytes(b"nonsense")
    with pytest.raises(InputError, match="is not a safetensors file"):
        RuntimeTables.open(path, "cpu")
    written(path, layers_of(np.random.default_rng(8)))
    save_file(load_file(path), path, {"format_version": "2"})
    with pytest.raises(InputError, match=r"format_version 2; this smoe reads 1\."):
        RuntimeTables.open(path, "cpu")
