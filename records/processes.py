"""Several processes: as `accelerate launch` should start them on CPUs, and what they know of each other."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import PartialState


def num_processes() -> int:
    """The processes that a launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_first_process() -> bool:
    """Whether this is the first of the processes that a launcher started, or the only one."""
    return int(os.environ.get("RANK", 0)) == 0


def launch_cpu_processes(name: str, command: Sequence[str]) -> None:
    """Start the processes that `accelerate launch --cpu --num_processes N` asks for, on one machine or several.

    Without MPI, Accelerate (1.15) starts a single process on the CPU whatever N says, and tells it nothing. Its command
    line and the file of its `--config_file` do: this function reads them and hands over to torchrun, which is what
    Accelerate itself uses for GPUs.

    Args:
        name: how the script or module ends by whose name the launcher was asked to start this program.
        command: what torchrun is to start, with its arguments.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true" or "WORLD_SIZE" in os.environ:
        return
    import psutil

    by = psutil.Process().parent().cmdline()
    launched = next((i for i, part in enumerate(by) if part.endswith(name)), 0)
    options = _accelerate_settings(by[:launched])
    if options.num_processes % options.num_machines:
        sys.exit(
            f"error: --num_processes {options.num_processes} cannot be shared by {options.num_machines} machines: it "
            "is the number of all processes, as many on each machine"
        )
    if options.num_processes == 1:
        return
    where = ["--standalone"]
    if options.num_machines > 1:
        where = ["--nnodes", str(options.num_machines), "--node_rank", str(options.machine_rank)]
        where += ["--master_addr", options.main_process_ip, "--master_port", str(options.main_process_port)]
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # The launcher does not log processes that fail: they have said why
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun([*where, "--nproc_per_node", str(options.num_processes // options.num_machines), *command])
    except ChildFailedError as error:
        sys.exit(next(iter(error.failures.values())).exitcode)
    except (KeyboardInterrupt, SignalException) as error:  # the processes have got it, too, and said so
        sys.exit(128 + getattr(error, "sigval", signal.SIGINT))
    sys.exit(0)


def _accelerate_settings(command: Sequence[str]) -> argparse.Namespace:
    """Where Accelerate's launcher was told to start processes, by its options or by its configuration file."""
    launcher = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    launcher.add_argument("--config_file", "--config-file")
    launcher.add_argument("--num_processes", "--num-processes", type=int, default=1)
    launcher.add_argument("--num_machines", "--num-machines", type=int, default=1)
    launcher.add_argument("--machine_rank", "--machine-rank", type=int, default=0)
    launcher.add_argument("--main_process_ip", "--main-process-ip")
    launcher.add_argument("--main_process_port", "--main-process-port", type=int)
    options, _ = launcher.parse_known_args(command)
    if options.config_file is not None:
        from accelerate.commands.config.config_args import load_config_from_file

        configured = vars(load_config_from_file(options.config_file))
        settings = {name: value for name, value in configured.items() if name in options and value is not None}
        launcher.set_defaults(**settings)
        options, _ = launcher.parse_known_args(command)
    return options


def joined_processes(device: str | None = None) -> "PartialState | None":
    """What a launcher's processes know of each other, where it started several; each gets a device of its own.

    Args:
        device: what the user asked for. Only `cpu` can be asked for.
    """
    import torch
    from accelerate import PartialState

    if num_processes() == 1:
        return None
    if device not in (None, "cpu"):
        raise ValueError(f"--device {device}: of several processes each takes an accelerator of its own, or all cpu")
    use_cpu = device == "cpu" or not torch.accelerator.is_available()
    # One process may have kept all that it has to embed, and waits for another one that has not
    return PartialState(cpu=use_cpu, timeout=timedelta(days=1))
