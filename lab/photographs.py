"""Real photographs to learn: squares cut from the photographs of two packages, as a folder of captioned pictures.

    pip install -c constraints.txt mvtb-data scikit-image
    python -m lab.photographs runs/photographs

Each photograph is cut into 4 x 4 cells. Four of them, one in each row and column, are the test, so the splits share no
pixel.
"""

import csv
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.files import new_folder

# Package -> (its folder of photographs, file -> caption). Of photographs that overlap, one is here
PHOTOGRAPHS = {
    "mvtbdata": (
        "images",
        {
            "58060.png": "a basket of grain",
            "aerial2-001.png": "gray streets from the air",
            "aerialphoto.png": "a coast from the air",
            "arucoboard.png": "a desk with electronics",
            "building2-3.png": "an ornate house in the city",
            "butterfly.jpg": "a butterfly",
            "castle.png": "a sign for tourists",
            "church.png": "a white church",
            "eiffel-1.png": "the Eiffel tower",
            "flowers1.png": "pink tulips",
            "flowers2.png": "white flowers among leaves",
            "flowers3.png": "yellow flowers in a bed",
            "flowers4.png": "red and white tulips",
            "flowers5.png": "yellow tulips",
            "flowers6.png": "lilac flowers",
            "flowers7.png": "white and orange flowers",
            "flowers8.png": "a bed of pink flowers",
            "flowers9.png": "red and yellow tulips",
            "greenscreen.png": "a toy before a green wall",
            "im.001.png": "a model of a house",
            "image3.jpg": "an old car in a street",
            "lab-scene.png": "a robotics laboratory",
            "left06.jpg": "a man with a chessboard",
            "lena.png": "a woman with a hat",
            "monalisa.png": "the Mona Lisa",
            "notre-dame.png": "Notre-Dame",
            "P1070491.png": "a red brick house in the sun",
            "P1070494.png": "a red brick house in the shade",
            "P1070496.png": "a brick wall and a tree",
            "P1070498.png": "blue umbrellas of a cafe",
            "P1070501.png": "a tree trunk before windows",
            "P1070504.png": "a garden path",
            "P1070505.png": "the corner of a brick house",
            "P1070507.png": "an old house with arches",
            "P1070509.png": "a tree on a lawn",
            "P1070511.png": "palm trees",
            "P1070513.png": "a gray pole and palms",
            "P1070514.png": "a house of sandstone",
            "parks.png": "a path in a park",
            "penguins.png": "a warning of penguins",
            "road.png": "a road in the desert",
            "rocks2-l.png": "rocks",
            "roof.png": "a roof of slate",
            "street.png": "a gray street",
            "tags.png": "tags on a floor",
            "tomato_54.png": "a tomato plant",
            "walls-l.png": "a cottage with white windows",
            "yellowtargets.png": "yellow squares on rails",
        },
    ),
    "skimage": (
        "data",
        {
            "astronaut.png": "an astronaut",
            "brick.png": "bricks",
            "camera.png": "a man with a camera",
            "chelsea.png": "a cat",
            "coffee.png": "a cup of coffee",
            "coins.png": "old coins",
            "grass.png": "grass",
            "gravel.png": "gravel",
            "hubble_deep_field.jpg": "distant galaxies",
            "ihc.png": "stained tissue",
            "moon.png": "the moon",
            "motorcycle_left.png": "a motorcycle",
            "page.png": "a printed page",
            "retina.jpg": "the retina of an eye",
            "rocket.jpg": "a rocket at night",
            "text.png": "a handwritten formula",
        },
    ),
}
CELLS = 4  # a side
TEST_COLUMNS = (1, 3, 0, 2)  # of each row
ROWS, COLUMNS = ("top", "upper", "lower", "bottom"), ("far left", "left", "right", "far right")
LEAST = 0.7  # of a cell's shorter side


@command
def main(
    output: Folder,
    /,
    *,
    num_photographs: int | None = None,
    per_cell: int = 4,
    image_size: int = 64,
    captions: Literal["photographs", "places", "folders"] = "photographs",
    seed: int = 0,
) -> str:
    """Cut squares out of photographs, into OUTPUT/train and OUTPUT/test.

        python -m lab.photographs runs/photographs --num_photographs 8 --captions folders

    Args:
        output: a new folder
        num_photographs: how many, drawn at random (default: all 64)
        per_cell: squares of each cell, 12 of training and 4 of the test
        image_size: pixels a side
        captions: that of the photograph; with the place, which is another one in each cell; or a folder for each
        seed: of what is drawn
    """
    photographs, rng = [*_find()], np.random.default_rng(seed)
    for name, value, most in (("num_photographs", num_photographs, len(photographs)), ("per_cell", per_cell, math.inf)):
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"--{name} {value}: it is at least 1" + f" and at most {most}" * (most < math.inf))
    if num_photographs is not None:
        photographs = [photographs[index] for index in sorted(rng.permutation(len(photographs))[:num_photographs])]
    counts = {"train": 0, "test": 0}
    with new_folder(output) as folder:
        rows: dict[str, list[tuple[str, str]]] = {split: [] for split in counts}
        for path, caption in photographs:
            with Image.open(path) as opened:
                photograph = opened.convert("RGB")
            for row in range(CELLS):
                for column in range(CELLS):
                    split = "test" if TEST_COLUMNS[row] == column else "train"
                    text = f"{caption}, {ROWS[row]} {COLUMNS[column]}" if captions == "places" else caption
                    for number in range(per_cell):
                        square = _square(photograph, row, column, rng).resize((image_size, image_size))
                        name = f"{path.stem}_{row}{column}_{number}.jpg"
                        file = Path(caption, name) if captions == "folders" else Path(name)
                        (folder / split / file).parent.mkdir(parents=True, exist_ok=True)
                        square.save(folder / split / file, quality=90)
                        rows[split].append((file.as_posix(), text))
                        counts[split] += 1
        if captions != "folders":
            for split, lines in rows.items():
                with (folder / split / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows([("file_name", "caption"), *lines])
    return f"wrote {counts['train']:,} and {counts['test']:,} squares of {len(photographs)} photographs to {output}"


def _find() -> Iterator[tuple[Path, str]]:
    """The photographs and their captions. Raises a ValueError where a package is not installed."""
    for package, (folder, captions) in PHOTOGRAPHS.items():
        spec = find_spec(package)
        if spec is None:
            raise ValueError(f"photographs need {package}: pip install -c constraints.txt mvtb-data scikit-image")
        files = {path.name: path for path in Path(spec.origin).parent.joinpath(folder).rglob("*.*")}
        yield from ((files[name], caption) for name, caption in captions.items())


def _square(photograph: Image.Image, row: int, column: int, rng: np.random.Generator) -> Image.Image:
    """A square within a cell, at a random place and of a random size."""
    width, height = photograph.width // CELLS, photograph.height // CELLS
    side = round(min(width, height) * rng.uniform(LEAST, 1))
    left, top = column * width + rng.integers(width - side + 1), row * height + rng.integers(height - side + 1)
    return photograph.crop((left, top, left + side, top + side))


if __name__ == "__main__":
    main.main()
