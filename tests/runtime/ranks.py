"""Processes that stand for ranks: started once, joined by gloo, given functions of test modules to run together."""

import atexit
import pickle
import tempfile
import traceback
from functools import cache
from multiprocessing import get_context
from pathlib import Path

PRELOAD = ["torch.distributed", "transformers", "smoe_cli.runtime.layer"] + [
    f"transformers.models.{name}.modeling_{name}" for name in ("deepseek_v2", "mixtral", "qwen3_moe")
]
"""Imported once, before the ranks are forked."""


class Ranks:
    """`run` calls function(*arguments) on every rank at once. Functions must be found by module and name. patience:
    seconds that it waits.
    """

    patience = 120.0

    def __init__(self, number, folder):
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        pipes = [context.Pipe() for _ in range(number)]
        self.ends = [mine for mine, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, number, str(folder / f"meet{number}")), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, function, *arguments):
        """Returns what each rank returned, in rank order. Fails with the first rank's traceback."""
        for end in self.ends:
            end.send_bytes(pickle.dumps((function, arguments)))
        answers = []
        for rank, end in enumerate(self.ends):
            assert end.poll(self.patience), f"rank {rank} did not answer"
            answers.append(pickle.loads(end.recv_bytes()))
        failures = [answer for good, answer in answers if not good]
        assert not failures, failures[0]
        return [answer for _, answer in answers]

    def close(self):
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.join(5)


@cache
def ranks(number):
    """The ranks of this test process, the same for every test."""
    folder = tempfile.TemporaryDirectory(prefix="smoe-ranks-")
    found = Ranks(number, Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(found.close)
    return found


def _serve(end, rank, number, path):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=number)
    answer(end, rank)


def answer(end, rank):
    """Do what is asked until nobody asks any more."""
    while True:
        try:
            function, arguments = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        try:
            told = True, function(*arguments)
        except Exception:  # noqa: BLE001 (the test process must hear of anything)
            told = False, f"rank {rank}:\n{traceback.format_exc()}"
        end.send_bytes(pickle.dumps(told))
