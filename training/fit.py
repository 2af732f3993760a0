"""Whether a stage that trains goes with its model and its processes."""

import logging
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.upcycle import sparse_blocks
from clip_moe.engine.messages import join_names
from clip_moe.engine.settings import refuse
from clip_moe.training.task import Task

logger = logging.getLogger(__name__)

# A part whose weights change the square of a block's output by less than this share, as rounding does, changes nothing
ROUNDING = 1e-5


def sparse_towers(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configurations of towers with sparse layers, by "text" and "vision"."""
    towers = {tower: getattr(config, f"{tower}_config") for tower in ("text", "vision")}
    return {name: tower for name, tower in towers.items() if getattr(tower, "moe_layers", ())}


def require_processes(stage: Any, task: Task, accelerator: Accelerator) -> None:
    """Raises a ValueError where FSDP or DeepSpeed cannot train a task, or save its checkpoints."""
    kind, losses = accelerator.distributed_type, list(task.auxiliary_losses)
    is_fsdp, is_deepspeed = kind is DistributedType.FSDP, kind is DistributedType.DEEPSPEED
    readers = [type(loss).__name__ for loss in losses if loss.READS_WEIGHTS]
    refuse(
        (
            is_fsdp and getattr(task.model.config, "shared_encoder", False),
            "FSDP cannot split an encoder that both towers have. Train it with DDP",
        ),
        (is_deepspeed and losses, "DeepSpeed has no auxiliary losses. Take DDP"),
        (is_fsdp and readers, f"{', '.join(readers)} reads whole weights, which FSDP2 splits. Take DDP"),
        (
            is_deepspeed and getattr(stage, "mini_batch_size", None),
            "mini_batch_size: DeepSpeed has none. Take DDP or FSDP2",
        ),
        (
            stage.save_steps and (is_deepspeed or is_fsdp and not accelerator.is_fsdp2),
            "save_steps: FSDP version 1 and DeepSpeed keep checkpoints as pickles, which run code when they are read. "
            "Leave save_steps out, or split the model with training/accelerate/fsdp2.yaml",
        ),
    )


def warn_of_idle_parts(name: str, model: PreTrainedModel) -> None:
    """Warn of routers and fusion gates that train, but that their blocks' outputs do not depend on: between equal
    experts that do not train, as after upcycling, whatever they choose computes the same."""
    idle = []
    for path, block in sparse_blocks(model).items():
        parts = {"router": block.router.weight}
        if block.base is not None and not any(weight.requires_grad for weight in block.base.parameters()):
            parts["fusion_gate"] = block.fusion_gate.proj.weight
        parts = {part: weight for part, weight in parts.items() if weight.requires_grad}
        if not parts or any(weight.requires_grad for weight in block.experts.parameters()):
            continue
        was_training = block.training
        with torch.random.fork_rng(), torch.enable_grad():
            size = block.train()(torch.randn(4, 16, block.config.hidden_size)).square().sum()
        block.train(was_training)
        for part, weight in parts.items() if size.requires_grad else ():
            (gradient,) = torch.autograd.grad(
                size, weight, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            if (gradient * weight.norm()).norm() < ROUNDING * size:
                idle.append(f"{path}.{part}")
    if idle:
        logger.warning(
            "%s: %s train between equal experts that do not, so the task gives them no gradient: let experts train, "
            "too, or first",
            name,
            join_names(idle),
        )
