"""Whether the settings of a stage that trains, a `TrainStage`, go with its model."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.checkpoints import is_sparse
from clip_moe.engine.messages import join_names
from modeling_clip_moe import CLIPMoEConfig
from modeling_clip_moe.experts import CLIPMoEExperts
from modeling_clip_moe.families import family_of
from modeling_clip_moe.sparse_moe import CLIPMoESparseMoeBlock

logger = logging.getLogger(__name__)


def problems_of_training(stage: Any, config: PreTrainedConfig, batch_size: int) -> Iterator[str]:
    """Settings that do not go with a model, or with the batch of a process: `setting: why`."""
    family = family_of(config)
    sparse, sigmoid = is_sparse(config), family.sigmoid and stage.loss != "softmax"
    if stage.mini_batch_size is not None and batch_size % stage.mini_batch_size:
        yield f"mini_batch_size: {stage.mini_batch_size} does not divide a process's batch of {batch_size} pairs"
    if stage.loss == "sigmoid" and not family.sigmoid:
        yield f"loss: sigmoid needs a model with a logit_bias, as SigLIP; {config.model_type!r} has none"
    if sigmoid and stage.label_smoothing:
        yield "label_smoothing: it goes with the softmax loss; this model's is sigmoid"
    if stage.expert_dropout is not None and not sparse:
        yield f"expert_dropout: it goes with a sparse model, but {stage.model} is dense"
    for setting in ("augmentation", "patch_dropout"):
        if getattr(stage, setting) is not None and family.naflex:
            yield f"{setting}: it goes with images of one size, but this model takes any shape: leave it out"
    if stage.patch_dropout is not None and not family.naflex:
        patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        if round(patches * stage.patch_dropout) == patches:
            yield f"patch_dropout: it leaves none of {patches} patches: take at most {(patches - 1) / patches:.3f}"
    if stage.mini_batch_size is not None and sparse:
        yield from (f"mini_batch_size: {problem}" for problem in _other_groups(stage, config))


def _other_groups(stage: Any, config: CLIPMoEConfig) -> Iterator[str]:
    """Why parts of a batch would not have the groups of the whole batch."""
    for tower, captions in (("text", len(stage.caption_weights or [1])), ("vision", 1)):
        of_tower = getattr(config, f"{tower}_config")
        if not of_tower.moe_layers or of_tower.capacity_factor is None:
            continue
        group, sequences = of_tower.capacity_group_size, stage.mini_batch_size * captions
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


def problems_of_routers(stage: Any, model: PreTrainedModel) -> Iterator[str]:
    """Settings of routers that do not go with a model whose parameters train or not."""
    towers = {tower: getattr(model.config, f"{tower}_config") for tower in ("text", "vision")}
    sparse = {name: tower for name, tower in towers.items() if getattr(tower, "moe_layers", [])}
    if stage.balance_mean == "shared" and not getattr(model.config, "shared_encoder", False):
        yield "balance_mean: shared needs a model with shared_encoder: true; this one has two encoders"
    elif stage.balance_mean in ("token", "shared"):
        choices = {(tower.num_experts, tower.num_experts_per_tok, tower.scoring_func) for tower in sparse.values()}
        if len(choices) > 1:
            reason = "takes the tokens of both towers together, whose num_experts, num_experts_per_tok or scoring_func"
            yield f"balance_mean: {stage.balance_mean} {reason} differ: {sorted(choices)}; take tower"
    for name in sorted({*stage.local_entropy_coef, *stage.global_entropy_coef} - sparse.keys()):
        yield f"local_entropy_coef, global_entropy_coef: the {name} tower has no sparse layers: leave it out"
    for name in sorted({*stage.local_entropy_coef, *stage.global_entropy_coef} & sparse.keys()):
        if (scores := sparse[name].scoring_func) != "softmax":
            yield f"local_entropy_coef, global_entropy_coef: the {name} tower has {scores} scores: leave it out"
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, tower in sparse.items():
        if stage.global_entropy_min_experts.get(name, 0) > tower.num_experts:
            enough = stage.global_entropy_min_experts[name]
            yield f"global_entropy_min_experts.{name}: {enough:g} of {tower.num_experts} experts"
        if stage.balance_top_k is not None and stage.balance_top_k > tower.num_experts:
            yield f"balance_top_k: {stage.balance_top_k} of {tower.num_experts} experts"
        # One expert has a router for the shape of its layer
        is_always_1 = tower.num_experts > tower.num_experts_per_tok == 1 and tower.norm_topk_prob
        if is_always_1 and any(".router." in of_router and of_router.startswith(name) for of_router in trained):
            yield (
                "trainable: routers would follow their balance loss alone: with norm_topk_prob, the weight of one "
                "expert a token is always 1. Upcycle with norm_topk_prob false or more num_experts_per_tok, or leave "
                "routers out"
            )


def warn_of_equal_experts(stage: Any, model: PreTrainedModel) -> None:
    """Warn of routers and fusion gates that train between equal experts that do not, as after upcycling: whatever they
    choose, the model computes the same, so the contrastive loss gives them no gradient."""
    if stage.teaches_routers:
        return
    idle = []
    for name, block in model.named_modules():
        if not isinstance(block, CLIPMoESparseMoeBlock) or not isinstance(block.experts, CLIPMoEExperts):
            continue
        config, experts = block.config, dict(block.experts.named_parameters())
        # Weights of dropped choices are lost, and the sum of the others depends on the router
        sum_to_1 = config.norm_topk_prob and not (config.norm_before_capacity and config.capacity_factor)
        if not sum_to_1 or config.router_class or any(weight.requires_grad for weight in experts.values()):
            continue
        if any(not torch.equal(weight, weight[:1].expand_as(weight)) for weight in experts.values()):
            continue
        if any(parameter.requires_grad for parameter in block.router.parameters()):
            idle.append(f"{name}.router")
        if block.base is None or config.capacity_factor or block.shared_experts or config.routed_scaling_factor != 1:
            continue
        base = block.base.fc1.weight, block.base.fc1.bias, block.base.fc2.weight, block.base.fc2.bias
        names = "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"
        equal = all(torch.equal(weight, experts[name][0]) for weight, name in zip(base, names, strict=True))
        frozen = not any(parameter.requires_grad for parameter in block.base.parameters())
        if equal and frozen and block.fusion_gate.proj.weight.requires_grad:
            idle.append(f"{name}.fusion_gate")
    if idle:
        logger.warning(
            "%s: %s train between equal experts that do not, so the task gives them no gradient: let experts train, "
            "too, or first",
            stage.name,
            join_names(idle),
        )
