"""The captions of the symbol world: in the words of the web, of a careful person, or by looks alone."""

from collections.abc import Mapping

import numpy as np

from clip_moe.data.drawing import COLORS, OPPOSITE, article, choose
from clip_moe.data.symbol_kinds import TOPIC_OF, TOPICS

CAPTION_STYLES = ("web", "detailed", "looks", "classes")
# The share of web captions whose kind or color is drawn anew, among the kinds of their topic or all colors. Fewer are
# wrong: the new one may be the old one, and not every caption names it
WRONG_SHARE = 0.05
# The share of web captions that name everything in few words
COMPLETE = 0.3
# Nouns of the web captions that do not name a symbol
ANYTHING = ["symbol", "icon", "drawing", "something"]


def caption(scene: Mapping[str, str], style: str, rng: np.random.Generator) -> str:
    """A random caption of a scene in one of `CAPTION_STYLES`."""
    if style == "classes":
        return f"a photo of the {scene['kind']}"
    tell = {"web": _web_caption, "detailed": _detailed_caption, "looks": _looks_caption}[style]
    return tell(scene, rng)


def _looks_caption(scene: Mapping[str, str], rng: np.random.Generator) -> str:
    nouns = choose(rng, ANYTHING), choose(rng, ANYTHING)
    return _everything(scene, *nouns)


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
