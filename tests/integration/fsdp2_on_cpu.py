"""`training/upcycle.py`, with the FSDP2 that Accelerate (1.15) leaves out where processes have no GPU."""

import sys
from pathlib import Path

from training.commands import train

sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from training import context, engine, runner

make_accelerator, save_checkpoint = context.make_accelerator, engine.save_checkpoint


def with_fsdp2(*arguments) -> Accelerator:
    accelerator = make_accelerator(*arguments)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # as the configuration file has it
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2 and accelerator.num_processes == 2
    return accelerator


def save_and_fail(*arguments):
    save_checkpoint(*arguments)
    raise OSError("interrupted")


context.make_accelerator = runner.make_accelerator = with_fsdp2
if "--interrupt" in sys.argv:
    sys.argv.remove("--interrupt")
    engine.save_checkpoint = save_and_fail
train.main(sys.argv[1:])
