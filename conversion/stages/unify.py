"""The stage that makes one model of a base and its experts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.conversion.presets import OF_EXPERTS, PRESETS, PresetField, changed_preset
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, refuse
from clip_moe.engine.stage import Model

CHANGEABLE = tuple(field for field in get_args(PresetField) if field not in OF_EXPERTS)


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
    # Earlier stages, folders or hub names: dense models, or like `model` sparse ones of one expert a layer.
    experts: list[Model] = Field(min_length=1)
    # Which layers become sparse, if none are yet, and how they route. Fusion gates of the experts are averaged.
    preset: Literal[tuple(PRESETS)] = "clip_moe"
    # Make the FFNs of `model` expert 0. With a fusion gate they stay beside the experts instead.
    base_expert: bool = True
    # Which towers become sparse, if they are not yet. None: those of the preset.
    towers: list[Literal["text", "vision"]] | None = None
    # Fields of the preset to change, as in an upcycle stage; the number of experts and what they are follow from
    # `experts`. For models that are already sparse, only num_experts_per_tok and fusion_gate.
    changes: dict[Literal[CHANGEABLE], Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _take_towers(self):
        preset = PRESETS[self.preset]
        self.towers = [*preset.towers] if self.towers is None else self.towers
        refuse(
            (
                preset.moe_intermediate_size is not None and "num_experts_per_tok" not in self.changes,
                f"preset: the {preset.num_experts_per_tok} experts of a token in {self.preset} are parts of an FFN, "
                "and here each is a whole one: set changes.num_experts_per_tok, or take another preset",
            )
        )
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.checkpoints import load_clip, load_model
        from clip_moe.conversion.processors import require_same
        from clip_moe.conversion.unify import unify, verify
        from modeling_clip_moe.families import sparse_towers

        preset = changed_preset(self.preset, self.changes)
        require_same([inputs.model, *inputs.experts])
        base = load_clip(inputs.model)
        if sparse_towers(base.config):
            settled = sorted(set(self.changes) - {"num_experts_per_tok", "fusion_gate"})
            settled += ["towers"] if set(self.towers) != set(preset.towers) else []
            if base.config.vision_config.fusion_gate and self.changes.get("fusion_gate") is False:
                settled += ["fusion_gate"]
            if settled:
                raise ValueError(
                    f"{self.model} is already sparse, which fixes {', '.join(settled)}; only num_experts_per_tok and "
                    "new fusion gates can change"
                )
        experts = [load_model(type(base), expert) for expert in inputs.experts]
        unified = unify(base, experts, preset, self.towers, context.seed, self.base_expert)
        self.save(unified, inputs.model, directory)
        verify(inputs.model, inputs.experts, directory)
