"""Puts a CLIP-MoE into a LLaVA of transformers, in place of its vision tower."""

if __name__ == "__main__":
    from conversion.commands import llava

    llava.main()

from pathlib import Path
from typing import Any

import torch
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    CLIPConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessorPil,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from conversion.checkpoints import HINTS, check_equal, load_clip, load_model, load_weights
from conversion.folders import has_file, load_config
from conversion.processors import (
    IMAGE_PROCESSOR_FILES,
    load_image_processor,
    load_processor,
    load_tokenizer,
    require_fit,
)
from modeling_clip_moe import CLIPMoEVisionConfig, CLIPMoEVisionModel
from records.files import save
from records.messages import what_is_meant

IMAGE_TOKEN = "<image>"
SPECIAL_TOKENS = ("bos", "eos", "pad")
# Rows of a language model's table of tokens come in multiples of it, as those of llava-hf/llava-1.5-7b-hf
TOKENS_MULTIPLE = 64
# LLaVA-1.5's prompt, that of Vicuna 1.1 (llava/conversation.py, `conv_vicuna_v1`). Tokenizers add the first token.
CHAT_BEGIN = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
CHAT_TEMPLATE = (
    "{%- macro text(content) -%}{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content if part['type'] == 'image' -%}<image>{{ '\\n' }}{%- endfor -%}"
    "{%- for part in content if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}"
    "{%- endif -%}{%- endmacro -%}"
    f"{CHAT_BEGIN}"
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {{ text(message['content']) }} {% else %}"
    "ASSISTANT: {% generation %}{{ text(message['content']) }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def load_tower(source: str | Path, **kwargs) -> CLIPMoEVisionModel:
    """Loads the vision tower of a whole model or of a folder of its own."""
    config = load_config(source)
    if not isinstance(getattr(config, "vision_config", config), CLIPMoEVisionConfig):
        hint = HINTS.get(config.model_type, "")
        raise ValueError(f"{source} has no vision tower of a CLIP-MoE: it is of type {config.model_type!r}{hint}")
    return load_weights(CLIPMoEVisionModel, source, config, **kwargs)


def swap(llava: LlavaForConditionalGeneration, tower: CLIPMoEVisionModel) -> None:
    """Replaces the vision tower of a LLaVA, in place; the tower takes its dtype."""
    config, old, new = llava.config, llava.config.vision_config, tower.config
    if new.hidden_size != old.hidden_size:
        raise ValueError(
            f"the projector takes hidden states of width {old.hidden_size}, the tower's have {new.hidden_size}: choose "
            "a tower made from the CLIP that this LLaVA was trained with"
        )
    for layer in feature_layers(config):
        if not -new.num_hidden_layers - 1 <= layer <= new.num_hidden_layers:
            raise ValueError(f"vision_feature_layer {layer} is not there in a tower of {new.num_hidden_layers} layers")
    config.vision_config = new
    with_class_token = config.vision_feature_select_strategy == "full"
    config.image_seq_length = (new.image_size // new.patch_size) ** 2 + with_class_token
    llava.model.vision_tower = tower.to(llava.dtype)


def feature_layers(config: LlavaConfig) -> list[int]:
    """The hidden states of the vision tower that the projector sees."""
    layers = config.vision_feature_layer
    return [layers] if isinstance(layers, int) else list(layers)


def sample_llava_inputs(vision_config: CLIPMoEVisionConfig, text_config: PreTrainedConfig) -> dict[str, Tensor]:
    """Random images (2, channels, height, width) and token ids (1, at most 16)."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, vision_config.num_channels, vision_config.image_size, vision_config.image_size)
    input_ids = torch.arange(min(16, text_config.vocab_size - 1))[None]
    return {"pixel_values": torch.randn(shape, generator=generator), "input_ids": input_ids}


@torch.no_grad()
def expected_outputs(llava: LlavaForConditionalGeneration, tower: CLIPMoEVisionModel) -> dict[str, Tensor]:
    """What a LLaVA with this tower has to compute: the tower's hidden states, projected, and text as before."""
    config, tower = llava.config, tower.to(llava.dtype)
    inputs = sample_llava_inputs(tower.config, config.text_config)
    hidden_states = tower(inputs["pixel_values"].to(llava.dtype), output_hidden_states=True).hidden_states
    first = 1 if config.vision_feature_select_strategy == "default" else 0
    selected = torch.cat([hidden_states[layer][:, first:] for layer in feature_layers(config)], dim=-1)
    projected = llava.model.multi_modal_projector(selected)
    return {"image features": projected, "text logits": llava(inputs["input_ids"]).logits}


@torch.no_grad()
def image_features(llava: LlavaForConditionalGeneration, pixel_values: Tensor) -> Tensor:
    """Features (images, patches, width) that the language model gets."""
    return torch.stack(list(llava.model.get_image_features(pixel_values).pooler_output))


@torch.no_grad()
def verify(folder: Path, expected: dict[str, Tensor]) -> dict[str, float]:
    """Compares a saved LLaVA with `expected_outputs`."""
    llava = load_model(LlavaForConditionalGeneration, folder)
    inputs = sample_llava_inputs(llava.config.vision_config, llava.config.text_config)
    features = image_features(llava, inputs["pixel_values"].to(llava.dtype))
    return check_equal(expected, {"image features": features, "text logits": llava(inputs["input_ids"]).logits})


def write_processor(source: str | Path, tower_source: str | Path, folder: Path) -> None:
    """Saves LLaVA's processor with the tower's way to prepare images, if it has one."""
    processor, config = load_processor(source), load_config(folder)
    of_tower = has_file(tower_source, *IMAGE_PROCESSOR_FILES)
    if of_tower:
        processor.image_processor = load_image_processor(tower_source)
    image_source = tower_source if of_tower else source
    require_fit(config, tower_source, image_source, image_processor=processor.image_processor)
    processor.patch_size = config.vision_config.patch_size
    save(processor, folder)


def convert(source: str | Path, tower_source: str | Path, folder: Path) -> None:
    """Saves the LLaVA of `source` with another tower into `folder`, and its processor."""
    llava, tower = load_model(LlavaForConditionalGeneration, source), load_tower(tower_source)
    swap(llava, tower)
    llava.save_pretrained(folder)
    write_processor(source, tower_source, folder)
    expected = expected_outputs(llava, tower)
    del llava, tower
    verify(folder, expected)


def build(
    tower_source: str | Path,
    folder: Path,
    language_model: str | Path | None = None,
    text_config: dict[str, Any] | None = None,
) -> None:
    """Saves a LLaVA-1.5 whose projector is new, and its processor, into `folder`.

    The processor pads images to squares with their mean color, as LLaVA-1.5 does, then does what the tower's does. Its
    chat template is `CHAT_TEMPLATE`.

    Args:
        tower_source: a folder or hub name of a dense or sparse CLIP, or of a `CLIPMoEVisionModel`.
        language_model: a folder or hub name of one whose table of tokens can grow, such as Vicuna; None: a Llama with
            random weights and the tokenizer of `tower_source`.
        text_config: of that one, fields of `LlamaConfig`.

    Raises:
        OSError, ValueError: see `load_model`; or no language model of transformers' usual build.
    """
    vision_config = load_config(tower_source)
    is_dense = type(vision_config) is CLIPConfig
    tower = load_clip(tower_source).vision_model if is_dense else load_tower(tower_source)
    if language_model is None:
        tokenizer = text_tokenizer(load_tokenizer(tower_source))
        add_tokens(tokenizer)
        model = LlamaForCausalLM(random_config(text_config or {}, tokenizer))
        tokenizer.model_max_length = model.config.max_position_embeddings
    else:
        config, tokenizer = load_config(language_model), load_tokenizer(language_model)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{language_model} is no language model: it is of type {config.model_type!r}")
        model = load_weights(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], language_model, config)
        add_tokens(tokenizer)
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=TOKENS_MULTIPLE)
    llava = join(tower, model, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    llava.save_pretrained(folder)
    images = load_image_processor(tower_source)
    save(llava_processor(llava.config, tokenizer, images), folder)
    expected = expected_outputs(llava, tower)
    del llava, tower, model
    verify(folder, expected)


def join(tower: PreTrainedModel, language_model: PreTrainedModel, image_token: int) -> LlavaForConditionalGeneration:
    """A LLaVA of a vision tower, a language model and a random projector; the tower takes the model's dtype."""
    if not (hasattr(language_model, "model") and hasattr(language_model, "lm_head")):
        raise ValueError(f"a {type(language_model).__name__} is not made of `model` and `lm_head`, as LLaVA needs it")
    config = llava_config(tower.config, language_model.config, image_token)
    with torch.device("meta"):  # all of it is replaced
        llava = LlavaForConditionalGeneration(config)
    llava.model.vision_tower, llava.model.language_model = tower, language_model.model
    llava.lm_head, llava.generation_config = language_model.lm_head, language_model.generation_config
    projector = llava.model.multi_modal_projector.to_empty(device="cpu")
    for linear in (projector.linear_1, projector.linear_2):
        linear.reset_parameters()  # torch's own, as LLaVA's code
    llava.tie_weights()
    return llava.to(language_model.dtype).eval()


def llava_config(vision_config: PreTrainedConfig, text_config: PreTrainedConfig, image_token: int) -> LlavaConfig:
    """The configuration of a LLaVA-1.5 of these parts: it sees all patches of the last layer but one."""
    return LlavaConfig(
        vision_config=vision_config,
        text_config=text_config,
        image_token_index=image_token,
        image_seq_length=(vision_config.image_size // vision_config.patch_size) ** 2,
        dtype=text_config.dtype,
    )


def random_config(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    """That of a Llama for a tokenizer, with these fields; raises as `llama_config`."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL_TOKENS}
    return llama_config({"vocab_size": len(tokenizer), "dtype": torch.float32} | ids | fields, len(tokenizer))


def llama_config(fields: dict[str, Any], words: int) -> LlamaConfig:
    """That of a Llama with these fields.

    Args:
        words: how many tokens its tokenizer has at least.
    """
    config = LlamaConfig(**fields)
    rows, rope_type = config.vocab_size, config.rope_parameters["rope_type"]
    if rows < words:
        raise ValueError(f"text_config.vocab_size: {rows} is less than the {words} tokens of the tokenizer")
    for name in SPECIAL_TOKENS:
        ids = getattr(config, f"{name}_token_id")
        if not all(0 <= number < rows for number in (ids if isinstance(ids, list) else [ids]) if number is not None):
            raise ValueError(f"text_config.{name}_token_id: {ids} is none of the {rows} tokens, which count from 0")
    if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
        meant = what_is_meant(str(rope_type), ["default", *ROPE_INIT_FUNCTIONS])
        raise ValueError(f"text_config.rope_parameters.rope_type: there is no {rope_type!r}: {meant}")
    return config


def text_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """A CLIP's tokenizer for a language model: texts begin with the first token, and do not end with the last."""
    backend, first = tokenizer.backend_tokenizer, tokenizer.bos_token
    backend.no_truncation()
    backend.no_padding()
    template = f"{first} $A"
    backend.post_processor = TemplateProcessing(single=template, special_tokens=[(first, tokenizer.bos_token_id)])
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("</w>", " ")])  # as `CLIPTokenizer`
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def add_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds the token of an image, and one for padding where there is none. Padding stands on the left, where answers
    can go on from what it pads."""
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.padding_side = "left"


def llava_processor(config: LlavaConfig, tokenizer: PreTrainedTokenizerBase, images: Any) -> LlavaProcessor:
    """See `build`.

    Args:
        images: the tower's image processor.
    """
    known = LlavaImageProcessorPil.valid_kwargs.__annotations__
    settings = {name: value for name, value in images.to_dict().items() if name in known}
    return LlavaProcessor(
        image_processor=LlavaImageProcessorPil(**settings | {"do_pad": True}),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
