"""What all stages that take steps of an optimizer have in common: which data, how many steps, AdamW, checkpoints."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from accelerate import Accelerator
from accelerate.utils import set_seed
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

from records.files import save
from records.provenance import LOG, flatten
from training.context import Context
from training.engine import CHECKPOINTS, start_trackers, train
from training.expected import (
    AtMost,
    Expected,
    Unknown,
    described,
)
from training.freezing import set_trainable
from training.optimizers import INSTALL_TORCHAO, OptimizerName, has_torchao
from training.samplers import Share
from training.scores import Evaluation, Scores
from training.settings import STRICT, dump
from training.stages.base import Data, Model, Stage, inherited


@dataclass(config=STRICT, kw_only=True)
class StepsStage(Stage):
    """A stage that trains with the loop of `training.engine`. A kind of it has `trainable`, `task` and `run`."""

    makes_model: ClassVar[bool] = True
    # What its data are made of, as it is printed
    samples: ClassVar[str] = "samples"
    # Settings of stages that train a CLIP, which have them as fields. Not annotated: here they would be fields, too
    mini_batch_size = lora = None

    # An earlier stage, a folder or a hub name.
    model: Model
    # The pairs that it trains on.
    data: Data

    # Samples of one optimizer step, over all processes and accumulation steps.
    global_batch_size: int = Field(gt=0)
    # Each accumulation step sees only its own negatives: accumulation lowers memory, and makes the task easier.
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    # Steps of the optimizer. Either this or num_epochs is set.
    max_steps: int | None = Field(default=None, gt=0)
    # Passes through the data.
    num_epochs: int | None = Field(default=None, gt=0)

    # AdamW's learning rate after warm-up: about how far each weight moves in a step.
    learning_rate: float = Field(gt=0, le=1)
    # Of AdamW, on matrices: biases, norms, the class embedding and the temperature have none.
    weight_decay: float = Field(default=0.0, ge=0)
    # Weight decay on all that trains (CLIP-MoE's released code).
    decay_all: bool = False
    # AdamW's decay of the gradient's mean.
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    # AdamW's decay of the squared gradient's mean.
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    # AdamW's epsilon.
    adam_epsilon: float = Field(default=1e-6, gt=0, le=1)
    # Linear warm-up: a number of steps, or below 1 a share of all steps. Then cosine to zero.
    warmup_steps: float = Field(default=0, ge=0)
    # Longer gradients are scaled to this length; None: no gradient is.
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    # "adamw", torch's, one kernel where the device has it; or torchao's with moments of 8 bits, in a quarter of the
    # memory.
    optimizer: OptimizerName = "adamw"
    # The trained model is the exponential moving average of the weights, with this decay a step. DeepSpeed has none.
    # None: the trained model has the last weights.
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    # Compute activations again in the backward pass: less memory, more time.
    gradient_checkpointing: bool = False
    # Of the order of the data; None: the recipe's. Models that differ in nothing else make an ensemble.
    seed: int | None = Field(default=None, ge=0)

    # Log losses every so many steps.
    logging_steps: int = Field(default=10, gt=0)
    # A checkpoint every so many steps; None: only the finished model.
    save_steps: int | None = Field(default=None, gt=0)
    # How many checkpoints are kept.
    save_total_limit: int = Field(default=1, gt=0)

    @model_validator(mode="after")
    def _check_steps(self):
        if (self.max_steps is None) == (self.num_epochs is None):
            raise ValueError(
                f"exactly one of max_steps ({self.max_steps}) and num_epochs ({self.num_epochs}) must be set"
            )
        if self.learning_rate * self.weight_decay > 1:
            raise ValueError(
                f"weight_decay {self.weight_decay:g} times learning_rate {self.learning_rate:g} is what a step takes "
                "away of each weight, which cannot be more than all of it: lower weight_decay"
            )
        if self.num_epochs is not None and self.data.streaming:
            raise ValueError("a streamed dataset has no known length: set max_steps instead of num_epochs")
        return self

    def task(self, model: PreTrainedModel) -> nn.Module:
        """The model and its loss in one module: see `training.contrastive_task.ContrastiveTask`."""
        raise NotImplementedError(f"{type(self).__name__} has no task")

    def train_model(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        loader: Any,
        accelerator: Accelerator,
        context: Context,
        directory: Path,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Train a model whose parameters require a gradient or not, and save it with its processor.

        Args:
            loader: has batches as `training.loader.PairLoader` does.
            accelerator: a fresh one.
            evaluation: what is measured meanwhile.
        """
        scores = evaluation and Scores(evaluation, model, processor, accelerator, directory / CHECKPOINTS)
        total_steps = self._total_steps(loader)
        training = [parameter.requires_grad for parameter in model.parameters()]
        accelerator.on_main_process(print)(
            f"{self.name}: {total_steps} steps of {self.global_batch_size} {self.samples} on "
            f"{accelerator.num_processes} x {accelerator.device.type}, {sum(training)} weight tensors train, "
            f"{len(training) - sum(training)} are frozen; its log is {directory / LOG}"
        )
        start_trackers(accelerator, flatten(dump(self)))
        # Whatever was drawn on the way here, such as by a cache that had to be filled
        set_seed(context.seed, device_specific=True)
        seed = self._share(accelerator, context).seed
        state_dict = train(accelerator, model, loader.batches, self, total_steps, directory, seed, scores)
        for tracker in accelerator.trackers:
            tracker.finish()
        if accelerator.is_main_process:
            model.save_pretrained(directory, state_dict=state_dict)
            save(processor, directory)
            if scores is not None and scores.best() is not None:
                shutil.copytree(scores.best(), directory, dirs_exist_ok=True)

    def trained_config(self, inputs: SimpleNamespace) -> PreTrainedConfig:
        """The configuration of the trained model. Raises Unknown, or ValueError where it cannot be trained."""
        raise NotImplementedError(f"{type(self).__name__} has no trained_config")

    def set_trainable(self, model: PreTrainedModel, seed: int = 0) -> None:
        """Let what trains require a gradient, and nothing else. Raises ValueError where that cannot be."""
        set_trainable(model, self.trainable)

    def trained_model(self, inputs: SimpleNamespace) -> PreTrainedModel:
        """Without its weights, of which those that train require a gradient. Raises Unknown, ValueError."""
        model = described(self.trained_config(inputs))
        self.set_trainable(model)
        return model

    def trained_names(self, inputs: SimpleNamespace) -> list[str]:
        """The names of the parameters that differ in the trained model. Raises Unknown, ValueError."""
        return [name for name, parameter in self.trained_model(inputs).named_parameters() if parameter.requires_grad]

    def output_config(self, inputs: SimpleNamespace) -> Expected:
        before, names = inputs.model.weights, frozenset(self.trained_names(inputs))
        weights = (*before, (self.name, names)) if before else ()
        return replace(inherited(self, inputs), configs=(self.trained_config(inputs),), weights=weights)

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        batch, accumulation, processes = self.global_batch_size, self.gradient_accumulation_steps, inputs.num_processes
        if batch % (processes * accumulation):
            shares = f"{processes} processes x {accumulation} accumulation steps"
            yield "global_batch_size", f"{batch} cannot be shared by {shares}"
        if self.optimizer == "adamw_8bit" and not has_torchao():
            yield "optimizer", INSTALL_TORCHAO
        with contextlib.suppress(Unknown):
            least = batch if self.max_steps is None else batch // accumulation
            if inputs.data.known_pairs < least:
                yield (
                    "global_batch_size",
                    f"a dataset of {inputs.data.known_pairs} samples does not fill a global batch of {least}",
                )

    def steps(self, inputs: SimpleNamespace) -> int:
        """Optimizer steps in all. Raises Unknown."""
        if self.max_steps is not None:
            return self.max_steps
        return self.num_epochs * (inputs.data.known_pairs // self.global_batch_size)

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """Memory for the weights, their gradients, AdamW's two moments, averaged weights, and the three numbers that
        AdamW computes at a time for each of the largest weight; disk also for checkpoints, one more than
        `save_total_limit` while the newest is written."""
        cost = super().cost(inputs)

        def sizes() -> list[int]:
            return [weight.numel() for weight in self.trained_model(inputs).parameters() if weight.requires_grad]

        def memory() -> int:
            weights = 4 * self.trained_model(inputs).num_parameters()
            return weights + (4 + self._bytes_of_states()) * sum(sizes()) + 12 * max(sizes())

        def most() -> int:
            weights = cost["disk"]()
            if self.save_steps is None:
                return weights
            try:
                steps = self.steps(inputs)
            except Unknown:
                steps = AtMost(self.save_steps * (self.save_total_limit + 2))
            # AdamW counts its steps of each weight
            checkpoint = weights + self._bytes_of_states() * sum(sizes()) + 4 * len(sizes())
            written = (steps - 1) // self.save_steps
            kept, at_once = min(written, self.save_total_limit), min(written, self.save_total_limit + 1)
            return type(steps)(max(weights + kept * checkpoint, at_once * checkpoint))

        return cost | {
            "trainable": lambda: sum(sizes()),
            "steps": lambda: self.steps(inputs),
            "samples": lambda: self.steps(inputs) * self.global_batch_size,
            "memory": memory,
            "disk at most": most,
        }

    def _bytes_of_states(self) -> int:
        """Of a parameter that trains: two moments, and the average of its values."""
        return (8 if self.optimizer == "adamw" else 2) + (0 if self.ema_decay is None else 4)

    def _share(self, accelerator: Accelerator, context: Context) -> Share:
        rank, world_size = accelerator.process_index, accelerator.num_processes
        batch_size = self.global_batch_size // (world_size * self.gradient_accumulation_steps)
        return Share(batch_size, rank, world_size, context.seed if self.seed is None else self.seed)

    def _total_steps(self, loader: Any) -> int:
        if not self.data.streaming and len(loader) == 0:
            raise ValueError(f"{self.name}: its batch sampler makes no batch of these {self.samples}")
        total_steps = self.max_steps or self.num_epochs * (len(loader) // self.gradient_accumulation_steps)
        if total_steps == 0:
            raise ValueError(
                f"{self.name}: an epoch of {len(loader)} batches has no step of {self.gradient_accumulation_steps} "
                "accumulation steps: lower gradient_accumulation_steps, or set max_steps"
            )
        return total_steps
