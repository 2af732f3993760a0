"""Stages that make models without training them: from nothing, from another model, or from several."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, JsonValue, field_validator, model_validator
from pydantic.dataclasses import dataclass
from transformers import CLIPConfig, CLIPTextConfig, PreTrainedConfig

from conversion import average, dense, long_context, unify
from conversion.checkpoints import is_sparse, load_dense
from conversion.presets import PRESETS, Preset, changed_preset
from conversion.processors import copy_processor
from conversion.upcycle import ROUTING_FIELDS, shared_config, sparse_config, upcycle
from data.pairs import all_captions
from data.tokenizer import SAMPLE, SMALLEST, learn_tokenizer, pieces_per_word
from data.worlds import WORLDS
from modeling_clip_moe import CLIPMoEConfig
from modeling_clip_moe.families import FAMILY_OF_TYPE
from records.files import save
from records.local_names import is_hub_name
from records.messages import join_names, suggestion
from records.provenance import PROCESSOR, model_fingerprint
from training.context import Context
from training.estimates import Unknown, bytes_in_memory, read_otherwise, trained_apart
from training.initialize import clip_config, dense_config, random_clip
from training.settings import STRICT, Reads
from training.stages.base import Model, NumberedData, Stage, named_errors


@dataclass(config=STRICT, kw_only=True)
class InitializeStage(Stage):
    """A randomly initialized CLIP, dense or sparse, to be trained from scratch."""

    kind: ClassVar[str] = "initialize"
    makes_model: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # The family of the model: SigLIP has the sigmoid loss.
    family: Literal["clip", "metaclip_2", "siglip"] = "clip"
    # Fields of the family's text configuration in transformers; the vocabulary's come from the tokenizer. With a
    # preset, also what an upcycle stage takes there.
    text_config: dict[str, JsonValue]
    # The same for images.
    vision_config: dict[str, JsonValue]
    # Size of the embeddings that images and texts share.
    projection_dim: int = Field(gt=0)
    # A folder or hub name with a processor, or a built-in world, such as "symbols": its tokenizer and image processor.
    # None: CLIP's own image processor, at the model's image size.
    processor: str | None = None
    # In place of the processor's tokenizer: a tokenizer stage, a folder or a hub name.
    tokenizer: Annotated[str, Reads("tokenizer", outside=False)] | None = None
    # Whether both towers have the same layers (LIMoE; CLIP-UP Table 1).
    shared_encoder: bool = False
    # The paper whose sparse layers it gets; None: a dense model.
    preset: Literal[tuple(PRESETS)] | None = None
    # Which towers become sparse.
    towers: list[Literal["text", "vision"]] = Field(default_factory=lambda: ["text", "vision"], min_length=1)
    # Fields of the preset to change, as of an upcycle stage.
    changes: dict[str, Any] = Field(default_factory=dict)
    # Draw the towers' weights as OpenAI's code does. As transformers draws them, small models may never learn where
    # things are.
    openai_weights: bool = False

    @field_validator("text_config", "vision_config")
    @classmethod
    def _check_fields(cls, settings, info):
        config_class = FAMILY_OF_TYPE[info.data["family"]].dense.config_class.sub_configs[info.field_name]
        names = {field.name for field in fields(config_class)} | ROUTING_FIELDS
        unknown = sorted(set(settings) - names)
        if unknown:
            hint = suggestion(unknown[0], names)
            raise ValueError(f"{config_class.__name__} has no field {', '.join(map(repr, unknown))}: {hint}")
        return settings

    @model_validator(mode="after")
    def _check(self):
        if self.processor is None and self.tokenizer is None:
            raise ValueError("a processor or a tokenizer must be given")
        sparse = [name for tower in _parts(self.text_config, self.vision_config)[1] for name in tower] + [*self.changes]
        sparse += ["towers"] if set(self.towers) != {"text", "vision"} else []
        if self.preset is None and sparse:
            raise ValueError(f"{join_names(sorted(set(sparse)))}: of sparse models alone; set preset")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        dense, _ = _parts(self.text_config, self.vision_config)
        config, processor = clip_config(*dense, self.projection_dim, self.processor, inputs.tokenizer, self.family)
        save(random_clip(self._architecture(config), self.openai_weights), directory)
        save(processor, directory)

    def output_config(self, inputs: SimpleNamespace) -> PreTrainedConfig:
        return self._architecture(self._dense_config(inputs))

    def _dense_config(self, inputs: SimpleNamespace) -> PreTrainedConfig:
        (text_config, vision_config), _ = _parts(self.text_config, self.vision_config)
        tokenizer = self.tokenizer
        if tokenizer is not None and isinstance(inputs.tokenizer.configs, tuple):  # of a tokenizer stage
            (vocabulary,) = inputs.tokenizer.configs
            sizes = {name: getattr(vocabulary, name) for name in ("vocab_size", "bos_token_id", "eos_token_id")}
            return dense_config(self.family, sizes | text_config, vision_config, self.projection_dim)
        for source in {self.processor, tokenizer} - {None, *WORLDS}:
            if not Path(source).is_dir() and is_hub_name(source):
                raise Unknown(f"{source} is not here")
        return clip_config(text_config, vision_config, self.projection_dim, self.processor, tokenizer, self.family)[0]

    def _architecture(self, dense: PreTrainedConfig) -> PreTrainedConfig:
        """The configuration that becomes of a dense one."""
        with named_errors(self, "shared_encoder"):
            config = shared_config(dense) if self.shared_encoder else dense
        if self.preset is None:
            return config
        config = _sparse_config(self, config, _preset(self))
        _, routing = _parts(self.text_config, self.vision_config)
        _change_routing(self, config, *routing)
        return config

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        folders = {self.processor, self.tokenizer if inputs.tokenizer == self.tokenizer else None} - {None, *WORLDS}
        return {folder: model_fingerprint(folder, PROCESSOR) for folder in sorted(folders) if Path(folder).is_dir()}


@dataclass(config=STRICT, kw_only=True)
class TokenizerStage(Stage):
    """A tokenizer learned from the captions of a dataset, as CLIP's was from its own: for `initialize`."""

    kind: ClassVar[str] = "tokenizer"
    main_process_only: ClassVar[bool] = True

    # Whose captions it learns from.
    data: NumberedData
    # Tokens, with 514 bytes and special tokens; there are fewer where the captions have fewer words.
    vocab_size: int = Field(default=49408, ge=SMALLEST)
    # Tokens of a caption, with the first and the last one; at most the max_position_embeddings of the model that it is
    # for. None: as many as these.
    max_length: int | None = Field(default=None, ge=3)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        rows = context.pairs(inputs.data, images=False)
        print(f"{self.name}: learns at most {self.vocab_size} tokens from {len(rows)} pairs", flush=True)
        tokenizer = learn_tokenizer(all_captions(rows), self.vocab_size, self.max_length)
        save(tokenizer, directory)
        pieces = pieces_per_word(tokenizer, itertools.islice(all_captions(rows), SAMPLE))
        print(f"{self.name}: {len(tokenizer)} tokens, learned from {len(rows)} pairs; {pieces:.2f} pieces a word")

    def output_config(self, inputs: SimpleNamespace) -> CLIPTextConfig:
        """A text tower with all tokens that it may learn."""
        special = {"bos_token_id": self.vocab_size - 2, "eos_token_id": self.vocab_size - 1}
        return CLIPTextConfig(vocab_size=self.vocab_size, **special)


@dataclass(config=STRICT, kw_only=True)
class LongContextStage(Stage):
    """A CLIP with a longer text context: `conversion.long_context`."""

    kind: ClassVar[str] = "long_context"
    makes_model: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # An earlier stage, a folder or a hub name.
    model: Model
    # Tokens of a text: 77 can become 248, with 4 positions for each one after the first 20.
    length: int = Field(gt=0)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        long_context.convert(inputs.model, directory, self.length)

    def output_config(self, inputs: SimpleNamespace) -> PreTrainedConfig:
        config = copy.deepcopy(inputs.model.clip)
        text = config.text_config
        long_context.stretch_positions(
            torch.empty(text.max_position_embeddings, 1, device="meta"), self.length
        )  # raises
        text.max_position_embeddings = self.length
        return config


@dataclass(config=STRICT, kw_only=True)
class UpcycleStage(Stage):
    """A dense CLIP made sparse: `conversion.upcycle`. A field left out keeps the preset's value."""

    kind: ClassVar[str] = "upcycle"
    makes_model: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # An earlier stage, a folder or a hub name.
    model: Model
    # The paper whose architecture it gets.
    preset: Literal[tuple(PRESETS)]
    # Which towers become sparse.
    towers: list[Literal["text", "vision"]] = Field(default_factory=lambda: ["text", "vision"])
    # Fields of the preset to change: num_experts, num_experts_per_tok, sparse_layers (`all`, `every_second`,
    # `second_half_every_second`, a list of numbers from 0, or one for each of `text` and `vision`), norm_topk_prob,
    # fusion_gate, capacity_factor, router_aux_loss_coef, router_z_loss_coef.
    changes: dict[str, Any] = Field(default_factory=dict)
    # What routing takes besides, of the text tower: num_experts_per_tok, norm_topk_prob,
    # norm_before_capacity, capacity_factor, eval_capacity_factor, capacity_group_size, token_drop_policy,
    # router_jitter_noise, attention_dropout.
    text_config: dict[str, JsonValue] = Field(default_factory=dict)
    # The same for the image tower.
    vision_config: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("text_config", "vision_config")
    @classmethod
    def _check_fields(cls, settings):
        unknown = sorted(settings.keys() - ROUTING_FIELDS)
        if unknown:
            raise ValueError(
                f"an upcycled tower has no field {', '.join(map(repr, unknown))} to set here, only "
                f"{', '.join(sorted(ROUTING_FIELDS))}; the dense model, the preset and its changes settle the others"
            )
        return settings

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        model = upcycle(load_dense(inputs.model), _preset(self), self.towers, context.seed)
        _change_routing(self, model.config, self.text_config, self.vision_config)
        save(model, directory)
        copy_processor(inputs.model, directory)

    def output_config(self, inputs: SimpleNamespace) -> CLIPMoEConfig:
        dense = inputs.model.clip
        if is_sparse(dense):
            raise ValueError(f"{self.name}.model: {self.model} is sparse already, and a dense CLIP is needed")
        config = _sparse_config(self, dense, _preset(self))
        _change_routing(self, config, self.text_config, self.vision_config)
        return config


@dataclass(config=STRICT, kw_only=True)
class UnifyStage(Stage):
    """A CLIP and the experts trained from it as one sparse model: `conversion.unify`."""

    kind: ClassVar[str] = "unify"
    makes_model: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # What the experts were trained from.
    model: Model
    # Earlier stages, folders or hub names: dense models, or as `model` sparse ones of one expert in each sparse layer.
    experts: list[Model] = Field(min_length=1)
    # Which layers are sparse, if they are not yet, and how they route. Fusion gates that the experts have are averaged.
    preset: Literal[tuple(PRESETS)] = "clip_moe"
    # Whether the FFNs of `model` are expert 0. With a fusion gate they stay beside the experts instead.
    base_expert: bool = True
    # Which towers become sparse, if they are not yet.
    towers: list[Literal["text", "vision"]] = Field(default_factory=lambda: ["text", "vision"])
    # Fields of the preset to change, as of an upcycle stage; the number of experts is that of `experts`.
    changes: dict[str, Any] = Field(default_factory=dict)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        preset = _preset(self, fixed=["num_experts"])
        unify.convert(inputs.model, inputs.experts, directory, preset, self.towers, context.seed, self.base_expert)

    def output_config(self, inputs: SimpleNamespace) -> CLIPMoEConfig:
        preset, base = _preset(self, fixed=["num_experts"]), inputs.model.clip
        if is_sparse(base):
            self._require_changeable(base)
        with named_errors(self, "changes" if self.changes else "preset"):
            config = unify.unified_config(base, len(self.experts), preset, self.towers, self.base_expert)
        experts = [expert.clip for expert in inputs.experts]
        for name, expert in zip(self.experts, experts, strict=True):
            if type(expert) is not type(base):
                needed = f"a model of type {base.model_type!r} is needed, as {self.model} is"
                raise ValueError(f"{self.name}.experts: {needed}; {name} is {expert.model_type!r}")
        dtypes = [part.dtype or torch.float32 for part in (base, *experts)]
        config.dtype = functools.reduce(torch.promote_types, dtypes)
        return config

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        yield "experts", read_otherwise([inputs.model, *inputs.experts])
        parts = unify.expert_parts(inputs.model.clip, self.output_config(inputs))
        for number, (name, expert) in enumerate(zip(self.experts, inputs.experts, strict=True)):
            differing = [part for part in sorted(trained_apart(inputs.model, expert)) if not parts.match(part)]
            with named_errors(self, f"experts.{number}"):
                unify.require_expert(name, differing)

    def _require_changeable(self, config: CLIPMoEConfig) -> None:
        """Raises ValueError where the settings ask for what a model that is sparse already has settled."""
        ignored = sorted(set(self.changes) - {"num_experts_per_tok", "fusion_gate"})
        if ignored or set(self.towers) != {"text", "vision"}:
            raise ValueError(
                f"{self.model} is sparse already, which settles {', '.join(ignored) or 'towers'}; only "
                "num_experts_per_tok and fusion_gate can change"
            )
        if self.changes.get("fusion_gate") is False and config.vision_config.fusion_gate:
            raise ValueError("the experts were trained with fusion gates, which cannot be left out now")


@dataclass(config=STRICT, kw_only=True)
class AverageStage(Stage):
    """One model with the weighted mean of the parameters of several: `conversion.average`."""

    kind: ClassVar[str] = "average"
    makes_model: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # Earlier stages, folders or hub names.
    models: list[Model] = Field(min_length=1)
    # One for each model, which sum to 1; None: all alike. Of a model and what fine-tuning made of it, the line between
    # them (WiSE-FT, arXiv:2109.01903).
    weights: list[float] | None = None

    @model_validator(mode="after")
    def _check(self):
        if self.weights is not None:
            average.require_weights(self.weights, self.models)
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        average.convert(inputs.models, directory, self.weights)

    def output_config(self, inputs: SimpleNamespace) -> PreTrainedConfig:
        return inputs.models[0].clip

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        yield "models", read_otherwise(inputs.models)

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """Sums in float64, the first model and another one."""
        return super().cost(inputs) | {"memory": lambda: 4 * bytes_in_memory(inputs.models[0].known_configs)}


@dataclass(config=STRICT, kw_only=True)
class DenseStage(Stage):
    """One expert of a sparse CLIP as a dense one: `conversion.dense`."""

    kind: ClassVar[str] = "dense"
    makes_model: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # An earlier stage, a folder or a hub name: a sparse model.
    model: Model
    # Its number in the model, from 0, or the FFN that stays beside the experts.
    take: Annotated[int, Field(ge=0)] | Literal["base"]
    # Where the weights of a token's experts do not sum to 1: what its output is multiplied by, a number or an analyze
    # stage of the model.
    scale: float | Annotated[str, Reads("analyze")] | None = None

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        scale = inputs.scale
        if isinstance(scale, str):
            scale = dense.read_scale(f"{scale}/experts.json", inputs.model)
        dense.convert(inputs.model, directory, self.take, scale)

    def output_config(self, inputs: SimpleNamespace) -> CLIPConfig:
        config = inputs.model.clip
        if not is_sparse(config):
            raise ValueError(f"{self.name}.model: {self.model} is dense already")
        with named_errors(self, "take"):
            dense.require_expert(config, self.take)
        with named_errors(self, "scale"):
            dense.layer_scales(config, self.take, 1.0 if isinstance(self.scale, str) else self.scale)
        return dense.dense_config(config)


def _parts(*towers: Mapping[str, JsonValue]) -> tuple[list[dict[str, JsonValue]], list[dict[str, JsonValue]]]:
    """The fields of dense towers, and those that say how tokens are routed."""
    routing = ROUTING_FIELDS - {"attention_dropout"}  # which a dense tower has, too
    dense = [{name: value for name, value in tower.items() if name not in routing} for tower in towers]
    return dense, [{name: value for name, value in tower.items() if name in routing} for tower in towers]


def _change_routing(
    stage: Stage, config: CLIPMoEConfig, text_config: Mapping[str, JsonValue], vision_config: Mapping[str, JsonValue]
) -> None:
    """Sets some of `ROUTING_FIELDS` of both towers."""
    for setting, changes in (("text_config", text_config), ("vision_config", vision_config)):
        with named_errors(stage, setting):
            for name, value in changes.items():
                setattr(getattr(config, setting), name, value)
            getattr(config, setting).validate_moe()


def _preset(stage: InitializeStage | UpcycleStage | UnifyStage, fixed: Sequence[str] = ()) -> Preset:
    """The preset of a stage with its changes, see `changed_preset`."""
    with named_errors(stage, "changes"):
        return changed_preset(stage.preset, stage.changes, fixed)


def _sparse_config(stage: InitializeStage | UpcycleStage, dense: PreTrainedConfig, preset: Preset) -> CLIPMoEConfig:
    """See `conversion.upcycle.sparse_config`."""
    with named_errors(stage, "changes" if stage.changes else "preset"):
        config = sparse_config(dense, preset, stage.towers)
    config.dtype = dense.dtype
    return config
