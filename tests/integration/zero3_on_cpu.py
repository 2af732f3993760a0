"""`training/upcycle.py` with DeepSpeed's ZeRO-3 on processes that have no GPU and talk by gloo."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from training import stages, upcycle


def with_zero3(recipe) -> Accelerator:
    # Not `cpu=True`, with which Accelerate leaves DeepSpeed out
    accelerator = Accelerator(
        mixed_precision=recipe.mixed_precision,
        project_dir=recipe.output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    assert accelerator.distributed_type is DistributedType.DEEPSPEED and accelerator.num_processes == 2
    stages.unset_hf_deepspeed_config()
    return accelerator


stages.make_accelerator = with_zero3
upcycle.main(sys.argv[1:])
