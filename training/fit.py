"""Whether the settings of a stage that trains, a `TrainStage`, go with its model."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from conversion.checkpoints import is_sparse
from modeling_clip_moe import CLIPMoEConfig
from modeling_clip_moe.families import family_of
from modeling_clip_moe.sparse_moe import CLIPMoERouter, CLIPMoESparseMoeBlock
from records.messages import join_names, warn_once
from training.contrastive_task import patches_kept

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
    if sigmoid and stage.group_by_length:
        yield "group_by_length: this model's texts are all padded to one length: leave it out"
    if stage.expert_dropout is not None and not sparse:
        yield f"expert_dropout: it goes with a sparse model, but {stage.model} is dense"
    if stage.augmentation is not None and family.naflex:
        yield "augmentation: random crops have one size, but this model takes images of any shape: leave it out"
    if stage.patch_dropout is not None and family.naflex:
        yield "patch_dropout: it goes with images of one size: leave it out"
    elif stage.patch_dropout is not None:
        patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        if not patches_kept(patches, stage.patch_dropout):
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
    for tower in sparse.values():
        if stage.balance_top_k is not None and stage.balance_top_k > tower.num_experts:
            yield f"balance_top_k: {stage.balance_top_k} of {tower.num_experts} experts"
    if stage.balance_mean == "shared" and not getattr(model.config, "shared_encoder", False):
        yield "balance_mean: shared needs a model with shared_encoder: true; this one has two encoders"
    elif stage.balance_mean in ("token", "shared"):
        choices = {(tower.num_experts, tower.num_experts_per_tok) for tower in sparse.values()}
        if len(choices) > 1:
            reason = "takes the tokens of both towers together, whose num_experts and num_experts_per_tok differ"
            yield f"balance_mean: {stage.balance_mean} {reason}: {sorted(choices)}; take tower"
    for setting in ("local_entropy_coef", "global_entropy_coef"):
        for name in getattr(stage, setting):
            if name not in sparse:
                yield f"{setting}.{name}: that tower has no sparse layers: leave it out"
    for name, enough in stage.global_entropy_min_experts.items():
        if name in sparse and enough > sparse[name].num_experts:
            yield f"global_entropy_min_experts.{name}: {enough:g} of {sparse[name].num_experts} experts"
    yield from _in_vain(model, sparse)


def _in_vain(model: PreTrainedModel, sparse: dict[str, PreTrainedConfig]) -> Iterator[str]:
    """Routers that train although the weight of one expert a token is always 1."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    routers = {tower: [n for n in trained if ".router." in n and n.startswith(f"{tower}_model.")] for tower in sparse}
    lone = sum(len(routers[name]) for name, tower in sparse.items() if tower.num_experts == 1)
    for name, tower in sparse.items():
        # One expert has a router for the shape of its layer, which may train with all the rest
        nothing_else = tower.num_experts == 1 and lone == len(trained)
        if routers[name] and (
            nothing_else or tower.num_experts > tower.num_experts_per_tok == 1 and tower.norm_topk_prob
        ):
            yield (
                "trainable: routers would follow their balance loss alone: the weight of one expert a token is always "
                "1 with norm_topk_prob, or where there is one. Upcycle with norm_topk_prob false or more "
                "num_experts_per_tok, or leave routers out"
            )


def warn_of_equal_experts(model: PreTrainedModel) -> None:
    """Warns of routers that train between experts that are equal and stay so, as after upcycling."""
    in_vain = []
    for name, block in model.named_modules():
        if not isinstance(block, CLIPMoESparseMoeBlock):
            continue
        weights = list(block.experts.parameters())
        stay = not any(weight.requires_grad for weight in weights)
        if stay and all(torch.equal(weight, weight[:1].expand_as(weight)) for weight in weights):
            routers = [router for router in block.router.modules() if isinstance(router, CLIPMoERouter)]
            trains = any(router.weight.requires_grad and router.config.norm_topk_prob for router in routers)
            in_vain += [f"{name}.router"] * trains
    if in_vain:
        warn_once(
            logger,
            f"{join_names(in_vain)} cannot learn where experts are equal and do not train: train these, too, or first",
        )
