"""The papers' recipes on models of a few thousand parameters, one run of each: what every stage makes, what moves, that
killed, divided and repeated runs end in the same bits, and what is refused."""

import functools
import itertools
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from several_processes import kill_at_a_checkpoint, run_processes, train_recipe
from test_mode_routing import in_a_loop
from tiny_runs import losses, recorded, stored, weights
from transformers import AutoModel, AutoProcessor, CLIPModel

from clip_moe.conversion import assemble
from clip_moe.conversion.verification import sample_inputs
from clip_moe.data import symbols
from clip_moe.data.arguments import DataArguments
from clip_moe.data.contact_sheet import contact_sheet
from clip_moe.data.identity import data_fingerprint
from clip_moe.data.images import decode_image
from clip_moe.data.pairs import load_pairs
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine import runner
from clip_moe.engine.recipe import load_recipe
from clip_moe.engine.runner import run_recipe
from clip_moe.evaluation.built_in_tasks import symbol_tasks
from clip_moe.evaluation.ensemble import open_model
from clip_moe.evaluation.measures import measure
from clip_moe.evaluation.sentence_encoders import load_encoder
from clip_moe.evaluation.tasks import TASKS, Task
from clip_moe.training import loop
from clip_moe.training.clusters import Clusters, load_clusters
from clip_moe.training.loader import PairLoader
from clip_moe.training.loop import checkpoint_layers
from clip_moe.training.optimizers import set_trainable
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel

CLIP_MOE = "dense features_0 clusters_1 expert_1 features_1 clusters_2 expert_2 unified clip_moe".split()
STAGES = {
    "clip_moe": CLIP_MOE,
    "clip_fmoe": ["dense", "captions", "fused", "features", "clusters", "sub_clusters"]
    + ["expert_1", "expert_2", "unified", "clip_fmoe"],
    "mode": "dense captions coarse expert_1 expert_2 mode".split(),
}
DATA = {"source": "symbols", "num_samples": 160, "captions": "web", "in_memory": True}
RECIPES = Path(__file__).parent / "recipes"
FFN = "vision_model.encoder.layers.1.mlp"


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """The function that runs a system's recipe, whose `whole` is the finished recipe; tests only read it."""

    @functools.cache
    def run_once(name):
        def run(output, overrides=None, **parts):
            overrides = {"output_dir": str(run.folder / output)} | (overrides or {})
            return run_recipe(load_recipe(RECIPES / f"{name}.yaml", overrides), **parts)

        run.folder = tmp_path_factory.mktemp(name)
        run.whole = run("whole")
        return run

    with pytest.MonkeyPatch.context() as patch:
        for name, task in symbol_tasks(50, 20, 20).items():
            patch.setitem(TASKS, name, task)
        yield run_once


def remade(run, stages, overrides=None, change=None, **options):
    """A copy of the finished run, perhaps changed, in which these stages are made anew with other settings."""
    output = Path(tempfile.mkdtemp(dir=run.folder)) / "out"
    shutil.copytree(run.whole, output)
    for name in stages:
        shutil.rmtree(output / name)
    if change is not None:
        change(output)
    return run(output, overrides, only=stages, **options)


def arrays(folder, names):
    return {
        path.relative_to(folder): load_file(path) for name in names for path in (folder / name).rglob("*.safetensors")
    }


def assert_same(first, second, names, **tolerance):
    torch.testing.assert_close(arrays(second, names), arrays(first, names), **(tolerance or {"rtol": 0, "atol": 0}))


def image_embeds(folder, images):
    model, processor = CLIPModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    images = [decode_image(image) for image in images]
    pixel_values = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        embeds = model.get_image_features(pixel_values).pooler_output
    return torch.nn.functional.normalize(embeds, dim=-1).numpy()


@pytest.mark.parametrize(
    ("name", "before", "after", "pattern", "number"),
    [
        ("clip_moe", "dense", "expert_1", r"\.layers\.\d+\.mlp\.fc[12]\.(weight|bias)$", 16),
        ("clip_moe", "unified", "clip_moe", r"\.mlp\.router\.weight$", 4),
        ("clip_fmoe", "fused", "expert_1", r"layers\.3\.mlp\.(experts|fusion_gate)\.", 10),
        ("clip_fmoe", "unified", "clip_fmoe", r"layers\.3\.mlp\.(router|fusion_gate)\.", 4),
    ],
)
def test_what_moves(system, name, before, after, pattern, number):
    old, new = (weights(system(name).whole / stage) for stage in (before, after))
    moved = {key for key in old if not torch.equal(old[key], new[key])}
    assert moved == {key for key in old if re.search(pattern, key)} and len(moved) == number


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_experts_in_separate_runs_end_in_the_same_bits(system, name):
    run, output = system(name), system(name).folder / "separate"
    if name == "clip_moe":  # whose second expert goes on from the first
        with pytest.raises(ValueError, match="the stage 'expert_1' has not finished"):
            run(output, experts=[2])
    first, second = ([1], [2]) if name == "clip_moe" else ([2], [1])
    run(output, experts=first)
    assert not (output / f"expert_{second[0]}").exists()
    run(output, experts=second)
    assert not (output / STAGES[name][-1]).exists()
    run(output, only=[stage for stage in STAGES[name][-2:] if "expert" not in stage])
    assert_same(run.whole, output, STAGES[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "is_killed"),
    [
        ("clip_moe", "features_1 clusters_2 expert_2 unified clip_moe", True),
        ("mode", "captions coarse expert_2", False),
    ],
)
def test_two_processes_end_in_the_same_models(system, name, stages, is_killed):
    run, output, stages = system(name), system(name).folder / "two", stages.split()
    shutil.copytree(run.whole, output, ignore=shutil.ignore_patterns(*stages))
    arguments = "--config", RECIPES / f"{name}.yaml", "--output_dir", output, "--stages", ",".join(stages)
    if is_killed:
        kill_at_a_checkpoint(output, 2, train_recipe, *arguments)
    run_processes(2, train_recipe, *arguments)
    assert_same(run.whole, output, stages, atol=1e-4, rtol=0)
    for stage in stages:
        if (run.whole / stage / "log.jsonl").exists():
            torch.testing.assert_close(losses(output / stage), losses(run.whole / stage), atol=1e-4, rtol=0)


def test_stopped_at_the_end_of_a_stage(system, monkeypatch):
    """All is written but not renamed: nothing is lost or repeated."""
    run, output = system("clip_moe"), system("clip_moe").folder / "stopped"
    shutil.copytree(run.whole, output)
    shutil.rmtree(output / "expert_2")
    replace, step, count = os.replace, loop._clip_gradient, itertools.count()

    def stop_before_rename(old, new):
        if Path(new) == output / "expert_2":
            raise KeyboardInterrupt
        replace(old, new)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner.os, "replace", stop_before_rename)
        run(output, only=["expert_2"])
    monkeypatch.setattr(loop, "_clip_gradient", lambda *args: [next(count), step(*args)][1])
    run(output, only=["expert_2"])
    assert next(count) == 2  # from the checkpoint of step 4
    assert not (output / "expert_2" / "checkpoints").exists()
    assert_same(run.whole, output, ["expert_2"])


# CLIP-MoE


def test_clusters_of_the_second_expert_go_on_from_the_first_and_are_shown(system, tmp_path):
    whole = system("clip_moe").whole
    assert {path.name for path in whole.iterdir()} == {*CLIP_MOE, "recipe.yaml"}
    pairs = load_pairs(load_recipe(whole / "recipe.yaml").stages[1].data)
    first, second = (load_clusters(whole / f"clusters_{n}", data_fingerprint(pairs))[0] for n in (1, 2))
    assert (second.tuples[second.labels][:, :1] == first.tuples[first.labels]).all()
    assert set(second.tuples[:, 1]) <= set(range(4)) and len(second.tuples) > len(first.tuples)
    own = ["image {}, text {}".format(*divmod(pair, 2)) for pair in second.tuples[second.labels, 1]]
    accumulated = [f"cluster {label}" for label in second.labels]
    for name, titles in {"clusters.png": own, "accumulated_clusters.png": accumulated}.items():
        contact_sheet(tmp_path / name, pairs, np.array(titles), seed=0)
        assert (whole / "clusters_2" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_base_in_half_precision(system):
    """Experts train in float32; the sparse model keeps it."""

    def halve(output):
        AutoModel.from_pretrained(output / "dense", dtype=torch.float16).save_pretrained(output / "dense")
        recorded(output / "dense")

    output = remade(system("clip_moe"), ["expert_1", "unified"], {"unified.experts": ["expert_1"]}, halve)
    tensors = weights(output / "unified")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert torch.equal(tensors[f"{FFN}.experts.up_proj"][1], weights(output / "expert_1")[f"{FFN}.fc1.weight"])


# CLIP-FMoE


@pytest.mark.slow
def test_no_backward_goes_below_the_first_layer_that_trains(system):
    fused = AutoModel.from_pretrained(system("clip_fmoe").whole / "fused")
    set_trainable(fused.train(), r"\.(experts|fusion_gate)\.")
    checkpoint_layers(fused)
    seen = []
    for tower in (fused.text_model, fused.vision_model):
        for layer in tower.encoder.layers:
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].requires_grad))
    fused(**sample_inputs(fused.config)).logits_per_image.sum().backward()
    assert len(seen) >= 8 and not any(seen)


def test_every_expert_has_its_own_cluster(system):
    whole = system("clip_fmoe").whole
    found = load_arrays(whole / "sub_clusters" / "clusters.safetensors")
    first_level = load_arrays(whole / "clusters" / "clusters.safetensors")["labels"]
    assert (found["tuples"][found["labels"], 0] == first_level).all()
    assert found["tuples"].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    sizes = np.bincount(found["labels"])
    for number, name in enumerate(("expert_1", "expert_2")):
        (stage,) = (stage for stage in load_recipe(whole / "recipe.yaml").stages if stage.name == name)
        labels = stage.labels(Clusters(**found), 8)
        assert ((labels >= 0) == (first_level == number)).all()
        assert len(losses(whole / name)) == 2 * sum(size // 8 for size in sizes[2 * number : 2 * number + 2])


def test_clusters_of_captions_are_those_of_the_loss(system):
    """Text features are the captions' mean, weighted as the loss weighs them, not the raw caption's."""
    run = system("clip_fmoe")
    rows = load_from_disk(run.whole / "captions")
    assert len(rows) == 120 and {len(captions) for captions in rows["caption"]} == {3}
    model, processor = (kind.from_pretrained(run.whole / "dense") for kind in (AutoModel, AutoProcessor))
    output = remade(run, ["features"], {"features.caption_weights": None})
    images, found = (stored(run.whole / "features", name) for name in ("image", "text"))
    raw_images, raw = (stored(output / "features", name) for name in ("image", "text"))
    np.testing.assert_allclose(images, image_embeds(run.whole / "dense", rows["image"]), atol=1e-5)
    assert np.array_equal(images, raw_images)
    missing = 0
    for row, feature, raw_feature in zip(rows, found, raw, strict=True):
        there = [caption for caption in row["caption"] if caption]
        missing += len(there) < 3
        texts = model.get_text_features(**processor.tokenizer(there, padding=True, return_tensors="pt")).pooler_output
        texts = torch.nn.functional.normalize(texts.detach(), dim=-1)
        mean = sum(weight * text for weight, text in zip((0.1, 0.6, 0.3), texts, strict=False))
        np.testing.assert_allclose(feature, torch.nn.functional.normalize(mean, dim=0), atol=1e-5)
        np.testing.assert_allclose(raw_feature, texts[0], atol=1e-5)
    assert 0 < missing < len(rows)


# MoDE


@pytest.fixture(scope="module")
def out(system):
    return system("mode").whole


@pytest.fixture(scope="module")
def rows():
    return load_pairs(DataArguments(**DATA))


def nearest(embeds, centers):
    return ((embeds[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1)


def test_captions_are_embedded_and_every_pair_belongs_to_the_expert_of_its_center(out, rows, tmp_path):
    embeds, encoder = stored(out / "captions", "text"), load_encoder(out / "captions" / "encoder")
    np.testing.assert_allclose(embeds, encoder.encode(rows["caption"]), atol=1e-6)
    centers, fine = load_arrays(out / "coarse" / "centers.safetensors")["centers"], stored(out / "coarse", "labels")
    assert centers.shape == (8, 16) and np.array_equal(fine, nearest(embeds, centers))
    clusters, metadata = load_clusters(out / "coarse")
    fingerprint = data_fingerprint(rows, images=False)
    label_sets = (load_clusters(out / name, fingerprint)[0].labels for name in ("coarse", "random", "selected"))
    labels, random, selected = label_sets
    assert np.array_equal(labels, clusters.cluster_of_center[fine]) and metadata["encoder"].startswith("tfidf-")
    assert set(labels) == {0, 1}
    assert np.array_equal(np.bincount(clusters.cluster_of_center), [4, 4])
    assert np.array_equal(np.bincount(random), np.bincount(labels)) and not np.array_equal(random, labels)
    contact_sheet(tmp_path / "sheet.png", rows, np.array([f"expert {label}" for label in labels]), seed=0)
    assert (out / "coarse" / "clusters.png").read_bytes() == (tmp_path / "sheet.png").read_bytes()
    # Selected pairs are those of the centers that are nearest to the metadata
    assert np.array_equal(selected == 0, np.isin(fine, nearest(encoder.encode(["heart", "star"]), centers)))
    assert 8 <= (selected == 0).sum() < 160 and (selected[selected != 0] == -1).all()


def test_an_expert_sees_its_own_pairs_alone(system, out, rows, monkeypatch):
    seen, collate = [], PairLoader.collate
    record = lambda self, pairs: seen.extend(pair["caption"] for pair in pairs) or collate(self, pairs)  # noqa: E731
    monkeypatch.setattr(PairLoader, "collate", record)
    assert_same(out, remade(system("mode"), ["expert_2"]), ["expert_2"])
    mine = load_clusters(out / "coarse", data_fingerprint(rows, images=False))[0].labels == 1
    captions = np.array(rows["caption"])
    assert set(seen) <= set(captions[mine]) and not set(seen) <= set(captions[~mine])
    assert len(seen) == mine.sum() // 8 * 8


def test_assembled_and_averaged_models(out):
    names = ("mode", "by_coarse", "equal", "first")
    mode, coarse, equal, first = (CLIPMoDEModel.from_pretrained(out / name) for name in names)
    clusters, _ = load_clusters(out / "coarse")
    assert np.array_equal(mode.centers.numpy(), clusters.fine_centers)
    assert np.array_equal(mode.expert_of_center.numpy(), clusters.cluster_of_center)
    assert np.array_equal(coarse.centers.numpy(), clusters.centers) and equal.centers is None
    assert np.array_equal(first.centers.numpy(), clusters.fine_centers[clusters.cluster_of_center == 0])
    one, two = (CLIPModel.from_pretrained(out / f"expert_{number}").state_dict() for number in (1, 2))
    for number, expert in enumerate((one, two)):
        assert all(torch.equal(expert[name], tensor) for name, tensor in mode.expert(number).state_dict().items())
    encoder = load_encoder(out / "mode" / assemble.ENCODER)
    assert mode.set_task(torch.as_tensor(encoder.encode(["heart", "star"])), encoder.name).sum() == pytest.approx(1)
    assert not (out / "equal" / assemble.ENCODER).exists()
    for name, tensor in CLIPModel.from_pretrained(out / "mean").state_dict().items():
        assert torch.equal(tensor, ((one[name].double() + two[name].double()) / 2).to(tensor.dtype)), name


def test_other_pairs_are_embedded_while_they_are_assigned(system, out):
    more = {**DATA, "num_samples": 300, "seed": 5}
    readers = "expert_1", "expert_2", "retrieved"

    def without_readers(output):
        for name in readers:
            shutil.rmtree(output / name, ignore_errors=True)

    reader_data = {f"{name}.data": more for name in readers}
    target = remade(system("mode"), ["coarse"], {"coarse.data": more} | reader_data, without_readers)
    rows = load_pairs(DataArguments(**more))
    embeds = load_encoder(target / "captions" / "encoder").encode(rows["caption"])
    centers = load_arrays(out / "coarse" / "centers.safetensors")["centers"]
    assert np.array_equal(stored(target / "coarse", "labels"), nearest(embeds, centers))
    assert len(load_clusters(target / "coarse", data_fingerprint(rows, images=False))[0].labels) == 300


def test_centers_of_another_encoder_are_refused(system, out):
    with pytest.raises(ValueError, match="made with tfidf-.*, not with dense-"):
        centers = {"coarse.num_centers": None, "coarse.centers": str(out / "coarse")}
        remade(system("mode"), ["captions", "coarse"], {"captions.model": "dense", "captions.dim": 64} | centers)


# MoDE's comparisons: clusters of images, averages that are trained on, embeddings that are summed


@pytest.mark.slow
def test_images_are_clustered_and_averages_trained_on(system, rows):
    out = system("mode_images").whole
    expected = image_embeds(out / "dense", rows["image"])
    np.testing.assert_allclose(stored(out / "images", "image"), expected, atol=1e-5)
    centers = load_arrays(out / "coarse" / "centers.safetensors")["centers"]
    assert np.array_equal(stored(out / "coarse", "labels"), nearest(expected, centers))
    # The mean of the experts is where the training of one model begins: three steps of AdamW, with a decay
    mean, tuned = (weights(out / name) for name in ("mean", "tuned"))
    assert 0 < max((tuned[name] - mean[name]).abs().max() for name in mean) < 3 * 0.011


@pytest.mark.slow
def test_every_image_routes_itself_by_all_centers(system):
    """Weights of a mixture of clusters of images, against one image after the other."""
    out = system("mode_images").whole
    config, (clusters, _) = CLIPMoDEConfig.from_pretrained(out / "mode"), load_clusters(out / "coarse")
    assert config.metadata_modality == "image" and not config.nearest_center_only
    assert load_encoder(out / "mode" / assemble.ENCODER).name == config.metadata_encoder
    test = SYMBOLS.load("test", "detailed", 40).remove_columns("caption").rename_column("kind", "caption")
    routing = clusters.fine_centers, clusters.cluster_of_center, 2, 0.2, False, "paper"
    expected = [in_a_loop([embed], *routing) for embed in image_embeds(out / "dense", test["image"])]
    opened = open_model(out / "mode", None, 16, torch.device("cpu"))
    task = Task("zero_shot", "", "", lambda: (test, 0), classes=list(symbols.KINDS), templates=["{}"])
    (found,) = measure(task, opened)["routing_weights"].values()
    assert found == pytest.approx(np.mean(expected, axis=0).tolist(), abs=1e-5)
    assert np.std(expected, axis=0).min() > 0.005  # images differ in theirs


@pytest.mark.slow
def test_an_encoder_of_images_embeds_no_texts(system):
    with pytest.raises(ValueError, match="again: what is captions, but the encoder .*:image embeds image"):
        remade(system("mode_images"), ["again"], {"again.what": "captions"})
