"""Tasks of benchmarks: where their data lie, and where their class names and templates come from."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten

import numpy as np
from datasets import Dataset
from huggingface_hub import snapshot_download

from clip_moe.data.arguments import DataArguments
from clip_moe.data.readable import readable_pairs
from clip_moe.engine.digests import short_digest
from clip_moe.engine.hub import hub_options
from clip_moe.evaluation.benchmarks.layouts import CLASSES, TEMPLATES, Layout
from clip_moe.evaluation.benchmarks.specs import Benchmark
from clip_moe.evaluation.class_names import SYNSET, are_ids, names_after_ids
from clip_moe.evaluation.own_data import read_classes, read_templates, readable_image_pairs
from clip_moe.evaluation.task import Task


def benchmark_task(benchmark: Benchmark, data_root: str | Path | None = None) -> Task:
    """The task of a benchmark. Class names, templates and stamps of copies are read now, images when they are needed.

    Args:
        data_root: folder of local copies: `data_root/NAME`, also under other names that the benchmark has; or the copy
            itself, if it is called so. What is not there is taken from the Hub.
    """
    local, layout = _find(benchmark, data_root)
    folder = local or _from_hub(benchmark, ["*.txt"])
    with layout.reading(folder, benchmark.split):
        classes, templates, protocol = [], [], benchmark.protocol
        if benchmark.kind in ("zero_shot", "linear_probe"):
            classes = _class_names(benchmark, folder, layout)
            if len(classes) < 2:
                raise ValueError(f"{folder} needs two or more classes, but has only {classes}")
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

    load = partial(_load, benchmark, layout, local, classes)
    return Task(
        kind=benchmark.kind,
        title=benchmark.title,
        protocol=protocol,
        load=partial(load, benchmark.split),
        load_train=partial(load, benchmark.train_split) if benchmark.kind == "linear_probe" else None,
        classes=classes,
        templates=templates,
        data=data,
        metrics=[metric for metric in benchmark.metrics if len(classes) > 5 or "top5" not in metric],
    )


def _find(benchmark: Benchmark, data_root: str | Path | None) -> tuple[Path | None, Layout]:
    """The local copy, or None where the Hub has to be asked; and the layout."""
    if data_root is not None:
        if not Path(data_root).is_dir():
            raise ValueError(f"data_root: there is no folder {data_root} with copies of benchmarks")
        names, root = dict.fromkeys([benchmark.name, *benchmark.folders]), Path(data_root)
        folders = [folder for name in names if (folder := root / name).is_dir()] + [root] * (root.name in names)
        for folder in folders:
            for layout in benchmark.layouts:
                if all(layout.fits(folder, split) for split in benchmark.splits):
                    return folder, layout
        if folders:
            elsewhere = "" if benchmark.hub is None else "; or move it away to read the benchmark from the Hub"
            raise ValueError(f"{folders[0]} is not a copy of {benchmark.name}: expected {benchmark.shapes}{elsewhere}")
    if benchmark.hub is None:
        where = f"{Path(data_root or 'DATA_ROOT') / benchmark.name} (data_root), with {benchmark.shapes}"
        raise ValueError(f"{benchmark.name} is not on the Hub: put it into {where}")
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
            f"cannot get {benchmark.name} from the Hub as {benchmark.hub} ({why}): try again, or {way_out}"
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
        fault = alone and f"{folder} and {file} need the same classes, but only one of them has {alone[0]}"
        names = [names_by_id.get(synset, "") for synset in data_names]
    else:
        names = list(names_by_id.values()) or names
        fault = data_names and _fault_of_names(names, data_names, file, folder)
        if are_ids(names) and not benchmark.numbers:
            fault = f"{file} has the classes {', '.join(names[:3])}, which mean nothing to a model: write names"
    if fault:
        raise ValueError(fault)
    return names


def _fault_of_names(names: Sequence[str], data_names: Sequence[str], file: Path, folder: Path) -> str | None:
    """Why a file's names are not those of the data's classes: there is not one for each, or a name belongs to another
    class."""
    if len(data_names) != len(names):
        return (
            f"{folder} needs images of all {len(names)} classes in {file}, but has {len(data_names)} classes, from "
            f"{data_names[0]} to {data_names[-1]}"
        )
    plain, wanted = ([re.sub(r"[\W_]+", "", name).lower() for name in some] for some in (names, data_names))
    for number, name in enumerate(plain):
        if name != wanted[number] and name in wanted:
            return (
                f"line {number + 1} of {file} is {names[number]!r}, but the folder with this number is "
                f"{data_names[number]!r}: put the names into the order of the folders"
            )
    return None


def _text_file(benchmark: Benchmark, folder: Path, name: str) -> Path:
    """A file of class names or templates, beside the data or of the copy on the Hub."""
    file = folder / name
    if file.is_file():
        return file
    content = "templates with {c} for the name" if name == TEMPLATES else "the names of its classes"
    way_out = f"write {content} into {file}, one a line"
    if benchmark.hub is None:
        raise ValueError(f"{benchmark.name} lacks {content}: {way_out}")
    return _from_hub(benchmark, ["*.txt"], way_out=way_out) / name


def _load(
    benchmark: Benchmark, layout: Layout, local: Path | None, classes: Sequence[str], split: str
) -> tuple[Dataset, int]:
    """The rows, and 0: an unreadable row is an error, since nothing is measured in part."""
    files = [layout.for_split(pattern, split) for pattern in layout.files]
    folder = local or _from_hub(benchmark, ["*.txt", *files])
    with layout.reading(folder, split):
        rows = layout.rows(folder, split)
    fault = _fault_of_rows(benchmark, rows, classes) if len(rows) else f"has no images of the split {split}"
    if fault:
        raise ValueError(f"{folder} {fault}")
    arguments = DataArguments(source=str(folder), split=split, max_unreadable=0)
    if benchmark.kind == "pairs":
        return readable_image_pairs(rows, arguments)
    if classes:
        rows = rows.add_column("caption", [classes[label] for label in rows["label"]])
    return readable_pairs(rows, arguments, are_labels=bool(classes))


def _fault_of_rows(benchmark: Benchmark, rows: Dataset, classes: Sequence[str]) -> str | None:
    """Why scores on these rows would be wrong."""
    if not classes:
        return None
    labels = list(rows["label"])
    bad = next((label for label in labels if not (isinstance(label, int) and 0 <= label < len(classes))), None)
    if bad is not None:
        return f"has the label {bad!r}, but its {len(classes)} classes have the labels 0 to {len(classes) - 1}"
    images = np.bincount(labels, minlength=len(classes))
    most, least = images.argmax(), images.argmin()
    if benchmark.balanced and images[most] != images[least]:
        return (
            f"needs as many images of every class, but has {images[most]} of {classes[most]} and {images[least]} of "
            f"{classes[least]}: copy all of them, or measure what is there as own data "
            "({task: zero_shot, dataset: FOLDER})"
        )
    return None
