"""What models are measured on: a table of tasks, and tasks made of any dataset's columns."""

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from datasets import ClassLabel, Dataset, Value
from pydantic import ValidationError

from conversion.messages import what_is_meant
from data.pairs import load_pairs, readable_pairs, select_columns, with_image_root
from data.sources import DataArguments, open_rows
from data.worlds import WORLDS
from evaluation.built_in_tasks import glyph_tasks, symbol_tasks
from evaluation.results import content_hash
from evaluation.task import Task

# Settings that decide how rows are read, not which
READING_SETTINGS = ("streaming", "in_memory", "num_workers", "max_unreadable")


def loaded_once(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The same tasks. Their rows are loaded once for all models that are measured on them, and kept as long as these
    tasks are."""
    return {
        name: dataclasses.replace(task, load=cache(task.load), load_train=task.load_train and cache(task.load_train))
        for name, task in tasks.items()
    }


TASKS = glyph_tasks() | symbol_tasks()
# Those on a dataset that is given by its columns
OWN_TASKS = ("retrieval", "zero_shot", "linear_probe")


def parse_tasks(text: str) -> list[str]:
    """The names of a command line, between commas."""
    return [name.strip() for name in text.split(",")]


def problems_of_tasks(names: Sequence[str], known: Iterable[str] = TASKS) -> list[str]:
    """A line for each name that is unknown, with a known name like it, and for each that occurs twice."""
    known, problems = list(known), []
    for name in dict.fromkeys(names):
        if name not in known:
            problems.append(f"unknown task {name or repr(name)}: {what_is_meant(name, known)}")
        if names.count(name) > 1:
            problems.append(f"the task {name or repr(name)} occurs twice")
    return problems


def require_tasks(names: Sequence[str], known: Iterable[str] = TASKS) -> None:
    """Raises a ValueError of all `problems_of_tasks`."""
    problems = problems_of_tasks(names, known)
    if problems:
        raise ValueError("; ".join(problems))


def find_tasks(names: Sequence[str]) -> dict[str, Task]:
    """The built-in tasks of these names. Raises as `require_tasks`."""
    require_tasks(names)
    return {name: TASKS[name] for name in names}


def retrieval_task(arguments: DataArguments) -> Task:
    """Retrieval on any dataset with an image and a caption column; the caption may be a list.

    Raises:
        ValueError: images and captions are one column.
    """

    def load():
        if arguments.source in WORLDS:
            return load_pairs(arguments), 0
        return _readable(open_rows(arguments), arguments)

    data = _data(arguments)
    return Task("retrieval", f"retrieval, {_short_name(arguments)}", _protocol(data), load, data=data)


def zero_shot_task(arguments: DataArguments, templates: Sequence[str], classes: Sequence[str] | None = None) -> Task:
    """Zero-shot classification on any dataset with an image and a label column (`caption_column`).

    Args:
        classes: names of the classes, those of the column if it declares some or holds texts, else in the order of its
            integers; None: those that the column declares, or its different texts.

    Raises:
        ValueError: the labels are integers without names, or some have none among `classes`; a label that is neither an
            integer nor a text; a class without a name, or two of one name; a template without its one {}; images and
            labels are one column.
    """
    bad = [template for template in templates if not _is_template(template)]
    if bad or not templates:
        raise ValueError(f"templates need one {{}} for the class's name, got {bad or 'none'}")
    rows, column = open_rows(arguments), arguments.caption_column
    if column not in rows.column_names:
        raise ValueError(f"{arguments.source} has no column {column}; its columns are {', '.join(rows.column_names)}")
    feature, labels = rows.features[column], list(rows[column])
    for row, label in enumerate(labels):
        if not isinstance(label, int | str):
            raise ValueError(f"labels are integers or texts, but row {row} of column {column} has {label!r}")
    classes = _class_names(labels, feature, column) if classes is None else classes
    _require_different_names(classes)
    labels = _named_labels(labels, feature, column, classes)
    rows = rows.remove_columns(column).add_column(column, labels, feature=Value("string"))

    data = _data(arguments, classes=content_hash(classes), templates=list(templates))
    shown = ", ".join(map(repr, templates[:3])) + (", ..." if len(templates) > 3 else "")
    return Task(
        kind="zero_shot",
        title=f"zero-shot, {_short_name(arguments)}",
        protocol=f"{_protocol(data)}; {len(classes)} classes, {len(templates)} templates: {shown}",
        load=lambda: _readable(rows, arguments),
        classes=classes,
        templates=templates,
        data=data,
    )


def _class_names(labels: list[int | str], feature: Any, column: str) -> list[str]:
    """The classes that a column declares, or its different texts."""
    if isinstance(feature, ClassLabel):
        return feature.names
    if not all(isinstance(label, str) for label in labels):
        raise ValueError(f"column {column} holds no names: give them with --classes")
    return sorted(set(labels))


def _require_different_names(classes: Sequence[str]) -> None:
    nameless = [number for number, name in enumerate(classes) if not name.strip()]
    if nameless:
        raise ValueError(f"class {nameless[0]} has no name; the classes are {', '.join(map(repr, classes[:5]))}, ...")
    repeated = sorted(name for name, count in Counter(classes).items() if count > 1)
    if repeated:
        raise ValueError(f"classes need different names, but these occur twice: {', '.join(repeated[:5])}")


def _named_labels(labels: list[int | str], feature: Any, column: str, classes: Sequence[str]) -> list[str]:
    """The labels of a column as names of classes."""
    if all(isinstance(label, int) for label in labels):
        # Numbers stand for the column's own names, if it has some: of folders, those that this split happens to have
        names = feature.names if isinstance(feature, ClassLabel) else classes
        if labels and not 0 <= min(labels) <= max(labels) < len(names):
            raise ValueError(f"labels go from {min(labels)} to {max(labels)}, but there are {len(names)} classes")
        labels = [names[label] for label in labels]
    unknown = sorted(set(labels) - set(classes))
    if unknown:
        raise ValueError(
            f"column {column} has labels that are no class: {', '.join(unknown[:5])}; the classes need the column's "
            f"own names, and are {', '.join(classes[:5])}{', ...' if len(classes) > 5 else ''}"
        )
    return labels


def linear_probe_task(arguments: DataArguments, train_split: str, classes: Sequence[str] | None = None) -> Task:
    """A linear probe on any dataset with an image and a label column; its labels and errors as `zero_shot_task`'s.

    Args:
        train_split: what the probe is fitted to; as many samples as `arguments` asks for.
        classes: as there; None: those of either split.
    """
    test = zero_shot_task(arguments, ["{}"], classes)
    train = zero_shot_task(dataclasses.replace(arguments, split=train_split), ["{}"], classes)
    classes = list(dict.fromkeys([*test.classes, *train.classes]))
    data = _data(arguments, classes=content_hash(classes), train_split=train_split)
    return Task(
        kind="linear_probe",
        title=f"linear probe, {_short_name(arguments)}",
        protocol=f"{_protocol(data)}; {len(classes)} classes, fitted to the split {train_split}",
        load=test.load,
        load_train=train.load,
        classes=classes,
        data=data,
    )


def add_own_data_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command that `own_tasks` reads."""
    columns = parser.add_argument_group(f"any dataset: the tasks {', '.join(OWN_TASKS)}")
    columns.add_argument("--dataset", help="whatever a recipe's data.source may be")
    columns.add_argument("--split", default="test")
    columns.add_argument("--train-split", default="train", help="for linear_probe")
    columns.add_argument("--num-samples", type=int)
    columns.add_argument("--image-column", default="image")
    columns.add_argument("--image-root")
    columns.add_argument("--caption-column", default="caption", help="texts or lists of texts, for retrieval")
    columns.add_argument(
        "--captions-per-line", action="store_true", help="each line of a text is a caption, as CLIP_benchmark's shards"
    )
    columns.add_argument("--label-column", default="label", help="for zero_shot and linear_probe")
    columns.add_argument(
        "--classes", type=Path, help="file with a class's name on each line, for zero_shot and linear_probe"
    )
    columns.add_argument("--templates", nargs="+", default=["a photo of a {}."], help="for zero_shot")


def own_tasks(names: Sequence[str], options: argparse.Namespace) -> dict[str, Task]:
    """The tasks among these names that are measured on the dataset which the options give.

    Raises:
        ValueError: a task has no dataset, or see `retrieval_task`, `zero_shot_task` and `linear_probe_task`.
        OSError: the file of classes cannot be read.
    """
    tasks = {}
    for name in (name for name in OWN_TASKS if name in names):
        if not options.dataset:
            raise ValueError(f"the task {name} needs --dataset")
        arguments = _data_arguments(name, options)
        classes = read_classes(options.classes) if options.classes and name != "retrieval" else None
        if name == "retrieval":
            tasks[name] = retrieval_task(arguments)
        elif name == "zero_shot":
            tasks[name] = zero_shot_task(arguments, options.templates, classes)
        else:
            tasks[name] = linear_probe_task(arguments, options.train_split, classes)
    return tasks


def _data_arguments(name: str, options: argparse.Namespace) -> DataArguments:
    has_captions = name == "retrieval"
    try:
        return DataArguments(
            source=options.dataset,
            split=options.split,
            num_samples=options.num_samples,
            image_column=options.image_column,
            image_root=options.image_root,
            caption_column=options.caption_column if has_captions else options.label_column,
            captions_per_line=options.captions_per_line and has_captions,
        )
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())
        raise ValueError(f"--dataset {options.dataset}: {'; '.join(problems)}") from None


def read_classes(path: Path) -> list[str]:
    """The names of a file, one a line.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is blank, or it is no text.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    names = [line.strip() for line in lines]
    if "" in names:
        raise ValueError(f"{path} has no class in line {names.index('') + 1}: every line needs a name")
    return names


def _readable(rows: Dataset, arguments: DataArguments) -> tuple[Dataset, int]:
    """The readable rows as columns `image` and `caption`, with whole paths, and how many others there were."""
    rows, skipped = readable_pairs(select_columns(rows, arguments), arguments)
    return with_image_root(rows, arguments), skipped


def _is_template(text: str) -> bool:
    """Whether a class's name takes the place of one {}, and nothing else is one."""
    try:
        fields = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
    except ValueError:
        return False
    return fields == [("", "", None)]


def _data(arguments: DataArguments, **more: Any) -> dict[str, Any]:
    chosen = {key: value for key, value in dataclasses.asdict(arguments).items() if key not in READING_SETTINGS}
    if arguments.source not in WORLDS:
        for key in ("captions", "kinds", "seed"):
            del chosen[key]
    return chosen | more


def _short_name(arguments: DataArguments) -> str:
    """A hub name, or the last two parts of a path."""
    return "/".join(Path(arguments.source).parts[-2:])


def _protocol(data: dict[str, Any]) -> str:
    samples = "all" if data["num_samples"] is None else f"the first {data['num_samples']}"
    text = f"{samples} rows of {data['source']}, split {data['split']}, columns {data['image_column']} and "
    text += data["caption_column"]
    text += ", one caption a line" if data["captions_per_line"] else ""
    if data["image_root"] is not None:
        text += f", images below {data['image_root']}"
    if "seed" in data:
        text += f", {data['captions']} captions of {data['kinds']} kinds, seed {data['seed']}"
    return text
