"""The best that captions allow, counted by hand."""

import datasets
import pytest
from transformers import AutoTokenizer

from clip_moe.data.overview import look_at


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained("training/symbol_clip")


def rows(captions):
    return captions and datasets.Dataset.from_dict({"caption": captions})


@pytest.mark.parametrize(
    ("train", "test", "sentences"),
    [
        # Of the six pictures, "a cat" and "A cat" tie; of the five captions, both find the same image, which is right
        # for one. Training never sees "a fish"
        (
            ["a dog", "a dog", "a dog", "a cat", "a bird", "salt &amp; pepper"],
            ["a dog", "a dog", "a cat", "A cat", "a bird", "a fish"],
            [
                "Training has 6 pairs with 4 different captions; the most frequent, 'a dog', belongs to 3 (50.0%).",
                "The test has 6 images with 5 different captions, 1 of which training never sees.",
                "The greatest R@1 that these captions allow is image→text 66.7% and text→image 80.0%; with the "
                "captions of training alone, image→text 50.0% and text→image 60.0%.",
                "2 captions have the same tokens as another caption: they differ only in case, spaces or after "
                "truncation.",
                "1 pairs have HTML in their caption, such as `&amp;`: write the character.",
            ],
        ),
        # The tokenizer reads "A dog", a caption of the first image alone, as "a dog"
        (
            ["a dog"],
            [["a dog", "A dog"], ["a cat", "a dog"]],
            ["The greatest R@1 that these captions allow is image→text 100.0% and text→image 100.0%; with the"],
        ),
        # Of six rows, three have one caption, and a fourth and a fifth one each that the tokenizer reads alike
        (
            ["a dog", "a dog", "a dog", "a cat", "A cat", "a bird"],
            None,
            ["The greatest R@1 that these captions allow is image→text 66.7% and text→image 75.0%."],
        ),
    ],
    ids=["six pictures", "several captions an image", "training alone"],
)
def test_what_captions_allow(train, test, sentences, tokenizer):
    lines = look_at(rows(train), rows(test), tokenizer)
    assert all(any(line.startswith(sentence) for line in lines) for sentence in sentences), lines
