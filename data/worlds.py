"""The worlds that this package draws, so that nothing needs a download; `icons` need an extra.

A world is a module with `load`, `kind_set`, `build_tokenizer`, `CAPTION_STYLES` and `TEMPLATES`; see `data.names` and
docs/worlds.md.

    python -m data.worlds symbols --contact-sheet symbols.png
"""

import argparse

from transformers import CLIPProcessor

from data import icons, names, symbols
from data.drawing import SPLITS, build_image_processor

WORLDS = {"icons": icons, "names": names, "symbols": symbols}


def build_processor(world: str, context_length: int, image_size: int) -> CLIPProcessor:
    """The `CLIPProcessor` of a world: it knows the words of its captions, and scales images to [-1, 1]."""
    tokenizer = WORLDS[world].build_tokenizer(context_length)
    return CLIPProcessor(image_processor=build_image_processor(image_size), tokenizer=tokenizer)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw kinds of a world: a training and a test picture of each.")
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("--contact-sheet", required=True, metavar="PNG", help="file to draw into")
    parser.add_argument("--kinds", default="all", help="a set of the world's kinds")
    parser.add_argument("--number", type=int, default=192, help="of kinds, the first ones of the set")
    arguments = parser.parse_args(argv)
    from data.contact_sheet import grid  # which reads pairs, also of worlds

    world, cells = WORLDS[arguments.world], []
    try:
        for seed, kind in enumerate(world.kind_set(arguments.kinds)[: arguments.number]):
            rows = [world.load(split, "web", 1, [kind], seed)[0] for split in SPLITS]
            cells.append(([row["image"] for row in rows], rows[0]["kind"]))
        # Few colors take a fourth of the size
        sheet = grid(cells, columns=12, side=32, lines=3).quantize(128, dither=0)
        sheet.save(arguments.contact_sheet, "png", optimize=True)
    except (OSError, ValueError) as error:  # no such folder, no such kinds, no extra
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
