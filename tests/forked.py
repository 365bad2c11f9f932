"""smoe in processes of its own that can be limited, stopped and killed, without waiting for their imports.

Each is forked from a server that has imported what loading a model takes, and then runs the program's entry point.
"""

import os
import resource
import sys
from multiprocessing import get_context
from pathlib import Path

from tests.runtime.ranks import PRELOAD

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [*PRELOAD, "smoe_cli.app", "smoe_cli.recording", "transformers.models.qwen2_moe.modeling_qwen2_moe"]
)
SECONDS = 300


def begin(*arguments, cwd: Path, file_size: int | None = None, **variables: str):
    """Start one command; what it says goes to the files `PID.out` and `PID.err` in `cwd`.

    file_size: no file may grow beyond as many bytes, as on a full disk. The process leads a session of its own.
    """
    words = [str(one) for one in arguments]
    process = CONTEXT.Process(target=_main, args=(words, cwd, file_size, variables))
    process.start()
    return process


def end(process, cwd: Path) -> tuple[int, str, str]:
    """Wait for a command: its exit code, below zero if a signal ended it, its stdout and its stderr."""
    process.join(SECONDS)
    process.kill()  # for one that did not end in time
    process.join()
    return (process.exitcode, *((cwd / f"{process.pid}.{name}").read_text() for name in ("out", "err")))


def _main(arguments, cwd, file_size, variables):
    os.setsid()
    os.chdir(cwd)
    os.environ.update(variables)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{os.getpid()}.{name}", os.O_WRONLY | os.O_CREAT), number)
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    sys.argv = ["smoe", *arguments]
    from smoe_cli.app import main

    main()
