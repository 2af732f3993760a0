"""A test held out of pairs: nothing of it is in training."""

import datasets
import numpy as np
import pytest
from PIL import Image

from data.held_out import hold_out
from data.tokenizer import learn_tokenizer

TOKENIZER = learn_tokenizer(["a dog"], 600, 8)


def rows(captions, images=None):
    pictures = [Image.new("RGB", (2, 2), (number, 0, 0)) for number in range(len(captions))]
    images = range(len(captions)) if images is None else images
    table = {"image": [pictures[image] for image in images], "caption": captions}
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    return datasets.Dataset.from_dict(table, features).cast_column("image", datasets.Image(decode=False))


def test_no_caption_and_no_image_is_on_both_sides():
    captions = [f"Town {number // 3}" if number % 2 else f"town  {number // 3}" for number in range(60)]
    images = [0, *range(59)]
    train, test = hold_out(rows(captions, images), 0.1, 0, TOKENIZER)
    assert len(train) + len(test) == 60 and 6 <= len(test) <= 9
    for column in ("caption", "image"):
        sides = [{str(value).lower().replace("  ", " ") for value in side[column]} for side in (train, test)]
        assert sides[0].isdisjoint(sides[1])
    again = hold_out(rows(captions, images), 0.1, 0, TOKENIZER)[1]
    other = hold_out(rows(captions, images), 0.1, 1, TOKENIZER)[1]
    assert again["caption"] == test["caption"] != other["caption"]


@pytest.mark.parametrize(
    "captions",
    [["a dog"] * 20, ["a dog", "a cat", "a bird", "a fish", "a cow"], ["a dog"] * 19 + ["a cat"]],
    ids=["one caption", "five pictures", "two captions"],
)
def test_too_few_to_hold_out(captions):
    with pytest.raises(ValueError, match="Give the data a split test"):
        hold_out(rows(captions), 0.1, 0, TOKENIZER)


def test_a_test_has_about_its_share():
    train, test = hold_out(rows(list(map(str, range(250)))), 0.2, 3, TOKENIZER)
    assert (len(train), len(test)) == (200, 50)
    assert np.isin(list(map(int, test["caption"])), list(map(int, train["caption"]))).sum() == 0


def test_captions_that_the_tokenizer_reads_alike_are_on_one_side():
    """In other Unicode normal forms, with a space before the full stop, and behind the cut."""
    texts = [f"e\u0301 {number}." for number in range(20)] + [f"\xe9 {number} ." for number in range(20)]
    longer = [f"{number} b c d e f g h {end}" for end in ("x", "y") for number in range(20)]
    for captions in (texts, longer):
        test = hold_out(rows(captions), 0.1, 0, TOKENIZER)[1]["caption"]
        numbers = [text.split()[1 if captions is texts else 0].strip(".") for text in test]
        assert len(test) == 4 and len(set(numbers)) == 2
