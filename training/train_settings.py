"""Settings that stages that train share: the optimizer, the loop, adapters, and what is measured meanwhile. Importing
them imports nothing heavy."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.settings import STRICT
from clip_moe.evaluation.measured_tasks import MeasuredTasks

# Weights to train: of routers, of experts that a router chooses, of all norms
Kind = Literal["routers", "experts", "norms"]
# These, or a regular expression of names
Trainable = str | Annotated[list[Kind], Field(min_length=1)]


@dataclass(config=STRICT, kw_only=True)
class LoopSettings:
    """Settings of the optimizer and of the loop, for a stage, whose `name` stands in messages."""

    # AdamW's learning rate after warm-up.
    learning_rate: float = Field(gt=0, le=1)
    # AdamW's weight decay of matrices: biases, norms and temperature have none.
    weight_decay: float = Field(default=0.0, ge=0)
    # Weight decay on all that trains (CLIP-MoE's released code).
    decay_all: bool = False
    # AdamW's decay of the gradient's mean.
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    # AdamW's decay of the squared gradient's mean.
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    # AdamW's epsilon.
    adam_epsilon: float = Field(default=1e-6, gt=0, le=1)

    # Samples of one optimizer step, over all processes and accumulation steps.
    global_batch_size: int = Field(gt=0)
    # Parts of a step, each with its own negatives: less memory, an easier task.
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    # Linear warm-up, then cosine to zero: a number of steps, or below 1 a share of all.
    warmup_steps: float = Field(default=0, ge=0)
    # Longer gradients are scaled to this norm; None: no clipping.
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    # Compute activations again in the backward pass: less memory, more time.
    gradient_checkpointing: bool = False
    # Compile each encoder layer. "auto": on a GPU.
    torch_compile: Literal["auto"] | bool = "auto"

    # Log mean losses every `logging_steps` steps.
    logging_steps: int = Field(default=10, gt=0)
    # Save a checkpoint every `save_steps` steps; None: only the finished model.
    save_steps: int | None = Field(default=None, gt=0)
    # Number of checkpoints to keep.
    save_total_limit: int = Field(default=1, gt=0)


@dataclass(config=STRICT, kw_only=True)
class LoraSettings:
    """Which weights get adapters, and how large these are. The names are those of peft's LoraConfig."""

    # Rank of an adapter.
    r: int = Field(gt=0)
    # The product of an adapter's two matrices is multiplied by lora_alpha / r.
    lora_alpha: float = Field(default=16.0, gt=0)
    # Suffixes of the names of linear layers.
    target_modules: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=lambda: ["q_proj", "v_proj"])
    # Suffixes of the names of other parameters, such as experts.up_proj.
    target_parameters: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    # Regular expression of the names of parameters to train in full, besides adapters.
    trainable: str | None = None


@dataclass(config=STRICT, kw_only=True)
class Evaluation(MeasuredTasks):
    """Tasks that are measured while a stage trains, by the main process while the others wait. The weights depend on it
    with `load_best_model_at_end` alone."""

    # Evaluate every `every_steps` steps, and after the last one.
    every_steps: int = Field(gt=0)
    # Batch size for images and texts.
    batch_size: int = Field(default=64, gt=0)
    # End with the weights of the highest mean of the tasks' main scores, instead of the last ones. The tasks should be
    # on pictures of neither training nor a test, such as the split `validation` of a [split](#split) stage.
    load_best_model_at_end: bool = False
