"""A model on its card: its lineage, its scores by its weights, and nothing of this machine."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from local_hub import contents
from markdown_it import MarkdownIt
from published_runs import (
    BASE,
    SCORE,
    card_of,
    change_model,
    change_recipe,
    change_record,
    change_stage,
    lineage_of,
    made,
    run,
    write_analysis,
    write_result,
)
from safetensors.torch import load_file
from tiny_clip import change_json
from transformers.pipelines import PIPELINE_REGISTRY

from clip_moe.conversion.commands import publish
from clip_moe.conversion.publishing.card import _presets, _stage_row
from clip_moe.conversion.publishing.lineage import DataOrigin, Lineage
from clip_moe.data import names
from clip_moe.data.symbols import KINDS
from clip_moe.data.worlds import world
from clip_moe.engine.files import read_json
from clip_moe.engine.provenance import ANSWER, Record
from clip_moe.engine.result_schema import results_mark
from modeling_clip_moe import CLIPMoEConfig
from modeling_clip_moe.configuration_moe_vie import MoEViEConfig
from modeling_clip_moe.families import family_of

made, run  # noqa: B018, fixtures


def test_scores_are_those_of_the_weights(run, capsys):
    write_result(run)
    write_result(run, name="symbols_pairs--alike.json", weights="0" * 64, source="elsewhere/sparse")
    write_result(run, name="symbols_pairs--old.json", weights=None)
    write_result(run, name="symbols_pairs--dense.json", weights="1" * 64, source=str(BASE))
    write_result(run, name="symbols_pairs--changed.json", changes={"routing": "paper"}, task="other")
    evaluation = run / "evaluation"
    (evaluation / "report.svg").write_text(f"<svg/>{results_mark([])}")  # of others
    assert lineage_of(run).pictures == {}
    (evaluation / "report.svg").write_text(f"<svg/>{results_mark(map(read_json, evaluation.glob('*--*.json')))}")
    (evaluation / "routing.png").write_bytes(b"of other experts")
    capsys.readouterr()
    lineage = lineage_of(run)
    assert list(lineage.results) == ["symbols_pairs--a.json"] and list(lineage.pictures) == ["report.svg"]
    warning = capsys.readouterr().err
    assert "3 results of sparse are left out, of other weights, code or configuration" in warning
    assert all(f"evaluation/symbols_pairs--{name}.json" in warning for name in ("alike", "old", "changed"))
    (evaluation / "report.svg").rename(run / "elsewhere.svg")
    (evaluation / "report.svg").symlink_to(run / "elsewhere.svg")
    assert lineage_of(run).pictures == {}  # a link may be anything
    capsys.readouterr()
    assert "Texts have at most 9 tokens" in card_of(lineage, longest_cut=9).text
    card = card_of(lineage)
    (score,) = card.data.eval_results
    assert score.metric_value == 100 * SCORE and "| group score | 75.0 | 72.5 to 77.4 | 1200" in card.text
    assert model_index_to_eval_results(card.data.to_dict()["model-index"]) == ("clip", [score])  # as the Hub reads it
    assert card.data.pipeline_tag in PIPELINE_REGISTRY.get_supported_tasks()
    change_json(run / "sparse" / "processor_config.json", image_mean=[5.0, 5.0, 5.0])  # also changes what is measured
    assert lineage_of(run).results == {}
    write_result(run)
    change_model(run)
    later = lineage_of(run)
    assert later.results == {} and later.pictures == {} and card_of(later).data.eval_results is None
    assert capsys.readouterr().err.count("4 results of sparse are left out") == 2
    # A stage that was changed is not told as it was made
    assert lineage.recipe is not None and list(lineage.stages)[-1] == "sparse"
    write_result(run)
    later = lineage_of(run)
    assert (later.recipe, later.stages, later.bases, later.unknown) == (None, {}, [], ["sparse"])
    assert len(later.results) == 1
    assert "sparse was changed after its stage finished" in capsys.readouterr().err


def test_of_two_measurements_the_later_one_counts(run):
    write_result(run, "later", metrics={"group": 0.5})
    write_result(run, "earlier")
    write_result(run, "other", protocol="all pairs", metrics={"group": 0.25})
    os.utime(run / "earlier" / "symbols_pairs--a.json", (0, 0))
    lineage = lineage_of(run)
    assert [result["metrics"]["group"] for result in lineage.results.values()] == [0.5, 0.25]
    assert list(lineage.results) == ["symbols_pairs--a.json", "other--symbols_pairs--a.json"]
    assert [score.metric_value for score in card_of(lineage).data.eval_results] == [50, 25]


def test_a_look_at_some_rows_is_no_score_of_the_task(run):
    """It is shown with its number where the whole task has no score."""
    look = {"title": "attribute pairs, first 8 rows", "data": {"max_rows": 8}, "num_samples": 8}
    write_result(run, "a_look", metrics={"group": 0.125}, protocol="at most the first 8 rows of 1,200 pairs", **look)
    (score,) = card_of(lineage_of(run)).data.eval_results
    assert (score.dataset_name, score.metric_value) == ("attribute pairs, first 8 rows", 12.5)
    write_result(run, "later", data={})
    write_result(run, "z_look", task="other", **look)
    lineage = lineage_of(run)
    assert [result["num_samples"] for result in lineage.results.values()] == [1200, 8]
    assert [score.metric_value for score in card_of(lineage).data.eval_results] == [75, 75]
    assert "first 8 rows of 1,200" not in card_of(lineage).text


def test_scores_by_other_code_of_ones_own_are_left_out(run, capsys):
    write_result(run, code={"my_clip": "0" * 64})
    assert lineage_of(run).results == {}
    assert "1 results of sparse are left out, of other weights, code or" in capsys.readouterr().err


def test_a_baseline_is_shown_beside_the_scores(run):
    write_result(run)
    dense_result = {"model": "dense, 30 wide", "weights": "1" * 64, "source": str(BASE), "metrics": {"group": 0.5}}
    write_result(run, name="symbols_pairs--dense.json", **dense_result)
    write_result(
        run, name="symbols_pairs--fewer.json", **dense_result | {"protocol": "12 pairs", "metrics": {"group": 0.1}}
    )
    assert "No baseline was measured beside it." in card_of(lineage_of(run)).text
    for baseline, cell in (("dense, 30 wide", " 50.0 (dense, 30 wide) |"), ("a", "")):  # "a" is the model itself
        Record(stage={"stage": "evaluate", "baseline": baseline}).write(run / "evaluation")
        assert f"| group score | 75.0 | 72.5 to 77.4 |{cell} 1200 (2 skipped) |" in card_of(lineage_of(run)).text


def test_what_is_no_score_is_refused(run):
    write_result(run, metrics={"group": "good"})
    with pytest.raises(ValueError, match="not an evaluation result: metrics.group .* .got 'good'"):
        lineage_of(run)


def answered(run, use, dense="dense"):
    """A report of the run that compared its model, `sparse`, with a dense one."""
    models = {"base": str(BASE), "dense": dense, "sparse": "sparse"}
    inputs = {dense: "0" * 64, "sparse": Record.read(run / "sparse").digest}
    (run / "report").mkdir(exist_ok=True)
    Record(stage={"stage": "answer", "models": models}, inputs=inputs).write(run / "report")
    verdict = {"verdict": "Experts did not help: -2.0 ± 1.0 points.", "use": use}
    (run / "report" / ANSWER).write_text(json.dumps(verdict))


def test_a_card_has_the_verdict_of_the_report(run):
    """Of the model as it was measured, beside which dense one, and which of them is recommended."""
    answered(run, "sparse")
    card = card_of(lineage_of(run)).text
    sentence = "A report compared it, as `sparse`, with the models of its run. Experts did not help: -2.0 ± 1.0 points."
    assert f"{sentence} The report recommends this model. The dense model beside it was the stage `dense`." in card
    for dense, twin in ((str(run / "dense"), "dense"), ("../other/dense", None)):
        answered(run, "sparse", dense)
        assert lineage_of(run).verdict.twin == twin
    answered(run, "base")
    assert f"The report recommends `{BASE.name}` instead." in card_of(lineage_of(run)).text
    change_record(run, pairs=3)  # made anew, in another way
    assert lineage_of(run).verdict is None and "A report compared it" not in card_of(lineage_of(run)).text


@pytest.mark.parametrize("use", ["dense", "base"])
def test_a_model_that_its_report_does_not_recommend_is_not_published_unasked(run, use, unverified):
    answered(run, use)
    name = {"base": BASE.name}.get(use, use)
    message = f"recommends {name}, not this model, sparse: nothing was published; --yes publishes it anyway"
    with pytest.raises(SystemExit, match=message):
        publish.main([str(run / "sparse"), "user/name"])
    publish.main([str(run / "sparse"), "user/name", "--yes", "--dry_run", str(run / "published")])
    assert f"The report recommends `{name}` instead." in (run / "published" / "README.md").read_text()


def test_lineage_goes_on_in_other_runs(run):
    lineage = lineage_of(run)
    assert list(lineage.stages) == ["first/mean", "sparse"]
    assert all(record.attempts for record in lineage.stages.values())
    assert "\nOn 1 x " in card_of(lineage).text
    assert (lineage.bases, lineage.unknown) == ([], ["symbol_clip"])
    card = card_of(lineage)
    assert card.data.base_model is None
    assert "From symbol_clip, a local folder of unknown lineage, by the stages of" in card.text
    assert "after those of another run: first:" in card.text and "| first/mean | average |" in card.text
    card = card_of(lineage, base_model="user/dense", license="mit")
    assert card.data.base_model == "user/dense" and "From user/dense, by the stages" in card.text


@pytest.mark.parametrize("reference", ["runs/gone", None])
def test_a_folder_that_is_gone_or_was_made_anew_is_no_base_model(run, reference):
    ((before, recorded),) = Record.read(run / "sparse").inputs.items()
    model = reference or before
    change_record(run, models=[model], inputs={model: recorded if reference else "0" * 64})
    lineage = lineage_of(run)
    card, name = card_of(lineage), Path(model).name
    assert list(lineage.stages) == ["sparse"] and lineage.bases == []
    assert card.data.base_model is None and f"From {name}, a local folder of unknown" in card.text
    assert "runs/gone" not in str(card)


# What stands in a recipe, what the manifest and the run's environment record of it -> datasets of the card, its text
SOURCES = {
    "user/pairs": (None, [], ["user/pairs"], "user/pairs (columns image and caption)"),
    "user/local": (None, [], None, "local (local, columns image and caption)"),  # which is a folder here
    "symbols": (None, [], None, "symbols (web captions)"),
    "hf://datasets/user/name/*.parquet": (None, [], None, "hf://datasets/user/name/\\*.parquet (columns image and"),
    "private/photos": (None, ["private/photos"], None, "photos (local, columns image and caption)"),  # moved away
    "clinic/patients": ({"files": 2, "sha256": "a" * 64}, [], None, "patients (local, columns image and caption)"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_names_on_the_hub_are_bases_and_data(run, tmp_path, monkeypatch, name):
    """A path that existed here when the run began stays a path in all published files, wherever it is published."""
    record, local, datasets, text = SOURCES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "local").mkdir(parents=True)
    data = {"source": name.strip(), "image_root": "private/images"}
    # The encoder of captions is no base: its weights are in no model
    change_stage(run, clusters="user/encoder", data=data)
    inputs = {"openai/clip": "openai/clip@" + "a" * 40, "user/encoder": "user/encoder@None"}
    local_names = [*local, *["private/images", "private/test"] * bool(local)]
    change_record(run, models=["openai/clip"], inputs=inputs, data=record, local=local_names)
    tasks = [{"task": "retrieval", "dataset": "private/test"}]
    change_recipe(run, lambda stages: (stages[0].update(data=data), stages.append({"name": "scores", "tasks": tasks})))
    lineage = lineage_of(run)
    card = card_of(lineage)
    assert (card.data.base_model, card.data.datasets) == ("openai/clip", datasets)
    assert f"Data: {text}" in card.text and "From openai/clip, by the stages" in card.text
    published = lineage.recipe["stages"][0]["data"], lineage.stages["sparse"].stage["data"]
    for settings in published:
        assert settings["source"] == ("local" if "local" in name else text.split(" (")[0].replace("\\", ""))
        assert settings["image_root"] == ("images" if local else "private/images")
    assert lineage.recipe["stages"][1]["tasks"][0]["dataset"] == ("test" if local else "private/test")


@pytest.mark.parametrize(
    ("experts", "told"),
    [  # the pairs of a cluster are not those of the data, and two folders of one name are two data
        ([("user/pairs", 0), ("user/pairs", 1)], ["user/pairs ("]),
        ([("/one/pairs", None), ("/two/pairs", None)], [f"{n},000 pairs of pairs (local, " for n in (1, 2)]),
    ],
)
def test_pairs_of_data(run, experts, told):
    inputs = {}
    for number, (source, cluster) in enumerate(experts, 1):
        folder = run / f"expert_{number}"
        folder.mkdir()
        stage = {"stage": "train_data_expert", "name": folder.name, "data": {"source": source}, "cluster": cluster}
        record = Record(stage=stage, pairs=1000 * number)
        record.write(folder)
        inputs[folder.name] = record.digest
    change_record(run, inputs=inputs)
    assert [str(data) for data in lineage_of(run).data] == [f"{start}columns image and caption)" for start in told]


def test_nothing_of_this_machine_is_published(run, tmp_path, unverified):
    data = tmp_path / "private place" / "cats, dogs"
    data.mkdir()
    change_stage(run, data={"source": str(data), "image_root": str(data)})
    change_record(run, weights=None)  # so that the settings below may be changed
    encoder = {"name": "other", "stage": "embed", "what": "captions", "model": "~/private/encoder"}
    change_recipe(run, lambda stages: stages.append(encoder))
    here = {"_name_or_path": str(run), "name_or_path": str(run), "tokenizer_file": str(run / "tokenizer.json")}
    for name in ("config.json", "tokenizer_config.json"):
        change_json(run / "sparse" / name, vision_config={"_name_or_path": str(run)}, **here)
    protocol = f"100 rows of {data}, split test"
    write_result(run, title=f"retrieval, {data}", protocol=protocol, data={"source": str(data)})
    publish.main([str(run / "sparse"), "user/clip", "--dry_run", str(tmp_path / "out")])
    texts = contents(tmp_path / "out")
    assert [name for name, text in texts.items() if b"private" in text or str(tmp_path).encode() in text] == []
    card = ModelCard.load(tmp_path / "out" / "README.md").text
    assert "| retrieval, cats, dogs | group score | 75.0 |" in card and "100 rows of cats, dogs, split" in card
    (result,) = (json.loads(file.read_text()) for file in (tmp_path / "out" / "results").iterdir())
    assert (result["source"], result["data"]) == ("sparse", {"source": "cats, dogs"})
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert recipe["output_dir"] == "second" and recipe["stages"][0]["model"] == "mean"
    torch.testing.assert_close(*(load_file(f / "model.safetensors") for f in (tmp_path / "out", run / "sparse")))


NASTY = [
    "a|b",
    "two\nlines",
    "`code`",
    "$x$ and $y$",
    "<script>alert(1)</script>",
    "*b* _i_ &amp; [l](http://x)",
    "![x](y.jpg)",
]


@pytest.mark.parametrize("text", [" ".join(NASTY), "\"q\" 'q': #c\n---\n- x", "{{ 1 }} {% raw %}", "\\|"])
def test_any_text_is_shown_as_it_is(run, text):
    fields = dict.fromkeys(("title", "protocol", "task", "commit", "dtype"), text)
    write_result(run, **fields, primary={"group": text}, versions={"torch": text})
    change_stage(run, preset=text, stage=text, data={"source": text})
    card = card_of(lineage_of(run), license=f"other:{text}")
    shown = " ".join(text.split())
    (score,) = card.data.eval_results
    assert (score.dataset_name, score.metric_name, card.data.license_name) == (shown, shown, shown)
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(card.text)
    cells = ["".join(part.content for part in token.children) for token in tokens if token.type == "inline"]
    assert cells.count(shown) == 4  # a stage, and a row of scores
    assert any(cell.startswith(f"Measured by commit {shown}, {shown}, torch {shown}. ") for cell in cells)
    assert any(f"The weights: {shown}; they come from" in cell for cell in cells)
    assert sum(token.type == "table_open" for token in tokens) == 3
    parts = [part for token in tokens for part in token.children or ()]
    assert not any(
        part.type == "html_inline" or part.attrs.get("src") == "y.jpg" or part.attrs.get("href") == "http://x"
        for part in parts
    )
    assert card.text.count("$") == card.text.count("\\$")  # between two others would be mathematics


# --- the origin of a model on its card, and the examples that it shows


@pytest.mark.slow
def test_a_card_tells_whether_the_experts_do_anything(run):
    write_analysis(run)
    text = card_of(lineage_of(run)).text
    assert re.findall("^##+ (.+)$", text, re.MULTILINE)[2:4] == ["Do the experts do anything?", "How it was made"]
    page = MarkdownIt().enable("table").render(text)
    collapse = "75.0% routed, 50.0% with the mean of the experts: -25.0 ± 6.2 points"
    for measured, found in (
        ("collapse test, retrieval, my_*photos*: R@1 image→text", collapse),
        ("entropy of the routers", "1.50 of at most 2.00 bits (layers: 1.25 to 1.75)"),
        ("how alike the experts are", "CKA 0.500 (pairs: 0.250 to 0.875)"),
    ):
        assert f"<td>{measured}</td>\n<td>{found}</td>" in page
    write_analysis(run, summary={"collapse": []})
    with pytest.raises(ValueError, match="experts.json has no valid summary of experts: .*; most_"):
        lineage_of(run)
    change_model(run)
    assert "Do the experts" not in card_of(lineage_of(run)).text


@pytest.mark.slow
def test_a_card_names_the_method():
    sigmoid = {"stage": "upcycle", "preset": "clip_up", "changes": {}, "text_config": {"scoring_func": "sigmoid"}}
    adapted = {"stage": "train", "max_steps": 9, "lora": {"r": 2}}
    averaged = {"stage": "average", "models": ["base", "tuned"], "weights": [0.5, 0.5]}
    records = [Record(stage=stage) for stage in (sigmoid, adapted, averaged)]
    records.append(Record(stage={"stage": "my.module:Stage", "bias": -10}, own_settings=["bias"]))
    assert [_stage_row(record)[1] for record in records] == [
        "preset clip_up, text_config {'scoring_func': 'sigmoid'}",
        "max_steps 9, lora {'r': 2}",
        "models ['base', 'tuned'], weights [0.5, 0.5]",
        "bias -10",
    ]
    released, vie = Lineage(stages={"vie": Record(stage={"stage": "released_moe_vie"})}), family_of(MoEViEConfig())
    assert (_presets(released, vie), _presets(Lineage(), vie)) == (["moe_vie"], [])
    assert _presets(Lineage(), family_of(CLIPMoEConfig())) == ["clip_up", "clip_moe", "clip_fmoe"]


def told(**lineage):
    return " ".join(card_of(Lineage(**lineage)).text.split())


OWN = DataOrigin("clip_arts", "local", "columns image and caption", 5612)
SYMBOLS = DataOrigin("symbols", "world", "web captions of half 1", 16000)
SCRATCH = {"scratch": Record(stage={"stage": "initialize"})}


@pytest.mark.slow
def test_limits_by_origin():
    text = told(stages=SCRATCH, data=[OWN])
    pairs = "5,612 pairs of clip_arts (local, columns image and caption)"
    assert f"It was trained from nothing on {pairs}. Of other kinds of images" in text and "inherits" not in text
    assert "From random weights, by" in text and "The license of the weights was not given here." in text
    text = told(stages=SCRATCH, data=[SYMBOLS], unknown=["symbol_clip"])
    assert "It inherits the limits of symbol_clip, a local folder of unknown lineage. Since then it has been" in text
    assert "trained on 16,000 pairs of symbols (web captions of half 1)" in text
    text = told(bases=["openai/clip-vit-base-patch32"])
    assert "It inherits the limits of OpenAI's CLIP: biases of captions from the web" in text
    text = told(stages={"mine": Record(stage={"stage": "my.module:Stage"})})
    assert "From weights of unknown origin, by" in text and "from nothing" not in text


@pytest.mark.slow
def test_examples_are_of_the_models_own_data():
    assert told(data=[SYMBOLS]).count('["a picture of a snowman", "a picture of a cloud"]') == 4
    text = told(stages=SCRATCH, data=[OWN])
    assert text.count('["one text about the image", "another text"]') == 4 and "a cat" not in text
    assert '"a photo of a cat"' in told(bases=["openai/clip-vit-large-patch14"])
    assert set(world("names").examples) <= {names.name_of(town) for town in range(4096)}
    assert set(world("symbols").examples) <= {
        f"a picture of {article} {kind}" for kind in KINDS for article in ("a", "an")
    }
