"""Benchmarks by name: every one on a tiny data set in each of its layouts."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import small_evaluation
from benchmark_folders import COPIES, NUMBER, STEP, WEBDATASETS, make_all, make_copy

from data.images import decode_image
from evaluation import evaluate
from evaluation.benchmarks.loading import benchmark_task
from evaluation.benchmarks.specs import BENCHMARKS, GROUPS
from evaluation.evaluate import evaluate_model
from evaluation.tasks import find_tasks
from training.recipe import load_recipe
from training.stages.evaluate import EvaluateStage, MeasuringStage

dense = small_evaluation.dense
RECIPES = (Path(__file__).parents[1] / "training" / "recipes").glob("*.yaml")
# LLaVA-1.5's benchmarks are lmms-eval's
AT_THE_PAPERS_SIZE = sorted(path for path in RECIPES if not re.search("symbol|icons|names|demo|llava", path.stem))
# Tables of the papers -> what they measure
ROBUSTNESS = "imagenet_a imagenet_o imagenet_r imagenet_sketch"
FMOE_11 = "cars country211 fgvc_aircraft food101 sun397 caltech101 eurosat flowers pets imagenet1k imagenetv2"
TABLES = {
    "clip_fmoe_table_1": FMOE_11,
    "clip_fmoe_table_2": "mscoco_captions flickr8k flickr30k",
    "clip_fmoe_table_3": "mscoco_captions flickr8k flickr30k docci_long iiw_long urban1k dci",
    "clip_fmoe_table_4": f"cars food101 sun397 eurosat caltech101 {ROBUSTNESS} imagenet1k mscoco_captions urban1k dci",
    "clip_fmoe_table_6": f"{FMOE_11} {ROBUSTNESS} cifar10 cifar100",
    "clip_fmoe_table_7": f"{FMOE_11} {ROBUSTNESS} cifar10 cifar100",
    "clip_fmoe_table_8": "docci iiw urban1k dci",
    "clip_fmoe_table_17": "mmvp_vlm",
    "clip_fmoe_table_18": f"cars food101 sun397 eurosat caltech101 {ROBUSTNESS} imagenet1k imagenetv2 flowers",
    "clip_fmoe_table_19": "mscoco_captions urban1k dci flickr8k flickr30k",
    "clip_moe_table_1": "mmvp_vlm",
    "clip_moe_table_2": "mscoco_val2017 flickr30k_all",
    "clip_moe_table_4": "imagenet1k mscoco_val2017 flickr30k_all",
    "clip_moe_table_5": "imagenet1k imagenet_o imagenetv2 cifar10 cifar100",
    "clip_up_table_1": "imagenet1k mscoco_captions flickr30k",
    "clip_up_table_2": "imagenet1k mscoco_captions flickr30k",
    "clip_up_table_5": "imagenetv2 imagenet_a imagenet_r",
    "mode_26": "imagenet1k food101 cifar10 cifar100 cub200 sun397 cars fgvc_aircraft dtd pets caltech101 flowers mnist "
    "fer2013 stl10 eurosat resisc45 gtsrb kitti_closest_vehicle_distance country211 pcam ucf101 kinetics700 "
    "clevr_count_all hateful_memes renderedsst2",
    "mode_table_3": f"{ROBUSTNESS} imagenetv2",
    "mode_table_4": "mscoco_captions flickr30k",
    "mode_table_9": "imagenet1k_linear_probe",
}
# Groups whose tables have other columns than those of the kind of task -> the titles of the columns
RECALLS = [f"R@{k} {way}" for k in (1, 5, 10) for way in ("image→text", "text→image")]
COLUMNS = {
    "clip_up_table_2": ["accuracy", "top-5 accuracy", *RECALLS[:4]],
    "clip_up_table_5": ["accuracy", "top-5 accuracy"],
    "clip_moe_table_2": RECALLS,
    "clip_moe_table_4": RECALLS,
    "clip_fmoe_table_2": RECALLS[:4],
    "mode_table_4": RECALLS,
    "mode_26": ["accuracy", "mean per class", "mean of top-1 and top-5", "ROC AUC"],
}


def brightness(value):
    return round(np.asarray(decode_image(value)).mean() / STEP)


def test_all_have_copies():
    assert COPIES.keys() == BENCHMARKS.keys()
    on_hub = {name.removeprefix("clip-benchmark/") for name in (b.hub for b in BENCHMARKS.values()) if name}
    assert on_hub == set(WEBDATASETS)
    for name, copies in COPIES.items():
        assert len(copies) == len(BENCHMARKS[name].layouts)
        assert BENCHMARKS[name].hub in (None, f"clip-benchmark/{copies[0][0]}")


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, copies in COPIES.items() for number in range(len(copies))]
)
def test_a_copy_in_each_layout(tmp_path, name, number):
    """Under the name of the folder that its authors gave it."""
    benchmark, (folder, make) = BENCHMARKS[name], COPIES[name][number]
    (tmp_path / folder).mkdir()
    expected = make(tmp_path / folder)
    task = benchmark_task(benchmark, tmp_path)
    assert not re.search(r"\d,\d{3}", task.protocol)  # no number of images that was not read
    rows, skipped = task.load()
    if benchmark.kind == "pairs":
        found = [(brightness(row[f"image_{side}"]), row[f"caption_{side}"]) for row in rows for side in range(2)]
        assert rows["attribute"][:] == ["Color and Appearance"] * 4 + ["Texts"] * 3
    else:
        found = [(brightness(row["image"]), row["caption"]) for row in rows]
    assert found == expected and skipped == 0
    if task.classes:
        assert [task.classes[label] for label in rows["label"]] == list(rows["caption"])
        assert set(task.templates) <= {"a photo of a {}.", "the {}."}
    if benchmark.kind == "linear_probe":
        assert len(task.load_train()[0]) == NUMBER


@pytest.mark.parametrize("name", [name for benchmark in BENCHMARKS.values() for name in benchmark.folders])
def test_other_names_of_its_folder(tmp_path, name):
    benchmark = next(benchmark for benchmark in BENCHMARKS.values() if name in benchmark.folders)
    make_copy(benchmark, benchmark.layouts[0], tmp_path / name)
    assert len(benchmark_task(benchmark, tmp_path).load()[0]) > 0


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    root = tmp_path_factory.mktemp("copies")
    make_all(BENCHMARKS.values(), root)
    return root


def test_all_are_measured_and_stand_beside_each_other(dense, copies, tmp_path):
    results = evaluate_model(dense, find_tasks(["clip_benchmark", *BENCHMARKS], copies), tmp_path)
    assert [result["task"] for result in results] == list(find_tasks(["clip_benchmark", *BENCHMARKS], copies))
    assert {result["task"] for result in results} == set(BENCHMARKS)
    of_task = {result["task"]: result for result in results}
    for name, result in of_task.items():
        assert set(result["primary"]) <= set(result["metrics"]), name
        assert set(BENCHMARKS[name].metrics) <= set(result["primary"])
        assert json.loads((tmp_path / f"{name}--dense.json").read_text()) == result
        assert result["data"]["split"] == BENCHMARKS[name].split
        assert str(copies) not in result["protocol"]  # a copy elsewhere is the same
    assert of_task["mmvp_vlm"]["primary"] == {"image": "image score"}
    assert {"image/Texts", "image/Color and Appearance"} <= set(of_task["mmvp_vlm"]["metrics"])
    kinetics = of_task["kinetics700"]["metrics"]
    assert kinetics["mean_of_top1_and_top5"] == (kinetics["accuracy"] + kinetics["accuracy_top5"]) / 2
    assert of_task["flickr30k_all"]["num_samples"] == NUMBER + 1 and of_task["docci"]["num_captions"] == 2 * NUMBER
    for group, titles in COLUMNS.items():
        assert set(titles) <= {title for name in GROUPS[group] for title in of_task[name]["primary"].values()}, group


def test_groups_are_those_of_the_papers():
    assert {group: set(names) for group, names in GROUPS.items() if group != "clip_benchmark"} == {
        group: set(names.split()) for group, names in TABLES.items()
    }
    assert all(len(names) == len(set(names)) for names in GROUPS.values())
    assert {BENCHMARKS[name].hub for name in GROUPS["clip_benchmark"]} == {f"clip-benchmark/{n}" for n in WEBDATASETS}
    assert set(BENCHMARKS) == {name for names in GROUPS.values() for name in names}


def test_command(dense, copies, tmp_path, capsys):
    """Spaces after commas, a group, and a benchmark that is in it."""
    command = ["--model", str(dense), "--data-root", str(copies), "--output-dir", str(tmp_path)]
    evaluate.main([*command, "--tasks", "clip_moe_table_2,", "urban1k,flickr30k_all"])
    assert capsys.readouterr().out.count("samples") == 3
    assert {file.name for file in tmp_path.glob("*.json")} == {
        f"{name}--dense.json" for name in ("mscoco_val2017", "flickr30k_all", "urban1k")
    }


@pytest.mark.parametrize("path", AT_THE_PAPERS_SIZE, ids=lambda path: path.stem)
def test_recipes_at_the_papers_size_end_with_their_benchmarks(path):
    """Tables of the paper that the recipe is named after, of its own model beside the one that it starts from."""
    paper, stages = re.match("clip_up|clip_moe|clip_fmoe|mode", path.stem)[0], load_recipe(path).stages
    measuring = [stage for stage in stages if isinstance(stage, MeasuringStage)]
    assert measuring and stages[-len(measuring) :] == measuring
    assert all(task.startswith(paper) and task in GROUPS for stage in measuring for task in stage.tasks)
    (evaluation,) = (stage for stage in measuring if isinstance(stage, EvaluateStage))
    assert evaluation.baseline and set(evaluation.models.values()) & {stage.name for stage in stages}


@pytest.mark.parametrize("path", AT_THE_PAPERS_SIZE, ids=lambda path: path.stem)
def test_another_size_is_compared_with_its_own_dense_model(path):
    """What a header gives to change the model that a recipe starts from changes the row of the baseline, too."""
    header = path.read_text().partition("\noutput_dir")[0].replace("\n#", " ")
    for model in re.findall(r"--(?:base|upcycled|defaults\.train)\.model (\S+/\S+)", header):
        (title,) = re.findall(rf"--evaluation\.models\.(\w+) {model}(?:\s|$)", header)
        stages = load_recipe(path, {f"evaluation.models.{title}": model}).stages
        (evaluation,) = (stage for stage in stages if isinstance(stage, EvaluateStage))
        assert evaluation.models[evaluation.baseline] == model


def test_the_table_of_benchmarks(capsys):
    """What `python -m evaluation.benchmarks` prints."""
    runpy.run_module("evaluation.benchmarks", run_name="__main__")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].replace("\\", "") for row in rows] == list(BENCHMARKS)
    (kinetics,) = (row for row in rows if row[0] == "kinetics700")
    assert kinetics[2] == "mean of top-1 and top-5" and "val/CLASS/NAME.jpg" in kinetics[5] and not kinetics[4]
