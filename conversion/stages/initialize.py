"""The stage that makes a model from nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.conversion.presets import PRESETS, TOWERS, PresetField, changed_preset
from clip_moe.data.worlds import is_world, origin_of
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads, refuse
from clip_moe.engine.stage import named_errors


@dataclass(config=STRICT, kw_only=True)
class InitializeStage(ModelStage):
    """A randomly initialized CLIP, dense or sparse, to be trained from scratch.

    For example:

        clip-moe initialize runs/new --processor names --projection_dim 64 --text_config.num_hidden_layers 2 \\
            --vision_config.num_hidden_layers 2
    """

    kind: ClassVar[str] = "initialize"

    # The family of the model: SigLIP has the sigmoid loss; ViE is the dense model of MoE-ViE.
    family: Literal["clip", "metaclip_2", "siglip", "vie"] = "clip"
    # Fields of the family's text configuration; the tokenizer sets those of the vocabulary. With a
    # preset, also the fields that an upcycle stage takes there.
    text_config: dict[str, JsonValue]
    # The same for images.
    vision_config: dict[str, JsonValue]
    # Size of the embeddings that images and texts share.
    projection_dim: int = Field(gt=0)
    # A folder or hub name with a processor, or a built-in world, such as "symbols": its tokenizer and image processor.
    # None: CLIP's own image processor, at the model's image size.
    processor: str | None = None
    # Tokenizer instead of the processor's: a tokenizer stage, a folder or a hub name.
    tokenizer: Annotated[str, Reads("tokenizer", outside=False)] | None = None
    # Share the layers between both towers (LIMoE; CLIP-UP Table 1).
    shared_encoder: bool = False
    # The architecture of its sparse layers: a paper's, or `dense_price`. None: a dense model.
    preset: Literal[tuple(PRESETS)] | None = None
    # Which towers become sparse. None: those of the preset.
    towers: Annotated[list[Literal["text", "vision"]], Field(min_length=1)] | None = None
    # Fields of the preset to change, as of an upcycle stage.
    changes: dict[PresetField, Any] = Field(default_factory=dict)
    # Initialize the towers as OpenAI's code does. With transformers' initialization, small models may never learn
    # positions.
    openai_weights: bool = False

    @model_validator(mode="after")
    def _check(self):
        if self.towers is None:
            self.towers = [*(PRESETS[self.preset].towers if self.preset else TOWERS)]
        sparse = [*self.changes, *(["towers"] if set(self.towers) != {"text", "vision"} else [])]
        refuse(
            (self.processor is None and self.tokenizer is None, "a processor or a tokenizer must be given"),
            (self.shared_encoder and self.family == "siglip", "shared_encoder: a SigLIP always has two encoders"),
            (self.preset is None and sparse, f"{', '.join(sorted(sparse))}: of sparse models alone; set preset"),
        )
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.initialize import clip_config, random_clip, split_routing
        from clip_moe.conversion.upcycle import change_routing, shared_config, sparse_config
        from clip_moe.engine.files import save

        towers = {"text_config": self.text_config, "vision_config": self.vision_config}
        dense, routing = split_routing(self.family, towers, is_sparse=self.preset is not None)
        config, processor = clip_config(
            **dense,
            projection_dim=self.projection_dim,
            processor=self.processor,
            tokenizer=inputs.tokenizer,
            family=self.family,
        )
        if self.shared_encoder:
            with named_errors(self, "shared_encoder"):
                config = shared_config(config)
        if self.preset is not None:
            with named_errors(self, "changes" if self.changes else "preset"):
                sparse = sparse_config(config, changed_preset(self.preset, self.changes), self.towers)
            sparse.dtype = config.dtype
            config = change_routing(sparse, routing)
        save(random_clip(config, self.openai_weights), directory)
        save(processor, directory)

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        from clip_moe.engine.digests import value_digest
        from clip_moe.engine.provenance import named_files

        origin = origin_of(self.processor) if is_world(self.processor) else {}
        folders = [None if is_world(self.processor) else self.processor]
        folders += [self.tokenizer] if inputs.tokenizer == self.tokenizer else []
        return named_files([], folders) | ({"processor": value_digest(origin)} if origin else {})
