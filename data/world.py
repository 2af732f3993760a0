"""A world: captioned pictures that are drawn, so that nothing needs a download."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value, concatenate_datasets

from clip_moe.data.drawing import png
from clip_moe.engine.provenance import installed_versions

if TYPE_CHECKING:
    from transformers import CLIPImageProcessorPil, CLIPTokenizer

SPLITS = {"train": 0, "test": 1}  # split -> the number that seeds its pictures
# Rows that are drawn before they become columns: as dictionaries, they take several times the memory
PICTURES_AT_ONCE = 1000

# The number of a row -> its subject, and the random numbers that draw the picture and the captions
Subjects = Callable[[int], tuple[Any, np.random.Generator]]


def each_in_turn(kinds: Sequence[Any], split: str, seed: int) -> Subjects:
    """The subjects of a world of facts: every kind once, in a random order, then every kind once more."""

    @cache
    def order(turn: int) -> np.ndarray:
        return np.random.default_rng([SPLITS[split], seed, turn]).permutation(len(kinds))

    def subject(index: int) -> tuple[Any, np.random.Generator]:
        kind = kinds[order(index // len(kinds))[index % len(kinds)]]
        return kind, np.random.default_rng([len(SPLITS) + SPLITS[split], seed, index])

    return subject


@dataclass(frozen=True, kw_only=True)
class World:
    """Captioned pictures of kinds, as `data.source`: one of `clip_moe.data.worlds.WORLDS`, or `package.module:OBJECT`.

    Args:
        name: the pictures' name in errors and titles, such as "icons".
        kind_set: name of a set -> its kinds, by a dictionary, or by a function that raises a ValueError for other
            names; "all" has to be one.
        draw: (subject, split, random numbers, image_size) -> picture, (image_size, image_size, 3) uint8, and its
            attributes.
        caption: (subject, style, random numbers) -> a caption.
        attributes: names of the attributes, the first of which is `kind`.
        texts: captions that the tokenizer is learned from.
        vocabulary: the tokenizer's greatest number of tokens.
        caption_styles: values of `data.captions`.
        image_size: pixels a side, by default.
        versions: package -> version, for installed packages that the pictures follow from.
        tested_as: what a test shows of each kind, for the title of a task.
        subjects: (kinds, split, seed) -> the subject of each row.
        examples: two captions for a model's card, of a built-in world.
    """

    name: str
    kind_set: Mapping[str, Sequence[Any]] | Callable[[str], Sequence[Any]]
    draw: Callable[[Any, str, np.random.Generator, int], tuple[np.ndarray, Mapping[str, str]]]
    caption: Callable[[Any, str, np.random.Generator], str]
    attributes: Sequence[str]
    texts: Callable[[], Iterable[str]]
    vocabulary: int
    caption_styles: Sequence[str] = ("web",)
    image_size: int = 32
    versions: Callable[[], dict[str, str]] = dict
    tested_as: str = "with its caption"
    subjects: Callable[[Sequence[Any], str, int], Subjects] = each_in_turn
    examples: Sequence[str] = ()

    def kinds(self, name: str) -> Sequence[Any]:
        """The kinds of a set. Raises a ValueError where there is none of this name."""
        if not isinstance(self.kind_set, Mapping):
            return self.kind_set(name)
        if name not in self.kind_set:
            raise ValueError(f"{self.name} have no set of kinds {name!r}, only {', '.join(self.kind_set)}")
        return self.kind_set[name]

    def require(self, split: str, captions: str) -> None:
        """Raises a ValueError of a split or a style of captions that the world does not have."""
        for setting, value, known in (("split", split, SPLITS), ("captions", captions, self.caption_styles)):
            if value not in known:
                raise ValueError(f"{self.name} have no {setting} {value!r}, only {', '.join(known)}")

    def load(
        self,
        split: str,
        captions: str,
        num_samples: int,
        kinds: Sequence[Any] | None = None,
        seed: int = 0,
        captions_per_image: int = 1,
    ) -> Dataset:
        """Captioned pictures, which follow from these arguments to the bit.

        Args:
            split: "train" or "test".
            captions: one of `caption_styles`.
            num_samples: how many rows; the first ones are the same for any number.
            kinds: as `kinds` gives them; None: all.
            seed: other rows for another one.
            captions_per_image: with more than one, `caption` is a list.

        Returns:
            Rows of `image` (RGB, `image_size` squared), `caption` and one column for each of `attributes`.
        """
        self.require(split, captions)
        subject_of = self.subjects(self.kinds("all") if kinds is None else kinds, split, seed)

        def row(index: int) -> dict[str, Any]:
            subject, rng = subject_of(index)
            image, attributes = self.draw(subject, split, rng, self.image_size)
            texts = [self.caption(subject, captions, rng) for _ in range(captions_per_image)]
            return {"image": png(image), "caption": texts if captions_per_image > 1 else texts[0], **attributes}

        text = Value("string")
        features = {"image": Image(), "caption": List(text) if captions_per_image > 1 else text}
        features = Features(features | dict.fromkeys(self.attributes, text))
        starts = range(0, num_samples, PICTURES_AT_ONCE)
        parts = [range(start, min(start + PICTURES_AT_ONCE, num_samples)) for start in starts]
        return concatenate_datasets([Dataset.from_list(list(map(row, part)), features) for part in parts])

    def build_tokenizer(self, context_length: int) -> "CLIPTokenizer":
        """A CLIP tokenizer that is learned from the world's captions."""
        from clip_moe.data.tokenizer import learn_tokenizer

        return learn_tokenizer(self.texts(), self.vocabulary, context_length)


def build_image_processor(image_size: int) -> "CLIPImageProcessorPil":
    """Scales images to `image_size` and to [-1, 1]."""
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(
        size={"height": image_size, "width": image_size},
        do_center_crop=False,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def require_packages(world: str, packages: Iterable[str], way_out: str) -> None:
    """Raises a ValueError with the way out if a world's package is missing."""
    installed = installed_versions(packages)
    if missing := [package for package in packages if package not in installed]:
        raise ValueError(f"{world} need {missing[0]}, which is not installed: {way_out}")
