"""`training/upcycle.py` with DeepSpeed's ZeRO-3 on processes that have no GPU and talk by gloo."""

import sys
from pathlib import Path

from training.commands import train

sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from training import context, runner


def with_zero3(output_dir, mixed_precision, trackers) -> Accelerator:
    # Not `cpu=True`, with which Accelerate leaves DeepSpeed out
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        project_dir=output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    assert accelerator.distributed_type is DistributedType.DEEPSPEED and accelerator.num_processes == 2
    context.unset_hf_deepspeed_config()
    return accelerator


context.make_accelerator = runner.make_accelerator = with_zero3
train.main(sys.argv[1:])
