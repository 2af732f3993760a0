"""Captions of several policies: what they say, how long they are, and that no sentence is torn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import glyphs
from training.arguments import CaptionPolicy
from training.captions import build_captions, pack_sentences, split_sentences
from training.data import DataArguments, caption_columns

TEXT = "A red star stands here. Is it large? It is! Behind it lies 3.5 m of sand."
SENTENCES = ["A red star stands here.", "Is it large?", "It is!", "Behind it lies 3.5 m of sand."]


def test_sentences():
    assert split_sentences(TEXT) == SENTENCES
    assert split_sentences("  no end at all ") == ["no end at all"]
    assert split_sentences(" ") == []


@given(st.lists(st.integers(1, 30), min_size=0, max_size=7), st.integers(1, 60), st.integers(1, 5), st.integers(0, 9))
@settings(deadline=None)
def test_packed_sentences_fit_and_are_whole(lengths, limit, count, seed):
    sentences = [f"s{number}." for number in range(len(lengths))]
    texts = pack_sentences(sentences, lengths, limit, count, np.random.default_rng(seed))
    assert len(texts) == count
    there = [text for text in texts if text]
    assert texts == there + [""] * (count - len(there))  # missing ones come last
    assert len(set(there)) == len(there)
    for text in there:
        numbers = [int(sentence[1:-1]) for sentence in text.split()]
        assert numbers == sorted(set(numbers))  # in the order of the text, none twice
        used = sum(lengths[number] for number in numbers)
        assert used <= limit
        assert all(used + lengths[n] > limit for n in range(len(lengths)) if n not in numbers)  # nothing else fits
    assert bool(there) == any(length <= limit for length in lengths)


@pytest.fixture(scope="module")
def built():
    arguments = DataArguments(source="glyphs", captions="detailed", num_samples=40)
    tokenizer = glyphs.build_processor(64, 32).tokenizer
    policies = [
        CaptionPolicy(policy="full", column="raw_caption"),
        CaptionPolicy(policy="first_sentence", column="caption"),
        CaptionPolicy(policy="full", column="caption"),
        CaptionPolicy(policy="packed", column="caption", count=3, max_tokens=26),
    ]
    rows = caption_columns(arguments, ["caption", "raw_caption"])
    return rows, tokenizer, policies, build_captions(rows, policies, tokenizer, seed=0)


def test_policies(built):
    rows, tokenizer, policies, captions = built
    web = glyphs.load("train", "web", 40)
    assert len(captions) == 40 and captions.column_names == ["image", "caption"]
    for row, raw, made in zip(rows, web["caption"], captions, strict=True):
        assert made["image"] == row["image"]
        assert len(made["caption"]) == 6
        sentences = split_sentences(row["caption"])
        assert made["caption"][:3] == [raw, sentences[0], row["caption"]]
        for packed in filter(None, made["caption"][3:]):
            assert set(split_sentences(packed)) <= set(sentences)
            assert len(tokenizer(packed)["input_ids"]) <= 26
    assert any("" in made for made in captions["caption"])  # two sentences do not make three combinations
    assert all(made[3] for made in captions["caption"])


def test_captions_are_seeded(built):
    rows, tokenizer, policies, captions = built
    again = build_captions(rows, policies, tokenizer, seed=0)
    other = build_captions(rows, policies, tokenizer, seed=1)
    assert list(again["caption"]) == list(captions["caption"]) != list(other["caption"])


def test_a_missing_column():
    arguments = DataArguments(source="glyphs", captions="detailed", num_samples=4)
    with pytest.raises(ValueError, match="has no column alt_text; its columns are .*raw_caption"):
        caption_columns(arguments, ["alt_text"])


def test_what_a_policy_cannot_be():
    with pytest.raises(ValueError, match="count and max_tokens are for packed captions, not for full"):
        CaptionPolicy(policy="full", column="caption", count=2)
