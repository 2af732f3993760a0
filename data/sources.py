"""Where pairs of images and captions lie, and their rows as they lie there."""

import glob
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from datasets.data_files import DataFilesList, sanitize_patterns
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard

from data.annotations import SPLIT_OF_NAME, holds_list, no_split, open_json, open_tables
from data.arguments import DataArguments
from data.image_folders import METADATA, Pictures, is_picture, open_folder, warn_of_unread
from data.local_data import BUILDERS, TABLES, is_here, suffix_of, without_braces
from data.shards import MEMBER, open_shards
from records.digests import file_stamp
from records.files import files_in, read_json
from records.messages import one_line

logger = logging.getLogger(__name__)

# Workers and processes that share rows in memory as a stream
READERS = 64

Rows = datasets.Dataset | datasets.IterableDataset

_CACHE: ContextVar[dict[str, Any] | None] = ContextVar("_CACHE", default=None)


@contextmanager
def opened_once() -> Iterator[None]:
    """A cache for one look at a recipe or at tasks, in which `once` computes each key once. Data may change between two
    looks."""
    token = _CACHE.set({})
    try:
        yield
    finally:
        _CACHE.reset(token)


def once(key: str, look: Callable[[], Any]) -> Any:
    """The result of `look`, cached under a key within `opened_once`."""
    cache = _CACHE.get()
    if cache is None:
        return look()
    if key not in cache:
        cache[key] = look()
    return cache[key]


def open_rows(arguments: DataArguments, captions: Iterable[str] = ()) -> Rows:
    """The rows of any source but the built-in worlds, with all their columns; of shards, with the image column and the
    caption column, or these captions."""
    with reading(arguments):
        # Which name those of a .json or of shards
        columns = arguments.image_column, *(sorted(captions) or [arguments.caption_column])
        key = arguments.source, arguments.split, arguments.streaming, arguments.indexed
        is_folder = os.path.isdir(arguments.source) or suffix_of(arguments.source) == ".tar"
        by_columns = columns if is_folder or arguments.source.endswith(".json") else ()
        rows = once(f"rows {key} {by_columns}", lambda: _open(arguments, columns))
        if arguments.skip is not None:
            if not arguments.streaming and arguments.skip >= len(rows):
                raise ValueError(f"skip: {arguments.skip} leaves no pair of {arguments.source}, which has {len(rows)}")
            rows = rows.skip(arguments.skip)
        return rows if arguments.num_samples is None else rows.take(arguments.num_samples)


def is_saved(source: str) -> bool:
    """Whether a source is a dataset that `save_to_disk` wrote."""
    return any((Path(source) / name).is_file() for name in ("state.json", "dataset_dict.json"))


@contextmanager
def reading(arguments: DataArguments) -> Iterator[None]:
    """Turns whatever `datasets` and the libraries below it raise into a ValueError of one line that names the source.
    `datasets` itself logs the file that it cannot read."""
    source = arguments.source
    try:
        yield
    except Exception as error:
        if isinstance(error, ConnectionError | datasets.exceptions.DatasetNotFoundError) and not is_here(source):
            # One that cannot be reached may be reached later
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise kind(f"there is no file or folder {source}: {error}") from error
        cause = error
        while isinstance(cause, datasets.exceptions.DatasetGenerationError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, ValueError | OSError) and source in str(cause):
            raise cause from None
        name = "" if type(cause) is ValueError else f"{type(cause).__name__}: "
        raise ValueError(f"{source} cannot be read: {name}{one_line(cause)}") from error


def _open(arguments: DataArguments, columns: Sequence[str]) -> Rows:
    source, split, streaming = arguments.source, arguments.split, arguments.streaming
    rows = None  # in memory
    if source.endswith(".json"):
        rows = open_json(Path(source), split, arguments.image_column, arguments.caption_column)
    elif suffix_of(source) in TABLES and not os.path.isdir(source):
        rows = _of_splits(open_tables(_matching(source), split), split, source)
    elif is_saved(source):
        rows = _open_saved(arguments)
    elif os.path.isdir(source) and builder_of(source, arguments.image_column) is None:
        parts = {name: part.rows for name, part in pictures_of(source).items()}
        rows = _of_splits(parts, split, source)
    if rows is not None:
        return rows.to_iterable_dataset(num_shards=min(READERS, max(len(rows), 1))) if streaming else rows
    if os.path.isfile(source) and suffix_of(source) not in BUILDERS:
        raise ValueError(
            f"{source} is a file that holds no pairs: name a folder, a dataset on the Hub, or files that end in "
            f"{', '.join([*BUILDERS, *TABLES])} or .json"
        )
    if not os.path.isdir(source) and suffix_of(source) not in BUILDERS:
        return datasets.load_dataset(source, split=split, streaming=streaming)
    builder, by_split = split_files(arguments)
    if builder == "webdataset":
        return _open_shards(by_split, arguments, columns)
    if arguments.indexed:
        raise ValueError(f"indexed goes with .tar shards, not with {builder} files")
    files = [file for files in by_split.values() for file in files]
    # `datasets` takes file names for patterns
    patterns = {name: [glob.escape(file) for file in files] for name, files in by_split.items()}
    # `datasets` takes a file of the same name and time for the one whose rows it has kept: any setting is in their key
    options = {"data_files": patterns, "description": datasets.fingerprint.Hasher.hash(list(map(file_stamp, files)))}
    return datasets.load_dataset(builder, split=split, streaming=streaming, **options)


def _open_shards(by_split: dict[str, list[str]], arguments: DataArguments, columns: Sequence[str]) -> Rows:
    split = arguments.split
    if arguments.streaming and set("[+").intersection(split):
        raise ValueError(f"a stream has no part of a split: {split}")
    parts = {
        name: open_shards(files, columns, list(map(file_stamp, files)), arguments.streaming)
        for name, files in by_split.items()
    }
    return parts[split] if split in parts else _of_splits(parts, split, arguments.source)


def _matching(source: str) -> list[str]:
    """The files of a pattern, in which braces may stand for several. Raises FileNotFoundError where there are none."""
    if os.path.isfile(source):
        return [source]
    files: list[str] = []
    for pattern in without_braces(source):
        matching = sorted(glob.glob(pattern, recursive=True))
        if not matching:  # also where others are there: one of them may be lost
            raise FileNotFoundError(f"no file matches {pattern}")
        files += matching
    return list(dict.fromkeys(files))


def no_column(source: str, missing: Iterable[str], columns: Iterable[str]) -> str:
    """An error's text. Names are in quotes, since they may begin or end with a space."""
    missing, columns = (", ".join(map(repr, names)) for names in (missing, columns))
    return f"{source} has no column {missing}; its columns are {columns}"


def named_images(column: pyarrow.ChunkedArray) -> list[str]:
    """The files of images that a column only names: as texts, or as paths without bytes, which are not read here."""
    names = []
    for chunk in column.chunks:
        if pyarrow.types.is_struct(chunk.type):
            if chunk.type.get_field_index("path") < 0:
                continue
            chunk = chunk.field("path").filter(chunk.field("bytes").is_null())
        elif not is_text(chunk.type):
            continue
        names += filter(None, chunk.to_pylist())
    return names


def is_text(kind: pyarrow.DataType) -> bool:
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)


def named_files_hash(rows: datasets.Dataset) -> str:
    """The hash of what the files that rows only name are now: neither their names nor the rows tell."""
    paths = named_images(rows.data.column("image"))
    return datasets.fingerprint.Hasher.hash([os.path.isfile(path) and file_stamp(path) for path in paths])


def split_files(arguments: DataArguments) -> tuple[str, dict[str, list[str]]]:
    """The builder of `datasets` for a pattern or a folder, "csv" for one of tables, and the files of each split that is
    asked for.
    """
    source = arguments.source
    # The splits in `train`, `train[:10%]` and `train+test`
    names = [part.partition("[")[0].strip() for part in arguments.split.split("+")]
    if not os.path.isdir(source):
        return BUILDERS.get(suffix_of(source), "csv"), {names[0]: _matching(source)}
    return once(f"files {source} {names}", lambda: _files_of_folder(arguments, names))


def builder_of(folder: str, image_column: str) -> str | None:
    """The builder of `datasets` for the files of a folder; None: pictures, beside which img2dataset leaves parquet
    files without images."""
    files = [os.path.join(folder, path) for path in files_in(folder) if os.path.basename(path) not in METADATA]
    suffixes = set(map(suffix_of, files))
    builder = next((name for suffix, name in BUILDERS.items() if suffix in suffixes), None)
    if builder == "parquet" and any(map(is_picture, files)):
        first = min(file for file in files if suffix_of(file) == ".parquet")
        return builder if image_column in pyarrow.parquet.read_schema(first).names else None
    return builder


def pictures_of(folder: str) -> dict[str, Pictures]:
    """See `data.image_folders.open_folder`."""
    return once(f"pictures {folder}", lambda: open_folder(folder))


def _of_splits(parts: Mapping[str, datasets.Dataset], split: str, source: str) -> datasets.Dataset:
    """The rows of a split, of a slice as `train[:10%]`, or of several as `train+test`."""
    if not parts.keys() >= {part.partition("[")[0].strip() for part in split.split("+")}:
        raise ValueError(no_split(source, split, parts))
    slices = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in parts.items()})
    chosen = [parts[part.splitname].select(range(part.from_, part.to)) for part in slices]
    return chosen[0] if len(chosen) == 1 else datasets.concatenate_datasets(chosen)


def _files_of_folder(arguments: DataArguments, names: list[str]) -> tuple[str, dict[str, list[str]]]:
    source = arguments.source
    builder = builder_of(source, arguments.image_column)
    if builder is None:
        parts = pictures_of(source)
        if not parts.keys() >= set(names):
            raise ValueError(no_split(source, arguments.split, parts))
        return "pictures", {name: parts[name].files for name in names}
    by_split = _splits(os.path.abspath(source), builder)
    if not by_split.keys() >= set(names):
        raise ValueError(no_split(source, arguments.split, by_split))
    for name, other in itertools.product(names, by_split):
        both = set(by_split[name]).intersection(by_split[other]) if other != name else set()
        if both:
            raise ValueError(
                f"by its name, {min(both)} is in the split {name} and in the split {other} of {source}: rename it, so "
                "that nothing is trained on what is tested"
            )
    return builder, {name: by_split[name] for name in names}


def _splits(folder: str, builder: str) -> dict[str, list[str]]:
    """The files of a folder by split: as its README.md has them, or by their names, as `datasets` reads these. What is
    not read is counted and told."""
    paths = sorted(files_in(folder))
    files = [
        path for path in paths if BUILDERS.get(suffix_of(path)) == builder and not Path(path).name.startswith("cache-")
    ]
    by_split = _of_readme(folder)
    for splits_of in (_of_shard, _of_folders, _of_file):
        if by_split is None:
            found = [(split, path) for path in files for split in splits_of(path)]
            names = sorted({split for split, _ in found}, key=lambda split: (split != "train", split))
            by_split = {split: [path for of, path in found if of == split] for split in names} or None
    by_split = by_split or {"train": files}
    warn_of_unread(folder, sorted(set(paths).difference(["README.md"], *by_split.values())))
    return {split: [os.path.join(folder, path) for path in of_split] for split, of_split in by_split.items()}


def _of_readme(folder: str) -> dict[str, list[str]] | None:
    """The paths of each split of the default configuration, as a dataset on the Hub describes it."""
    if not os.path.isfile(os.path.join(folder, "README.md")):
        return None
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(os.path.join(folder, "README.md")).data)
    name = configs.get_default_config_name()
    if configs and name is None:
        raise ValueError(
            f"{folder}/README.md describes the datasets {', '.join(configs)}: name the files of one by a pattern"
        )
    if name is None or "data_files" not in configs[name]:
        return None
    patterns = sanitize_patterns(configs[name]["data_files"])
    found = {split: DataFilesList.from_patterns(of, base_path=glob.escape(folder)) for split, of in patterns.items()}
    return {str(split): [os.path.relpath(file, folder) for file in files] for split, files in found.items()}


def _of_shard(path: str) -> list[str]:
    match = re.match(r"(?:.*/)?(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\b", path)
    return [match[1]] if match else []


def _of_folders(path: str) -> list[str]:
    return _of_words(os.path.dirname(path))


def _of_file(path: str) -> list[str]:
    return _of_words(os.path.basename(path))


def _of_words(name: str) -> list[str]:
    words = re.split("[^a-z]+", name.lower())
    return list(dict.fromkeys(SPLIT_OF_NAME[word] for word in words if word in SPLIT_OF_NAME))


def _open_saved(arguments: DataArguments) -> datasets.Dataset:
    """A dataset of `save_to_disk`, which may know its split, or several by split."""
    rows = datasets.load_from_disk(arguments.source)
    if isinstance(rows, dict):
        rows = _of_splits(rows, arguments.split, arguments.source)
    elif str(rows.split or arguments.split) != arguments.split or set("[+") & set(arguments.split):
        raise ValueError(no_split(arguments.source, arguments.split, [rows.split or "a whole one"]))
    return rows


def read_entries(arguments: DataArguments) -> list[Any]:
    """The entries of a .json in ShareGPT4V's or LLaVA's layout, from before `skip` and `num_samples`."""
    entries = read_json(Path(arguments.source))
    if not isinstance(entries, list):
        raise ValueError(f"{arguments.source} is no list of entries, as ShareGPT4V's and LLaVA's are")
    if arguments.split != "train":
        raise ValueError(no_split(arguments.source, arguments.split, ["train"]))
    return entries


def source_files(arguments: DataArguments) -> list[str]:
    """The files of a local source that hold its split, in order: without images that only its rows name."""
    source = Path(os.path.abspath(arguments.source))
    if not source.is_dir():
        return _matching(str(source)) if is_here(str(source)) else []
    saved = _saved(arguments)
    if saved is not None:  # `datasets` keeps its caches in the same folder
        with reading(arguments):
            files = [file["filename"] for file in datasets.load_from_disk(str(saved)).cache_files]
        return [str(saved / "state.json"), str(saved / "dataset_info.json"), *files]
    try:
        _, splits = split_files(arguments)
    except FileNotFoundError:
        return []
    return sorted({file for split in splits.values() for file in split})


def source_images(arguments: DataArguments) -> list[str]:
    """The files of images that the rows of a local source only name: in a column of texts, or by paths without bytes,
    as parquet and Arrow files may have them."""
    column, saved = arguments.image_column, _saved(arguments) is not None
    is_json = arguments.source.endswith(".json")
    builder, by_split = ("", {}) if saved or is_json else split_files(arguments)
    if builder in ("pictures", "webdataset"):
        return []  # its files hold the images or are these
    if builder == "parquet":
        with reading(arguments):
            names = [name for files in by_split.values() for file in files for name in _names_in_parquet(file, column)]
    elif is_json and holds_list(arguments.source):  # conversations may be without an image
        with reading(arguments):
            entries = read_entries(arguments)[arguments.taken_rows]
        names = [entry.get("image") for entry in entries if isinstance(entry, dict)]
        names = [name for name in names if isinstance(name, str)]
    else:
        # A stream has no slices and no rows to leave out, so that those of all pairs count
        streaming = not saved and (arguments.streaming or set("[+").isdisjoint(arguments.split))
        taken = {} if saved or arguments.skip is None else {"skip": None, "num_samples": None}
        rows = open_rows(replace(arguments, streaming=streaming, in_memory=False, indexed=False, **taken))
        if column not in (rows.column_names or [column]):
            return []
        names = named_images(rows.data.column(column)) if saved else _names(rows, column)
    files = dict.fromkeys(member[1] if (member := MEMBER.fullmatch(name)) else name for name in names if name)
    return [os.path.join(arguments.image_root or "", name) for name in files]


def _names_in_parquet(path: str, column: str) -> Iterator[str]:
    """As `named_images`. Parts of a file in which every image has bytes are not read."""
    with pyarrow.parquet.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            chunks = [group.column(index) for index in range(group.num_columns)]
            of_bytes = next((chunk for chunk in chunks if chunk.path_in_schema == f"{column}.bytes"), None)
            is_whole = of_bytes is not None and of_bytes.statistics is not None and of_bytes.statistics.null_count == 0
            kind = file.schema_arrow.field(column).type if column in file.schema_arrow.names else pyarrow.null()
            if (pyarrow.types.is_struct(kind) or is_text(kind)) and not is_whole:
                yield from named_images(file.read_row_group(number, [column]).column(column))


def _names(rows: Rows, column: str) -> list[str]:
    """The names of images in rows, which have bytes instead if the first ones have."""
    if isinstance((rows.features or {}).get(column), datasets.Image):
        rows = rows.cast_column(column, datasets.Image(decode=False))
    names: list[str] = []
    for batch in rows.select_columns([column]).iter(1000):
        names += [image for image in batch[column] if image and isinstance(image, str)]
        files = [image for image in batch[column] if isinstance(image, dict) and image["bytes"] is None]
        names += [image["path"] for image in files if image["path"]]
        if not names:
            break
    return names


def _saved(arguments: DataArguments) -> Path | None:
    """The folder of a dataset that `save_to_disk` wrote, if the source is one."""
    folders = Path(arguments.source), Path(arguments.source) / arguments.split
    return next((folder for folder in folders if (folder / "state.json").is_file()), None)
