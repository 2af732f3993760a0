"""A test held out of pairs: nothing of it is in training."""

import datasets
import pytest
from PIL import Image
from test_near_copies import LOSSLESS, NEARLY, PICTURES, saved

from clip_moe.data.held_out import class_names, hold_out
from clip_moe.data.near_copies import find_copies
from clip_moe.data.texts import plain_words
from clip_moe.data.tokenizer import learn_tokenizer

TOKENIZER, WHOLE = (learn_tokenizer(["a dog"], 600, length) for length in (8, 77))


def rows(captions, images=None):
    pictures = [Image.new("RGB", (2, 2), (number, 0, 0)) for number in range(len(captions))]
    images = range(len(captions)) if images is None else images
    table = {"image": [pictures[image] for image in images], "caption": captions}
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    return datasets.Dataset.from_dict(table, features).cast_column("image", datasets.Image(decode=False))


def held_out(rows, share, seed, tokenizer):
    return hold_out(rows, share, seed, tokenizer, find_copies(rows))


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
