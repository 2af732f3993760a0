"""Sentence encoders: what they compute, and that they stay the same in a folder."""

import json
import shutil

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sklearn.feature_extraction.text import TfidfVectorizer
from transformers import BertConfig, BertModel, BertTokenizer, CLIPModel, CLIPProcessor

from clip_moe.evaluation.sentence_encoders import TfidfEncoder, encode_metadata, load_encoder, open_encoder

TEXTS = ["a red heart", "a blue star on a red background", "the number 7", "a large blue heart", "7"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A random BERT of a few thousand parameters."""
    folder = tmp_path_factory.mktemp("bert")
    words = sorted({word for text in TEXTS for word in text.split()})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(folder)
    return folder


def unit(embeds):
    return embeds / np.linalg.norm(embeds, axis=1, keepdims=True)


def test_tfidf_is_scikit_learns():
    encoder = TfidfEncoder.fit(TEXTS, 11, seed=0)  # as many as there are words: the SVD only turns
    full = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b").fit_transform(TEXTS).toarray()
    embeds = encoder.encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(embeds, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(embeds @ embeds.T, full @ full.T, atol=1e-5)
    with pytest.raises(ValueError, match="11 different words, fewer than dim 12"):
        TfidfEncoder.fit(TEXTS, 12, seed=0)
    few = TfidfEncoder.fit(["a red knight", "a red bishop", "a blue sun", "a red moon"], 5, seed=0, max_df=0.5)
    assert few.words == ["bishop", "blue", "knight", "moon", "sun"] and not few.encode(["a red"]).any()


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
def test_text_model_is_pooled(bert, pooling):
    encoder = open_encoder(str(bert), pooling)
    model, tokenizer = BertModel.from_pretrained(bert), BertTokenizer.from_pretrained(bert)
    for text, embed in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        with torch.no_grad():
            outputs = model(**tokenizer(text, return_tensors="pt"))
        hidden_states = outputs.last_hidden_state[0]
        poolings = {"mean": hidden_states.mean(dim=0), "cls": hidden_states[0], "pooler": outputs.pooler_output[0]}
        expected = poolings[pooling]
        np.testing.assert_allclose(embed, unit(expected[None].numpy())[0], atol=1e-5)
    texts = [*TEXTS, "heart " * 1000]  # the tokenizer knows no limit, the model 512 positions
    np.testing.assert_allclose(encoder.encode(texts, batch_size=2), encoder.encode(texts), atol=1e-5)


def test_text_tower_of_a_clip():
    base = "training/symbol_clip"
    model, processor = CLIPModel.from_pretrained(base), CLIPProcessor.from_pretrained(base)
    batch = processor.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model.get_text_features(**batch).pooler_output.numpy()
    encoder = open_encoder(base)
    np.testing.assert_allclose(encoder.encode(TEXTS), unit(expected), atol=1e-5)
    for value in (0, float("inf")):
        torch.nn.init.constant_(encoder.model.text_projection.weight, value)
        with pytest.raises(ValueError, match="5 of 5 text embeddings by training/symbol_clip are zero or not finite"):
            encoder.encode(TEXTS)


def test_an_encoder_stays_the_same_in_a_folder(bert, tmp_path):
    """One of the library pools as it says."""
    transformer = Transformer(str(bert))
    model = SentenceTransformer(modules=[transformer, Pooling(16, pooling_mode="cls")], device="cpu")
    model.save(str(tmp_path / "simcse"))
    encoders = {
        "tfidf": TfidfEncoder.fit(TEXTS, 6, seed=0),
        "bert": open_encoder(str(shutil.copytree(bert, tmp_path / "text_model")), "cls"),
        "library": open_encoder(str(tmp_path / "simcse")),
        "clip": open_encoder("training/symbol_clip"),
    }
    np.testing.assert_allclose(encoders["library"].encode(TEXTS), encoders["bert"].encode(TEXTS), atol=1e-5)
    for name, encoder in encoders.items():
        folder = tmp_path / name
        folder.mkdir()
        encoder.save(folder)
        encoder.save(folder)
    shutil.rmtree(tmp_path / "text_model")
    for name, encoder in encoders.items():
        again = load_encoder(tmp_path / name)
        assert again.name == encoder.name and np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))


def test_different_encoders_have_different_names(bert, tmp_path):
    other = tmp_path / "other" / bert.name
    shutil.copytree(bert, other)
    torch.manual_seed(1)
    BertModel(BertConfig.from_pretrained(bert)).save_pretrained(other)
    names = [TfidfEncoder.fit(TEXTS, 6, seed=0).name, TfidfEncoder.fit(TEXTS, 5, seed=0).name]
    names += [TfidfEncoder.fit(TEXTS[:4], 6, seed=0).name, open_encoder(str(other)).name]
    names += [open_encoder(str(bert), pooling).name for pooling in ("mean", "cls")]
    assert len(set(names)) == 6
    assert open_encoder(str(shutil.copytree(bert, tmp_path / bert.name))).name == open_encoder(str(bert)).name


def test_what_is_no_encoder_is_refused(tmp_path, hub):
    with pytest.raises(FileNotFoundError, match="has no sentence encoder"):
        load_encoder(tmp_path)
    with pytest.raises(ValueError, match="cannot load .*: Unrecognized model in .* in its config.json"):
        open_encoder(str(tmp_path))
    (tmp_path / "encoder.json").write_text(json.dumps({"kind": "text", "name": "x", "source": "somebody/gone"}))
    with pytest.raises(FileNotFoundError, match="there is no folder somebody/gone, and no such model on the Hub"):
        load_encoder(tmp_path)
    encoder = TfidfEncoder.fit(TEXTS, 6, seed=0)
    with pytest.raises(ValueError, match="knows no word of 'zebra'"):
        encode_metadata(encoder, ["heart", "zebra"])
