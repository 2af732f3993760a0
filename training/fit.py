"""Whether the settings of a stage that trains go with its model and its processes."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.checkpoints import is_sparse
from clip_moe.conversion.upcycle import sparse_blocks
from clip_moe.engine.messages import join_names
from clip_moe.training.task import Task
from modeling_clip_moe import CLIPMoEConfig
from modeling_clip_moe.families import family_of

logger = logging.getLogger(__name__)

# A part whose weights change the square of a block's output by less than this share, as rounding does, changes nothing
ROUNDING = 1e-5


def problems_of_training(stage: Any, model: PreTrainedModel, batch_size: int) -> Iterator[str]:
    """Settings of a `TrainStage` that do not go with its model, or with the batch of a process: `setting: why`."""
    config = model.config
    family = family_of(config)
    sparse, sigmoid = is_sparse(config), family.sigmoid and stage.loss != "softmax"
    if stage.mini_batch_size is not None and batch_size % stage.mini_batch_size:
        yield f"mini_batch_size: {stage.mini_batch_size} does not divide a process's batch of {batch_size} pairs"
    if stage.loss == "sigmoid" and not family.sigmoid:
        yield f"loss: sigmoid needs a model with a logit_bias, as SigLIP; {config.model_type!r} has none"
    if sigmoid and stage.label_smoothing:
        yield "label_smoothing: it goes with the softmax loss; this model's is sigmoid"
    for setting in ("augmentation", "patch_dropout"):
        if getattr(stage, setting) is not None and family.naflex:
            yield f"{setting}: it goes with images of one size, but this model takes any shape: leave it out"
    if stage.patch_dropout is not None and not family.naflex:
        patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        if round(patches * stage.patch_dropout) == patches:
            yield f"patch_dropout: it leaves none of {patches} patches: take at most {(patches - 1) / patches:.3f}"
    if stage.mini_batch_size is not None and sparse:
        yield from (f"mini_batch_size: {problem}" for problem in _other_groups(stage, config))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, tower in sparse_towers(config).items():
        # One expert has a router for the shape of its layer
        is_always_1 = tower.num_experts > tower.num_experts_per_tok == 1 and tower.norm_topk_prob
        if is_always_1 and any(".router." in parameter and parameter.startswith(name) for parameter in trained):
            yield (
                "trainable: routers would follow their balance loss alone: with norm_topk_prob, the weight of one "
                "expert a token is always 1. Upcycle with norm_topk_prob false or more num_experts_per_tok, or leave "
                "routers out"
            )


def problems_of_balance(stage: Any, config: PreTrainedConfig) -> Iterator[str]:
    """Settings of a `TrainRouterStage` that do not go with a model: `setting: why`."""
    towers = sparse_towers(config)
    if stage.expert_dropout is not None and not towers:
        yield f"expert_dropout: it goes with a sparse model, but {stage.model} is dense"
    if stage.balance_mean == "shared" and not getattr(config, "shared_encoder", False):
        yield "balance_mean: shared needs a model with shared_encoder: true; this one has two encoders"
    elif stage.balance_mean in ("token", "shared"):
        choices = {(tower.num_experts, tower.num_experts_per_tok, tower.scoring_func) for tower in towers.values()}
        if len(choices) > 1:
            reason = "takes the tokens of both towers together, whose num_experts, num_experts_per_tok or scoring_func"
            yield f"balance_mean: {stage.balance_mean} {reason} differ: {sorted(choices)}; take tower"
    for tower in towers.values():
        if stage.balance_top_k is not None and stage.balance_top_k > tower.num_experts:
            yield f"balance_top_k: {stage.balance_top_k} of {tower.num_experts} experts"


def sparse_towers(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configurations of towers with sparse layers, by "text" and "vision"."""
    towers = {tower: getattr(config, f"{tower}_config") for tower in ("text", "vision")}
    return {name: tower for name, tower in towers.items() if getattr(tower, "moe_layers", ())}


def _other_groups(stage: Any, config: CLIPMoEConfig) -> Iterator[str]:
    """Why parts of a batch would not have the groups of the whole batch."""
    for tower, tower_config in sparse_towers(config).items():
        captions = len(stage.caption_weights or [1]) if tower == "text" else 1
        if tower_config.capacity_factor is None:
            continue
        group, sequences = tower_config.capacity_group_size, stage.mini_batch_size * captions
        if captions > 1:
            yield (
                "an image may lack captions, so that parts would have other groups of texts for capacity than the "
                "whole batch: leave it out, or upcycle without a capacity in the text tower"
            )
        elif group is None or sequences % group:
            yield (
                f"{tower}_config.capacity_group_size is {group}, and {sequences} sequences are computed at a "
                "time: set it in the stage that makes the model to a number that divides them"
            )


def require_processes(stage: Any, task: Task, accelerator: Accelerator) -> None:
    """Raises a ValueError where FSDP or DeepSpeed cannot train a task, or save its checkpoints."""
    kind, losses = accelerator.distributed_type, list(task.auxiliary_losses)
    is_fsdp, is_deepspeed = kind is DistributedType.FSDP, kind is DistributedType.DEEPSPEED
    if is_fsdp and getattr(task.model.config, "shared_encoder", False):
        raise ValueError("FSDP cannot split an encoder that both towers have. Train it with DDP")
    if is_deepspeed and losses:
        raise ValueError("DeepSpeed has no auxiliary losses. Take DDP")
    for loss in losses if is_fsdp else ():
        if loss.READS_WEIGHTS:
            raise ValueError(f"{type(loss).__name__} reads whole weights, which FSDP2 splits. Take DDP")
    if is_deepspeed and getattr(stage, "mini_batch_size", None):
        raise ValueError(f"{stage.name}.mini_batch_size: DeepSpeed has none. Take DDP or FSDP2")
    if stage.save_steps and (is_deepspeed or is_fsdp and not accelerator.is_fsdp2):
        raise ValueError(
            "save_steps: FSDP version 1 and DeepSpeed keep checkpoints as pickles, which run code when they are read. "
            "Leave save_steps out, or split the model with training/accelerate/fsdp2.yaml"
        )


def warn_of_idle_parts(name: str, model: PreTrainedModel) -> None:
    """Warn of routers and fusion gates that train, but that their blocks' outputs do not depend on: between equal
    experts that do not train, as after upcycling, whatever they choose computes the same."""
    idle = [part for path, block in sparse_blocks(model).items() for part in _idle_parts(path, block)]
    if idle:
        logger.warning(
            "%s: %s train between equal experts that do not, so the task gives them no gradient: let experts train, "
            "too, or first",
            name,
            join_names(idle),
        )


def _idle_parts(path: str, block: nn.Module) -> list[str]:
    """The names of a block's router and fusion gate, if they train, its experts do not, and the gradient of its output
    by their weights is no more than rounding."""
    parts = {"router": block.router.weight}
    if block.base is not None and not any(weight.requires_grad for weight in block.base.parameters()):
        parts["fusion_gate"] = block.fusion_gate.proj.weight
    parts = {part: weight for part, weight in parts.items() if weight.requires_grad}
    if not parts or any(weight.requires_grad for weight in block.experts.parameters()):
        return []
    was_training = block.training
    with torch.random.fork_rng(), torch.enable_grad():
        size = block.train()(torch.randn(4, 16, block.config.hidden_size)).square().sum()
    block.train(was_training)
    if not size.requires_grad:
        return []
    gradients = torch.autograd.grad(size, list(parts.values()), allow_unused=True, materialize_grads=True)
    changes = [(gradient * weight.norm()).norm() for gradient, weight in zip(gradients, parts.values(), strict=True)]
    return [f"{path}.{part}" for part, change in zip(parts, changes, strict=True) if change < ROUNDING * size]
