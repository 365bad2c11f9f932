"""What reaches a terminal, a pipe or a script: tables of 80 columns, plain text where asked for, one JSON anywhere."""

import fcntl
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from smoe_cli import errors
from smoe_cli.app import run
from smoe_cli.commands.bench import _show as show_bench
from smoe_cli.commands.cocluster import _show_comparison
from smoe_cli.console import WIDTH, Console
from smoe_cli.options import Common

SMOE = [sys.executable, "-m", "smoe_cli"]


def environment(**variables):
    """Unbuffered text streams of Python lose what a pipe does not take at once, and say nothing."""
    unwanted = ("SMOE_", "COLUMNS", "NO_COLOR", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return kept | {"HF_HUB_OFFLINE": "1", "TERM": "xterm-256color", **variables}


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and keeps what was written."""

    encoding: ClassVar = "utf-8"

    def isatty(self):
        return True


def printed(show, stream=None):
    stream = stream or io.StringIO()
    with redirect_stdout(stream):
        show()
    return stream.getvalue()


# Tables.


@pytest.mark.parametrize("first", ["3", "placed+shuffled (early-gate)", "language_model.layers.23.feed_forward" * 2])
def test_a_table_fits_80_columns_and_folds_names_not_numbers(first):
    columns = ["state", "lar", "fan-out", "remote fan-out", "load imbalance", "validation gain", "layer us"]
    numbers = ["0.1250", "12.345", "11.111", "12.123", "+0.1230 ± 0.0050", "12,345.6"]
    text = printed(lambda: Console().table("a title " * 20, columns, [[first, *numbers]] * 3))
    assert max(map(len, text.splitlines())) <= WIDTH
    for number in numbers:
        assert text.count(f"{number} ") + text.count(f"{number}\n") == 3
    assert "".join(text.split()).count("a" + "title") == 20


def test_the_comparison_of_all_methods_fits_80_columns(tmp_path):
    found = {"searched": -1.23456, "seconds": 12345.6}
    found |= {part: {"objective": -1.2345, "lar": 0.1, "fanout": 12.3, "load_imbalance": 11.2} for part in PARTS}
    methods = dict.fromkeys(("contiguous", "soft 2-D k-means + descent", "balanced k-means (Occult)"), found)
    document = {"methods": methods, "goal": "blend", "ep": 256, "layers": 59, "batch": 1024, "skipped": {}}
    text = printed(lambda: _show_comparison(Common(tmp_path, Console()), document))
    assert max(map(len, text.splitlines())) <= WIDTH


PARTS = ("fit", "validation", "heldout")


def test_the_bench_fits_80_columns(tmp_path):
    one = {"tokens": 1048576, "case": "placed+shuffled speculative, token", "local_share": 0.5, "total_rows": 123456789}
    one |= {"total": 12.345678, "communication_share": 0.5}
    workload = {"origin": "layer 30 of a rather long folder's name, 1,234,567 held-out rows", "results": [one]}
    document = {"machine": {"ranks": 64, "device": "NVIDIA H200", "date": "2026-01-01"}, "workloads": {"w": workload}}
    workload["ratios"] = []
    text = printed(lambda: show_bench(Common(tmp_path, Console()), document))
    table = text.split("rows: through")[0]
    assert max(map(len, table.splitlines())) <= WIDTH
    assert "123,456,789" in table


def test_every_model_of_the_list_stands_in_one_line():
    text = printed(lambda: run(["models"]))
    listed = json.loads(printed(lambda: run(["models", "--json"])))["models"]
    assert max(map(len, text.splitlines())) <= WIDTH
    for model in listed:
        row = rf"^{re.escape(model['model'])} .*{len(model['moe_layers'])} .*(yes|no) *$"
        assert re.search(row, text, re.MULTILINE)


def test_moe_layers_are_numbers_in_json():
    models = {model["model"]: model for model in json.loads(printed(lambda: run(["models", "--json"])))["models"]}
    assert models["deepseek-v2"]["moe_layers"] == list(range(1, 60))


@pytest.mark.parametrize(
    ("variables", "styled"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=str
)
def test_a_terminal_is_drawn_on_unless_asked_not_to(variables, styled, monkeypatch):
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    text = printed(lambda: Console().table("title", ["a", "b"], [["1", "2"]]), Terminal())
    assert ("\x1b" in text) is styled


def test_a_pipe_is_plain_even_where_colour_is_forced(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "CLICOLOR_FORCE"):
        monkeypatch.setenv(name, "1")
    assert "\x1b" not in printed(lambda: Console().table("title", ["a", "b"], [["1", "2"]]))


def test_markup_and_emoji_codes_are_printed_as_they_stand(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = "[bold]:smile: [/nothing] [link=x]"
    for stream in (io.StringIO(), Terminal()):
        found = printed(lambda: Console().table(text, [text, "n"], [[text, "1"]]), stream)
        assert found.count(text) == 3


# JSON.


SOURCE = "[red]:smile: & [link]"


@pytest.mark.parametrize("name", ["[red]ordner[-red]", ":smile:", "a b\n'c'", "größe"])
def test_json_is_the_same_at_any_width_whatever_names_are_in_it(name, tmp_path, monkeypatch):
    rows = np.random.default_rng(0).permuted(np.tile(np.arange(8), (2, 300, 1)), axis=2)[:, :, :2]
    np.savez(tmp_path / "rows.npz", ids=rows, tokens=np.arange(300) % 7)
    arguments = [str(tmp_path / "rows.npz"), "--source", SOURCE, "--force", "-C", str(tmp_path / name)]
    found = set()
    for variables, stream in ({"COLUMNS": "20"}, io.StringIO()), ({"COLUMNS": "300", "TERM": "xterm"}, Terminal()):
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        with redirect_stderr(Terminal()):
            found.add(printed(lambda: run(["import", *arguments, "--json"]), stream))
    assert len(found) == 1
    document = json.loads(found.pop())
    assert (document["path"], document["sources"]) == (str(tmp_path / name / "trace"), [SOURCE])
    monkeypatch.setenv("COLUMNS", "80")
    for stream in (io.StringIO(), Terminal()):
        text = printed(lambda: run(["inspect", "-C", str(tmp_path / name)]), stream)
        assert len(re.findall(f"^{re.escape(SOURCE)} +300", text, re.MULTILINE)) == 1


# Progress.


def advanced(stream, unit="layers", total=4):
    with redirect_stderr(stream), Console().progress("placing", total, unit) as advance:
        for _ in range(4):
            advance(1)
    return stream.getvalue()


def test_progress_says_rate_and_time_left(monkeypatch):
    monkeypatch.setattr("smoe_cli.console.PLAIN_INTERVAL", 0)
    lines = advanced(io.StringIO()).splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"placing: 1 of 4 layers, [\d,.]+/s, \d+ s left", lines[0])
    assert re.fullmatch(r"placing: 1 layers, [\d,.]+/s", advanced(io.StringIO(), total=None).splitlines()[0])


def test_bytes_are_counted_in_megabytes(monkeypatch):
    monkeypatch.setattr("smoe_cli.console.PLAIN_INTERVAL", 0)
    stream = io.StringIO()
    with redirect_stderr(stream), Console().progress("writing", 7_000_000, "bytes") as advance:
        advance(3_500_000)
    assert re.fullmatch(r"writing: 4 of 7 MB, [\d,.]+/s, 0 s left\n", stream.getvalue())


def test_a_dumb_terminal_gets_lines_and_a_quiet_one_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("smoe_cli.console.PLAIN_INTERVAL", 0)
    assert "\x1b" not in advanced(Terminal())
    assert "\r" not in advanced(Terminal())
    with redirect_stderr(Terminal()) as stream, Console(quiet=True).progress("placing", 4, "layers") as advance:
        advance(1)
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" in advanced(Terminal())


# The next command.


@pytest.mark.parametrize("folder", ["smoe-out", "a b", "it's", "$HOME", "[x]"])
def test_the_next_command_can_be_pasted_into_a_shell(folder):
    words = Common(Path(folder), Console()).next("evaluate", "--placement", "placement-ep8-copy of 'mine'")
    shell = subprocess.run(["sh", "-c", f'printf "%s\\n" {words}'], capture_output=True, text=True, check=True)
    placed = [] if folder == "smoe-out" else ["-C", folder]
    assert shell.stdout.splitlines() == ["smoe", "evaluate", "--placement", "placement-ep8-copy of 'mine'", *placed]


# Ends that are no ends.


def test_a_library_that_ends_the_program_is_a_failure_whatever_code_it_names(monkeypatch, capsys):
    for code in (0, None, "text", 141):
        monkeypatch.setattr("smoe_profiles.models.bundled_names", lambda code=code: sys.exit(code))
        assert run(["models"]) == errors.BUG
        assert f"SystemExit({code!r})" in capsys.readouterr().err


def test_shell_completion_leaves_with_0():
    script = subprocess.run(
        [*SMOE, "--show-completion", "bash"], capture_output=True, text=True, check=False,
        env=environment(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"),
    )  # fmt: skip
    assert script.returncode == 0, script.stderr
    assert "complete" in script.stdout


MANY = """
from smoe_cli.app import app, main
from smoe_cli.options import Common, command

def many(common: Common) -> None:
    rows = [[str(number), "x" * 60] for number in range(1000)]
    common.console.result({"rows": rows}, lambda: common.console.table("many", ["number", "text"], rows))

app.command("many")(command(many))
main()
"""


@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "table"])
def test_a_reader_that_leaves_in_the_middle_is_no_error_message(arguments):
    """The reader takes one byte; the pipe holds less than the answer."""
    read, write = os.pipe()
    assert fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096) == 4096
    command = [sys.executable, "-c", MANY, "many", *arguments]
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, env=environment()) as process:
        os.close(write)
        os.read(read, 1)
        os.close(read)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (errors.BROKEN_PIPE, b"")


NOTED = """
from smoe_cli.app import main
from smoe_cli.console import Console
shown = Console.result
Console.result = lambda console, *rest: (console.note("a note"), shown(console, *rest))
main()
"""


def test_a_closed_stderr_puts_no_note_on_stdout():
    command = ["/bin/sh", "-c", 'exec "$0" "$@" 2>&-', sys.executable, "-c", NOTED, "models", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["models"]


def test_ctrl_c_kept_down_shows_no_traceback_and_leaves_no_artefact(tmp_path):
    """The first one stops the work, the next ones arrive while it is cleaned up and while Python ends."""
    command = [*SMOE, "profile", "--model", "tiny-mixtral", "--max-tokens", "400000", "-C", tmp_path / "out"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        said = process.stderr.readline()  # it runs: signals are ours from here on
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        said += process.stderr.read()
    assert process.returncode in (errors.INTERRUPTED, -signal.SIGINT), said
    assert "Traceback" not in said
    assert not (tmp_path / "out" / "trace").exists()


def test_a_narrow_terminal_changes_the_table_not_the_numbers():
    """Through a real terminal of 40 columns."""
    main, other = pty.openpty()
    narrow = environment(COLUMNS="40", NO_COLOR="1")
    process = subprocess.Popen([*SMOE, "models", "--quiet"], stdout=other, stderr=subprocess.PIPE, env=narrow)
    os.close(other)
    text = ""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        text += piece.decode()
    os.close(main)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, b"")
    assert max(len(line) for line in text.splitlines()) <= 40


SWALLOWED = """
import os, signal
from smoe_cli import signals
from smoe_cli.console import Console
from smoe_cli.errors import Interrupted, Terminated

signals.listen()
try:
    os.kill(os.getpid(), signal.{name})
except BaseException:  # as around an optional import
    pass
try:
    with Console(quiet=True).progress("layers", 2, "layers") as advance:
        advance(1)
except {raised}:
    print("stopped")
"""


@pytest.mark.parametrize(("name", "raised"), [("SIGTERM", "Terminated"), ("SIGINT", "Interrupted")])
def test_a_signal_that_a_library_swallowed_stops_the_command_at_its_next_step(name, raised):
    """A profile that was told to stop while its model was loaded went on to its end."""
    script = SWALLOWED.format(name=name, raised=raised)
    command = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler){script}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert (done.stdout, done.returncode) == ("stopped\n", 0), done.stderr
