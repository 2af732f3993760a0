"""A recipe: the stages of a run and their settings, read from YAML, overridden from the command line.

Every setting is a field of one of the dataclasses below, with its meaning beside it. Unknown keys, wrong types and
contradictions raise a `ValueError` that names the key as it stands in the recipe.
"""

import copy
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic.dataclasses import dataclass
from transformers import CLIPTextConfig, CLIPVisionConfig

from conversion.provenance import ENVIRONMENT, LOGS, RECIPE
from conversion.recipe_yaml import MOST_LEVELS, read_yaml
from conversion.upcycle import PRESETS, require_routing
from data.captions import CaptionPolicy
from data.sources import DataArguments
from data.tokenizer import SMALLEST

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(config=STRICT, kw_only=True)
class InitializeStage:
    """A randomly initialised dense CLIP, to be trained from scratch."""

    name: str
    stage: Literal["initialize"]
    # Fields of transformers' CLIPTextConfig and CLIPVisionConfig; the vocabulary's come from the tokenizer.
    text_config: dict[str, JsonValue]
    vision_config: dict[str, JsonValue]
    projection_dim: int = Field(gt=0)
    # A folder or hub name with a processor, or "glyphs": the tokenizer and image processor of the glyph world. None:
    # CLIP's own image processor, at the model's image size.
    processor: str | None = None
    # In place of the processor's tokenizer: a tokenizer stage, a folder or a hub name.
    tokenizer: str | None = None

    @field_validator("text_config", "vision_config")
    @classmethod
    def _check_fields(cls, settings, info):
        config_class = {"text_config": CLIPTextConfig, "vision_config": CLIPVisionConfig}[info.field_name]
        unknown = sorted(set(settings) - {field.name for field in fields(config_class)})
        if unknown:
            raise ValueError(f"{config_class.__name__} has no field {', '.join(map(repr, unknown))}")
        return settings

    @model_validator(mode="after")
    def _check(self):
        if self.processor is None and self.tokenizer is None:
            raise ValueError("a processor or a tokenizer must be given")
        return self


@dataclass(config=STRICT, kw_only=True)
class TokenizerStage:
    """A tokenizer learnt from the captions of a dataset, as CLIP's was from its own: for `initialize`."""

    name: str
    stage: Literal["tokenizer"]
    data: DataArguments
    # Tokens, of which 514 are bytes and special tokens; fewer come of it where the captions have fewer words.
    vocab_size: int = Field(default=49408, ge=SMALLEST)
    # Tokens of a caption, with the first and the last one; at most the model's max_position_embeddings.
    max_length: int = Field(default=77, ge=3)

    @model_validator(mode="after")
    def _check(self):
        if self.data.streaming:
            raise ValueError("data.streaming: a tokenizer is learnt from a whole dataset; num_samples takes a part")
        return self


@dataclass(config=STRICT, kw_only=True)
class UpcycleStage:
    """A dense CLIP made sparse: `conversion.upcycle`. A field left out keeps the preset's value."""

    name: str
    stage: Literal["upcycle"]
    # An earlier stage, a folder or a hub name.
    model: str
    preset: Literal[tuple(PRESETS)]
    towers: list[Literal["text", "vision"]] = Field(default_factory=lambda: ["text", "vision"])
    # Fields of conversion.upcycle.Preset to change.
    changes: dict[str, Any] = Field(default_factory=dict)
    # conversion.upcycle.ROUTING_FIELDS of CLIPMoETextConfig and CLIPMoEVisionConfig, such as capacity_factor.
    text_config: dict[str, JsonValue] = Field(default_factory=dict)
    vision_config: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("text_config", "vision_config")
    @classmethod
    def _check_fields(cls, settings):
        require_routing(settings)
        return settings


@dataclass(config=STRICT, kw_only=True)
class TrainStage:
    """Contrastive training of a dense or a sparse CLIP."""

    name: str
    stage: Literal["train"]
    # An earlier stage, a folder or a hub name.
    model: str
    data: DataArguments
    # Regular expression, matched anywhere in a parameter's name; everything else is frozen.
    trainable: str = "."
    # A hidden_states stage of the same data: what lies below the first sparse layers is not computed.
    hidden_states: str | None = None

    # Samples of one optimizer step, over all processes and accumulation steps.
    global_batch_size: int = Field(gt=0)
    # Each accumulation step sees only its own negatives: accumulation lowers memory, and makes the task easier.
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    # One of the two.
    max_steps: int | None = Field(default=None, gt=0)
    num_epochs: int | None = Field(default=None, gt=0)

    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-6, gt=0)
    # Linear warm-up: a number of steps, or below 1 a share of all steps. Then cosine to zero.
    warmup_steps: float = Field(default=0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    # The temperature is kept at or above 1 / max_logit_scale (CLIP, section 2.5).
    max_logit_scale: float = Field(default=100.0, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    # Of the L captions that every image of the data has, as the captions stage makes them: the weights of their losses,
    # gamma in CLIP-FMoE eq. 4, which sum to 1. None: one caption an image, drawn anew each epoch where there are more.
    caption_weights: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)
    # Rows of the similarity matrix held at a time; None holds the whole matrix.
    loss_chunk_size: int | None = Field(default=None, gt=0)
    # Of a sparse model's balance loss. How many choices of a token count as load: 1, the argmax (CLIP-MoE eq. 7); None:
    # all K (CLIP-UP, CLIP-FMoE).
    balance_top_k: int | None = Field(default=None, gt=0)
    # Router losses are the mean over a tower's layers, summed over the towers (CLIP-UP); the mean over all layers of
    # both towers (CLIP-MoE eq. 9); or those of the tokens of all layers and towers taken together (CLIP-FMoE eq. 3).
    balance_mean: Literal["tower", "layer", "token"] = "tower"
    gradient_checkpointing: bool = False
    # Of the order of the pairs; None: the recipe's. Models that differ in nothing else make an ensemble.
    seed: int | None = Field(default=None, ge=0)

    logging_steps: int = Field(default=10, gt=0)
    # A checkpoint every so many steps; None: only the finished model.
    save_steps: int | None = Field(default=None, gt=0)
    save_total_limit: int = Field(default=1, gt=0)

    @model_validator(mode="after")
    def _check(self):
        if (self.max_steps is None) == (self.num_epochs is None):
            raise ValueError(
                f"exactly one of max_steps ({self.max_steps}) and num_epochs ({self.num_epochs}) must be set"
            )
        if self.caption_weights is not None and abs(sum(self.caption_weights) - 1) > 1e-6:
            raise ValueError(f"caption_weights {self.caption_weights} sum to {sum(self.caption_weights):g}, not to 1")
        if (self.caption_weights is not None or self.hidden_states is not None) and self.data.streaming:
            raise ValueError("data.streaming: caption_weights and hidden_states need samples with numbers")
        if self.num_epochs is not None and self.data.streaming:
            raise ValueError("a streamed dataset has no known length: set max_steps instead of num_epochs")
        return self


@dataclass(config=STRICT, kw_only=True)
class TrainExpertsStage(TrainStage):
    """One expert, trained with batches of one cluster each: the FFNs of a dense CLIP (Multistage Contrastive Learning,
    CLIP-MoE section 3), or the copies and gates of a fused model (CLIP-FMoE section 4.2)."""

    stage: Literal["train_experts"]
    trainable: str = r"\.mlp\."
    # The number by which --experts chooses it.
    expert: int = Field(gt=0)
    # A cluster stage.
    clusters: str
    # Only the samples of this first-level cluster (CLIP-FMoE); None: all.
    cluster: int | None = Field(default=None, ge=0)
    # How the batches of the clusters follow each other: shuffled, or one of each in turn until none has another
    # (CLIP-FMoE appendix C).
    order: Literal["shuffled", "round_robin"] = "shuffled"
    # What happens to the samples of a cluster that is smaller than a batch: they are left out, or go to the nearest
    # other cluster.
    small_clusters: Literal["drop", "merge"] = "drop"

    @model_validator(mode="after")
    def _check_data(self):
        if self.data.streaming:
            raise ValueError("data.streaming: a stream has no numbered samples that cluster labels could belong to")
        return self


@dataclass(config=STRICT, kw_only=True)
class TrainRouterStage(TrainStage):
    """Routers trained with the experts frozen (CLIP-MoE section 4), or with fusion gates (CLIP-FMoE section 4.3). The
    defaults are CLIP-MoE's."""

    stage: Literal["train_router"]
    trainable: str = r"\.mlp\.router\."
    balance_top_k: int | None = Field(default=1, gt=0)
    balance_mean: Literal["tower", "layer", "token"] = "layer"


@dataclass(config=STRICT, kw_only=True)
class TrainDataExpertStage(TrainStage):
    """A data expert: a whole CLIP, trained on the pairs of one cluster of captions (MoDE section 3.3)."""

    stage: Literal["train_data_expert"]
    # The number by which --experts chooses it.
    expert: int = Field(gt=0)
    # A cluster_coarse or select stage, and which of its clusters.
    clusters: str
    cluster: int = Field(ge=0)

    @model_validator(mode="after")
    def _check_data(self):
        if self.data.streaming or self.hidden_states is not None:
            raise ValueError("a data expert is trained on some numbered pairs: no data.streaming, no hidden_states")
        return self


@dataclass(config=STRICT, kw_only=True)
class CaptionsStage:
    """A dataset whose images have several captions each, for `caption_weights`; others use it as their `data.source`.

    The glyphs have the columns `caption` (detailed) and `raw_caption` (web).
    """

    name: str
    stage: Literal["captions"]
    # Whose tokenizer counts tokens: an earlier stage, a folder or a hub name.
    model: str
    data: DataArguments
    captions: list[CaptionPolicy] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self):
        if self.data.streaming:
            raise ValueError("data.streaming: captions are built for a whole dataset")
        if self.data.captions_per_line:
            raise ValueError("data.captions_per_line: captions are built of whole texts; leave it out")
        return self


@dataclass(config=STRICT, kw_only=True)
class EmbedStage:
    """The features of a whole dataset, by which it is clustered."""

    name: str
    stage: Literal["embed"]
    # An earlier stage, a folder or a hub name.
    model: str
    data: DataArguments
    # Of one process.
    batch_size: int = Field(default=256, gt=0)

    @model_validator(mode="after")
    def _check(self):
        if self.data.streaming:
            raise ValueError("data.streaming: a stream has no numbered samples that labels could belong to")
        return self


@dataclass(config=STRICT, kw_only=True)
class EmbedCaptionsStage:
    """The sentence embeddings of a dataset's captions, by which data experts are found (MoDE section 3.2)."""

    name: str
    stage: Literal["embed_captions"]
    # A folder or hub name of sentence-transformers, of a text model of transformers, or of a CLIP, whose text tower is
    # used; "tfidf", which is fitted to these captions; or an earlier embed_captions stage, whose encoder is used again.
    encoder: str
    data: DataArguments
    # Of a text model of transformers: the mean over its tokens, the first one (unsupervised SimCSE), or the model's own
    # pooler on the first one (supervised SimCSE).
    pooling: Literal["mean", "cls", "pooler"] = "mean"
    # Of tfidf: size of the embeddings.
    dim: int = Field(default=64, gt=0)
    # Captions that are embedded at a time, by one process.
    batch_size: int = Field(default=256, gt=0)
    dtype: Literal["float32", "float16"] = "float32"

    @model_validator(mode="after")
    def _check(self):
        if self.data.streaming:
            raise ValueError("data.streaming: a stream has no numbered pairs that clusters could belong to")
        return self


@dataclass(config=STRICT, kw_only=True)
class ClusterFineStage:
    """Fine-grained cluster centers: balanced K-means of caption embeddings (MoDE eq. 1)."""

    name: str
    stage: Literal["cluster_fine"]
    # An embed_captions stage.
    captions: str
    num_centers: int = Field(gt=0)
    # Embeddings that the centers are learned from, drawn at random; None: all. They are in memory at once.
    num_samples: int | None = Field(default=None, gt=0)
    iterations: int = Field(default=20, gt=0)


@dataclass(config=STRICT, kw_only=True)
class AssignStage:
    """The nearest fine-grained center of every pair's caption (MoDE section 3.3), by any number of processes."""

    name: str
    stage: Literal["assign"]
    # An embed_captions stage, and a cluster_fine stage of the same encoder.
    captions: str
    centers: str
    # Other pairs, whose captions are embedded here and not kept: for datasets whose embeddings fit on no disk.
    data: DataArguments | None = None
    # Of those: captions that are embedded at a time, by one process.
    batch_size: int = Field(default=256, gt=0)

    @model_validator(mode="after")
    def _check(self):
        if self.data is not None and self.data.streaming:
            raise ValueError("data.streaming: a stream has no numbered pairs that clusters could belong to")
        return self


@dataclass(config=STRICT, kw_only=True)
class ClusterCoarseStage:
    """The fine-grained centers grouped into data experts, and the expert of every pair (MoDE eq. 2 and 3).

    Cluster 0 has the largest range, and is to be trained first where there is no time for all.
    """

    name: str
    stage: Literal["cluster_coarse"]
    # An assign stage.
    assignment: str
    num_experts: int = Field(gt=0)
    # Give the pairs to the experts at random, as many to each as the clusters have: to compare with (MoDE section 5.1).
    random: bool = False


@dataclass(config=STRICT, kw_only=True)
class SelectStage:
    """One cluster, 0, of the pairs whose fine-grained centers are nearest to the metadata of tasks that are known
    before training (MoDE section 5.5, retrieval-enhanced)."""

    name: str
    stage: Literal["select"]
    # An assign stage, and an embed_captions stage of its encoder.
    assignment: str
    captions: str
    # Class names, queries or captions.
    metadata: list[str] = Field(min_length=1)
    # Centers that each retrieves.
    num_nearest: int = Field(default=1, gt=0)


@dataclass(config=STRICT, kw_only=True)
class AssembleStage:
    """Data experts as one CLIPMoDEModel: `conversion.assemble`."""

    name: str
    stage: Literal["assemble"]
    # Of the clusters 0, 1, ... in this order: earlier stages, folders or hub names. Fewer than there are clusters make
    # a model that others can be added to.
    experts: list[str] = Field(min_length=1)
    # A cluster_coarse stage and the embed_captions stage that it goes back to. None: all experts have the same weight.
    clusters: str | None = None
    captions: str | None = None
    # What a task's metadata are compared with: the fine-grained centers, or to compare with (MoDE section 5.2) one
    # coarse center for each expert.
    centers: Literal["fine", "coarse"] = "fine"
    # lambda in MoDE eq. 5.
    routing_temperature: float = Field(default=0.2, gt=0)

    @model_validator(mode="after")
    def _check(self):
        if (self.clusters is None) != (self.captions is None):
            raise ValueError("clusters and captions go together: the metadata's encoder is kept with the captions")
        return self


@dataclass(config=STRICT, kw_only=True)
class AverageStage:
    """One model with the mean of the parameters of several: `conversion.average`."""

    name: str
    stage: Literal["average"]
    # Earlier stages, folders or hub names.
    models: list[str] = Field(min_length=1)


@dataclass(config=STRICT, kw_only=True)
class HiddenStatesStage:
    """What enters the first sparse layers of a model, for stages that train nothing below them.

    Takes (images * patches * width + text tokens * width) numbers of disk, which is said before they are written.
    """

    name: str
    stage: Literal["hidden_states"]
    # An earlier stage, a folder or a hub name: a sparse model.
    model: str
    data: DataArguments
    # Of one process.
    batch_size: int = Field(default=256, gt=0)
    # Whether images have several captions, of which all are kept: as the stages that use them.
    caption_weights: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    @model_validator(mode="after")
    def _check(self):
        if self.data.streaming:
            raise ValueError("data.streaming: a stream has no numbered samples that hidden states could belong to")
        return self


@dataclass(config=STRICT, kw_only=True)
class ClusterStage:
    """Clusters of a dataset: K-means of image features, of text features or of both, whose labels are then combined.

    CLIP-MoE: 3 image and 3 text clusters a stage, with the labels of the stages before as `previous`.
    CLIP-FMoE: 4 image clusters, then 64 image clusters `within` each.
    """

    name: str
    stage: Literal["cluster"]
    # An embed stage.
    features: str
    # The cluster stage that these refine: a cluster is then a combination of both labels.
    previous: str | None = None
    # Whether the samples of each previous cluster are clustered by themselves, instead of all together.
    within: bool = False
    # One cluster is none: the modality does not count.
    num_image_clusters: int = Field(default=1, gt=0)
    num_text_clusters: int = Field(default=1, gt=0)
    # Parts of a random permutation, to compare with (CLIP-FMoE appendix D).
    num_random_clusters: int = Field(default=1, gt=0)
    # Starts of K-means, of which the best counts; each takes about two minutes for a million features and 3 clusters.
    n_init: int = Field(default=10, gt=0)

    @model_validator(mode="after")
    def _check(self):
        if self.num_image_clusters * self.num_text_clusters * self.num_random_clusters == 1:
            raise ValueError("num_image_clusters, num_text_clusters and num_random_clusters are all 1: nothing to do")
        if self.within and self.previous is None:
            raise ValueError("within needs the clusters of a previous stage")
        return self


@dataclass(config=STRICT, kw_only=True)
class UnifyStage:
    """A CLIP and the experts trained from it as one sparse model: `conversion.unify`."""

    name: str
    stage: Literal["unify"]
    # What the experts were trained from.
    model: str
    # Earlier stages, folders or hub names: dense models, or as `model` sparse ones of one expert in each sparse layer.
    experts: list[str] = Field(min_length=1)
    # Which layers are sparse, if they are not yet, and how they route. Fusion gates that the experts have are averaged.
    preset: Literal[tuple(PRESETS)] = "clip_moe"
    # Whether the FFNs of `model` are expert 0. With a fusion gate they stay beside the experts instead.
    base_expert: bool = True
    towers: list[Literal["text", "vision"]] = Field(default_factory=lambda: ["text", "vision"])
    # Fields of conversion.upcycle.Preset to change; the number of experts is that of `experts`.
    changes: dict[str, Any] = Field(default_factory=dict)


@dataclass(config=STRICT, kw_only=True)
class LongContextStage:
    """A CLIP with a longer text context: `conversion.long_context`."""

    name: str
    stage: Literal["long_context"]
    # An earlier stage, a folder or a hub name.
    model: str
    length: int = Field(gt=0)


@dataclass(config=STRICT, kw_only=True)
class AnalyzeStage:
    """What each expert of a sparse model knows and which tokens it gets: `evaluation.experts`."""

    name: str
    stage: Literal["analyze"]
    model: str
    # Names in evaluation.tasks.
    tasks: list[str] = Field(min_length=1)
    # Numbers of experts a token to try, beside the model's own.
    num_experts_per_tok: list[int] = Field(default_factory=list)
    batch_size: int = Field(default=64, gt=0)


@dataclass(config=STRICT, kw_only=True)
class EvaluateStage:
    """Models side by side on evaluation tasks, with a report."""

    name: str
    stage: Literal["evaluate"]
    # Row title -> an earlier stage, a folder or a hub name.
    models: dict[str, str] = Field(min_length=1)
    # Names in evaluation.tasks.
    tasks: list[str] = Field(min_length=1)
    batch_size: int = Field(default=64, gt=0)
    # The row that the others are compared with.
    baseline: str | None = None
    # Row title -> rows, of which it shows the best score of each task, as one could only choose who knows the answers.
    oracles: dict[str, list[str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self):
        for title, rows in self.oracles.items():
            unknown = sorted(set(rows) - set(self.models))
            if unknown or not rows or title in self.models:
                raise ValueError(f"oracles.{title} needs rows of the models, and a title of its own, not {unknown}")
        if self.baseline is not None and self.baseline not in self.models:
            raise ValueError(f"baseline {self.baseline!r} is none of the models {sorted(self.models)}")
        return self


Stage = (
    TokenizerStage
    | InitializeStage
    | LongContextStage
    | UpcycleStage
    | CaptionsStage
    | EmbedStage
    | HiddenStatesStage
    | ClusterStage
    | EmbedCaptionsStage
    | ClusterFineStage
    | AssignStage
    | ClusterCoarseStage
    | SelectStage
    | TrainStage
    | TrainExpertsStage
    | TrainDataExpertStage
    | AssembleStage
    | AverageStage
    | UnifyStage
    | TrainRouterStage
    | EvaluateStage
    | AnalyzeStage
)


EXPERT_STAGES = (TrainExpertsStage, TrainDataExpertStage)
# Settings that name stages of certain types
REFERENCES = {
    (InitializeStage, "tokenizer"): (TokenizerStage,),
    (TrainStage, "hidden_states"): (HiddenStatesStage,),
    (TrainExpertsStage, "clusters"): (ClusterStage,),
    (ClusterStage, "features"): (EmbedStage,),
    (ClusterStage, "previous"): (ClusterStage,),
    (ClusterFineStage, "captions"): (EmbedCaptionsStage,),
    (AssignStage, "captions"): (EmbedCaptionsStage,),
    (AssignStage, "centers"): (ClusterFineStage,),
    (ClusterCoarseStage, "assignment"): (AssignStage,),
    (SelectStage, "assignment"): (AssignStage,),
    (SelectStage, "captions"): (EmbedCaptionsStage,),
    (TrainDataExpertStage, "clusters"): (ClusterCoarseStage, SelectStage),
    (AssembleStage, "clusters"): (ClusterCoarseStage, SelectStage),
    (AssembleStage, "captions"): (EmbedCaptionsStage,),
}


@dataclass(config=STRICT, kw_only=True)
class Recipe:
    """A run: its stages, in order."""

    output_dir: str = Field(min_length=1)
    stages: list[Annotated[Stage, Field(discriminator="stage")]] = Field(min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**32)
    # None: what `accelerate launch` or its configuration says.
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    # Any of Accelerate's trackers: tensorboard, wandb, ...
    trackers: list[str] = Field(default_factory=list)
    # Stage -> hub repository that its model is uploaded to once all stages are done.
    push_to_hub: dict[str, str] = Field(default_factory=dict)

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _read_no(cls, value):
        return "no" if value is False else value  # YAML's no

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages):
        names = [stage.name for stage in stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the stage name {name!r} is used twice")
            alike = [other for other in names if other != name and other.casefold() == name.casefold()]
            if alike:
                raise ValueError(f"{name!r} and {alike[0]!r} are one folder where file names have no case: rename one")
            problem = _problem_of_name(name)
            if problem:
                raise ValueError(f"{name!r:.60} cannot name a stage: {problem}")
        kinds = {stage.name: stage for stage in stages}
        for stage in stages:
            for (kind, key), wanted in REFERENCES.items():
                named = kinds.get(getattr(stage, key)) if isinstance(stage, kind) else None
                if named is not None and not isinstance(named, wanted):
                    types = " or ".join(get_args(other.__annotations__["stage"])[0] for other in wanted)
                    raise ValueError(f"{stage.name}.{key}: {named.name} is a stage of type {named.stage}, not {types}")
        experts = [stage.expert for stage in stages if isinstance(stage, EXPERT_STAGES)]
        if len(set(experts)) < len(experts):
            raise ValueError(f"two stages train an expert of the same number; the numbers are {experts}")
        return stages

    @model_validator(mode="after")
    def _check_push(self):
        unknown = sorted(set(self.push_to_hub) - {stage.name for stage in self.stages})
        if unknown:
            raise ValueError(f"push_to_hub names stages that the recipe does not have: {', '.join(unknown)}")
        return self


def _problem_of_name(name: str) -> str:
    """Why a stage cannot have this name, which is that of its folder, or nothing."""
    if name in {field.name for field in fields(Recipe)} | {"defaults"}:
        return "it is a key of the recipe"
    if name.casefold() in (RECIPE, ENVIRONMENT, LOGS):
        return "a file of the run has that name"
    if not name.strip() or name != name.strip() or name.startswith((".", "-")) or name.endswith(".partial"):
        return "it is empty, begins with a dot, a minus or a space, or ends in .partial or a space"
    if any(character in "/\\" or not character.isprintable() for character in name):
        return "it is no name of a folder"
    return "it is longer than 200 bytes" if len(name.encode()) > 200 else ""


def load_recipe(path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe.

    Args:
        path: a YAML file with the keys of `Recipe`. Its extra key `defaults` maps a stage type (`train`, ...) to
            settings that all stages of that type share unless they set them themselves. Those of `train` hold for
            `train_experts`, `train_data_expert` and `train_router`, too.
        overrides: dotted key -> value, applied last. A key starts with the name of a stage (`clip_up.max_steps`), or
            is one of the recipe's own (`seed`, `defaults.train.max_steps`).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown key, a value of the wrong type or out of range, a contradiction.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder, not a recipe" if path.is_dir() else "there is no such file"
        raise FileNotFoundError(f"no recipe at {path}: {what}; the project's are in training/recipes")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8, so no recipe: {error}") from error
    raw = read_yaml(text, str(path))
    _require_stages(raw, path)
    for key, value in (overrides or {}).items():
        _override(raw, key, value)
    _require_stages(raw, path)
    defaults = raw.pop("defaults", None) or {}
    for kind, settings in defaults.items() if isinstance(defaults, dict) else [("", defaults)]:
        if not isinstance(settings, dict):
            raise ValueError(f"{path}: defaults{kind and f'.{kind}'} needs keys with settings, not {_short(settings)}")
    used = {kind for stage in raw["stages"] for kind in _default_kinds(stage["stage"])}
    if set(defaults) - used:
        unused = ", ".join(sorted(set(defaults) - used))
        raise ValueError(f"{path}: defaults for stage types that the recipe does not use: {unused}")
    for number, stage in enumerate(raw["stages"]):
        shared = {}
        for kind in _default_kinds(stage["stage"]):
            shared = _merge(shared, defaults.get(kind, {}))
        raw["stages"][number] = _merge(shared, stage)
    try:
        return TypeAdapter(Recipe).validate_python(raw)
    except ValidationError as error:
        lines = [f"  {_key(raw, e['loc'])}: {_message(e)} (got {_short(e['input'])})" for e in error.errors()]
        raise ValueError("\n".join([f"{path}:", *lines])) from None


def dump(settings) -> dict[str, Any]:
    """The plain dictionary of a recipe or a stage, as YAML and JSON can hold it."""
    return TypeAdapter(type(settings)).dump_python(settings, mode="json")


def _require_stages(raw: Any, path: Path) -> None:
    """Raises:
    ValueError: what the overrides and the defaults have to find in a recipe is not there.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("stages"), list):
        raise ValueError(f"{path} has no list of stages")
    for stage in raw["stages"]:
        keys = [stage.get("name"), stage.get("stage")] if isinstance(stage, dict) else []
        if not keys or not all(isinstance(key, str) for key in keys):
            raise ValueError(f"{path}: a stage needs the keys name and stage, both texts, got {_short(stage)}")


def _override(raw: dict, key: str, value: Any) -> None:
    head, *rest = key.split(".")
    target = raw
    stage = next((stage for stage in raw["stages"] if stage["name"] == head), None)
    if stage is not None:
        if not rest:
            raise ValueError(f"--{key}: a stage is overridden key by key, as in --{key}.KEY VALUE")
        target = stage
    elif head in {f.name for f in fields(Recipe)} | {"defaults"}:
        rest = [head, *rest]
    else:
        names = [stage["name"] for stage in raw["stages"]]
        raise ValueError(
            f"--{key}: {head!r} is neither an option (--config, --output-dir, --stages, --experts), nor a key of the "
            f"recipe, nor one of its stages {names}, whose settings are written --STAGE.KEY"
        )
    if "" in rest or len(rest) > MOST_LEVELS:
        raise ValueError(f"--{_short(key)}: keys are written KEY.KEY, at most {MOST_LEVELS} of them")
    for part in rest[:-1]:
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ValueError(f"--{key}: {part!r} has no keys")
    target[rest[-1]] = value


def _default_kinds(stage: str) -> list[str]:
    """The keys of `defaults` that hold for a stage of this type, the more special one last."""
    return ["train", stage] if stage in ("train_experts", "train_data_expert", "train_router") else [stage]


def _merge(defaults: dict, settings: dict) -> dict:
    merged = copy.deepcopy(defaults)
    for key, value in settings.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _key(raw: dict, location: tuple) -> str:
    """The place of a validation error as a user writes it: stages are named, not counted."""
    if len(location) > 1 and location[0] == "stages":
        location = (raw["stages"][location[1]]["name"], *location[3:])
    return ".".join(str(part) for part in location) or "recipe"


def _message(error: dict) -> str:
    unknown = error["type"] == "unexpected_keyword_argument"
    return "there is no such key, here or in the defaults of this stage" if unknown else error["msg"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
