"""Pictures that a model names right and wrong, for a person to judge: of a retrieval or zero-shot task."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from clip_moe.data.images import decode_image
from clip_moe.data.texts import present_captions
from clip_moe.engine.markdown import escape
from clip_moe.evaluation.measures import Embeds, embed_both
from clip_moe.evaluation.retrieval import TIE, Search
from clip_moe.evaluation.task import Task

# Number of hits and of misses; pixels of the longer side
NUM_SHOWN, SIDE = 3, 192


class Example(NamedTuple):
    """An image, the text that a model finds most similar to it, and the image's own."""

    image: Any
    said: str
    captions: Sequence[str]

    @property
    def is_hit(self) -> bool:
        return self.said in self.captions


def find_examples(task: Task, model: Embeds) -> list[Example]:
    """Three hits and three misses, fewer where there are no more, in an order that is the same for all models.

    Args:
        task: a retrieval task, or a zero-shot task of one template.
    """
    rows, _ = task.load()
    captions = [present_captions(caption) for caption in rows["caption"]]
    names = list(task.classes) or list(dict.fromkeys(text for image_captions in captions for text in image_captions))
    (template,) = task.templates or ["{}"]
    texts = [template.format(name) for name in names]
    images, candidates = embed_both(model, rows, texts)
    images = model.image_side(images, model.image_weights(rows))
    candidates = model.text_side(candidates, model.weights([texts]))
    column_of, best = {name: column for column, name in enumerate(names)}, []
    pairs = [(row, column_of[text]) for row, own in enumerate(captions) for text in own if text in column_of]
    for chunk in Search(images, candidates, *np.transpose(pairs)).chunks(range(len(images))):
        chunk.similarities[chunk.rows, chunk.columns] -= TIE  # a tie is a miss, as in the scores
        best += chunk.similarities.argmax(axis=1).tolist()
    is_hit = np.array([names[said] in own for said, own in zip(best, captions, strict=True)])
    order = np.random.default_rng(0).permutation(len(rows))
    chosen = [row for hits in (is_hit, ~is_hit) for row in order[hits[order]][:NUM_SHOWN].tolist()]
    return [Example(rows[row]["image"], names[best[row]], captions[row]) for row in chosen]


def examples_table(examples: Sequence[Example]) -> tuple[str, Mapping[str, Callable[[Path], None]]]:
    """A markdown table of pictures, what the model said and what their captions say; and the pictures' files: name ->
    what draws it."""
    pictures, lines = {}, ["| picture | the model says | its caption |", "|---|---|---|"]
    for number, example in enumerate(examples, 1):
        name = f"{'hit' if example.is_hit else 'miss'}_{number}.png"
        pictures[name] = partial(_draw, example.image)
        own = "the same" if example.is_hit else " · ".join(example.captions)
        lines.append(f"| ![picture {number}]({name}) | {escape(example.said)} | {escape(own)} |")
    return "\n".join(lines), pictures


def _draw(image: Any, path: Path) -> None:
    picture = decode_image(image)
    picture.thumbnail((SIDE, SIDE))
    scale = SIDE // max(picture.size)
    picture = picture.resize([scale * length for length in picture.size], PIL.Image.Resampling.NEAREST)
    picture.save(path, format="png")
