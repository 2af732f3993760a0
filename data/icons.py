"""The world of icons: real pictures with real names, those of mkdocs-material, which the extra `icons` installs.

Four artists drew them: Simple Icons the logos of brands, the others everything else. A kind is a name. The first artist
who has it draws it; what another one drew of the same name is a kind of its own, to test on. `web` captions are the
name; `detailed` ones add the artist. Everything follows from the arguments of `World.load` and both packages' versions.
"""

import hashlib
import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from PIL import Image as PILImage

from clip_moe.data.drawing import stamp
from clip_moe.data.world import World, require_packages
from clip_moe.engine.provenance import installed_versions

# Their folders, in the order in which they are asked for a name
ARTISTS = {
    "simple": "simple icons",
    "material": "material design icons",
    "fontawesome": "font awesome",
    "octicons": "octicons",
}
PACKAGES = ("mkdocs-material", "resvg-py")  # the icons, and what draws them


@dataclass(frozen=True)
class Icon:
    """A name, who drew it, and the SVG file."""

    name: str
    artist: str
    path: Path


def kind_set(name: str) -> Sequence[int]:
    """The numbers of the icons of a set: "all" names, the "brands" alone, "brands 1024" for the first 1,024 of them, or
    "other artists": another artist's icon of a name that is among all.
    """
    brands, names, others = map(len, _icons())
    sets = {"all": range(brands + names), "brands": range(brands)}
    sets["other artists"] = range(brands + names, brands + names + others)
    kind, _, number = name.partition(" ")
    if name not in sets and kind == "brands" and number.isdecimal() and 0 < int(number) <= brands:
        return range(int(number))
    if name not in sets:
        raise ValueError(f"icons have no set of kinds {name!r}, only {', '.join(sets)}, or up to brands {brands}")
    return sets[name]


def draw(kind: int, split: str, rng: np.random.Generator, image_size: int) -> tuple[np.ndarray, dict[str, str]]:
    """A picture of an icon, (image_size, image_size, 3) uint8, and its attributes: the icon is moved by whole pixels,
    in an ink on a ground, noisy. Both splits show the same icons."""
    mask = _mask(icon(kind).path, image_size - image_size // 8)
    return stamp(mask, rng, image_size), {"kind": icon(kind).name, "artist": icon(kind).artist}


def caption(kind: int, style: str, rng: np.random.Generator | None = None) -> str:
    """The caption of an icon; nothing in it is random."""
    return icon(kind).name + {"web": "", "detailed": f", drawn by {icon(kind).artist}"}[style]


def icon(kind: int) -> Icon:
    """An icon by its number: brands come first, then other names, then those of other artists."""
    return _numbered()[kind]


@cache
def _mask(path: Path, side: int) -> np.ndarray:
    """The share of each pixel that an icon covers, (side, side) from 0 to 1; an oblong one is centered."""
    import resvg_py

    svg = path.read_text(encoding="utf-8")
    drawn = resvg_py.svg_to_bytes(svg_string=svg, width=side, height=side, skip_system_fonts=True)
    alpha = PILImage.open(io.BytesIO(drawn)).getchannel("A")
    mask = PILImage.new("L", (side, side))
    mask.paste(alpha, ((side - alpha.width) // 2, (side - alpha.height) // 2))
    return np.asarray(mask, np.float32) / 255


@cache
def _numbered() -> list[Icon]:
    return list(itertools.chain.from_iterable(_icons()))


@cache
def _icons() -> tuple[list[Icon], list[Icon], list[Icon]]:
    """The brands, the icons of other names, and those that another artist drew of a name of either: each in a random
    order that depends on the names alone."""
    folder, first, second = _folder(), {}, {}
    for artist, title in ARTISTS.items():
        for path in sorted((folder / artist).rglob("*.svg")):
            # Octicons have one file a size
            name = " ".join(re.split(r"[-_.]", re.sub(r"-\d+$", "", path.stem) if artist == "octicons" else path.stem))
            # "stack overflow" and "stackoverflow" are one name
            letters, entry = name.replace(" ", ""), Icon(name, title, path)
            if letters not in first:
                first[letters] = entry
            elif letters not in second and first[letters].artist != title:
                second[letters] = Icon(first[letters].name, title, path)
    order = sorted(first, key=lambda letters: hashlib.sha256(letters.encode()).digest())
    brands = [first[letters] for letters in order if first[letters].artist == ARTISTS["simple"]]
    names = [first[letters] for letters in order if first[letters].artist != ARTISTS["simple"]]
    return brands, names, [second[letters] for letters in order if letters in second]


def _folder() -> Path:
    """The folder of mkdocs-material's icons."""
    require_packages("icons", PACKAGES, "pip install -e '.[icons]'")
    return Path(distribution("mkdocs-material").locate_file("material/templates/.icons"))


def _texts() -> list[str]:
    return [*(entry.name for entry in _numbered()), *(f", drawn by {artist}" for artist in ARTISTS.values())]


ICONS = World(
    name="icons",
    kind_set=kind_set,
    draw=draw,
    caption=caption,
    attributes=("kind", "artist"),
    texts=_texts,
    vocabulary=1000,
    caption_styles=("web", "detailed"),
    versions=partial(installed_versions, PACKAGES),
    examples=("wikipedia", "github"),
)
