"""What a card says of a model: its lineage, its scores by its weights, and nothing of this machine."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file

from conversion import publish
from conversion.publishing.card import render
from conversion.publishing.lineage import Lineage
from modeling_clip_moe import CLIPMoEConfig
from records.provenance import Record, weights_fingerprint
from training.recipe import load_recipe
from training.runner import run_recipe

BASE = Path(__file__).parents[1] / "training" / "symbol_clip"
SCORE = 0.75


def write_recipe(folder, stages):
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({"output_dir": str(folder), "stages": stages}))
    return load_recipe(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run on this machine, in a folder that nobody else has to know, which goes on with a model of another one."""
    private = tmp_path_factory.mktemp("made") / "private place"
    private.mkdir()
    first = run_recipe(write_recipe(private / "first", [{"name": "mean", "stage": "average", "models": [str(BASE)]}]))
    upcycled = {"name": "sparse", "stage": "upcycle", "model": str(first / "mean"), "preset": "clip_moe"}
    return run_recipe(write_recipe(private / "second", [upcycled]))


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A copy of it, for changes."""
    return Path(shutil.copytree(made, tmp_path / "private place" / "second"))


def write_result(run, weights, stage="evaluation", name="symbols_pairs--a.json", **changes):
    result = {
        "model": "a",
        "task": "symbols_pairs",
        "title": "attribute pairs",
        "protocol": "1,200 pairs",
        "metrics": {"group": SCORE, "text": 0.8},
        "num_samples": 1200,
        "num_skipped": 0,
        "primary": {"group": "group score"},
        "source": str(run / "sparse"),
        "weights": weights,
        "dtype": "float32",
        "commit": "abc",
        "versions": {"torch": "2"},
    } | changes
    result = {key: value for key, value in result.items() if value is not None}
    (run / stage).mkdir(exist_ok=True)
    (run / stage / name).write_text(json.dumps(result))
    return result


def card_of(lineage, **options):
    options = {"license": None, "base_model": None} | options
    card = render(CLIPMoEConfig(), lineage, "user/clip", **options)
    return ModelCard(str(card))  # as it is read


def change_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["visual_projection.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_scores_are_those_of_the_weights(run, capsys):
    sparse = weights_fingerprint(str(run / "sparse"))
    write_result(run, sparse)
    (run / "evaluation" / "report.png").write_bytes(b"picture")
    write_result(run, "0" * 64, name="symbols_pairs--alike.json", source="elsewhere/sparse")
    write_result(run, None, name="symbols_pairs--old.json")
    write_result(run, "1" * 64, name="symbols_pairs--dense.json", source=str(BASE))
    lineage = Lineage.of(run / "sparse")
    assert list(lineage.results) == ["symbols_pairs--a.json"] and list(lineage.pictures) == ["report.png"]
    warning = capsys.readouterr().err
    (run / "evaluation" / "routing.png").symlink_to(run / "recipe.yaml")
    assert list(Lineage.of(run / "sparse").pictures) == ["report.png"]
    assert "2 results of sparse are left out: they are of other weights" in warning and "measure again" in warning
    assert "evaluation/symbols_pairs--alike.json, evaluation/symbols_pairs--old.json" in warning
    (score,) = card_of(lineage).data.eval_results
    assert score.metric_value == 100 * SCORE
    change_weights(run / "sparse")
    later = Lineage.of(run / "sparse")
    assert later.results == {} and later.pictures == {} and card_of(later).data.eval_results is None
    assert "3 results of sparse are left out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["processor_config.json", "tokenizer_config.json"])
def test_scores_are_those_of_the_processor(run, capsys, name):
    write_result(run, weights_fingerprint(str(run / "sparse")))
    assert len(Lineage.of(run / "sparse").results) == 1
    path = run / "sparse" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [5.0, 5.0, 5.0]}))
    assert Lineage.of(run / "sparse").results == {}
    assert "1 results of sparse are left out: they are of other weights" in capsys.readouterr().err


def test_a_stage_that_was_changed_is_not_told_as_it_was_made(run, capsys):
    before = Lineage.of(run / "sparse")
    assert before.recipe is not None and list(before.stages)[-1] == "sparse"
    change_weights(run / "sparse")
    write_result(run, weights_fingerprint(str(run / "sparse")))
    later = Lineage.of(run / "sparse")
    assert (later.recipe, later.stages, later.bases, later.unknown) == (None, {}, [], ["sparse"])
    assert len(later.results) == 1
    assert "sparse was changed after its stage had finished" in capsys.readouterr().err


def test_a_result_counts_whatever_it_is_called(run):
    sparse = weights_fingerprint(str(run / "sparse"))
    write_result(run, sparse, source="moved/another", model="another")
    assert len(Lineage.of(run / "sparse").results) == 1


def test_of_two_measurements_the_later_one_counts(run):
    sparse = weights_fingerprint(str(run / "sparse"))
    write_result(run, sparse, "later", metrics={"group": 0.5})
    write_result(run, sparse, "earlier")
    write_result(run, sparse, "other", protocol="all pairs", metrics={"group": 0.25})
    os.utime(run / "earlier" / "symbols_pairs--a.json", (0, 0))
    lineage = Lineage.of(run / "sparse")
    assert [result["metrics"]["group"] for result in lineage.results.values()] == [0.5, 0.25]
    assert list(lineage.results) == ["symbols_pairs--a.json", "other--symbols_pairs--a.json"]
    assert [score.metric_value for score in card_of(lineage).data.eval_results] == [50, 25]


# What an analysis says of experts
SUMMARY = {
    "collapse": [{"title": "retrieval, my_*photos*: R@1 image→text", "routed": 0.75, "mean": 0.5, "error": 0.0625}],
    "entropy": {"mean": 1.5, "lowest": 1.25, "highest": 1.75},
    "most_entropy": 2.0,
    "agreement": {"mean": 0.5, "lowest": 0.25, "highest": 0.875},
}


def test_pictures_of_experts_are_those_of_the_weights(run, capsys):
    (run / "experts").mkdir()
    (run / "experts" / "routing.png").write_bytes(b"picture")
    for weights, expected in ((weights_fingerprint(str(run / "sparse")), ["routing.png"]), ("0" * 64, [])):
        analysis = {"source": str(run / "sparse"), "weights": weights, "summary": SUMMARY}
        (run / "experts" / "experts.json").write_text(json.dumps(analysis))
        assert list(Lineage.of(run / "sparse").pictures) == expected
    assert "the analysis experts is left out: it is of other weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metrics": {"group": math.nan}},
            "symbols_pairs--a.json: the score group is nan, which is no share from 0 to 1",
        ),
        ({"metrics": {"group": SCORE, "text": math.inf}}, "the score text is inf"),
        ({"metrics": {"group": "good"}}, "no result of an evaluation: metrics.group is 'good'"),
        ({"metrics": {"group": True}}, "metrics.group is True"),
        ({"metrics": {}}, "symbols_pairs--a.json is of a task that cards do not know: its score is group"),
        ({"metrics": {"fid": 1}, "primary": {"fid": "FID"}}, "a.json is of a task that cards do not know: .*fid"),
        ({"versions": None, "title": 3}, "a.json is no result of an evaluation: it lacks versions"),
    ],
)
def test_what_is_no_score_is_refused(run, changes, message):
    write_result(run, weights_fingerprint(str(run / "sparse")), **changes)
    with pytest.raises(ValueError, match=message):
        Lineage.of(run / "sparse")


DEEP = "[" * 900 + "]" * 900
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(12))


def attempt(**changes):
    one = {"device": "cpu", "num_processes": 1, "commit": None, "seconds": 1.0} | changes
    return json.dumps({"stage": {}, "attempts": [one]})


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("evaluation/a--b.json", "{", "a--b.json is damaged .is no JSON"),
        ("evaluation/a--b.json", "[1]", "a--b.json is damaged .it holds no dict"),
        ("experts/experts.json", "null", "experts.json is damaged"),
        ("sparse/manifest.json", "", "manifest.json is damaged .is no JSON"),
        ("sparse/manifest.json", '{"inputs": 3}', "manifest.json is damaged .stage: Field required"),
        ("sparse/manifest.json", "[1]", "manifest.json is damaged .it holds no dict"),
        ("recipe.yaml", "a: [", "recipe.yaml is not valid YAML"),
        ("sparse/manifest.json", DEEP, "manifest.json is damaged .is no JSON that can be read: it is nested"),
        ("sparse/manifest.json", attempt(commit=["a"]), "manifest.json is damaged .attempts.0.commit"),
        ("sparse/manifest.json", attempt(seconds=math.nan), "manifest.json is damaged .attempts.0.seconds"),
        ("evaluation/a--b.json", DEEP, "a--b.json is damaged .is no JSON that can be read: it is nested"),
        ("recipe.yaml", "a: " + DEEP, "recipe.yaml is nested"),
        ("recipe.yaml", ALIASES, "recipe.yaml: .* more than 100000 values"),
        ("recipe.yaml", "a: &a [*a]", "an alias stands for a value that holds it"),
        ("recipe.yaml", "- 1", "recipe.yaml is damaged"),
    ],
)
def test_damaged_files_of_a_run_are_named(run, file, content, message):
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        Lineage.of(run / "sparse")


def test_lineage_goes_on_in_other_runs(run):
    lineage = Lineage.of(run / "sparse")
    assert list(lineage.stages) == ["first/mean", "sparse"] and all(
        record.attempts for record in lineage.stages.values()
    )
    assert (lineage.bases, lineage.unknown) == ([], ["symbol_clip"])
    card = card_of(lineage)
    assert card.data.base_model is None
    assert "From symbol_clip, a local folder of unknown lineage, by the stages of" in card.text
    assert "after those of another run: first:" in card.text and "| first/mean | average |" in card.text
    card = card_of(lineage, base_model="user/dense", license="mit")
    assert card.data.base_model == "user/dense" and "From user/dense, by the stages" in card.text


def test_lineage_ends_where_a_stage_was_made_anew(run):
    path = run / "sparse" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["inputs"] = dict.fromkeys(manifest["inputs"], "0" * 64)
    path.write_text(json.dumps(manifest))
    lineage = Lineage.of(run / "sparse")
    assert list(lineage.stages) == ["sparse"] and (lineage.bases, lineage.unknown) == ([], ["mean"])


@pytest.mark.parametrize("reference", ["runs/gone", "mean"])
def test_a_folder_that_is_gone_is_no_base_model(run, reference):
    manifest = json.loads((run / "sparse" / "manifest.json").read_text())
    (recorded,) = manifest["inputs"].values()
    manifest["stage"]["model"], manifest["inputs"] = reference, {reference: recorded}
    (run / "sparse" / "manifest.json").write_text(json.dumps(manifest))
    lineage = Lineage.of(run / "sparse")
    card = card_of(lineage)
    assert card.data.base_model is None and f"From {Path(reference).name}, a local folder of unknown" in card.text
    assert "runs/gone" not in str(card)


def test_names_on_the_hub_are_bases_and_data(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "local").mkdir(parents=True)
    path = run / "sparse" / "manifest.json"
    manifest = json.loads(path.read_text())
    # The encoder of captions is no base: its weights are in no model
    manifest["stage"] |= {"model": "openai/clip", "clusters": "user/encoder"}
    manifest["inputs"] = {"openai/clip": "openai/clip@" + "a" * 40, "user/encoder": "user/encoder@None"}
    sources = {
        "user/pairs": (["user/pairs"], "user/pairs (columns image and caption)"),
        "user/local": (None, "local (local, columns image and caption)"),
        "user/no/name": (None, "name (local, columns image and caption)"),
        "symbols": (None, "symbols (web captions)"),
        "hf://datasets/user/name/*.parquet": (
            None,
            "hf://datasets/user/name/\\*.parquet (columns image and caption)",
        ),
    }
    for source, (datasets, text) in sources.items():
        manifest["stage"]["data"] = {"source": source}
        path.write_text(json.dumps(manifest))
        card = card_of(Lineage.of(run / "sparse"))
        assert (card.data.base_model, card.data.datasets) == ("openai/clip", datasets)
        assert f"Data: {text}." in card.text and "From openai/clip, by the stages" in card.text


@pytest.mark.parametrize(
    ("local", "datasets", "published"),
    [
        (["private/photos", "private/images", "private/test"], None, "photos"),
        ([], ["private/photos"], "private/photos"),
    ],
)
def test_data_that_were_moved_away_are_no_dataset_on_the_hub(run, local, datasets, published):
    """What was a path here when the run began is one, in all that is published."""
    path = run / "sparse" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stage"]["data"] = {"source": "private/photos", "image_root": "private/images"}
    path.write_text(json.dumps(manifest | {"local": local}))
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["stages"][0]["data"] = manifest["stage"]["data"]
    recipe["stages"].append({"name": "scores", "tasks": [{"task": "retrieval", "dataset": "private/test"}]})
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lineage = Lineage.of(run / "sparse")
    card = card_of(lineage)
    assert card.data.datasets == datasets
    assert f"Data: {published} ({'' if datasets else 'local, '}columns image and caption)." in card.text
    published_root, published_test = ("private/images", "private/test") if datasets else ("images", "test")
    assert lineage.recipe["stages"][0]["data"] == {"source": published, "image_root": published_root}
    assert lineage.recipe["stages"][1]["tasks"][0]["dataset"] == published_test
    assert lineage.stages["sparse"].stage["data"]["source"] == published


def test_a_dataset_of_the_hub_stays_one_beside_a_folder_of_its_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "pairs").mkdir(parents=True)
    path = run / "sparse" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stage"]["data"] = {"source": "user/pairs"}
    path.write_text(json.dumps(manifest | {"data": {"commit": "a" * 40}}))
    assert card_of(Lineage.of(run / "sparse")).data.datasets == ["user/pairs"]


@pytest.mark.parametrize("source", ["patients", "clinic/patients"])
def test_data_that_were_files_are_no_dataset_on_the_hub(run, source):
    """As the manifest of the stage tells, wherever the command is run that publishes."""
    path = run / "sparse" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stage"]["data"] = {"source": source}
    path.write_text(json.dumps(manifest | {"data": {"files": 2, "sha256": "a" * 64}}))
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["stages"][0]["data"] = {"source": source}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lineage = Lineage.of(run / "sparse")
    card = card_of(lineage)
    assert card.data.datasets is None and "Data: patients (local, columns image and caption)." in card.text
    for settings in (lineage.recipe["stages"][0], lineage.stages["sparse"].stage):
        assert settings["data"]["source"] == "patients"


def make_experts(run, experts):
    """Turns the model of a run into one that earlier stages make.

    Args:
        experts: the settings and the number of pairs of each of these.
    """
    path = run / "sparse" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["inputs"] = {}
    for number, (settings, pairs) in enumerate(experts):
        folder = run / f"expert_{number}"
        folder.mkdir()
        stage = {"stage": "train_data_expert", "name": folder.name} | settings
        record = Record(stage=stage, pairs=pairs)
        record.write(folder)
        manifest["inputs"][folder.name] = record.digest
    path.write_text(json.dumps(manifest))


def test_pairs_of_a_cluster_are_not_told_as_those_of_the_data(run):
    data = {"source": "user/pairs"}
    make_experts(run, [({"data": data, "cluster": 0}, 1000), ({"data": data, "cluster": 1}, 3000)])
    assert "Data: user/pairs (columns image and caption)." in card_of(Lineage.of(run / "sparse")).text
    shutil.rmtree(run / "expert_0")
    shutil.rmtree(run / "expert_1")
    make_experts(run, [({"data": data, "cluster": 0}, 1000), ({"data": data}, 4000)])
    assert "Data: 4,000 pairs of user/pairs (columns" in card_of(Lineage.of(run / "sparse")).text


def test_two_folders_of_one_name_are_two_data(run):
    make_experts(run, [({"data": {"source": "/one/pairs"}}, 1000), ({"data": {"source": "/two/pairs"}}, 3000)])
    assert list(map(str, Lineage.of(run / "sparse").data)) == [
        "1,000 pairs of pairs (local, columns image and caption)",
        "3,000 pairs of pairs (local, columns image and caption)",
    ]


@pytest.mark.parametrize("name", ["runs/clip_moe_demo/clip_moe", "no name", "training"])
def test_a_base_model_is_a_name_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training").mkdir()
    arguments = [str(BASE), "user/x", "--dry-run", str(tmp_path / "out"), "--base-model", name]
    with pytest.raises(SystemExit, match=f"error: --base-model {name} is no name on the Hub"):
        publish.main(arguments)
    assert not (tmp_path / "out").exists()


def test_nothing_of_this_machine_is_published(run, tmp_path):
    data = tmp_path / "private place" / "cats, dogs"
    data.mkdir()
    path = run / "sparse" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stage"]["data"] = {"source": str(data), "image_root": str(data)}
    del manifest["weights"]  # so that the settings below may be changed
    path.write_text(json.dumps(manifest))
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["stages"] += [{"name": "other", "stage": "embed_captions", "encoder": "~/private/encoder"}]
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((run / "sparse" / name).read_text())
        settings["vision_config"] = settings.get("vision_config", {}) | {"_name_or_path": str(run)}
        settings |= {"_name_or_path": str(run), "name_or_path": str(run), "tokenizer_file": str(run / "tokenizer.json")}
        (run / "sparse" / name).write_text(json.dumps(settings))
    write_result(
        run,
        weights_fingerprint(str(run / "sparse")),
        title=f"retrieval, {data}",
        protocol=f"100 rows of {data}, split test",
        data={"source": str(data)},
    )
    publish.main([str(run / "sparse"), "user/clip", "--dry-run", str(tmp_path / "out")])
    texts = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert [file.name for file, text in texts.items() if b"private" in text or str(tmp_path).encode() in text] == []
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (
        "| retrieval, cats, dogs | group score | 75.0 |" in card.text and "100 rows of cats, dogs, split" in card.text
    )
    (result,) = (json.loads(file.read_text()) for file in (tmp_path / "out" / "results").iterdir())
    assert (result["source"], result["data"]) == ("sparse", {"source": "cats, dogs"})
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert recipe["output_dir"] == "second" and recipe["stages"][0]["model"] == "mean"
    torch.testing.assert_close(
        load_file(tmp_path / "out" / "model.safetensors"), load_file(run / "sparse" / "model.safetensors")
    )


NASTY = ["a|b", "two\nlines", "`code`", "$x$ and $y$", "<script>alert(1)</script>", "*b* _i_ &amp; [l](http://x)"]


@pytest.mark.parametrize("text", [*NASTY, "\"q\" 'q': #c\n---\n- x", "{{ 1 }} {% raw %}", "\\|"])
def test_any_text_is_shown_as_it_is(run, text):
    write_result(
        run,
        weights_fingerprint(str(run / "sparse")),
        title=text,
        protocol=text,
        primary={"group": text},
        task=text,
        versions={"torch": text},
        commit=text,
        dtype=text,
    )
    manifest = run / "sparse" / "manifest.json"
    settings = json.loads(manifest.read_text())
    settings["stage"] |= {"preset": text, "stage": text, "data": {"source": text}}
    manifest.write_text(json.dumps(settings))
    lineage = Lineage.of(run / "sparse")
    card = card_of(lineage, license=text)
    shown = " ".join(text.split())
    (score,) = card.data.eval_results
    assert (score.dataset_name, score.metric_name, card.data.license) == (shown, shown, shown)
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(card.text)
    cells = ["".join(part.content for part in token.children) for token in tokens if token.type == "inline"]
    assert cells.count(shown) == 4  # a stage, and a row of scores
    assert any(cell.startswith(f"Measured by commit {shown}, {shown}, torch {shown}. ") for cell in cells)
    assert any(f"The weights: {shown}; they come from" in cell for cell in cells)
    assert sum(token.type == "table_open" for token in tokens) == 3
    parts = [part for token in tokens for part in token.children or ()]
    assert not any(part.type == "html_inline" or part.attrs.get("href") == "http://x" for part in parts)
    assert card.text.count("$") == card.text.count("\\$")  # between two others would be mathematics


def test_a_preset_and_an_output_folder_that_are_lists(run):
    (run / "recipe.yaml").write_text("output_dir: [1]\n")
    manifest = json.loads((run / "sparse" / "manifest.json").read_text())
    manifest["stage"]["preset"] = ["clip_moe"]
    (run / "sparse" / "manifest.json").write_text(json.dumps(manifest))
    assert "tran2026clipfmoe" in str(card_of(Lineage.of(run / "sparse")))  # no system is known: all are cited
