"""Tasks on local processes: results in order, killed processes replaced, errors of a task passed on."""

import os

import numpy as np
import pytest

from smoe_profiles.errors import MachineError
from smoe_profiles.table_writer import _chunks
from smoe_profiles.trace import TraceLayer
from smoe_profiles.workers import LocalWorkers
from tests.profiles.conftest import random_rows
from tests.profiles.killed_tasks import here, square
from tests.profiles.tables_by_hand import contents, publish_rows, whole


def run(jobs, numbers, folder, deaths=0):
    """Squares, the processes that made them, and what was said meanwhile."""
    done, notes = [], []
    workers = LocalWorkers(jobs, notes.append)
    found = workers.run(square, [(number, folder, deaths) for number in numbers], done.append)
    assert sorted(done) == sorted(found)
    return [result for result, _ in found], {process for _, process in found}, notes


def test_one_job_is_this_process_itself(tmp_path):
    assert run(1, range(6), tmp_path) == ([0, 1, 4, 9, 16, 25], {os.getpid()}, [])


def test_a_killed_process_costs_a_retry_and_not_the_run(tmp_path):
    found, processes, notes = run(2, range(6), tmp_path, deaths=1)
    assert found == [0, 1, 4, 9, 16, 25]
    assert os.getpid() not in processes
    assert [note[:27] for note in notes] == ["a worker process was killed"]


def test_processes_that_are_killed_every_time_end_the_run_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("smoe_profiles.workers.RETRIES", 1)
    with pytest.raises(MachineError, match=r"killed 2 times.*fewer --jobs"):
        run(2, [3, 3], tmp_path, deaths=100)


def test_what_a_task_raises_ends_the_run_as_it_is(tmp_path):
    with pytest.raises(ValueError, match="-1 is below zero"):
        run(2, [1, -1], tmp_path)


def test_relative_paths_mean_the_same_after_the_folder_was_changed(tmp_path, monkeypatch):
    for name in ("one", "two"):  # the same processes serve both
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert LocalWorkers(2).run(here, [(), ()], lambda _: None) == [str(tmp_path / name)] * 2


class Twice(LocalWorkers):
    """Every task is run twice, as where a worker given up for lost runs on."""

    count = 3

    def run(self, function, tasks, done):
        results = [function(*task) for task in [*tasks, *tasks]][: len(tasks)]
        for result in results:
            done(result)
        return results


def test_layers_counted_twice_are_the_same_bytes(tmp_path, monkeypatch):
    layers = [TraceLayer(number, 8, 2) for number in range(6)]
    trace = publish_rows(tmp_path / "trace", layers, [random_rows(np.random.default_rng(0), 500, layers)])
    monkeypatch.setattr("smoe_profiles.table_writer.PROCESS_WORK", 1)
    assert [len(chunk) for chunk in _chunks(6, Twice.count)] == [2, 2, 2]
    expected = whole(tmp_path / "once", trace)
    found = whole(tmp_path / "twice", trace, workers=Twice())
    assert contents(found.artefact.path) == contents(expected.artefact.path)


def test_many_layers_make_small_tasks_so_that_a_lost_one_is_soon_done_again():
    assert max(len(chunk) for chunk in _chunks(59, 2)) <= 10
    assert _chunks(59, 1) == [range(59)]
