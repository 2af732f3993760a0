"""New narrow experts beside the dense FFN, which stays as shared experts: a model that keeps by construction.

- {name: beside, stage: lab.methods.beside_base:BesideStage, model: base}
- {name: learned, stage: train, model: beside, trainable: [experts, routers]}
"""

import re
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import load_dense
from clip_moe.conversion.model_stage import ModelStage
from clip_moe.conversion.presets import Preset
from clip_moe.conversion.upcycle import sparse_blocks, sparse_config, sparse_ffns
from clip_moe.conversion.verification import compare
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model
from modeling_clip_moe.configuration_clip_moe import SparseMoEConfig
from modeling_clip_moe.families import family_of


@dataclass(config=STRICT, kw_only=True)
class BesideStage(ModelStage):
    """A dense CLIP whose FFNs get new experts beside them, which add nothing before they train."""

    # The dense model to keep.
    model: Model
    towers: list[Literal["text", "vision"]] = Field(default_factory=lambda: ["text", "vision"])
    # New experts, and those of a token.
    num_experts: int = Field(default=16, gt=0)
    num_experts_per_tok: int = Field(default=2, gt=0)
    # How many new experts are as wide as the FFN, whose width they divide. A token costs 1 + K / parts FFNs.
    parts: int = Field(default=8, gt=0)

    def run(self, inputs, context, directory):
        dense = load_dense(inputs.model)
        preset = Preset(
            "all",
            num_experts=self.num_experts,
            norm_topk_prob=True,
            num_experts_per_tok=self.num_experts_per_tok,
            moe_intermediate_size=f"1/{self.parts}",
            num_shared_experts=self.parts,
        )
        config = sparse_config(dense.config, preset, self.towers)
        for ffn, tower in sparse_ffns(config).items():
            if tower.intermediate_size % self.parts:
                raise ValueError(f"{self.name}.parts: {self.parts} does not divide {ffn}'s {tower.intermediate_size}")
        sparse = beside(dense, config, context.seed)
        compare(dense, sparse)
        self.save(sparse, inputs.model, directory)


@torch.no_grad()
def beside(dense: PreTrainedModel, config: SparseMoEConfig, seed: int) -> PreTrainedModel:
    """The sparse model of a configuration whose shared experts are as wide as the FFNs. Routers and the first layer of
    new experts are random, their second layer is zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sparse = family_of(config).sparse(config)
    state, ffns = {}, "|".join(sparse_ffns(config))  # patterns
    for name, tensor in dense.state_dict().items():
        key = re.sub(rf"^({ffns})\.", r"\1.shared_experts.", name)
        state[key] = tensor.view_as(sparse.state_dict()[key])
    missing, _ = sparse.load_state_dict(state, strict=False)
    if left := [key for key in missing if ".experts." not in key and ".router." not in key]:
        raise ValueError(f"the dense model lacks {', '.join(left)}")
    for block in sparse_blocks(sparse).values():
        *_, down_proj, down_proj_bias = block.experts.weights()
        for tensor in (down_proj, down_proj_bias):
            if tensor is not None:
                nn.init.zeros_(tensor)
    return sparse.to(dense.dtype).eval()
