"""Tasks made of any dataset's columns."""

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from datasets import ClassLabel, Dataset, List, Value

from clip_moe.data.arguments import DataArguments
from clip_moe.data.columns import rename_columns, select_columns, with_class_names
from clip_moe.data.identity import identity
from clip_moe.data.image_folders import NO_PICTURE
from clip_moe.data.pairs import load_pairs, one_row_an_image
from clip_moe.data.readable import readable_pairs
from clip_moe.data.sources import common_rows, named_split, open_rows
from clip_moe.data.worlds import is_world
from clip_moe.engine.digests import file_digests, short_digest
from clip_moe.engine.files import read_text
from clip_moe.engine.local_names import paths_here, without_paths
from clip_moe.evaluation.class_names import labeled_rows, require_different_names
from clip_moe.evaluation.own_task import OwnTask
from clip_moe.evaluation.task import Task

logger = logging.getLogger(__name__)

# Settings that decide how rows are read, not which
READING_SETTINGS = ("streaming", "in_memory", "num_workers", "max_unreadable")


def make_task(own: OwnTask) -> Task:
    """The task; names of classes and templates are read now, images when they are needed."""
    arguments = own.arguments()
    classes = read_classes(Path(own.classes)) if own.classes else None
    if own.task == "retrieval":
        task = retrieval_task(arguments)
    elif own.task == "pairs":
        task = pairs_task(arguments, own.label_column)
    elif own.task == "zero_shot":
        task = zero_shot_task(arguments, own.templates, classes)
    else:
        task = linear_probe_task(arguments, own.train_split, classes)
    return dataclasses.replace(task, title=own.title or own.name or task.title)


def own_fingerprint(own: OwnTask) -> str | None:
    """A hash of the data and of the files of names; None where the data are not here or in the settings alone."""
    splits = [own.split, *([own.train_split] if own.task == "linear_probe" else [])]
    columns = [own.image_column] if own.task != "pairs" else [f"{own.image_column}_{side}" for side in range(2)]
    changes = [{"split": split, "image_column": column} for split in splits for column in columns]
    identities = [identity(dataclasses.replace(own.arguments(), **change)) for change in changes]
    files = [name for name in filter(None, [own.classes, *(own.templates or [])]) if os.path.isfile(name)]
    return None if None in identities else short_digest([identities, file_digests(files)])


def retrieval_task(arguments: DataArguments) -> Task:
    """Retrieval on any dataset with an image column and one of captions or lists of them. Rows of the same image are
    one image with all their captions. Of own data, every image of a caption is right for it."""

    def load():
        if is_world(arguments.source):
            return load_pairs(arguments), 0
        rows = with_class_names(select_columns(open_rows(arguments), arguments), arguments.source)
        rows, skipped = readable_pairs(rows, arguments)
        captions = [] if arguments.captions_per_line else rows["caption"]
        number = sum(isinstance(caption, str) and len(caption.strip().splitlines()) > 1 for caption in captions)
        if number > len(captions) / 2:
            lines = f"{number} of {len(captions)} captions of column {arguments.caption_column} have several lines"
            logger.warning("%s: %s. If each line is a caption, set captions_per_line: true", arguments.source, lines)
        return one_row_an_image(rows), skipped

    data, from_world = _data(arguments), is_world(arguments.source)
    protocol = _protocol(data) + ("" if from_world else "; every image with the same caption is right")
    title = _title("retrieval", arguments)
    return Task("retrieval", title, protocol, load, data=data, equal_captions_are_right=not from_world)


def zero_shot_task(
    arguments: DataArguments, templates: Sequence[str] | None = None, classes: Sequence[str] | None = None
) -> Task:
    """Zero-shot classification on any dataset with an image and a label column (`caption_column`).

    Args:
        templates: as `read_templates` takes them; None: each model's own.
        classes: names in the order of the column's integers or ids, or those that the column itself has; None: those
            that the column declares, or its different texts in all rows of the split.
    """
    templates = [] if templates is None else read_templates(templates)
    rows, classes = labeled_rows(arguments, classes, as_prompts=True)
    require_different_names(classes)
    data = _data(arguments) | {"classes": short_digest(classes), "templates": list(templates)}
    shown = ", ".join(map(repr, templates[:3])) + (", ..." if len(templates) > 3 else "")
    shown = f"{len(templates)} templates: {shown}" if templates else "each model's own template"
    return Task(
        kind="zero_shot",
        title=_title("zero-shot", arguments),
        protocol=f"{_protocol(data)}; {len(classes)} classes{_no_classes(rows)}, {shown}",
        load=lambda: readable_pairs(rows, arguments, are_labels=True),
        classes=classes,
        templates=templates,
        data=data,
    )


def linear_probe_task(arguments: DataArguments, train_split: str, classes: Sequence[str] | None = None) -> Task:
    """A linear probe on any dataset with an image and a label column; its labels and errors as `zero_shot_task`'s.

    Args:
        train_split: split to fit the probe to; as many samples as `arguments` asks for.
        classes: as there; None: those of either split.
    """
    train_arguments = dataclasses.replace(arguments, split=train_split)
    (rows, names), (train_rows, train_names) = labeled_rows(arguments, classes), labeled_rows(train_arguments, classes)
    common = common_rows(arguments, train_split)
    if common:
        raise ValueError(
            f"a linear probe needs different rows to train and to test, but the splits {arguments.split} and "
            f"{train_split} of {arguments.source} have {common} in common: set split and train_split, of one file to "
            "slices such as test[:20%] and test[20%:]"
        )
    classes = [*names, *(name for name in train_names if name not in names)]
    require_different_names(classes)
    data = _data(arguments, train_arguments) | {"classes": short_digest(classes), "train_split": train_split}
    return Task(
        kind="linear_probe",
        title=_title("linear probe", arguments),
        protocol=f"{_protocol(data)}; {len(classes)} classes{_no_classes(rows)}, fitted to the split {train_split}",
        load=lambda: readable_pairs(rows, arguments, are_labels=True),
        load_train=lambda: readable_pairs(train_rows, train_arguments, are_labels=True),
        classes=classes,
        data=data,
    )


def pairs_task(arguments: DataArguments, attribute_column: str = "attribute") -> Task:
    """Pairs of captioned images: a row has `image_0` and `image_1`, `caption_0` and `caption_1`, where `image` and
    `caption` are the columns of the arguments.

    Args:
        attribute_column: the attribute that differs in each pair, if there is such a column.
    """
    sides = [dataclasses.replace(arguments, image_column=f"{arguments.image_column}_{side}") for side in range(2)]
    data = _data(arguments, *sides) | {"attribute_column": attribute_column}

    def load():
        rows = open_rows(arguments)
        columns = {f"{arguments.image_column}_{side}": f"image_{side}" for side in range(2)}
        columns |= {f"{arguments.caption_column}_{side}": f"caption_{side}" for side in range(2)}
        if attribute_column in rows.column_names:
            columns[attribute_column] = "attribute"
        rows = rename_columns(rows, columns, arguments)
        if "attribute" in rows.column_names:
            feature, values = rows.features["attribute"], list(rows["attribute"])
            values = feature.int2str(values) if isinstance(feature, ClassLabel) else values
            names = ["none" if value in (None, "") else str(value) for value in values]
            rows = rows.remove_columns("attribute").add_column("attribute", names, feature=Value("string"))
        return readable_image_pairs(rows, arguments)

    return Task("pairs", _title("pairs", arguments), _protocol(data), load, data=data)


def readable_image_pairs(rows: Dataset, arguments: DataArguments) -> tuple[Dataset, int]:
    """The pairs whose images and captions can all be read, and how many others there were."""
    skipped = 0
    for side in range(2):
        # A tokenizer would take two texts for one and its continuation
        if isinstance(rows.features[f"caption_{side}"], List):
            raise ValueError(f"{arguments.source}: each image of a pair needs one caption, got a list")
        columns = {f"image_{side}": "image", f"caption_{side}": "caption"}
        rows, number = readable_pairs(rows.rename_columns(columns), arguments)
        rows = rows.rename_columns({new: old for old, new in columns.items()})
        skipped += number
    return rows, skipped


def read_classes(path: Path, noun: str = "class") -> list[str]:
    """The names of a file, one a line."""
    lines = read_text(path).removesuffix("\n").split("\n")
    names = [line.strip() for line in lines]
    if "" in names:
        raise ValueError(f"{path} has no {noun} in line {names.index('') + 1}: every line needs one")
    return names


def read_templates(templates: Sequence[str]) -> list[str]:
    """Templates with {}, as they are given or from the one file that is given; {c}, as CLIP_benchmark has it, is {}."""
    if len(templates) == 1 and os.path.isfile(templates[0]):
        templates = read_classes(Path(templates[0]), "template")
    templates = [template.replace("{c}", "{}") for template in templates]
    bad = [template for template in templates if not is_template(template)]
    if bad or not templates:
        raise ValueError(f"templates need one {{}} for the class's name, got {bad or 'none'}")
    return templates


def is_template(text: str) -> bool:
    """Whether a class's name takes the place of one {}, and nothing else is one."""
    try:
        fields = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
    except ValueError:
        return False
    return fields == [("", "", None)]


def _data(arguments: DataArguments, *also_read: DataArguments) -> dict[str, Any]:
    """The identity of the data of a task: the settings, and the identity of the files that they name, so that rows
    changed in place are other data."""
    chosen = {key: value for key, value in dataclasses.asdict(arguments).items() if key not in READING_SETTINGS}
    if arguments.pixel_range is None:
        del chosen["pixel_range"]
    if not is_world(arguments.source):
        for key in ("captions", "kinds", "seed"):
            del chosen[key]
    identities = [part for part in map(identity, (arguments, *also_read)) if part is not None]
    return chosen | ({"identity": identities} if identities else {})


def _no_classes(rows: Dataset) -> str:
    """The folders that are no classes, in brackets (`clip_moe.data.image_folders.open_folder`)."""
    return f" ({rows.info.description})" if rows.info.description.startswith(NO_PICTURE) else ""


def _title(measure: str, arguments: DataArguments) -> str:
    """The measure and the data, with the split and the column if they are others than the default ones."""
    split = named_split(arguments.source, arguments.split)
    words = [measure, _known_as(arguments.source), "" if split == "test" else split]
    words += [] if arguments.caption_column in ("caption", "label") else [arguments.caption_column]
    return ", ".join(filter(None, words))


def _known_as(source: str) -> str:
    """A name on the Hub, a URL, or the last part of a path."""
    return without_paths(source, paths_here(source))


def _protocol(data: dict[str, Any]) -> str:
    samples = "all" if data["num_samples"] is None else f"the first {data['num_samples']}"
    split = named_split(data["source"], data["split"])
    text = f"{samples} rows of {_known_as(data['source'])}{split and f', split {split}'}, columns "
    text += f"{data['image_column']} and {data['caption_column']}"
    text += ", one caption a line" if data["captions_per_line"] else ""
    if data["image_root"] is not None:
        text += f", images below {_known_as(data['image_root'])}"
    if "pixel_range" in data:
        text += f", pixels from {' to '.join(f'{value:g}' for value in data['pixel_range'])}"
    if "seed" in data:
        text += f", {data['captions']} captions of {data['kinds']} kinds, seed {data['seed']}"
    return text
