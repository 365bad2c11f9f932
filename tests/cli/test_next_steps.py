"""What a command says comes next can be pasted and runs; what is refused says what to do about it."""

import shlex
import shutil
from collections import Counter

import numpy as np
import pytest

from smoe_cli.commands.bench import _show as show_bench
from smoe_cli.commands.evaluate import _preferred
from smoe_cli.console import Console
from smoe_cli.options import Common
from smoe_profiles.models import readable_size
from smoe_solvers.choices import Predictor
from tests.conftest import smoe


def next_step(err):
    """The words after `smoe` of the command that was named last."""
    return shlex.split(err.strip().splitlines()[-1].removeprefix("next: smoe "))


@pytest.fixture
def held(made, model, prompts, tmp_path):
    """A folder `other` with held-out rows alone, and the finished working folder as smoe-out beside it."""
    shutil.copytree(made, tmp_path / "smoe-out")
    arguments = ("profile", "--model", model, "--dataset", f"{prompts}#few", "--split", "heldout", "-C", "other")
    return tmp_path, smoe(*arguments, cwd=tmp_path)


def test_held_out_rows_alone_are_followed_by_a_command_that_runs(held):
    folder, said = held
    for err in (said.err, smoe("inspect", "-C", "other", cwd=folder).err):
        assert next_step(err) == ["evaluate", "--trace", "other/trace"]
    smoe(*next_step(said.err), cwd=folder)


def test_where_no_placement_is_at_hand_the_user_names_its_folder(held):
    folder, _ = held
    shutil.rmtree(folder / "smoe-out")
    assert next_step(smoe("inspect", "-C", "other", cwd=folder).err)[-2:] == ["-C", "FOLDER"]


def test_verify_leads_to_held_out_rows_that_are_there(work, model, prompts):
    def after_verify():
        return next_step(smoe("verify", "--tensors-only", "-C", work, cwd=work).err)

    assert after_verify() == ["evaluate", "--placement", "placement-ep4", "-C", str(work)]
    smoe("profile", "--model", model, "--dataset", f"{prompts}#few", "--split", "fit", "--force", "-C", work, cwd=work)
    assert after_verify()[3:5] == ["--trace", "OTHER/trace"]


def test_verify_led_to_times_of_another_machine_than_placing(work):
    placing = ("cocluster", "--ep", "4", "--method", "contiguous", "--jobs", "1", "--mode", "dp-ep", "--name", "flat")
    smoe(*placing, "--hardware", "pcie", "-C", work, cwd=work)
    named = ["--placement", "placement-ep4-flat"]
    smoe("regroup", *named, "-C", work, cwd=work)
    said = smoe("verify", "--tensors-only", *named, "-C", work, cwd=work)
    assert next_step(said.err) == ["evaluate", *named, "--mode", "dp-ep", "--hardware", "pcie", "-C", str(work)]


def test_the_report_sent_held_out_rows_alone_to_build_tables(held):
    folder, said = held
    assert next_step(smoe("report", "-C", "other", cwd=folder).err) == next_step(said.err)


def test_measuring_was_for_another_machine_than_placing_and_led_to_a_checkpoint_like_the_first(work):
    flat = ("--ep", "4", "--method", "contiguous", "--jobs", "1", "--mode", "dp-ep", "--hardware", "pcie")
    placed = smoe("cocluster", *flat, "--name", "flat", "-C", work, cwd=work)
    named = ["--placement", "placement-ep4-flat"]
    machine = ["--mode", "dp-ep", "--hardware", "pcie"]
    assert next_step(placed.err) == ["evaluate", *named, *machine, "-C", str(work)]
    assert next_step(smoe(*next_step(placed.err), cwd=work).err) == ["report", *named, "-C", str(work)]


def test_a_handful_of_rows_was_reported_as_nothing_to_gain(tmp_path):
    np.savez(tmp_path / "few.npz", ids=random_routing(layers=1, tokens=5))
    smoe("import", "few.npz", cwd=tmp_path)
    smoe("build-tables", cwd=tmp_path)
    smoe("cocluster", "--ep", "2", "--effort", "fast", "--jobs", "1", cwd=tmp_path)
    said = smoe("report", cwd=tmp_path)
    assert "Undecided: too few validation rows" in said.out
    assert next_step(said.err) == ["profile", "--model", "M", "-C", "T"]


def test_imports_of_held_out_rows_alone_are_not_sent_to_build_tables(tmp_path):
    np.savez(tmp_path / "ids.npz", ids=random_routing(layers=2))
    said = smoe("import", "ids.npz", "--split", "heldout", "-C", "other", cwd=tmp_path)
    assert next_step(said.err)[0] == "evaluate"


def random_routing(layers, experts=8, top_k=2, tokens=400):
    generator = np.random.default_rng(0)
    return generator.random((layers, tokens, experts)).argsort(axis=2)[:, :, :top_k]


def test_a_trace_without_token_ids_is_called_that_at_every_step(tmp_path):
    np.savez(tmp_path / "ids.npz", ids=random_routing(layers=2))
    assert "no token ids" in smoe("import", "ids.npz", cwd=tmp_path).out
    counted = smoe("build-tables", cwd=tmp_path)
    assert "no token ids" in counted.err
    assert "ids never seen" not in counted.err
    smoe("cocluster", "--ep", "4", "--method", "contiguous", "--jobs", "1", cwd=tmp_path)
    measured = smoe("evaluate", cwd=tmp_path)
    assert "no token ids" in measured.out
    assert "never saw" not in measured.out


def test_the_name_given_to_import_is_kept_where_the_weights_are_not_here(tmp_path):
    np.savez(tmp_path / "ids.npz", ids=random_routing(layers=16, experts=64, top_k=8, tokens=40))
    smoe("import", "ids.npz", "--model", "olmoe-1b-7b", cwd=tmp_path)
    said = smoe("inspect", cwd=tmp_path).out
    assert "model: olmoe-1b-7b, " in said
    assert "unknown" not in said.split("rows by part")[0]


def test_a_predictor_that_validation_preferred_is_named_where_another_was_measured():
    fused, token = [Predictor.FUSED] * 3, [Predictor.TOKEN] * 2
    hint = _preferred([*fused, *token], [Predictor.TOKEN])
    assert "fused in 3 of 5 layers" in hint
    assert "--predictor selected" in hint
    for layers, measured in (
        ([*fused, *token], [Predictor.TOKEN, Predictor.SELECTED]),
        ([*fused, *token], [Predictor.FUSED]),
        ([*token, *fused[:2]], [Predictor.TOKEN]),
        ([], [Predictor.TOKEN]),
    ):
        assert _preferred(layers, measured) is None, Counter(layers)


def test_a_bench_on_the_cpu_shows_counts_and_no_times(tmp_path, capsys):
    one = {"tokens": 64, "case": "sp-ep placed", "local_share": 0.5, "total_rows": 122, "total": 0.098765}
    ratio = {"tokens": 64, "against": "sp-ep contiguous", "case": "sp-ep placed", "time_ratio": 2.284, "row_ratio": 1.5}
    workload = {"origin": "layer 1", "results": [one], "ratios": [ratio]}
    document = {"machine": {"ranks": 2, "device": "cpu", "date": "2026-01-01"}, "workloads": {"w": workload}}
    shown = {}
    for timed in (True, False):
        show_bench(Common(tmp_path, Console()), document, timed=timed)
        shown[timed] = capsys.readouterr().out
    for figure in ("98,765.0", "2.284", "of layer"):
        assert figure in shown[True]
        assert figure not in shown[False]
    assert "122" in shown[False]
    assert "rows 1.500" in shown[False]


@pytest.mark.parametrize(
    ("words", "made_by"),
    [
        (["build-tables"], "smoe profile or smoe import"),
        (["cocluster", "--ep", "4"], "smoe build-tables"),
        (["evaluate"], "smoe cocluster --ep G"),
    ],
)
def test_a_command_out_of_order_says_what_makes_what_is_missing(words, made_by, tmp_path):
    assert made_by in smoe(*words, cwd=tmp_path, code=3).err


def test_a_placement_that_is_not_there_is_refused_with_those_that_are(work):
    said = smoe("evaluate", "--placement", "placement-ep2", "-C", work, cwd=work, code=3).err
    assert "there is no placement" in said
    assert "holds placement-ep4." in said


def test_a_placement_of_older_tables_says_that_they_were_made_anew(work):
    smoe("build-tables", "--min-count", "2", "--force", "-C", work, cwd=work)
    said = smoe("evaluate", "-C", work, cwd=work, code=3).err
    assert "was made anew since" in said
    assert "smoe cocluster --ep G --force" in said


def test_a_missing_data_set_is_noticed_before_the_model_is_looked_for(work):
    for words in (["profile", "--model", "mixtral-8x7b"], ["verify", "--model", "/no/such/model"]):
        for spec in ("missing.jsonl", "/no/such/prompts", "missing.npz#a"):
            said = smoe(*words, "--dataset", spec, "-C", work, cwd=work, code=3).err
            assert f"dataset {spec.partition('#')[0]} is missing" in said


def test_small_models_do_not_weigh_nothing(tmp_path):
    shown = smoe("profile", "--model", "tiny-mixtral", "--max-tokens", "100", "--dry-run", cwd=tmp_path).out
    assert "5.5 MB of weights" in shown
    sizes = {0: "0 bytes", 999: "999 bytes", 1500: "1.5 kB", 5.5e6: "5.5 MB", 93.4e9: "93.4 GB", 1.3e12: "1,300.0 GB"}
    assert {size: readable_size(size) for size in sizes} == sizes
