"""The tasks that a stage measures models on, as settings."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from evaluation.benchmarks.specs import BENCHMARKS, expand
from evaluation.own_data import OwnTask
from evaluation.task import Task
from evaluation.tasks import (
    TASKS,
    Wanted,
    benchmark_fingerprints,
    find_tasks,
    loaded_once,
    problems_of_data,
    problems_of_tasks,
)
from training.settings import STRICT


@dataclass(config=STRICT, kw_only=True)
class MeasuredTasks:
    """The tasks of stages that measure."""

    # Names of built-in tasks, benchmarks and groups of benchmarks, which docs/evaluation.md lists; and
    # [tasks on own data](#tasks-on-own-data).
    tasks: list[Wanted] = Field(min_length=1)
    # Folder with copies of benchmarks, each in a folder of its name. What is not there comes from the Hub.
    data_root: str | None = None
    # Seed of the pictures of built-in tasks. None: the recipe's, so that other seeds are measured on other pictures.
    test_seed: int | None = Field(default=None, ge=0)

    def open_tasks(self) -> dict[str, Task]:
        """Name in results -> task, whose rows are loaded once; raises as `find_tasks`."""
        return loaded_once(find_tasks(self.tasks, self.data_root, seed=self.test_seed or 0))

    def kinds(self) -> dict[str, str | None]:
        """Name of a task -> its kind, by which one on own data goes that has no name; None: there is no such task."""
        own = {task.name or task.task: task.task for task in self.tasks if isinstance(task, OwnTask)}
        names = [name for task in self.tasks if isinstance(task, str) for name in expand(task)]
        by_name = {name: task.kind for name, task in (BENCHMARKS | TASKS).items()}
        return {name: by_name.get(name) for name in names} | own

    def problems(self, inputs: Any = None) -> Iterator[tuple[str, str]]:
        """See `Stage.problems`."""
        for problem in (*problems_of_tasks(self.tasks), *problems_of_data(self.tasks, self.data_root)):
            yield "tasks", problem

    def fingerprints(self, inputs: Any = None) -> dict[str, str]:
        """See `Stage.fingerprints`: of own data, and of benchmarks."""
        own = {f"tasks.{number}": task for number, task in enumerate(self.tasks) if isinstance(task, OwnTask)}
        copies = benchmark_fingerprints(self.tasks, self.data_root)
        hashes = {key: task.fingerprint() for key, task in own.items()}
        hashes |= {f"tasks.{name}": fingerprint for name, fingerprint in copies.items()}
        return {key: fingerprint for key, fingerprint in hashes.items() if fingerprint is not None}
