"""Pairs that the stages of a run share: opened by the main process first, whose caches the others read.

Every process has to call each of these functions.
"""

import datasets

from clip_moe.data.arguments import DataArguments
from clip_moe.data.identity import data_fingerprint
from clip_moe.data.pairs import load_pairs
from clip_moe.data.readable import readable_pairs
from clip_moe.engine.context import Context


def shared_pairs(
    context: Context, arguments: DataArguments, images: bool = True
) -> datasets.Dataset | datasets.IterableDataset:
    """`data.pairs.load_pairs`, with the last pairs kept. The source may be a stage."""
    arguments = context.resolve(arguments)
    key = f"{arguments} {context.identity(arguments)} {images}"
    rows = context.kept("pairs", key, lambda: load_pairs(arguments, images))
    if arguments.is_drawn:  # others are mapped from files
        context.held["drawn"] = rows.data.nbytes
    return rows


def shared_readable(context: Context, rows: datasets.Dataset, arguments: DataArguments) -> datasets.Dataset:
    """The pairs with a readable image, of pairs that were loaded without images."""
    if arguments.is_drawn:
        return rows
    with context.main_process_first():
        return readable_pairs(rows, arguments)[0]


def shared_fingerprint(context: Context, rows: datasets.Dataset, images: bool = True) -> str:
    """`data.identity.data_fingerprint`."""
    with context.main_process_first():
        return data_fingerprint(rows, images)
