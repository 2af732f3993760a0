"""Splits of a source: their names, and the rows that two of them share."""

from dataclasses import replace
from pathlib import Path

from datasets import ReadInstruction, get_dataset_split_names

from clip_moe.data.annotations import SPLIT_OF_NAME, NoSplit, read_tables, split_column
from clip_moe.data.arguments import DataArguments
from clip_moe.data.local_data import is_here, is_read_whole, is_table
from clip_moe.data.sources import matching, open_rows, reading, split_names
from clip_moe.data.worlds import is_world


def named_split(source: str, split: str) -> str:
    """The name of a split for readers; only the slice, as `[:10%]`, of a source that is read whole."""
    return split[split.find("[") :] * ("[" in split) if is_read_whole(source) else split


def has_split(arguments: DataArguments, split: str) -> bool:
    """Whether a source has this split, with other rows than that of the arguments."""
    source = arguments.source
    if is_world(source):
        return True
    if not is_here(source):
        with reading(arguments):
            return split in get_dataset_split_names(source)
    whole = replace(arguments, skip=None, num_samples=None)
    try:
        open_rows(replace(whole, split=split))
    except NoSplit:
        return False
    return common_rows(whole, split) == 0  # a file is all that it names, whatever the split is called


def common_rows(arguments: DataArguments, other_split: str) -> int:
    """The number of rows that are in the split of the arguments and in another one, within `skip` and `num_samples`.

    A file or a pattern is all that it names, whatever the split is called, unless it is of tables with a column of
    splits; and so is a dataset that was saved alone.
    """
    source, splits = Path(arguments.source), (arguments.split, other_split)
    if (source / "state.json").is_file():
        return len(open_rows(arguments))
    is_file, split_of = is_read_whole(arguments.source), {}
    if is_table(arguments.source):  # in which val is validation
        with reading(arguments):
            is_file = split_column(read_tables(matching(arguments.source)), arguments.source) is None
        split_of = SPLIT_OF_NAME
    names, other_names = (set(split_names(split)) for split in splits)
    if not is_file and {split_of.get(name, name) for name in names}.isdisjoint(split_of.get(n, n) for n in other_names):
        return 0
    whole = replace(arguments, skip=None, num_samples=None)
    lengths = {name: len(open_rows(replace(whole, split=name))) for name in names | other_names}
    taken = []
    for split in splits:
        parts = ReadInstruction.from_spec(split).to_absolute(lengths)
        called = {name: "" if is_file else split_of.get(name, name) for name in lengths}
        rows = [(called[part.splitname], row) for part in parts for row in range(part.from_, part.to)]
        taken.append(set(rows[arguments.taken_rows]))
    return len(taken[0] & taken[1])
