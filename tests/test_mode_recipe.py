"""MoDE's recipe run whole on models of a few thousand parameters: what each stage makes, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from tiny_recipes import tiny_run
from tiny_runs import stored
from transformers import AutoModel, AutoProcessor, CLIPModel

from conversion import assemble, average
from conversion.commands import assemble as assemble_command
from conversion.commands import average as average_command
from conversion.folders import load_config
from conversion.presets import PRESETS
from conversion.upcycle import upcycle
from data.contact_sheet import contact_sheet
from data.identity import data_fingerprint
from data.pairs import load_pairs
from data.sources import DataArguments
from evaluation.ensemble import concatenate, open_model
from evaluation.evaluate import evaluate_model
from evaluation.measures import measure
from evaluation.report import best_of
from evaluation.retrieval import retrieval_metrics
from evaluation.sentence_encoders import load_encoder
from evaluation.tasks import Task, find_tasks
from modeling_clip_moe import CLIPMoDEModel, CLIPMoEModel
from training.caption_clusters import load_caption_clusters, load_expert_of_pair
from training.loader import _Collate
from training.recipe import load_recipe

ROOT = Path(__file__).parents[1]
DATA = {"source": "symbols", "num_samples": 160, "captions": "web", "in_memory": True}
TASKS = ["symbols_zero_shot", "symbols_retrieval", "symbols_pairs", "symbols_linear_probe"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_run("mode", tmp_path_factory)


@pytest.fixture(scope="module")
def out(run):
    return run()


@pytest.fixture(scope="module")
def rows():
    return load_pairs(DataArguments(**DATA))


def copy(out, name, *names):
    """A run that has these stages of `out` already."""
    target = out.parent / name
    for part in names:
        shutil.copytree(out / part, target / part)
    return target


def test_captions_are_embedded_and_assigned_to_the_nearest_center(out, rows):
    embeds = stored(out / "captions", "embeddings")
    encoder = load_encoder(out / "captions" / "encoder")
    np.testing.assert_allclose(embeds, encoder.encode(rows["caption"]), atol=1e-6)
    centers = load_arrays(out / "fine" / "centers.safetensors")["centers"]
    labels = stored(out / "assigned", "labels")
    distances = ((embeds[:, None] - centers) ** 2).sum(axis=2)
    assert centers.shape == (8, 16) and np.array_equal(labels, distances.argmin(axis=1))


def test_every_pair_belongs_to_the_expert_of_its_center(out, rows, tmp_path):
    fine = stored(out / "assigned", "labels")
    clusters, metadata = load_caption_clusters(out / "coarse")
    labels = load_expert_of_pair(out / "coarse", data_fingerprint(rows, images=False))
    assert np.array_equal(labels, clusters.expert_of_center[fine]) and metadata["encoder"].startswith("tfidf-")
    assert set(labels) == {0, 1} and clusters.ranges[0] >= clusters.ranges[1]
    assert np.array_equal(np.bincount(clusters.expert_of_center), [4, 4])
    random = load_expert_of_pair(out / "random", data_fingerprint(rows, images=False))
    assert np.array_equal(np.bincount(random), np.bincount(labels)) and not np.array_equal(random, labels)
    contact_sheet(tmp_path / "sheet.png", rows, np.array([f"expert {label}" for label in labels]), None, seed=0)
    assert (out / "coarse" / "clusters.png").read_bytes() == (tmp_path / "sheet.png").read_bytes()


def test_selected_pairs_are_those_nearest_to_the_metadata(out, rows):
    labels = load_expert_of_pair(out / "selected", data_fingerprint(rows, images=False))
    encoder = load_encoder(out / "captions" / "encoder")
    centers = load_arrays(out / "fine" / "centers.safetensors")["centers"]
    metadata = encoder.encode(["heart", "star"])
    nearest = {int(((embed - centers) ** 2).sum(axis=1).argmin()) for embed in metadata}
    fine = stored(out / "assigned", "labels")
    assert np.array_equal(labels == 0, np.isin(fine, list(nearest)))
    assert 8 <= (labels == 0).sum() < 160 and (labels[labels != 0] == -1).all()


def test_an_expert_sees_its_own_pairs_alone(run, out, rows, monkeypatch):
    """Captions of the other cluster do not change an expert: it equals one that is trained on its own pairs alone."""
    seen = []
    collate = _Collate.__call__

    def record(self, pairs):
        seen.extend(pair["caption"] for pair in pairs)
        return collate(self, pairs)

    monkeypatch.setattr(_Collate, "__call__", record)
    target = copy(out, "alone", "dense", "coarse", "assigned", "fine", "captions")
    run("alone", only=["expert_2"])
    mine = load_expert_of_pair(out / "coarse", data_fingerprint(rows, images=False)) == 1
    captions = np.array(rows["caption"])
    assert set(seen) <= set(captions[mine]) and not set(seen) <= set(captions[~mine])
    assert len(seen) == mine.sum() // 8 * 8
    expected, found = (load_file(folder / "expert_2" / "model.safetensors") for folder in (out, target))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_experts_apart_make_the_same_model(run, out):
    run("apart", experts=[2])
    assert not (out.parent / "apart" / "expert_1").exists() and not (out.parent / "apart" / "mode").exists()
    run("apart", only=["expert_1", "mode"])
    found, expected = (AutoModel.from_pretrained(folder / "mode") for folder in (out.parent / "apart", out))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert torch.equal(found.centers, expected.centers)


def test_assembled_models(out):
    mode, coarse, equal, first = (
        CLIPMoDEModel.from_pretrained(out / name) for name in ("mode", "by_coarse", "equal", "first")
    )
    clusters, _ = load_caption_clusters(out / "coarse")
    assert np.array_equal(mode.centers.numpy(), clusters.centers)
    assert np.array_equal(mode.expert_of_center.numpy(), clusters.expert_of_center)
    assert np.array_equal(coarse.centers.numpy(), clusters.coarse_centers) and equal.centers is None
    assert np.array_equal(first.centers.numpy(), clusters.centers[clusters.expert_of_center == 0])
    for number in range(2):
        expert = CLIPModel.from_pretrained(out / f"expert_{number + 1}").state_dict()
        assert all(torch.equal(expert[name], tensor) for name, tensor in mode.expert(number).state_dict().items())
    encoder = load_encoder(out / "mode" / assemble.ENCODER)
    weights = mode.set_task(torch.as_tensor(encoder.encode(["heart", "star"])), encoder.name)
    assert weights.sum() == pytest.approx(1)
    assert not (out / "equal" / assemble.ENCODER).exists()


def test_a_killed_assembly_goes_on(run, out, monkeypatch):
    target = copy(out, "killed_mode", "dense", "captions", "fine", "assigned", "coarse", "expert_1", "expert_2")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(assemble, "verify", killed)
        run(target.name, only=["mode"])
    run(target.name, only=["mode"])
    assert load_encoder(target / "mode" / assemble.ENCODER).name == load_encoder(out / "captions" / "encoder").name


def test_experts_keep_their_dtype(out, tmp_path):
    for number in (1, 2):
        model = CLIPModel.from_pretrained(out / f"expert_{number}", dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / str(number))
        AutoProcessor.from_pretrained(out / "expert_1").save_pretrained(tmp_path / str(number))
    assemble.convert([tmp_path / "1", tmp_path / "2"], tmp_path / "mode")
    model = AutoModel.from_pretrained(tmp_path / "mode")
    assert model.dtype == torch.bfloat16
    for name, tensor in CLIPModel.from_pretrained(tmp_path / "2").state_dict().items():
        assert torch.equal(model.expert(1).state_dict()[name], tensor)


def test_average_is_the_mean(out):
    mean, one, two = (CLIPModel.from_pretrained(out / n).state_dict() for n in ("mean", "expert_1", "expert_2"))
    for name, tensor in mean.items():
        assert torch.equal(tensor, ((one[name].double() + two[name].double()) / 2).to(tensor.dtype)), name


def test_a_weighted_average(out, tmp_path):
    """On the line between two models, also of one stored in half precision; at its ends, and beyond."""
    one, two = (CLIPModel.from_pretrained(out / n).state_dict() for n in ("expert_1", "expert_2"))
    half = CLIPModel.from_pretrained(out / "expert_2", dtype=torch.float16)
    half.save_pretrained(tmp_path / "half")
    for weight in (0.0, 0.25, 1.0, 1.5):
        found = average.average([out / "expert_1", out / "expert_2"], [1 - weight, weight]).state_dict()
        for name, tensor in found.items():
            assert torch.allclose(tensor, (1 - weight) * one[name] + weight * two[name], atol=1e-6), (weight, name)
    assert average.average([out / "expert_1", tmp_path / "half"], [0.0, 1.0]).dtype == torch.float32
    for weights, message in (([0.5], "1 weights for 2 models"), ([0.5, 0.6], "the sum of the weights is 1.1")):
        with pytest.raises(ValueError, match=message):
            average.average([out / "expert_1", out / "expert_2"], weights)


@pytest.fixture(scope="module")
def unequal(out, tmp_path_factory):
    """The mixture with experts whose temperatures differ."""
    folder = shutil.copytree(out / "mode", tmp_path_factory.mktemp("unequal") / "mode")
    model = CLIPMoDEModel.from_pretrained(folder)
    model.expert(1).logit_scale.data += 1.0
    model.save_pretrained(folder)
    return folder


def test_an_ensemble_is_measured_as_the_model_computes(unequal):
    """The products of concatenated embeddings against the logits of the model, for every kind of task."""
    model, opened = CLIPMoDEModel.from_pretrained(unequal), open_model(unequal, None, 16, torch.device("cpu"))
    processor, encoder = AutoProcessor.from_pretrained(unequal), load_encoder(unequal / assemble.ENCODER)
    rows = load_pairs(DataArguments(**DATA)).select(range(40))
    captions = list(rows["caption"])
    texts = processor.tokenizer(captions, padding=True, truncation=True, return_tensors="pt")
    images = processor.image_processor(list(rows["image"]), return_tensors="pt")
    corpus = torch.as_tensor(encoder.encode(captions))
    image_parts, text_parts = zip(*opened.map(lambda e: (e.images(rows), e.texts(captions))), strict=True)
    scales = torch.as_tensor(opened.scales)
    assert scales[1] > 2 * scales[0]
    tasks = {
        "corpus": ([captions], model.route(corpus)),
        "queries": ([[c] for c in captions], model.route(corpus[:, None])),
    }
    for metadata, weights in tasks.values():
        with torch.no_grad():
            logits = model(**texts, **images, routing_weights=weights).logits_per_text
        product = concatenate(text_parts, opened.weights(metadata)) @ concatenate(image_parts).T
        # The evaluation's weights sum to 1 with the temperatures in them
        product = torch.as_tensor(product) * (weights * scales).sum(dim=-1, keepdim=True).float()
        torch.testing.assert_close(product, logits, atol=1e-4, rtol=1e-4)
    assert (tasks["queries"][1].std(dim=0) > 1e-3).all()  # queries do differ in their weights


def test_retrieval_asks_each_query_by_itself(unequal):
    """What `measure` hands to the metrics, in each direction."""
    opened = open_model(unequal, None, 64, torch.device("cpu"))
    rows = load_pairs(DataArguments(**DATA)).select(range(40))
    captions = list(rows["caption"])
    task = Task("retrieval", "pairs", "40 pairs", lambda: (rows, 0))
    result = measure(task, opened)
    images, texts = zip(*opened.map(lambda e: (e.images(rows), e.texts(captions))), strict=True)
    expected = {
        direction: retrieval_metrics(concatenate(images), concatenate(texts, opened.weights(tasks)), np.arange(40))
        for direction, tasks in (("image_to_text", [captions]), ("text_to_image", [[c] for c in captions]))
    }
    for name, value in result["metrics"].items():
        assert value == expected[name.split("_recall")[0]][name]
    assert expected["image_to_text"] != expected["text_to_image"]
    assert set(result["routing_weights"]) == {"corpus", "queries"}
    assert not np.allclose(opened.weights([captions]), opened.weights([[c] for c in captions]).mean(axis=0), atol=1e-3)


def test_oracle_has_the_best_score_of_each_task(out):
    report = (out / "evaluation" / "report.md").read_text()
    assert "| best " in report
    results = [json.loads(path.read_text()) for path in sorted((out / "evaluation").glob("*--*.json"))]
    bests = [result for result in results if result["model"] == "best"]
    assert len(bests) == len(TASKS) and bests == best_of(results, "best", ["one", "two"])
    for best in bests:
        alone = [r["metrics"] for r in results if r["task"] == best["task"] and r["model"] in ("one", "two")]
        assert len(alone) == 2
        assert best["metrics"] == {name: max(m[name] for m in alone) for name in alone[0]}


@pytest.mark.slow
def test_two_processes_assign_as_one(run, out):
    folder = out.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "training.upcycle", "--config", "recipe.yaml", "--output-dir", "two"]
    command += ["--captions.batch_size", "1", "--stages"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    for part in ("dense,captions,fine,assigned", "coarse"):  # the second has read no pairs yet
        result = subprocess.run(
            [*command, part], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
    assert len(list((folder / "two" / "assigned").glob("0*"))) == 2
    for stage, name in (("fine", "centers"), ("coarse", "labels")):
        path = f"{stage}/{name}.safetensors"
        expected, found = load_arrays(out / path), load_arrays(folder / "two" / path)
        assert all(np.array_equal(found[key], array) for key, array in expected.items())


def test_other_pairs_are_embedded_while_they_are_assigned(run, out):
    target = copy(out, "others", "dense", "captions", "fine")
    more = {**DATA, "num_samples": 300, "seed": 5}
    of_experts = {f"{name}.data": more for name in ("expert_1", "expert_2", "retrieved")}
    run("others", {"assigned.data": more} | of_experts, only=["assigned", "coarse"])
    rows = load_pairs(DataArguments(**more))
    embeds = load_encoder(target / "captions" / "encoder").encode(rows["caption"])
    centers = load_arrays(out / "fine" / "centers.safetensors")["centers"]
    labels = stored(target / "assigned", "labels")
    assert np.array_equal(labels, ((embeds[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1))
    assert len(load_expert_of_pair(target / "coarse", data_fingerprint(rows, images=False))) == 300
    with pytest.raises(ValueError, match="expert_1.clusters, expert_2.clusters: coarse is of other data: seed is 5"):
        run("others", {"assigned.data": more}, only=["expert_1"])


def test_sparse_experts_make_a_mixture_of_two_levels(run, out, tmp_path):
    upcycled = tmp_path / "sparse"
    upcycle(CLIPModel.from_pretrained(out / "dense"), PRESETS["clip_up"], seed=0).save_pretrained(upcycled)
    AutoProcessor.from_pretrained(out / "dense").save_pretrained(upcycled)
    copy(out, "two_levels", "dense", "captions", "fine", "assigned", "coarse")
    run(
        "two_levels",
        {"expert_1.model": str(upcycled), "expert_2.model": str(upcycled)},
        only=["expert_1", "expert_2", "mode"],
    )
    folder = out.parent / "two_levels" / "mode"
    model = AutoModel.from_pretrained(folder)
    assert isinstance(model.expert(0), CLIPMoEModel) and isinstance(model.expert(1), CLIPMoEModel)
    results = evaluate_model(folder, find_tasks(["symbols_zero_shot"]), tmp_path)
    assert 0 < results[0]["metrics"]["accuracy"] < 1 and len(results[0]["routing_weights"]["classes"]) == 2


@pytest.mark.parametrize(
    ("overrides", "part", "message"),
    [
        ({"expert_1.global_batch_size": 128}, "expert_1", "has [0-9]+ pairs, fewer than global_batch_size 128"),
        ({"expert_1.cluster": 2}, "expert_1", "expert_1.cluster: there is no cluster 2: those of coarse are 0 to 1"),
        ({"coarse.num_experts": 9}, "coarse", "coarse.num_experts: 8 centers cannot make 9 clusters"),
        ({"fine.num_centers": 121}, "fine", "fine.num_centers: 120 captions cannot make 121 clusters"),
        ({"selected.num_nearest": 9}, "selected", "selected.num_nearest: 9 of 8 centers"),
        ({"selected.metadata": ["zebra"]}, "selected", "knows no word of 'zebra'"),
        ({"captions.dim": 999}, "captions", "different words, fewer than dim 999"),
        ({"captions.encoder": "nowhere/at/all"}, "captions", "nowhere/at/all"),
        ({"mode.experts": ["expert_1", "expert_2", "dense"]}, "mode", "3 experts, but coarse has 2 clusters"),
    ],
)
def test_what_cannot_be_is_refused(run, out, overrides, part, message):
    names = ["dense", "captions", "fine", "assigned", "coarse", "selected", "expert_1", "expert_2"]
    target = out.parent / "refused"
    shutil.rmtree(target, ignore_errors=True)
    order = [stage.name for stage in load_recipe(run.folder / "recipe.yaml").stages]
    copy(out, "refused", *[name for name in names if order.index(name) < order.index(part)])
    with pytest.raises((ValueError, OSError), match=message):
        run("refused", overrides, only=[part])


def test_a_mistake_leaves_nothing_behind(run, out):
    target = copy(out, "mistake", "dense", "captions", "fine", "assigned", "coarse")
    with pytest.raises(ValueError, match="^expert_1: cluster 0 .* fewer than global_batch_size 128"):
        run(target.name, {"expert_1.global_batch_size": 128}, only=["expert_1"])
    run(target.name, only=["expert_1"])
    whole, again = (load_file(folder / "expert_1" / "model.safetensors") for folder in (out, target))
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_contradictions_are_refused(run):
    for overrides, message in (
        ({"expert_1.data.streaming": True}, "streaming"),
        ({"expert_2.expert": 1}, "two stages train an expert of the same number"),
        ({"mode.captions": None}, "clusters and captions go together"),
        ({"evaluation.oracles": {"best": ["one", "three"]}}, "oracles.best needs rows of the models"),
    ):
        with pytest.raises(ValueError, match=message):
            run("never", overrides)


def test_centers_of_another_encoder_are_refused(run, out, tmp_path):
    target = copy(out, "encoders", "dense", "fine")
    with pytest.raises(ValueError, match="made with tfidf-.*, the captions with dense-"):
        run("encoders", {"captions.encoder": "dense"}, only=["captions", "assigned"])
    assert load_encoder(target / "captions" / "encoder").name.startswith("dense-")


def test_experts_that_do_not_fit_are_refused(out, tmp_path):
    experts = [out / "dense", "training/symbol_clip"]
    with pytest.raises(ValueError, match="tokenizer of training/symbol_clip makes something else of texts"):
        assemble.convert(experts, tmp_path / "mode")
    assert not (tmp_path / "mode").exists()  # before an expert is loaded
    (name, config), (other, of_other) = ((source, load_config(source)) for source in experts)
    with pytest.raises(ValueError, match="symbol_clip has projection_dim 64, but .* has 16"):
        assemble.require_same_sizes(name, config, other, of_other)
    with pytest.raises(ValueError, match="has another configuration than"):
        average.average([out / "dense", "training/symbol_clip"])


def test_commands(out, tmp_path):
    experts = [str(out / "expert_1"), str(out / "expert_2")]
    assemble_command.main([str(tmp_path / "mode"), "--experts", *experts])
    model = AutoModel.from_pretrained(tmp_path / "mode")
    assert model.num_experts == 2 and model.set_equal_weights().tolist() == [0.5, 0.5]
    average_command.main([str(tmp_path / "mean"), "--models", *experts])
    expected = load_file(out / "mean" / "model.safetensors")
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(SystemExit, match="error: .*nowhere"):
        average_command.main([str(tmp_path / "other"), "--models", str(tmp_path / "nowhere")])
