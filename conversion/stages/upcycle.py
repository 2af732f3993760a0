"""The stage that makes a dense model sparse."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.conversion.presets import PRESETS, PresetField, RoutingField, changed_preset
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model


@dataclass(config=STRICT, kw_only=True)
class UpcycleStage(ModelStage):
    """Sparse upcycling: a dense CLIP becomes a CLIP-MoE whose experts are copies of its FFNs.

    Experts are copies of the dense FFN (Komatsuzaki et al., 2023, https://arxiv.org/abs/2212.05055), routers and fusion
    gates are new, all else is kept. With routing weights that sum to 1, the model computes what the source does, up to
    rounding. Where they do not, as in the preset clip_up, only the check is made with normalized weights. Where experts
    do not make whole copies, as in the preset moe_vie, it is made of the copies alone, and the distance is printed.

        clip-moe upcycle runs/sparse --model training/symbol_clip --preset clip_moe
    """

    kind: ClassVar[str] = "upcycle"

    # A dense CLIP: an earlier stage, a folder or a hub name.
    model: Model
    # The architecture: a paper's, or `dense_price`, with the dense model's multiply-adds but for the routers.
    preset: Literal[tuple(PRESETS)]
    # Which towers become sparse. None: those of the preset.
    towers: list[Literal["text", "vision"]] | None = None
    # Fields of the preset to change: num_experts, num_experts_per_tok, sparse_layers (`all`, `all_but_first`,
    # `every_second`, `second_half_every_second`, a list of numbers from 0, or one for each of `text` and `vision`),
    # moe_intermediate_size (hidden units or a fraction of the FFN such as "1/4", or one for each tower),
    # num_shared_experts, moe_mlp_bias, scoring_func, use_expert_bias, norm_topk_prob, fusion_gate, capacity_factor,
    # router_aux_loss_coef, router_z_loss_coef. Narrow experts are cut out of the dense FFN.
    changes: dict[PresetField, Any] = Field(default_factory=dict)
    # Further routing fields of the text tower: num_experts_per_tok, scoring_func, use_expert_bias, norm_topk_prob,
    # norm_before_capacity, routed_scaling_factor, capacity_factor, eval_capacity_factor, capacity_group_size,
    # router_jitter_noise, attention_dropout.
    text_config: dict[RoutingField, JsonValue] = Field(default_factory=dict)
    # The same for the image tower.
    vision_config: dict[RoutingField, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _take_towers(self):
        self.towers = [*PRESETS[self.preset].towers] if self.towers is None else self.towers
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.checkpoints import load_dense
        from clip_moe.conversion.upcycle import upcycle, verify

        preset = changed_preset(self.preset, self.changes)
        routing = {"text_config": self.text_config, "vision_config": self.vision_config}
        sparse = upcycle(load_dense(inputs.model), preset, self.towers, context.seed, routing)
        self.save(sparse, inputs.model, directory)
        verify(inputs.model, directory)
