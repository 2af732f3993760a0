"""Embeddings: what they are kept under, and what is done with damaged ones."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import small_evaluation
import torch
from several_processes import run_processes
from tiny_clip import change_weights, command
from transformers import CLIPImageProcessorPil, CLIPModel

import modeling_clip_moe
from clip_moe import conversion, data
from clip_moe.conversion.processors import load_processor
from clip_moe.data import preparation
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine.provenance import model_fingerprint
from clip_moe.evaluation import batches, embedder
from clip_moe.evaluation.built_in_tasks import symbol_tasks
from clip_moe.evaluation.embedder import Embedder, code_digest, usable_device
from clip_moe.evaluation.evaluate import evaluate_model
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
