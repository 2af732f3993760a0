"""What the settings of a stage that trains ask of its model."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from conversion.checkpoints import is_sparse
from conversion.messages import cut

if TYPE_CHECKING:
    from training.stages.train import TrainStage


def checks_of_model(stage: "TrainStage", model: PreTrainedModel, trainable: list[str]) -> dict[str, Callable[[], None]]:
    """Setting -> what raises a ValueError if the setting does not go with the model.

    Args:
        trainable: the names of the parameters that train.
    """
    return {
        "balance_top_k": lambda: require_choices(stage, model),
        "expert_dropout": lambda: require_experts(stage, model),
        "balance_mean": lambda: require_shared(stage, model),
        "local_entropy_coef": lambda: require_routers(stage, model, "local_entropy_coef"),
        "global_entropy_coef": lambda: require_routers(stage, model, "global_entropy_coef"),
        "mini_batch_size": lambda: require_groups(stage, model),
        "torch_compile": lambda: require_compilable(stage, model),
        "hidden_states": lambda: require_frozen_below(stage, model, trainable),
    }


def require_choices(stage: "TrainStage", model: PreTrainedModel) -> None:
    """A balance loss can count no more choices than there are experts."""
    if stage.balance_top_k is None or not is_sparse(model.config):
        return
    for config in (model.config.text_config, model.config.vision_config):
        if config.moe_layers and stage.balance_top_k > config.num_experts:
            raise ValueError(f"{stage.name}: balance_top_k {stage.balance_top_k} of {config.num_experts} experts")


def require_experts(stage: "TrainStage", model: PreTrainedModel) -> None:
    if stage.expert_dropout is not None and not is_sparse(model.config):
        raise ValueError(f"{stage.name}: expert_dropout goes with a sparse model, but {stage.model} is dense")


def require_shared(stage: "TrainStage", model: PreTrainedModel) -> None:
    """A shared balance goes with a shared encoder, whose towers choose as many experts a token."""
    if stage.balance_mean != "shared":
        return
    if not getattr(model.config, "shared_encoder", False):
        raise ValueError(f"{stage.name}: balance_mean shared goes with a shared encoder, which {stage.model} has not")
    text, vision = (tower.num_experts_per_tok for tower in (model.config.text_config, model.config.vision_config))
    if text != vision:
        raise ValueError(
            f"{stage.name}: balance_mean shared needs one num_experts_per_tok, but it is {text} for texts and "
            f"{vision} for images: take tower"
        )


def require_routers(stage: "TrainStage", model: PreTrainedModel, setting: str) -> None:
    """An entropy loss goes with towers that have routers, and its experts are no more than there are."""
    for tower in getattr(stage, setting):
        config = getattr(model.config, f"{tower}_config")
        if not getattr(config, "moe_layers", []):
            raise ValueError(f"{stage.name}.{setting}.{tower}: that tower has no sparse layers: leave it out")
        enough = stage.global_entropy_min_experts.get(tower, 0) if setting == "global_entropy_coef" else 0
        if enough > config.num_experts:
            raise ValueError(
                f"{stage.name}.global_entropy_min_experts.{tower} is {enough:g}, but there are {config.num_experts} "
                "experts"
            )


def require_groups(stage: "TrainStage", model: PreTrainedModel) -> None:
    """Where a batch is computed in parts, they must have the groups of the whole batch."""
    if stage.mini_batch_size is None or not is_sparse(model.config):
        return
    wrong = []
    for tower, captions in (("text", len(stage.caption_weights or [1])), ("vision", 1)):
        config = getattr(model.config, f"{tower}_config")
        if not config.moe_layers:
            continue
        if captions > 1 and (config.capacity_factor is not None or config.router_jitter_noise):
            raise ValueError(
                f"{stage.name}.mini_batch_size: an image may lack captions, so that parts would have other groups "
                "of texts for capacity and router noise than the whole batch: leave it out, or upcycle without "
                "these in the text tower"
            )
        if config.capacity_factor is None:
            continue
        group, sequences = config.capacity_group_size, stage.mini_batch_size * captions
        if group is None or sequences % group:
            wrong.append(
                f"{tower}_config.capacity_group_size is {group}, and {sequences} sequences are computed at a time"
            )
    if wrong:
        raise ValueError(
            f"{stage.name}.mini_batch_size: {'; '.join(wrong)}: set it in the stage that makes the model to a number "
            "that divides them"
        )


def require_compilable(stage: "TrainStage", model: PreTrainedModel) -> None:
    """Noise in groups has generators of its own, with which the compiler would start anew in every step."""
    towers = [model.config.text_config, model.config.vision_config] if is_sparse(model.config) else []
    if stage.torch_compile and any(tower.router_jitter_noise for tower in towers):
        raise ValueError(f"{stage.name}.torch_compile: the model has router_jitter_noise: leave out one of them")


def require_frozen_below(stage: "TrainStage", model: PreTrainedModel, trainable: list[str]) -> None:
    """Nothing that trains may lie below the first sparse layers, whose input is kept."""
    if stage.hidden_states is None:
        return
    if not is_sparse(model.config):
        raise ValueError(f"{stage.name}: hidden_states go with a sparse model, but {stage.model} is dense")
    kept = below_sparse_layers(model, trainable)
    if kept:
        raise ValueError(
            f"{stage.name}: hidden_states go with frozen layers below the first sparse ones, but {cut(kept)} train"
        )


def below_sparse_layers(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """The names of parameters below the first sparse layer of a tower of a sparse model."""
    found = []
    for tower in ("text_model", "vision_model"):
        below = "|".join(str(layer) for layer in range(min(getattr(model, tower).config.moe_layers, default=0)))
        pattern = re.compile(rf"{tower}\.(embeddings|pre_layrnorm|encoder\.layers\.({below or '(?!)'}))\.")
        found += [name for name in names if pattern.match(name)]
    return found
