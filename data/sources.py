"""The rows of any source of pairs, with their own columns."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import pyarrow
import pyarrow.parquet
from datasets.data_files import DataFilesList, sanitize_patterns
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard

from clip_moe.data.annotations import SPLIT_OF_NAME, NoSplit, open_tables, read_tables, rows_by_split, split_names
from clip_moe.data.columns import Rows, first_rows
from clip_moe.data.image_folders import METADATA, is_picture, open_folder, warn_of_unread
from clip_moe.data.local_data import BUILDERS, TABLES, is_here, is_read_whole, is_table, matching, reading, suffix_of
from clip_moe.data.shards import open_shards
from clip_moe.data.worlds import is_world
from clip_moe.engine.digests import file_stamp, value_digest
from clip_moe.engine.files import files_in
from clip_moe.engine.hub import hub_options

if TYPE_CHECKING:
    from clip_moe.data.arguments import DataArguments

# Workers and processes that share rows in memory as a stream
READERS = 64


def open_rows(arguments: DataArguments, captions: Iterable[str] = ()) -> Rows:
    """The rows of any source but a world, with all their columns; of shards, with the image column and the caption
    column, or these captions."""
    with reading(arguments.source):
        columns = arguments.image_column, *(sorted(captions) or filter(None, [arguments.caption_column]))
        rows = _open(arguments, columns)
        if arguments.skip is not None:
            if arguments.skip >= len(rows):
                raise ValueError(f"skip: {arguments.skip} leaves no pair of {arguments.source}, which has {len(rows)}")
            rows = rows.skip(arguments.skip)
        return rows if arguments.num_samples is None else first_rows(rows, arguments.num_samples)


def is_saved(source: str) -> bool:
    """Whether a source is a dataset that `save_to_disk` wrote."""
    return any((Path(source) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _open(arguments: DataArguments, columns: Sequence[str]) -> Rows:
    source, split, streaming = arguments.source, arguments.split, arguments.streaming
    is_folder, suffix = os.path.isdir(source), suffix_of(source)
    if is_saved(source):
        rows = datasets.load_from_disk(source)
        parts = rows if isinstance(rows, dict) else {str(rows.split or split_names(split)[0]): rows}
    elif builder := builder_of(source, arguments.image_column) if is_folder else BUILDERS.get(suffix):
        by_split = _files_of_folder(arguments, builder) if is_folder else {split_names(split)[0]: matching(source)}
        return _open_files(builder, by_split, arguments, columns)
    elif not (is_folder or suffix in TABLES or os.path.isfile(source)):
        return _open_hub(source, split, streaming)
    elif is_folder:
        parts = open_folder(source)
    elif suffix in TABLES:
        parts = open_tables(matching(source), split)
    else:
        raise ValueError(
            f"{source} is not a supported file: name a folder, a dataset on the Hub, or files that end in "
            f"{', '.join([*BUILDERS, *TABLES])}"
        )
    rows = rows_of_splits(parts, split, source)
    if is_saved(source) and "split" in rows.column_names:
        _require_one_split(rows.data.column("split"), source)
    return rows.to_iterable_dataset(num_shards=min(READERS, max(len(rows), 1))) if streaming else rows


def _open_hub(source: str, split: str, streaming: bool) -> Rows:
    """The rows of a data set on the Hub, of the commit that its identity names."""
    options = hub_options(source, "dataset")
    if options["local_files_only"] and not datasets.config.HF_HUB_OFFLINE:  # it would ask for minutes
        raise ConnectionError("cannot reach the Hub: set HF_HUB_OFFLINE=1 to read what was downloaded before")
    builder = datasets.load_dataset_builder(source, revision=options["revision"])
    if options["revision"] not in Path(builder.cache_dir).parts:  # without the Hub, it takes what it prepared last
        raise ConnectionError(
            f"{source} was downloaded at another commit than {options['revision'][:12]}: connect to the Hub"
        )
    if streaming:
        return builder.as_streaming_dataset(split=split)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _open_files(
    builder: str, by_split: Mapping[str, list[str]], arguments: DataArguments, columns: Sequence[str]
) -> Rows:
    split, streaming = arguments.split, arguments.streaming
    stamps = {name: [file_stamp(file) for file in files] for name, files in by_split.items()}
    if builder == "webdataset":
        parts = {name: open_shards(files, columns, stamps[name], streaming) for name, files in by_split.items()}
        return rows_of_splits(parts, split, arguments.source)
    for file in chain.from_iterable(by_split.values()) if builder == "parquet" else ():
        if "split" in pyarrow.parquet.read_schema(file).names:
            _require_one_split(pyarrow.parquet.read_table(file, columns=["split"])["split"], file)
    # `datasets` takes file names for patterns, and a file of the same name and time for the one whose rows it has kept:
    # any setting is in their key
    patterns = {name: [glob.escape(file) for file in files] for name, files in by_split.items()}
    stamp = value_digest(stamps)
    return datasets.load_dataset(builder, data_files=patterns, description=stamp, split=split, streaming=streaming)


def builder_of(folder: str, image_column: str) -> str | None:
    """The builder of `datasets` for the files of a folder; None for pictures, also where img2dataset left parquet files
    without images beside them."""
    files = [os.path.join(folder, path) for path in files_in(folder) if os.path.basename(path) not in METADATA]
    suffixes = set(map(suffix_of, files))
    builder = next((name for suffix, name in BUILDERS.items() if suffix in suffixes), None)
    if builder == "parquet" and any(map(is_picture, files)):
        first = min(file for file in files if suffix_of(file) == ".parquet")
        return builder if image_column in pyarrow.parquet.read_schema(first).names else None
    return builder


def rows_of_splits(parts: Mapping[str, Rows], split: str, source: str) -> Rows:
    """The rows of a split; loaded ones also of a slice as `train[:10%]`, or of several as `train+test`."""
    has_stream = any(isinstance(rows, datasets.IterableDataset) for rows in parts.values())
    _require_splits(source, split, [split] if has_stream else split_names(split), parts)
    if split in parts:
        return parts[split]
    slices = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in parts.items()})
    chosen = [parts[part.splitname].select(range(part.from_, part.to)) for part in slices]
    return chosen[0] if len(chosen) == 1 else datasets.concatenate_datasets(chosen)


def _require_splits(source: str, split: str, names: Iterable[str], known: Collection[str]) -> None:
    if not set(names) <= set(known):
        raise NoSplit(source, split, known)


def named_split(source: str, split: str) -> str:
    """The name of a split for readers; only the slice, as `[:10%]`, of a source that is read whole."""
    return split[split.find("[") :] * ("[" in split) if is_read_whole(source) else split


def has_split(arguments: DataArguments, split: str) -> bool:
    """Whether a source has this split, with other rows than that of the arguments."""
    source = arguments.source
    if is_world(source):
        return True
    if not is_here(source):
        with reading(arguments.source):
            return split in datasets.get_dataset_split_names(source)
    whole = replace(arguments, skip=None, num_samples=None)
    try:
        open_rows(replace(whole, split=split))
    except NoSplit:
        return False
    return common_rows(whole, split) == 0  # a file is all that it names, whatever the split is called


def common_rows(arguments: DataArguments, other_split: str) -> int:
    """The number of rows that are in the split of the arguments and in another one, within `skip` and `num_samples`.

    A file, a pattern or a dataset that was saved alone is all that it names, whatever the split is called, unless its
    tables have a column of splits.
    """
    source, splits = arguments.source, (arguments.split, other_split)
    is_whole, split_of = is_read_whole(source) or (Path(source) / "state.json").is_file(), {}
    if is_table(source):  # in which val is validation
        with reading(arguments.source):
            columns = read_tables(matching(source))
            is_whole = rows_by_split(datasets.Dataset.from_dict(columns), columns, source) is None
        split_of = SPLIT_OF_NAME
    names = {name for split in splits for name in split_names(split)}
    parts = {name: "" if is_whole else split_of.get(name, name) for name in names}
    if {parts[name] for name in split_names(splits[0])}.isdisjoint(parts[name] for name in split_names(splits[1])):
        return 0
    whole = replace(arguments, skip=None, num_samples=None)
    lengths = {name: len(open_rows(replace(whole, split=name))) for name in names}
    taken = []
    for split in splits:
        slices = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
        rows = [(parts[part.splitname], row) for part in slices for row in range(part.from_, part.to)]
        taken.append(set(rows[arguments.taken_rows]))
    return len(taken[0] & taken[1])


def _require_one_split(column: pyarrow.ChunkedArray, source: str) -> None:
    """Raises a ValueError of a column `split` with training and test: only those of tables and metadata are read."""
    names = {str(name).strip().lower() for name in column.unique().to_pylist()}
    if len(names) > 1 and names <= SPLIT_OF_NAME.keys():
        raise ValueError(
            f"{source} has rows of several splits in its column split ({', '.join(sorted(names))}), which only tables "
            "(.csv, .json, .jsonl) support: write the rows of each split into separate files, such as "
            "train.parquet and test.parquet in one folder"
        )


def _files_of_folder(arguments: DataArguments, builder: str) -> dict[str, list[str]]:
    """The files of each split that is asked for: as the folder's README.md has them, or by their names, as `datasets`
    reads these. A warning counts the files that are not read."""
    folder, names = os.path.abspath(arguments.source), split_names(arguments.split)
    paths = sorted(files_in(folder))
    files = [path for path in paths if BUILDERS.get(suffix_of(path)) == builder and not is_cache(path)]
    by_split = splits_in_readme(folder) or _by_name(files) or {"train": files}
    warn_of_unread(folder, sorted(set(paths) - {"README.md", *chain.from_iterable(by_split.values())}))
    _require_splits(arguments.source, arguments.split, names, by_split)
    for name, other in ((name, other) for name in names for other in by_split if other != name):
        both = set(by_split[name]).intersection(by_split[other])
        if both:
            raise ValueError(
                f"{os.path.join(folder, min(both))} is in both splits {name} and {other} of {arguments.source} by its "
                "name: rename it, so that no test data are trained on"
            )
    return {name: [os.path.join(folder, path) for path in by_split[name]] for name in names}


def is_cache(path: str) -> bool:
    """Whether a file is a cache of `datasets`."""
    return os.path.basename(path).startswith("cache-") and path.endswith(".arrow")


def splits_in_readme(folder: str) -> dict[str, list[str]] | None:
    """The paths of each split of the default configuration, as a dataset on the Hub describes it."""
    if not os.path.isfile(os.path.join(folder, "README.md")):
        return None
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(os.path.join(folder, "README.md")).data)
    name = configs.get_default_config_name()
    if configs and name is None:
        raise ValueError(
            f"{folder}/README.md has several configurations, {', '.join(configs)}: name the files of one by a pattern"
        )
    if name is None or "data_files" not in configs[name]:
        return None
    patterns = sanitize_patterns(configs[name]["data_files"])
    by_split = {
        str(split): DataFilesList.from_patterns(names, base_path=glob.escape(folder))
        for split, names in patterns.items()
    }
    return {split: [os.path.relpath(file, folder) for file in files] for split, files in by_split.items()}


def _by_name(paths: Sequence[str]) -> dict[str, list[str]]:
    """The files of each split: by names as `train-00000-of-00002`, or else by words of folders, or else of files."""
    ways = (
        lambda path: re.findall(r"^(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\b", os.path.basename(path)),
        lambda path: _splits_in(os.path.dirname(path)),
        lambda path: _splits_in(os.path.basename(path)),
    )
    for splits_in in ways:
        splits_of = {path: splits_in(path) for path in paths}
        if splits := {split for path_splits in splits_of.values() for split in path_splits}:
            ordered = sorted(splits, key=lambda split: (split != "train", split))
            return {split: [path for path in paths if split in splits_of[path]] for split in ordered}
    return {}


def _splits_in(name: str) -> set[str]:
    return {SPLIT_OF_NAME[word] for word in re.split("[^a-z]+", name.lower()) if word in SPLIT_OF_NAME}
