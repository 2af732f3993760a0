"""The parameters that train, or adapters in place of them (LoRA, arXiv:2106.09685, by peft), and its optimizer."""

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from clip_moe.conversion.upcycle import sparse_blocks
from clip_moe.engine.messages import join_names, one_line, warn_once
from clip_moe.evaluation.costs import meta_model
from clip_moe.training.train_settings import Kind, LoopSettings, LoraSettings

logger = logging.getLogger(__name__)

# A part whose weights change the square of a block's output by less than this share, as rounding does, changes nothing
ROUNDING = 1e-5

# A kind of weights -> what the names of its parameters contain. The kind `norms` goes by modules instead
NAMES_OF_KIND = {"routers": ".router.", "experts": ".experts."}

# Besides norms, which families call as they like: as CLIP (section 2.5) and everybody after it
NO_DECAY = re.compile(r"(bias|class_embedding|logit_scale)$")


def set_trainable(model: nn.Module, wanted: str | Sequence[Kind]) -> list[str]:
    """Train the parameters of these kinds, or those in whose name, or one of whose names, the regular expression is
    found; freeze the others. Returns the names of those that train."""
    named = list(model.named_parameters(remove_duplicate=False))  # an encoder of both towers has two names
    kinds = [wanted] if isinstance(wanted, str) and wanted in get_args(Kind) else wanted
    if isinstance(kinds, str):
        try:
            compiled = re.compile(kinds)
        except re.error as error:
            raise ValueError(f"trainable pattern {kinds!r} is not a regular expression: {error}") from error
        matching = {parameter for name, parameter in named if compiled.search(name)}
        if not matching:
            examples = ", ".join(name for name, _ in named[:3])
            raise ValueError(f"trainable pattern {kinds!r} matches no parameter; names are {examples}, ...")
    else:
        found = {kind: _parameters_of_kind(model, kind) for kind in kinds}
        if missing := [kind for kind, parameters in found.items() if not parameters]:
            raise ValueError(f"the model has no {' and no '.join(missing)}")
        matching = set().union(*found.values())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in matching)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _parameters_of_kind(model: nn.Module, kind: Kind) -> set[nn.Parameter]:
    if kind == "norms":
        return _norm_parameters(model)
    return {p for name, p in model.named_parameters(remove_duplicate=False) if NAMES_OF_KIND[kind] in name}


def _norm_parameters(model: nn.Module) -> set[nn.Parameter]:
    norms = (module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm))
    return {parameter for norm in norms for parameter in norm.parameters(False)}


def add_adapters(model: PreTrainedModel, settings: LoraSettings, seed: int) -> None:
    """Give a model adapters, which start as 0, and freeze all but these and `trainable`.

    Args:
        seed: draws the adapters.
    """
    if getattr(model.config, "shared_encoder", False):
        raise ValueError("lora: a shared encoder would get two adapters; train it without lora")
    whole = set_trainable(model, settings.trainable) if settings.trainable is not None else []
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
        raise ValueError(f"lora needs peft: pip install peft ({error})") from error
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
            f"lora: no adapter for {join_names(left_out)}: the model reads the weight without calling the layer, so "
            "an adapter would get no gradient. lora.trainable trains it in full",
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
            "%s: %s train between equal experts that are frozen, so the task gives them no gradient: train experts, "
            "too, or first",
            name,
            join_names(idle),
        )


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> list[dict]:
    """AdamW's groups of the trainable parameters: those that decay, with `decay_all` all, and those that do not.

    Biases are told by their names, not by their rank: the stacked ones of experts have two axes.
    """
    groups = defaultdict(list)
    norm_parameters = _norm_parameters(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = decay_all or (NO_DECAY.search(name) is None and parameter not in norm_parameters)
            groups[decays].append(parameter)
    return [
        {"params": groups[decays], "weight_decay": weight_decay * decays} for decays in sorted(groups, reverse=True)
    ]


def make_optimizer(task: nn.Module, settings: LoopSettings, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters of a task."""
    groups = parameter_groups(task, settings.weight_decay, settings.decay_all)
    # Where AdamW is one kernel. On a CPU its updates round otherwise than the plain ones.
    is_fused = device.type in ("cuda", "xpu")
    betas = settings.adam_beta1, settings.adam_beta2
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.adam_epsilon, fused=is_fused)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the state that its first step makes, by a step that changes no weight."""
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate
