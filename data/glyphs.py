"""The glyph world: captioned images that need no download.

An image shows one glyph on a background: a handwritten digit (real pen strokes, from scikit-learn's `load_digits`, the
UCI "Optical Recognition of Handwritten Digits") or a drawn shape, with an ink color, a size, a position, a background
color and a texture. `web` captions are short, partial and now and then wrong; `detailed` ones are several sentences
that name every attribute. Everything follows from the arguments of `load` and `load_minimal_pairs`, to the bit.

    python -m data.glyphs --contact-sheet glyphs.png
"""

import argparse
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from PIL import ImageDraw
from transformers import CLIPTokenizer

from data.drawing import (
    BACKGROUNDS,
    COLORS,
    DIGITS,
    POSITIONS,
    SPLITS,
    TEXTURES,
    article,
    choose,
    distort,
    drawn_rows,
    ground,
    inked,
    photographed,
    place,
    png,
    stroke,
)
from data.tokenizer import learn_tokenizer

SHAPES = ["disc", "square", "triangle", "star", "cross", "heart"]
KINDS = DIGITS + SHAPES
# The domain that models are fine-tuned on; what happens to the other kinds is what fine-tuning forgets.
SEEN_KINDS = ["zero", "two", "four", "six", "eight", "disc", "triangle", "cross", "heart"]
UNSEEN_KINDS = [kind for kind in KINDS if kind not in SEEN_KINDS]
KIND_SETS = {"all": KINDS, "seen": SEEN_KINDS, "unseen": UNSEEN_KINDS, "digit": DIGITS, "shape": SHAPES}

SIZES = {"small": 0.36, "medium": 0.53, "large": 0.72}  # of the image's side
SMALLEST = 4  # pixels, of a glyph's side
ATTRIBUTES = {
    "kind": KINDS,
    "color": list(COLORS),
    "size": list(SIZES),
    "position": list(POSITIONS),
    "background": list(BACKGROUNDS),
    "texture": TEXTURES,
}

TEMPLATES = ["{}", "a {}", "a picture of a {}", "a photo of the {}", "an image with a {} on it"]
CAPTION_STYLES = ("web", "detailed")
WRONG_SHARE = 0.1  # of the web captions with a wrong word


def kind_set(name: str) -> list[str]:
    """The kinds of one of `KIND_SETS`. Raises a ValueError if it is none."""
    if name not in KIND_SETS:
        raise ValueError(f"glyphs have no set of kinds {name!r}, only {', '.join(KIND_SETS)}")
    return KIND_SETS[name]


def load(
    split: str,
    captions: str,
    num_samples: int,
    kinds: Sequence[str] = tuple(KINDS),
    seed: int = 0,
    image_size: int = 32,
    captions_per_image: int = 1,
) -> Dataset:
    """Captioned glyphs.

    Args:
        split: "train" or "test"; no pen stroke is in both.
        captions: "web" or "detailed".
        captions_per_image: with more than one, `caption` is a list.

    Returns:
        Rows of `image` (RGB, `image_size` squared), `caption` and one column for each of `ATTRIBUTES`.

    Raises:
        ValueError: an unknown split, caption style or kind, or an image too small to draw in.
    """
    _check(split, kinds, image_size)
    if captions not in CAPTION_STYLES:
        raise ValueError(f"captions is {captions!r}, must be one of {', '.join(CAPTION_STYLES)}")

    def draw(index: int) -> dict[str, Any]:
        rng = np.random.default_rng([SPLITS[split], seed, index])
        glyph = draw_attributes(rng, kinds)
        image = render(glyph, split, rng, image_size)
        texts = [caption(glyph, captions, rng) for _ in range(captions_per_image)]
        return {"image": png(image), "caption": texts if captions_per_image > 1 else texts[0], **glyph}

    text = Value("string")
    features = Features(
        {
            "image": Image(),
            "caption": List(text) if captions_per_image > 1 else text,
            **dict.fromkeys(ATTRIBUTES, text),
        }
    )
    return drawn_rows(draw, num_samples, features)


def load_minimal_pairs(
    split: str, num_pairs: int, kinds: Sequence[str] = tuple(KINDS), seed: int = 0, image_size: int = 32
) -> Dataset:
    """Pairs of glyphs that differ in exactly one attribute, as MMVP-VLM's pairs of images do.

    Returns:
        Rows of `image_0`, `caption_0`, `image_1`, `caption_1` (detailed, in the same words) and `attribute`, the name
        of the one that differs; all of them are equally frequent.
    """
    _check(split, kinds, image_size)
    rows = []
    names = list(ATTRIBUTES)
    for index in range(num_pairs):
        rng = np.random.default_rng([SPLITS[split] + len(SPLITS), seed, index])
        name = names[index % len(names)]
        first = draw_attributes(rng, kinds)
        values = list(kinds) if name == "kind" else ATTRIBUTES[name]
        second = {**first, name: choose(rng, [value for value in values if value != first[name]])}
        wording = int(rng.integers(2**32))
        row = {"attribute": name}
        for side, glyph in enumerate((first, second)):
            row[f"image_{side}"] = png(render(glyph, split, rng, image_size))
            row[f"caption_{side}"] = caption(glyph, "detailed", np.random.default_rng(wording))
        rows.append(row)
    text = Value("string")
    features = {"image_0": Image(), "caption_0": text, "image_1": Image(), "caption_1": text, "attribute": text}
    return Dataset.from_list(rows, features=Features(features))


def draw_attributes(rng: np.random.Generator, kinds: Sequence[str]) -> dict[str, str]:
    """A random glyph: attribute -> value."""
    return {name: choose(rng, kinds if name == "kind" else values) for name, values in ATTRIBUTES.items()}


def caption(glyph: dict[str, str], style: str, rng: np.random.Generator) -> str:
    """A random caption of a glyph in one of `CAPTION_STYLES`."""
    return _web_caption(glyph, rng) if style == "web" else _detailed_caption(glyph, rng)


def render(glyph: dict[str, str], split: str, rng: np.random.Generator, image_size: int) -> np.ndarray:
    """The picture of a glyph, (image_size, image_size, 3) uint8."""
    mask = stroke(glyph["kind"], split, rng) if glyph["kind"] in DIGITS else _shape(glyph["kind"])
    side = max(SMALLEST, round(SIZES[glyph["size"]] * image_size))
    alpha = place(distort(mask, rng), side, POSITIONS[glyph["position"]], rng, image_size)
    ink = inked(glyph["color"], rng)
    return photographed(ground(glyph, rng, image_size) * (1 - alpha) + ink * alpha, rng)


def build_tokenizer(context_length: int) -> CLIPTokenizer:
    """A CLIP tokenizer that knows every word of the glyph captions."""
    return learn_tokenizer(_all_words(), 2000, context_length)


def draw_samples(path: str | Path, seed: int = 0, columns: int = 8, rows: int = 6, zoom: int = 4) -> None:
    """Draw training images with both captions under each, for a person to judge."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    web, detailed = (load("train", style, columns * rows, seed=seed) for style in CAPTION_STYLES)
    figure, axes = plt.subplots(rows, columns, figsize=(2.6 * columns, 3.3 * rows))
    for axis, first, second in zip(axes.flat, web, detailed, strict=True):
        axis.imshow(first["image"].resize((32 * zoom, 32 * zoom), PILImage.Resampling.NEAREST))
        axis.set_title(f"{first['caption']}\n\n{textwrap.fill(second['caption'], 44)}", fontsize=7)
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=70, format="png")
    plt.close(figure)


def _check(split: str, kinds: Sequence[str], image_size: int) -> None:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, must be one of {', '.join(SPLITS)}")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds has {unknown or 'nothing'}; the glyph world's kinds are {', '.join(KINDS)}")
    if image_size < SMALLEST:
        raise ValueError(f"image_size is {image_size}: glyphs need at least {SMALLEST} pixels")


@cache
def _shape(kind: str) -> PILImage.Image:
    image = PILImage.new("L", (64, 64))
    draw = ImageDraw.Draw(image)
    if kind == "disc":
        draw.ellipse((4, 4, 59, 59), fill=255)
    elif kind == "square":
        draw.rectangle((8, 8, 55, 55), fill=255)
    elif kind == "triangle":
        draw.polygon([(32, 4), (60, 58), (4, 58)], fill=255)
    elif kind == "cross":
        draw.rectangle((24, 4, 39, 59), fill=255)
        draw.rectangle((4, 24, 59, 39), fill=255)
    elif kind == "star":
        angles = np.pi * (np.arange(10) / 5 - 0.5)
        radii = np.where(np.arange(10) % 2 == 0, 31, 13)
        points = np.stack([32 + radii * np.cos(angles), 33 + radii * np.sin(angles)], axis=1)
        draw.polygon([tuple(point) for point in points], fill=255)
    else:  # a heart
        draw.pieslice((3, 6, 33, 38), 180, 360, fill=255)
        draw.pieslice((30, 6, 60, 38), 180, 360, fill=255)
        draw.polygon([(3, 22), (60, 22), (32, 60)], fill=255)
    return image


def _web_caption(glyph: dict[str, str], rng: np.random.Generator) -> str:
    glyph = dict(glyph)
    if rng.random() < WRONG_SHARE:
        name = choose(rng, ["kind", "color", "background"])
        glyph[name] = choose(rng, [value for value in ATTRIBUTES[name] if value != glyph[name]])
    kind, color, size, position, background, texture = (glyph[name] for name in ATTRIBUTES)
    noun = kind
    if kind in DIGITS:
        number = str(DIGITS.index(kind))
        noun = choose(rng, [kind, kind, number, f"number {number}", f"digit {kind}"])
    pattern = [
        noun,
        f"{color} {noun}",
        f"{size} {noun}",
        f"{noun} on {background}",
        f"{color} {noun} on {article(background)} background",
        f"{noun} in the {position}" if position != "center" else f"{noun} in the middle",
        f"{size} {color} {noun}",
        f"{noun}, {texture} background",
        f"{background} {texture} wallpaper with {article(noun)}",
    ]
    opening = choose(rng, ["", "", "", "a picture of ", "photo: ", "my ", "an image with "])
    return opening + choose(rng, pattern)


def _detailed_caption(glyph: dict[str, str], rng: np.random.Generator) -> str:
    kind, color, size, position, background, texture = (glyph[name] for name in ATTRIBUTES)
    noun = f"digit {kind}" if kind in DIGITS else kind
    place = "in the center" if position == "center" else f"in the {position} corner"
    ground = f"{background} background" if texture == "plain" else f"{texture} {background} background"
    quality = "plain, without a pattern" if texture == "plain" else texture
    return choose(
        rng,
        [
            f"The image shows {article(f'{size} {color} {noun}')}. It is placed {place}. "
            f"Behind it is {article(ground)}.",
            f"{article(f'{color} {noun}').capitalize()} of {size} size is {place}. "
            f"The background is {background} and {quality}.",
            f"On {article(ground)} there is {article(noun)}. It is {color} and {size}. It stands {place}.",
            f"{place.capitalize()} of the picture stands {article(f'{size} {noun}')}. It is drawn in {color} ink. "
            f"The {background} background is {quality}.",
        ],
    )


def _all_words():
    """Captions enough to contain every word of the world."""
    for index in range(4000):
        rng = np.random.default_rng([len(SPLITS) * 2, index])
        glyph = draw_attributes(rng, KINDS)
        for style in CAPTION_STYLES:
            yield caption(glyph, style, rng)
    yield from TEMPLATES


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Look at the glyph world.")
    parser.add_argument("--contact-sheet", required=True, metavar="PNG", help="file to draw sample images into")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        draw_samples(arguments.contact_sheet, arguments.seed)
    except (OSError, ValueError) as error:  # no such folder, no kind of picture
        raise SystemExit(f"error: {arguments.contact_sheet} cannot be written: {error}") from None


if __name__ == "__main__":
    main()
