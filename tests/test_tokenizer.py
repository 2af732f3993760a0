"""A tokenizer learned from captions, and the stage that learns it."""

import json
import random
import shutil

import datasets
import pytest
import torch
from PIL import Image
from tiny_runs import DENSE, HARBOR_CAPTIONS, TUNED, WORDS
from tiny_sources import saved_pairs
from transformers import AutoModel, AutoProcessor, AutoTokenizer, CLIPImageProcessorPil, CLIPTokenizer

from clip_moe.data.tokenizer import learn_tokenizer, pieces_per_word
from clip_moe.engine.provenance import input_fingerprint


def test_a_learned_tokenizer_is_clip_s(tmp_path):
    tokenizer = learn_tokenizer(HARBOR_CAPTIONS, vocab_size=600, max_length=12)
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), CLIPTokenizer.from_pretrained(tmp_path)):
        assert type(loaded) is CLIPTokenizer
        assert loaded(HARBOR_CAPTIONS)["input_ids"] == tokenizer(HARBOR_CAPTIONS)["input_ids"]
        assert loaded.model_max_length == 12
        assert (loaded.bos_token_id, loaded.eos_token_id) == (len(loaded) - 2, len(loaded) - 1)
        assert loaded.pad_token_id == loaded.eos_token_id
    assert 514 < len(tokenizer) <= 600
    assert [len(learn_tokenizer(HARBOR_CAPTIONS, size, 12)) for size in (514, 540)] == [514, 540]
    # CLIP's own splitting and lower-casing, and any text whatever
    assert tokenizer.tokenize("HARBOUR the bicycle's") == ["harbour</w>", "the</w>", "bicycle</w>", "'s</w>"]
    for text in ("a café", "日本 🏄", "x%$§ 12"):
        decoded = tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
        assert decoded.replace(" ", "") == text.replace(" ", "")
    for texts, pieces in ((["the bicycle", "A harbour, the harbour!"], 1), (["xyz"], 3), (["the xyz"], 2)):
        assert pieces_per_word(tokenizer, texts) == pieces
    assert pieces_per_word(tokenizer, ["harbour " * 100]) == 1  # longer than the tokenizer's length
    assert tokenizer("日本 🏄 ÿ", add_special_tokens=False)["input_ids"].count(tokenizer.unk_token_id) == 0


def test_the_same_captions_in_any_order_give_the_same_tokenizer():
    """Words made of random letters, with many pairs that are equally frequent: the library alone numbers them anew each
    time."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 7))) for _ in range(500)]
    captions = [" ".join(rng.sample(words, 8)) for _ in range(200)]
    learned = [learn_tokenizer(texts, 900, 77) for texts in (captions, captions[::-1])]
    assert learned[0].backend_tokenizer.to_str() == learned[1].backend_tokenizer.to_str()


def test_a_recipe_learns_a_tokenizer_and_trains_with_it(run, tmp_path, caplog):
    data = saved_pairs(tmp_path / "pairs", HARBOR_CAPTIONS)
    dense = {key: value for key, value in DENSE.items() if key != "processor"} | {"tokenizer": "words"}
    recipe = [{**WORDS, "data": data}, dense, {**TUNED, "data": data}]
    output = run(recipe)
    processor, model = AutoProcessor.from_pretrained(output / "tuned"), AutoModel.from_pretrained(output / "tuned")
    assert processor.tokenizer.tokenize("A harbour") == ["a</w>", "harbour</w>"]
    assert model.config.text_config.vocab_size == len(processor.tokenizer)
    assert model.config.text_config.eos_token_id == processor.tokenizer.eos_token_id
    # CLIP's own image processor, at the model's size
    images = processor.image_processor
    expected = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    image = Image.effect_mandelbrot((60, 45), (-2, -1, 1, 1), 50).convert("RGB")
    found, wanted = (p(image, return_tensors="pt")["pixel_values"] for p in (images, expected))
    assert found.shape == (1, 3, 32, 32)
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0)
    assert "pieces" not in caplog.text  # the captions are its own
    # The model knows its tokenizer: another one makes another model
    manifest = json.loads((output / "dense" / "manifest.json").read_text())
    assert manifest["inputs"] == {"words": input_fingerprint(str(output / "words"))}
    assert run(recipe) == output
    shutil.rmtree(output / "words")
    with pytest.raises(ValueError, match="dense was made with other settings .*inputs.words"):
        run(recipe, {"words.vocab_size": 530})


def test_a_tokenizer_of_no_length_follows_its_model_and_looks_at_no_image(run, tmp_path):
    """All captions of an image are learned from."""
    captions = [["", *HARBOR_CAPTIONS[:2]], ["", *HARBOR_CAPTIONS[2:]]]
    datasets.Dataset.from_dict({"image": [b"no image"] * 2, "caption": captions}).to_parquet(tmp_path / "x.parquet")
    words = {key: value for key, value in WORDS.items() if key != "max_length"}
    output = run([{**words, "data": {"source": str(tmp_path / "x.parquet")}}, {**DENSE, "tokenizer": "words"}])
    tokenizer = AutoTokenizer.from_pretrained(output / "dense")
    assert tokenizer.model_max_length == DENSE["text_config"]["max_position_embeddings"] == 16
    vocabulary = learn_tokenizer(HARBOR_CAPTIONS, 600, 16).get_vocab()
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(output / "words").get_vocab() == vocabulary
    assert len(tokenizer("harbour " * 99, truncation=True)["input_ids"]) == 16
