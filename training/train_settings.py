"""Settings that stages that train share: the optimizer, the loop, routers, adapters, and what is measured meanwhile.
Importing them imports nothing heavy."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.messages import join_names
from clip_moe.engine.settings import STRICT
from clip_moe.evaluation.measured_tasks import MeasuredTasks

BalanceMean = Literal["tower", "layer", "token", "tower_token", "shared"]
Tower = Literal["text", "vision"]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(config=STRICT, kw_only=True)
class OptimizerSettings:
    """Settings of the optimizer."""

    # AdamW's learning rate after warm-up: about how far each weight moves in a step.
    learning_rate: float = Field(gt=0, le=1)
    # AdamW's weight decay of matrices: biases, norms, the class embedding and the temperature have none.
    weight_decay: float = Field(default=0.0, ge=0)
    # Weight decay on all that trains (CLIP-MoE's released code).
    decay_all: bool = False
    # Factor of the learning rate for each layer further down in its tower; embeddings have the smallest rate (EVA-CLIP,
    # arXiv:2303.15389). 1: all have the same.
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    # AdamW's decay of the gradient's mean.
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    # AdamW's decay of the squared gradient's mean.
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    # AdamW's epsilon.
    adam_epsilon: float = Field(default=1e-6, gt=0, le=1)
    # "adamw", torch's, one kernel where the device has it; or torchao's with moments of 8 bits, in a quarter of the
    # memory.
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"


@dataclass(config=STRICT, kw_only=True)
class LoopSettings(OptimizerSettings):
    """Settings of the loop, for a stage, whose `name` stands in messages."""

    # Settings of stages that train a CLIP, which have them as fields. Not annotated: here they would be fields, too
    mini_batch_size = lora = None

    # Samples of one optimizer step, over all processes and accumulation steps.
    global_batch_size: int = Field(gt=0)
    # Each accumulation step sees only its own negatives: accumulation lowers memory, and makes the task easier.
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    # Linear warm-up: a number of steps, or below 1 a share of all steps. Then cosine to zero.
    warmup_steps: float = Field(default=0, ge=0)
    # Parameters that start frozen: a regular expression, matched as in `trainable` (with LoRA, adapters' names) -> the
    # share of the steps for which they stay so. It saves no time: their gradients are computed. DeepSpeed has none.
    frozen_until: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    # Longer gradients are scaled to this length; None: no gradient is.
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    # The temperature of a CLIP is kept at or above 1 / max_logit_scale (CLIP, section 2.5).
    max_logit_scale: float = Field(default=100.0, ge=1)
    # The trained model is the exponential moving average of the weights, with this decay a step. DeepSpeed has none.
    # None: the trained model has the last weights.
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    # By how much the biases of a model with `use_expert_bias` move towards balance in a step (arXiv:2408.15664).
    expert_bias_rate: float = Field(default=1e-3, gt=0)
    # Compute activations again in the backward pass: less memory, more time.
    gradient_checkpointing: bool = False
    # Compile each encoder layer; layers of a kind share one compiled function. "auto": on a GPU.
    torch_compile: Literal["auto"] | bool = "auto"

    # Log losses every so many steps: means since the line before. The first and the last step have lines, too.
    logging_steps: int = Field(default=10, gt=0)
    # A checkpoint every so many steps; None: only the finished model.
    save_steps: int | None = Field(default=None, gt=0)
    # How many checkpoints are kept.
    save_total_limit: int = Field(default=1, gt=0)


@dataclass(config=STRICT, kw_only=True)
class RouterSettings:
    """Settings of the routers of a sparse model."""

    # How many choices of a token count as load in the balance loss: 1, the argmax (CLIP-MoE eq. 7); None: all K
    # (CLIP-UP, CLIP-FMoE).
    balance_top_k: int | None = Field(default=None, gt=0)
    # Router losses are the mean over a tower's layers, summed over the towers (CLIP-UP); the mean over all layers of
    # both towers (CLIP-MoE eq. 9); those of the tokens of all layers and towers taken together (CLIP-FMoE eq. 3);
    # those of the tokens of all layers of a tower taken together, summed over the towers (CLIP-MoE's released code); or
    # the mean over the layers of a shared encoder, in each of which the tokens of both towers are taken together.
    balance_mean: BalanceMean = "tower"
    # Where router losses are summed over the towers: what those of the text tower are multiplied by; None: 1.
    text_router_weight: float | None = Field(default=None, ge=0)
    # LIMoE's losses of routers, of `text`, of `vision` or of both (CLIP-UP eq. 8 to 11): the weight of the local
    # entropy loss, which is low where the router is sure of every token.
    local_entropy_coef: dict[Tower, Weight] = Field(default_factory=dict)
    # The weight of the global entropy loss, which is 0 where the tokens of each layer are spread over enough experts.
    global_entropy_coef: dict[Tower, Weight] = Field(default_factory=dict)
    # How many experts are enough for it.
    global_entropy_min_experts: dict[Tower, Annotated[float, Field(gt=1)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_routers(self):
        if self.text_router_weight is not None and self.balance_mean not in ("tower", "tower_token"):
            raise ValueError(f"text_router_weight goes with a sum over the towers, not with {self.balance_mean}")
        if set(self.global_entropy_coef) != set(self.global_entropy_min_experts):
            raise ValueError(
                f"global_entropy_coef is for {join_names(list(self.global_entropy_coef)) or 'no tower'}, but "
                f"global_entropy_min_experts for {join_names(list(self.global_entropy_min_experts)) or 'no tower'}"
            )
        return self


@dataclass(config=STRICT, kw_only=True)
class LoraSettings:
    """Which weights get adapters, and how large these are. The names are those of peft's LoraConfig."""

    # Rank of an adapter.
    r: int = Field(gt=0)
    # The product of an adapter's two matrices is multiplied by lora_alpha / r.
    lora_alpha: float = Field(default=16.0, gt=0)
    # Share of an adapter's input that is 0 in each step.
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    # Ends of the names of linear layers.
    target_modules: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=lambda: ["q_proj", "v_proj"])
    # Ends of the names of other parameters, such as experts.up_proj: those of all experts of a layer.
    target_parameters: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    # Regular expression, matched anywhere in a parameter's name: what trains besides, whole; None: nothing.
    trainable: str | None = None


@dataclass(config=STRICT, kw_only=True)
class Evaluation(MeasuredTasks):
    """What is measured while a stage trains, by the main process while the others wait. The weights do not depend on
    it, unless the best are kept."""

    # Every so many steps, and after the last one.
    every_steps: int = Field(gt=0)
    # Also before the first step.
    at_start: bool = False
    # Images or texts that are embedded at a time.
    batch_size: int = Field(default=64, gt=0)
    # A score, as TASK/METRIC: the stage's model is the one that had the highest, the earliest of equal ones; None: the
    # one after the last step. A task on own data without a name goes by its `task`, if no other has the same.
    keep_best: str | None = None
