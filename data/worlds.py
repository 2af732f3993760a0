"""Names of worlds. Importing them imports nothing heavy."""

import re
from typing import TYPE_CHECKING

from clip_moe.engine.own_modules import code_of, import_object

if TYPE_CHECKING:
    from clip_moe.data.world import World

# Built-in worlds: name -> where the object is
WORLDS = {
    "icons": "clip_moe.data.icons:ICONS",
    "names": "clip_moe.data.names:NAMES",
    "symbols": "clip_moe.data.symbols:SYMBOLS",
}
# Worlds of the laboratory
MOVED = {"characters": "lab.worlds.characters:CHARACTERS", "molecules": "lab.worlds.molecules:MOLECULES"}
OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_world(source: str | None) -> bool:
    """Whether a source of data is a built-in world or names one of one's own, as `package.module:OBJECT`."""
    return source in WORLDS or OWN.fullmatch(source or "") is not None


def world(source: str) -> "World":
    """The world that a source names. Raises a ValueError where there is none."""
    from clip_moe.data.world import World

    named = import_object(WORLDS.get(source, source), "world")
    if not isinstance(named, World):
        raise ValueError(f"{source!r} is not a clip_moe.data.world.World")
    return named


def origin_of(source: str) -> dict[str, str]:
    """Versions of other packages, and digests of modules of one's own, that the pictures of a world follow from."""
    module = WORLDS.get(source, source).partition(":")[0]
    return world(source).versions() | code_of([module])
