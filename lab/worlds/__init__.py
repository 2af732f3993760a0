"""Worlds on trial: real facts that other packages have, for the law and the frontier."""

from collections.abc import Sequence

# Name -> how a recipe spells it
SOURCES = {"characters": "lab.worlds.characters:CHARACTERS", "molecules": "lab.worlds.molecules:MOLECULES"}


def some_kinds(world: str, name: str, most: int) -> Sequence[int]:
    """The numbers of the kinds of a set: "4096" for the first so many, "4096 half 1" and "4096 half 2" for every other
    one of these, "all" for as many as there are. A kind is in the same half of all numbers."""
    number, _, part = name.partition(" ")
    number, halves = str(most) if number == "all" else number, {"half 1": 0, "half 2": 1}
    if part not in ("", *halves) or not number.isdecimal() or not 1 < int(number) <= most:
        raise ValueError(
            f"{world} have no set of kinds {name!r}: it is all or a number from 2 to {most}, of which half 1 or half 2 "
            "may be named, as in 1024 half 1"
        )
    return range(halves[part], int(number), 2) if part else range(int(number))
