"""The stage that measures models."""

import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.markdown import escape
from clip_moe.engine.outcome import Training
from clip_moe.engine.provenance import trainings
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, Stage
from clip_moe.evaluation.measured_tasks import MeasuredTasks

if typing.TYPE_CHECKING:
    from clip_moe.evaluation.task import Task

# Fields of its configuration that a mixture can be measured with in place of its own
MixtureField = Literal["routing", "routing_temperature", "nearest_center_only", "feature_ensemble"]


@dataclass(config=STRICT, kw_only=True)
class EvaluateStage(MeasuredTasks, Stage):
    """Models side by side on evaluation tasks, with a report.

    Embeddings are computed once for every model and dataset. Several processes share the work.

        clip-moe evaluate scores --models.bundled training/symbol_clip --tasks symbols_pairs
        clip-moe evaluate scores --models.mine FOLDER --tasks clip_moe_table_5 --data_root DATA
        clip-moe evaluate scores --models.mine FOLDER --tasks "{task: retrieval, dataset: my/photos, split: test}"
        accelerate launch -m clip_moe evaluate scores --models.mine FOLDER --tasks imagenet1k
    """

    kind: ClassVar[str] = "evaluate"
    incidental: ClassVar[tuple[str, ...]] = ("num_workers",)
    # Title of the report
    title: ClassVar[str] = "Evaluation"
    # Name of the task whose pairs were held out of training; None: there is none
    held_out: ClassVar[str | None] = None

    # Row title -> an earlier stage, a folder or a hub name.
    models: dict[str, Model] = Field(min_length=1)
    # Row title -> fields of its mixture's configuration to measure it with, such as {routing: released}; see
    # docs/evaluation.md. So one mixture can have several rows.
    changes: dict[str, dict[MixtureField, str | float | bool]] = Field(default_factory=dict)
    # Batch size for images and texts.
    batch_size: int = Field(default=64, gt=0)
    # Precision of the computation.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Processes that read images. None: none for fewer than 500, else up to 8.
    num_workers: int | None = Field(default=None, ge=0)
    # Row to compare the others with.
    baseline: str | None = None

    @model_validator(mode="after")
    def _check(self):
        rows = {f"changes.{title}": title for title in self.changes} | {"baseline": self.baseline}
        for setting, title in rows.items():
            if title is not None and title not in self.models:
                raise ValueError(f"{setting}: {title!r} is not one of the models {sorted(self.models)}")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import torch
        from accelerate import PartialState

        from clip_moe.evaluation.ensemble import is_mixture
        from clip_moe.evaluation.evaluate import evaluate_model
        from clip_moe.evaluation.report import chance_sentences, write_report

        accelerator, results = context.accelerator, []
        for model in inputs.models.values():
            is_mixture(model)  # raises before any data are read
        tasks = self.tasks_of(inputs)
        for title, model in inputs.models.items():
            results += evaluate_model(
                model,
                tasks,
                directory,
                name=title,
                batch_size=self.batch_size,
                device=accelerator.device,
                dtype=getattr(torch, self.dtype),
                changes=self.changes.get(title),
                num_workers=self.num_workers,
                state=PartialState() if accelerator.num_processes > 1 else None,
            )
        if not accelerator.is_main_process:
            return
        losses = [f"- `{folder.name}`: {training}" for folder, training in self.trainings(results, inputs).items()]
        head, pictures = self.head(results, inputs, directory, accelerator.device)
        head = "\n\n".join(filter(None, [head, *chance_sentences(results), "\n".join(losses)]))
        print(write_report(results, directory, self.baseline, head, self.title, pictures))

    def tasks_of(self, inputs: SimpleNamespace) -> "dict[str, Task]":
        """Name in results -> task."""
        return self.open_tasks()

    def trainings(self, results: "list[dict[str, typing.Any]]", inputs: SimpleNamespace) -> dict[Path, Training]:
        """Folder of a stage -> its training, for all that trained the models; with the loss of held-out pairs."""
        ends = {folder: end for model in inputs.models.values() for folder, end in trainings(Path(model)).items()}
        for result in results:
            folder = Path(inputs.models[result["model"]])
            if result["task"] == self.held_out and "batch_loss" in result and folder in ends:
                ends[folder] = ends[folder].with_test(**result["batch_loss"])
        return ends

    def head(
        self, results: "list[dict[str, typing.Any]]", inputs: SimpleNamespace, directory: Path, device: typing.Any
    ) -> "tuple[str, Mapping[str, Callable[[Path], None]]]":
        """Markdown above the report's table, and its pictures: name -> what draws it.

        Args:
            directory: where embeddings are kept.
        """
        from clip_moe.data.overview import recalls

        best: dict[str, dict[str, float]] = {}
        for result in results:
            model_ceilings = (result.get("texts") or {}).get("best", {})  # a linear probe has no texts
            ceilings = best.setdefault(result["title"], dict(model_ceilings))
            # Each model has its tokenizer
            ceilings |= {way: max(share, ceilings[way]) for way, share in model_ceilings.items()}
        sentences = [
            f"The captions of {escape(title)} allow no model more than R@1 {recalls(ceilings)}."
            for title, ceilings in best.items()
            if min(ceilings.values(), default=1) < 1
        ]
        return "\n\n".join(sentences), {}
