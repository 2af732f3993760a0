"""What stages that train with the loop of `training.loop` have in common."""

import dataclasses
import shutil
import typing
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Data, Model, Stage
from clip_moe.training.train_settings import Evaluation, LoopSettings

if typing.TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import ProcessorMixin

    from clip_moe.training.samplers import Share

# The first step of a rehearsal includes what happens once, and the second one tells the time
REHEARSED_STEPS = 2


@dataclass(config=STRICT, kw_only=True)
class StepsStage(LoopSettings, Stage):
    """A stage that trains with the loop of `training.loop`. A kind of it has `run`, which calls `train_model`."""

    makes_model: ClassVar[bool] = True
    # What its data are made of, as it is printed
    samples: ClassVar[str] = "samples"

    # An earlier stage, a folder or a hub name.
    model: Model
    # The pairs that it trains on.
    data: Data

    # Steps of the optimizer. Either this or num_epochs is set.
    max_steps: int | None = Field(default=None, gt=0)
    # Passes through the data.
    num_epochs: int | None = Field(default=None, gt=0)

    # Seed of the order of the data; None: the recipe's. Models that differ in nothing else make an ensemble.
    seed: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_steps(self):
        if (self.max_steps is None) == (self.num_epochs is None):
            raise ValueError(
                f"exactly one of max_steps ({self.max_steps}) and num_epochs ({self.num_epochs}) must be set"
            )
        if self.num_epochs is not None and self.data.streaming:
            raise ValueError("a streamed dataset has no known length: set max_steps instead of num_epochs")
        return self

    def train_model(
        self,
        task: "nn.Module",
        processor: "ProcessorMixin",
        loader: Any,
        accelerator: "Accelerator",
        context: Context,
        directory: Path,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Train a model whose parameters require a gradient or not, and save it with its processor.

        Args:
            task: the model, as its attribute `model`, and its loss in one module, see `training.contrastive_task`.
            loader: has batches as `training.loader.PairLoader` does.
            accelerator: a fresh one.
            evaluation: what is measured meanwhile.
        """
        from accelerate.utils import set_seed

        from clip_moe.engine.files import save
        from clip_moe.engine.provenance import CHECKPOINTS, LOG
        from clip_moe.training.loop import train
        from clip_moe.training.scores import Scores

        model = task.model
        scores = evaluation and Scores(evaluation, model, processor, accelerator, directory / CHECKPOINTS)
        total_steps = self.max_steps or self.num_epochs * (len(loader) // self.gradient_accumulation_steps)
        if total_steps == 0:
            raise ValueError(
                f"an epoch of {len(loader)} batches has no step of {self.gradient_accumulation_steps} "
                "accumulation steps: lower gradient_accumulation_steps, or set max_steps"
            )
        training = [parameter.requires_grad for parameter in model.parameters()]
        accelerator.on_main_process(print)(
            f"{self.name}: {total_steps} steps of {self.global_batch_size} {self.samples} on "
            f"{accelerator.num_processes} x {accelerator.device.type}, {sum(training)} weight tensors train, "
            f"{len(training) - sum(training)} are frozen; its log is {directory / LOG}"
        )
        # Whatever was drawn on the way here, such as by a cache that had to be filled
        set_seed(context.seed, device_specific=True)
        state_dict = train(accelerator, task, loader.batches, self, total_steps, directory, scores)
        if accelerator.is_main_process:
            save(model, directory, state_dict=state_dict)
            save(processor, directory)
            if scores is not None and scores.best() is not None:
                shutil.copytree(scores.best(), directory, dirs_exist_ok=True)

    def rehearsed(self, num_samples: int) -> typing.Self:
        """Two steps, with a checkpoint after the first one where there are checkpoints."""
        save_steps = None if self.save_steps is None else 1
        few = dataclasses.replace(super().rehearsed(num_samples), num_epochs=None, max_steps=REHEARSED_STEPS)
        return dataclasses.replace(few, logging_steps=1, save_steps=save_steps)

    def share(self, accelerator: "Accelerator", context: Context) -> "Share":
        """How large the batches of this process are. Raises ValueError where processes cannot share a batch."""
        from clip_moe.training.samplers import Share

        rank, world_size = accelerator.process_index, accelerator.num_processes
        batch_size, rest = divmod(self.global_batch_size, world_size * self.gradient_accumulation_steps)
        if rest:
            shares = f"{world_size} processes x {self.gradient_accumulation_steps} accumulation steps"
            raise ValueError(f"{self.name}.global_batch_size: {self.global_batch_size} cannot be shared by {shares}")
        return Share(batch_size, rank, world_size, context.seed if self.seed is None else self.seed)
