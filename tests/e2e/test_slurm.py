"""The Slurm example: its scripts run by a plain shell, one array task after the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples/slurm"
NOUNS = ("lid", "pan", "cup", "tin", "jar")


def submit(script, *arguments, task=1):
    """A script as Slurm runs it, with the variables that it sets."""
    variables = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | variables | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())["parameters"]


@pytest.mark.slow
def test_array_tasks_record_count_and_place(tmp_path):
    texts = [f"A {noun} and {number} more, then the {noun} again. " * 3 for number in range(8) for noun in NOUNS]
    (tmp_path / "prompts-1.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    submit("record.sh", tmp_path, "tiny-mixtral")
    for share in (2, 1):
        submit("count.sh", tmp_path, 2, task=share)
    submit("place.sh", tmp_path, 2)
    recorded = manifest(tmp_path / "part-1/trace")["rows"]
    assert manifest(tmp_path / "tables")["rows"] == {part: recorded[part] for part in ("fit", "validation")}
    assert manifest(tmp_path / "placement-ep2")["ep"] == 2
