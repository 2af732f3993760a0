"""Pictures that are the same under other bytes, and a test held out of pairs: nothing of it is in training."""

import io

import datasets
import numpy as np
import pytest
from PIL import Image

from clip_moe.data import near_copies
from clip_moe.data.held_out import class_names, hold_out
from clip_moe.data.near_copies import find_copies
from clip_moe.data.symbols import SYMBOLS
from clip_moe.data.texts import plain_words
from clip_moe.data.tokenizer import learn_tokenizer


def saved(picture, form, **options):
    file = io.BytesIO()
    picture.save(file, form, **options)
    return {"bytes": file.getvalue(), "path": None}


def rows_of(*images):
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
    assert find_copies(rows_of(images, others)).in_training(len(images)) == expected


def test_different_pictures_are_no_copies():
    for pictures in PICTURES.values():
        assert len(find_copies(rows_of([saved(picture, "PNG") for picture in pictures])).near) == 0
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
    assert len(find_copies(rows_of(marked, plain, [saved(Image.fromarray(box), "PNG") for box in boxes])).near) == 0


def test_more_pictures_than_can_be_compared(monkeypatch, caplog):
    monkeypatch.setattr(near_copies, "MOST", 5)
    pictures = PICTURES["symbols"][:3]
    forms = [[saved(picture, "PNG") for picture in pictures], [saved(picture, "JPEG") for picture in pictures]]
    assert find_copies(rows_of(*forms, forms[0])).in_training(6) == (3, 0)
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
    copies = find_copies(rows_of(parts))
    assert len(copies.near) == 0 and copies.num_too_alike == 30


# --- a test held out

TOKENIZER, WHOLE = (learn_tokenizer(["a dog"], 600, length) for length in (8, 77))


def rows(captions, images=None):
    pictures = [Image.new("RGB", (2, 2), (number, 0, 0)) for number in range(len(captions))]
    images = range(len(captions)) if images is None else images
    table = {"image": [pictures[image] for image in images], "caption": captions}
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    return datasets.Dataset.from_dict(table, features).cast_column("image", datasets.Image(decode=False))


def held_out(rows, share, seed, tokenizer):
    return tuple(
        map(
            rows.select,
            hold_out(rows, share, seed, tokenizer, find_copies(rows), class_names(rows["caption"], tokenizer)),
        )
    )


def test_no_caption_and_no_image_is_on_both_sides():
    captions = [f"Town {number // 3}" if number % 2 else f"town  {number // 3}" for number in range(60)]
    images = [0, *range(59)]
    train, test = held_out(rows(captions, images), 0.1, 0, TOKENIZER)
    assert len(train) + len(test) == 60 and 6 <= len(test) <= 9
    for column in ("caption", "image"):
        sides = [{str(value).lower().replace("  ", " ") for value in side[column]} for side in (train, test)]
        assert sides[0].isdisjoint(sides[1])
    again = held_out(rows(captions, images), 0.1, 0, TOKENIZER)[1]
    other = held_out(rows(captions, images), 0.1, 1, TOKENIZER)[1]
    assert again["caption"] == test["caption"] != other["caption"]


def test_captions_that_the_tokenizer_reads_alike_are_on_one_side():
    """In other Unicode normal forms, with a space before the full stop, and behind the cut."""
    texts = [f"e\u0301 {number}." for number in range(20)] + [f"\xe9 {number} ." for number in range(20)]
    longer = [f"{number} b c d e f g h {end}" for end in ("x", "y") for number in range(20)]
    for captions in (texts, longer):
        test = held_out(rows(captions), 0.1, 0, TOKENIZER)[1]["caption"]
        numbers = [text.split()[1 if captions is texts else 0].strip(".") for text in test]
        assert len(test) == 4 and len(set(numbers)) == 2


@pytest.mark.parametrize(
    "other",
    [
        "A dog, 7.",
        "“a dog, 7”",
        "'a dog, 7'!",
        "a&nbsp;dog, 7",
        "a dog&#44; 7",
        "a dog&amp;#44; 7",
        "ａ ｄｏｇ, 7",
        "a dog\u200b, 7 …",
        "«A_dog, 7»",
        "a\u00a0dog,\n7",
    ],
)
def test_texts_that_say_the_same(other):
    assert plain_words(other) == plain_words("a dog, 7")
    captions = [f"a dog, {number}" for number in range(20)] + [other.replace("7", f"{number}") for number in range(20)]
    train, test = held_out(rows(captions), 0.1, 0, WHOLE)
    sides = [set(map(plain_words, side["caption"])) for side in (train, test)]
    assert len(test) == 4 and sides[0].isdisjoint(sides[1])


def test_texts_that_say_something_else():
    texts = ["C++", "C#", "C", "3.5", "35", "a-b", "ab", "it's", "its", "?", "!", "salt & pepper", "salt pepper"]
    assert len(set(map(plain_words, texts))) == len(texts)


def test_pictures_under_other_bytes_are_on_one_side():
    forms = [lambda picture: saved(picture, "PNG"), *LOSSLESS.values(), NEARLY["jpeg"], NEARLY["lossy webp"]]
    images = [form(picture) for form in forms for picture in PICTURES["symbols"]]
    table = {"image": images, "caption": [f"number {number}" for number in range(len(images))]}
    features = datasets.Features({"image": datasets.Image(decode=False), "caption": datasets.Value("string")})
    train, test = held_out(datasets.Dataset.from_dict(table, features), 0.1, 0, WHOLE)
    numbers = [{int(caption.split()[1]) % 24 for caption in side["caption"]} for side in (train, test)]
    assert len(numbers[1]) == 3 and numbers[0].isdisjoint(numbers[1])
    images = datasets.concatenate_datasets([train.select_columns("image"), test.select_columns("image")])
    assert find_copies(images).in_training(len(train)) == (0, 0)


def test_classes_are_held_out_by_picture():
    """Each in its share, and none without a picture to train on, though a picture is there twice."""
    captions = [f"class {'abcdefghij'[number % 10]}{'.' * (number % 3)}" for number in range(200)] + ["a rare one"]
    images = [*range(100), *range(50), *range(150, 201)]
    train, test = held_out(rows(captions, images), 0.1, 0, WHOLE)
    assert len(train) + len(test) == 201 and 21 <= len(test) <= 23
    train_texts, test_texts = (set(map(plain_words, side["caption"])) for side in (train, test))
    assert test_texts < train_texts and len(test_texts) == 10 and "a rare one" in train_texts
    assert {image["bytes"] for image in train["image"]}.isdisjoint(image["bytes"] for image in test["image"])
    assert held_out(rows(captions, images), 0.1, 1, WHOLE)[1]["caption"] != test["caption"]


def test_what_is_no_class_by_its_captions():
    classes = ["a_dog", "A dog", "a dog", "a dog.", "a dog"] + ["a cat"] * 5
    assert class_names(classes, WHOLE) == ["a dog"] * 5 + ["a cat"] * 5
    twice = [f"number {number // 2}" for number in range(60)]
    lists = [["a dog", "a cat"]] * 5 + [["a bird", "a fish"]] * 5
    for captions in (["a dog"] * 20, twice, ["a dog"] * 18 + ["a cat"] * 4, lists, [*classes, "x", "y", "z"]):
        assert class_names(captions, WHOLE) is None
