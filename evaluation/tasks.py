"""Tasks by name: built-in tasks, benchmarks, and tasks made of any dataset's columns."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from datasets import Dataset

from clip_moe.data.worlds import MOVED, is_world, origin_of
from clip_moe.engine.digests import short_digest
from clip_moe.engine.messages import most_similar
from clip_moe.evaluation.benchmarks.loading import benchmark_task
from clip_moe.evaluation.benchmarks.specs import ALIASES, BENCHMARKS, GROUPS, expand
from clip_moe.evaluation.built_in_tasks import icon_tasks, name_tasks, symbol_tasks, world_task
from clip_moe.evaluation.own_data import make_task, own_fingerprint
from clip_moe.evaluation.own_task import OwnKind, OwnTask, Wanted
from clip_moe.evaluation.results import task_name
from clip_moe.evaluation.task import Task

TASKS = icon_tasks() | name_tasks() | symbol_tasks()
# Tasks on a dataset that is given by its columns
OWN_TASKS: tuple[str, ...] = get_args(OwnKind)
MORE = "and the benchmarks and groups that `python -m clip_moe.evaluation.benchmarks` prints"


def loaded_once(tasks: Mapping[str, Task], max_rows: int | None = None) -> dict[str, Task]:
    """The same tasks. Their rows are loaded once for all models that are measured on them, and kept as long as these
    tasks are.

    Args:
        max_rows: number of rows of each task, from the first, which its result says; None: all.
    """

    def once(load: Callable[[], tuple[Dataset, int]]) -> Callable[[], tuple[Dataset, int]]:
        @cache
        def loaded() -> tuple[Dataset, int]:
            rows, num_skipped = load()
            return rows if max_rows is None else rows.select(range(min(max_rows, len(rows)))), num_skipped

        return loaded

    loaded = {}
    for name, task in tasks.items():
        changes: dict[str, Any] = {"load": once(task.load), "load_train": task.load_train and once(task.load_train)}
        if max_rows is not None:
            changes["title"] = f"{task.title}, first {max_rows} rows"
            protocol = task.protocol.removeprefix("all rows of ")
            changes["protocol"] = f"at most the first {max_rows} rows of {protocol}"
            changes["data"] = task.data | {"max_rows": max_rows}
        loaded[name] = dataclasses.replace(task, **changes)
    return loaded


def require_tasks(wanted: Sequence[Wanted]) -> None:
    """Raises a ValueError of each name that is unknown, with a known name like it, and of each that two tasks have."""
    available = [*TASKS, *GROUPS, *BENCHMARKS, *ALIASES]
    names = dict.fromkeys(name for name in wanted if isinstance(name, str))
    problems = [problem for name in names if name not in available and (problem := _problem(name, available))]
    own_names = Counter(task.name for task in wanted if isinstance(task, OwnTask) and task.name)
    repeated_names = [name for name, times in own_names.items() if times > 1 or name in available]
    problems += [f"two tasks are called {name}: give each a name of its own" for name in repeated_names]
    if problems:
        raise ValueError("; ".join(problems))


def _problem(name: str, available: Sequence[str]) -> str | None:
    """Why a name is no task; None: it is one on a world, `package.module:OBJECT KINDS`."""
    if name in OWN_TASKS:
        return f"the task {name} needs data: {{task: {name}, dataset: FOLDER OR HUB NAME}}"
    world_name, _, kinds = name.partition("_")
    if world_name in MOVED:
        return f"the task {name} is now {MOVED[world_name]} {kinds}, in a checkout"
    if ":" not in name:
        similar = most_similar(name, available)
        meant = f"did you mean {similar!r}?" if similar else f"known are {', '.join(sorted(TASKS))}, {MORE}"
        return f"unknown task {name or repr(name)}: {meant}"
    if not is_world(_source_of(name)):
        return f"unknown task {name!r}: a world's is package.module:OBJECT KINDS"
    try:
        world_task(name)
    except ValueError as error:
        return f"the task {name!r}: {error}"
    return None


def _source_of(name: str) -> str:
    """The world of a task, `symbols` of `symbols_pairs`, or of one spelled `package.module:OBJECT KINDS`."""
    return name.partition(" ")[0] if ":" in name else name.split("_")[0]


def _installed(name: str) -> dict[str, dict[str, str]]:
    """The origin of a task's pictures, if it is on a world that comes from other packages or modules."""
    origin = origin_of(_source_of(name)) if is_world(_source_of(name)) else {}
    return {"installed": origin} if origin else {}


def find_tasks(
    wanted: Sequence[Wanted],
    data_root: str | Path | None = None,
    seed: int = 0,
    max_rows: int | None = None,
) -> dict[str, Task]:
    """Name in results -> task, of built-in tasks, benchmarks, groups of these, and tasks on own data.

    Args:
        data_root: see `clip_moe.evaluation.benchmarks.loading.benchmark_task`.
        seed: draws the pictures of built-in tasks.
        max_rows: draw no more pictures than `loaded_once` keeps of a task.
    """
    require_tasks(wanted)
    built_in = TASKS if max_rows is None else TASKS | symbol_tasks(max_rows, max_rows, max_rows, max_rows)
    tasks: dict[str, Task] = {}
    for entry in wanted:
        if isinstance(entry, OwnTask):
            task = make_task(entry)
            tasks[entry.name or task_name(entry.task, task.data)] = task
            continue
        for name in expand(entry):  # groups may share benchmarks
            if name not in tasks:
                if name in TASKS or is_world(_source_of(name)):
                    key, task = (name, built_in[name]) if name in TASKS else world_task(name)
                    changes: dict[str, Any] = {"data": _installed(name) | ({"seed": seed} if seed else {})}
                    if seed:  # other pictures of the world
                        changes["load"] = partial(task.load, seed)
                        changes["load_train"] = task.load_train and partial(task.load_train, seed)
                    tasks[key] = dataclasses.replace(task, **changes)
                else:
                    tasks[name] = benchmark_task(BENCHMARKS[name], data_root)
    return tasks


def task_fingerprints(wanted: Sequence[Wanted], data_root: str | Path | None = None) -> dict[str, str]:
    """`tasks.` and the position or name of a task -> the digest of its data, names of classes and templates, of own
    data, of built-in tasks whose world comes from other packages, and of benchmarks that can be had."""
    fingerprints: dict[str, str | None] = {}
    for number, entry in enumerate(wanted):
        if isinstance(entry, OwnTask):
            fingerprints[f"tasks.{number}"] = own_fingerprint(entry)
            continue
        for name in expand(entry):
            if name in BENCHMARKS:
                with contextlib.suppress(ValueError, OSError):
                    fingerprints[f"tasks.{name}"] = short_digest(benchmark_task(BENCHMARKS[name], data_root).data)
            elif installed := _installed(name):
                fingerprints[f"tasks.{name}"] = short_digest(installed)
    return {key: fingerprint for key, fingerprint in fingerprints.items() if fingerprint is not None}
