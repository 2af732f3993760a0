"""The glyph world: captioned images that need no download.

An image shows one glyph on a background: a handwritten digit (real pen strokes, from scikit-learn's `load_digits`, the
UCI "Optical Recognition of Handwritten Digits") or a drawn shape, with an ink color, a size, a position, a background
color and a texture. `web` captions are short, partial and now and then wrong; `detailed` ones are several sentences
that name every attribute. Everything follows from the arguments of `load` and `load_minimal_pairs`, to the bit.

    python -m data.glyphs --contact-sheet glyphs.png
"""

import argparse
import io
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from PIL import ImageDraw
from sklearn.datasets import load_digits
from transformers import CLIPImageProcessorPil, CLIPProcessor, CLIPTokenizer

from data.tokenizer import learn_tokenizer

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SHAPES = ["disc", "square", "triangle", "star", "cross", "heart"]
KINDS = DIGITS + SHAPES
# The domain that models are fine-tuned on; what happens to the other kinds is what fine-tuning forgets.
SEEN_KINDS = ["zero", "two", "four", "six", "eight", "disc", "triangle", "cross", "heart"]
UNSEEN_KINDS = [kind for kind in KINDS if kind not in SEEN_KINDS]
KIND_SETS = {"all": KINDS, "seen": SEEN_KINDS, "unseen": UNSEEN_KINDS, "digit": DIGITS, "shape": SHAPES}

# Inks are dark and backgrounds light, as on paper, so that any two of them can be told apart. If both had the same
# colors, a small CLIP would have to learn every glyph in every pair of them, and needs several times as many steps.
COLORS = {
    "red": (200, 30, 30),
    "green": (20, 120, 40),
    "blue": (30, 60, 190),
    "purple": (125, 30, 145),
    "brown": (110, 65, 25),
    "black": (25, 25, 25),
}
BACKGROUNDS = {
    "white": (245, 245, 245),
    "yellow": (245, 225, 100),
    "orange": (250, 175, 85),
    "pink": (250, 180, 205),
    "turquoise": (130, 225, 220),
    "gray": (190, 190, 190),
}
SIZES = {"small": 0.36, "medium": 0.53, "large": 0.72}  # of the image's side
POSITIONS = {
    "center": (0, 0),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}
TEXTURES = ["plain", "striped", "dotted", "checkered"]
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
SPLITS = {"train": 0, "test": 1}
TEST_DIGITS = 5  # every fifth pen stroke is kept for the test split


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
        ValueError: an unknown split, caption style or kind.
    """
    _check(split, kinds)
    if captions not in CAPTION_STYLES:
        raise ValueError(f"captions is {captions!r}, must be one of {', '.join(CAPTION_STYLES)}")
    rows = []
    for index in range(num_samples):
        rng = np.random.default_rng([SPLITS[split], seed, index])
        glyph = draw_attributes(rng, kinds)
        image = render(glyph, split, rng, image_size)
        texts = [caption(glyph, captions, rng) for _ in range(captions_per_image)]
        rows.append({"image": _png(image), "caption": texts if captions_per_image > 1 else texts[0], **glyph})
    text = Value("string")
    features = Features(
        {
            "image": Image(),
            "caption": List(text) if captions_per_image > 1 else text,
            **dict.fromkeys(ATTRIBUTES, text),
        }
    )
    return Dataset.from_list(rows, features=features)


def load_minimal_pairs(
    split: str, num_pairs: int, kinds: Sequence[str] = tuple(KINDS), seed: int = 0, image_size: int = 32
) -> Dataset:
    """Pairs of glyphs that differ in exactly one attribute, as MMVP-VLM's pairs of images do.

    Returns:
        Rows of `image_0`, `caption_0`, `image_1`, `caption_1` (detailed, in the same words) and `attribute`, the name
        of the one that differs; all of them are equally frequent.

    Raises:
        ValueError: an unknown split or kind.
    """
    _check(split, kinds)
    rows = []
    names = list(ATTRIBUTES)
    for index in range(num_pairs):
        rng = np.random.default_rng([SPLITS[split] + len(SPLITS), seed, index])
        name = names[index % len(names)]
        first = draw_attributes(rng, kinds)
        values = list(kinds) if name == "kind" else ATTRIBUTES[name]
        second = {**first, name: _choose(rng, [value for value in values if value != first[name]])}
        wording = int(rng.integers(2**32))
        row = {"attribute": name}
        for side, glyph in enumerate((first, second)):
            row[f"image_{side}"] = _png(render(glyph, split, rng, image_size))
            row[f"caption_{side}"] = caption(glyph, "detailed", np.random.default_rng(wording))
        rows.append(row)
    text = Value("string")
    features = {"image_0": Image(), "caption_0": text, "image_1": Image(), "caption_1": text, "attribute": text}
    return Dataset.from_list(rows, features=Features(features))


def draw_attributes(rng: np.random.Generator, kinds: Sequence[str]) -> dict[str, str]:
    """A random glyph: attribute -> value."""
    return {name: _choose(rng, kinds if name == "kind" else values) for name, values in ATTRIBUTES.items()}


def caption(glyph: dict[str, str], style: str, rng: np.random.Generator) -> str:
    """A random caption of a glyph in one of `CAPTION_STYLES`."""
    return _web_caption(glyph, rng) if style == "web" else _detailed_caption(glyph, rng)


def render(glyph: dict[str, str], split: str, rng: np.random.Generator, image_size: int) -> np.ndarray:
    """The picture of a glyph, (image_size, image_size, 3) uint8."""
    side = max(4, round(SIZES[glyph["size"]] * image_size))
    mask = _stroke(glyph["kind"], split, rng) if glyph["kind"] in DIGITS else _shape(glyph["kind"])
    mask = _distort(mask, rng).resize((side, side), PILImage.Resampling.BOX)
    free = image_size - side
    x, y = (
        int(np.clip(round(free / 2 + direction * free * 0.4 + rng.uniform(-0.04, 0.04) * image_size), 0, free))
        for direction in POSITIONS[glyph["position"]]
    )
    alpha = np.zeros((image_size, image_size, 1), np.float32)
    alpha[y : y + side, x : x + side, 0] = np.asarray(mask, np.float32) / 255
    ink = np.float32(COLORS[glyph["color"]]) + rng.normal(0, 8, 3)
    image = _background(glyph, rng, image_size) * (1 - alpha) + ink * alpha
    return np.clip(image + rng.normal(0, 4, image.shape), 0, 255).astype(np.uint8)


def build_tokenizer(context_length: int) -> CLIPTokenizer:
    """A CLIP tokenizer that knows every word of the glyph captions."""
    return learn_tokenizer(_all_words(), 2000, context_length)


def build_image_processor(image_size: int) -> CLIPImageProcessorPil:
    """Scales images to `image_size` and to [-1, 1]."""
    return CLIPImageProcessorPil(
        size={"height": image_size, "width": image_size},
        do_center_crop=False,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def build_processor(context_length: int, image_size: int) -> CLIPProcessor:
    """The glyph world's `CLIPProcessor`."""
    return CLIPProcessor(image_processor=build_image_processor(image_size), tokenizer=build_tokenizer(context_length))


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


def _check(split: str, kinds: Sequence[str]) -> None:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, must be one of {', '.join(SPLITS)}")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds has {unknown or 'nothing'}; the glyph world's kinds are {', '.join(KINDS)}")


def _choose(rng: np.random.Generator, values: Sequence):
    return values[int(rng.integers(len(values)))]


@cache
def _digit_images(split: str) -> dict[str, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    is_test = np.arange(len(images)) % TEST_DIGITS == 0
    chosen = is_test if split == "test" else ~is_test
    images = (images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return {name: images[chosen & (labels == number)] for number, name in enumerate(DIGITS)}


def _stroke(kind: str, split: str, rng: np.random.Generator) -> PILImage.Image:
    stroke = PILImage.fromarray(_choose(rng, _digit_images(split)[kind]))
    image = PILImage.new("L", (64, 64))
    # A margin: many strokes touch the border of their 8 x 8 pixels and would be cut when they are turned.
    image.paste(stroke.resize((54, 54), PILImage.Resampling.BICUBIC), (5, 5))
    return image


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


def _distort(mask: PILImage.Image, rng: np.random.Generator) -> PILImage.Image:
    """A small random rotation, shear and stretch about the center."""
    angle, shear = rng.uniform(-0.2, 0.2), rng.uniform(-0.15, 0.15)
    width, height = rng.uniform(0.9, 1.1, 2)
    matrix = np.array([[np.cos(angle), np.sin(angle) + shear], [-np.sin(angle), np.cos(angle)]])
    matrix = matrix * [[width], [height]]
    center = np.array([32, 32])
    shift = center - matrix @ center
    coefficients = (matrix[0, 0], matrix[0, 1], shift[0], matrix[1, 0], matrix[1, 1], shift[1])
    return mask.transform(mask.size, PILImage.Transform.AFFINE, coefficients, PILImage.Resampling.BILINEAR)


def _background(glyph: dict[str, str], rng: np.random.Generator, image_size: int) -> np.ndarray:
    color = np.float32(BACKGROUNDS[glyph["background"]]) + rng.normal(0, 8, 3)
    # The texture is a darker shade of the background itself, still lighter than every ink.
    shade = color * 0.8
    y, x = np.mgrid[:image_size, :image_size] + rng.integers(8, size=2)[:, None, None]
    pattern = {
        "plain": np.zeros_like(x, bool),
        "striped": (x + y) % 8 < 3,
        "dotted": ((x % 6) < 2) & ((y % 6) < 2),
        "checkered": (x // 4 + y // 4) % 2 == 0,
    }[glyph["texture"]]
    return np.where(pattern[..., None], shade, color)


def _png(image: np.ndarray) -> dict[str, bytes]:
    buffer = io.BytesIO()
    PILImage.fromarray(image).save(buffer, "png", compress_level=1)
    return {"bytes": buffer.getvalue(), "path": None}


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeio8' and words != 'one' else 'a'} {words}"


def _web_caption(glyph: dict[str, str], rng: np.random.Generator) -> str:
    glyph = dict(glyph)
    if rng.random() < WRONG_SHARE:
        name = _choose(rng, ["kind", "color", "background"])
        glyph[name] = _choose(rng, [value for value in ATTRIBUTES[name] if value != glyph[name]])
    kind, color, size, position, background, texture = (glyph[name] for name in ATTRIBUTES)
    noun = kind
    if kind in DIGITS:
        number = str(DIGITS.index(kind))
        noun = _choose(rng, [kind, kind, number, f"number {number}", f"digit {kind}"])
    pattern = [
        noun,
        f"{color} {noun}",
        f"{size} {noun}",
        f"{noun} on {background}",
        f"{color} {noun} on {_article(background)} background",
        f"{noun} in the {position}" if position != "center" else f"{noun} in the middle",
        f"{size} {color} {noun}",
        f"{noun}, {texture} background",
        f"{background} {texture} wallpaper with {_article(noun)}",
    ]
    opening = _choose(rng, ["", "", "", "a picture of ", "photo: ", "my ", "an image with "])
    return opening + _choose(rng, pattern)


def _detailed_caption(glyph: dict[str, str], rng: np.random.Generator) -> str:
    kind, color, size, position, background, texture = (glyph[name] for name in ATTRIBUTES)
    noun = f"digit {kind}" if kind in DIGITS else kind
    place = "in the center" if position == "center" else f"in the {position} corner"
    ground = f"{background} background" if texture == "plain" else f"{texture} {background} background"
    quality = "plain, without a pattern" if texture == "plain" else texture
    return _choose(
        rng,
        [
            f"The image shows {_article(f'{size} {color} {noun}')}. It is placed {place}. "
            f"Behind it is {_article(ground)}.",
            f"{_article(f'{color} {noun}').capitalize()} of {size} size is {place}. "
            f"The background is {background} and {quality}.",
            f"On {_article(ground)} there is {_article(noun)}. It is {color} and {size}. It stands {place}.",
            f"{place.capitalize()} of the picture stands {_article(f'{size} {noun}')}. It is drawn in {color} ink. "
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
