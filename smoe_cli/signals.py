"""Ctrl-C and SIGTERM: raised where they arrive, and once more at the next step of progress.

Libraries swallow them: a bare `except` around an optional import that happens to run takes the exception for a missing
package, and the command would go on to its end.
"""

import signal
from types import FrameType

from smoe_cli.errors import Interrupted, Terminated

_RAISED = {signal.SIGINT: Interrupted, signal.SIGTERM: Terminated}
_arrived: list[signal.Signals] = []


def listen() -> None:
    """Take both signals from now on; an ignored Ctrl-C (a job in the background) stays ignored."""
    for number in _RAISED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _on_signal)


def check() -> None:
    """Raise what has arrived, if anything."""
    if _arrived:
        raise _RAISED[_arrived[0]]


def _on_signal(number: int, _frame: FrameType | None) -> None:
    _arrived.append(signal.Signals(number))
    raise _RAISED[signal.Signals(number)]
