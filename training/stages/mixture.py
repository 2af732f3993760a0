"""A stage that mixes several datasets."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar, Literal

import datasets
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from data.identity import identity
from data.pairs import load_pairs, with_image_root
from data.sources import DataArguments
from records.provenance import value_digest
from training.context import Context
from training.estimates import Expected, unknown
from training.settings import STRICT
from training.stages.base import NumberedData, Stage, inherited

# Where an epoch takes this many times the pairs, the weights are a mistake
MOST_DRAWS = 1000
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

    @model_validator(mode="after")
    def _check(self):
        if len(self.weights) != len(self.sources):
            raise ValueError(f"weights: {len(self.weights)} weights for {len(self.sources)} sources")
        for number, source in enumerate(self.sources):
            if source.in_memory:
                raise ValueError(f"sources.{number}.in_memory: a mixture keeps no pair in memory")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        parts = [_pairs(arguments) for arguments in inputs.sources]
        self._require_an_end([len(part) for part in parts])
        if len({str(part.features["caption"]) for part in parts}) > 1:
            parts = [_with_lists(part) for part in parts]
        probabilities = self._probabilities()
        mixture = datasets.interleave_datasets(
            parts, probabilities, seed=context.seed, stopping_strategy=self.stopping_strategy
        )
        mixture.save_to_disk(directory)
        sizes = ", ".join(f"{len(part)} of {source.source}" for part, source in zip(parts, self.sources, strict=True))
        print(f"{self.name}: {len(mixture)} pairs, drawn from {sizes}")

    def _probabilities(self) -> list[float]:
        shares = [weight / max(self.weights) for weight in self.weights]
        return [share / sum(shares) for share in shares]

    def _require_an_end(self, sizes: list[int]) -> None:
        """
        Raises:
            ValueError: all pairs would be there only after very many draws.
        """
        draws = [size / max(share, 1e-300) for size, share in zip(sizes, self._probabilities(), strict=True)]
        if self.stopping_strategy == "all_exhausted" and max(draws) > MOST_DRAWS * sum(sizes):
            rare = draws.index(max(draws))
            raise ValueError(
                f"{self.name}.weights.{rare}: all {sizes[rare]} pairs of {self.sources[rare].source} would be there "
                f"only after {max(draws):.2g} draws of {sum(sizes)} pairs: raise its weight, or take stopping_strategy "
                "first_exhausted"
            )

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        found = {f"sources.{number}": identity(source) for number, source in enumerate(inputs.sources)}
        return {setting: value_digest(what) for setting, what in found.items() if what is not None}

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        for number, source in enumerate(inputs.sources):
            if source.pairs == 0:
                yield f"sources.{number}", "it has no pairs"
        sizes = [source.pairs for source in inputs.sources]
        if all(type(size) is int for size in sizes):
            self._require_an_end(sizes)

    def output_config(self, inputs: SimpleNamespace) -> Expected:
        """Where one source has lists of captions, all have."""
        captions = {source.captions for source in inputs.sources}
        found = None if None in captions else captions.pop() if len(captions) == 1 else "lists"
        return replace(inherited(self, inputs), captions=found)

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        return super().cost(inputs) | {"disk": unknown("only mixing tells how many pairs there are")}


def _pairs(arguments: DataArguments) -> datasets.Dataset:
    """Pairs with a caption, whose images are bytes or paths that begin with their `image_root`."""
    rows = with_image_root(load_pairs(arguments, images=False), arguments)
    feature = rows.features["image"]
    if isinstance(feature, datasets.Value):
        return rows.map(
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
    return rows.map(
        lambda batch: {"caption": [[caption] for caption in batch["caption"]]},
        batched=True,
        features=datasets.Features(rows.features | {"caption": several}),
    )
