"""Embeddings: what they are kept under, and what is done with damaged ones."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import small_evaluation
import torch
from safetensors.numpy import save_file as save_arrays
from small_evaluation import shard
from transformers import CLIPConfig, CLIPModel

import data.images
import modeling_clip_moe
from conversion.provenance import model_fingerprint
from data.sources import DataArguments
from evaluation import embedder
from evaluation.embedder import Embedder, code_hash, usable_device
from evaluation.evaluate import evaluate_model
from evaluation.tasks import find_tasks, retrieval_task

dense, sparse, small_tasks = small_evaluation.dense, small_evaluation.sparse, small_evaluation.small_tasks


def test_results_repeat_and_embeddings_are_kept(dense, sparse, tmp_path, monkeypatch):
    tasks = find_tasks(["glyphs_retrieval", "glyphs_pairs"])
    first = evaluate_model(dense, tasks, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CLIPModel, "get_image_features", None)  # calling it would fail
        assert evaluate_model(dense, tasks, tmp_path) == first
    other = Embedder(sparse, tmp_path / "embeddings", 64, torch.device("cpu"), torch.float32)
    mine = Embedder(dense, tmp_path / "embeddings", 64, torch.device("cpu"), torch.float32)
    texts = ["a seven", "a red star"]
    assert not np.array_equal(other.texts(texts), mine.texts(texts))  # never another model's


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
    monkeypatch.setattr(embedder, "code_hash", lambda: "another")
    assert len({*keys, key()}) == 5


@pytest.mark.parametrize(
    ("module", "changed"),
    [(modeling_clip_moe, "modeling_clip_moe.py"), (data.images, "images.py"), (embedder, "embedder.py")],
    ids=["model", "images", "embedder"],
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
        {"embeds": np.zeros((2, 16), np.float32)},
        {"embeds": np.zeros((1, 16), np.int8)},
    ],
    ids=["none", "not finite", "too many", "integers"],
)
def test_kept_embeddings_of_another_kind_are_no_scores(dense, tmp_path, content):
    embedder = Embedder(dense, tmp_path, 64, torch.device("cpu"), torch.float32)
    embedder.texts(["a star"])
    (file,) = tmp_path.glob("*.safetensors")
    save_arrays(content, file)
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
