"""Stages that measure models."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from transformers import PreTrainedConfig

from evaluation.ensemble import require_changes
from evaluation.evaluate import evaluate_model
from evaluation.results import write_result
from training.context import Context
from training.estimates import AtMost, Expected, bytes_at_a_time, bytes_in_memory
from training.measured_tasks import MeasuredTasks
from training.settings import STRICT
from training.stages.base import Model, Stage, models_of


@dataclass(config=STRICT, kw_only=True)
class EvaluateStage(MeasuredTasks, Stage):
    """Models side by side on evaluation tasks, with a report."""

    kind: ClassVar[str] = "evaluate"
    main_process_only: ClassVar[bool] = True

    # Row title -> an earlier stage, a folder or a hub name.
    models: dict[str, Model] = Field(min_length=1)
    # Row title -> what its mixture is measured with in place of its own configuration, as {routing: released}; see
    # docs/evaluation.md. So one mixture can stand in several rows.
    changes: dict[str, dict[str, str | float | bool]] = Field(default_factory=dict)
    # Images or texts that are embedded at a time.
    batch_size: int = Field(default=64, gt=0)
    # The row that the others are compared with.
    baseline: str | None = None
    # Row title -> rows: for each task it shows the best score of these rows. It is a bound, no method: only who knows
    # the answers can choose the best row.
    oracles: dict[str, list[str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self):
        for title, rows in self.oracles.items():
            unknown = sorted(set(rows) - set(self.models))
            if unknown or not rows or title in self.models:
                raise ValueError(f"oracles.{title} needs rows of the models, and a title of its own, not {unknown}")
        for title, changes in self.changes.items():
            if title not in self.models:
                raise ValueError(f"changes.{title} is none of the models {sorted(self.models)}")
            require_changes(changes)
        return self

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        yield from super().problems(inputs)
        yield from ((f"models.{title}", model.no_clip) for title, model in inputs.models.items())

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """The largest model, or expert of a mixture, and a batch: one after the other."""

        def memory() -> int:
            return max(_bytes_of_measured(model, self.batch_size) for model in models_of(self, inputs))

        return super().cost(inputs) | {"memory": memory}

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from evaluation.report import best_of, write_report

        results, tasks = [], self.open_tasks()
        for title, model in inputs.models.items():
            options = {"batch_size": self.batch_size, "changes": self.changes.get(title)}
            results += evaluate_model(model, tasks, directory, name=title, **options)
        oracles = [result for title, rows in self.oracles.items() for result in best_of(results, title, rows)]
        for result in oracles:
            write_result(result, directory)
        results += oracles
        print(write_report(results, directory, baseline=self.baseline))


@dataclass(config=STRICT, kw_only=True)
class AnalyzeStage(MeasuredTasks, Stage):
    """What each expert of a sparse model knows and which tokens it gets: `evaluation.experts`."""

    kind: ClassVar[str] = "analyze"
    main_process_only: ClassVar[bool] = True

    # An earlier stage, a folder or a hub name: a sparse model.
    model: Model
    # Numbers of experts a token to try, beside the model's own.
    num_experts_per_tok: list[int] = Field(default_factory=list)
    # `text` or `vision`: the sparse layer whose words or patches are drawn; the last one where a tower is left out.
    layers: dict[Literal["text", "vision"], int] = Field(default_factory=dict)
    # The expert that has a picture of its own, of the patches and captions that it takes.
    expert: int | None = Field(default=None, ge=0)
    # With which capacities dropped patches are drawn; none: the model's in training and twice that.
    capacity_factors: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=list)
    # Images or texts that are computed at a time.
    batch_size: int = Field(default=64, gt=0)

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        from evaluation.experts import faults

        yield from super().problems(inputs)
        chosen = (self.num_experts_per_tok, self.layers, self.expert, self.capacity_factors)
        yield from faults(inputs.model.clip, self.kinds().values(), *chosen)

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        return super().cost(inputs) | {"memory": lambda: _bytes_of_measured(inputs.model, self.batch_size)}

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from evaluation.experts import analyze_experts

        names = ("num_experts_per_tok", "layers", "expert", "capacity_factors", "batch_size")
        options = {name: getattr(self, name) for name in names}
        print(analyze_experts(inputs.model, self.open_tasks(), directory, **options))


def _bytes_of_measured(model: Expected, batch_size: int) -> int:
    """Bytes of a model, or of the largest expert of a mixture, and of a batch of images, or of texts that are as long
    as they can be."""

    def of_one(config: PreTrainedConfig) -> int:
        longest, one = AtMost(config.text_config.max_position_embeddings), replace(model, configs=(config,))
        return AtMost(bytes_in_memory(one.configs) + bytes_at_a_time(one, longest, batch_size))

    return max(map(of_one, model.known_configs))
