"""Captions of several policies: what they say, how long they are, and that no sentence is torn."""

import dataclasses

import datasets
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_evaluation import with_captions
from test_losses import plain_multi_positive_loss
from tiny_runs import TUNED
from torch import nn
from transformers import CLIPModel, CLIPProcessor

from clip_moe.data import symbols
from clip_moe.data.arguments import CaptionPolicy, DataArguments
from clip_moe.data.captions import build_captions, pack_sentences, split_sentences
from clip_moe.data.pairs import caption_columns
from clip_moe.data.symbols import SYMBOLS
from clip_moe.training.contrastive_task import ContrastiveTask
from clip_moe.training.loader import PairLoader
from clip_moe.training.samplers import Share
from clip_moe.training.stages.train import TrainStage


def test_sentences():
    sentences = ["A red star stands here.", "Is it large?", "It is!", "Behind it lies 3.5 m of sand."]
    assert split_sentences(" ".join(sentences)) == sentences
    assert split_sentences("  no end at all ") == ["no end at all"]
    assert split_sentences(" ") == []
    sentences = ['Dr. Lee calls it "red."', "It is 3 ft. wide.", "- a list", "- of two"]
    assert split_sentences(f"{sentences[0]} {sentences[1]}\n{sentences[2]}\n\n{sentences[3]}") == sentences


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


def test_policies(tokenizer):
    policies = [
        CaptionPolicy(policy="full", column="raw_caption"),
        CaptionPolicy(policy="first_sentence", column="caption"),
        CaptionPolicy(policy="full", column="caption"),
        CaptionPolicy(policy="packed", column="caption", count=3, max_tokens=26),
    ]
    arguments = DataArguments(source="symbols", captions="detailed", num_samples=40)
    rows, web = caption_columns(arguments, ["caption", "raw_caption"]), SYMBOLS.load("train", "web", 40)
    captions, again, other = (build_captions(rows, policies, tokenizer, seed=seed) for seed in (0, 0, 1))
    assert len(captions) == 40 and captions.column_names == ["image", "caption"]
    for row, raw, made in zip(rows, web["caption"], captions, strict=True):
        assert made["image"] == row["image"] and len(made["caption"]) == 6
        sentences = split_sentences(row["caption"])
        assert made["caption"][:3] == [raw, sentences[0], row["caption"]]
        for packed in filter(None, made["caption"][3:]):
            assert set(split_sentences(packed)) <= set(sentences)
            assert len(tokenizer(packed)["input_ids"]) <= 26
    assert any("" in made for made in captions["caption"])  # two sentences do not make three combinations
    assert all(made[3] for made in captions["caption"])
    assert list(again["caption"]) == list(captions["caption"]) != list(other["caption"])


def test_policies_leave_missing_captions_out():
    captions = [["One.", None], [None, "Two. Three."], [None, ""]]
    rows = with_captions(SYMBOLS.load("train", "web", 3), captions)
    built = build_captions(rows, [CaptionPolicy(policy="full", column="caption")], None, seed=0)
    assert list(built["caption"]) == [["One."], ["Two. Three."], [""]]


def test_the_batch_of_several_captions():
    """The loss of a loader's batch is that of its captions, one image and one place at a time."""
    model = CLIPModel.from_pretrained("training/symbol_clip").eval()
    processor = CLIPProcessor.from_pretrained("training/symbol_clip")
    rows = SYMBOLS.load("train", "web", 4, captions_per_image=3)
    captions = [list(image_texts) for image_texts in rows["caption"]]
    captions[0][1] = captions[2][0] = captions[2][2] = " "
    weights, arguments = [0.2, 0.3, 0.5], DataArguments(source="symbols", num_samples=4)
    loader = PairLoader(with_captions(rows, captions), processor, arguments, Share(4), caption_weights=weights)
    batch = loader.in_order()[0]
    assert torch.equal(batch.pop("caption_weights"), torch.tensor(weights))
    assert batch["caption_mask"].tolist() == [[True, False, True], [True] * 3, [False, True, False], [True] * 3]
    assert len(batch["input_ids"]) == 9
    stage = TrainStage(**TUNED, data=arguments, caption_weights=weights)
    with torch.no_grad():
        loss, _ = ContrastiveTask(model, stage)(dict(batch))
        images = nn.functional.normalize(model.get_image_features(batch["pixel_values"]).pooler_output, dim=-1)
        texts = torch.zeros(4, 3, images.shape[1])
        for i, image_texts in enumerate(captions):
            for place, caption in enumerate(image_texts):
                if caption.strip():
                    inputs = processor.tokenizer([caption], return_tensors="pt")
                    embeds = model.get_text_features(inputs["input_ids"]).pooler_output
                    texts[i, place] = nn.functional.normalize(embeds, dim=-1)
    scale = model.logit_scale.exp()
    expected = plain_multi_positive_loss(images, texts, scale, torch.tensor(weights), batch["caption_mask"])
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_columns_of_captions(tmp_path):
    images = [Image.new("RGB", (8, 8))] * 2
    rows = {"photo": images, "none": [None, None], "text": ["a", None]}
    datasets.Dataset.from_dict({**rows, "texts": [["a", None], []]}).save_to_disk(tmp_path / "x")
    source = DataArguments(source=str(tmp_path / "x"), image_column="photo")
    found = caption_columns(source, ["text", "texts", "none"])
    assert sorted(found.column_names) == ["image", "none", "text", "texts"]
    assert found[0]["image"]["bytes"] and found[0]["texts"] == ["a", None]  # not decoded


def test_a_world_of_one_style_has_its_captions_in_all_columns(monkeypatch):
    monkeypatch.setattr(symbols, "SYMBOLS", dataclasses.replace(SYMBOLS, caption_styles=("web",)))
    arguments = DataArguments(source="symbols", num_samples=4)
    rows = caption_columns(arguments, ["caption", "raw_caption"])
    assert rows["caption"] == rows["raw_caption"] == SYMBOLS.load("train", "web", 4)["caption"]
