"""The symbol world: captioned pictures of about 190 kinds of symbols in 15 topics, that need no download.

A picture shows one or two symbols on a ground: letters, Greek, Hebrew, chess pieces, zodiac signs, ... of the fonts
that matplotlib carries, by their Unicode names, and handwritten digits (scikit-learn's `load_digits`). Topics have
habits: colors, grounds and words that are more common in their pictures than elsewhere. `web` captions are short: some
name a topic alone or use a word that several topics share, and some are wrong. `detailed` ones name everything, `looks`
everything but the kinds.

Training and test pictures use different font files and pen strokes; where fonts share an outline, only what happens to
it afterwards differs. Everything follows from the arguments of `World.load` and `load_minimal_pairs`, to the bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from clip_moe.data.drawing import (
    BACKGROUNDS,
    COLORS,
    OPPOSITE,
    POSITIONS,
    SIDES,
    TEXTURES,
    add_noise,
    choose,
    distort,
    font_file,
    ground,
    ink_of,
    place,
    png,
    stroke,
)
from clip_moe.data.symbol_captions import CAPTION_STYLES, caption
from clip_moe.data.symbol_kinds import KINDS, TOPIC_OF, TOPICS
from clip_moe.data.world import SPLITS, Subjects, World

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
TWO_SHARE = 0.2
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


def load_minimal_pairs(split: str, num_pairs: int, seed: int = 0) -> Dataset:
    """Pairs of pictures that differ in exactly one thing, as MMVP-VLM's pairs of images do.

    Returns:
        Rows of `image_0`, `caption_0`, `image_1`, `caption_1` (detailed, in the same words) and `attribute`: one of
        `DIFFERENCES`, all equally frequent. "binding" are two symbols whose colors are exchanged.
    """
    rows = []
    for index in range(num_pairs):
        rng = np.random.default_rng([SPLITS[split] + len(SPLITS), seed, index])
        difference = DIFFERENCES[index % len(DIFFERENCES)]
        first = draw_scene(rng, KINDS, two=difference == "binding")
        second = _differ(first, difference, rng)
        wording = int(rng.integers(2**32))
        row = {"attribute": difference}
        for number, scene in enumerate((first, second)):
            row[f"image_{number}"] = png(render(scene, split, rng, image_size=32))
            row[f"caption_{number}"] = caption(scene, "detailed", np.random.default_rng(wording))
        rows.append(row)
    text = Value("string")
    features = {"image_0": Image(), "caption_0": text, "image_1": Image(), "caption_1": text, "attribute": text}
    return Dataset.from_list(rows, features=Features(features))


def draw_scene(rng: np.random.Generator, kinds: Sequence[str], two: bool | None = None) -> dict[str, str]:
    """The content of a random picture: attribute -> value, "" for the second symbol of one that has a single one.

    Args:
        two: whether there are two symbols; None: `TWO_SHARE` of the pictures have.
    """
    kind = choose(rng, kinds)
    topic = TOPICS[TOPIC_OF[kind]]

    def tends(usual: str, values: Sequence[str]) -> str:
        return usual if rng.random() < HABIT else choose(rng, values)

    scene = {"kind": kind, "topic": TOPIC_OF[kind], "color": tends(topic.color, list(COLORS))}
    two = rng.random() < TWO_SHARE if two is None else two
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


def _scenes(kinds: Sequence[str], split: str, seed: int, two: bool | None = None) -> Subjects:
    """A random scene for each row, whose random numbers go on to the picture and the captions."""

    def scene(index: int) -> tuple[dict[str, str], np.random.Generator]:
        rng = np.random.default_rng([SPLITS[split], seed, index])
        return draw_scene(rng, kinds, two=two), rng

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
        image = image * (1 - alpha) + ink_of(scene[color], rng) * alpha
    return add_noise(image, rng)


@cache
def _fonts_of(split: str) -> dict[str, list[str]]:
    """The files of the fonts that have each character."""
    from matplotlib.ft2font import FT2Font

    fonts = {path: FT2Font(path).get_charmap() for path in map(font_file, FONTS[split])}
    characters = [character for topic in TOPICS.values() for character in topic.kinds.values() if character]
    return {text: [path for path, drawn in fonts.items() if ord(text) in drawn] for text in characters}


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


def _differ(first: dict[str, str], difference: str, rng: np.random.Generator) -> dict[str, str]:
    """The scene with another value, or with exchanged colors."""
    if difference == "binding":
        return {**first, "color": first["second_color"], "second_color": first["color"]}
    if difference == "kind":
        kind = choose(rng, [name for name in KINDS if name != first["kind"]])
        return {**first, "kind": kind, "topic": TOPIC_OF[kind]}
    tables = {"color": COLORS, "size": SIZES, "position": POSITIONS, "background": BACKGROUNDS, "texture": TEXTURES}
    return {**first, difference: choose(rng, [value for value in tables[difference] if value != first[difference]])}


def _texts() -> Iterator[str]:
    """Captions enough to contain every word of the world."""
    for kind in KINDS:
        yield from (kind, TOPICS[TOPIC_OF[kind]].short[kind], TOPIC_OF[kind], *TOPICS[TOPIC_OF[kind]].words)
    for index in range(4000):
        rng = np.random.default_rng([len(SPLITS) * 2, index])
        scene = draw_scene(rng, KINDS)
        for style in ("web", "detailed"):
            yield caption(scene, style, rng)
    yield from TEMPLATES


SYMBOLS = World(
    name="symbols",
    kind_set=kind_set,
    draw=lambda scene, split, rng, image_size: (render(scene, split, rng, image_size), scene),
    caption=caption,
    attributes=ATTRIBUTES,
    texts=_texts,
    vocabulary=3000,
    caption_styles=CAPTION_STYLES,
    templates=TEMPLATES,
    subjects=_scenes,
)
# Worlds of pictures with one symbol each, and with two
ONE, TWO = (replace(SYMBOLS, subjects=partial(_scenes, two=two)) for two in (False, True))
