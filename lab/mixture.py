"""Several datasets as one, whose pairs are drawn by weights.

- {name: pairs, stage: lab.mixture:MixtureStage, sources: [{source: symbols}, {source: names}], weights: [3, 1]}
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import PairsStage


@dataclass(config=STRICT, kw_only=True)
class MixtureStage(PairsStage):
    """Pairs of several datasets, drawn by weights; others use it as their `data.source`.

    Images in files of their own and those of `indexed` shards stay where they are; others are copied. Nothing is
    decoded: what reads the mixture skips what cannot be read, or with `data.indexed` replaces it.
    """

    kind: ClassVar[str] = "mixture"

    # The datasets, each as `data` of other stages.
    sources: list[NumberedData] = Field(min_length=2)
    # Relative weight of each dataset in the draw of the next pair.
    weights: list[Annotated[float, Field(gt=0)]]
    # When an epoch ends. "all_exhausted": when each pair of all was there, some several times; "first_exhausted": when
    # each pair of one of them was there.
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"

    @model_validator(mode="after")
    def _check_weights(self):
        if len(self.weights) != len(self.sources):
            raise ValueError(f"weights: {len(self.weights)} of them for {len(self.sources)} sources")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import datasets

        from clip_moe.data.columns import RANGED, TEXTS, mapped
        from clip_moe.data.pairs import pairs_with_images

        def with_lists(rows: datasets.Dataset) -> datasets.Dataset:
            """Rows whose captions are lists, also where an image has one."""
            if not isinstance(rows.features["caption"], datasets.Value):
                return rows.cast_column("caption", TEXTS)
            features = datasets.Features(rows.features | {"caption": TEXTS})
            return mapped(
                rows,
                lambda batch: {"caption": [[caption] for caption in batch["caption"]]},
                batched=True,
                features=features,
            )

        parts = [pairs_with_images(arguments) for arguments in inputs.sources]
        if len({str(part.features["caption"]) for part in parts}) > 1:
            parts = [with_lists(part) for part in parts]
        if any("pixel_range" in part.features["image"] for part in parts):
            parts = [part.cast_column("image", RANGED) for part in parts]
        shares = [weight / max(self.weights) for weight in self.weights]
        probabilities = [share / sum(shares) for share in shares]
        mixture = datasets.interleave_datasets(
            parts, probabilities, seed=context.seed, stopping_strategy=self.stopping_strategy
        )
        mixture.save_to_disk(directory)
        sizes = ", ".join(f"{len(part)} of {source.source}" for part, source in zip(parts, self.sources, strict=True))
        print(f"{self.name}: {len(mixture)} pairs, drawn from {sizes}")

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        from clip_moe.data.identity import identity
        from clip_moe.engine.digests import value_digest

        identities = {f"sources.{number}": identity(source) for number, source in enumerate(inputs.sources)}
        return {setting: value_digest(value) for setting, value in identities.items() if value is not None}
