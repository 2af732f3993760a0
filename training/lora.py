"""LoRA (arXiv:2106.09685): small adapters train instead of the weights, and are added to them at the end. By peft."""

import logging
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from clip_moe.engine.messages import join_names, one_line, warn_once
from clip_moe.evaluation.costs import meta_model
from clip_moe.training.optimizers import set_trainable
from clip_moe.training.train_settings import LoraSettings

logger = logging.getLogger(__name__)


def add_adapters(model: PreTrainedModel, settings: LoraSettings, seed: int) -> None:
    """Give a model adapters, which start as 0, and freeze all but these and `trainable`.

    Args:
        seed: draws the adapters.
    """
    if getattr(model.config, "shared_encoder", False):
        raise ValueError("lora: an encoder that both towers have would get two adapters")
    whole = set(set_trainable(model, settings.trainable)[0]) if settings.trainable is not None else set()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _peft_model(model, settings)
    plain = {name.replace(".base_layer", ""): parameter for name, parameter in model.named_parameters()}
    for name in whole:
        plain[name].requires_grad_(True)


def merge_adapters(
    model: PreTrainedModel, settings: LoraSettings, state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights of an ordinary model, with the adapters added to them.

    Args:
        model: whose configuration counts.
        state_dict: the weights of a model with adapters.
    """
    adapted = _peft_model(meta_model(model.config), settings)
    # Merging adds to the weights in place, which are those of the model that trains
    copies = {name: value.clone() for name, value in state_dict.items()}
    adapted.base_model.model.load_state_dict(copies, assign=True)
    return adapted.merge_and_unload().state_dict()


def _peft_model(model: PreTrainedModel, settings: LoraSettings) -> nn.Module:
    """Adapters are put into the model itself."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"lora is peft's: pip install peft ({error})") from error
    names = [f".{name}." for name, _ in model.named_parameters()]
    targets = settings.target_modules + settings.target_parameters
    missing = [target for target in targets if not any(f".{target}." in name for name in names)]
    if missing:
        raise ValueError(f"lora: the model has no {', '.join(missing)}")
    # Weights that others take without calling their module, so that an adapter there would do nothing: the output of
    # torch's attention, which SigLIP's pooling head has, and the positions that NaFlex interpolates
    parts = {nn.MultiheadAttention: "out_proj", Siglip2VisionEmbeddings: "position_embedding"}
    excluded = [f"{name}.{parts[type(module)]}" for name, module in model.named_modules() if type(module) in parts]
    ends = tuple(f".{target}" for target in targets)
    if left_out := [name for name in excluded if f".{name}".endswith(ends) or f".{name}.weight".endswith(ends)]:
        warn_once(
            logger,
            f"lora: no adapter for {join_names(left_out)}: the model reads the weight without calling the layer, so "
            "an adapter would get no gradient. lora.trainable trains it whole",
        )
    ends = tuple(f".{target}" for target in settings.target_parameters)
    parameters = [name for name, _ in model.named_parameters() if f".{name}".endswith(ends)]
    parameters = [name for name in parameters if name.removesuffix(".weight") not in excluded]
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        target_modules=settings.target_modules,
        target_parameters=parameters or None,
        exclude_modules=excluded or None,
    )
    try:
        return get_peft_model(model, config)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"lora: {one_line(error)}") from error
