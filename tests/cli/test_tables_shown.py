"""What cocluster and inspect print: tables whose numbers stand whole at any width, and what their columns mean."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from smoe_cli.commands.cocluster import _show
from smoe_cli.console import Console
from smoe_cli.options import Common
from smoe_profiles.tables import open_tables
from smoe_solvers.choices import Goal
from tests.conftest import smoe
from tests.solvers.reference import mean_fanout

ORIGINS = {Goal.BLEND: "cross-entropy, kicked + descent", Goal.TIME: "blend, theta 0.35, mu 0.5 + descent by time"}
CERTIFICATE = {"gap": None, "pairs": None, "pairs_bound": None}


def document(goal, **changes):
    """What a placement of 26 layers reports."""
    long = 127.2230 if goal is Goal.TIME else 0.8403
    layers = [
        {"layer": number, "stages": [{"objective": long}], "objective": long / 1.2, "origin": ORIGINS[goal],
         "certificate": CERTIFICATE | {"value": None if goal is Goal.TIME else 0.5174},
         "validation_gain": 0.1583, "validation_two_standard_errors": 0.0063}
        for number in range(1, 27)
    ]  # fmt: skip
    found = {
        "path": "law/placement-ep8", "goal": goal, "layers": layers, "mode": "speculative", "hardware": "nvlink-h200",
        "validation_blocks": 8, "validation_block_rows": 57, "predictors": ["fused"] * 26, "mixes_tried": [],
        "validation_microseconds": {"placed": 39.1, "contiguous": 39.3}, "gains_by_source": None, "start": None,
        "runtime_bytes": {"token_rank": 2, "token_scores": 8}, "redundant": 0, "validation_gain": 0.1583,
        "validation_two_standard_errors": 0.0063, "confirmed": True,
        "validation_fanout": {"contiguous": 2.945, "placed": 2.4},
    }  # fmt: skip
    return found | changes


def printed(show):
    with redirect_stdout(io.StringIO()) as stream:
        show()
    return stream.getvalue()


def shown(goal=Goal.BLEND, **changes):
    return printed(lambda: _show(Common(Path("law"), Console()), document(goal, **changes)))


@pytest.fixture(autouse=True)
def _no_width_of_this_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize(
    ("goal", "objectives", "gain"),
    [(Goal.BLEND, "0.8403  0.7003", "0.5174  +0.1583 ± 0.0063"), (Goal.TIME, "127.22  106.02", "?  +0.16 ± 0.01")],
    ids=str,
)
def test_the_layer_column_was_one_letter_wide_and_times_were_cut_at_80_columns(goal, objectives, gain):
    table = shown(goal).split("at best: ")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert re.search(r"^layer  contiguous  placed  found by ", table, re.MULTILINE)
    for number in range(1, 27):
        assert re.search(rf"^{number} +{re.escape(objectives)}  \S.* {re.escape(gain)}$", table, re.MULTILINE)
    assert all(table.count(word) >= 26 for word in ORIGINS[goal].split())


def test_a_pipe_was_80_columns_wide_whatever_columns_said(monkeypatch):
    assert ORIGINS[Goal.TIME] not in shown(Goal.TIME)
    monkeypatch.setenv("COLUMNS", "200")
    assert shown(Goal.TIME).count(ORIGINS[Goal.TIME]) == 26
    for none in ("", "0", "wide"):
        monkeypatch.setenv("COLUMNS", none)
        assert ORIGINS[Goal.TIME] not in shown(Goal.TIME)


def test_numbers_stand_whole_where_the_terminal_is_narrower_than_they_are(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    rows = [["1", "12,345.6789", "two words", "+0.1583 ± 0.0063"]] * 2
    text = printed(lambda: Console().table("t", ["layer", "objective", "found by", "validation gain"], rows))
    for whole in ("12,345.6789", "+0.1583 ± 0.0063"):
        assert text.count(whole) == 2
    assert all(word in text for word in ("layer", "objective", "found", "validation gain"))


def test_columns_and_their_unit_are_explained_where_they_stand():
    text = shown(Goal.TIME)
    assert "at best: no placement can be lower; ?: not known" in text
    assert "validation gain: contiguous less placed in us, 8 validation blocks of 57 rows, ± two standard" in text
    assert "+0.16 ± 0.01 us (two standard errors)" in text
    assert "in us" not in shown()


def test_a_predicted_time_names_the_batch_it_is_of():
    """It stood beside evaluate's, of 1,024 tokens, as if of the same."""
    assert (
        "(speculative, nvlink-h200), validation blocks of 57 rows as batches of 1,024: 39.1 us, contiguous 39.3 us"
        in shown()
    )


@pytest.mark.parametrize(
    ("goal", "for_what"),
    [(Goal.BLEND, "load or locality"), (Goal.TIME, "predicted time")],
    ids=lambda value: str(value),
)
def test_a_confirmed_placement_that_sends_more_rows_said_nothing_of_it(goal, for_what):
    worse = {"contiguous": 2.945, "placed": 3.360}
    said = "tokens reach more ranks than with contiguous experts (3.36 for 2.94): this goal trades that for "
    assert f"{said}{for_what}; --goal fanout does not" in shown(goal, validation_fanout=worse)
    for fanout in (None, {"contiguous": 2.945, "placed": 2.945}):
        assert "reach more ranks" not in shown(goal, validation_fanout=fanout)


# On real artefacts.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two layers of 8 experts chosen in pairs (e, e + 4), none of it known to contiguous ranks."""
    where = tmp_path_factory.mktemp("shown")
    generator = np.random.default_rng(0)
    first = generator.integers(0, 4, (2, 3000))
    np.savez(
        where / "pairs.npz", ids=np.stack([first, first + 4], axis=2).astype(np.uint8), num_experts=8, top_k=2,
        tokens=generator.integers(0, 40, 3000).astype(np.uint32), seq_len=np.full(30, 100, np.int32), vocab_size=40,
        layer_ids=np.array([3, 4], np.uint8),
    )  # fmt: skip
    smoe("import", "pairs.npz", cwd=where)
    smoe("build-tables", cwd=where)
    return where


def place(folder, *options):
    return smoe("cocluster", "--ep", 4, "--effort", "fast", "--jobs", 1, "--force", *options, cwd=folder)


def test_the_validation_fanout_is_a_recount_of_the_validation_rows(folder):
    found = place(folder, "--name", "counted", "--json").json()
    samples = list(open_tables(folder / "smoe-out/tables").samples("validation"))
    sizes = np.diff(samples[0].block_start)
    counted = np.mean([float(mean_fanout(rows.experts.tolist(), np.repeat(range(4), 2))) for rows in samples])
    assert found["validation_fanout"]["contiguous"] == pytest.approx(counted) == 2
    assert found["validation_fanout"]["placed"] == 1
    assert (found["validation_blocks"], found["validation_block_rows"]) == (len(sizes), round(sizes.mean()))


def test_copies_of_experts_have_no_one_fanout(folder):
    assert place(folder, "--name", "copies", "--redundant", 1, "--json").json()["validation_fanout"] is None


def test_after_a_comparison_the_next_step_was_a_placement_that_exists_already(folder):
    compare = ("cocluster", "--ep", 2, "--compare", "--goal", "fanout", "--effort", "fast", "--jobs", 1)
    said = smoe(*compare, cwd=folder).err
    assert "next: smoe cocluster --ep 2 --goal fanout\n" in said
    smoe("cocluster", "--ep", 2, "--goal", "fanout", "--effort", "fast", "--jobs", 1, cwd=folder)
    assert "next: smoe evaluate --placement placement-ep2\n" in smoe(*compare, cwd=folder).err
    smoe("evaluate", "--placement", "placement-ep2", cwd=folder)


def test_where_nothing_is_gained_the_next_step_was_to_rewrite_a_checkpoint_as_it_is(work):
    flat = ("cocluster", "--ep", 2, "--method", "contiguous", "--jobs", 1, "-C", work)
    assert f"next: smoe evaluate --placement placement-ep2 -C {work}\n" in smoe(*flat, cwd=work).err
    smoe("evaluate", "--placement", "placement-ep2", "-C", work, cwd=work)


def test_without_held_out_rows_no_step_is_named_that_would_need_them(folder):
    smoe("build-tables", "--trace", folder / "smoe-out/trace", "-C", "alone", cwd=folder)
    flat = ("cocluster", "--ep", 2, "--method", "contiguous", "--jobs", 1, "-C", "alone")
    assert "next:" not in smoe(*flat, cwd=folder).err


def test_parameters_that_are_not_set_were_listed_and_numbers_had_17_digits(folder):
    place(folder, "--name", "listed", "--theta", "0.15257142857142858")
    text = " ".join(smoe("inspect", "placement-ep4-listed", cwd=folder).out.split())
    listed = re.search(r"parameters: (.*) placement on", text)[1]
    assert not re.search("None|False|True", listed)
    assert {"confirmed yes", "ep 4", "goal blend", "theta 0.1526"} <= set(listed.split(", "))


def test_an_unconfirmed_placement_says_so_when_it_is_looked_at(folder):
    place(folder, "--method", "contiguous", "--name", "flat")
    text = " ".join(smoe("inspect", "placement-ep4-flat", cwd=folder).out.split())
    assert "not confirmed: experts are where they were" in text


def test_a_handful_of_rows_was_called_nothing_to_gain(tmp_path):
    np.savez(tmp_path / "few.npz", ids=np.array([[[0, 5], [1, 4], [0, 5], [2, 7], [3, 6]]], np.uint8), num_experts=8)
    smoe("import", "few.npz", cwd=tmp_path)
    smoe("build-tables", cwd=tmp_path)
    text = smoe("cocluster", "--ep", 2, "--effort", "fast", "--jobs", 1, cwd=tmp_path).out
    assert "nothing can be confirmed on so few validation rows: record more text" in text
