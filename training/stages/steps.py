"""The base of stages that train with the loop of `clip_moe.training.loop`."""

import dataclasses
import json
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.data.arguments import Data
from clip_moe.engine.context import Context
from clip_moe.engine.outcome import Training
from clip_moe.engine.settings import STRICT, refuse
from clip_moe.engine.stage import Cost, Model
from clip_moe.training.train_settings import Evaluation, LoopSettings

if typing.TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import ProcessorMixin

    from clip_moe.training.samplers import Share
    from clip_moe.training.task import Task

# The first step of a rehearsal includes what happens once, and the second one tells the time
REHEARSED_STEPS = 2


@dataclass(config=STRICT, kw_only=True)
class StepsStage(LoopSettings, ModelStage):
    """A stage that trains with the loop of `clip_moe.training.loop`: its `run` calls `train_model`."""

    # Plural noun for samples in messages
    samples: ClassVar[str] = "samples"
    main_process_only: ClassVar[bool] = False
    incidental: ClassVar[Collection[str]] = ("logging_steps", "save_steps", "save_total_limit", "torch_compile")

    # An earlier stage, a folder or a hub name.
    model: Model
    # Pairs to train on.
    data: Data

    # Optimizer steps. Set either this or num_epochs.
    max_steps: int | None = Field(default=None, gt=0)
    # Passes through the data.
    num_epochs: int | None = Field(default=None, gt=0)

    # Seed of the order of the data; None: the recipe's.
    seed: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_steps(self):
        refuse(
            (
                (self.max_steps is None) == (self.num_epochs is None),
                f"set exactly one of max_steps ({self.max_steps}) and num_epochs ({self.num_epochs})",
            ),
            (
                self.num_epochs is not None and self.data.streaming,
                "a streamed dataset has no known length: set max_steps instead of num_epochs",
            ),
        )
        return self

    def train_model(
        self,
        task: "Task",
        processor: "ProcessorMixin",
        loader: Any,
        accelerator: "Accelerator",
        context: Context,
        directory: Path,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Train a model whose parameters require a gradient or not, and save it with its processor.

        Args:
            task: the model with its loss.
            loader: has batches as `clip_moe.training.loader.PairLoader` does.
            accelerator: a fresh one.
            evaluation: tasks to measure during training.
        """
        from accelerate.utils import set_seed

        from clip_moe.engine.files import save
        from clip_moe.engine.provenance import CHECKPOINTS, LOG
        from clip_moe.training.loop import Scores, train

        model = task.model
        scores = evaluation and Scores(evaluation, model, processor, accelerator, directory / CHECKPOINTS)
        total_steps = self.max_steps or self.num_epochs * (len(loader) // self.gradient_accumulation_steps)
        if total_steps == 0:
            raise ValueError(
                f"an epoch of {len(loader)} batches is less than one step of {self.gradient_accumulation_steps} "
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

    def rehearsed(self, num_samples: int) -> typing.Self:
        """Two steps, with a checkpoint after the first one where there are checkpoints."""
        save_steps = None if self.save_steps is None else 1
        few = dataclasses.replace(super().rehearsed(num_samples), num_epochs=None, max_steps=REHEARSED_STEPS)
        return dataclasses.replace(few, logging_steps=1, save_steps=save_steps)

    @property
    def least_samples(self) -> int:
        return REHEARSED_STEPS * self.global_batch_size

    def with_batch(self, batch_size: int, num_processes: int) -> typing.Self:
        global_batch_size = batch_size * num_processes * self.gradient_accumulation_steps
        return dataclasses.replace(self, global_batch_size=global_batch_size)

    def cost(self, rehearsed: typing.Self, directory: Path, seconds: float, disk: int, ratio: float | None) -> Cost:
        """The steps, each as long as the second one of the rehearsal, which logged each."""
        from clip_moe.engine.files import read_log
        from clip_moe.engine.provenance import LOG, Record

        speeds = [line["images_per_second"] for line in read_log(directory / LOG) if "images_per_second" in line]
        first, second = [rehearsed.global_batch_size / speed for speed in speeds]
        step, steps, pairs = 2 * second - first, self.max_steps, Record.read(directory).pairs
        # Few pairs do not tell how many the cluster of an expert has
        if steps is None and None not in (pairs, ratio) and self.expert_number is None:
            steps = self.num_epochs * (round(pairs * ratio) // self.global_batch_size)
        # A step of another batch does not tell the time of the real one
        is_real = rehearsed.global_batch_size == self.global_batch_size
        whole = steps * step if is_real and steps is not None else None
        return Cost(whole, step, steps, disk)

    def training(self, directory: Path) -> Training | None:
        """The losses in the log, whose last line then has their outcome, if there is one."""
        from clip_moe.engine.files import read_log
        from clip_moe.engine.provenance import LOG

        if not (directory / LOG).is_file():
            return None
        batch_size = self.global_batch_size // self.gradient_accumulation_steps
        training = Training.from_log(read_log(directory / LOG), batch_size)
        if training is not None and training.outcome:
            with (directory / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": training.steps, "outcome": training.outcome}) + "\n")
        return training

    def share(self, accelerator: "Accelerator", context: Context) -> "Share":
        """How large the batches of this process are. Raises ValueError where processes cannot share a batch."""
        from clip_moe.training.samplers import Share

        rank, world_size = accelerator.process_index, accelerator.num_processes
        batch_size, rest = divmod(self.global_batch_size, world_size * self.gradient_accumulation_steps)
        if rest:
            shares = f"{world_size} processes x {self.gradient_accumulation_steps} accumulation steps"
            raise ValueError(f"{self.name}.global_batch_size: {self.global_batch_size} cannot be shared by {shares}")
        return Share(batch_size, rank, world_size, context.seed if self.seed is None else self.seed)
