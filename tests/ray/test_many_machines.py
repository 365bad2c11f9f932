"""Layers on two Ray nodes and on local processes, some of which are killed: the same bytes as one process writes.

`make ray`; needs smoe[ray].
"""

import json
import os
import re
import signal
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tests.profiles.tables_by_hand import contents
from tests.ray.conftest import WORKING, at_work, begin, below, finish, is_clean, raylet, run, until

COUNT = ("build-tables", "--force", "-C", ".")
PLACE = ("cocluster", "--ep", 4, "--effort", "fast", "-C", ".")


def test_two_nodes_give_the_bytes_of_one_process(cluster, alone, work):
    counted = run(*COUNT, "--ray", cluster.address, cwd=work)
    placed = run(*PLACE, "--ray", cluster.address, cwd=work)
    assert "2 cores of 2 Ray nodes" in counted.err
    assert "lost" not in counted.err + placed.err
    assert contents(work / "tables") == alone.tables
    assert contents(work / "placement-ep4") == alone.placement


def test_shards_are_counted_and_merged_on_the_cluster(cluster, alone, work):
    for shard in ("1/2", "2/2"):
        run("build-tables", "--shard", shard, "--ray", cluster.address, "-C", ".", cwd=work)
    run("build-tables", "--merge", "--force", "--ray", cluster.address, "-C", ".", cwd=work)
    assert contents(work / "tables") == alone.tables


@pytest.mark.parametrize("command", [COUNT, PLACE], ids=["build-tables", "cocluster"])
def test_a_killed_ray_worker_costs_a_retry_and_not_the_run(cluster, alone, work, command):
    process = begin(*command, "--json", "--ray", cluster.address, cwd=work)
    until(lambda: at_work(cluster))[0].kill()
    done = finish(process)
    assert "a Ray worker was lost" in done.err
    assert json.loads(done.out)["path"]  # nothing of Ray's on stdout
    assert contents(work / "tables") == alone.tables
    assert contents(work / "placement-ep4") == (alone.placement if command == PLACE else {})


def test_a_killed_node_costs_a_retry_and_not_the_run(cluster, alone, work):
    node = cluster.add_node(num_cpus=1)
    command = begin(*PLACE, "--ray", cluster.address, cwd=work)
    until(lambda: below(raylet(node), WORKING))
    cluster.remove_node(node, allow_graceful=False)
    said = finish(command).err
    assert "3 cores of 3 Ray nodes" in said
    assert "a Ray worker was lost" in said
    assert contents(work / "placement-ep4") == alone.placement


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"])
def test_an_interrupt_ends_remote_tasks_and_leaves_nothing(cluster, work, ending, code):
    command = begin(*PLACE, "--ray", cluster.address, cwd=work)
    tasks = until(lambda: at_work(cluster))
    command.send_signal(ending)
    assert "nothing was left half written" in finish(command, code).err
    until(lambda: not any(task.is_running() for task in tasks))
    assert is_clean(work)
    assert not (work / "placement-ep4").exists()


def test_an_interrupted_count_ends_its_writers_before_it_cleans_up(cluster, work):
    command = begin(*COUNT, "--ray", cluster.address, cwd=work)
    until(lambda: at_work(cluster) and list(work.glob(".tables.partial/*.parquet")))
    command.send_signal(signal.SIGINT)
    finish(command, 130)
    time.sleep(1)
    assert is_clean(work)


@pytest.mark.parametrize(("name", "version"), [("smoe", "0.0.9"), ("numpy", "1.26.0")])
def test_a_node_with_another_version_is_refused_before_any_work(cluster, work, tmp_path_factory, name, version):
    other = tmp_path_factory.mktemp("other")
    facts = other / f"{name}-{version}.dist-info/METADATA"
    facts.parent.mkdir()
    facts.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(other)})
    try:
        said = run(*PLACE, "--ray", cluster.address, cwd=work, code=6).err
    finally:
        cluster.remove_node(node)
    assert re.search(rf"Ray node {re.escape(socket.gethostname())} has {name} {version}.*, this machine ", said)
    assert "placing" not in said


def test_an_address_that_nobody_listens_at_is_said_at_once(work):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = time.monotonic()
    assert f"--ray {address}: nobody answers there" in run(*PLACE, "--ray", address, cwd=work, code=6).err
    assert time.monotonic() - started < 60


def test_a_listener_that_says_nothing_is_given_up(work):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "nobody answers there (timed out)" in run(*PLACE, "--ray", address, cwd=work, code=6).err


def test_another_server_is_told_apart_from_a_cluster(work):
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        said = run(*PLACE, "--ray", address, cwd=work, code=6).err
        server.shutdown()
    assert f"error: --ray {address}: what answers there is no Ray cluster" in said


def test_a_killed_local_process_costs_a_retry_and_not_the_run(alone, work):
    command = begin(*PLACE, "--jobs", 2, cwd=work)
    os.kill(until(lambda: below(command.pid, "LokyProcess"))[0].pid, signal.SIGKILL)
    assert "a worker process was killed" in finish(command).err
    assert contents(work / "placement-ep4") == alone.placement


def test_an_interrupt_ends_local_processes_and_leaves_nothing(work):
    command = begin(*PLACE, "--jobs", 2, cwd=work)
    processes = until(lambda: below(command.pid, "LokyProcess"))
    command.send_signal(signal.SIGINT)
    finish(command, 130)
    until(lambda: not any(process.is_running() for process in processes))
    assert is_clean(work)
