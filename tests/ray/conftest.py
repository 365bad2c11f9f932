"""A planted trace, tables and a placement made by one process; a Ray cluster of two nodes with a core each."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}

from smoe_profiles.artefact import publish
from smoe_profiles.trace import Rows, TraceLayer
from smoe_profiles.trace_writer import TraceWriter
from tests.profiles.conftest import IDENTITY, SOURCES, trace_parameters
from tests.profiles.tables_by_hand import contents

LAYERS = [TraceLayer(number, 64, 8) for number in range(6)]
ROWS, VOCAB, KINDS = 720_000, 2000, 97
"""More activations than one process would count alone."""

SECONDS = 240

WORKING = "ray::smoe:"
"""How Ray titles the processes of smoe's tasks."""


def publish_planted_trace(path):
    """Every kind of token id has sixteen favourite experts, of which a row uses eight that stand side by side."""
    generator = np.random.default_rng(0)
    token_id = generator.integers(0, VOCAB, ROWS).astype(np.uint32)
    experts = []
    for layer in LAYERS:
        favourites = np.argsort(generator.random((KINDS, layer.num_experts)), axis=1)[:, : 2 * layer.top_k]
        picked = (generator.integers(0, 2 * layer.top_k, (ROWS, 1)) + np.arange(layer.top_k)) % (2 * layer.top_k)
        experts.append(np.take_along_axis(favourites[token_id % KINDS], picked, axis=1).astype(np.uint16))
    sequence = (np.arange(ROWS) // 512).astype(np.uint32)
    rows = Rows(
        sequence=sequence,
        position=(np.arange(ROWS) % 512).astype(np.uint32),
        token_id=token_id,
        phase=np.zeros(ROWS, np.int16),
        source=(sequence // 3 % 2).astype(np.int16),
        split=np.array([0, 0, 0, 2, 0, 0, 0, 1, 0, 2], np.int16)[sequence % 10],
        experts=experts,
        weights=[None] * len(LAYERS),
    )
    shape = [{"id": layer.id, "num_experts": layer.num_experts, "top_k": layer.top_k} for layer in LAYERS]
    with publish(path, "trace", parameters={}, model=IDENTITY | {"router_sha256": None, "layers": shape}) as draft:
        writer = TraceWriter(draft.path, LAYERS, SOURCES)
        writer.append(rows)
        writer.close()
        draft.parameters |= trace_parameters(LAYERS, writer.rows, VOCAB)


def begin(*arguments, cwd):
    """One smoe command in a process of its own, its output piped."""
    command = [sys.executable, "-m", "smoe_cli", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, code=0):
    """Wait for a command; returns its stdout and stderr. Fails with both if the exit code is another."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()  # for one that did not end in time
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
    return SimpleNamespace(out=out, err=err)


def run(*arguments, cwd, code=0):
    return finish(begin(*arguments, cwd=cwd), code)


def until(found):
    """What a function finds once it finds something; looked for again and again, at most SECONDS long."""
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        if answer := found():
            return answer
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def below(pid, title):
    """Processes below `pid` whose command line has `title`."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass  # it has just ended
    return found


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """A working folder whose tables and placement one process made, and their bytes."""
    folder = tmp_path_factory.mktemp("alone")
    publish_planted_trace(folder / "trace")
    run("build-tables", "--jobs", 1, "-C", ".", cwd=folder)
    run("cocluster", "--ep", 4, "--effort", "fast", "--jobs", 1, "-C", ".", cwd=folder)
    placed = contents(folder / "placement-ep4")
    return SimpleNamespace(path=folder, tables=contents(folder / "tables"), placement=placed)


@pytest.fixture
def work(alone, tmp_path):
    """A working folder with the same trace and tables, and no placement."""
    shutil.copytree(alone.path / "trace", tmp_path / "trace")
    shutil.copytree(alone.path / "tables", tmp_path / "tables")
    return tmp_path


@pytest.fixture(scope="module")
def cluster():
    """A head and one more node, a core each, of one machine. What they write goes with them."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="smoe-ray-")  # short: socket paths have at most 107 characters
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "temp_dir": folder, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield nodes
    nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def raylet(node):
    """The process id of a node's raylet, under which its workers run."""
    return node.all_processes["raylet"][0].process.pid


def at_work(cluster):
    """Processes that do smoe's tasks, on whichever node."""
    return [task for node in cluster.list_all_nodes() for task in below(raylet(node), WORKING)]


def is_clean(folder: Path):
    """Whether nothing half done lies in a working folder."""
    return not [path.name for path in folder.iterdir() if path.name.startswith(".")]
