"""Pictures that are the same under other bytes."""

import io

import datasets
import numpy as np
import pytest
from PIL import Image

from clip_moe.data import near_copies
from clip_moe.data.near_copies import find_copies
from clip_moe.data.symbols import SYMBOLS


def saved(picture, form, **options):
    file = io.BytesIO()
    picture.save(file, form, **options)
    return {"bytes": file.getvalue(), "path": None}


def rows(*images):
    features = datasets.Features({"image": datasets.Image(decode=False)})
    return datasets.Dataset.from_dict({"image": [image for part in images for image in part]}, features)


def drawn(number):
    """Pictures of symbols, 32 pixels, no two of one kind."""
    return list(SYMBOLS.load("train", "detailed", number, SYMBOLS.kinds("all")[:number], 0)["image"])


def noise(number, side):
    rng = np.random.default_rng(side)
    return [Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)) for _ in range(number)]


PICTURES = {"symbols": drawn(24), "noise": noise(24, 64), "large noise": noise(4, 300)}
LOSSLESS = {
    "png": lambda picture: saved(picture, "PNG", compress_level=0),
    "webp": lambda picture: saved(picture, "WEBP", lossless=True),
    "tiff": lambda picture: saved(picture, "TIFF"),
    "opaque": lambda picture: saved(picture.convert("RGBA"), "PNG"),
}
NEARLY = {
    "jpeg": lambda picture: saved(picture, "JPEG"),
    "lossy webp": lambda picture: saved(picture, "WEBP"),
    "half the size": lambda picture: saved(picture.resize((picture.width // 2,) * 2), "PNG"),
    "twice the size": lambda picture: saved(picture.resize((picture.width * 2,) * 2), "JPEG", quality=90),
}


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("form", [*LOSSLESS, *NEARLY])
def test_the_same_picture_under_other_bytes(kind, form):
    pictures = PICTURES[kind]
    images = [saved(picture, "PNG") for picture in pictures]
    others = list(map((LOSSLESS | NEARLY)[form], pictures))
    if form == "half the size" and pictures[0].width == 32:
        expected = 0, 0  # 16 pixels are too few
    else:
        expected = (len(pictures), 0) if form in LOSSLESS else (0, len(pictures))
    assert find_copies(rows(images, others)).in_training(len(images)) == expected


def test_different_pictures_are_no_copies():
    for pictures in PICTURES.values():
        assert len(find_copies(rows([saved(picture, "PNG") for picture in pictures])).near) == 0
    marked = []
    for number in range(64):  # of one color, but for a pixel or two
        picture = Image.new("RGB", (32, 32), (90, 90, 30 * (number % 8)))
        picture.putpixel((4 * (number % 8), 4 * (number // 8)), (255, 0, 0))
        marked.append(saved(picture, "PNG"))
    plain = [saved(Image.new("RGB", (40, 40), (number, 0, 0)), "PNG") for number in range(32)]
    scene = np.asarray(noise(1, 300)[0].resize((64, 64)).resize((300, 300))).copy()
    boxes = []  # one scene with a small thing in different places
    for number in range(4):
        boxes.append(scene.copy())
        boxes[-1][60 * number : 60 * number + 30, 100:130] = 255 * (number % 2)
    assert len(find_copies(rows(marked, plain, [saved(Image.fromarray(box), "PNG") for box in boxes])).near) == 0


def test_more_pictures_than_can_be_compared(monkeypatch, caplog):
    monkeypatch.setattr(near_copies, "MOST", 5)
    pictures = PICTURES["symbols"][:3]
    forms = [[saved(picture, "PNG") for picture in pictures], [saved(picture, "JPEG") for picture in pictures]]
    assert find_copies(rows(*forms, forms[0])).in_training(6) == (3, 0)
    assert "skipping the search for near copies: 6 images, more than 5" in caplog.text


def test_pictures_of_one_kind_are_no_copies():
    """A part in its place, with defects that are smaller than what all pictures have in common."""
    rng, parts = np.random.default_rng(0), []
    for number in range(30):
        picture = np.full((224, 224, 3), 40, np.uint8)
        picture[48:176, 48:176] = 200
        top, left = rng.integers(60, 150, 2)
        picture[top : top + 3 + number % 3, left : left + 5] = 90
        parts.append(saved(Image.fromarray(picture + rng.integers(0, 4, picture.shape, np.uint8)), "PNG"))
    copies = find_copies(rows(parts))
    assert len(copies.near) == 0 and copies.num_too_alike == 30
