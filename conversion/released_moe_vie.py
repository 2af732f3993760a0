"""Converts the checkpoints that MoE-ViE's authors released, and back (https://arxiv.org/abs/2608.17402)."""

import functools
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import cached_file

from clip_moe.conversion import openai
from clip_moe.conversion.checkpoints import load, load_model
from clip_moe.conversion.open_clip import image_processor_settings
from clip_moe.conversion.openai import BLOCKS, TRANSPOSED
from clip_moe.conversion.rules import Rule, apply_rules, renaming
from clip_moe.engine.local_names import is_hub_name
from clip_moe.engine.messages import join_names
from modeling_clip_moe.configuration_moe_vie import MoEViEConfig, MoEViETextConfig, MoEViEVisionConfig
from modeling_clip_moe.modeling_moe_vie import MoEViEModel


@dataclass(frozen=True)
class Released:
    """What the tensors of a released model do not tell: the heads of its text tower and of the pooling, experts per
    token, and the size of images."""

    text_heads: int
    pooling_heads: int
    num_experts_per_tok: int
    image_size: int


# By the width of the image tower: MoEViE-B16-224, -L16-384 and -H14-448
RELEASED = {768: Released(16, 8, 3, 224), 1024: Released(16, 8, 3, 384), 1280: Released(16, 16, 7, 448)}
# What the authors' code computes with, and no tensor tells
ROUTING = {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1, "fusion_gate": False}
ROUTING |= {"moe_mlp_bias": False, "use_expert_bias": True, "eval_capacity_factor": None}
THETA = 10_000.0
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The authors' names, and ours
RENAMED = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.{kind}": "vision_model.pre_layrnorm.{kind}",
    "visual.attn_pool.probe": "vision_model.head.probe",
    "visual.attn_pool.attn.in_proj_{kind}": "vision_model.head.attention.in_proj_{kind}",
    "visual.attn_pool.attn.out_proj.{kind}": "vision_model.head.attention.out_proj.{kind}",
    "visual.attn_pool.layernorm.{kind}": "vision_model.head.layernorm.{kind}",
    "visual.attn_pool.mlp.c_fc.{kind}": "vision_model.head.mlp.fc1.{kind}",
    "visual.attn_pool.mlp.c_proj.{kind}": "vision_model.head.mlp.fc2.{kind}",
}
for theirs, ours in BLOCKS.items():
    RENAMED |= {
        f"{theirs}.attn.ln.{{kind}}": f"{ours}.layer_norm1.{{kind}}",
        f"{theirs}.attn.attn.out_proj.{{kind}}": f"{ours}.self_attn.out_proj.{{kind}}",
        f"{theirs}.mlp.ln.{{kind}}": f"{ours}.layer_norm2.{{kind}}",
    }
    RENAMED |= {f"{theirs}.mlp.mlp.{p}_proj.{{kind}}": f"{ours}.mlp.{p}_proj.{{kind}}" for p in ("gate", "up", "down")}
MOE, OUR_MOE = "visual.transformer.resblocks.{layer}.mlp.moe", "vision_model.encoder.layers.{layer}.mlp"
RENAMED |= {
    f"{MOE}.w1": f"{OUR_MOE}.experts.gate_up_proj",
    f"{MOE}.w2": f"{OUR_MOE}.experts.down_proj",
    f"{MOE}._gate_module.weight": f"{OUR_MOE}.router.weight",
    f"{MOE}.expert_bias": f"{OUR_MOE}.router.expert_bias",
}
RENAMED |= {
    f"{MOE}._shared_module.{part}_proj.weight": f"{OUR_MOE}.shared_experts.{part}_proj.weight"
    for part in ("gate", "up", "down")
}
PACKED = {
    f"{theirs}.attn.attn.in_proj_{{kind}}": f"{ours}.self_attn.{{part}}_proj.{{kind}}"
    for theirs, ours in BLOCKS.items()
}
FREQUENCIES = "visual.transformer.resblocks.{layer}.attn.attn.rope.freqs"


def _reordered(rows: Tensor, heads: int, sizes: tuple[int, int]) -> Tensor:
    """Rows of queries or keys with the channels of each head transposed, see `modeling_moe_vie`."""
    return rows.unflatten(0, (heads, *sizes)).transpose(1, 2).flatten(0, 2) if heads else rows


def _unpacked(packed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; `heads` is 0 where they do not rotate."""
    queries, keys, values = (part.clone() for part in packed.chunk(3))
    return _reordered(queries, heads, (-1, 2)), _reordered(keys, heads, (-1, 2)), values


def _packed(parts: list[Tensor], heads: int) -> Tensor:
    """The way back, from keys, queries and values: their names as they are sorted."""
    keys, queries, values = parts
    return torch.cat([_reordered(queries, heads, (2, -1)), _reordered(keys, heads, (2, -1)), values])


def _rotating_heads(config: MoEViEConfig, ours: str) -> int:
    return config.vision_config.num_attention_heads if ours.startswith("vision_model.") else 0


def loading_rules(config: MoEViEConfig) -> list[Rule]:
    """Rules from a checkpoint to `MoEViEModel`."""
    rules = [renaming(theirs, ours) for theirs, ours in RENAMED.items()]
    rules += [
        renaming(theirs, ours, transform=lambda weight: weight.T.contiguous()) for theirs, ours in TRANSPOSED.items()
    ]
    for theirs, ours in PACKED.items():
        targets = tuple(ours.replace("{part}", part) for part in "qkv")
        unpack = functools.partial(_unpacked, heads=_rotating_heads(config, ours))
        rules.append(renaming(theirs, targets, transform=unpack))
    rules.append(renaming(FREQUENCIES, (), reason="follow from the size of a head"))
    return [*rules, Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(1))]


def saving_rules(config: MoEViEConfig) -> list[Rule]:
    """Rules from `MoEViEModel` to a checkpoint, but for its frequencies."""
    rules = [renaming(ours, theirs) for theirs, ours in RENAMED.items()]
    rules += [renaming(ours, theirs, transform=torch.t) for theirs, ours in TRANSPOSED.items()]
    for theirs, ours in PACKED.items():
        pack = functools.partial(_packed, heads=_rotating_heads(config, ours))
        rules.append(renaming(ours, theirs, transform=pack, merges=True))
    return [*rules, Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(()))]


def frequencies(head_size: int) -> Tensor:
    """Those of the rotary positions of rows, and of columns."""
    return THETA ** -(torch.arange(0, head_size // 2, 2).float() / (head_size // 2))


def infer_config(state: Mapping[str, Tensor], released: Released | None = None) -> MoEViEConfig:
    """The configuration of a checkpoint, from its tensors. Whether all of them fit it, the rules tell."""
    expert = re.compile(r"visual\.transformer\.resblocks\.(\d+)\.mlp\.moe\.w2")
    try:
        width, _, patch_size, _ = _sizes(state, "visual.conv1.weight", 4)
        if released is None and width not in RELEASED:
            widths = ", ".join(map(str, RELEASED))
            raise ValueError(f"an image tower {width} wide is none of MoE-ViE's released ones, which are {widths} wide")
        (pairs,) = _sizes(state, FREQUENCIES.format(layer=0), 1)
        released, head_size = released or RELEASED[width], 4 * pairs
        layers = sorted(int(match[1]) for match in map(expert.fullmatch, state) if match)
        if not layers:
            raise ValueError("the checkpoint has no experts: MoE-ViE's released ones have some in every layer but 0")
        experts, _, expert_size = _sizes(state, f"{MOE.format(layer=layers[0])}.w2", 3)
        shared_size, _ = _sizes(state, f"{MOE.format(layer=layers[0])}._shared_module.up_proj.weight", 2)
        vocab_size, _ = _sizes(state, "token_embedding.weight", 2)
        length, _ = _sizes(state, "positional_embedding", 2)
        _, projection_dim = _sizes(state, "text_projection", 2)
        for prefix in ("", "visual."):
            _sizes(state, f"{prefix}transformer.resblocks.0.mlp.mlp.up_proj.weight", 2)
        vision = MoEViEVisionConfig(
            **openai.tower_sizes(state, "visual.", width // head_size, up="mlp.mlp.up_proj"),
            patch_size=patch_size,
            image_size=released.image_size,
            num_pooling_heads=released.pooling_heads,
            moe_layers=layers,
            num_experts=experts,
            num_experts_per_tok=released.num_experts_per_tok,
            moe_intermediate_size=expert_size,
            num_shared_experts=shared_size // expert_size,
            **ROUTING,
        )
        text = MoEViETextConfig(
            **openai.tower_sizes(state, "", released.text_heads, up="mlp.mlp.up_proj"),
            vocab_size=vocab_size,
            max_position_embeddings=length,
            bos_token_id=vocab_size - 2,
            eos_token_id=vocab_size - 1,  # the highest: texts are pooled there
        )
    except KeyError as error:
        names = join_names(list(state)[:3])
        raise ValueError(
            f"not a MoE-ViE in its authors' naming: missing {error.args[0]}; it starts with {names}"
        ) from None
    for key in (key for key in state if key.endswith("rope.freqs")):
        given, expected = state[key].float(), frequencies(head_size)
        if given.shape != expected.shape or not torch.allclose(given, expected, rtol=5e-3):  # bfloat16 rounds
            raise ValueError(f"{key} are not the powers of {THETA:g} that released models have")
    return MoEViEConfig(text_config=text, vision_config=vision, projection_dim=projection_dim, router_aux_loss_coef=0.0)


def _sizes(state: Mapping[str, Tensor], name: str, axes: int) -> torch.Size:
    """The shape of a tensor by which others are known. Raises ValueError if it has other axes, or one of size 0."""
    if state[name].ndim != axes or not state[name].numel():
        raise ValueError(f"{name} is {tuple(state[name].shape)}: it must have {axes} axes, and none of size 0")
    return state[name].shape


def _precision(state: Mapping[str, Tensor]) -> torch.dtype:
    """The highest precision of a checkpoint's weights. Raises ValueError if one is quantized or has no data."""
    for name, tensor in state.items():
        if tensor.dtype not in PRECISIONS or tensor.is_meta:
            kind = "no data" if tensor.is_meta else str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{name} holds {kind}: use a whole checkpoint that is not quantized")
    kinds = {tensor.dtype for name, tensor in state.items() if not name.endswith(("expert_bias", "rope.freqs"))}
    return functools.reduce(torch.promote_types, kinds)


def build(state: Mapping[str, Tensor], released: Released | None = None) -> MoEViEModel:
    """Builds the model of a checkpoint in the authors' layout, in its highest precision; `released` where it is none of
    theirs."""
    dtype, config = _precision(state), infer_config(state, released)
    with torch.device("meta"):
        target = MoEViEModel(config).state_dict()
    weights = apply_rules(state, target, loading_rules(config))
    # transformers' own way to a model whose weights are not drawn first: the largest has 4.4 billion
    return MoEViEModel.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()


def export(model: MoEViEModel) -> dict[str, Tensor]:
    """The checkpoint of a model in the authors' layout, in the model's dtype."""
    text, vision = model.config.text_config, model.config.vision_config
    needed = {
        "the text tower must be dense": not text.moe_layers,
        "hidden_act must be silu": text.hidden_act == vision.hidden_act == "silu",
        "layer_norm_eps must be 1e-05": text.layer_norm_eps == vision.layer_norm_eps == 1e-5,
        f"rope_theta must be {THETA:g}": vision.rope_theta == THETA,
        "the image tower must have sparse layers and shared experts": vision.moe_layers and vision.num_shared_experts,
    }
    needed |= {f"{name} must be {value}": getattr(vision, name) == value for name, value in ROUTING.items()}
    released = RELEASED.get(vision.hidden_size)
    shape = text.num_attention_heads, vision.num_pooling_heads, vision.num_experts_per_tok
    released_shape = shape if released is None else astuple(released)[:3]
    condition = "heads of the text tower, num_pooling_heads and num_experts_per_tok must be"
    needed[f"{condition} {', '.join(map(str, released_shape))}, as released at this width"] = shape == released_shape
    needed["texts must be pooled at the highest token id"] = text.eos_token_id in (2, text.vocab_size - 1)
    exported = openai.export(model, needed, saving_rules(model.config))
    powers = frequencies(vision.hidden_size // vision.num_attention_heads).to(model.dtype)
    return exported | {FREQUENCIES.format(layer=layer): powers.clone() for layer in range(vision.num_hidden_layers)}


def require_same(state: Mapping[str, Tensor], model: MoEViEModel) -> None:
    """Raises ValueError if the way back from a model does not give a checkpoint to the bit; frequencies are checked
    where they are read."""
    back = export(model)
    differing = sorted(state.keys() ^ back.keys())
    differing += [
        key
        for key, tensor in back.items()
        if key in state and not key.endswith("rope.freqs") and not torch.equal(tensor.double(), state[key].double())
    ]
    if differing:
        raise ValueError(f"the converted model differs from the checkpoint in {join_names(differing)}")
    print(f"converted back, all {len(back)} tensors equal the checkpoint's")


def checkpoint_file(checkpoint: str) -> Path:
    """The file, or that of a repository on the Hub, which has the repository's name."""
    if Path(checkpoint).is_file() or not is_hub_name(checkpoint):
        return Path(checkpoint)
    return Path(load(cached_file, checkpoint, filename=f"{checkpoint.partition('/')[2]}.pt"))


def convert(checkpoint: str, folder: Path, processor: str | None, resize_mode: str) -> None:
    """Writes the model of a released checkpoint into a folder, and verifies it."""
    state = openai.read_state_dict(checkpoint_file(checkpoint))
    model = build(state)
    half = [0.5, 0.5, 0.5]
    images = {"mean": half, "std": half, "interpolation": "bicubic", "resize_mode": resize_mode}
    openai.write(model, folder, processor, image_processor_settings(images, model.config.vision_config.image_size))
    require_same(state, load_model(MoEViEModel, folder))


def write_checkpoint(source: str, output: Path) -> None:
    """Writes a model as a file in the format that was released, and verifies it."""
    model = load_model(MoEViEModel, source)
    openai.write_state_dict(export(model), output, lambda written: require_same(written, model))
