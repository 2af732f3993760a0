"""What captions allow at best, counted by hand."""

import datasets
import pytest
from transformers import AutoTokenizer

from clip_moe.data.overview import look_at

# Six pictures: "a dog" twice, two captions that differ in case alone, and one that training never sees
TEST = ["a dog", "a dog", "a cat", "A cat", "a bird", "a fish"]
TRAIN = ["a dog", "a dog", "a dog", "a cat", "a bird", "salt &amp; pepper"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained("training/symbol_clip")


def rows(captions):
    return datasets.Dataset.from_dict({"caption": captions})


def test_six_pictures(tokenizer):
    overview = look_at(rows(TRAIN), rows(TEST), tokenizer)
    assert (overview.pairs, overview.captions, overview.most_frequent_count, overview.entities) == (6, 4, 3, 1)
    assert (overview.test_images, overview.test_captions, overview.unseen, overview.alike) == (6, 5, 1, 2)
    # Of the images, "a cat" and "A cat" tie; of the 5 captions, both find the same image, which is right for one
    assert overview.best == {"image_to_text": 4 / 6, "text_to_image": 4 / 5}
    assert overview.by_memory == {"image_to_text": 3 / 6, "text_to_image": 3 / 5}
    assert overview.sentences()[0].endswith("'a dog', belongs to 3 (50.0%).")


def test_several_captions_an_image(tokenizer):
    overview = look_at(rows(["a dog"]), rows([["a dog", "A dog"], ["a cat", "a dog"]]), tokenizer)
    # The tokenizer reads "A dog", a caption of the first image alone, as "a dog"
    assert overview.best == {"image_to_text": 1.0, "text_to_image": 3 / 3}


def test_training_alone(tokenizer):
    """Of six rows, three have one caption, and a fourth and a fifth one each that the tokenizer reads alike."""
    overview = look_at(rows(["a dog", "a dog", "a dog", "a cat", "A cat", "a bird"]), None, tokenizer)
    assert overview.best == {"image_to_text": 4 / 6, "text_to_image": 3 / 4}
    assert (
        overview.sentences()[1]
        == "The greatest R@1 that these captions allow is image→text 66.7% and text→image 75.0%."
    )
