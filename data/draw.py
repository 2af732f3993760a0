"""Pictures of the worlds: sheets to look at, and folders as other programs read them.

python -m clip_moe.data.draw symbols --contact_sheet symbols.png
python -m clip_moe.data.draw icons --kinds "brands 1024" --folder my/logos --number 4096
"""

import json
from pathlib import Path

from PIL import Image

from clip_moe.data.contact_sheet import grid
from clip_moe.data.world import SPLITS
from clip_moe.data.worlds import world
from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.files import new_folder


@command
def draw(
    name: str,
    /,
    *,
    contact_sheet: Path | None = None,
    folder: Folder | None = None,
    kinds: str = "all",
    captions: str = "web",
    number: int = 192,
) -> None:
    """Draw pictures of a world: a sheet to look at, or folders as other programs read them.

    Args:
        name: icons, names, symbols, or a world of your own as `package.module:OBJECT`.
        contact_sheet: PNG file, with a training and a test picture of each of the first `number` kinds.
        folder: gets folders `train`, with `number` pictures, and `test`, with one of each kind; each has the captions
            in `metadata.jsonl`.
        kinds: a set of the world's kinds.
        captions: which captions the pictures in the folders get, as `data.captions` in docs/settings.md
        number: how many kinds the sheet shows, or pictures there are to train on.
    """
    if contact_sheet is None and folder is None:
        raise ValueError("nothing to draw: give --contact_sheet FILE or --folder FOLDER")
    drawn = world(name)
    if contact_sheet is not None:
        cells = []
        for seed, kind in enumerate(drawn.kinds(kinds)[:number]):
            pictures = []
            for split in SPLITS:
                subject, rng = drawn.subjects([kind], split, seed)(0)
                pixels, attributes = drawn.draw(subject, split, rng, drawn.image_size)
                pictures.append(Image.fromarray(pixels))
            cells.append((pictures, attributes["kind"]))
        side = max(32, drawn.image_size)
        sheet = grid(cells, columns=12 * 32 // side, side=side, lines=3)
        # Few colors take a fourth of the size
        sheet.quantize(128, dither=0).save(contact_sheet, "png", optimize=True)
    if folder is None:
        return
    with new_folder(folder) as new:
        for split, pictures in {"train": number, "test": len(drawn.kinds(kinds))}.items():
            (new / split).mkdir()
            lines = []
            for index, row in enumerate(drawn.load(split, captions, pictures, drawn.kinds(kinds))):
                lines.append(json.dumps({"file_name": f"{index:06}.png", "caption": row["caption"]}))
                row["image"].save(new / split / f"{index:06}.png")
            (new / split / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    draw.main()
