"""Scores of a model while it trains, for the log."""

import shutil
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, ProcessorMixin

from clip_moe.engine.files import save
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.training.train_settings import Evaluation
from clip_moe.training.training_state import kept_random_states


class Scores:
    """Measures the model of a stage now and then.

    Args:
        folder: holds the model while it is measured.
    """

    def __init__(
        self,
        settings: Evaluation,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        accelerator: Accelerator,
        folder: Path,
    ):
        self.settings, self.model, self.processor, self.accelerator = settings, model, processor, accelerator
        self.folder, self.tasks = folder / "measured.partial", settings.open_tasks()

    def due(self, step: int, total_steps: int) -> bool:
        """Whether the model is measured after a step."""
        return step % self.settings.every_steps == 0 or step == total_steps

    def measure(self, state_dict: dict[str, torch.Tensor]) -> dict[str, float]:
        """`TASK/METRIC` -> score of the model with these weights. All processes take part; those but the main one get
        nothing. What is random goes on as if nothing had happened.
        """
        scores = {}
        if self.accelerator.is_main_process:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            save(self.model, self.folder, state_dict=state_dict)
            save(self.processor, self.folder)
            size, device = self.settings.batch_size, self.accelerator.device
            with kept_random_states(device), tempfile.TemporaryDirectory() as results:
                measured = evaluate_model(
                    self.folder, self.tasks, results, name="model", batch_size=size, device=device
                )
            for name, result in zip(self.tasks, measured, strict=True):
                scores |= {f"{name}/{metric}": score for metric, score in result["metrics"].items()}
            shutil.rmtree(self.folder)
        self.accelerator.wait_for_everyone()
        return scores
