"""Tasks of benchmarks: where their data lie, and where their class names and templates come from."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from datasets import Dataset
from huggingface_hub import snapshot_download

from clip_moe.data.arguments import DataArguments
from clip_moe.data.readable import readable_pairs
from clip_moe.engine.digests import short_digest
from clip_moe.engine.hub import hub_options
from clip_moe.engine.messages import shortened
from clip_moe.evaluation.benchmarks.layouts import CLASSES, TEMPLATES, Layout
from clip_moe.evaluation.benchmarks.specs import Benchmark
from clip_moe.evaluation.class_names import SYNSET, are_ids, names_after_ids
from clip_moe.evaluation.own_data import read_classes, read_templates, readable_image_pairs
from clip_moe.evaluation.task import Task


def benchmark_task(benchmark: Benchmark, data_root: str | Path | None = None, num_workers: int | None = None) -> Task:
    """The task of a benchmark. Class names, templates and stamps of copies are read now, images when they are needed.

    Args:
        data_root: folder of local copies: `data_root/NAME`, also under other names that the benchmark has; or the copy
            itself, if it is called so. What is not there is taken from the Hub.
        num_workers: processes that look whether all images can be read; None: this one.
    """
    local, layout = _find(benchmark, data_root)
    folder = local or _from_hub(benchmark, ["*.txt"])
    with layout.reading(folder, benchmark.split):
        classes, templates, protocol = [], [], benchmark.protocol
        if benchmark.kind in ("zero_shot", "linear_probe"):
            classes = _class_names(benchmark, folder, layout)
            if len(classes) < 2:
                raise ValueError(f"{folder} needs two classes or more, but has {classes} alone")
            protocol += f"; {len(classes)} classes"
        if benchmark.kind == "zero_shot":
            templates = read_templates([str(_text_file(benchmark, folder, TEMPLATES))])
            protocol += f", {len(templates)} templates"
        version = f"commit {folder.name}"
        if local:
            version = short_digest([layout.stamp(local, split) for split in benchmark.splits])
    data = {"source": benchmark.hub or benchmark.name, "split": benchmark.split}
    data |= {"layout": type(layout).__name__, "version": version}
    data |= {"classes": short_digest(classes)} if classes else {}
    data |= {"templates": short_digest(templates)} if templates else {}

    def load_split(split: str) -> Callable[[], tuple[Dataset, int]]:
        def load() -> tuple[Dataset, int]:
            files = [layout.of_split(pattern, split) for pattern in layout.files]
            place = local or _from_hub(benchmark, ["*.txt", *files])
            arguments = DataArguments(source=str(place), split=split, num_workers=num_workers or 0, max_unreadable=0)
            return _load(benchmark, layout, place, arguments, classes)

        return load

    return Task(
        kind=benchmark.kind,
        title=benchmark.title,
        protocol=protocol,
        load=load_split(benchmark.split),
        load_train=load_split(benchmark.train_split) if benchmark.kind == "linear_probe" else None,
        classes=classes,
        templates=templates,
        data=data,
        metrics=[metric for metric in benchmark.metrics if len(classes) > 5 or "top5" not in metric],
    )


def _find(benchmark: Benchmark, data_root: str | Path | None) -> tuple[Path | None, Layout]:
    """The local copy, or None where the Hub has to be asked; and the layout."""
    if data_root is not None:
        if not Path(data_root).is_dir():
            raise ValueError(f"there is no folder {data_root} with copies of benchmarks (data_root)")
        names, root = dict.fromkeys([benchmark.name, *benchmark.folders]), Path(data_root)
        folders = [folder for name in names if (folder := root / name).is_dir()] + [root] * (root.name in names)
        for folder in folders:
            for layout in benchmark.layouts:
                if all(layout.fits(folder, split) for split in benchmark.splits):
                    return folder, layout
        if folders:
            elsewhere = "" if benchmark.hub is None else "; or move it away, and it is read from the Hub"
            raise ValueError(
                f"{folders[0]} is no copy of {benchmark.name}: there must be {benchmark.shapes}{elsewhere}"
            )
    if benchmark.hub is None:
        where = f"{Path(data_root or 'DATA_ROOT') / benchmark.name} (data_root), with {benchmark.shapes}"
        raise ValueError(f"{benchmark.name} is not read from the Hub: put it into {where}")
    return None, benchmark.layouts[0]


def _from_hub(benchmark: Benchmark, patterns: Sequence[str], way_out: str = "") -> Path:
    """The folder with these files of a data set, which has the name of the commit.

    Args:
        way_out: what to do where the Hub cannot be reached; by default, to put a copy of the benchmark here.
    """
    try:
        options = hub_options(benchmark.hub, "dataset")
        return Path(snapshot_download(benchmark.hub, repo_type="dataset", allow_patterns=list(patterns), **options))
    except (OSError, ValueError) as error:
        why = shorten(str(error), 250, placeholder=" ...")
        way_out = way_out or f"put a copy into DATA_ROOT/{benchmark.name} (data_root)"
        raise ValueError(
            f"{benchmark.name} cannot be had from the Hub as {benchmark.hub} ({why}): try again, or {way_out}"
        ) from error


def _class_names(benchmark: Benchmark, folder: Path, layout: Layout) -> list[str]:
    """By the number of the class: of a file beside the data, of the data themselves, or of the copy on the Hub."""
    data_names = layout.class_names(folder, benchmark.split)
    if data_names and not (are_ids(data_names) or (folder / CLASSES).is_file()):
        return data_names
    file = _text_file(benchmark, folder, CLASSES)
    names = read_classes(file)
    names_by_id = names_after_ids(names, str(file))
    if names_by_id and any(map(SYNSET.match, data_names or ())):
        alone = sorted(names_by_id.keys() ^ set(data_names))
        if alone:
            raise ValueError(f"{folder} needs images of all classes in {file}, but {alone[0]} is in one of both alone")
        return [names_by_id[synset] for synset in data_names]
    names = list(names_by_id.values()) or names
    if are_ids(names) and not benchmark.numbers:
        raise ValueError(f"{file} calls classes {', '.join(names[:3])}, which says nothing to a model: write names")
    if data_names:
        _require_order(names, data_names, file, folder)
    return names


def _text_file(benchmark: Benchmark, folder: Path, name: str) -> Path:
    """A file of class names or templates, beside the data or of the copy on the Hub."""
    file = folder / name
    if file.is_file():
        return file
    what = "templates with {c} for the name" if name == TEMPLATES else "the names of its classes"
    way_out = f"write {what} into {file}, one a line"
    if benchmark.hub is None:
        raise ValueError(f"{benchmark.name} lacks {what}: {way_out}")
    return _from_hub(benchmark, ["*.txt"], way_out=way_out) / name


def _require_order(names: Sequence[str], data_names: Sequence[str], file: Path, folder: Path) -> None:
    """Raises a ValueError if there is not one name for each class of the data, or a name belongs to another class."""
    if len(data_names) != len(names):
        raise ValueError(
            f"{folder} needs images of all {len(names)} classes in {file}, but has {len(data_names)} classes, from "
            f"{data_names[0]} to {data_names[-1]}"
        )
    plain, wanted = ([re.sub(r"[\W_]+", "", name).lower() for name in some] for some in (names, data_names))
    for number, name in enumerate(plain):
        if name != wanted[number] and name in wanted:
            raise ValueError(
                f"line {number + 1} of {file} is {names[number]!r}, but the folder with this number is "
                f"{data_names[number]!r}: put the names into the order of the folders"
            )


def _load(
    benchmark: Benchmark, layout: Layout, folder: Path, arguments: DataArguments, classes: Sequence[str]
) -> tuple[Dataset, int]:
    """The rows, and 0: an unreadable row is an error, since nothing is measured in part."""
    with layout.reading(folder, arguments.split):
        rows = layout.rows(folder, arguments.split)
    if len(rows) == 0:
        raise ValueError(f"{folder} has no images of the split {arguments.split}")
    if benchmark.kind == "pairs":
        return readable_image_pairs(rows, arguments)
    if benchmark.kind == "choice":
        _require_captions(rows["caption"], folder)
    if not classes:
        return readable_pairs(rows, arguments)
    rows = rows.add_column("caption", [_name_of(label, classes, folder) for label in rows["label"]])
    if "mean_average_precision" in benchmark.metrics:
        _require_every_class(np.array(rows["label"]), classes, folder)
    if benchmark.balanced:
        _require_balance(np.array(rows["label"]), classes, folder)
    return readable_pairs(rows, arguments, are_labels=True)


def _require_captions(choices: Iterable[Sequence[Any]], folder: Path) -> None:
    """Raises a ValueError if a caption is missing or blank: any other would be right."""
    for number, texts in enumerate(choices):
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"{folder}: choice {number} lacks a caption, there are {shortened(texts)}")


def _require_every_class(labels: np.ndarray, classes: Sequence[str], folder: Path) -> None:
    """Raises a ValueError if a class has no image: its average precision is not defined."""
    images = labels.sum(axis=0)
    if not images.all():
        raise ValueError(f"{folder} needs images of every class, but has none of {classes[images.argmin()]}")


def _require_balance(labels: np.ndarray, classes: Sequence[str], folder: Path) -> None:
    """Raises a ValueError if a class has more images than another one, which may have none."""
    images = np.bincount(labels, minlength=len(classes))
    most, least = images.argmax(), images.argmin()
    if images[most] != images[least]:
        raise ValueError(
            f"{folder} needs as many images of every class, but has {images[most]} of {classes[most]} and "
            f"{images[least]} of {classes[least]}: copy all of them, or measure what is there as own data (--tasks "
            "zero_shot --dataset)"
        )


def _name_of(label: Any, classes: Sequence[str], folder: Path) -> str:
    """The class of a number, or the classes of a list of 1 and 0."""
    if isinstance(label, list) and len(label) == len(classes) and set(label) <= {0, 1}:
        return ", ".join(name for name, there in zip(classes, label, strict=True) if there) or "none"
    if not isinstance(label, int) or not 0 <= label < len(classes):
        raise ValueError(f"{folder}: the label {label!r} is none of the numbers of {len(classes)} classes, from 0 on")
    return classes[label]
