"""Tasks by name: built-in tasks, benchmarks, and tasks made of any dataset's columns."""

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Discriminator, Tag, ValidationError

from data.annotations import TABLES
from data.sources import BUILDERS, is_here, opened_once
from data.worlds import WORLDS
from evaluation.benchmarks.loading import NotDownloaded, benchmark_task
from evaluation.benchmarks.specs import ALIASES, BENCHMARKS, GROUPS, expand
from evaluation.built_in_tasks import icon_tasks, name_tasks, symbol_tasks
from evaluation.own_data import OwnKind, OwnTask
from evaluation.results import task_name
from evaluation.task import Task
from records.digests import contents_unread, short_digest
from records.local_names import is_hub_name, similar_path
from records.messages import in_one_line, most_similar

TASKS = icon_tasks() | name_tasks() | symbol_tasks()
# Tasks on a dataset that is given by its columns
OWN_TASKS: tuple[str, ...] = get_args(OwnKind)
MORE = "and the benchmarks and groups that `python -m evaluation.benchmarks` prints"
# What a list of tasks may hold: names, and tasks on own data
Wanted = Annotated[
    Annotated[str, Tag("name")] | Annotated[OwnTask, Tag("own")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "own"),
]


def loaded_once(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The same tasks. Their rows are loaded once for all models that are measured on them, and kept as long as these
    tasks are."""
    return {
        name: dataclasses.replace(task, load=cache(task.load), load_train=task.load_train and cache(task.load_train))
        for name, task in tasks.items()
    }


def parse_tasks(text: str) -> list[str]:
    """The names of a command line, between commas or spaces."""
    return re.split(r"\s*,\s*|\s+", text.strip())


def problems_of_tasks(wanted: Sequence[Wanted], own: Iterable[str] = ()) -> list[str]:
    """A line for each name that is unknown, with a known name like it, and for each that two tasks have.

    Args:
        own: kinds of tasks on own data that may occur as names, too.
    """
    own, problems = list(own), []
    available = [*TASKS, *own, *GROUPS, *BENCHMARKS, *ALIASES]
    for name in dict.fromkeys(name for name in wanted if isinstance(name, str)):
        if name in OWN_TASKS and name not in own:
            problems.append(f"the task {name} needs data: in a recipe, {{task: {name}, dataset: FOLDER OR HUB NAME}}")
        elif name not in available:
            similar = most_similar(name, available)
            meant = (
                f"did you mean {similar!r}?" if similar else f"known are {', '.join(sorted([*TASKS, *own]))}, {MORE}"
            )
            problems.append(f"unknown task {name or repr(name)}: {meant}")
    names = Counter(task.name for task in wanted if isinstance(task, OwnTask) and task.name)
    repeated_names = [name for name, times in names.items() if times > 1 or name in available]
    return problems + [f"two tasks are called {name}: give each a name of its own" for name in repeated_names]


def require_tasks(wanted: Sequence[Wanted], own: Iterable[str] = ()) -> None:
    """Raises a ValueError of all `problems_of_tasks`."""
    problems = problems_of_tasks(wanted, own)
    if problems:
        raise ValueError("; ".join(problems))


def with_seed(task: Task, seed: int) -> Task:
    """A built-in task on other pictures of its world for another seed, which is at least 0."""
    if not seed:
        return task
    load, load_train = partial(task.load, seed), task.load_train and partial(task.load_train, seed)
    return dataclasses.replace(task, load=load, load_train=load_train, data={"seed": seed})


@opened_once()
def find_tasks(
    wanted: Sequence[Wanted],
    data_root: str | Path | None = None,
    num_workers: int | None = None,
    seed: int = 0,
) -> dict[str, Task]:
    """Name in results -> task, of built-in tasks, benchmarks, groups of these, and tasks on own data.

    Args:
        data_root, num_workers: see `evaluation.benchmarks.loading.benchmark_task`.
        seed: of the pictures of built-in tasks.
    """
    require_tasks(wanted)
    tasks: dict[str, Task] = {}
    for entry in wanted:
        if isinstance(entry, OwnTask):
            task = entry.make()
            tasks[entry.name or task_name(entry.task, task.data)] = task
            continue
        for name in expand(entry):  # groups may share benchmarks
            if name not in tasks:
                if name in TASKS:
                    tasks[name] = with_seed(TASKS[name], seed)
                else:
                    tasks[name] = benchmark_task(BENCHMARKS[name], data_root, num_workers=num_workers)
    return tasks


@opened_once()
def benchmark_fingerprints(wanted: Sequence[Wanted], data_root: str | Path | None = None) -> dict[str, str]:
    """Name -> the digest of its data, names of classes and templates, for benchmarks that can be had."""
    fingerprints = {}
    for name in (name for entry in wanted if isinstance(entry, str) for name in expand(entry)):
        if name in BENCHMARKS:
            with contextlib.suppress(ValueError, OSError):
                fingerprints[name] = short_digest(benchmark_task(BENCHMARKS[name], data_root).data)
    return fingerprints


@contents_unread()
def problems_of_data(wanted: Sequence[Wanted], data_root: str | Path | None = None) -> list[str]:
    """Faults of the data of tasks whose names are known. The Hub is not asked, and no image is read."""
    problems = []
    for entry in wanted:
        names = [entry] if isinstance(entry, OwnTask) else expand(entry)
        for name in names:
            try:
                if isinstance(name, OwnTask):
                    if missing := missing_data(name.dataset):
                        problems.append(f"{name.name or name.task}: {missing}")
                    elif name.dataset in WORLDS or is_here(name.dataset):
                        name.require_columns()
                        name.make()
                elif name in icon_tasks():
                    WORLDS["icons"].kind_set("all")  # raises where their extra is not installed
                elif name in BENCHMARKS:
                    benchmark_task(BENCHMARKS[name], data_root, ask_hub=False)
            except NotDownloaded:
                pass
            except (ValueError, OSError) as error:
                problems.append(str(error))
    return list(dict.fromkeys(problems))


def missing_data(source: str) -> str:
    """That a source of data is not there, if it is neither here nor anything that the Hub may have: a name that is like
    another one in a folder here is a slip."""
    if source in WORLDS or is_here(source):
        return ""
    if meant := similar_path(source):
        return f"there is no file or folder {source}: did you mean {meant}?"
    is_file = Path(source).suffix in (*BUILDERS, *TABLES, ".json")
    return f"there is no file or folder {source}" if is_file or not is_hub_name(source) else ""


def wanted_tasks(names: Sequence[str], own: Mapping[str, Any]) -> list[Wanted]:
    """The names, with settings in place of the names of tasks on own data.

    Args:
        own: fields of `OwnTask`, but for its task.
    """
    require_tasks(names, OWN_TASKS)
    kinds = [name for name in names if name in OWN_TASKS]
    if kinds and not own["dataset"]:
        raise ValueError(f"the task {kinds[0]} needs --dataset")
    name_of = {kind: own["name"] and (own["name"] if len(kinds) == 1 else f"{own['name']}_{kind}") for kind in kinds}
    try:
        return [OwnTask(**own | {"task": name, "name": name_of[name]}) if name in kinds else name for name in names]
    except ValidationError as error:
        raise ValueError(f"--dataset {own['dataset']}: {in_one_line(error.errors())}") from None
