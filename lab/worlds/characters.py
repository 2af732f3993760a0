"""The world of characters: Chinese characters in four fonts, with what they mean and how they are read.

Unicode's Unihan has the meanings and Mandarin readings. It and the fonts are packages of Debian: see `FILES`. Training
pictures are in three fonts, test pictures in a fourth one. A kind is a character that all four have. Of characters with
one meaning, such as a traditional one and its simplified form, only the first in Unicode's order is there.

`web` captions are the meaning, `facts` the reading, which many characters share, and `detailed` ones both. Everything
follows from the arguments of `World.load` and from the files, to the bit.
"""

import bz2
import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image as PILImage
from PIL import ImageFont

from clip_moe.data.drawing import choose, stamp
from clip_moe.data.world import World
from clip_moe.engine.digests import file_digests
from lab.worlds import some_kinds

UNIHAN = "unicode-data"
FONTS = {
    "train": ("fonts-arphic-uming", "fonts-arphic-ukai", "fonts-wqy-zenhei"),
    "test": ("fonts-wqy-microhei",),
}
# Package -> what is used of it, in one of the folders of XDG_DATA_DIRS
FILES = {
    UNIHAN: "unicode/Unihan_Readings.txt.bz2",
    "fonts-arphic-uming": "fonts/truetype/arphic/uming.ttc",
    "fonts-arphic-ukai": "fonts/truetype/arphic/ukai.ttc",
    "fonts-wqy-zenhei": "fonts/truetype/wqy/wqy-zenhei.ttc",
    "fonts-wqy-microhei": "fonts/truetype/wqy/wqy-microhei.ttc",
}
LONGEST_MEANING = 64  # letters


@dataclass(frozen=True)
class Character:
    """A character, what it means, and how it is read, in pinyin."""

    text: str
    meaning: str
    reading: str


def versions() -> dict[str, str]:
    """The SHA-256 of the files that are installed, from which all pictures follow."""
    installed = {package: file for package in FILES if (file := _find(package)) is not None}
    return dict(zip(installed, file_digests(map(str, installed.values())), strict=True))


def draw(kind: int, split: str, rng: np.random.Generator, image_size: int) -> tuple[np.ndarray, dict[str, str]]:
    """A picture of a character and its attributes. Both splits show the same characters, in other fonts."""
    drawn, font = character(kind), choose(rng, FONTS[split])
    mask = _glyph(drawn.text, font, image_size - image_size // 8)
    attributes = {"kind": drawn.meaning, "character": drawn.text, "reading": drawn.reading, "font": font}
    return stamp(mask, rng, image_size), attributes


def caption(kind: int, style: str, rng: np.random.Generator | None = None) -> str:
    """The caption of a character; nothing in it is random."""
    drawn = character(kind)
    both = f"{drawn.reading}: {drawn.meaning}"
    return {"web": drawn.meaning, "facts": drawn.reading, "detailed": both}[style]


def character(kind: int) -> Character:
    """A character by its number."""
    return _characters()[kind]


def _glyph(text: str, package: str, side: int) -> np.ndarray:
    """The share of each pixel that a centered character covers, (side, side) from 0 to 1."""
    mask = PILImage.new("L", (side, side))
    glyph, _ = _font(package, side).getmask2(text, "L")
    drawn = PILImage.frombytes("L", glyph.size, bytes(glyph))
    mask.paste(drawn, ((side - drawn.width) // 2, (side - drawn.height) // 2))
    return np.asarray(mask, np.float32) / 255


@cache
def _font(package: str, side: int) -> ImageFont.FreeTypeFont:
    # Some characters are a little larger than their font
    return ImageFont.truetype(str(_file(package)), side - side // 14, layout_engine=ImageFont.Layout.BASIC)


@cache
def _characters() -> list[Character]:
    """All, in a random order that depends on the characters alone."""
    from matplotlib.ft2font import FT2Font

    fields = {"kDefinition": {}, "kMandarin": {}}
    with bz2.open(_file(UNIHAN), "rt", encoding="utf-8") as lines:
        for line in lines:
            code, _, rest = line.rstrip("\n").partition("\t")
            name, _, value = rest.partition("\t")
            if code.startswith("U+") and name in fields:
                fields[name][int(code[2:], 16)] = value
    fonts = [package for split_fonts in FONTS.values() for package in split_fonts]
    codes = set.intersection(*map(set, fields.values()), *(set(FT2Font(_file(f)).get_charmap()) for f in fonts))
    found = {}
    for code in sorted(codes):
        meaning = _meaning(fields["kDefinition"][code])
        if meaning.isascii() and 0 < len(meaning) <= LONGEST_MEANING:
            drawn = Character(chr(code), meaning, fields["kMandarin"][code].split()[0])
            found.setdefault("".join(filter(str.isalnum, meaning.lower())), drawn)
    return sorted(found.values(), key=lambda drawn: hashlib.sha256(drawn.text.encode()).digest())


def _meaning(definition: str) -> str:
    """The first of the senses, which semicolons separate, and as many more as fit within `LONGEST_MEANING`."""
    first, *others = definition.split("; ")
    for sense in others:
        if len(f"{first}; {sense}") > LONGEST_MEANING:
            break
        first = f"{first}; {sense}"
    return first


def _file(package: str) -> Path:
    """A package's file."""
    if (file := _find(package)) is None:
        raise ValueError(f"characters need {package}, which is not installed: apt-get install {' '.join(FILES)}")
    return file


def _find(package: str) -> Path | None:
    folders = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    files = [Path(folder, FILES[package]) for folder in folders.split(":")]
    return next((file for file in files if file.is_file()), None)


CHARACTERS = World(
    name="characters",
    kind_set=lambda name: some_kinds("characters", name, len(_characters())),
    draw=draw,
    caption=caption,
    attributes=("kind", "character", "reading", "font"),
    texts=lambda: [caption(kind, "detailed") for kind in range(len(_characters()))],
    vocabulary=4000,
    caption_styles=("web", "facts", "detailed"),
    versions=versions,
    tested_as="in a font that is not trained on, with its meaning",
)
