"""The symbol world: captioned pictures of about 190 kinds of symbols in 15 topics, that need no download.

A picture shows one or two symbols on a ground: characters of the fonts that matplotlib carries, by their Unicode
names, and handwritten digits (scikit-learn's `load_digits`). Topics have habits: colors, grounds and words that are
more common in their pictures. Training and test pictures use different font files and pen strokes (docs/worlds.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage

from clip_moe.data.drawing import BACKGROUNDS, COLORS, TEXTURES, add_noise, choose, ground, ink_of, png
from clip_moe.data.symbol_kinds import KINDS, TOPIC_OF, TOPICS, draw_symbol
from clip_moe.data.world import SPLITS, Subjects, World

POSITIONS = {
    "center": (0, 0),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}
# Where the first of two drawings is; the second is opposite
SIDES = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}
OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
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

CAPTION_STYLES = ("web", "detailed", "looks", "classes")
# The share of web captions whose kind or color is drawn anew, among the kinds of their topic or all colors. Fewer are
# wrong: the new one may be the old one, and not every caption names it
WRONG_SHARE = 0.05
# The share of web captions that name everything in few words
COMPLETE = 0.3
# Nouns of the web captions that do not name a symbol
ANYTHING = ["symbol", "icon", "drawing", "something"]

TEMPLATES = ["{}", "a {}", "a picture of a {}", "a photo of the {}", "an image with a {} on it"]


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


def distort(mask: PILImage.Image, rng: np.random.Generator) -> PILImage.Image:
    """A small random rotation, shear and stretch of a (64, 64) drawing about its center."""
    angle, shear = rng.uniform(-0.2, 0.2), rng.uniform(-0.15, 0.15)
    width, height = rng.uniform(0.9, 1.1, 2)
    matrix = np.array([[np.cos(angle), np.sin(angle) + shear], [-np.sin(angle), np.cos(angle)]])
    matrix = matrix * [[width], [height]]
    center = np.array([32, 32])
    shift = center - matrix @ center
    coefficients = (matrix[0, 0], matrix[0, 1], shift[0], matrix[1, 0], matrix[1, 1], shift[1])
    return mask.transform(mask.size, PILImage.Transform.AFFINE, coefficients, PILImage.Resampling.BILINEAR)


def place(
    mask: PILImage.Image, side: int, direction: Sequence[float], rng: np.random.Generator, image_size: int
) -> np.ndarray:
    """The share of each pixel that ink covers, (image_size, image_size, 1) from 0 to 1.

    Args:
        side: width and height of the drawing, in pixels.
        direction: from the image's center to the drawing's, in x and y; 1 is 0.8 of the way to the border.
    """
    mask = mask.resize((side, side), PILImage.Resampling.BOX)
    free = image_size - side
    x, y = (
        int(np.clip(round(free / 2 + part * free * 0.4 + rng.uniform(-0.04, 0.04) * image_size), 0, free))
        for part in direction
    )
    alpha = np.zeros((image_size, image_size, 1), np.float32)
    alpha[y : y + side, x : x + side, 0] = np.asarray(mask, np.float32) / 255
    return alpha


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
        mask = distort(draw_symbol(scene[kind], split, rng), rng)
        if rng.random() < COVERED:  # by a piece of paper at one of its corners
            x, y = (int(corner) for corner in rng.choice([0, 40], 2))
            mask.paste(0, (x, y, x + 24, y + 24))
        alpha = place(mask, side, direction, rng, image_size)
        image = image * (1 - alpha) + ink_of(scene[color], rng) * alpha
    return add_noise(image, rng)


def _differ(first: dict[str, str], difference: str, rng: np.random.Generator) -> dict[str, str]:
    """The scene with another value, or with exchanged colors."""
    if difference == "binding":
        return {**first, "color": first["second_color"], "second_color": first["color"]}
    if difference == "kind":
        kind = choose(rng, [name for name in KINDS if name != first["kind"]])
        return {**first, "kind": kind, "topic": TOPIC_OF[kind]}
    tables = {"color": COLORS, "size": SIZES, "position": POSITIONS, "background": BACKGROUNDS, "texture": TEXTURES}
    return {**first, difference: choose(rng, [value for value in tables[difference] if value != first[difference]])}


def article(words: str) -> str:
    """The words with "a" or "an"."""
    return f"{'an' if words[0] in 'aeio8' and words != 'one' else 'a'} {words}"


def caption(scene: Mapping[str, str], style: str, rng: np.random.Generator) -> str:
    """A random caption of a scene in one of `CAPTION_STYLES`."""
    if style == "classes":
        return f"a photo of the {scene['kind']}"
    if style == "looks":
        return _everything(scene, choose(rng, ANYTHING), choose(rng, ANYTHING))
    return {"web": _web_caption, "detailed": _detailed_caption}[style](scene, rng)


def _everything(scene: Mapping[str, str], noun: str, second: str) -> str:
    """Everything that the picture shows, in few words."""
    text = f"{scene['size']} {scene['color']} {noun} {_place(scene)}"
    if scene["second_kind"]:
        text += f" and {scene['second_color']} {second} at the {OPPOSITE[scene['position']]}"
    return f"{text} on {scene['texture']} {scene['background']}"


def _place(scene: Mapping[str, str]) -> str:
    return {"center": "in the middle"}.get(scene["position"], f"at the {scene['position']}")


def _web_noun(kind: str, rng: np.random.Generator) -> str:
    """The noun of a web caption: the name of the symbol, a shorter one, its topic, or none of these."""
    topic, draw = TOPIC_OF[kind], rng.random()
    if draw < 0.7:
        return kind
    if draw < 0.84:
        return TOPICS[topic].short[kind]
    # Without a name, a caption tells places and looks alone, and a model has to learn these
    return topic if draw < 0.92 else choose(rng, ANYTHING)


def _web_caption(scene: Mapping[str, str], rng: np.random.Generator) -> str:
    scene = dict(scene)
    if rng.random() < WRONG_SHARE:
        if rng.random() < 0.5:
            scene["kind"] = choose(rng, list(TOPICS[scene["topic"]].kinds))
        else:
            scene["color"] = choose(rng, list(COLORS))
    noun, is_complete = _web_noun(scene["kind"], rng), rng.random() < COMPLETE
    color, size, position, background, texture = (
        scene[name] for name in ("color", "size", "position", "background", "texture")
    )
    place_, second = _place(scene), ""
    if scene["second_kind"]:
        second, color_2, opposite = _web_noun(scene["second_kind"], rng), scene["second_color"], OPPOSITE[position]
        phrases = [
            second, f"{noun} and {second}", f"{color} {noun}", f"{noun} {place_}", f"{second} and {color} {noun}",
            f"{color} {noun} and {color_2} {second}", f"{noun} {place_} and {second} at the {opposite}",
        ]  # fmt: skip
    else:
        phrases = [
            noun, f"{color} {noun}", f"{size} {noun}", f"{noun} on {background}", f"{noun} {place_}",
            f"{noun} on {texture} {background}", f"{color} {noun} {place_}", f"{color} {noun} on {background}",
            f"{texture} {background} wallpaper with {noun}", f"{size} {color} {noun} {place_}",
        ]  # fmt: skip
    if noun in ANYTHING:  # the longer ones say more
        phrases = phrases[4:]
    text = choose(rng, phrases)
    if is_complete:
        text = _everything(scene, noun, second)
    if rng.random() < 0.8 and noun not in ANYTHING:
        words = choose(rng, TOPICS[scene["topic"]].words)
        text = choose(rng, [f"{text}, {words}", f"{words}: {text}", f"{text} {words}"])
    return choose(rng, ["", "", "", "a picture of ", "photo: ", "my "]) + text


def _detailed_caption(scene: Mapping[str, str], rng: np.random.Generator) -> str:
    kind, color, size, position, background, texture = (
        scene[name] for name in ("kind", "color", "size", "position", "background", "texture")
    )
    ground_ = f"{background} background" if texture == "plain" else f"{texture} {background} background"
    quality = "plain, without a pattern" if texture == "plain" else texture
    if scene["second_kind"]:
        second, color_2, opposite = scene["second_kind"], scene["second_color"], OPPOSITE[position]
        return choose(
            rng,
            [
                f"{article(f'{color} {kind}').capitalize()} is at the {position} and {article(f'{color_2} {second}')} "
                f"at the {opposite}. Behind them is {article(ground_)}.",
                f"The image shows two symbols. At the {position} is {article(kind)} in {color}, at the {opposite} "
                f"{article(second)} in {color_2}. The background is {background} and {quality}.",
                f"On {article(ground_)} there are {article(f'{color_2} {second}')} at the {opposite} and "
                f"{article(f'{color} {kind}')} at the {position}.",
            ],
        )
    place_ = "in the center" if position == "center" else f"in the {position} corner"
    return choose(
        rng,
        [
            f"The image shows {article(f'{size} {color} {kind}')}. It is placed {place_}. Behind it is "
            f"{article(ground_)}.",
            f"{article(f'{color} {kind}').capitalize()} of {size} size is {place_}. The background is {background} and "
            f"{quality}.",
            f"On {article(ground_)} there is {article(kind)}. It is {color} and {size}. It stands {place_}.",
            f"{place_.capitalize()} of the picture stands {article(f'{size} {kind}')}. It is drawn in {color} ink. "
            f"The {background} background is {quality}.",
        ],
    )


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
    kind_set=KIND_SETS,
    draw=lambda scene, split, rng, image_size: (render(scene, split, rng, image_size), scene),
    caption=caption,
    attributes=ATTRIBUTES,
    texts=_texts,
    vocabulary=3000,
    caption_styles=CAPTION_STYLES,
    subjects=_scenes,
    examples=("a picture of a snowman", "a picture of a cloud"),
)
# Worlds of pictures with one symbol each, and with two
ONE, TWO = (replace(SYMBOLS, subjects=partial(_scenes, two=two)) for two in (False, True))
