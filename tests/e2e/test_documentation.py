"""Every command shown in README, docs and the CI example works as it stands, in the order of its page.

Commands stand in blocks of `sh`. Each page has a folder of its own, with prompts and an engine's dumps, and the hub's
cache has a stand-in for each published model. A page that begins as another does goes on from a copy of what that made.
"""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from smoe_profiles.models import BUNDLED, SHORT_NAMES
from tests import engine_writers
from tests.conftest import smoe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
WORKFLOW = ROOT / "examples/ci/smoe.yml"
HOW_TO = DOCS / "how-to"
FOLDER_PAGE = HOW_TO / "index.md"
"""Its commands make the folder in which the how-to pages start that say so."""

FENCES = {"sh", "toml", "yaml", "json", "python", "text", ""}
"""What a block may be marked as: a command cannot hide as `bash` or `console`."""

NOT_RUN = {
    "make": "a target is a run of its own; that it exists is tested",
    "pip": "the tests run in the environment that it would make",
    "export": "for the engine started in the next line",
    "curl": "asks a running SGLang server",
    "python -m sglang.launch_server": "needs SGLang and GPUs",
    "trtllm-serve": "needs TensorRT-LLM and GPUs",
    "sbatch": "needs a Slurm cluster",
    "ray": "starts a cluster; tests/ray has one",
}
"""How commands begin that cannot be run here, and why."""

PARSED = {"--ray": "needs a Ray cluster; tests/ray has one"}
"""Options of smoe that cannot be run here, and why: such a command is parsed by the program, and no more."""

TOKENS = 5000
MOST_TOKENS = 16_000
BUNDLED_AS = {"mixtral-8x7b": "tiny-mixtral"}
PLANTED = "deepseek-v2"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shown_commands(page):
    """The page's own commands, one a line."""
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line]


def workflow_commands():
    steps = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["placement"]["steps"]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def why_not_run(command):
    """The reason that stands above, or None."""
    return next((reason for start, reason in NOT_RUN.items() if f"{command} ".startswith(f"{start} ")), None)


def faster(command):
    """The same command on fewer tokens, with less search, in this process: the digits are not what is tested here."""
    if " profile " in command and "--dry-run" not in command:
        asked = re.search(r" --max-tokens (\d+)", command)
        if not asked or int(asked[1]) > MOST_TOKENS:
            command = command.replace(asked[0] if asked else "", "") + f" --max-tokens {TOKENS}"
    if command.startswith("smoe cocluster") and "--effort" not in command:
        command += " --effort fast"
    if command.startswith(("smoe cocluster", "smoe build-tables")) and not re.search("--jobs|--ray", command):
        command += " --jobs 1"
    return command


def path_of(page):
    """All commands that are run for a page: those of the folder it starts in, and its own."""
    own = workflow_commands() if page == WORKFLOW else shown_commands(page)
    first = shown_commands(FOLDER_PAGE) if "[this folder](index.md)" in page.read_text(encoding="utf-8") else []
    return [faster(command) for command in (*first, *own) if not why_not_run(command)]


PATHS = {page: path for page in (*PAGES, WORKFLOW) if (path := path_of(page))}
STARTS = Counter(tuple(path[:length]) for path in PATHS.values() for length in range(len(path) + 1))
"""Beginnings of paths, and how many pages have them."""


def group_limited_routing():
    """Planted routing under DeepSeek-V2's rule: 160 experts, 3 of 8 groups by their best expert, then 6 experts."""
    generator = np.random.default_rng(0)
    vocab, lengths = 60, (128,) * 16
    tokens = generator.integers(0, vocab, sum(lengths))
    scores = generator.random((3, vocab, 160))[:, tokens] + generator.random((3, len(tokens), 160)) / 5
    best = scores.reshape(3, len(tokens), 8, 20).max(axis=3).argsort(axis=2)[:, :, :5]
    for group in range(8):
        scores[..., group * 20 : group * 20 + 20][(best == group).any(axis=2)] = -1
    experts = scores.argsort(axis=2)[:, :, :-7:-1]
    return engine_writers.Routing(160, vocab, experts, np.zeros(experts.shape, np.float16), tokens, lengths)


def write_engine_files(folder, known):
    (folder / "dumps").mkdir()
    engine_writers.sglang_per_token(folder / "dumps", known)
    engine_writers.trtllm_raw(folder, known)
    (reply,) = engine_writers.vllm_reply(folder, known)
    reply.rename(folder / "replies.jsonl")


def write_checkpoint(folder, known):
    """What is asked of a published model here: its config, input embedding and routers."""
    groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    engine_writers.model_folder(folder, known, **groups)
    generator = np.random.default_rng(1)
    names = ["model.embed_tokens", *(f"model.layers.{layer}.mlp.gate" for layer in known.layer_ids)]
    rows = [known.vocab_size, *(known.num_experts for _ in known.layer_ids)]
    tensors = {
        f"{name}.weight": generator.random((size, 32), np.float32) for name, size in zip(names, rows, strict=True)
    }
    save_file(tensors, folder / "model.safetensors")


class Paths:
    """Runs the pages' commands. done: beginnings of paths that several pages have -> a folder as they leave it."""

    def __init__(self, work):
        self.work = work
        self.done = {(): work / "start"}

    def run(self, page):
        path = PATHS[page]
        begun = max(length for length in range(len(path) + 1) if tuple(path[:length]) in self.done)
        folder = self._copy(self.done[tuple(path[:begun])])
        if settings := blocks(page, "toml"):
            (folder / "smoe.toml").write_text(settings[0])
        for length in range(begun, len(path)):
            perform(path[length], folder)
            beginning = tuple(path[: length + 1])
            if STARTS[beginning] > 1:
                self.done[beginning] = self._copy(folder)
        return folder

    def _copy(self, folder):
        """Artefacts are published whole and never written into, so links to their files will do."""
        copy = self.work / f"folder-{len(list(self.work.iterdir()))}"
        return Path(shutil.copytree(folder, copy, copy_function=os.link))


def perform(command, folder):
    words = shlex.split(command)
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return
    assert words[0] == "smoe", command
    if PARSED.keys() & set(words):
        parse(words[1:])
        return
    words = [found for word in words for found in sorted(map(str, folder.glob(word))) or [word]]
    smoe(*words[1:], cwd=folder)


def parse(words):
    import typer

    from smoe_cli.app import app

    group = typer.main.get_command(app)
    group.commands[words[0]].make_context(words[0], words[1:])


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    work = tmp_path_factory.mktemp("pages")
    start = work / "start"
    start.mkdir()
    for name, text in (("prompts", "fit"), ("code", "heldout")):
        with gzip.open(ROOT / f"tests/fixtures/texts/{text}.jsonl.gz", "rt", encoding="utf-8") as file:
            (start / f"{name}.jsonl").write_text("".join(line for line, _ in zip(file, range(40), strict=False)))
    shutil.copy(ROOT / "tests/fixtures/routing/gptoss20b_layers.npz", start / "routing.npz")
    known = group_limited_routing()
    write_engine_files(start, known)
    hub = Path(os.environ["HF_HOME"]) / "hub"  # of these tests alone, see tests/conftest.py
    folders = {
        short: hub / f"models--{SHORT_NAMES[short].hub_id.replace('/', '--')}" for short in (*BUNDLED_AS, PLANTED)
    }
    for folder in folders.values():
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text("0")
    write_checkpoint(folders[PLANTED] / "snapshots/0", known)
    for short, bundled in BUNDLED_AS.items():
        shutil.copytree(BUNDLED / bundled, folders[short] / "snapshots/0")
    yield Paths(work)
    for folder in folders.values():
        shutil.rmtree(folder)


@pytest.mark.parametrize("page", PATHS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_shown_works(page, paths):
    paths.run(page)


def test_the_bounds_of_the_ci_example_lie_between_contiguous_and_what_was_reached(paths):
    measured = json.loads((paths.run(WORKFLOW) / "smoe-out/evaluation-ep8/evaluation.json").read_text())
    contiguous = measured["total"]["contiguous"]["none"]["rule"]
    bounds = [(kind, *text.split("=")) for text, kind in bounds_of(workflow_commands())]
    assert {kind for kind, _, _ in bounds} == {"--fail-under", "--fail-over"}
    for kind, figure, bound in bounds:
        missed = contiguous[figure] < float(bound) if kind == "--fail-under" else contiguous[figure] > float(bound)
        price = figure == "load_imbalance"  # contiguous experts are even; the bound says how uneven placed ones may be
        assert missed or price, f"{kind} {figure}={bound}: contiguous has {contiguous[figure]}"


def test_the_ci_page_goes_through_the_example():
    assert shown_commands(HOW_TO / "ci.md") == [command for command in workflow_commands() if not why_not_run(command)]


def test_code_quoted_from_the_table_of_families_stands_in_it():
    table = (ROOT / "profiles/smoe_profiles/families/table.py").read_text(encoding="utf-8")
    quoted = blocks(HOW_TO / "families.md", "python")
    assert quoted
    assert all(block in table for block in quoted)


def bounds_of(commands):
    words = [word for command in commands for word in shlex.split(command)]
    return [(words[index + 1], word) for index, word in enumerate(words) if word.startswith("--fail-")]


def test_the_pages_show_commands():
    assert len(shown_commands(ROOT / "README.md")) > 10
    assert len(PATHS) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_stand_where_they_are_found(page):
    text = page.read_text(encoding="utf-8")
    opened = re.findall(r"^( *)(```+|~~~+)(\S*)", text, re.MULTILINE)
    assert all(not indent and fence == "```" and kind in FENCES for indent, fence, kind in opened), opened
    for block in [*blocks(page, "text"), *blocks(page, "")]:
        assert not re.search(r"^(smoe|make|torchrun) ", block, re.MULTILINE), block
    for command in shown_commands(page):
        assert command.split()[0] in ("smoe", "torchrun") or why_not_run(command), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_make_target_shown_exists(page):
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make (\w+)", text) + re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_no_reason_for_not_running_stands_without_a_command():
    shown = [command for page in PAGES for command in shown_commands(page)] + workflow_commands()
    for start in NOT_RUN:
        assert any(f"{command} ".startswith(f"{start} ") for command in shown), start
    for option in PARSED:
        assert any(option in shlex.split(command) for command in shown), option
