"""`training/upcycle.py` on two processes without a GPU, where Accelerate (1.15) leaves out FSDP2 and DeepSpeed."""

import os
import sys
from pathlib import Path

from clip_moe.training.commands import run

sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from clip_moe.engine import context, runner
from clip_moe.training import loop

make_accelerator, save_checkpoint = context.make_accelerator, loop.save_checkpoint


def with_fsdp2(*arguments) -> Accelerator:
    accelerator = make_accelerator(*arguments)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # as the configuration file has it
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2 and accelerator.num_processes == 2
    return accelerator


def with_zero3(output_dir, mixed_precision, trackers) -> Accelerator:
    # Not `cpu=True`, with which Accelerate leaves DeepSpeed out
    gloo = [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(mixed_precision=mixed_precision, project_dir=output_dir, kwargs_handlers=gloo)
    assert accelerator.distributed_type is DistributedType.DEEPSPEED and accelerator.num_processes == 2
    context.unset_hf_deepspeed_config()
    return accelerator


def save_and_fail(*arguments):
    save_checkpoint(*arguments)
    raise OSError("interrupted")


make = with_zero3 if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" else with_fsdp2
context.make_accelerator = runner.make_accelerator = make
if "--interrupt" in sys.argv:
    sys.argv.remove("--interrupt")
    loop.save_checkpoint = save_and_fail
run.main(sys.argv[1:])
