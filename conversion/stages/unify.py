"""The stage that makes one model of a base and its experts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.conversion.presets import PRESETS, changed_preset
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, named_errors


@dataclass(config=STRICT, kw_only=True)
class UnifyStage(ModelStage):
    """A CLIP and the experts trained from it as one sparse model.

    CLIP-MoE (Diversified Multiplet Upcycling, https://arxiv.org/abs/2409.19291, section 4): `model` and all experts are
    dense and differ in the FFNs alone. The FFNs of `model` become expert 0 and those of the others experts 1, 2, ... of
    the sparse layers; routers are new.

    CLIP-FMoE (section 4.3): all have one expert and a fusion gate in each sparse layer. The experts are stacked and
    their gates averaged, the FFNs of `model` stay beside them; routers are new.

        clip-moe unify runs/clip_moe --model training/symbol_clip --experts runs/expert_1
    """

    kind: ClassVar[str] = "unify"

    # The model that the experts were trained from.
    model: Model
    # Earlier stages, folders or hub names: dense models, or as `model` sparse ones of one expert in each sparse layer.
    experts: list[Model] = Field(min_length=1)
    # Which layers are sparse, if they are not yet, and how they route. Fusion gates that the experts have are averaged.
    preset: Literal[tuple(PRESETS)] = "clip_moe"
    # Whether the FFNs of `model` are expert 0. With a fusion gate they stay beside the experts instead.
    base_expert: bool = True
    # Which towers become sparse, if they are not yet.
    towers: list[Literal["text", "vision"]] = Field(default_factory=lambda: ["text", "vision"])
    # Fields of the preset to change, as of an upcycle stage; the number of experts is that of `experts`. Of what is
    # sparse already, num_experts_per_tok and fusion_gate alone.
    changes: dict[str, Any] = Field(default_factory=dict)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.checkpoints import is_sparse, load_clip, load_model
        from clip_moe.conversion.processors import require_same
        from clip_moe.conversion.unify import unify, verify

        with named_errors(self, "changes"):
            preset = changed_preset(
                self.preset, self.changes, ["num_experts", "moe_intermediate_size", "num_shared_experts"]
            )
        require_same([inputs.model, *inputs.experts])
        base = load_clip(inputs.model)
        if is_sparse(base.config):
            settled = sorted(set(self.changes) - {"num_experts_per_tok", "fusion_gate"})
            settled += ["towers"] if set(self.towers) != {"text", "vision"} else []
            if base.config.vision_config.fusion_gate and self.changes.get("fusion_gate") is False:
                settled += ["fusion_gate"]
            if settled:
                raise ValueError(
                    f"{self.model} is sparse already, which settles {', '.join(settled)}; only num_experts_per_tok and "
                    "new fusion gates can change"
                )
        experts = [load_model(type(base), expert) for expert in inputs.experts]
        unified = unify(base, experts, preset, self.towers, context.seed, self.base_expert)
        self.save(unified, inputs.model, directory)
        verify(inputs.model, inputs.experts, directory)
