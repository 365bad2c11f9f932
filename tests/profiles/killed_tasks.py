"""Tasks for worker processes, in a module that imports nothing heavy."""

import os
import signal
from pathlib import Path


def square(number, folder, deaths):
    """number squared, and who did it; the first `deaths` processes that are asked for 3 kill themselves."""
    for death in range(deaths if number == 3 else 0):
        try:
            os.close(os.open(Path(folder) / str(death), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)
    if number < 0:
        raise ValueError(f"{number} is below zero")
    return number * number, os.getpid()


def here():
    return str(Path.cwd())
