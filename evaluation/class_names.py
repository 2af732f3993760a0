"""The names of the classes of own data."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from datasets import ClassLabel, Dataset, Value

from clip_moe.data.arguments import DataArguments
from clip_moe.data.columns import select_columns
from clip_moe.data.sources import open_rows
from clip_moe.data.texts import trimmed
from clip_moe.engine.messages import join_names

# Names of classes that say nothing to a model: WordNet's ids of synsets, and numbers
SYNSET, NUMBER = re.compile(r"n\d{8}\b", re.IGNORECASE), re.compile(r"[-+]?\d+(\.\d+)?")
# A WordNet id and its name
MAPPED = re.compile(r"(n\d{8})[\s:,]+(.*\S)")
# A number and its name: `0,cat`, `0: cat`, `0. cat`; not `3 objects`, `3.5 inches` and `10:30 am`
NUMBERED = re.compile(r"""(\d+)\s*(?:[,;:|=\t]|[.)](?=\s))\s*(["']?)(?=\D*[^\W\d_])(\D.*?)\s*\2""")


def labeled_rows(
    arguments: DataArguments, classes: Sequence[str] | None, as_prompts: bool = False
) -> tuple[Dataset, Sequence[str]]:
    """The image column and, as captions, the names of the rows' classes; and the classes. See
    `clip_moe.evaluation.own_data.zero_shot_task`.

    Args:
        as_prompts: whether a model reads the names.
    """
    rows, column = select_columns(open_rows(arguments), arguments), arguments.caption_column
    feature = rows.features["caption"]
    labels = [trimmed(label) if isinstance(label, str) else label for label in rows["caption"]]
    lines = classes or ()
    has_ids = as_prompts or any(map(MAPPED.fullmatch, lines)) or any(map(NUMBERED.fullmatch, lines))
    names_by_id = names_after_ids(lines, "classes") if has_ids else {}
    if as_prompts and are_ids(names := list(names_by_id.values()) or lines):
        label = next(filter(NUMBER.fullmatch, names), names[0])
        raise ValueError(
            f"classes has {label!r}, a label that means nothing to a model: give a file of names in the order of the "
            "labels, such as tench, or 3 objects"
        )
    own = _own_names(rows, arguments)
    if names_by_id and not own and all(map(str.isdecimal, names_by_id)):
        labels, own = list(map(str, labels)), list(names_by_id)
    if classes is None and not own:
        raise ValueError(f"column {column} has no class names: set classes")
    if (as_prompts or lines) and are_ids(own) and set(own).isdisjoint(lines):
        name_of = names_by_id or _names_of_ids(own, classes, arguments.source)
        if missing := sorted(set(own) - name_of.keys()):
            raise ValueError(f"classes: the file has no name for {len(missing)} classes, such as {missing[0]}")
        classes = [name_of[name] for name in own] if names_by_id else classes
        names = [name_of.get(label, label) for label in _named_labels(labels, feature, column, own)]
    else:
        classes = own if classes is None else list(names_by_id.values()) or classes
        names = _named_labels(labels, feature, column, classes)
    if as_prompts:  # of folders, red_circle
        names, classes = ([name.replace("_", " ") for name in labels] for labels in (names, classes))
    return rows.remove_columns("caption").add_column("caption", names, feature=Value("string")), classes


def _own_names(rows: Dataset, arguments: DataArguments) -> list[str]:
    """The classes that a column declares, or its different texts in all rows of the split."""
    if isinstance(rows.features["caption"], ClassLabel):
        return rows.features["caption"].names
    if arguments.num_samples is not None:
        arguments = dataclasses.replace(arguments, num_samples=None)
        rows = select_columns(open_rows(arguments), arguments)
    return sorted({trimmed(label) for label in rows["caption"] if isinstance(label, str)})


def in_order(ids: Iterable[str]) -> list[str]:
    """Names of classes or their ids in alphabetical order, numbers by their value."""
    return sorted(ids, key=lambda name: (float(name) if NUMBER.fullmatch(name) else math.inf, name))


def are_ids(names: Sequence[str]) -> bool:
    """Whether one name is a synset, or half of them or more are numbers: they say nothing to a model."""
    return any(map(SYNSET.match, names)) or 0 < len(names) <= 2 * len(list(filter(NUMBER.fullmatch, names)))


def names_after_ids(lines: Sequence[str], place: str) -> dict[str, str]:
    """WordNet id -> name, in the order of the lines, or number -> name, in that of the numbers; {} where these are
    names alone. Raises a ValueError if some lines have an id and a name, and others not. `place`: where they stand."""
    numbered = [NUMBERED.fullmatch(line) for line in lines]
    name_of = {match[1]: match[3] for match in numbered if match}
    if len(name_of) == len(lines):
        return dict(sorted(name_of.items(), key=lambda item: int(item[0])))
    names_by_id = dict(match.groups() for match in map(MAPPED.fullmatch, lines) if match)
    synset = next(filter(SYNSET.match, lines), None)
    if 2 * len(name_of) > len(lines):
        pairs = zip(lines, numbered, strict=True)
        other = next(line for line, match in pairs if not match or name_of[match[1]] != match[3])
        fault = (
            f"{len(name_of)} of {len(lines)} classes have a number of their own before their name, and {other!r} has "
            "none: number all or none"
        )
    elif synset is not None and len(names_by_id) < len(lines):
        fault = (
            f"the class {synset!r} is WordNet's id, which says nothing to a model: give names, one a line, as tench, "
            "or each after its own id, as n01440764 tench"
        )
    else:
        return names_by_id
    raise ValueError(f"{fault} ({place})")


def _names_of_ids(ids: Sequence[str], classes: Sequence[str] | None, source: str) -> dict[str, str]:
    """Id -> name, where the names are in the order of the ids."""
    ids = in_order(ids)
    if classes is None or len(classes) != len(ids):
        lines = "one a line" if classes is None else f"{len(ids)} lines and not {len(classes)}"
        raise ValueError(
            f"{source} has the classes {', '.join(ids[:3])}, ..., which mean nothing to a model: give a file of their "
            f"{len(ids)} names in this order (classes), {lines}, such as tench, goldfish, great white shark, ..."
        )
    return dict(zip(ids, classes, strict=True))


def require_different_names(classes: Sequence[str]) -> None:
    """Raises a ValueError unless there are two classes or more, each with a name of its own."""
    faults = [name for name, times in Counter(classes).items() if times > 1 or not name.strip()]
    if faults or len(classes) < 2:
        names = ", ".join(map(repr, faults[:5] or classes))
        raise ValueError(f"classes needs two or more distinct names, got {names}")


def _named_labels(labels: list[int | str], feature: Any, column: str, classes: Sequence[str]) -> list[str]:
    """The labels of a column as names of classes; empty where a column that declares them has none."""
    # Numbers stand for the column's own names, if it has some: of folders, those that this split happens to have
    is_declared = isinstance(feature, ClassLabel)
    numbers = [label for label in labels if label is not None] if is_declared else labels
    if all(type(label) is int for label in numbers):
        name_of = dict(enumerate(feature.names if is_declared else classes))
        labels = ["" if label is None else name_of.get(label, label) for label in labels]
    unknown = sorted(map(str, set(labels) - set(classes) - ({""} if is_declared else set())))
    if unknown:
        raise ValueError(
            f"column {column} has labels that are not classes: {', '.join(unknown[:5])}; the classes must have the "
            f"column's own names, but are {join_names(classes)}"
        )
    return labels
