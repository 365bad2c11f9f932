"""Predictors from recording to measuring, through the commands, on the bundled model."""

from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import load_file

from smoe_cli.evaluation.measuring import GATED
from smoe_solvers.choices import Predictor
from tests.e2e.conftest import TEXTS

ALL = [option for predictor in Predictor for option in ("--predictor", predictor.value)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_smoe):
    """A trace with the early gate, tables and a placement; a held-out trace in `other`."""
    place = tmp_path_factory.mktemp("prediction")
    for text, tokens, split in (("fit", "16000", "fit"), ("heldout", "5000", "heldout")):
        where = () if text == "fit" else ("-C", "other")
        run_smoe(
            *("profile", "--model", "tiny-deepseek", "--dataset", TEXTS / f"{text}.jsonl.gz", "--max-tokens", tokens),
            *("--split", split, "--early-gate", "all", "-q", *where),
            cwd=place,
        )
    run_smoe("build-tables", "-q", cwd=place)
    run_smoe("cocluster", "--ep", "4", "--effort", "fast", "--jobs", "1", "-q", cwd=place)
    return place


@pytest.fixture(scope="module")
def evaluation(folder, run_smoe):
    return run_smoe("evaluate", "--trace", "other/trace", *ALL, "--json", cwd=folder).json()


def lar(evaluation, predictor, state="placed+shuffled"):
    return evaluation["total"][state][predictor]["exact"]["lar"]


def test_what_knows_more_keeps_more_at_home(evaluation):
    oracle = lar(evaluation, "oracle", "oracle")
    found = {predictor.value: lar(evaluation, predictor.value) for predictor in Predictor}
    assert max(found.values()) < oracle
    assert found["linear"] > found["early-gate"] > found["token"] > found["markov"]
    assert found["linear"] > 0.9 * oracle
    assert found["fused"] > found["linear"] - 0.005
    assert found["selected"] > max(found.values()) - 0.005
    assert found["markov"] > lar(evaluation, "none", "contiguous")


def test_the_run_time_file_carries_what_the_predictors_need(folder):
    arrays = load_file(folder / "smoe-out/placement-ep4/runtime.safetensors")
    experts, features = 64, arrays["linear.weight"].shape[1]
    assert arrays["linear.weight"].shape == (3, features, experts)
    assert (arrays["linear.temperature"] > 0).all()
    assert (arrays["early.temperature"] >= arrays["linear.temperature"]).all()  # who knows more may be sharper
    assert arrays["fusion.weights"].shape == (3, 4)
    assert arrays["token_rank"].nbytes == 3 * 6144  # the paper's T, a byte an entry


@pytest.mark.parametrize("predictor", [predictor.value for predictor in GATED])
def test_a_predictor_without_its_record_is_refused(predictor, deepseek_path, run_smoe):
    command = ("evaluate", "--trace", "other/trace", "--predictor", predictor)
    error = run_smoe(*command, cwd=deepseek_path, code=4).err
    assert "--early-gate" in error


def test_a_held_out_trace_without_the_early_gate_is_refused(folder, deepseek_path, run_smoe):
    trace = deepseek_path / "other/trace"
    error = run_smoe("evaluate", "--trace", trace, "--predictor", "linear", cwd=folder, code=3).err
    assert "--early-gate all" in error


def test_expected_counts_are_what_happens(folder):
    """Reliability: rows grouped by a rank's score have on average that many of their experts there."""
    from smoe_cli.placement import layer_predictors, read_placement, read_runtime
    from smoe_profiles.artefact import open_artefact
    from smoe_profiles.gates import gate_record
    from smoe_profiles.trace import open_trace
    from smoe_solvers.predictors import SCORE_MAX, Context, local_counts, rank_labels, score

    chosen = open_artefact(folder / "smoe-out/placement-ep4", "placement")
    placement, (arrays, metadata) = read_placement(chosen), read_runtime(chosen)
    trace = open_trace(folder / "other/trace")
    record = gate_record(trace.artefact.path)
    labels = []
    for index, layer in enumerate(trace.layers):
        rows, hosts = record.rows(layer, "heldout"), placement.hosts[index]
        context = Context(
            record.token_id("heldout"),
            labels[-2] if len(labels) > 1 else None,
            labels[-1] if labels else None,
            rows.early,
            rows.features,
        )
        true = local_counts(rows.experts, hosts)
        labels.append(rank_labels(rows.experts, hosts))
        predictors = layer_predictors(arrays, metadata, index)
        for predictor, within in ((Predictor.EARLY_GATE, 0.6), (Predictor.LINEAR, 0.2), (Predictor.FUSED, 0.2)):
            expected = score(predictors, predictor, context, hosts, 6) * (6 / SCORE_MAX)
            edges = np.quantile(expected, np.linspace(0, 1, 11))
            for low, high in pairwise(edges):
                mine = (expected >= low) & (expected <= high)
                assert true[mine].mean() == pytest.approx(expected[mine].mean(), abs=within)
