"""The stage `embed`: its embeddings are those of the model, in the order of the data; and how settings go together.
Clusters of them are in test_systems.py, kills in test_feature_store.py."""

import json

import numpy as np
import PIL.Image
import pytest
from small_evaluation import plain_embedding
from tiny_clip import command, error_of
from tiny_sources import png

import clip_moe
from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.evaluation import embedder
from clip_moe.evaluation.feature_store import FeatureStore

NUMBER = 12


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A table of twelve pictures with one to three captions, of which the sixth is missing."""
    folder = tmp_path_factory.mktemp("pictures")
    lines = []
    for number in range(NUMBER):
        if number != 5:
            (folder / f"{number:02d}.png").write_bytes(png(number))
        captions = [f"a red circle {number} {k}" for k in range(number % 3 + 1)]
        lines.append({"image": str(folder / f"{number:02d}.png"), "caption": captions})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "pairs.jsonl"


def arguments(dense, pictures, *more):
    data = ["--data.source", str(pictures), "--data.max_unreadable", "0.1"]
    return ["--model", str(dense), *data, "--batch_size", "2", *more]


def embedded(folder, name):
    return FeatureStore.open(folder, "this test")[name][:]


def test_pictures_without_captions(dense, tmp_path):
    """A folder of pictures alone, one of them broken."""
    (tmp_path / "photos" / "trip").mkdir(parents=True)
    for number in range(5):
        (tmp_path / "photos" / "trip" / f"{number}.png").write_bytes(png(number) if number != 3 else b"broken")
    flags = ["--model", str(dense), "--data.source", str(tmp_path / "photos"), "--data.caption_column", "null"]
    flags += ["--data.max_unreadable", "0.3"]
    command("embed", tmp_path / "out", *flags, "--what", "images")
    embed = plain_embedding(dense)
    for name, image in zip("0124", embedded(tmp_path / "out", "image"), strict=True):
        picture = PIL.Image.open(tmp_path / "photos" / "trip" / f"{name}.png").convert("RGB")
        np.testing.assert_allclose(image, embed(picture), atol=1e-6)
    assert "need what: images" in error_of(clip_moe.main, "embed", tmp_path / "both", *flags)


def test_a_missing_picture_is_left_out_and_all_others_are_in_order(dense, pictures, tmp_path, caplog, monkeypatch):
    workers, read = [], embedder.read_batches
    with monkeypatch.context() as patch:
        patch.setattr(embedder, "read_batches", lambda *args: workers.append(args[-1]) or read(*args))
        command("embed", tmp_path / "both", *arguments(dense, pictures, "--data.num_workers", "2"))
    assert workers == [2]
    assert "1 of 12 pairs of" in caplog.text and "05.png" in caplog.text
    embed = plain_embedding(dense)
    pairs = load_pairs(DataArguments(source=str(pictures), max_unreadable=0.1))
    images, texts = (embedded(tmp_path / "both", name) for name in ("image", "text"))
    assert len(pairs) == NUMBER - 1
    for pair, image, text in zip(pairs, images, texts, strict=True):
        np.testing.assert_allclose(text, embed(pair["caption"][0]), atol=1e-6)
        np.testing.assert_allclose(image, embed(PIL.Image.open(pair["image"]).convert("RGB")), atol=1e-6)
    # Alone, they are the same
    for what, name, expected in (("images", "image", images), ("captions", "text", texts)):
        command("embed", tmp_path / what, *arguments(dense, pictures, "--what", what))
        found = embedded(tmp_path / what, name)
        # Captions of a picture that cannot be read are there
        found = found if what == "images" else np.delete(found, 5, axis=0)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_clusters_ask_for_the_embeddings_that_they_need(dense, pictures, tmp_path):
    command("embed", tmp_path / "both", *arguments(dense, pictures))
    command("embed", tmp_path / "captions", *arguments(dense, pictures, "--what", "captions"))
    for folder, options, wanted in (
        ("captions", ["--num_image_clusters", "2"], "what: both"),
        ("both", ["--num_centers", "4", "--num_clusters", "2"], "what: captions or images"),
    ):
        given = ["cluster", str(tmp_path / "out"), "--features", str(tmp_path / folder), *options]
        message = f"{folder} has other embeddings than needed here: use an embed stage with {wanted}"
        assert message in error_of(clip_moe.main, *given)
