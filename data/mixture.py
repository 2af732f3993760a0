"""Rows of several datasets, alike enough to be mixed."""

import datasets

from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import IMAGE, load_pairs
from clip_moe.data.sources import mapped


def pairs_with_images(arguments: DataArguments, decode: bool = False) -> datasets.Dataset:
    """Pairs with a caption, whose images are bytes or whole paths.

    Args:
        decode: leave out the images that cannot be read; else nothing is decoded.
    """
    rows = load_pairs(arguments, images=decode)
    feature = rows.features["image"]
    if isinstance(feature, dict):  # with a range
        return rows
    if isinstance(feature, datasets.Value):
        return mapped(
            rows,
            lambda batch: {"image": [path and {"bytes": None, "path": path} for path in batch["image"]]},
            batched=True,
            features=datasets.Features(rows.features | {"image": IMAGE}),
        )
    # Not as images: `datasets` would read those that are only named, and copy them
    return rows.cast_column("image", datasets.Image(decode=False)).cast_column("image", IMAGE)


def with_lists(rows: datasets.Dataset) -> datasets.Dataset:
    """Rows whose captions are lists, also where an image has one."""
    several = datasets.List(datasets.Value("string"))
    if isinstance(rows.features["caption"], datasets.List | datasets.LargeList):
        return rows.cast_column("caption", several)
    return mapped(
        rows,
        lambda batch: {"caption": [[caption] for caption in batch["caption"]]},
        batched=True,
        features=datasets.Features(rows.features | {"caption": several}),
    )
