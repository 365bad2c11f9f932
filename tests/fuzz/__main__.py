"""`make fuzz`: damaged files through every reader, a hundred thousand and more, each case named by its seed and number.

    python -m tests.fuzz                      all readers, 110,000 cases
    python -m tests.fuzz --only trace         one reader
    python -m tests.fuzz --only trace --case 17   one case, with its traceback; its files stay in .fuzz/

Each reader runs in a process of its own that may take 1 GiB more than it starts with; one that dies or hangs is a fault
of the case it was at, and the next case goes on in another process. Exit code 1 if any fault was found.
"""

import argparse
import ctypes
import logging
import mmap
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import sound
from tests.fuzz.cases import CPU_SECONDS, Sandbox, run_case, time_limit
from tests.fuzz.readers import House, Reader, readers

KEPT = Path(".fuzz")
MEMORY = 1 << 30
PATIENCE = 120
"""Seconds without a new case after which a process is called hung, whatever it is doing."""

SAME_KEPT = 3
"""How many cases of one fault are kept as files."""


@dataclass
class Tally:
    """What came of a reader's cases. faults: by what went wrong, the numbers of the cases."""

    cases: int = 0
    refused: int = 0
    sentences: Counter[str] = field(default_factory=Counter)
    faults: dict[str, list[int]] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        self.cases += other.cases
        self.refused += other.refused
        self.sentences += other.sentences
        for fault, numbers in other.faults.items():
            self.faults.setdefault(fault, []).extend(numbers)


def _kind(text: str) -> str:
    """A sentence without the values that differ from case to case."""
    letters = "".join(letter for letter in text if letter.isascii() and (letter.isalpha() or letter == " "))
    return " ".join(letters.split()[-8:])


def _cases(reader: Reader, seed: int, numbers: range, at: mmap.mmap, sandbox: Sandbox, result: Path) -> None:
    """Run in a process of its own: cases one after another, the tally written at the end and every hundred cases."""
    samples = reader.samples()
    for sample in samples:
        sandbox.fill(sample.files)
        reader.read(sandbox.given, sandbox.out, sandbox.given / sample.targets[0])  # warm, and sound files are read
    limit = _data_size() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    tally = Tally()
    with time_limit():
        for number in numbers:
            at[:8] = struct.pack("<q", number)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            outcome = run_case(reader, samples, seed, number, sandbox)
            signal.setitimer(signal.ITIMER_PROF, 0)
            tally.cases += 1
            tally.refused += outcome.said is not None
            tally.sentences[_kind(outcome.said or "")] += outcome.said is not None
            if outcome.fault:
                tally.faults.setdefault(outcome.fault, []).append(number)
                _keep(reader, number, sandbox, outcome.fault, first=len(tally.faults[outcome.fault]) <= SAME_KEPT)
                _save(tally, result)
            elif number % 100 == 0:
                _save(tally, result)
    _save(tally, result)


def _data_size() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) << 10


def _save(tally: Tally, path: Path) -> None:
    path.with_suffix(".new").write_bytes(pickle.dumps(tally))
    path.with_suffix(".new").replace(path)


def _keep(reader: Reader, number: int, sandbox: Sandbox, fault: str, *, first: bool) -> None:
    if first:
        kept = KEPT / f"{reader.name.replace(' ', '-')}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(sandbox.given, kept, symlinks=True)
        (kept / "fault.txt").write_text(fault, encoding="utf-8", errors="backslashreplace")


def run_reader(reader: Reader, seed: int, count: int, sandbox: Sandbox) -> Tally:
    """All cases of a reader, in as many processes as it kills."""
    total, start = Tally(), 0
    at, result = mmap.mmap(-1, 8), sandbox.folder.parent / "tally"
    while start < count:
        at[:8] = struct.pack("<q", start - 1)
        result.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
            try:
                _cases(reader, seed, range(start, count), at, sandbox, result)
            except BaseException:  # noqa: BLE001 (a fault of this program, told by the exit code)
                sys.excepthook(*sys.exc_info())
                os._exit(3)
            os._exit(0)
        status = _watch(child, at)
        total.add(pickle.loads(result.read_bytes()) if result.exists() else Tally())
        reached = struct.unpack("<q", at[:8])[0]
        if status == 0:
            break
        if reached < start:
            total.faults["its sound files are not read"] = [start]
            break
        died = (
            f"died by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"left with {os.WEXITSTATUS(status)}"
        )
        total.faults.setdefault(died, []).append(reached)
        _keep(reader, reached, sandbox, died, first=True)
        start = reached + 1
    total.cases = count
    return total


def _watch(child: int, at: mmap.mmap) -> int:
    seen, since = b"", time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if at[:8] != seen:
            seen, since = at[:8], time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=110_000, help="in all; each reader has its share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="some readers, by name")
    parser.add_argument("--case", type=int, help="this case alone, in this process")
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sound.torch_threads()
    warnings.simplefilter("ignore")
    logging.disable()  # the datasets library logs what it then raises
    KEPT.mkdir(exist_ok=True)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="smoe-fuzz-", dir=memory if memory.is_dir() else None) as name:
        sandbox = Sandbox(Path(name) / "sandbox")
        every = list(readers(House(Path(name) / "house")))
        chosen = [reader for reader in every if asked.only is None or reader.name in asked.only]
        if asked.only is not None and len(chosen) != len(set(asked.only)):
            parser.error(f"--only takes some of: {', '.join(reader.name for reader in every)}")
        if asked.case is not None:
            outcome = run_case(chosen[0], chosen[0].samples(), asked.seed, asked.case, sandbox)
            _keep(chosen[0], asked.case, sandbox, str(outcome.fault), first=True)
            print(outcome)
            return int(outcome.fault is not None)
        shares = sum(reader.share for reader in every)
        return _all(chosen, shares, asked.cases, asked.seed, sandbox)


def _all(chosen: list[Reader], shares: int, cases: int, seed: int, sandbox: Sandbox) -> int:
    total, began = Tally(), _processor_seconds()
    print(f"{'reader':24}{'cases':>9}{'refused':>9}{'sentences':>11}{'faults':>8}{'CPU s':>8}")
    for reader in chosen:
        started = _processor_seconds()
        reader.samples()  # in this process, so that a new child finds them made
        tally = run_reader(reader, seed, max(cases * reader.share // shares, 1), sandbox)
        total.add(tally)
        numbers = f"{tally.cases:9,}{tally.refused:9,}{len(+tally.sentences):11}{len(tally.faults):8}"
        print(f"{reader.name:24}{numbers}{_processor_seconds() - started:8.0f}")
        for fault, found in sorted(tally.faults.items(), key=lambda item: -len(item[1])):
            print(f"    {len(found)} times, first --only '{reader.name}' --case {found[0]}: {fault!r}")
        sys.stdout.flush()
    spent = _processor_seconds() - began
    print(
        f"{total.cases:,} cases, {total.refused:,} refused, {len(total.faults)} faults, {spent:.0f} CPU s, seed {seed}"
    )
    if total.faults:
        print(f"The files of failing cases are in {KEPT}/.")
    return int(bool(total.faults))


def _processor_seconds() -> float:
    """Of this process and of those it waited for."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    sys.exit(main())
