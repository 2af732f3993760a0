"""Settings of stages that measure. Importing them imports nothing heavy."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.data.local_data import missing_data
from clip_moe.engine.local_names import output_inside
from clip_moe.engine.settings import STRICT, Settings
from clip_moe.evaluation.own_task import OwnTask, Wanted

if TYPE_CHECKING:
    from clip_moe.evaluation.task import Task

# Rows of each task in a rehearsal
REHEARSED_ROWS = 64


@dataclass(config=STRICT, kw_only=True)
class MeasuredTasks(Settings):
    """The tasks of stages that measure."""

    # Built-in tasks, benchmarks and groups of docs/evaluation.md, and [tasks on own data](#tasks-on-own-data).
    tasks: list[Wanted] = Field(min_length=1)
    # Folder with a folder per benchmark; others come from the Hub.
    data_root: str | None = None
    # Seed of the pictures of built-in tasks; None: the recipe's.
    test_seed: int | None = Field(default=None, ge=0)
    # Use the first `max_rows` rows of each task; None: all.
    max_rows: int | None = Field(default=None, gt=0)

    def take_seed(self, seed: int) -> None:
        if self.test_seed is None:
            self.test_seed = seed

    def rehearsed(self, num_samples: int) -> Self:
        """On few rows of each task."""
        return replace(super().rehearsed(num_samples), max_rows=REHEARSED_ROWS)

    def faults(self, output_dir: Path) -> Iterator[tuple[str, str | None]]:
        from clip_moe.evaluation.tasks import require_tasks  # imports `datasets`, for a recipe that measures alone

        for number, task in enumerate(self.tasks):
            if isinstance(task, OwnTask):
                yield f"tasks.{number}.dataset", missing_data(task.dataset) or output_inside(output_dir, task.dataset)
        try:
            require_tasks(self.tasks)
        except ValueError as error:
            yield "tasks", str(error)

    def open_tasks(self) -> dict[str, "Task"]:
        """Name in results -> task, whose rows are loaded once; raises as `clip_moe.evaluation.tasks.find_tasks`."""
        from clip_moe.evaluation.tasks import find_tasks, loaded_once

        seed, most = self.test_seed or 0, self.max_rows
        return loaded_once(find_tasks(self.tasks, self.data_root, seed=seed, max_rows=most), most)

    def fingerprints(self, inputs: Any = None) -> dict[str, str]:
        """Hashes of own data, and of benchmarks."""
        from clip_moe.evaluation.tasks import task_fingerprints

        return task_fingerprints(self.tasks, self.data_root)
