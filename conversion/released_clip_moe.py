"""Converts the checkpoints that CLIP-MoE's authors released, and back (https://arxiv.org/abs/2409.19291).

    python -m conversion.released_clip_moe clip-moe-4-2-sharegpt4v.pt OUTPUT --processor openai/clip-vit-large-patch14
    python -m conversion.released_clip_moe FOLDER checkpoint.pt --reverse

CHECKPOINT is a state dict (`torch.save`, read with `weights_only=True`, or `.safetensors`) in OpenAI's naming in which
a sparse block has `experts.J.c_fc`, `experts.J.c_proj` and `gate` where a dense one has `mlp` (in or outside of a
module of that name). Texts have 248 positions: the first 20 rows of their table are those of `positional_embedding`,
the others those of `positional_embedding_res`. Which layers are sparse and how many experts they have follows from the
tensors; how many experts compute a token does not (`--num-experts-per-tok`, 2 in what was released). Before OUTPUT
appears, what was written is read again and compared with the source.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from conversion.checkpoints import architecture, check_equal, load_model, sample_inputs
from conversion.long_context import KEPT_POSITIONS
from conversion.openai import (
    HEAD_WIDTH,
    RULES,
    activation,
    dense_ffn,
    infer_config,
    is_torchscript,
    linear,
    original_outputs,
    read_state_dict,
)
from conversion.presets import PRESETS
from conversion.processors import copy_processor
from conversion.rules import Rule, apply_rules
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel, CLIPMoETextConfig, CLIPMoEVisionConfig
from records.files import locked, new_file, new_folder, one_line_errors, writing
from records.messages import cut

TOWER_OF_PREFIX = {"": "text_model", "visual.": "vision_model"}
EXPERT = re.compile(r"((?:visual\.)?transformer\.resblocks\.(\d+)\.)experts\.(\d+)\.(c_fc|c_proj)\.(weight|bias)")
# The stacked tensors of our experts, and the names of one expert's in a checkpoint
EXPERTS_TO_RELEASED = {
    "up_proj": "c_fc.weight",
    "up_proj_bias": "c_fc.bias",
    "down_proj": "c_proj.weight",
    "down_proj_bias": "c_proj.bias",
}


def position_table(first: Tensor, later: Tensor | None = None) -> Tensor:
    """The text positions: the first 20 rows of one tensor and the others of the second, or all of the only one."""
    return first if later is None else torch.cat([first[:KEPT_POSITIONS], later[KEPT_POSITIONS:]])


def loading_rules() -> list[Rule]:
    """Rules from a checkpoint to `CLIPMoEModel`."""
    rules = [rule for rule in RULES if rule.source not in ("positional_embedding", "logit_scale")]
    rules += [
        Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(1)),
        Rule(
            "positional_embedding(?:_res)?",
            "text_model.embeddings.position_embedding.weight",
            position_table,
            merges=True,
        ),
    ]
    for prefix, tower in TOWER_OF_PREFIX.items():
        block = rf"{re.escape(prefix)}transformer\.resblocks\.(\d+)\."
        ffn = rf"{tower}.encoder.layers.\1.mlp."
        rules.append(Rule(block + r"gate\.weight", ffn + "router.weight"))
        for ours, theirs in EXPERTS_TO_RELEASED.items():
            source = block + r"experts\.\d+\." + re.escape(theirs)
            rules.append(Rule(source, ffn + f"experts.{ours}", lambda *tensors: torch.stack(tensors), merges=True))
    return rules


def saving_rules(config: CLIPMoEConfig) -> list[Rule]:
    """Rules from `CLIPMoEModel` to a checkpoint. Both position tensors get all rows."""
    rules = [
        Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(())),
        Rule(r"text_model\.embeddings\.token_embedding\.weight", "token_embedding.weight"),
        Rule(
            r"text_model\.embeddings\.position_embedding\.weight",
            ("positional_embedding", "positional_embedding_res"),
            lambda table: (table, table.clone()),
        ),
        Rule(r"text_model\.final_layer_norm\.(weight|bias)", r"ln_final.\1"),
        Rule(r"text_projection\.weight", "text_projection", lambda weight: weight.T),
        Rule(r"vision_model\.embeddings\.class_embedding", "visual.class_embedding"),
        Rule(r"vision_model\.embeddings\.patch_embedding\.weight", "visual.conv1.weight"),
        Rule(r"vision_model\.embeddings\.position_embedding\.weight", "visual.positional_embedding"),
        Rule(r"vision_model\.pre_layrnorm\.(weight|bias)", r"visual.ln_pre.\1"),
        Rule(r"vision_model\.post_layernorm\.(weight|bias)", r"visual.ln_post.\1"),
        Rule(r"visual_projection\.weight", "visual.proj", lambda weight: weight.T),
    ]
    for prefix, tower in TOWER_OF_PREFIX.items():
        layer, block = rf"{tower}\.encoder\.layers\.(\d+)\.", rf"{prefix}transformer.resblocks.\1."
        rules += [
            Rule(
                layer + r"self_attn\.[qkv]_proj\.(weight|bias)",
                block + r"attn.in_proj_\2",
                lambda key, query, value: torch.cat([query, key, value]),  # which is how their names are sorted
                merges=True,
            ),
            Rule(layer + r"self_attn\.out_proj\.(weight|bias)", block + r"attn.out_proj.\2"),
            Rule(layer + r"layer_norm([12])\.(weight|bias)", block + r"ln_\2.\3"),
            Rule(layer + r"mlp\.fc1\.(weight|bias)", block + r"mlp.c_fc.\2"),
            Rule(layer + r"mlp\.fc2\.(weight|bias)", block + r"mlp.c_proj.\2"),
            Rule(layer + r"mlp\.router\.weight", block + "gate.weight"),
        ]
        num_experts = getattr(config, tower.replace("model", "config")).num_experts
        for ours, theirs in EXPERTS_TO_RELEASED.items():
            targets = tuple(block + f"experts.{number}.{theirs}" for number in range(num_experts))
            rules.append(Rule(layer + rf"mlp\.experts\.{ours}", targets, lambda stack: stack.unbind()))
    return rules


def normalize(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with experts and gate directly in their block, wherever the checkpoint has them.

    Raises:
        ValueError: it has some in both places.
    """
    renamed = {key: re.sub(r"\.mlp\.(experts|gate)\.", r".\1.", key) for key in state}
    inside = [key for key, new in renamed.items() if key != new]
    outside = [key for key in state if re.search(r"\.resblocks\.\d+\.(experts|gate)\.", key)]
    if inside and outside:
        raise ValueError(f"experts both inside and outside of a module mlp: {cut(inside)}; {cut(outside)}")
    return {renamed[key]: tensor for key, tensor in state.items()}


def infer_sparse_config(state: Mapping[str, Tensor], num_experts_per_tok: int = 2) -> CLIPMoEConfig:
    """The config of a normalized checkpoint, from its tensors.

    Raises:
        ValueError: no sparse block, experts whose numbers have gaps, blocks of one tower with different numbers of
            experts, a gate that does not have as many rows or is missing, position tensors of different shapes, or see
            `conversion.openai.infer_config`.
    """
    experts: dict[str, dict[int, set[int]]] = {prefix: {} for prefix in TOWER_OF_PREFIX}
    for key in state:
        if match := EXPERT.fullmatch(key):
            prefix = "visual." if key.startswith("visual.") else ""
            experts[prefix].setdefault(int(match[2]), set()).add(int(match[3]))
    if not any(experts.values()):
        raise ValueError("no tensor is an expert's: this is no CLIP-MoE; for a dense CLIP there is conversion.openai")
    if "positional_embedding_res" in state:
        shapes = [
            tuple(state[key].shape) for key in ("positional_embedding", "positional_embedding_res") if key in state
        ]
        if len(set(shapes)) != 1 or len(shapes) != 2:
            raise ValueError(f"positional_embedding and positional_embedding_res need one shape, but have {shapes}")
    # The first expert of every block stands for an FFN: all else is an OpenAI checkpoint.
    dense = infer_config({key.replace(".experts.0.", ".mlp."): tensor for key, tensor in state.items()})
    towers = {}
    for prefix, config, config_class in (
        ("", dense.text_config, CLIPMoETextConfig),
        ("visual.", dense.vision_config, CLIPMoEVisionConfig),
    ):
        routing = {}
        if experts[prefix]:
            num_experts = _number_of_experts(state, prefix, experts[prefix])
            routing = {
                "num_experts": num_experts,
                "num_experts_per_tok": num_experts_per_tok,
                "norm_topk_prob": True,
                "moe_layers": sorted(experts[prefix]),
            }
        towers[prefix] = config_class(**architecture(config, config_class) | routing)
    return CLIPMoEConfig(
        text_config=towers[""],
        vision_config=towers["visual."],
        projection_dim=dense.projection_dim,
        router_aux_loss_coef=PRESETS["clip_moe"].router_aux_loss_coef,
    )


def _number_of_experts(state: Mapping[str, Tensor], prefix: str, experts: dict[int, set[int]]) -> int:
    blocks = f"{prefix}transformer.resblocks"
    gaps = {layer: sorted(numbers) for layer, numbers in experts.items() if numbers != set(range(len(numbers)))}
    if gaps:
        layer, numbers = next(iter(sorted(gaps.items())))
        raise ValueError(f"{blocks}.{layer} has experts {numbers}: their numbers have gaps")
    counts = {layer: len(numbers) for layer, numbers in sorted(experts.items())}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the layers of {blocks} have different numbers of experts: {counts}")
    number = next(iter(counts.values()))
    for layer in counts:
        gate = state.get(f"{blocks}.{layer}.gate.weight")
        if gate is None:
            raise ValueError(f"{blocks}.{layer} has {number} experts, but no gate")
        if gate.ndim != 2:
            raise ValueError(f"{blocks}.{layer} has {number} experts, but a gate of shape {tuple(gate.shape)}")
        if len(gate) != number:
            raise ValueError(f"{blocks}.{layer} has {number} experts, but a gate for {len(gate)} experts")
    return number


def convert(state: Mapping[str, Tensor], num_experts_per_tok: int = 2) -> CLIPMoEModel:
    """Builds the float32 model of a checkpoint in the authors' layout.

    Raises:
        ValueError: see `normalize` and `infer_sparse_config`; or tensors are missing, left over or of the wrong shape.
    """
    state = {key: tensor.float() for key, tensor in normalize(state).items()}
    model = CLIPMoEModel(infer_sparse_config(state, num_experts_per_tok))
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    model.load_state_dict(apply_rules(state, shapes, loading_rules()))
    return model.eval()


def export(model: CLIPMoEModel) -> dict[str, Tensor]:
    """The checkpoint of a model in the authors' layout, in the model's dtype.

    Raises:
        ValueError: the layout cannot express the model: another activation, head width, layer norm, pooling or
            routing.
    """
    text, vision = model.config.text_config, model.config.vision_config
    sparse = [config for config in (text, vision) if config.moe_layers]
    problems = {
        "hidden_act must be quick_gelu": any(config.hidden_act != "quick_gelu" for config in (text, vision)),
        f"heads must be {HEAD_WIDTH} wide": any(
            config.hidden_size != HEAD_WIDTH * config.num_attention_heads for config in (text, vision)
        ),
        "layer_norm_eps must be 1e-05": any(config.layer_norm_eps != 1e-5 for config in (text, vision)),
        "texts must be pooled at the highest token id": text.eos_token_id not in (2, text.vocab_size - 1),
        "there must be sparse layers": not sparse,
        "norm_topk_prob must be True": not all(config.norm_topk_prob for config in sparse),
        "fusion_gate must be False": any(config.fusion_gate for config in sparse),
        "eval_capacity_factor must be None": any(config.eval_capacity_factor is not None for config in sparse),
    }
    if any(problems.values()):
        raise ValueError("the layout cannot express this model: " + "; ".join(p for p, has in problems.items() if has))
    exported = apply_rules(model.state_dict(), None, saving_rules(model.config))
    return {key: tensor.contiguous() for key, tensor in exported.items()}


def released_outputs(
    state: Mapping[str, Tensor], config: CLIPMoEConfig, pixel_values: Tensor, input_ids: Tensor
) -> dict[str, Tensor]:
    """The released architecture in plain functions, on the normalized float32 tensors of a checkpoint.

    Args: see `conversion.openai.original_outputs`.
    """

    def ffn(state: Mapping[str, Tensor], block: str, config: PreTrainedConfig, x: Tensor) -> Tensor:
        if f"{block}.gate.weight" not in state:
            return dense_ffn(state, block, config, x)
        top, chosen = (x @ state[f"{block}.gate.weight"].T).topk(config.num_experts_per_tok)  # (B, T, K)
        weights = torch.zeros(*x.shape[:2], config.num_experts).scatter(-1, chosen, top.softmax(dim=-1))
        outputs = []
        for number in range(config.num_experts):
            expert = f"{block}.experts.{number}"
            outputs.append(linear(state, f"{expert}.c_proj", activation(config, linear(state, f"{expert}.c_fc", x))))
        return torch.einsum("bte,ebtd->btd", weights, torch.stack(outputs))

    table = position_table(state["positional_embedding"], state.get("positional_embedding_res"))
    return original_outputs({**state, "positional_embedding": table}, config, pixel_values, input_ids, ffn)


def verify(state: Mapping[str, Tensor], model: CLIPMoEModel) -> dict[str, float]:
    """Compares a checkpoint with a model, both in float32.

    Raises:
        ValueError: they do not compute the same.
    """
    state = {key: tensor.float() for key, tensor in normalize(state).items()}
    inputs = sample_inputs(model.config)
    with torch.no_grad():
        outputs = model(**inputs)
    return check_equal(
        released_outputs(state, model.config, **inputs),
        {
            "logits": outputs.logits_per_image,
            "image embeddings": outputs.image_embeds,
            "text embeddings": outputs.text_embeds,
        },
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m conversion.released_clip_moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="CHECKPOINT", help="checkpoint; with --reverse, folder of a CLIPMoEModel")
    parser.add_argument(
        "output", type=Path, metavar="OUTPUT", help="new folder; with --reverse, new .pt or .safetensors file"
    )
    parser.add_argument("--reverse", action="store_true", help="from a CLIPMoEModel to the authors' layout")
    parser.add_argument(
        "--num-experts-per-tok", type=int, default=2, help="experts that compute each token, K (default: 2)"
    )
    parser.add_argument("--processor", help="folder or hub name whose processor is saved with the model")
    args = parser.parse_args(argv)
    if args.reverse and args.processor is not None:
        parser.error("a checkpoint holds no processor: --processor is not for --reverse")
    with one_line_errors():
        if args.reverse:
            write_checkpoint(args.source, args.output)
        else:
            write_model(Path(args.source), args.output, args.num_experts_per_tok, args.processor)
    print(f"wrote {args.output}")


def write_model(checkpoint: Path, output: Path, num_experts_per_tok: int, processor: str | None) -> None:
    """Write a released checkpoint as a new folder, and verify it.

    Raises:
        ValueError: it is another kind of file, its weights do not fit, or the folder is there already.
    """
    with new_folder(output) as folder:
        if checkpoint.is_file() and is_torchscript(checkpoint):
            raise ValueError(f"{checkpoint} is a TorchScript archive: what was released is a state dict")
        state = read_state_dict(checkpoint)
        model = convert(state, num_experts_per_tok)
        model.save_pretrained(folder)
        if processor is None:
            print("warning: the result has no processor: give one with --processor", file=sys.stderr)
        else:
            length = model.config.text_config.max_position_embeddings
            copy_processor(processor, folder, required=True, length=length, model=checkpoint)
        verify(state, load_model(CLIPMoEModel, folder, dtype=torch.float32))


def write_checkpoint(source: str, output: Path) -> None:
    """Write a model as a new file in the format that was released, and verify it.

    Raises:
        ValueError: the model has no such format, or the file is there already.
    """
    if output.exists():
        raise ValueError(f"{output} already exists: remove it or choose another output")
    model = load_model(CLIPMoEModel, source)
    with locked(output), new_file(output) as partial:
        state = export(model)
        with writing(output):
            if output.suffix == ".safetensors":
                save_file(state, partial)
            else:
                with partial.open("wb") as file:  # torch's own writer does not say what went wrong
                    torch.save(state, file)
        verify(read_state_dict(partial), model.float())


if __name__ == "__main__":
    main()
