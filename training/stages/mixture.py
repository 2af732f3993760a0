"""A stage that mixes several datasets."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar, Literal

import datasets
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.identity import identity
from data.pairs import load_pairs, mapped
from data.sources import DataArguments
from records.digests import value_digest
from training.context import Context
from training.estimates import unknown
from training.settings import STRICT
from training.stages.base import NumberedData, Stage

# An image as an image column holds it: its bytes, or where they are
IMAGE = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}


@dataclass(config=STRICT, kw_only=True)
class MixtureStage(Stage):
    """Pairs of several datasets, drawn by weights; others use it as their `data.source`.

    Images in files of their own and those of `indexed` shards stay where they are; others are copied. Nothing is
    decoded: what reads the mixture skips what cannot be read, or with `data.indexed` replaces it.
    """

    kind: ClassVar[str] = "mixture"
    main_process_only: ClassVar[bool] = True

    # The datasets, each as `data` of other stages.
    sources: list[NumberedData] = Field(min_length=2)
    # How often the next pair is one of each of them, relative to each other.
    weights: list[Annotated[float, Field(gt=0)]]
    # When an epoch ends. "all_exhausted": when each pair of all was there, some several times; "first_exhausted": when
    # each pair of one of them was there.
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        parts = [_pairs(arguments) for arguments in inputs.sources]
        if len({str(part.features["caption"]) for part in parts}) > 1:
            parts = [_with_lists(part) for part in parts]
        shares = [weight / max(self.weights) for weight in self.weights]
        probabilities = [share / sum(shares) for share in shares]
        mixture = datasets.interleave_datasets(
            parts, probabilities, seed=context.seed, stopping_strategy=self.stopping_strategy
        )
        mixture.save_to_disk(directory)
        sizes = ", ".join(f"{len(part)} of {source.source}" for part, source in zip(parts, self.sources, strict=True))
        print(f"{self.name}: {len(mixture)} pairs, drawn from {sizes}")

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        identities = {f"sources.{number}": identity(source) for number, source in enumerate(inputs.sources)}
        return {setting: value_digest(what) for setting, what in identities.items() if what is not None}

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        return super().cost(inputs) | {"disk": unknown("only mixing tells how many pairs there are")}


def _pairs(arguments: DataArguments) -> datasets.Dataset:
    """Pairs with a caption, whose images are bytes or whole paths."""
    rows = load_pairs(arguments, images=False)
    feature = rows.features["image"]
    if isinstance(feature, datasets.Value):
        return mapped(
            rows,
            lambda batch: {"image": [path and {"bytes": None, "path": path} for path in batch["image"]]},
            batched=True,
            features=datasets.Features(rows.features | {"image": IMAGE}),
        )
    # Not as images: `datasets` would read those that are only named, and copy them
    return rows.cast_column("image", datasets.Image(decode=False)).cast_column("image", IMAGE)


def _with_lists(rows: datasets.Dataset) -> datasets.Dataset:
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
