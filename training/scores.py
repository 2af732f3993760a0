"""Scores of a model while it trains: they go to the log, and the best model may become the stage's result."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, ProcessorMixin

from clip_moe.engine.files import read_json, save, write_text
from clip_moe.engine.messages import join_names
from clip_moe.engine.provenance import weights_fingerprint
from clip_moe.engine.settings import refuse
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.measures import METRICS
from clip_moe.evaluation.task import Task
from clip_moe.training.train_settings import Evaluation
from clip_moe.training.training_state import kept_random_states

RECORD = "best.json"


def find_score(keep_best: str, tasks: Mapping[str, Task]) -> str:
    """The whole name of a score, TASK/METRIC, in which that of a task on own data may be cut to how it begins."""
    task, _, metric = keep_best.partition("/")
    matching = [task] if task in tasks else [name for name in tasks if name.startswith(f"{task}-")]
    metrics = METRICS[tasks[matching[0]].kind] if matching else ()
    names = f"several of the tasks: {', '.join(matching)}" if matching else f"none of the tasks {', '.join(tasks)}"
    refuse(
        (len(matching) != 1, f"keep_best {keep_best!r} names {names}"),
        (
            metric.partition("/")[0] not in metrics,
            f"keep_best {keep_best!r}: the metrics of {', '.join(matching)} are {join_names(metrics)}",
        ),
    )
    return f"{matching[0]}/{metric}"


class Scores:
    """Measures the model of a stage now and then.

    Args:
        folder: gets the model that is measured, and keeps the best one from one attempt of the stage to the next.
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
        self.folder, self.tasks = folder, settings.open_tasks()
        if settings.keep_best is not None and accelerator.is_main_process:
            self.decisive = find_score(settings.keep_best, self.tasks)

    def due(self, step: int, total_steps: int) -> bool:
        """Whether the model is measured after a step."""
        return step % self.settings.every_steps == 0 or step == total_steps

    def measure(self, step: int, state_dict: dict[str, torch.Tensor]) -> dict[str, float]:
        """`TASK/METRIC` -> score of the model with these weights. All processes take part; those but the main one get
        nothing. What is random goes on as if nothing had happened.
        """
        scores = {}
        if self.accelerator.is_main_process:
            with kept_random_states(self.accelerator.device):
                scores = self._measure(step, state_dict)
        self.accelerator.wait_for_everyone()
        return scores

    def best(self) -> Path | None:
        """The folder of the model that had the highest score so far, with a record of that; None: none is kept."""
        kept = sorted(self.folder.glob("best-*"))
        if self.settings.keep_best is None or not kept:
            return None
        try:
            sound = read_json(kept[-1] / RECORD)["weights"] == weights_fingerprint(kept[-1])
        except (OSError, ValueError, TypeError, LookupError):
            sound = False
        if not sound:
            raise ValueError(
                f"the best model so far, {kept[-1]}, is not what its {RECORD} tells: delete {self.folder} to begin the "
                "stage anew"
            )
        return kept[-1]

    def _measure(self, step: int, state_dict: dict[str, torch.Tensor]) -> dict[str, float]:
        measured = self.folder / "measured.partial"
        shutil.rmtree(measured, ignore_errors=True)
        measured.mkdir(parents=True)
        save(self.model, measured, state_dict=state_dict)
        save(self.processor, measured)
        with tempfile.TemporaryDirectory() as results:
            size, device = self.settings.batch_size, self.accelerator.device
            measurements = evaluate_model(measured, self.tasks, results, name="model", batch_size=size, device=device)
        scores = {
            f"{name}/{metric}": score
            for name, result in zip(self.tasks, measurements, strict=True)
            for metric, score in result["metrics"].items()
        }
        if self.settings.keep_best is not None:
            if self.decisive not in scores:
                raise ValueError(f"keep_best {self.decisive!r} was not measured, only {join_names(scores)}")
            self._keep(step, scores[self.decisive], measured)
        shutil.rmtree(measured, ignore_errors=True)
        return scores

    def _keep(self, step: int, value: float, measured: Path) -> None:
        """Let a model take the place of the best one, if it is better."""
        best = self.best()
        if best is not None and not value > read_json(best / RECORD)["value"]:
            return
        record = {"step": step, "score": self.decisive, "value": value, "weights": weights_fingerprint(measured)}
        write_text(measured / RECORD, json.dumps(record, indent=2))
        better = self.folder / f"best-{step:08d}"
        shutil.rmtree(better, ignore_errors=True)  # of a run that was killed, after its last checkpoint
        os.replace(measured, better)
        if best not in (None, better):  # a kill before leaves both, of which the last is the best
            shutil.rmtree(best)
