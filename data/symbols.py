"""The symbol world: captioned pictures of about 190 kinds of symbols in 15 topics, that need no download.

A picture shows one or two symbols on a ground: letters, Greek, Hebrew, chess pieces, zodiac signs, ... of the fonts
that matplotlib carries, by their Unicode names, and handwritten digits (scikit-learn's `load_digits`). Topics have
habits: colors, grounds and words that are more common in their pictures than elsewhere. `web` captions are short: some
name a topic alone or use a word that several topics share, and some are wrong. `detailed` ones name everything, `looks`
everything but the kinds.

Training and test pictures use different font files and pen strokes; where fonts share an outline, only what happens to
it afterwards differs. Everything follows from the arguments of `load` and `load_minimal_pairs`, to the bit.

    python -m data.symbols --contact-sheet symbols.png
"""

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont
from transformers import CLIPTokenizer

from data.drawing import (
    BACKGROUNDS,
    COLORS,
    OPPOSITE,
    POSITIONS,
    SIDES,
    SPLITS,
    TEXTURES,
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
from data.symbol_captions import CAPTION_STYLES, caption
from data.symbol_kinds import KINDS, TOPIC_OF, TOPICS
from data.tokenizer import learn_tokenizer

# The first of each split has all characters; those that lack one are left out for it
FONTS = {
    "train": [
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSans-Oblique",
        "DejaVuSerif",
        "DejaVuSerif-Bold",
        "DejaVuSansMono",
    ],
    "test": ["DejaVuSans-BoldOblique", "DejaVuSerif-BoldItalic", "DejaVuSansMono-Bold", "STIXGeneral"],
}
SIZES = {"small": 0.5, "medium": 0.7, "large": 0.9}  # of the image's side
SMALLEST_IMAGE = 16

# The share of pictures that have two symbols
TWO = 0.2
# The share of second symbols that are of the first one's topic
SAME_TOPIC = 0.5
# The share of colors, of backgrounds and of textures that are set to their topic's own; the others are drawn from all
HABIT = 0.5
# The share of symbols that have a piece of paper on them
COVERED = 0.05

# The columns of a row, and what two pictures of a minimal pair may differ in: a value, or which symbol has which color
ATTRIBUTES = ["kind", "topic", "color", "size", "position", "background", "texture", "second_kind", "second_color"]
DIFFERENCES = ["kind", "color", "size", "position", "background", "texture", "binding"]

KIND_SETS = {"all": KINDS, **{name: list(topic.kinds) for name, topic in TOPICS.items()}}
# Two and four groups of whole topics, of about as many kinds: what clustering would find at best
_GROUPS = [
    ["letter", "die", "card suit", "tool"],
    ["greek letter", "hebrew letter"],
    ["chess piece", "arrow", "currency", "digit"],
    ["zodiac sign", "planet", "weather", "musical note", "trigram"],
]
for _number, _names in enumerate(_GROUPS):
    KIND_SETS[f"quarter {_number + 1}"] = [kind for name in _names for kind in TOPICS[name].kinds]
KIND_SETS["half 1"] = KIND_SETS["quarter 1"] + KIND_SETS["quarter 2"]
KIND_SETS["half 2"] = KIND_SETS["quarter 3"] + KIND_SETS["quarter 4"]

TEMPLATES = ["{}", "a {}", "a picture of a {}", "a photo of the {}", "an image with a {} on it"]


def kind_set(name: str) -> list[str]:
    """The kinds of one of `KIND_SETS`. Raises a ValueError if it is none."""
    if name not in KIND_SETS:
        raise ValueError(f"symbols have no set of kinds {name!r}, only {', '.join(KIND_SETS)}")
    return KIND_SETS[name]


def load(
    split: str,
    captions: str,
    num_samples: int,
    kinds: Sequence[str] = tuple(KINDS),
    seed: int = 0,
    image_size: int = 32,
    captions_per_image: int = 1,
    two: bool | None = None,
) -> Dataset:
    """Captioned symbols.

    Args:
        split: "train" or "test"; no font file and no pen stroke is in both.
        captions: "web", "detailed" or "looks".
        num_samples: how many rows; the first ones are the same for any number.
        kinds: of the first symbol of a picture, and of a second one.
        seed: other rows for another one.
        image_size: pixels a side, at least `SMALLEST_IMAGE`.
        captions_per_image: with more than one, `caption` is a list.
        two: whether every picture has two symbols, or none; None: `TWO` of them have.

    Returns:
        Rows of `image` (RGB, `image_size` squared), `caption` and one column for each of `ATTRIBUTES`.

    Raises:
        ValueError: an unknown split, caption style or kind, no sample or caption, an image too small to draw in, or
            matplotlib's fonts lack a character.
    """
    _check(split, kinds, image_size, num_samples=num_samples, captions_per_image=captions_per_image)
    if captions not in CAPTION_STYLES:
        raise ValueError(f"captions is {captions!r}, must be one of {', '.join(CAPTION_STYLES)}")

    def draw(index: int) -> dict[str, Any]:
        rng = np.random.default_rng([SPLITS[split], seed, index])
        scene = draw_scene(rng, kinds, two=two)
        image = render(scene, split, rng, image_size)
        texts = [caption(scene, captions, rng) for _ in range(captions_per_image)]
        return {"image": png(image), "caption": texts if captions_per_image > 1 else texts[0], **scene}

    text = Value("string")
    features = {"image": Image(), "caption": List(text) if captions_per_image > 1 else text}
    return drawn_rows(draw, num_samples, Features(features | dict.fromkeys(ATTRIBUTES, text)))


def load_minimal_pairs(
    split: str, num_pairs: int, kinds: Sequence[str] = tuple(KINDS), seed: int = 0, image_size: int = 32
) -> Dataset:
    """Pairs of pictures that differ in exactly one thing, as MMVP-VLM's pairs of images do.

    Returns:
        Rows of `image_0`, `caption_0`, `image_1`, `caption_1` (detailed, in the same words) and `attribute`: one of
        `DIFFERENCES`, all equally frequent. "binding" are two symbols whose colors are exchanged.

    Raises:
        ValueError: as `load`, or there is one kind alone.
    """
    _check(split, kinds, image_size, num_pairs=num_pairs)
    if len(set(kinds)) < 2:
        raise ValueError(f"kinds has {kinds[0]!r} alone: pairs that differ in the kind need at least two")
    rows = []
    for index in range(num_pairs):
        rng = np.random.default_rng([SPLITS[split] + len(SPLITS), seed, index])
        difference = DIFFERENCES[index % len(DIFFERENCES)]
        first = draw_scene(rng, kinds, two=difference == "binding")
        second = _differ(first, difference, kinds, rng)
        wording = int(rng.integers(2**32))
        row = {"attribute": difference}
        for number, scene in enumerate((first, second)):
            row[f"image_{number}"] = png(render(scene, split, rng, image_size))
            row[f"caption_{number}"] = caption(scene, "detailed", np.random.default_rng(wording))
        rows.append(row)
    text = Value("string")
    features = {"image_0": Image(), "caption_0": text, "image_1": Image(), "caption_1": text, "attribute": text}
    return Dataset.from_list(rows, features=Features(features))


def draw_scene(rng: np.random.Generator, kinds: Sequence[str], two: bool | None = None) -> dict[str, str]:
    """What a random picture shows: attribute -> value, "" for the second symbol of one that has a single one.

    Args:
        two: whether there are two symbols; None: `TWO` of the pictures have.
    """
    kind = choose(rng, kinds)
    topic = TOPICS[TOPIC_OF[kind]]

    def tends(usual: str, values: Sequence[str]) -> str:
        return usual if rng.random() < HABIT else choose(rng, values)

    scene = {"kind": kind, "topic": TOPIC_OF[kind], "color": tends(topic.color, list(COLORS))}
    two = rng.random() < TWO if two is None else two
    scene["size"] = "small" if two else choose(rng, list(SIZES))
    scene["position"] = choose(rng, list(SIDES if two else POSITIONS))
    scene["background"] = tends(topic.background, list(BACKGROUNDS))
    scene["texture"] = tends(topic.texture, TEXTURES)
    scene["second_kind"] = scene["second_color"] = ""
    if two:
        same = [name for name in kinds if TOPIC_OF[name] == scene["topic"] and name != kind]
        others = [name for name in kinds if name != kind] or [kind]
        scene["second_kind"] = choose(rng, same if same and rng.random() < SAME_TOPIC else others)
        scene["second_color"] = choose(rng, [color for color in COLORS if color != scene["color"]])
    return scene


def render(scene: Mapping[str, str], split: str, rng: np.random.Generator, image_size: int) -> np.ndarray:
    """The picture of a scene, (image_size, image_size, 3) uint8."""
    image = ground(scene, rng, image_size)
    side = round(SIZES[scene["size"]] * image_size)  # small, of two
    symbols = [("kind", "color", scene["position"])]
    if scene["second_kind"]:
        symbols += [("second_kind", "second_color", OPPOSITE[scene["position"]])]
    for kind, color, position in symbols:
        direction = SIDES[position] if scene["second_kind"] else POSITIONS[position]
        direction = [1.25 * part for part in direction]  # to the border: large symbols have little room
        mask = distort(_symbol(scene[kind], split, rng), rng)
        if rng.random() < COVERED:
            mask = _covered(mask, rng)
        alpha = place(mask, side, direction, rng, image_size)
        image = image * (1 - alpha) + inked(scene[color], rng) * alpha
    return photographed(image, rng)


def build_tokenizer(context_length: int) -> CLIPTokenizer:
    """A CLIP tokenizer that knows every word of the symbol world's captions."""
    return learn_tokenizer(_all_words(), 3000, context_length)


def draw_kinds(path: str | Path, columns: int = 12) -> None:
    """Draw all kinds by topic, each in a training and a test picture, for a person to judge."""
    cells = [(topic, kind) for topic in TOPICS for kind in (None, *TOPICS[topic].kinds)]
    width, height = 78, 59
    sheet = PILImage.new("RGB", (columns * width, -(-len(cells) // columns) * height), "white")
    drawing = ImageDraw.Draw(sheet)
    bold, plain = (ImageFont.truetype(_font_file(name), 9) for name in ("DejaVuSans-Bold", "DejaVuSans"))
    for number, (topic, kind) in enumerate(cells):
        x, y = number % columns * width, number // columns * height
        if kind is None:
            drawing.rectangle((x, y, x + width - 4, y + height - 4), "#ddd")
            drawing.text((x + 6, y + 8), topic.replace(" ", "\n"), "black", bold)
            continue
        for side, split in enumerate(SPLITS):
            rng = np.random.default_rng([SPLITS[split], KINDS.index(kind)])
            scene = draw_scene(rng, [kind], two=False) | {"size": "large", "position": "center"}
            sheet.paste(PILImage.fromarray(render(scene, split, rng, 32)), (x + 2 + side * 34, y))
        drawing.text((x + 2, y + 33), textwrap.fill(kind, 15), "black", plain, spacing=0)
    _save(sheet, path)


def draw_samples(path: str | Path, seed: int = 0, columns: int = 6, rows: int = 4) -> None:
    """Draw training images with both captions under each, for a person to judge."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    web, detailed = (load("train", style, columns * rows, seed=seed) for style in ("web", "detailed"))
    figure, axes = plt.subplots(rows, columns, figsize=(2.6 * columns, 3.5 * rows), dpi=70)
    for axis, first, second in zip(axes.flat, web, detailed, strict=True):
        axis.imshow(first["image"])
        axis.set_title("\n\n".join(textwrap.fill(row["caption"], 42) for row in (first, second)), fontsize=7)
        axis.axis("off")
    figure.tight_layout()
    figure.canvas.draw()
    _save(PILImage.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3]), path)
    plt.close(figure)


def _save(sheet: PILImage.Image, path: str | Path) -> None:
    """As PNG in the world's own colors and those between an ink and a ground: a fourth of the size, for the camera's
    noise is left out."""
    inks, grounds = np.array(list(COLORS.values())), np.array(list(BACKGROUNDS.values()))
    grounds = np.concatenate([grounds, grounds * 0.8])
    between = (inks[:, None] + grounds).reshape(-1, 3) / 2
    gray = np.repeat([0, 90, 170, 220, 255], 3).reshape(-1, 3)  # of what is written
    palette = PILImage.new("P", (1, 1))
    palette.putpalette(np.concatenate([inks, grounds, between, gray]).astype(np.uint8).tobytes())
    sheet.quantize(palette=palette, dither=PILImage.Dither.NONE).save(path, "png", optimize=True)


def _font_file(name: str) -> str:
    """Where matplotlib keeps a font."""
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf")


def _check(split: str, kinds: Sequence[str], image_size: int, **numbers: int) -> None:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, must be one of {', '.join(SPLITS)}")
    unknown = [kind for kind in kinds if kind not in TOPIC_OF]
    if unknown or not kinds:
        raise ValueError(
            f"kinds has {unknown or 'nothing'}; `data.symbols.KINDS` has the {len(KINDS)} kinds of the symbol world, "
            "and `KIND_SETS` those of each topic"
        )
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}, must be at least 1")
    if image_size < SMALLEST_IMAGE:
        raise ValueError(f"image_size is {image_size}: symbols need at least {SMALLEST_IMAGE} pixels")
    _fonts_of(split)


@cache
def _fonts_of(split: str) -> dict[str, list[str]]:
    """The files of the fonts that have each character."""
    import matplotlib
    from matplotlib.ft2font import FT2Font

    fonts = {}
    for name in FONTS[split]:
        path = _font_file(name)
        try:
            fonts[path] = FT2Font(path).get_charmap()
        except (OSError, RuntimeError) as error:
            raise ValueError(f"matplotlib {matplotlib.__version__} has no font {name}: {error}") from error
    first = next(iter(fonts))
    by_character = {}
    for kind, character in ((kind, text) for topic in TOPICS.values() for kind, text in topic.kinds.items() if text):
        if ord(character) not in fonts[first]:
            raise ValueError(
                f"the font {FONTS[split][0]} of matplotlib {matplotlib.__version__} has no {kind} "
                f"(U+{ord(character):04X}): install the version of constraints.txt"
            )
        by_character[character] = [path for path, characters in fonts.items() if ord(character) in characters]
    return by_character


def _symbol(kind: str, split: str, rng: np.random.Generator) -> PILImage.Image:
    """A symbol in one of its fonts, (64, 64), white on black."""
    character = TOPICS[TOPIC_OF[kind]].kinds[kind]
    if not character:
        return stroke(kind.split()[-1], split, rng)
    return _printed(character, choose(rng, _fonts_of(split)[character]))


@cache
def _printed(character: str, font: str) -> PILImage.Image:
    """A character as large as it fits into (64, 64) with a margin."""
    font = ImageFont.truetype(font, 96)
    left, top, right, bottom = font.getbbox(character)
    drawn = PILImage.new("L", (right - left, bottom - top))
    ImageDraw.Draw(drawn).text((-left, -top), character, 255, font)
    scale = 58 / max(drawn.size)
    drawn = drawn.resize([max(1, round(side * scale)) for side in drawn.size], PILImage.Resampling.BICUBIC)
    image = PILImage.new("L", (64, 64))
    image.paste(drawn, ((64 - drawn.width) // 2, (64 - drawn.height) // 2))
    return image


def _covered(mask: PILImage.Image, rng: np.random.Generator) -> PILImage.Image:
    """The drawing without what is behind a piece of paper at one of its corners."""
    x, y = (int(corner) for corner in rng.choice([0, 40], 2))
    mask = mask.copy()
    mask.paste(0, (x, y, x + 24, y + 24))
    return mask


def _differ(first: dict[str, str], difference: str, kinds: Sequence[str], rng: np.random.Generator) -> dict[str, str]:
    """The scene with another value, or with exchanged colors."""
    if difference == "binding":
        return {**first, "color": first["second_color"], "second_color": first["color"]}
    if difference == "kind":
        kind = choose(rng, [name for name in kinds if name != first["kind"]])
        return {**first, "kind": kind, "topic": TOPIC_OF[kind]}
    tables = {"color": COLORS, "size": SIZES, "position": POSITIONS, "background": BACKGROUNDS, "texture": TEXTURES}
    return {**first, difference: choose(rng, [value for value in tables[difference] if value != first[difference]])}


def _all_words():
    """Captions enough to contain every word of the world."""
    for kind in KINDS:
        yield from (kind, TOPICS[TOPIC_OF[kind]].short[kind], TOPIC_OF[kind], *TOPICS[TOPIC_OF[kind]].words)
    for index in range(4000):
        rng = np.random.default_rng([len(SPLITS) * 2, index])
        scene = draw_scene(rng, KINDS)
        for style in ("web", "detailed"):
            yield caption(scene, style, rng)
    yield from TEMPLATES


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Look at the symbol world.")
    parser.add_argument("--contact-sheet", required=True, metavar="PNG", help="file to draw all kinds into")
    parser.add_argument("--samples", metavar="PNG", help="file to draw sample images with their captions into")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    arguments = parser.parse_args(argv)
    try:
        draw_kinds(arguments.contact_sheet)
        if arguments.samples:
            draw_samples(arguments.samples, arguments.seed)
    except (OSError, ValueError) as error:  # no such folder, no kind of picture
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
