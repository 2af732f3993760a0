"""ImageNet with names of its classes in other languages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import ClassVar

from datasets import Dataset

from clip_moe.engine.digests import file_stamp, short_digest
from clip_moe.engine.files import read_json
from clip_moe.evaluation.benchmarks.layouts import Layout
from clip_moe.evaluation.class_names import are_ids

PROMPTS = "nllb_dist13b_prompts.json"


@cache
def stamp_of_images(layout: Layout, folder: Path, split: str) -> str:
    """One look at the images for the tasks of all languages; `find_tasks` clears it, as images may change later."""
    return layout.stamp(folder, split)


@lru_cache(maxsize=2)
def _content(file: Path, stamp: str) -> dict[str, list]:
    return read_json(file)


@dataclass(frozen=True, kw_only=True)
class BabelImageNet(Layout):
    """ImageNet in one of its layouts, and beside it a file that has for each language numbers of classes and their
    names (Babel-ImageNet, https://arxiv.org/abs/2306.08658, benchmark/data/babel_imagenet.py of
    gregor-ge/Babel-ImageNet). Its authors' translated prompts are read if they lie there; else the name is the prompt.

    Args:
        language: the code, in small letters, of the language whose names count.
        imagenet: layouts of ImageNet.
    """

    files: Sequence[str] = ("babel_imagenet*.json",)
    language: str = "de"
    imagenet: Sequence[Layout] = ()
    content: ClassVar[str] = "a list of numbers and one of names for each language"

    @property
    def shape(self) -> str:
        return (
            f"babel_imagenet.json or babel_imagenet-298.json of its authors, and their {PROMPTS} if translated prompts "
            "are wanted, beside ImageNet as imagenet1k has it"
        )

    def fits(self, folder: Path, split: str) -> bool:
        return super().fits(folder, split) and any(layout.fits(folder, split) for layout in self.imagenet)

    def stamp(self, folder: Path, split: str) -> str:
        images = stamp_of_images(self._layout(folder, split), folder, split)
        return short_digest([images, [*self._names(folder, split)], *self.names_and_templates(folder, split)])

    def names_and_templates(self, folder: Path, split: str) -> tuple[list[str], list[str]]:
        translated = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
        prompts = translated.get(self.language.upper(), ["{}"])
        return list(self._names(folder, split).values()), prompts

    def rows(self, folder: Path, split: str) -> Dataset:
        """All images, so that they are embedded once for all languages; the label of those without a name is -1."""
        layout, names = self._layout(folder, split), self._names(folder, split)
        folder_names = layout.class_names(folder, split)
        if folder_names and not are_ids(folder_names):
            raise ValueError(
                f"{folder} calls classes {folder_names[0]!r} and the like, but Babel-ImageNet's numbers have the order "
                "of WordNet's ids: call each folder by its own, such as n01440764"
            )
        rows = layout.rows(folder, split)
        number = len(set(rows["label"]))
        if number != 1000:
            raise ValueError(f"{folder} needs images of all 1000 classes of ImageNet, but has {number} classes")
        label_of = {number: label for label, number in enumerate(names)}
        labels = [label_of.get(number, -1) for number in rows["label"]]
        captions = [names.get(number, "none") for number in rows["label"]]
        return rows.remove_columns("label").add_column("label", labels).add_column("caption", captions)

    def _layout(self, folder: Path, split: str) -> Layout:
        return next(layout for layout in self.imagenet if layout.fits(folder, split))

    def _names(self, folder: Path, split: str) -> dict[int, str]:
        """Number of a class -> its name."""
        files, language = self.annotations(folder, split), self.language.upper()
        contents = {file: _content(file, file_stamp(file)) for file in files}
        for content in contents.values():
            if language in content:
                numbers, names = content[language]
                return dict(zip(numbers, names, strict=True))
        languages = sorted(contents[files[0]])
        raise ValueError(
            f"{files[0]} has no names in {language}, but in {len(languages)} other languages, from {languages[0]} to "
            f"{languages[-1]}: measure one of these, or add its authors' babel_imagenet-298.json"
        )
