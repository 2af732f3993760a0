"""The stage that says what fine-tuning came to."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.files import read_text, write_text
from clip_moe.engine.markdown import escape
from clip_moe.engine.provenance import ANSWER, OVERVIEW, trainings
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.evaluation.own_task import OwnTask, Wanted
from clip_moe.evaluation.stages.evaluate import EvaluateStage

if TYPE_CHECKING:
    from clip_moe.evaluation.task import Task

# Name of the task on what was to be learned
LEARNED = "learned"
# The same on other pictures, on which the model to use is chosen
CHOSEN = "chosen"
OWN = {LEARNED: ("test", "own pictures"), CHOSEN: ("validation", "own pictures to choose on")}
# What models learned over what they kept
FRONTIER = "frontier.png"


@dataclass(config=STRICT, kw_only=True)
class AnswerStage(EvaluateStage):
    """Compares dense and sparse models fine-tuned from the row `base`: what they learned, what they kept, whether
    experts helped, and which folder to use. The report of an `evaluate` stage follows.

        clip-moe answer runs/answer --split runs/pictures --models.base training/symbol_clip --models.dense \\
            runs/tuned --models.sparse runs/sparse
    """

    kind: ClassVar[str] = "answer"
    held_out: ClassVar[str | None] = LEARNED

    # The data to learn: a `split` stage. Its test is measured, and the model is chosen on its split `validation`.
    split: Annotated[str, Reads("split")]
    # Tasks on what the models should still know, as in an `evaluate` stage.
    tasks: list[Wanted] = Field(default_factory=list)
    # Row to compare the others with.
    baseline: str | None = "base"
    # Points of what the base knows of `tasks` that the model to use may lose.
    keep_at_least: float = Field(default=1.0, ge=0, le=100)

    @model_validator(mode="after")
    def _check_rows(self):
        if "base" not in self.models:
            raise ValueError(f"models needs a row base, but has {', '.join(self.models)}")
        return self

    @property
    def title(self) -> str:
        alone = len(self.models) == 1
        return "What does the base know?" if alone else "Did the model learn your pictures, and did experts help?"

    def usage(self, directory: Path) -> str | None:
        if len(self.models) == 1:
            return super().usage(directory)
        return read_text(directory / "report.md").split("\n\n")[1].replace("**", "")  # the verdict, after the title

    def tasks_of(self, inputs: SimpleNamespace) -> "dict[str, Task]":
        return dataclasses.replace(self, tasks=[*self._own(inputs), *self.tasks]).open_tasks()

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        """Hashes of the held-out pictures, too, which the split only names."""
        from clip_moe.evaluation.own_data import own_fingerprint

        own = {task.name: own_fingerprint(task) for task in self._own(inputs)}
        return super().fingerprints(inputs) | {name: digest for name, digest in own.items() if digest is not None}

    def _own(self, inputs: SimpleNamespace) -> list[OwnTask]:
        """The tasks on held-out pictures: retrieval, or of classes, as they were in training."""
        from datasets import load_from_disk

        parts = load_from_disk(inputs.split)
        by_class = dict(task="zero_shot", templates=["{}"])
        return [
            OwnTask(
                **(by_class if "label" in parts[split].column_names else {"task": "retrieval"}),
                dataset=inputs.split,
                name=name,
                title=title,
                split=split,
            )
            for name, (split, title) in OWN.items()
            if split in parts and (name == LEARNED or len(self.models) > 1)
        ]

    def head(
        self, results: list[dict[str, Any]], inputs: SimpleNamespace, directory: Path, device: Any
    ) -> tuple[str, dict]:
        import torch

        if len(self.models) == 1:
            return super().head(results, inputs, directory, device)

        from clip_moe.conversion.checkpoints import load_clip_config
        from clip_moe.evaluation.answer import answer, draw_frontier
        from clip_moe.evaluation.ensemble import is_mixture, open_model
        from clip_moe.evaluation.examples import examples_table, find_examples
        from modeling_clip_moe.families import sparse_towers

        ends = self.trainings(results, inputs)
        trainings_of_rows = {
            row: {folder.name: ends[folder] for folder in trainings(Path(model))}
            for row, model in inputs.models.items()
        }
        sparse = [
            row for row, model in inputs.models.items() if is_mixture(model) or sparse_towers(load_clip_config(model))
        ]
        limit = self.keep_at_least
        chosen = CHOSEN if CHOSEN in [task.name for task in self._own(inputs)] else None
        answered = answer(results, [LEARNED], inputs.models, sparse, trainings_of_rows, limit, chosen)
        write_text(directory / ANSWER, json.dumps({"verdict": answered.verdict, "use": answered.use}))
        task = self.tasks_of(inputs)[LEARNED]
        source, dtype = inputs.models[answered.use], getattr(torch, self.dtype)
        model = open_model(source, directory / "embeddings", self.batch_size, device, dtype=dtype)
        examples = find_examples(task, model)
        table, pictures = examples_table(examples)
        hits = sum(example.is_hit for example in examples)
        seen = (
            f"Test pictures drawn at random, {hits} that {answered.use} names right and {len(examples) - hits} wrong:"
        )
        sentences = read_text(Path(inputs.split) / OVERVIEW).splitlines()
        parts = (
            f"**{answered.verdict}** {answered.advice}",
            seen,
            table,
            answered.details,
            " ".join(map(escape, sentences)),
        )
        if not self.tasks:
            return "\n\n".join(parts), pictures
        picture = {FRONTIER: lambda path: draw_frontier(answered.gains, sparse, limit, path)}
        shown = (*parts[:3], f"![learned over kept]({FRONTIER})", *parts[3:])
        return "\n\n".join(shown), pictures | picture
