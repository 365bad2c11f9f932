"""Exit codes (docs/reference/exit-codes.md), and how any failure becomes one sentence and a code."""

import errno
import os
import sys

from smoe_profiles.errors import ImpossibleError, InputError, MachineError, SmoeError

BUG, USAGE, INPUT, IMPOSSIBLE, CHECK, MACHINE = 1, 2, 3, 4, 5, 6
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143


class UsageError(SmoeError):
    """The command line asks for something ambiguous or contradictory."""


class CheckFailedError(SmoeError):
    """verify, a strict inspection or a --fail-* threshold did not hold."""


class Interrupted(BaseException):
    """Ctrl-C arrived while a command ran; typer would turn a KeyboardInterrupt into a silent exit."""


class ReaderGone(BaseException):
    """Whoever read stdout closed it; typer would turn the error into exit code 1."""


class Terminated(BaseException):
    """SIGTERM arrived; raised in the main thread so that everything staged is removed."""


EXTRAS = {"triton": "'smoe[runtime]'", "plotly": "'smoe[report]'", "ray": "'smoe[ray]'", "accelerate": "'smoe[large]'"}
"""What installs an optional package in a version that fits."""

CODES: dict[type[SmoeError], int] = {
    UsageError: USAGE,
    InputError: INPUT,
    ImpossibleError: IMPOSSIBLE,
    CheckFailedError: CHECK,
    MachineError: MACHINE,
}


def is_reader_gone(error: BaseException) -> bool:
    """Whether a library left with SystemExit because stdout's reader had: typer and rich do."""
    return isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)


def report(error: BaseException) -> int:
    """Print what went wrong on stderr and return the exit code."""
    match error:
        case BrokenPipeError() | ReaderGone():
            # Say nothing, and keep Python from flushing into the closed pipe at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        case KeyboardInterrupt() | Interrupted():
            return _say("interrupted; nothing was left half written.", INTERRUPTED)
        case Terminated():
            return _say("terminated; nothing was left half written.", TERMINATED)
        case SmoeError():
            return _say(str(error), CODES[type(error)])
        case MemoryError():
            return _say("not enough memory for this; fewer --jobs or fewer tokens need less.", MACHINE)
        case ModuleNotFoundError():
            package = str(error.name).partition(".")[0]
            return _say(f"{package} is not installed; pip install {EXTRAS.get(package, package)}.", MACHINE)
        case OSError():
            return _say(_system_message(error), MACHINE)
    return _say(f"this is a bug in smoe: {type(error).__name__}: {error}. --debug shows the traceback.", BUG)


def _system_message(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full{where}; nothing was left half written. Free some space or use another -C."
    return f"{error.strerror or error}{where}."


def _say(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
