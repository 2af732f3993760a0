"""Functions in processes of their own; several know of each other, as where a launcher starts them.

Their environment is that of the first start: pass what differs as an argument.
"""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch.multiprocessing as mp
from torch.distributed.elastic.utils.distributed import get_free_port

# What takes seconds to import: a server does it once, and each process is a copy of the server
PRELOADED = [
    "clip_moe.engine.runner",
    "clip_moe.engine.plan",
    "clip_moe.engine.kinds",
    "clip_moe.evaluation.evaluate",
]


def _run(rank, number, port, output, function, arguments):
    if number > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(output, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    function(*arguments)


@contextlib.contextmanager
def started_processes(number, output, function, *arguments):
    """A function of a module in each process, until the block ends. What they print is added to a file."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    given = number, get_free_port(), output, function, arguments
    processes = [context.Process(target=_run, args=(rank, *given)) for rank in range(number)]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:  # what is left would be waited for when the tests end
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def run_processes(number, function, *arguments):
    """Runs a function in each process. Returns what they printed."""
    with tempfile.NamedTemporaryFile("r") as output:
        with started_processes(number, output.name, function, *arguments) as processes:
            ends = time.monotonic() + 300
            while any(p.exitcode is None for p in processes) and not any(p.exitcode for p in processes):
                assert time.monotonic() < ends, output.read()
                time.sleep(0.01)
            codes = [process.exitcode for process in processes]
        printed = output.read()
        assert codes == [0] * number, printed
    return printed


def train_recipe(*arguments):
    """As `training/upcycle.py` does."""
    from clip_moe.training.commands import run

    run.main(list(map(str, arguments)))


def kill_at_a_checkpoint(folder, number, function, *arguments):
    """Kills processes, whose workers then end by themselves, when a stage below a folder has a checkpoint."""
    with (
        tempfile.NamedTemporaryFile("r") as output,
        started_processes(number, output.name, function, *arguments) as processes,
    ):
        while not list(Path(folder).glob(f"*.partial/checkpoints/step-{8 * '[0-9]'}")):
            assert all(process.exitcode is None for process in processes), output.read()
            time.sleep(0.01)
