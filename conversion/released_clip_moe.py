"""Converts the checkpoints that CLIP-MoE's authors released, and back (https://arxiv.org/abs/2409.19291)."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from clip_moe.conversion import openai
from clip_moe.conversion.checkpoints import load_model
from clip_moe.conversion.long_context import POSITIONS
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.rules import Rule, apply_rules, renaming
from clip_moe.conversion.upcycle import whole_config
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel

EXPERT = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.experts\.(\d+)\..*")
GATES = {f"{theirs}.gate.weight": f"{ours}.mlp.router.weight" for theirs, ours in openai.BLOCKS.items()}
# One expert's tensors in a checkpoint, and ours, which stack those of all experts
FFN = {"c_fc.weight": "up_proj", "c_fc.bias": "up_proj_bias"}
FFN |= {"c_proj.weight": "down_proj", "c_proj.bias": "down_proj_bias"}
EXPERTS = {
    f"{theirs}.experts.{{expert}}.{tensor}": f"{ours}.mlp.experts.{stacked}"
    for theirs, ours in openai.BLOCKS.items()
    for tensor, stacked in FFN.items()
}
# Fields of sparse towers that a checkpoint does not hold, with the values that the authors' code computes with
ROUTING = {"scoring_func": "softmax", "use_expert_bias": False, "routed_scaling_factor": 1, "num_shared_experts": 0}
ROUTING |= {"norm_topk_prob": True, "fusion_gate": False, "eval_capacity_factor": None}
LOADING_RULES = [
    *openai.SHARED_RULES,
    *(renaming(theirs, ours) for theirs, ours in GATES.items()),
    *(renaming(theirs, ours, transform=torch.stack, merges=True) for theirs, ours in EXPERTS.items()),
    Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(1)),
]


def saving_rules(config: CLIPMoEConfig) -> list[Rule]:
    """Rules from `CLIPMoEModel` to a checkpoint. Both position tensors get all rows."""
    rules = [
        *(renaming(ours, theirs) for theirs, ours in (openai.RENAMED | GATES).items()),
        *(renaming(ours, theirs, transform=torch.t) for theirs, ours in openai.TRANSPOSED.items()),
        *(  # the names of q, k and v as they are sorted
            renaming(ours, theirs, transform=lambda kqv: torch.cat([kqv[1], kqv[0], kqv[2]]), merges=True)
            for theirs, ours in openai.PACKED.items()
        ),
        Rule(POSITIONS, ("positional_embedding", "positional_embedding_res"), lambda table: (table, table.clone())),
        Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(())),
    ]
    for theirs, ours in EXPERTS.items():
        tower = config.text_config if ours.startswith("text_model.") else config.vision_config
        targets = tuple(theirs.replace("{expert}", str(number)) for number in range(tower.num_experts))
        rules.append(renaming(ours, targets, transform=torch.unbind))
    return rules


def infer_sparse_config(state: Mapping[str, Tensor], num_experts_per_tok: int = 2) -> CLIPMoEConfig:
    """The config of a normalized checkpoint, from its tensors. Whether all of them fit it, the rules tell."""
    # The first expert of every block stands for an FFN: all else is an OpenAI checkpoint.
    dense = openai.infer_config({key.replace(".experts.0.", ".mlp."): tensor for key, tensor in state.items()})
    matches = [match for key in state if (match := EXPERT.fullmatch(key))]
    routing = {}
    for tower, prefix in (("text", None), ("vision", "visual.")):
        if experts := [(int(match[2]), int(match[3])) for match in matches if match[1] == prefix]:
            routing[tower] = {
                "num_experts": len({number for _, number in experts}),
                "num_experts_per_tok": num_experts_per_tok,
                "norm_topk_prob": True,
                "moe_layers": sorted({layer for layer, _ in experts}),
            }
    return whole_config(dense, routing, {"router_aux_loss_coef": PRESETS["clip_moe"].router_aux_loss_coef})


def build(state: Mapping[str, Tensor], num_experts_per_tok: int = 2) -> CLIPMoEModel:
    """Builds the float32 model of a checkpoint in the authors' layout."""
    state = {key: tensor.float() for key, tensor in openai.normalized(state).items()}
    model = CLIPMoEModel(infer_sparse_config(state, num_experts_per_tok))
    model.load_state_dict(apply_rules(state, model.state_dict(), LOADING_RULES))
    return model.eval()


def export(model: CLIPMoEModel) -> dict[str, Tensor]:
    """The checkpoint of a model in the authors' layout, in the model's dtype."""
    text = model.config.text_config
    towers = (text, model.config.vision_config)
    sparse = [config for config in towers if config.moe_layers]
    widths = [config.hidden_size / config.num_attention_heads for config in towers]
    needed = {
        "hidden_act must be quick_gelu": all(config.hidden_act == "quick_gelu" for config in towers),
        f"heads must be {openai.HEAD_WIDTH} wide": all(width == openai.HEAD_WIDTH for width in widths),
        "layer_norm_eps must be 1e-05": all(config.layer_norm_eps == 1e-5 for config in towers),
        "texts must be pooled at the highest token id": text.eos_token_id in (2, text.vocab_size - 1),
        "there must be sparse layers": sparse,
        "experts must be as wide as an FFN": all(c.expert_size == c.intermediate_size for c in sparse),
    }
    for field, value in ROUTING.items():
        needed[f"{field} must be {value}"] = all(getattr(tower, field) == value for tower in sparse)
    return openai.export(model, needed, saving_rules(model.config))


def convert(checkpoint: Path, folder: Path, num_experts_per_tok: int, processor: str | None) -> None:
    """Writes the model of a released checkpoint into a folder, and verifies it."""
    state = openai.read_state_dict(checkpoint)
    openai.write(build(state, num_experts_per_tok), folder, processor)
    openai.verify(state, load_model(CLIPMoEModel, folder, dtype=torch.float32))


def write_checkpoint(source: str, output: Path) -> None:
    """Writes a model as a file in the format that was released, and verifies it."""
    model = load_model(CLIPMoEModel, source)
    openai.write_state_dict(export(model), output, lambda written: openai.verify(written, model.float()))
