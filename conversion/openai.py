"""Converts OpenAI's original CLIP weights, and open_clip's and Long-CLIP's of the same architecture, to transformers'
`CLIPModel`.
"""

import math
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.checkpoints import load_model, loading
from clip_moe.conversion.long_context import KEPT_POSITIONS, POSITIONS
from clip_moe.conversion.open_clip import FILE, read_configuration
from clip_moe.conversion.processors import copy_processor
from clip_moe.conversion.rules import Rule, apply_rules, renaming
from clip_moe.conversion.verification import check_equal, sample_inputs
from clip_moe.engine.digests import file_digest
from clip_moe.engine.files import new_file, save, writing
from clip_moe.engine.messages import join_names
from modeling_clip_moe.families import dense_types

# From the download addresses in https://github.com/openai/CLIP/blob/main/clip/clip.py
SHA256 = {
    "ViT-B/32": "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af",
    "ViT-B/16": "5806e77cd80f8b59890b7e101eabd078d9fb84e6937f9e85e4ecb61988df416f",
    "ViT-L/14": "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836",
    "ViT-L/14@336px": "3035c92b350959924f9f00213499208652fc7ea050643e8b385c2dac08641f02",
}
HEAD_WIDTH = 64
# In open_clip's larger towers for images (ViT-H, -g, -bigG and -e) heads are wider, by the width of the tower
HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104, 1792: 112}
# Entries that only OpenAI's own archives have
OPENAI_SETTINGS = ("input_resolution", "context_length", "vocab_size")
# Modules that torch puts around others at any depth; a tensor that every CLIP has; words for averages of weights
WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module)\.")
ANCHOR = re.compile(r"(?:(.+?)\.)??(?:text\.)?token_embedding\.weight")
AVERAGE = re.compile(r"(?<![a-z])(ema|swa|avg|averaged?|shadow)(?![a-z])", re.IGNORECASE)

# OpenAI's names, and those of transformers
BLOCKS = {
    "transformer.resblocks.{layer}": "text_model.encoder.layers.{layer}",
    "visual.transformer.resblocks.{layer}": "vision_model.encoder.layers.{layer}",
}
RENAMED = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.{kind}": "text_model.final_layer_norm.{kind}",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.{kind}": "vision_model.pre_layrnorm.{kind}",
    "visual.ln_post.{kind}": "vision_model.post_layernorm.{kind}",
}
for theirs, ours in BLOCKS.items():
    RENAMED |= {
        f"{theirs}.attn.out_proj.{{kind}}": f"{ours}.self_attn.out_proj.{{kind}}",
        f"{theirs}.ln_{{norm}}.{{kind}}": f"{ours}.layer_norm{{norm}}.{{kind}}",
        f"{theirs}.mlp.c_fc.{{kind}}": f"{ours}.mlp.fc1.{{kind}}",
        f"{theirs}.mlp.c_proj.{{kind}}": f"{ours}.mlp.fc2.{{kind}}",
    }
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
PACKED = {
    f"{theirs}.attn.in_proj_{{kind}}": f"{ours}.self_attn.{{part}}_proj.{{kind}}" for theirs, ours in BLOCKS.items()
}

# Rules that sparse models share
SHARED_RULES = [
    *(renaming(theirs, ours) for theirs, ours in RENAMED.items()),
    *(renaming(theirs, ours, transform=torch.t) for theirs, ours in TRANSPOSED.items()),
    *(
        renaming(theirs, tuple(ours.replace("{part}", part) for part in "qkv"), transform=lambda qkv: qkv.chunk(3))
        for theirs, ours in PACKED.items()
    ),
    Rule("attn_mask", (), reason="the causal mask, which transformers builds itself"),
    Rule("|".join(OPENAI_SETTINGS), (), reason="follows from the other tensors' shapes"),
    Rule("positional_embedding", POSITIONS),
]
RULES = [
    *SHARED_RULES,
    Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(())),  # open_clip also writes (1,)
]


def read_state_dict(archive: Path, trust_archive: bool = False) -> dict[str, Tensor]:
    """Reads the tensors of an archive, or of a checkpoint of training, without running code from an unknown file.

    Raises:
        ValueError: a TorchScript archive that OpenAI did not publish, without `trust_archive`; or it is damaged, or
            holds several models.
    """
    torchscript = is_torchscript(archive)
    if torchscript and not trust_archive and file_digest(archive) not in SHA256.values():
        raise ValueError(
            f"{archive} is a TorchScript archive, which can run code, and not one that OpenAI published "
            f"({', '.join(SHA256)}): pass --trust_archive if you trust its source"
        )
    with loading(archive):
        if ".safetensors" in archive.suffixes:  # more may follow while it is written
            content = load_file(archive)
        elif torchscript:
            content = torch.jit.load(archive, map_location="cpu").state_dict()
        else:
            content = torch.load(archive, map_location="cpu", weights_only=True)
    return unwrap(content, archive)


def unwrap(content: Any, archive: Path) -> dict[str, Tensor]:
    """The state dict of the only CLIP in a checkpoint, at any depth of dictionaries and modules, without the `text.` of
    a separate text tower. Averages beside the weights, and weights of other modules, are skipped with a warning.
    """
    tensors = dict(_tensors(content))
    roots = {f"{match[1]}." if match[1] else "" for match in map(ANCHOR.fullmatch, tensors) if match}
    models = sorted(root for root in roots if not AVERAGE.search(root)) or sorted(roots)
    if len(models) > 1:
        names = join_names(root.rstrip(".") or "one at the top" for root in models)
        raise ValueError(f"{archive} holds several models, {names}: save only the one to convert")
    root = models[0] if models else ""
    averages = tuple(roots.difference(models))
    state, skipped = {}, {}
    for name, tensor in tensors.items():
        if name.startswith(root) and not (averages and name.startswith(averages)):
            state[WRAPPERS.sub("", name.removeprefix(root)).removeprefix("text.")] = tensor
        elif tensor.is_floating_point() and tensor.ndim and "optim" not in name:
            skipped[_beside(WRAPPERS.sub("", name), WRAPPERS.sub("", root))] = name
    if skipped:
        print(f"warning: {archive}: weights of {join_names(skipped)} are skipped", file=sys.stderr)
    return state


def _tensors(content: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dictionaries and lists, by dotted names."""
    is_list = isinstance(content, (list, tuple))
    for name, value in enumerate(content) if is_list else content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        else:
            yield from _tensors(value, f"{prefix}{name}.")


def _beside(name: str, root: str) -> str:
    """The module of a tensor outside of the model: its name up to where it leaves that of the model."""
    parts, common = name.split("."), os.path.commonprefix([name.split("."), root.split(".")])
    return ".".join(parts[: len(common) + 1])


def is_torchscript(archive: Path) -> bool:
    """Whether a file is a whole zip archive with TorchScript's constants."""
    try:
        with zipfile.ZipFile(archive) as file:
            return any(name.endswith("/constants.pkl") for name in file.namelist())
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError):  # which a damaged directory raises, too
        return False


def normalized(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with one table of text positions (Long-CLIP has two: the first 20 rows count in the first table, the
    others in `positional_embedding_res`), and with experts and gate directly in their block."""
    state = {re.sub(r"\.mlp\.(experts|gate)\.", r".\1.", key): tensor for key, tensor in state.items()}
    later = state.pop("positional_embedding_res", None)
    if later is not None:
        first = state["positional_embedding"][:KEPT_POSITIONS]
        state["positional_embedding"] = torch.cat([first, later[KEPT_POSITIONS:]])
    return state


def infer_config(
    state: Mapping[str, Tensor],
    activation: str = "quick_gelu",
    vision_heads: int | None = None,
    text_heads: int | None = None,
) -> CLIPConfig:
    """The config of a model in OpenAI's naming, from its shapes; heads where not given are width / 64, but for
    `HEAD_WIDTHS`."""
    try:
        _, _, patch_size, _ = state["visual.conv1.weight"].shape
        text, vision = tower_sizes(state, "", text_heads), tower_sizes(state, "visual.", vision_heads)
        grid = math.isqrt(len(state["visual.positional_embedding"]) - 1)
        vocab_size, length = len(state["token_embedding.weight"]), len(state["positional_embedding"])
        projection_dim = state["text_projection"].shape[1]
    except KeyError as error:
        raise ValueError(
            f"not a CLIP in OpenAI's naming: missing {error.args[0]}; it starts with {list(state)[:3]}: {dense_types()}"
        ) from None
    common = {"hidden_act": activation, "projection_dim": projection_dim}
    return CLIPConfig(
        text_config={
            **text,
            **common,
            "vocab_size": vocab_size,
            "max_position_embeddings": length,
            "bos_token_id": vocab_size - 2,
            "eos_token_id": 2,  # pool at the highest token id
        },
        vision_config={**vision, **common, "patch_size": patch_size, "image_size": grid * patch_size},
        projection_dim=projection_dim,
    )


def tower_sizes(state: Mapping[str, Tensor], prefix: str, heads: int | None, up: str = "mlp.c_fc") -> dict[str, int]:
    """The sizes of one tower as transformers' config fields; `up` is the first layer of its FFNs."""
    block = re.escape(prefix) + r"transformer\.resblocks\.(\d+)\..*"
    layers = {int(match[1]) for key in state if (match := re.fullmatch(block, key))}
    intermediate_size, width = state[f"{prefix}transformer.resblocks.0.{up}.weight"].shape
    head_width = HEAD_WIDTHS.get(width, HEAD_WIDTH) if prefix else HEAD_WIDTH
    if heads is None and width % head_width:
        raise ValueError(
            f"a width of {width} is not a multiple of {head_width}: put the {FILE} with the heads beside the weights"
        )
    return {
        "hidden_size": width,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads or width // head_width,
    }


def build(state: Mapping[str, Tensor], **settings) -> CLIPModel:
    """Builds the float32 `CLIPModel` of a state dict in OpenAI's naming; for `settings` see `infer_config`."""
    if integers := [key for key, tensor in state.items() if tensor.ndim and not tensor.is_floating_point()]:
        kind = state[integers[0]].dtype
        raise ValueError(f"{integers[0]} holds {kind}: use a checkpoint that is not quantized")
    model = CLIPModel(infer_config(state, **settings))
    state = {key: tensor.float() for key, tensor in state.items()}
    model.load_state_dict(apply_rules(state, model.state_dict(), RULES))
    return model.eval()


@torch.no_grad()
def original_outputs(
    state: Mapping[str, Tensor], config: CLIPConfig, pixel_values: Tensor, input_ids: Tensor
) -> dict[str, Tensor]:
    """The published architecture in plain functions, on the unconverted float32 tensors.

    Source: https://github.com/openai/CLIP/blob/main/clip/model.py, VisionTransformer and CLIP. Sparse blocks
    are those of CLIP-MoE's authors (https://arxiv.org/abs/2409.19291).

    Args:
        pixel_values: (B, 3, H, W).
        input_ids: (B, T), pooled at the highest id.
    """
    patches = F.conv2d(pixel_values, state["visual.conv1.weight"], stride=config.vision_config.patch_size)
    patches = patches.flatten(2).transpose(1, 2)  # (B, patches, D)
    class_token = state["visual.class_embedding"].expand(len(patches), 1, -1)
    x = torch.cat([class_token, patches], dim=1) + state["visual.positional_embedding"]
    x = residual_blocks(state, "visual.", config.vision_config, layer_norm(state, "visual.ln_pre", x))
    image_embeds = layer_norm(state, "visual.ln_post", x[:, 0]) @ state["visual.proj"]

    length = input_ids.shape[1]
    x = state["token_embedding.weight"][input_ids] + state["positional_embedding"][:length]
    x = layer_norm(state, "ln_final", residual_blocks(state, "", config.text_config, x, causal=True))
    text_embeds = x[torch.arange(len(x)), input_ids.argmax(dim=-1)] @ state["text_projection"]

    image_embeds, text_embeds = F.normalize(image_embeds, dim=-1), F.normalize(text_embeds, dim=-1)
    return {
        "logits": state["logit_scale"].exp() * image_embeds @ text_embeds.T,
        "image embeddings": image_embeds,
        "text embeddings": text_embeds,
    }


def residual_blocks(
    state: Mapping[str, Tensor], prefix: str, config: PreTrainedConfig, x: Tensor, causal: bool = False
) -> Tensor:
    """The transformer of one tower; x is (B, T, D)."""
    for index in range(config.num_hidden_layers):
        block = f"{prefix}transformer.resblocks.{index}"
        weight, bias = state[f"{block}.attn.in_proj_weight"], state[f"{block}.attn.in_proj_bias"]
        packed = F.linear(layer_norm(state, f"{block}.ln_1", x), weight, bias)  # (B, T, 3 D)
        query, key, value = packed.unflatten(-1, (3, config.num_attention_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2).flatten(2)
        x = x + linear(state, f"{block}.attn.out_proj", attended)
        normed = layer_norm(state, f"{block}.ln_2", x)
        is_sparse = f"{block}.gate.weight" in state
        x = x + (mixture(state, block, config, normed) if is_sparse else ffn(state, f"{block}.mlp", config, normed))
    return x


def mixture(state: Mapping[str, Tensor], block: str, config: PreTrainedConfig, x: Tensor) -> Tensor:
    """The experts of a sparse block."""
    top, chosen = (x @ state[f"{block}.gate.weight"].T).topk(config.num_experts_per_tok)  # (B, T, K)
    weights = x.new_zeros((len(x), x.shape[1], config.num_experts)).scatter(-1, chosen, top.softmax(dim=-1))
    experts = [ffn(state, f"{block}.experts.{number}", config, x) for number in range(config.num_experts)]
    return torch.einsum("bte,ebtd->btd", weights, torch.stack(experts))


def ffn(state: Mapping[str, Tensor], name: str, config: PreTrainedConfig, x: Tensor) -> Tensor:
    hidden = linear(state, f"{name}.c_fc", x)
    hidden = F.gelu(hidden) if config.hidden_act == "gelu" else hidden * torch.sigmoid(1.702 * hidden)
    return linear(state, f"{name}.c_proj", hidden)


def linear(state: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def layer_norm(state: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])


@torch.no_grad()
def verify(state: Mapping[str, Tensor], model: PreTrainedModel) -> None:
    """Compares an archive with a float32 model."""
    inputs = sample_inputs(model.config)
    outputs = model(**inputs)
    check_equal(
        original_outputs({key: tensor.float() for key, tensor in normalized(state).items()}, model.config, **inputs),
        {
            "logits": outputs.logits_per_image,
            "image embeddings": outputs.image_embeds,
            "text embeddings": outputs.text_embeds,
        },
    )


def convert(
    archive: Path, folder: Path, activation: str | None, processor: str | None, trust_archive: bool = False
) -> None:
    """Writes the model of an archive into a folder, and verifies it; for the arguments see the stage `openai`."""
    state = read_state_dict(archive, trust_archive)
    from_openai = all(key in state for key in OPENAI_SETTINGS) or "positional_embedding_res" in state
    state = normalized(state)
    settings, images = {}, None
    if not from_openai:  # whose own files say enough: one of open_clip's beside them is that of another model
        settings, images = read_configuration(archive, infer_config(state, vision_heads=1, text_heads=1))
    if activation is not None:
        settings["activation"] = activation
    elif "activation" not in settings and not from_openai:
        print(
            f"warning: neither the file nor an {FILE} beside it names the activation: took OpenAI's quick_gelu; models "
            "trained with open_clip need --activation gelu unless named -quickgelu",
            file=sys.stderr,
        )
    write(build(state, **settings), folder, processor, images)
    verify(state, load_model(CLIPModel, folder))


def export(model: PreTrainedModel, needed: Mapping[str, Any], rules: Sequence[Rule]) -> dict[str, Tensor]:
    """The checkpoint of a model in another layout, in the model's dtype, if all that is `needed` holds: condition ->
    whether it does."""
    if unmet := [condition for condition, holds in needed.items() if not holds]:
        raise ValueError(f"the released layout cannot hold this model: {'; '.join(unmet)}")
    exported = apply_rules(model.state_dict(), None, rules)
    return {key: tensor.contiguous() for key, tensor in exported.items()}


def write_state_dict(state: Mapping[str, Tensor], output: Path, verify: Callable[[dict[str, Tensor]], None]) -> None:
    """Writes tensors as a file, which is read again and verified before it gets its name."""
    with new_file(output) as partial:
        with writing(output), partial.open("wb") as file:  # torch's own writer does not say what went wrong
            torch.save(state, file)
        verify(read_state_dict(partial))


def write(model: PreTrainedModel, folder: Path, processor: str | None, images: Mapping[str, Any] | None = None) -> None:
    """Saves a model, and the processor of a folder or hub name with these settings for images."""
    save(model, folder)
    if processor is None:
        print("warning: the result has no processor: give one with --processor", file=sys.stderr)
    else:
        copy_processor(processor, folder, model.config.text_config.max_position_embeddings, images)
