"""How often images are decoded: by stages that need captions alone, not at all, and by a stream once."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_sources import damaged, sharegpt4v, webdataset

import data.images
from data.captions import CaptionPolicy, build_captions
from data.pairs import caption_columns, load_pairs
from data.sources import DataArguments
from data.worlds import build_processor
from training.clusters import load_clusters
from training.context import Context, make_accelerator
from training.loader import PairLoader
from training.stages import data_experts
from training.stages.train_data_expert import TrainDataExpertStage


@pytest.fixture(scope="module")
def processor():
    return build_processor("symbols", 16, 16)


@pytest.fixture
def decoded(monkeypatch):
    """What every image was read from, from now on."""
    read, found = data.images.decode_image, []

    def record(value, *others):
        found.append(value)
        return read(value, *others)

    for reader in ("data.images", "data.pairs", "training.loader"):
        monkeypatch.setattr(f"{reader}.decode_image", record)
    return found


def test_a_stream_reads_each_image_once_an_epoch(tmp_path, decoded, processor):
    arguments = DataArguments(**webdataset(tmp_path), streaming=True)
    loader = PairLoader(load_pairs(arguments), processor, arguments, batch_size=8)
    loader.report_cut_captions()
    stream = loader.batches(0)
    for _ in range(3):
        next(stream)
    assert len(decoded) == 3 * 8


def test_loaded_pairs_are_looked_at_once_and_read_once_an_epoch(tmp_path, decoded, processor):
    arguments = DataArguments(**sharegpt4v(tmp_path))
    loader = PairLoader(load_pairs(arguments), processor, arguments, batch_size=8)
    loader.report_cut_captions()
    assert len(decoded) == 8
    stream = loader.batches(0)
    for _ in range(3):
        next(stream)
    assert len(decoded) == 8 + 3 * 8


def test_captions_are_made_without_images(tmp_path, decoded, processor):
    arguments = DataArguments(**damaged(tmp_path, 0.5))
    policies = [CaptionPolicy(policy="full", column="caption")]
    assert len(build_captions(caption_columns(arguments, {"caption"}), policies, processor.tokenizer, seed=0)) == 200
    assert decoded == []


def test_pairs_without_images_are_all_that_have_a_caption(tmp_path, decoded):
    arguments = DataArguments(**damaged(tmp_path, 0.02), max_unreadable=0.05)
    rows = load_pairs(arguments, images=False)
    assert len(rows) == 199 and decoded == []  # three images cannot be read, a caption is empty
    assert len(load_pairs(arguments)) == 196 and len(decoded) == 199
    with pytest.raises(ValueError, match="1 of 200 pairs .*: its caption is empty. More than max_unreadable = 0%"):
        load_pairs(dataclasses.replace(arguments, max_unreadable=0.0), images=False)


def test_captions_are_clustered_without_images_and_an_expert_looks_at_its_own(tmp_path, decoded):
    """Of two clusters, the unreadable pairs are left out of that whose captions they have."""
    source = sharegpt4v(tmp_path)
    entries = json.loads(json.dumps(json.loads((tmp_path / "sharegpt4v.json").read_text()) * 5))
    for number, entry in enumerate(entries):
        entry["conversations"][1]["value"] = (
            ("a red dog barks", "the blue sea")[number % 2] + " " + "and" * (number % 5)
        )
    entries[6]["image"] = "nowhere.png"
    (tmp_path / "sharegpt4v.json").write_text(json.dumps(entries))
    arguments = DataArguments(**source, max_unreadable=0.2)
    context = Context(tmp_path, make_accelerator(tmp_path))
    folders = SimpleNamespace(encoder="tfidf", data=arguments, centers=None, clusters=tmp_path / "coarse")
    folders.captions, folders.fine = tmp_path / "captions", tmp_path / "fine"
    settings = {
        "captions": data_experts.EmbedCaptionsStage(name="x", stage="x", encoder="tfidf", data=arguments, dim=2),
        "fine": data_experts.ClusterFineStage(name="x", stage="x", captions="x", num_centers=2),
        "coarse": data_experts.ClusterCoarseStage(name="x", stage="x", fine="x", num_experts=2),
    }
    for name, stage in settings.items():
        assert decoded == []
        (tmp_path / name).mkdir()
        inputs = SimpleNamespace(**vars(folders) | ({"data": None} if name == "fine" else {}))
        stage.run(inputs, context, tmp_path / name)
    assert load_clusters(tmp_path / "coarse")[1]["pairs"] == "captioned"
    decoded.clear()  # of the picture of the clusters
    found = []
    for cluster in range(2):
        expert = {"name": "x", "stage": "x", "model": "x", "expert": cluster + 1, "clusters": "x", "cluster": cluster}
        training = {"global_batch_size": 2, "max_steps": 1, "learning_rate": 1e-3, "weight_decay": 0.0}
        stage = TrainDataExpertStage(**expert, **training, warmup_steps=0, data=arguments)
        found.append(sorted(row["image"] for row in stage.load_pairs(folders, context)))
        assert len(decoded) == 20 * (cluster + 1)
    expected = [sorted(entry["image"] for entry in entries[start::2]) for start in range(2)]
    expected[0].remove("nowhere.png")
    assert sorted(found) == sorted(expected) and "nowhere.png" not in np.concatenate(found)
