"""Who works on independent tasks: this process, or several on this machine; `smoe_cli.workers` adds a Ray cluster.

A task whose worker was killed is given out again, so a task must give, and write, the same each time it is run.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from smoe_profiles.errors import MachineError

RETRIES = 3
"""How often tasks are given out again before the run gives up."""

Result = TypeVar("Result")
Task = tuple[Any, ...]


class Workers(Protocol):
    """Runs tasks, wherever; the results are the same for any number of workers."""

    @property
    def count(self) -> int:
        """How many tasks are worked on at a time."""

    def run(
        self, function: Callable[..., Result], tasks: Sequence[Task], done: Callable[[Result], None]
    ) -> list[Result]:
        """function(*task) of every task, in the tasks' order; done(result) as each is finished.

        Raises what the function raises, or MachineError where workers keep dying.
        """

    def everywhere(self, check: Callable[..., None], *arguments: Any) -> None:
        """Run a check on every other machine that tasks may go to. Raises what the check raises."""


def _say_nothing(_message: str) -> None: ...


@dataclass(frozen=True)
class LocalWorkers:
    """Processes of this machine. jobs: how many, 0: one a core; 1: this process itself. note: told of what was lost."""

    jobs: int = 1
    note: Callable[[str], None] = _say_nothing

    @property
    def count(self) -> int:
        from joblib import cpu_count

        return self.jobs or int(cpu_count())

    def run(
        self, function: Callable[..., Result], tasks: Sequence[Task], done: Callable[[Result], None]
    ) -> list[Result]:
        found: dict[int, Result] = {}

        def keep(number: int, result: Result) -> None:
            found[number] = result
            done(result)

        if min(self.count, len(tasks)) <= 1:
            for number, task in enumerate(tasks):
                keep(number, function(*task))
        else:
            self._run_apart(function, tasks, found, keep)
        return [found[number] for number in range(len(tasks))]

    def _run_apart(
        self,
        function: Callable[..., Result],
        tasks: Sequence[Task],
        found: dict[int, Result],
        keep: Callable[[int, Result], None],
    ) -> None:
        """In processes of their own. One that dies takes the whole pool with it: what is not found is begun again."""
        from concurrent.futures.process import BrokenProcessPool

        from joblib import Parallel, delayed

        for attempt in range(RETRIES + 1):
            left = [number for number in range(len(tasks)) if number not in found]
            workers = Parallel(n_jobs=self.count, return_as="generator_unordered")
            calls = (delayed(_numbered)(number, str(Path.cwd()), function, tasks[number]) for number in left)
            try:
                for number, result in workers(calls):
                    keep(number, result)
                return
            except BrokenProcessPool:
                lost = len(tasks) - len(found)
                self.note(f"a worker process was killed; {lost} of {len(tasks)} tasks are left (loss {attempt + 1})")
        raise MachineError(
            f"worker processes were killed {RETRIES + 1} times, most likely for want of memory; fewer --jobs need less."
        )

    def everywhere(self, check: Callable[..., None], *arguments: Any) -> None:
        """Nothing to do: local processes see what this one sees."""


def run_in(folder: str, function: Callable[..., Result], task: Task) -> Result:
    """Run a task in the giver's working folder, where it is there: relative paths mean the same to every worker."""
    with suppress(OSError):
        os.chdir(folder)
    return function(*task)


def _numbered(number: int, folder: str, function: Callable[..., Result], task: Task) -> tuple[int, Result]:
    return number, run_in(folder, function, task)
