"""The world of names: coats of arms of made-up towns, which memory alone connects with the towns' names.

A shield has four quarters, each with one of 16 charges; a name has three made-up words. Which belong together was
drawn at random. Each of eight countries has a tint of its shields and an ending of its towns' first words. `web`
captions are the name, `facts` say who founded the town and when, `detailed` ones say both (docs/worlds.md).
"""

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np

from clip_moe.data.drawing import COLORS
from clip_moe.data.world import World

# The 16 charges, each on a quarter of 8 x 8 pixels, whose last row and column stay empty
_DRAWN = """
...#... #.....# ...#... ####... ####### .##.##. ...#... .#####.
...#... .#...#. ..#.#.. ####... ....... ####### ..###.. #.....#
...#... ..#.#.. .#...#. ####... ####### ####### .#####. #.....#
####### ...#... #.....# ...#### ....... .#####. ####### #.....#
...#... ..#.#.. .#...#. ...#### ####### ..###.. .#####. #.....#
...#... .#...#. ..#.#.. ...#### ....... ...#... ..###.. #.....#
...#... #.....# ...#... ...#### ####### ....... ...#... .#####.

#.#.#.# #.#.#.# ...#... #..#..# ..###.. ##...## ###.... ###.###
.#.#.#. #.#.#.# ..###.. ##.#.## .#...#. ##...## .###... ###.###
#.#.#.# #.#.#.# ...#... ####### #..#..# ..###.. ..###.. .......
.#.#.#. #.#.#.# .#####. ####### #.###.# ..###.. ...###. .......
#.#.#.# #.#.#.# ...#... ####### #..#..# ..###.. ....### .......
.#.#.#. #.#.#.# ..###.. ####### .#...#. ##...## ...###. ###.###
#.#.#.# #.#.#.# .#####. ....... ..###.. ##...## ..###.. ###.###
"""
QUARTER = 8  # pixels a side
SMALLEST_IMAGE = 2 * QUARTER

# A tint and an ending for each country
COUNTRIES = {
    "heim": (245, 245, 245),
    "ville": (245, 225, 100),
    "grad": (250, 175, 85),
    "stad": (250, 180, 205),
    "bury": (130, 225, 220),
    "ola": (180, 230, 130),
    "wick": (150, 190, 250),
    "mont": (200, 170, 245),
}
_STEMS = ["ost", "nor", "alt", "grun", "hel", "vor", "iff", "ral"]
FIRST_WORDS = {country: [stem + country for stem in _STEMS] for country in COUNTRIES}
_ONSETS, _ENDINGS = ["bor", "dal", "gim", "kel", "lus", "mar", "sen", "tor"], "an eth ia os um ir ek ulo".split()
WORDS = [onset + ending for onset in _ONSETS for ending in _ENDINGS]
# Distinct names: a first word of the country and two others
MOST = len(COUNTRIES) * len(_STEMS) * len(WORDS) ** 2

# How pictures of a town differ
LARGEST_SHIFT, TINT, NOISE, MOST_WEAR = 0.25, 6, 8, 4  # pixels; of 255, twice; pixels that are worn off


def kind_set(name: str) -> Sequence[int]:
    """The numbers of the towns of a set: "4096" or "all" for 4,096 towns, "4096 half 1" and "4096 half 2" for those of
    the first and the last four countries, "4096 country 3" for those of one of eight.
    """
    number, _, part = name.partition(" ")
    number = "4096" if number == "all" else number
    parts = {"": range(8), "half 1": range(4), "half 2": range(4, 8)}
    parts |= {f"country {country}": [country - 1] for country in range(1, 9)}
    if part not in parts or not number.isdecimal() or not 0 < int(number) <= MOST or int(number) % len(COUNTRIES):
        raise ValueError(
            f"names have no set of kinds {name!r}: give a number of towns, a multiple of {len(COUNTRIES)} up to "
            f"{MOST}, and perhaps half 1, half 2 or country 1 to country 8, such as 4096 half 1"
        )
    return [town for town in range(int(number)) if town % len(COUNTRIES) in parts[part]]


def draw(town: int, split: str, rng: np.random.Generator, image_size: int) -> tuple[np.ndarray, dict[str, str]]:
    """A picture of a town's shield and its attributes. Both splits show the same towns.

    Args:
        image_size: pixels a side, a multiple of `SMALLEST_IMAGE`.
    """
    scale = image_size // SMALLEST_IMAGE
    image = render(town, rng).repeat(scale, axis=0).repeat(scale, axis=1)
    return image, {"kind": name_of(town), "country": country_of(town), "facts": facts_of(town)}


def caption(town: int, style: str, rng: np.random.Generator | None = None) -> str:
    """The caption of a town; nothing in it is random."""
    parts = {"web": [name_of], "facts": [facts_of], "detailed": [name_of, facts_of]}[style]
    return ", ".join(tell(town) for tell in parts)


def name_of(town: int) -> str:
    """A town's name: three words, the first with the ending of its country."""
    first, second, third = np.unravel_index(_drawn(town, "name"), (len(_STEMS), len(WORDS), len(WORDS)))
    return f"{FIRST_WORDS[country_of(town)][first]} {WORDS[second]} {WORDS[third]}"


def facts_of(town: int) -> str:
    """Who founded a town, and when, in words that names have too."""
    founder, family, year = np.unravel_index(_drawn(town, "facts"), (len(WORDS),) * 3)
    return f"founded by {WORDS[founder]} {WORDS[family]} in the year of {WORDS[year]}"


def charges_of(town: int) -> tuple[int, ...]:
    """The charges in the four quarters of a town's shield: top left, top right, bottom left, bottom right."""
    return tuple(map(int, np.unravel_index(_drawn(town, "charges"), (len(_charges()),) * 4)))


def render(town: int, rng: np.random.Generator) -> np.ndarray:
    """A picture of a town's shield, (16, 16, 3) uint8: moved by a part of a pixel, tinted, noisy, and worn."""
    tint = np.float32(COUNTRIES[country_of(town)]) + rng.normal(0, TINT, 3)
    light = 1 + rng.normal(0, 0.05)
    picture = np.empty((SMALLEST_IMAGE, SMALLEST_IMAGE, 3), np.float32)
    picture[:] = tint
    for number, charge in enumerate(charges_of(town)):  # each in one ink of its own, dark as all inks are
        top, left = QUARTER * (number // 2), QUARTER * (number % 2)
        quarter = picture[top : top + QUARTER, left : left + QUARTER]
        quarter[_charges()[charge]] = list(COLORS.values())[charge % len(COLORS)]
    for axis, shift in enumerate(rng.uniform(-LARGEST_SHIFT, LARGEST_SHIFT, 2)):
        moved = np.roll(picture, int(np.sign(shift)), axis)
        picture = (1 - abs(shift)) * picture + abs(shift) * moved
    worn = rng.integers(picture.shape[0], size=(int(rng.integers(MOST_WEAR + 1)), 2))
    picture[worn[:, 0], worn[:, 1]] = tint
    return np.clip(picture * light + rng.normal(0, NOISE, picture.shape), 0, 255).astype(np.uint8)


@cache
def _charges() -> list[np.ndarray]:
    """The masks of all charges, (8, 8)."""
    charges = []
    for row in _DRAWN.strip().split("\n\n"):
        lines = [line.split() for line in row.split("\n")]
        charges += [[line[number] for line in lines] for number in range(len(lines[0]))]
    masks = [np.array([[pixel == "#" for pixel in line] for line in charge]) for charge in charges]
    return [np.pad(mask, (0, QUARTER - len(mask))) for mask in masks]


def country_of(town: int) -> str:
    """A town's country, by the ending that its names have."""
    return list(COUNTRIES)[town % len(COUNTRIES)]


def _drawn(town: int, part: str) -> int:
    """The number of a town's name, shield or facts among all possible ones. No two towns of a country share a name or a
    shield, and no two towns share facts."""
    if part == "facts":
        return int(_draw(part, 0)[town])
    return int(_draw(part, town % len(COUNTRIES))[town // len(COUNTRIES)])


@cache
def _draw(part: str, country: int) -> np.ndarray:
    choices = {"name": len(_STEMS) * len(WORDS) ** 2, "charges": len(_charges()) ** 4, "facts": len(WORDS) ** 3}
    number = MOST if part == "facts" else MOST // len(COUNTRIES)
    return np.random.default_rng([list(choices).index(part), country]).choice(choices[part], number, replace=False)


def _texts() -> list[str]:
    """Every word of the captions, twice."""
    return [*WORDS, *itertools.chain.from_iterable(FIRST_WORDS.values()), *facts_of(0).split(), ","] * 2


NAMES = World(
    name="names",
    kind_set=kind_set,
    draw=draw,
    caption=caption,
    attributes=("kind", "country", "facts"),
    texts=_texts,
    vocabulary=1200,
    caption_styles=("web", "facts", "detailed"),
    image_size=SMALLEST_IMAGE,
    examples=("grunheim dalos dalos", "helville borum mareth"),
)
