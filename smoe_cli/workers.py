"""Layers on local processes (--jobs) or on an existing Ray cluster (--ray), with the same bytes.

Ray gets plain tasks: joblib's backend for it yields no results on the way and ends with its first dead worker. Ray's
own retries are off, since they know no bound where memory runs out; a lost task is given out again here, as locally.
"""

import logging
import os
import re
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smoe_cli.errors import UsageError
from smoe_profiles.errors import MachineError
from smoe_profiles.workers import RETRIES, LocalWorkers, Result, Task, Workers, run_in

CONNECT_SECONDS = 10
ANSWER_SECONDS = 60
"""For a node to start a process and import what it is asked for."""

ALIKE = ("smoe", "numpy", "scipy", "numba", "pyarrow")
"""Libraries that results depend on: the same version on every node."""

SETTINGS = b"\x04"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + bytes(5)
"""How an HTTP/2 client begins; the server's answer begins with a frame of settings too (RFC 9113, 3.4)."""

SOURCES = ("smoe_cli", "smoe_profiles", "smoe_solvers")


@contextmanager
def open_workers(jobs: int, ray_address: str | None, note: Callable[[str], None]) -> Iterator[Workers]:
    """Workers for one command. jobs: at most so many at a time, 0: one a core.

    Raises MachineError if the cluster cannot be reached, or a node of it lacks this very smoe.
    """
    if ray_address is None:
        yield LocalWorkers(jobs, note)
        return
    with _connection(ray_address):
        workers = RayWorkers(jobs, note)
        workers.check()
        note(f"working on {workers.count} cores of {len(workers.nodes())} Ray nodes")
        yield workers


@dataclass(frozen=True)
class RayWorkers:
    """Cores of the Ray cluster this process is connected to."""

    jobs: int
    note: Callable[[str], None]

    @property
    def count(self) -> int:
        cores = sum(int(node["Resources"]["CPU"]) for node in self.nodes())
        return min(self.jobs, cores) if self.jobs else cores

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive and have cores."""
        import ray

        return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]

    def run(
        self, function: Callable[..., Result], tasks: Sequence[Task], done: Callable[[Result], None]
    ) -> list[Result]:
        import ray
        from ray.exceptions import RayError, RayTaskError

        name = f"smoe:{function.__name__.strip('_')}"  # in Ray's dashboard, and as the process' title
        remote = ray.remote(num_cpus=1, max_retries=0, name=name)(run_in)
        waiting, running = deque(range(len(tasks))), dict[Any, int]()
        losses, found = Counter[int](), dict[int, Result]()
        try:
            while len(found) < len(tasks):
                room = self._most_running()
                while waiting and len(running) < room:
                    number = waiting.popleft()
                    running[remote.remote(str(Path.cwd()), function, tasks[number])] = number
                for reference in ray.wait(list(running), timeout=ANSWER_SECONDS)[0]:
                    number = running.pop(reference)
                    try:
                        found[number] = ray.get(reference)
                    except RayTaskError as error:
                        raise error.cause from error
                    except RayError as error:
                        losses[number] += 1
                        self._count_loss(losses[number], error)
                        waiting.appendleft(number)
                    else:
                        done(found[number])
        except SystemError as error:  # what a signal raised inside Ray's compiled code
            raise error.__cause__ or error from None
        finally:
            _cancel(list(running))
        return [found[number] for number in range(len(tasks))]

    def _most_running(self) -> int:
        count = self.count
        if not count:
            raise MachineError("no node of the Ray cluster is left; start some and run this again.")
        return count

    def _count_loss(self, times: int, error: Exception) -> None:
        why = type(error).__name__
        if times > RETRIES:
            raise MachineError(f"one task lost its Ray worker {times} times ({why}: {_first_line(error)}).") from error
        self.note(f"a Ray worker was lost ({why}); its task is given out again (loss {times})")

    def check(self) -> None:
        """Raises MachineError if there is no node, or one has another smoe, Python or library than this machine."""
        if not self.nodes():
            raise MachineError("the Ray cluster has no node with a core; start some and run this again.")
        probe = _make_probe()
        here = probe()
        for host, there in self._on_every_node(probe):
            for name, wanted in here.items():
                if there[name] != wanted:
                    raise MachineError(
                        f"Ray node {host} has {name} {there[name] or 'not installed'}, this machine {wanted}; "
                        "the same bytes need the same on every node."
                    )

    def everywhere(self, check: Callable[..., None], *arguments: Any) -> None:
        for _ in self._on_every_node(run_in, str(Path.cwd()), check, arguments):
            pass

    def _on_every_node(self, function: Callable[..., Result], *arguments: Any) -> Iterator[tuple[str, Result]]:
        import ray
        from ray.exceptions import RayError, RayTaskError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = []
        for node in self.nodes():
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            remote = ray.remote(num_cpus=0, max_retries=RETRIES, scheduling_strategy=there)(function)
            asked.append((node["NodeManagerHostname"], remote.remote(*arguments)))
        for host, reference in asked:
            try:
                yield host, ray.get(reference, timeout=ANSWER_SECONDS)
            except RayTaskError as error:
                raise error.cause from error
            except RayError as error:
                raise MachineError(f"Ray node {host} does not answer ({_first_line(error)}).") from error


@contextmanager
def _connection(address: str) -> Iterator[None]:
    if address != "auto" and not re.fullmatch(r"(ray://)?[^/:]+:[0-9]{1,5}", address):
        raise UsageError(f"--ray {address!r}: HOST:PORT, ray://HOST:PORT or auto is meant, of a cluster that runs.")
    if find_spec("ray") is None:
        raise MachineError("--ray needs Ray, which is not installed; pip install smoe[ray].")
    if address != "auto":
        _reach(address)
    import ray

    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (Exception, SystemExit) as error:  # it ends the process where nobody answers
        raise MachineError(f"--ray {address}: no Ray cluster can be used there ({_first_line(error)}).") from error
    finally:
        signal.signal(signal.SIGTERM, on_term)  # Ray's own would end this process with nothing cleaned up
    try:
        with redirect_stdout(sys.stderr):  # Ray prints what befalls its workers; stdout is the command's answer
            yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raises MachineError where nobody listens, or no gRPC server does: Ray itself would try for two minutes."""
    host, port = address.removeprefix("ray://").rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as stream:
            stream.sendall(GREETING)
            answer = stream.recv(9)
    except (OSError, OverflowError) as error:
        raise MachineError(f"--ray {address}: nobody answers there ({error}); is the cluster up?") from error
    if answer[3:4] != SETTINGS and "RAY_USE_TLS" not in os.environ:
        raise MachineError(f"--ray {address}: what answers there is no Ray cluster; ray start prints the address.")


def _cancel(references: list[Any]) -> None:
    """End tasks, and wait until they have ended: whoever cleans up after them must be the last to write."""
    import ray

    for reference in references:
        ray.cancel(reference, force=True)
    if references:
        ray.wait(references, num_returns=len(references), timeout=CONNECT_SECONDS)


def _make_probe() -> Callable[[], dict[str, str]]:
    """What says which Python and libraries there are. A function made here travels by value, so smoe may be missing."""
    alike, sources = ALIKE, SOURCES

    def probe() -> dict[str, str]:
        import hashlib
        import platform
        from importlib import metadata, util
        from pathlib import Path

        digest = hashlib.sha256()
        for package in sources:
            spec = util.find_spec(package)
            for folder in spec.submodule_search_locations or () if spec else ():
                for path in sorted(Path(folder).rglob("*.py")):
                    digest.update(path.read_bytes())
        found = {"Python": platform.python_version().rpartition(".")[0]}
        for name in alike:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = ""
        if found["smoe"]:
            found["smoe"] += f" with sources {digest.hexdigest()[:12]}"
        return found

    return probe


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
