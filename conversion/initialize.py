"""A random CLIP and the processor that goes with it, to train from scratch."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn import init
from transformers import CLIPImageProcessorPil, CLIPProcessor, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import LARGE_INTEGER

from clip_moe.conversion.processors import (
    forget_last_call,
    load_image_processor,
    load_tokenizer,
    mark_padding,
    require_fit,
)
from clip_moe.conversion.upcycle import ROUTING_FIELDS, SPARSE_FIELDS, check_memory
from clip_moe.data.world import build_image_processor
from clip_moe.data.worlds import is_world, world
from clip_moe.engine.messages import suggestion
from modeling_clip_moe.configuration_clip_moe import SparseMoEConfig
from modeling_clip_moe.families import FAMILY_OF_TYPE, model_class
from modeling_clip_moe.sparse_moe import CLIPMoESparseMoeBlock

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")


@contextlib.contextmanager
def _as_value_errors() -> Iterator[None]:
    """Errors of transformers about settings that make no model become a `ValueError`."""
    try:
        yield
    except (ArithmeticError, LookupError, RuntimeError, StrictDataclassError, TypeError) as error:
        raise ValueError(f"invalid text_config or vision_config: {type(error).__name__}: {error}") from error


@_as_value_errors()
@torch.no_grad()
def random_clip(config: PreTrainedConfig, openai_weights: bool = False) -> PreTrainedModel:
    """A dense or sparse CLIP with random weights, drawn by transformers or as OpenAI's code does: `draw_as_openai`."""
    if isinstance(config, SparseMoEConfig):
        check_memory(config)
    model = model_class(config)(config)
    if openai_weights:
        draw_as_openai(model)
    if hasattr(model, "logit_bias"):  # the starting point of SigLIP (arXiv:2303.15343, section 3.2)
        model.logit_scale.fill_(math.log(10.0))
        model.logit_bias.fill_(-10.0)
    return model.eval()


@torch.no_grad()
def draw_as_openai(model: PreTrainedModel) -> None:
    """Draws the weights of both towers as OpenAI's code does (clip/model.py: `VisionTransformer`, and
    `initialize_parameters` of `CLIP` for texts); a shared encoder as for texts, each expert as an FFN. Routers and
    fusion gates stay.

    transformers draws queries, keys and values sqrt(2 * layers) times smaller, and positions of patches as a ninth of
    patches of 8 x 8 pixels where OpenAI's are a fourth: both towers begin nearly blind to order and place.
    """
    for tower in (model.text_model, model.vision_model):
        for layer in tower.encoder.layers:
            for ffn in _ffns(layer):
                for weight, bias in ffn:  # torch's default of linear layers
                    bound = weight.shape[-1] ** -0.5
                    init.uniform_(weight, -bound, bound)
                    if bias is not None:
                        init.uniform_(bias, -bound, bound)
            layer.self_attn.out_proj.reset_parameters()
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                bound = (6 / (4 * projection.in_features)) ** 0.5  # Xavier's, of all three in one matrix
                init.uniform_(projection.weight, -bound, bound)
                init.zeros_(projection.bias)
            init.zeros_(layer.self_attn.out_proj.bias)

    text, width = model.text_model, model.text_model.config.hidden_size
    init.normal_(text.embeddings.token_embedding.weight, std=0.02)
    init.normal_(text.embeddings.position_embedding.weight, std=0.01)
    added = width**-0.5 * (2 * len(text.encoder.layers)) ** -0.5  # of projections that add to the residual stream
    for layer in text.encoder.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            init.normal_(projection.weight, std=width**-0.5)
        init.normal_(layer.self_attn.out_proj.weight, std=added)
        for *first, (down, _) in _ffns(layer):
            init.normal_(down, std=added)
            for up, _ in first:
                init.normal_(up, std=(2 * width) ** -0.5)

    embeddings = model.vision_model.embeddings
    embeddings.patch_embedding.reset_parameters()
    for name in ("class_embedding", "position_embedding.weight"):
        # ViE has neither, SigLIP no class token
        if (table := dict(embeddings.named_parameters()).get(name)) is not None:
            init.normal_(table, std=embeddings.embed_dim**-0.5)


def _ffns(layer: nn.Module) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """The weights and biases of the linear maps of a layer's FFN, of all its experts, or of both; the last one is the
    map back to the hidden size."""
    mlp = layer.mlp
    is_sparse = isinstance(mlp, CLIPMoESparseMoeBlock)
    dense = filter(None, (mlp.base, mlp.shared_experts)) if is_sparse else (mlp,)
    ffns = [[(part.weight, part.bias) for part in ffn.children() if isinstance(part, nn.Linear)] for ffn in dense]
    if is_sparse:
        up, up_bias, down, down_bias = mlp.experts.weights()
        ffns.append([(up, up_bias), (down, down_bias)])
    return ffns


@_as_value_errors()
def clip_config(
    text_config: dict[str, Any],
    vision_config: dict[str, Any],
    projection_dim: int,
    processor: str | None = None,
    tokenizer: str | None = None,
    family: str = "clip",
) -> tuple[PreTrainedConfig, CLIPProcessor]:
    """The configuration of a dense CLIP, and the processor that goes with it.

    Args:
        text_config, vision_config: fields of the family's text and vision configurations.
        projection_dim: size of the embeddings. Those of a SigLIP's images are as wide as its vision tower.
        processor: a folder or hub name, or the name of a built-in world; None: CLIP's own image processor.
        tokenizer: a folder or hub name; None: the processor's.
        family: the type of the dense model, see `modeling_clip_moe.families`.
    """
    config_class = FAMILY_OF_TYPE[family].dense.config_class
    # The special tokens come from the tokenizer
    text = config_class.sub_configs["text_config"](**{"bos_token_id": None, "eos_token_id": None} | text_config)
    vision = config_class.sub_configs["vision_config"](**vision_config)
    source = tokenizer or processor
    images = _image_processor(processor, vision.image_size)
    texts = _tokenizer(processor, tokenizer, text.max_position_embeddings)
    numbers = {f"{name}_id": getattr(texts, f"{name}_id") for name in SPECIAL_TOKENS}
    missing = ", ".join(name for name in SPECIAL_TOKENS if numbers[f"{name}_id"] is None)
    faults = [f"the tokenizer of {source} has no {missing}: set them in tokenizer_config.json"] if missing else []
    if FAMILY_OF_TYPE[family].sigmoid and vision.hidden_size != projection_dim:
        faults.append(
            f"projection_dim is {projection_dim}, but a SigLIP does not project images: it must be the hidden_size of "
            f"vision_config, {vision.hidden_size}"
        )
    if faults:
        raise ValueError("; ".join(faults))
    text_config = {"vocab_size": max(texts.get_vocab().values()) + 1} | numbers | text_config
    if FAMILY_OF_TYPE[family].sigmoid:
        text_config = {"projection_size": projection_dim} | text_config
        config = config_class(text_config=text_config, vision_config=vision_config)
    else:
        width = {"projection_dim": projection_dim}
        config = config_class(text_config=width | text_config, vision_config=width | vision_config, **width)
    require_fit(config, "the new model", source, texts)
    require_fit(config, "the new model", processor or "CLIP", image_processor=images)
    mark_padding(config, texts)
    forget_last_call(texts)
    return config, CLIPProcessor(image_processor=images, tokenizer=texts)


def split_routing(
    family: str, towers: Mapping[str, Mapping[str, Any]], is_sparse: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The fields of dense towers, and those that say how tokens are routed, both by `text_config` and
    `vision_config`."""
    routing_fields = ROUTING_FIELDS - {"attention_dropout"}  # which a dense tower has, too
    dense, routing = {}, {}
    for tower, settings in towers.items():
        tower_class = FAMILY_OF_TYPE[family].dense.config_class.sub_configs[tower]
        names = {field.name for field in dataclasses.fields(tower_class)} - SPARSE_FIELDS
        names |= routing_fields if is_sparse else set()
        if unknown := sorted(set(settings) - names):
            hint = "set preset" if unknown[0] in routing_fields else suggestion(unknown[0], names)
            raise ValueError(f"{tower}: {tower_class.__name__} has no field {', '.join(map(repr, unknown))}: {hint}")
        dense[tower] = {name: value for name, value in settings.items() if name not in routing_fields}
        routing[tower] = {name: value for name, value in settings.items() if name in routing_fields}
    return dense, routing


def _image_processor(processor: str | None, size: int) -> Any:
    if processor is None:
        square = {"height": size, "width": size}
        return CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=square)
    if is_world(processor):
        return build_image_processor(size)
    return load_image_processor(processor)


def _tokenizer(processor: str | None, tokenizer: str | None, length: int) -> Any:
    if tokenizer is None and is_world(processor):
        return world(processor).build_tokenizer(length)
    texts = load_tokenizer(processor if tokenizer is None else tokenizer)
    if texts.model_max_length >= LARGE_INTEGER:  # it has none
        texts.model_max_length = length
    return texts
