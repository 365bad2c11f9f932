"""Every command shown in README and docs works as it stands, in the order of its page.

Published models are stood in for by bundled ones in a hub cache under their name; prompts are a cut of the fixtures.
"""

import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smoe_profiles.models import BUNDLED, SHORT_NAMES

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
STAND_INS = {"mixtral-8x7b": "tiny-mixtral"}
RUN_ALL = """
import shlex, subprocess, sys
from smoe_cli.app import run
for line in sys.stdin.read().splitlines():
    command, *rest = shlex.split(line)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    code = run(rest) if command == "smoe" else subprocess.run([*torchrun, *rest]).returncode
    assert code == 0, f"exit {code}: {line}"
"""


def shown_commands(page):
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def faster(command):
    """The same command on fewer tokens and with less search: the digits are not what is tested here."""
    if " profile " in command and "--max-tokens" not in command and "--dry-run" not in command:
        return f"{command} --max-tokens 5000"
    if command.startswith("smoe cocluster") and "--effort" not in command:
        return f"{command} --effort fast"
    return command


def stand_in_cache(home):
    for short, bundled in STAND_INS.items():
        repository = home / "hub" / f"models--{SHORT_NAMES[short].hub_id.replace('/', '--')}"
        shutil.copytree(BUNDLED / bundled, repository / "snapshots" / "0" / "", dirs_exist_ok=True)
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text("0")


def test_the_pages_show_commands():
    assert len(shown_commands(ROOT / "README.md")) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_shown_exists(page):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", page.read_text(encoding="utf-8")):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in shown_commands(page):
        assert command.split()[0] in ("smoe", "make", "torchrun"), command


@pytest.mark.parametrize("page", [page for page in PAGES if any("smoe " in c for c in shown_commands(page))], ids=str)
def test_every_command_shown_works(page, tmp_path):
    for name, text in (("prompts", "fit"), ("code", "heldout")):
        with gzip.open(ROOT / f"tests/fixtures/texts/{text}.jsonl.gz", "rt", encoding="utf-8") as file:
            (tmp_path / f"{name}.jsonl").write_text("".join(line for line, _ in zip(file, range(40), strict=False)))
    shutil.copy(ROOT / "tests/fixtures/routing/gptoss20b_layers.npz", tmp_path / "routing.npz")
    (tmp_path / "smoe.toml").write_text("".join(re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.M | re.S)))
    stand_in_cache(tmp_path / "hf")
    commands = [faster(command) for command in shown_commands(page) if not command.startswith("make ")]
    env = os.environ | {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_CACHE": str(tmp_path / "hf/hub"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input="\n".join(commands),
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
