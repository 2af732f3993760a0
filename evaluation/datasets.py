"""What models are measured on: a table of benchmarks, and benchmarks made of any dataset's columns."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from datasets import ClassLabel, Dataset, Value

from data import glyphs
from data.pairs import load_pairs, readable_pairs, select_columns, with_image_root
from data.sources import DataArguments, open_rows
from evaluation.results import content_hash

Kind = Literal["zero_shot", "retrieval", "pairs", "linear_probe"]

# The metrics that stand for a task in a table, with the columns' titles.
PRIMARY = {
    "zero_shot": {"accuracy": "accuracy"},
    "retrieval": {"image_to_text_recall@1": "R@1 image→text", "text_to_image_recall@1": "R@1 text→image"},
    "pairs": {"group": "group score"},
    "linear_probe": {"accuracy": "accuracy"},
}


# What decides how the rows of a dataset are read, but not which.
HOW_READ = ("streaming", "in_memory", "num_workers", "max_unreadable")


@dataclass(frozen=True)
class Benchmark:
    """One task on one dataset.

    `load` returns the rows and how many more could not be read, `load_train` those that a linear probe is fitted to.
    Rows have the columns `image` and `caption` (zero-shot: the class name; retrieval: a text or a list of texts),
    or for pairs those of `data.glyphs.load_minimal_pairs`.
    `data` is all that was chosen of a dataset given by columns: results in which it differs are of different tasks.
    """

    kind: Kind
    title: str
    protocol: str
    load: Callable[[], tuple[Dataset, int]]
    classes: Sequence[str] = ()
    templates: Sequence[str] = ()
    load_train: Callable[[], tuple[Dataset, int]] | None = None
    data: dict[str, Any] = field(default_factory=dict)


def kept(benchmarks: dict[str, Benchmark]) -> dict[str, Benchmark]:
    """The same, whose rows are loaded once for all models that are measured on them, and not kept for longer."""
    return {
        name: dataclasses.replace(b, load=cache(b.load), load_train=b.load_train and cache(b.load_train))
        for name, b in benchmarks.items()
    }


def _glyph_kinds(split: str, num_samples: int, kinds: str = "all") -> Dataset:
    """Glyphs with their kinds."""
    rows = glyphs.load(split, "detailed", num_samples, glyphs.KIND_SETS[kinds])
    return rows.remove_columns("caption").rename_column("kind", "caption")


def _glyph_zero_shot(title: str, kinds: str, classes: Sequence[str] = tuple(glyphs.KINDS)) -> Benchmark:
    candidates = f"all {len(classes)} kinds" if len(classes) == len(glyphs.KINDS) else f"these {len(classes)}"
    return Benchmark(
        kind="zero_shot",
        title=title,
        protocol=f"2,000 test glyphs of {kinds} kinds; {candidates} are candidates, {len(glyphs.TEMPLATES)} templates",
        load=lambda: (_glyph_kinds("test", 2000, kinds), 0),
        classes=classes,
        templates=glyphs.TEMPLATES,
    )


BENCHMARKS = {
    "glyphs_zero_shot": _glyph_zero_shot("zero-shot", "all"),
    "glyphs_zero_shot_seen": _glyph_zero_shot("zero-shot, seen kinds", "seen"),
    "glyphs_zero_shot_unseen": _glyph_zero_shot("zero-shot, unseen kinds", "unseen"),
    "glyphs_digits": _glyph_zero_shot("zero-shot, digits alone", "digit", glyphs.DIGITS),
    "glyphs_shapes": _glyph_zero_shot("zero-shot, shapes alone", "shape", glyphs.SHAPES),
    "glyphs_retrieval": Benchmark(
        kind="retrieval",
        title="retrieval",
        protocol="1,000 test glyphs of seen kinds, one detailed caption each",
        load=lambda: (glyphs.load("test", "detailed", 1000, glyphs.SEEN_KINDS), 0),
    ),
    "glyphs_pairs": Benchmark(
        kind="pairs",
        title="attribute pairs",
        protocol="1,200 pairs of test glyphs of all kinds that differ in one of six attributes, detailed captions",
        load=lambda: (glyphs.load_minimal_pairs("test", 1200), 0),
    ),
    "glyphs_linear_probe": Benchmark(
        kind="linear_probe",
        title="linear probe",
        protocol="2,000 test glyphs of all 16 kinds; logistic regression on 4,000 training glyphs",
        load=lambda: (_glyph_kinds("test", 2000), 0),
        load_train=lambda: (_glyph_kinds("train", 4000), 0),
        classes=glyphs.KINDS,
    ),
}


def retrieval_benchmark(arguments: DataArguments) -> Benchmark:
    """Retrieval on any dataset with an image and a caption column; the caption may be a list.

    Raises:
        ValueError: images and captions are one column.
    """

    def load():
        if arguments.source == "glyphs":
            return load_pairs(arguments), 0
        return _readable(open_rows(arguments), arguments)

    data = _data(arguments)
    return Benchmark("retrieval", f"retrieval, {_short_name(arguments)}", _protocol(data), load, data=data)


def zero_shot_benchmark(
    arguments: DataArguments, templates: Sequence[str], classes: Sequence[str] | None = None
) -> Benchmark:
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
    feature = rows.features[column]
    labels = list(rows[column])
    for row, label in enumerate(labels):
        if not isinstance(label, int | str):
            raise ValueError(f"labels are integers or texts, but row {row} of column {column} has {label!r}")
    if classes is None:
        if not isinstance(feature, ClassLabel) and not all(isinstance(label, str) for label in labels):
            raise ValueError(f"column {column} holds no names: give them with --classes")
        classes = feature.names if isinstance(feature, ClassLabel) else sorted(set(labels))
    nameless = [number for number, name in enumerate(classes) if not name.strip()]
    if nameless:
        raise ValueError(f"class {nameless[0]} has no name; the classes are {', '.join(map(repr, classes[:5]))}, ...")
    repeated = sorted(name for name, count in Counter(classes).items() if count > 1)
    if repeated:
        raise ValueError(f"classes need different names, but these occur twice: {', '.join(repeated[:5])}")
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
    rows = rows.remove_columns(column).add_column(column, labels, feature=Value("string"))

    data = _data(arguments, classes=content_hash(classes), templates=list(templates))
    shown = ", ".join(map(repr, templates[:3])) + (", ..." if len(templates) > 3 else "")
    return Benchmark(
        kind="zero_shot",
        title=f"zero-shot, {_short_name(arguments)}",
        protocol=f"{_protocol(data)}; {len(classes)} classes, {len(templates)} templates: {shown}",
        load=lambda: _readable(rows, arguments),
        classes=classes,
        templates=templates,
        data=data,
    )


def linear_probe_benchmark(
    arguments: DataArguments, train_split: str, classes: Sequence[str] | None = None
) -> Benchmark:
    """A linear probe on any dataset with an image and a label column; its labels and errors as `zero_shot_benchmark`'s.

    Args:
        train_split: what the probe is fitted to; as many samples as `arguments` asks for.
        classes: as there; None: those of either split.
    """
    test = zero_shot_benchmark(arguments, ["{}"], classes)
    train = zero_shot_benchmark(dataclasses.replace(arguments, split=train_split), ["{}"], classes)
    classes = list(dict.fromkeys([*test.classes, *train.classes]))
    data = _data(arguments, classes=content_hash(classes), train_split=train_split)
    return Benchmark(
        kind="linear_probe",
        title=f"linear probe, {_short_name(arguments)}",
        protocol=f"{_protocol(data)}; {len(classes)} classes, fitted to the split {train_split}",
        load=test.load,
        load_train=train.load,
        classes=classes,
        data=data,
    )


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
    chosen = {key: value for key, value in dataclasses.asdict(arguments).items() if key not in HOW_READ}
    if arguments.source != "glyphs":
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
