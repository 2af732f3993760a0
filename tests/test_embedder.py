"""Embeddings: what they are kept under, and what is done with damaged ones."""

import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import small_evaluation
import torch
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from small_evaluation import damage, shard
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

import data.images
import modeling_clip_moe
from conversion.processors import load_processor
from data import symbols
from data.sources import DataArguments
from evaluation import batches, embedder
from evaluation.embedder import Embedder, code_hash, usable_device
from evaluation.evaluate import evaluate_model
from evaluation.own_data import retrieval_task
from evaluation.tasks import find_tasks
from records.provenance import model_fingerprint

dense, sparse, small_tasks = small_evaluation.dense, small_evaluation.sparse, small_evaluation.small_tasks


def test_results_repeat_and_embeddings_are_kept(dense, sparse, tmp_path, monkeypatch):
    tasks = find_tasks(["symbols_retrieval", "symbols_pairs"])
    first = evaluate_model(dense, tasks, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CLIPModel, "get_image_features", None)  # calling it would fail
        assert evaluate_model(dense, tasks, tmp_path) == first
    other = Embedder(sparse, tmp_path / "embeddings", 64, torch.device("cpu"), torch.float32)
    mine = Embedder(dense, tmp_path / "embeddings", 64, torch.device("cpu"), torch.float32)
    texts = ["a seven", "a red star"]
    assert not np.array_equal(other.texts(texts), mine.texts(texts))  # never another model's


def test_weights_that_change_before_they_are_loaded_are_an_error(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "model")
    embedder = Embedder(folder, tmp_path / "kept", 4, torch.device("cpu"))
    damage(folder, lambda weights: weights["text_projection.weight"].mul_(-1))
    with pytest.raises(ValueError, match=f"{folder} was changed while it was measured: start again"):
        embedder.texts(["a star"])
    assert not (tmp_path / "kept").exists()


def test_weights_of_the_old_format_are_part_of_the_fingerprint(dense, tmp_path):
    for seed in (1, 2):
        folder = shutil.copytree(dense, tmp_path / str(seed))
        torch.manual_seed(seed)
        weights = CLIPModel(CLIPConfig.from_pretrained(dense)).state_dict()
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    assert model_fingerprint(str(tmp_path / "1")) != model_fingerprint(str(tmp_path / "2"))


def test_how_a_model_runs_is_part_of_the_key(dense, tmp_path, monkeypatch):
    def key(batch_size=8, dtype=torch.float32):
        return Embedder(dense, tmp_path, batch_size, torch.device("cpu"), dtype).key

    keys = [key(), key(batch_size=9), key(dtype=torch.bfloat16)]
    with monkeypatch.context() as patch:
        patch.setattr(embedder, "environment", lambda: {"commit": None, "versions": {"torch": "another"}})
        keys.append(key())
    with monkeypatch.context() as patch:  # what transformers loads where torchvision is installed
        processor = load_processor(dense)
        processor.image_processor.__class__ = type("CLIPImageProcessor", (CLIPImageProcessorPil,), {})
        patch.setattr(embedder, "load_processor", lambda source: processor)
        keys.append(key())
    monkeypatch.setattr(embedder, "code_hash", lambda: "another")
    assert len({*keys, key()}) == 6


@pytest.mark.parametrize(
    ("module", "changed"),
    [
        (modeling_clip_moe, "modeling_clip_moe.py"),
        (data.images, "images.py"),
        (embedder, "embedder.py"),
        (batches, "batches.py"),
    ],
    ids=["model", "images", "embedder", "batches"],
)
def test_changed_code_has_another_hash_before_it_is_committed(tmp_path, monkeypatch, module, changed):
    here = code_hash()
    for file in Path(module.__file__).parent.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / Path(module.__file__).name))
    assert code_hash() == here
    with (tmp_path / changed).open("a") as code:
        code.write("# changed\n")
    once = code_hash()
    with (tmp_path / changed).open("a") as code:
        code.write("# changed\n")
    assert len({here, once, code_hash()}) == 3


def test_a_damaged_file_of_embeddings_is_named(dense, tmp_path):
    embedder = Embedder(dense, tmp_path, 64, torch.device("cpu"), torch.float32)
    embedder.texts(["a star"])
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=f"{file.name} is damaged; delete it"):
        embedder.texts(["a star"])


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"embeds": np.full((1, 16), np.nan, np.float32)},
        {"embeds": np.zeros((1, 16), np.float32)},
        {"embeds": np.full((65, 16), 0.25, np.float32)},
        {"embeds": np.ones((1, 1), np.int8)},
    ],
    ids=["none", "not finite", "zeros", "too many", "integers"],
)
def test_kept_embeddings_of_another_kind_are_no_scores(dense, tmp_path, content):
    embedder = Embedder(dense, tmp_path, 64, torch.device("cpu"), torch.float32)
    embedder.texts(["a star"])
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, "numpy") as kept:
        metadata = kept.metadata()
    save_arrays(content, file, metadata)
    with pytest.raises(ValueError, match=f"{file.name} is damaged; delete it"):
        embedder.texts(["a star"])


@pytest.mark.parametrize("device", ["meta", "nonsense", "", "cuda:99", "hpu", "vulkan", "privateuseone"])
def test_devices_that_cannot_compute(device):
    with pytest.raises(ValueError, match=f"cannot compute on the device {device}"):
        usable_device(device)


def test_turned_images_score_as_what_a_viewer_shows(dense, tmp_path):
    shard(tmp_path / "x"), shard(tmp_path / "turned", turned=True)
    embedder, embeds = Embedder(dense, None, 8, torch.device("cpu")), []
    for name in ("x", "turned"):
        columns = {"image_column": "png", "caption_column": "txt"}
        rows, _ = retrieval_task(DataArguments(source=str(tmp_path / name), **columns)).load()
        embeds.append(embedder.images(rows))
    assert np.array_equal(*embeds)


def counted(embedder, monkeypatch):
    """How many images and texts the embedder's model gets from now on."""
    numbers = {"images": 0, "texts": 0}

    def count(name, what):
        method = getattr(embedder.model, name)

        def counting(*args, **inputs):
            numbers[what] += len(args[0] if args else inputs["input_ids"])
            return method(*args, **inputs)

        monkeypatch.setattr(embedder.model, name, counting)

    count("get_image_features", "images")
    count("get_text_features", "texts")
    return numbers


def test_what_was_embedded_as_part_of_other_data_is_kept(dense, tmp_path, monkeypatch):
    """Whole batches of it, which is what an embedding may depend on."""
    rows = symbols.load("test", "web", 11)
    embedder = Embedder(dense, tmp_path, 4, torch.device("cpu"))
    numbers = counted(embedder, monkeypatch)
    whole = embedder.images(rows)
    assert numbers["images"] == 11 and whole.shape == (11, 16)
    assert np.array_equal(embedder.images(rows.select(range(8))), whole[:8])
    assert numbers["images"] == 11
    assert np.allclose(embedder.images(rows.select(range(10))), whole[:10], atol=1e-6)
    assert numbers["images"] == 13
    texts = list(rows["caption"])
    first = embedder.texts([*texts, *texts[:1]])
    assert numbers["texts"] == 12 and np.array_equal(first, embedder.texts([*texts, *texts[:1]]))
    alone = np.concatenate([Embedder(dense, None, 4, torch.device("cpu")).texts(texts[i : i + 4]) for i in (0, 4)])
    assert np.array_equal(first[:8], alone) and numbers["texts"] == 12


def test_workers_give_the_same(dense, tmp_path, monkeypatch):
    rows = symbols.load("test", "web", 11)
    alone, helped = (Embedder(dense, None, 4, torch.device("cpu"), num_workers=number) for number in (0, 2))
    state = torch.get_rng_state()
    assert np.array_equal(alone.images(rows), helped.images(rows))
    assert torch.equal(torch.get_rng_state(), state)  # a probe that comes later draws the same
    images = batches.ImageBatches(rows, "image", alone.processor.image_processor, 4)
    assert images.num_workers(1) == 0
    monkeypatch.setattr(batches, "WORTH_WORKERS", 1000)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert (images.num_workers(1), images.num_workers(4), images.num_workers(24)) == (8, 3, 1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_that_cannot_be_read_is_one_line(dense, tmp_path, num_workers):
    (tmp_path / "a.png").write_text("no image")
    rows = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")]})
    with pytest.raises((OSError, ValueError), match="it is no image of the formats") as error:
        Embedder(dense, None, 4, torch.device("cpu"), num_workers=num_workers).images(rows)
    assert "Traceback" not in str(error.value)


@pytest.fixture
def files(tmp_path):
    """Rows that name the files of images, which nobody has written for a while."""
    names = []
    for number, image in enumerate(symbols.load("test", "web", 9)["image"]):
        names.append(str(tmp_path / f"{number}.png"))
        image.save(names[-1])
        os.utime(names[-1], (1, 1))
    return datasets.Dataset.from_dict({"image": names, "caption": names})


def test_files_that_are_known_are_not_read_again(dense, tmp_path, files, monkeypatch):
    embedder = Embedder(dense, tmp_path / "kept", 4, torch.device("cpu"))
    first = embedder.images(files)
    with monkeypatch.context() as patch:
        patch.setattr("data.identity._content_digest", lambda path: pytest.fail(f"{path} is read"))
        patch.setattr(batches, "decode_image", lambda value: pytest.fail(f"{value} is decoded"))
        assert np.array_equal(embedder.images(files), first)
    shutil.copy(files[0]["image"], files[8]["image"])
    changed = embedder.images(files)
    assert np.array_equal(changed[:8], first[:8]) and np.allclose(changed[8], first[0], atol=1e-6)


def test_images_without_files_are_decoded_once(dense, tmp_path, monkeypatch):
    rows = symbols.load("test", "web", 9)
    embedder = Embedder(dense, tmp_path, 4, torch.device("cpu"))
    first = embedder.images(rows)
    monkeypatch.setattr(batches, "decode_image", lambda value: pytest.fail("decoded"))
    assert np.array_equal(embedder.images(rows), first)


def test_no_image_is_decoded_for_texts(dense, tmp_path, monkeypatch):
    """Texts come from the rows of images, as those of retrieval and of pairs do."""
    embedder, rows = Embedder(dense, None, 4, torch.device("cpu")), symbols.load("test", "web", 9)
    assert rows.features["image"] == datasets.Image()
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("decoded"))
    assert embedder.texts(rows["caption"]).shape == (9, 16)


@pytest.mark.parametrize(("option", "value"), [("batch_size", 0), ("num_workers", -1)])
def test_impossible_numbers_are_named(dense, option, value):
    options = {"batch_size": 4} | {option: value}
    with pytest.raises(ValueError, match=f"{option} must be .* got {value}"):
        Embedder(dense, None, device=torch.device("cpu"), **options)


def test_nothing_to_embed(dense, tmp_path):
    with pytest.raises(ValueError, match="there are no texts to embed"):
        Embedder(dense, tmp_path, 4, torch.device("cpu")).texts([])
