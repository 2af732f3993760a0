"""What MoDE's paper compares with or adds: clusters of images, averages that are trained on, embeddings that are
summed, and experts that see as many samples as the dense model, whatever the sizes of their clusters."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from tiny_recipes import tiny_run
from tiny_runs import stored
from transformers import AutoProcessor, CLIPModel

from conversion.assemble import ENCODER
from data import symbols
from data.identity import data_fingerprint
from data.pairs import load_pairs
from data.sources import DataArguments
from evaluation.ensemble import open_model
from evaluation.linear_probe import linear_probe_metrics
from evaluation.measures import measure
from evaluation.sentence_encoders import load_encoder
from evaluation.tasks import Task
from modeling_clip_moe import CLIPMoDEModel
from training.caption_clusters import load_caption_clusters, load_expert_of_pair
from training.loader import _Collate
from training.recipe import load_recipe
from training.runner import run_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_run("mode_images", tmp_path_factory)


@pytest.fixture(scope="module")
def seen(run):
    """The captions that each expert was trained on, one after the other, by the name of its stage."""
    seen, collate = {}, _Collate.__call__
    with pytest.MonkeyPatch.context() as patch:
        for stage in ("expert_1", "expert_2", None):
            captions = seen.setdefault(stage, [])

            def record(self, pairs, captions=captions):
                captions.extend(pair["caption"] for pair in pairs)
                return collate(self, pairs)

            patch.setattr(_Collate, "__call__", record)
            before = ["dense", "images", "fine", "assigned", "coarse"]
            run(only=None if stage is None else [*before, stage])
    return seen


@pytest.fixture(scope="module")
def out(run, seen):
    return run.folder / "out"


@pytest.fixture(scope="module")
def rows():
    return load_pairs(DataArguments(source="symbols", num_samples=160, captions="web", in_memory=True))


def image_embeds(folder, images):
    """Of a CLIP, normalized."""
    model, processor = CLIPModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    pixel_values = processor.image_processor(list(images), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        embeds = model.get_image_features(pixel_values).pooler_output
    return torch.nn.functional.normalize(embeds, dim=-1).numpy()


def test_images_are_embedded_and_assigned_to_the_nearest_center(out, rows):
    expected = image_embeds(out / "dense", rows["image"])
    embeds = stored(out / "images", "embeddings")
    np.testing.assert_allclose(embeds, expected, atol=1e-5)
    centers = load_arrays(out / "fine" / "centers.safetensors")["centers"]
    labels = stored(out / "assigned", "labels")
    assert np.array_equal(labels, ((expected[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1))


def test_every_expert_sees_as_many_samples_as_the_dense_model(out, seen, rows):
    """24 steps of 8, which repeat the pairs of its cluster as often as that takes."""
    labels = load_expert_of_pair(out / "coarse", data_fingerprint(rows))
    captions, sizes = np.array(rows["caption"]), np.bincount(labels)
    assert max(sizes) < 24 * 8 and sizes[0] != sizes[1]
    for number, name in enumerate(["expert_1", "expert_2"]):
        own = captions[labels == number]
        assert len(seen[name]) == 24 * 8 and set(seen[name]) <= set(own)
        first = seen[name][: sizes[number] // 8 * 8]  # a pass
        times = {text: first.count(text) for text in first}
        assert all(times[text] <= list(own).count(text) for text in times)
        last = json.loads((out / name / "log.jsonl").read_text().splitlines()[-1])
        assert last["step"] == 24


def test_every_image_routes_itself_by_all_centers(out):
    """Logits and scores of a mixture of clusters of images, against one image after the other."""
    model = CLIPMoDEModel.from_pretrained(out / "mode")
    config, (clusters, _) = model.config, load_caption_clusters(out / "coarse")
    assert config.metadata_modality == "image" and not config.nearest_center_only
    assert load_encoder(out / "mode" / ENCODER).name == config.metadata_encoder
    test = symbols.load("test", "detailed", 40).remove_columns("caption").rename_column("kind", "caption")
    classes, metadata = list(symbols.KINDS), image_embeds(out / "dense", test["image"])
    processor, weights, right = AutoProcessor.from_pretrained(out / "mode"), [], []
    texts = processor.tokenizer(classes, padding=True, return_tensors="pt")
    for row, embed in zip(test, metadata, strict=True):
        sums = np.zeros(2)
        for center, expert in zip(clusters.centers, clusters.expert_of_center, strict=True):
            sums[expert] += np.exp(-((embed - center) ** 2).sum() / 0.2) * np.exp(-0.5)  # one piece of metadata
        weights.append(np.exp(sums) / np.exp(sums).sum())
        images = processor.image_processor([row["image"]], return_tensors="pt")
        with torch.no_grad():
            logits = sum(
                float(weight) * model.expert(number)(**texts, **images).logits_per_image
                for number, weight in enumerate(weights[-1])
            )
        right.append(classes[int(logits.argmax())] == row["caption"])
    task = Task("zero_shot", "", "", lambda: (test, 0), classes=classes, templates=["{}"])
    result = measure(task, open_model(out / "mode", None, 16, torch.device("cpu")))
    assert result["metrics"]["accuracy"] == np.mean(right)
    (found,) = result["routing_weights"].values()
    assert found == pytest.approx(np.mean(weights, axis=0).tolist(), abs=1e-5)
    assert np.std(weights, axis=0).min() > 0.005  # images differ in theirs


@pytest.mark.parametrize("kind", ["retrieval", "pairs"])
def test_other_tasks_are_measured_with_the_weights_of_images(out, kind):
    opened = open_model(out / "mode", None, 16, torch.device("cpu"))
    rows = symbols.load_minimal_pairs("test", 8) if kind == "pairs" else symbols.load("test", "detailed", 8)
    result = measure(Task(kind, "", "", lambda: (rows, 0)), opened)
    columns = [name for name in rows.column_names if name.startswith("image")]
    expected = np.mean([opened.image_weights(rows, column).mean(axis=0) for column in columns], axis=0)
    assert list(result["routing_weights"]) == ["images"]
    assert result["routing_weights"]["images"] == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_linear_probe_of_summed_embeddings(out):
    parts = [
        symbols.load(split, "detailed", number).remove_columns("caption").rename_column("kind", "caption")
        for split, number in (("train", 120), ("test", 60))
    ]
    task = Task("linear_probe", "", "", lambda: (parts[1], 0), classes=symbols.KINDS, load_train=lambda: (parts[0], 0))
    summed, labels = [], []
    for part in parts:
        summed.append(image_embeds(out / "expert_1", part["image"]) + image_embeds(out / "expert_2", part["image"]))
        labels.append([symbols.KINDS.index(name) for name in part["caption"]])
    expected = linear_probe_metrics(summed[0], labels[0], summed[1], labels[1])
    for model, changes in (("summed", None), ("mode", {"feature_ensemble": "sum"})):
        opened = open_model(out / model, None, 64, torch.device("cpu"), changes=changes)
        assert opened.features([np.ones((1, 16)), np.ones((1, 16))]).shape == (1, 16)
        assert measure(task, opened)["metrics"] == pytest.approx(expected, abs=0.02)


def test_an_average_is_trained_on(out):
    """MoDE appendix D, Table 18: the mean of the experts is where the training of one model begins."""
    mean, tuned = (load_file(out / name / "model.safetensors") for name in ("mean", "tuned"))
    assert mean.keys() == tuned.keys()
    differences = torch.cat([(tuned[name] - mean[name]).flatten() for name in mean]).abs()
    assert 0 < differences.max() < 3 * 0.011  # three steps of AdamW, with a decay
    assert json.loads((out / "tuned" / "log.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_a_mixture_stands_in_a_table_with_either_routing(run, out):
    read = [json.loads(path.read_text()) for path in (out / "evaluation").glob("symbols_zero_shot--*.json")]
    of_rows = {result["model"]: result for result in read}
    assert of_rows["released"]["routing_weights"] != of_rows["mode"]["routing_weights"]
    assert of_rows["released"]["weights"] == of_rows["mode"]["weights"]
    for changes, message in (
        ({"other": {"routing": "paper"}}, "changes.other is none of the models"),
        ({"mode": {"routing": "printed"}}, "routing must be paper or released"),
    ):
        with pytest.raises(ValueError, match=message):
            run("never", {"evaluation.changes": changes})


def test_what_does_not_go_with_images_is_refused(run, out):
    with pytest.raises(ValueError, match="modality image needs a CLIP as encoder, not tfidf"):
        run("never", {"images.encoder": "tfidf"})
    for name in ("dense", "images"):
        shutil.copytree(out / name, run.folder / "other" / name)
    with pytest.raises(ValueError, match="again: modality text, but the encoder .*:image is of the other"):
        run("other", {"again.modality": "text"}, only=["again"])


def test_names_select_no_images(run, out, tmp_path):
    """Which no text encoder could compare them with."""
    recipe = yaml.safe_load((run.folder / "recipe.yaml").read_text())
    recipe["stages"].append(
        {"name": "selected", "stage": "select", "assignment": "assigned", "captions": "images", "metadata": ["heart"]}
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    shutil.copytree(out, tmp_path / "out")
    loaded = load_recipe(tmp_path / "recipe.yaml", {"output_dir": str(tmp_path / "out")})
    with pytest.raises(ValueError, match="selected: metadata are texts, but images embedded images"):
        run_recipe(loaded, only=["selected"])
