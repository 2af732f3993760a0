"""Embeddings: what they are kept under, what is done with damaged ones, and that those of the stage `embed` are the
model's, in the order of the data. Clusters of them are in test_systems.py, kills in test_feature_store.py."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import PIL.Image
import pytest
import small_evaluation
import torch
from several_processes import run_processes
from tiny_clip import change_weights, command, error_of
from tiny_sources import png
from transformers import CLIPImageProcessorPil, CLIPModel

import clip_moe
import modeling_clip_moe
from clip_moe import conversion, data
from clip_moe.conversion.processors import load_processor
from clip_moe.data import preparation
from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine.provenance import model_fingerprint
from clip_moe.evaluation import batches, embedder
from clip_moe.evaluation.built_in_tasks import symbol_tasks
from clip_moe.evaluation.embedder import Embedder, code_digest, usable_device
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.feature_store import FeatureStore
from clip_moe.evaluation.tasks import TASKS, find_tasks

small_tasks = small_evaluation.small_tasks


def test_results_repeat_and_embeddings_are_kept(dense, sparse, tmp_path, monkeypatch):
    tasks = find_tasks(["symbols_retrieval", "symbols_pairs"])
    first = evaluate_model(dense, tasks, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CLIPModel, "get_image_features", None)  # calling it would fail
        assert evaluate_model(dense, tasks, tmp_path) == first
    kept = tmp_path / "embeddings", 64, torch.device("cpu"), torch.float32
    other, mine = (Embedder(model, *kept).texts(["a seven", "a red star"]) for model in (sparse, dense))
    assert not np.array_equal(other, mine)  # never another model's
    for file in (tmp_path / "embeddings").rglob("*.safetensors"):
        change_weights(file, lambda embeds: [array.mul_(2) for array in embeds.values()])
    with pytest.raises(ValueError, match="is damaged .its embeddings are not normalized.: delete it to compute"):
        Embedder(dense, *kept).texts(["a seven", "a red star"])


def test_weights_that_change_before_they_are_loaded_are_an_error(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "model")
    embedder = Embedder(folder, tmp_path / "kept", 4, torch.device("cpu"))
    change_weights(folder / "model.safetensors", lambda weights: weights["text_projection.weight"].mul_(-1))
    with pytest.raises(ValueError, match=f"{folder} was changed while it was measured: run again"):
        embedder.texts(["a star"])
    assert not (tmp_path / "kept").exists()


def test_weights_of_the_old_format_are_part_of_the_fingerprint(dense, tmp_path):
    folders = [shutil.copytree(dense, tmp_path / name) for name in "12"]
    for folder in folders:
        (folder / "model.safetensors").unlink()
        torch.save({"logit_scale": torch.tensor(float(folder.name))}, folder / "pytorch_model.bin")
    assert len({model_fingerprint(str(folder)) for folder in folders}) == 2


def test_how_a_model_runs_is_part_of_the_key(dense, tmp_path, monkeypatch):
    def key(batch_size=8, dtype=torch.float32):
        return Embedder(dense, tmp_path, batch_size, torch.device("cpu"), dtype).key

    processor = load_processor(dense)  # as transformers loads it where torchvision is installed
    processor.image_processor.__class__ = type("CLIPImageProcessor", (CLIPImageProcessorPil,), {})
    keys = [key(), key(batch_size=9), key(dtype=torch.bfloat16)]
    for name, changed in (
        ("environment", lambda: {"commit": None, "versions": {"torch": "another"}}),
        ("load_processor", lambda source: processor),
        ("code_digest", lambda: "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(embedder, name, changed)
            keys.append(key())
    assert len(set(keys)) == 6


@pytest.mark.parametrize(
    ("module", "changed"),
    [
        (modeling_clip_moe, "modeling_clip_moe"),
        (data, "images"),
        (conversion, "processors"),
        (embedder, "embedder"),
        (batches, "batches"),
    ],
)
def test_changed_code_has_another_hash_before_it_is_committed(tmp_path, monkeypatch, module, changed):
    here, code = code_digest(), tmp_path / f"{changed}.py"
    for file in Path(module.__file__).parent.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / Path(module.__file__).name))
    assert code_digest() == here
    code.write_text(code.read_text() + "# changed\n")
    assert code_digest() != here


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_devices_that_cannot_compute(device):
    with pytest.raises(ValueError, match=f"cannot compute on the device {device}"):
        usable_device(device)


def evaluate_few_symbols(*arguments):
    TASKS.update(symbol_tasks(number=40, retrieval=40, pairs=12, train=40))
    command("evaluate", *arguments)


@pytest.mark.slow
def test_an_evaluation_by_two_processes_scores_as_one(dense, tmp_path):
    options = "--models.dense", dense, "--tasks", "symbols_retrieval", "--batch_size", 2
    printed = run_processes(2, evaluate_few_symbols, tmp_path / "two", *options)
    assert printed.count("two: done in") == 1
    small = {"symbols_retrieval": TASKS["symbols_retrieval"]}
    (result,) = evaluate_model(dense, small, tmp_path / "one", batch_size=2, device="cpu")
    found = json.loads((tmp_path / "two" / "symbols_retrieval--dense.json").read_text())
    assert found["metrics"] == result["metrics"] and 0 < found["metrics"]["image_to_text_recall@10"] < 1
    folders = tmp_path / "one", tmp_path / "two"
    one, two = ({path.relative_to(of): path.read_bytes() for path in of.rglob("0*.*")} for of in folders)
    assert one == two and len(one) == 6  # three shards of images, and as many of texts


def test_workers_give_the_same(dense, tmp_path, monkeypatch):
    rows = SYMBOLS.load("test", "web", 11)
    alone, helped = (Embedder(dense, None, 4, torch.device("cpu"), num_workers=number) for number in (0, 2))
    state = torch.get_rng_state()
    assert np.array_equal(alone.images(rows), helped.images(rows))
    assert torch.equal(torch.get_rng_state(), state)  # a probe that comes later draws the same
    numbers, read = [], embedder.read_batches
    monkeypatch.setattr(embedder, "read_batches", lambda *args: numbers.append(args[-1]) or read(*args[:-1], 0))
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    for few, processes in ((12, 1), (11, 1), (11, 4), (11, 24)):
        monkeypatch.setattr(embedder, "WORTH_WORKERS", few)
        state = SimpleNamespace(num_processes=processes, is_main_process=True)
        Embedder(dense, None, 4, torch.device("cpu"), state=state).images(rows)
    assert numbers == [0, 8, 3, 1]


def test_images_that_are_known_are_neither_read_nor_decoded_again(dense, tmp_path, monkeypatch):
    """Rows have images, or name files, which nobody has written for a while."""
    embedder, pictures = Embedder(dense, tmp_path / "kept", 4, torch.device("cpu")), SYMBOLS.load("test", "web", 9)
    names = [str(tmp_path / f"{number}.png") for number in range(9)]
    for name, image in zip(names, pictures["image"], strict=True):
        image.save(name)
        os.utime(name, (1, 1))
    files = datasets.Dataset.from_dict({"image": names, "caption": names})
    first, picture_embeds = embedder.images(files), embedder.images(pictures)
    with monkeypatch.context() as patch:
        patch.setattr("clip_moe.engine.digests.file_digest", lambda path: pytest.fail(f"{path} is read"))
        patch.setattr(preparation, "decode_image", lambda value: pytest.fail(f"{value} is decoded"))
        assert np.array_equal(embedder.images(files), first)
        assert np.array_equal(embedder.images(pictures), picture_embeds)
    shutil.copy(names[0], names[8])
    changed = embedder.images(files)
    assert np.array_equal(changed[:8], first[:8]) and np.allclose(changed[8], first[0], atol=1e-6)


# --- the stage

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
    embed = small_evaluation.plain_embedding(dense)
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
    embed = small_evaluation.plain_embedding(dense)
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
