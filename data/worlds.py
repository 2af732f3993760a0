"""The worlds that this package draws, so that nothing needs a download; `icons` need an extra.

A world is a module with `load`, `kind_set`, `build_tokenizer`, `CAPTION_STYLES` and `TEMPLATES`; see `data.names` and
docs/worlds.md.

    python -m data.worlds symbols --contact-sheet symbols.png
"""

from pathlib import Path
from typing import Literal

from transformers import CLIPProcessor

from data import icons, names, symbols
from data.drawing import SPLITS, build_image_processor
from records.command_line import command

WORLDS = {"icons": icons, "names": names, "symbols": symbols}


def build_processor(world: str, context_length: int, image_size: int) -> CLIPProcessor:
    """The `CLIPProcessor` of a world: it knows the words of its captions, and scales images to [-1, 1]."""
    tokenizer = WORLDS[world].build_tokenizer(context_length)
    return CLIPProcessor(image_processor=build_image_processor(image_size), tokenizer=tokenizer)


@command
def draw_contact_sheet(
    world: Literal[*WORLDS], /, *, contact_sheet: Path, kinds: str = "all", number: int = 192
) -> None:
    """Draw kinds of a world: a training and a test picture of each.

    Args:
        world: its name.
        contact_sheet: PNG file to draw into.
        kinds: a set of the world's kinds.
        number: of kinds, the first ones of the set.
    """
    from data.contact_sheet import grid  # which reads pairs, also of worlds

    cells = []
    for seed, kind in enumerate(WORLDS[world].kind_set(kinds)[:number]):
        rows = [WORLDS[world].load(split, "web", 1, [kind], seed)[0] for split in SPLITS]
        cells.append(([row["image"] for row in rows], rows[0]["kind"]))
    # Few colors take a fourth of the size
    grid(cells, columns=12, side=32, lines=3).quantize(128, dither=0).save(contact_sheet, "png", optimize=True)


if __name__ == "__main__":
    draw_contact_sheet.main()
