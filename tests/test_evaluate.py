"""The evaluation command on tiny models and symbols: what it writes and what it refuses."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import small_evaluation
import torch
from small_evaluation import damage, evaluated
from transformers import AutoModel, AutoProcessor, BertConfig, BertModel

from conversion import assemble
from data import symbols
from evaluation import evaluate
from evaluation.commands import evaluate as evaluate_command
from evaluation.commands import report
from evaluation.evaluate import evaluate_model
from evaluation.report import write_report
from evaluation.tasks import TASKS, find_tasks
from model_cards import seeds

dense, sparse, small_tasks = small_evaluation.dense, small_evaluation.sparse, small_evaluation.small_tasks


def test_every_built_in_task(sparse, tmp_path):
    results = evaluate_model(sparse, TASKS, tmp_path, name="a model/x")
    for result in results:
        (file,) = tmp_path.glob(f"{result['task']}--a_model_x-*.json")
        stored = json.loads(file.read_text())
        assert stored == result
        assert set(result["primary"]) <= set(result["metrics"])
        assert all(0 <= value <= 1 for value in result["metrics"].values())
        assert result["num_samples"] in (8, 12, 14, 16, 40) and result["num_skipped"] == 0
        assert result["protocol"] and result["versions"]["torch"] == torch.__version__


def test_scores_are_those_of_the_model(dense, tmp_path):
    """Against the obvious way, an image at a time."""
    (result,) = evaluate_model(dense, find_tasks(["symbols_zero_shot"]), tmp_path, batch_size=7)
    model, processor = AutoModel.from_pretrained(dense).eval(), AutoProcessor.from_pretrained(dense)
    rows = symbols.load("test", "detailed", 40)
    classes = []
    for kind in symbols.KINDS:
        prompts = [template.format(kind) for template in symbols.TEMPLATES]
        embeds = [model.get_text_features(**processor.tokenizer(p, return_tensors="pt")).pooler_output for p in prompts]
        mean = torch.stack([e / e.norm() for e in embeds]).mean(0)
        classes.append(mean / mean.norm())
    right = 0
    for row in rows:
        pixel_values = processor.image_processor(row["image"], return_tensors="pt")["pixel_values"]
        image = model.get_image_features(pixel_values).pooler_output
        similarity = torch.stack([(image * c).sum() for c in classes])
        right += symbols.KINDS[similarity.argmax()] == row["kind"]
    assert result["metrics"]["accuracy"] == right / 40


def test_an_evaluation_that_fails_leaves_no_empty_folder(dense, tmp_path):
    evaluated(dense, tmp_path, tasks="retrieval")
    with pytest.raises(SystemExit, match="error: .* has no column 'nope'"):
        evaluated(dense, tmp_path, "--caption-column", "nope", "--output-dir", str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_the_current_folder_has_a_name(dense, tmp_path, monkeypatch):
    monkeypatch.chdir(dense)
    (result,) = evaluate_model(".", find_tasks(["symbols_pairs"]), tmp_path)
    assert result["model"] == "dense" and (tmp_path / "symbols_pairs--dense.json").is_file()


def remove_tokenizer(folder):
    for file in folder.glob("*token*"):
        file.unlink()


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def add_token(tokenizer):
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 1313, "content": "seven", "special": False})


def enlarge(processor):
    size = {"height": 64, "width": 64}
    processor["image_processor"] |= {"size": size, "crop_size": size}


def uncut(tokenizer):
    del tokenizer["model_max_length"]


def replace_by_bert(folder):
    BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(folder)


def cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: damage(folder, lambda w: w.pop("visual_projection.weight")), "missing: visual_projection"),
        (lambda folder: damage(folder, lambda w: w["visual_projection.weight"].fill_(torch.nan)), "not finite"),
        (lambda folder: damage(folder, lambda w: w["visual_projection.weight"].fill_(0)), "is zero or not finite"),
        (cut_weights, "cannot load"),
        (remove_tokenizer, "has no tokenizer"),
        (lambda folder: edit(folder / "tokenizer.json", add_token), "model has 1314 tokens, but vocab_size is 1313"),
        (lambda folder: edit(folder / "processor_config.json", enlarge), "/model makes images of 3 x 64 x 64, but by"),
        (lambda folder: edit(folder / "tokenizer_config.json", uncut), "/model cuts texts at its model_max_length"),
        (lambda folder: (folder / "processor_config.json").unlink(), "has no image processor"),
        (replace_by_bert, "not 'bert'"),
    ],
    ids=[
        "missing weight",
        "nan",
        "zeros",
        "truncated",
        "no tokenizer",
        "another tokenizer",
        "images of another size",
        "no length",
        "no image processor",
        "no CLIP",
    ],
)
def test_a_spoilt_model_has_no_score(dense, tmp_path, spoil, message):
    folder = shutil.copytree(dense, tmp_path / "model")
    spoil(folder)
    with pytest.raises(SystemExit) as exit:
        evaluate_command.main(
            ["--model", f"{folder}", "--tasks", "symbols_retrieval", "--output-dir", f"{tmp_path}/scores"]
        )
    assert exit.value.code.startswith("error: ") and message in exit.value.code
    assert not list(tmp_path.glob("scores/**/*.json"))


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("retrieval", ["--dataset", "two"]),
        ("retrieval", ["--split", "train"]),
        ("retrieval", ["--num-samples", "11"]),
        ("retrieval", ["--image-column", "photo"]),
        ("retrieval", ["--caption-column", "other caption"]),
        ("zero_shot", ["--label-column", "other caption"]),
        ("zero_shot", ["--templates", "a photo of a {}.", "a {}"]),
        ("zero_shot", ["--label-column", "number", "--classes", "classes.txt"]),
        ("zero_shot", ["--label-column", "number", "--classes", "others.txt"]),
        ("linear_probe", ["--train-split", "train[:11]"]),
    ],
)
def test_results_of_other_data_are_kept_apart(dense, tmp_path, monkeypatch, task, change):
    monkeypatch.chdir(tmp_path)
    Path("classes.txt").write_text("one\ntwo\n")
    Path("others.txt").write_text("two\none\n")
    plain = ["--label-column", "texture"]
    if "--classes" in change or task == "linear_probe":
        plain = ["--label-column", "number", "--classes", "third.txt"]
        Path("third.txt").write_text("three\nfour\n")
    (first,) = evaluated(dense, tmp_path, *plain, tasks=task)
    (second,) = evaluated(dense, tmp_path, *plain, *change, tasks=task)
    assert evaluated(dense, tmp_path, *plain, tasks=task) == []  # the same once more is the same file
    results = [json.loads(file.read_text()) for file in (first, second)]
    assert results[0]["task"] != results[1]["task"] and results[0]["data"] != results[1]["data"]
    assert results[0]["protocol"] != results[1]["protocol"] or "--classes" in change
    header = write_report(results, tmp_path / "report").splitlines()[0]
    assert len(set(header.strip("|").split("|"))) == 1 + 2 * len(results[0]["primary"])
    results[1]["task"] = results[0]["task"]
    for model in ("dense", "another"):
        with pytest.raises(ValueError, match="two results of|cannot be compared|need the same metrics"):
            write_report([results[0], results[1] | {"model": model}], tmp_path / "report")


def test_names_that_look_alike_have_files_of_their_own(dense, tmp_path):
    names = ["a b", "a_b", "a/b", "ä", "ö", "x" * 300, "x" * 301, "dense"]
    for name in names:
        evaluate_model(dense, find_tasks(["symbols_pairs"]), tmp_path, name=name)
    files = [json.loads(file.read_text())["model"] for file in tmp_path.glob("symbols_pairs--*.json")]
    assert sorted(files) == sorted(names)
    assert (tmp_path / "symbols_pairs--a_b.json").is_file() and (tmp_path / "symbols_pairs--dense.json").is_file()
    with pytest.raises(ValueError, match="a model needs a name, not ' '"):
        evaluate_model(dense, find_tasks(["symbols_pairs"]), tmp_path, name=" ")


def test_scores_of_another_measurement_are_not_overwritten(dense, tmp_path, monkeypatch):
    evaluate_model(dense, find_tasks(["symbols_pairs"]), tmp_path)
    path = tmp_path / "symbols_pairs--dense.json"
    before = path.read_bytes()
    command = ["--model", str(dense), "--tasks", "symbols_pairs", "--output-dir", str(tmp_path)]
    other = {"symbols_pairs": dataclasses.replace(TASKS["symbols_pairs"], protocol="half of them")}
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "measure", None)  # calling it would fail
        with pytest.raises(SystemExit) as exit:
            evaluate_command.main([*command, "--dtype", "bfloat16"])
        assert f"{path} holds a result of 'dense' with another dtype, 'float32' and not 'bfloat16': " in exit.value.code
        assert "--name" in exit.value.code
        with pytest.raises(ValueError, match="with another protocol, .* and not 'half of them'"):
            evaluate_model(dense, other, tmp_path)
    assert path.read_bytes() == before
    evaluate_model(dense, find_tasks(["symbols_pairs"]), tmp_path, batch_size=7)  # changes no numbers
    assert json.loads(path.read_text())["batch_size"] == 7


@pytest.mark.parametrize("mixed", [False, True], ids=["sparse", "mixture"])
def test_scores_that_depend_on_the_batch_are_not_overwritten(sparse, tmp_path, mixed):
    model = shutil.copytree(sparse, tmp_path / "whole")
    config = json.loads((model / "config.json").read_text())
    config["vision_config"]["eval_capacity_factor"] = 0.3
    (model / "config.json").write_text(json.dumps(config))
    if mixed:
        model = tmp_path / "mixture"
        assemble.convert([sparse, tmp_path / "whole"], model)
    tasks, scores = find_tasks(["symbols_pairs"]), tmp_path / "scores"
    once, again = (evaluate_model(model, tasks, scores, batch_size=7) for _ in range(2))
    assert once == again
    with pytest.raises(ValueError, match="holds a result of .* with another batch_size, 7 and not 8: choose another"):
        evaluate_model(model, tasks, scores, batch_size=8)


def test_scores_of_other_weights_are_not_overwritten(dense, tmp_path, monkeypatch):
    other = shutil.copytree(dense, tmp_path / "other" / "dense")
    damage(other, lambda weights: weights["visual_projection.weight"].mul_(2))
    evaluate_model(dense, find_tasks(["symbols_pairs"]), tmp_path)
    path = tmp_path / "symbols_pairs--dense.json"
    before = json.loads(path.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "measure", None)  # calling it would fail
        command = ["--model", str(other), "--tasks", "symbols_retrieval,symbols_pairs", "--output-dir", str(tmp_path)]
        with pytest.raises(SystemExit) as exit:
            evaluate_command.main(command)
    assert f"{path} holds the result of another model, 'dense' from {dense}: " in exit.value.code
    assert "--name" in exit.value.code
    assert json.loads(path.read_text()) == before
    evaluate_model(dense, find_tasks(["symbols_pairs"]), tmp_path)  # the same weights
    evaluate_model(other, find_tasks(["symbols_pairs"]), tmp_path, name="other")
    path.write_text(json.dumps({**before, "model": "Dense"}))  # another name where files ignore case
    with pytest.raises(ValueError, match="holds the result of another model, 'Dense'"):
        evaluate_model(dense, find_tasks(["symbols_pairs"]), tmp_path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match=f"{path.name} is no JSON"):
        evaluate_model(dense, find_tasks(["symbols_pairs"]), tmp_path)


@pytest.mark.parametrize("place", ["", "scores", "link"])
def test_no_embeddings_are_kept_in_the_folder_of_a_model(dense, tmp_path, place):
    """They would count as its weights."""
    folder = shutil.copytree(dense, tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    output = tmp_path / place if place == "link" else folder / place
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit) as exit:
        evaluate_command.main(["--model", str(folder), "--tasks", "symbols_pairs", "--output-dir", str(output)])
    assert f"lies in the folder of the model {folder}" in exit.value.code and sorted(folder.iterdir()) == before


def test_an_output_folder_is_made_before_the_work(dense, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(evaluate, "measure", None)  # calling it would fail
    for output in ("file", "file/below"):
        with pytest.raises(SystemExit) as exit:
            evaluate_command.main(
                ["--model", str(dense), "--tasks", "symbols_pairs", "--output-dir", str(tmp_path / output)]
            )
        assert exit.value.code.startswith("error: ") and "file" in exit.value.code


def test_tasks_with_blanks_between(dense, tmp_path, capsys):
    command = ["--model", str(dense), "--tasks", " symbols_pairs, symbols_retrieval ", "--output-dir", str(tmp_path)]
    evaluate_command.main(command)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["symbols_pairs", "symbols_retrieval"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nope"], "unknown task nope: known are linear_probe, names_16"),
        (["--tasks", "retrieval"], "the task retrieval needs --dataset"),
        (["--tasks", "retrieval", "--dataset", ""], "the task retrieval needs --dataset"),
        (["--tasks", "symbols_pairs,symbols_retrieval, symbols_pairs"], "the task symbols_pairs occurs twice"),
        (["--tasks", "symbols_pairs,"], "unknown task '': known are"),
        (["--tasks", ""], "unknown task '': known are"),
        (["--tasks", "retrieval", "--dataset", "nowhere.parquet"], "nowhere.parquet"),
        (["--tasks", "retrieval", "--dataset", "no/where"], "there is no file or folder no/where: Couldn't reach"),
        (["--tasks", "symbols_pairs", "--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--tasks", "symbols_pairs", "--device", "nonsense"], "cannot compute on the device nonsense"),
        (["--tasks", "symbols_pairs", "--device", "meta"], "cannot compute on the device meta"),
        (["--tasks", "symbols_pairs", "--name", ""], "a model needs a name, not ''"),
        (["--tasks", "symbols_pairs", "--name", "caf\udce9"], r"the model 'caf\udce9' has characters that no file can"),
    ],
)
def test_mistakes_end_in_one_line(dense, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as exit:
        evaluate_command.main(["--model", str(dense), "--output-dir", str(tmp_path / "new"), *arguments])
    assert exit.value.code.startswith("error: ") and message in exit.value.code
    assert not list((tmp_path / "new").glob("*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("routing={", "routing is not valid YAML: "),
        ("routing=!!python/name:os.system", "routing: line 1: "),
        ("routing", "'routing' is no NAME=VALUE"),
    ],
)
def test_changes_that_cannot_be_read(dense, tmp_path, capsys, change, message):
    command = ["--model", str(dense), "--tasks", "symbols_pairs", "--output-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as exit:
        evaluate_command.main([*command, "--change", change])
    assert exit.value.code == 2 and f"argument --change: {message}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", [evaluate_command.main, report.main, seeds.write_seeds.main])
def test_an_output_folder_without_a_name(dense, tmp_path, monkeypatch, capsys, command):
    """It would be the current folder."""
    monkeypatch.chdir(tmp_path)
    inputs = ["--model", str(dense), "--tasks", "symbols_pairs"] if command is evaluate_command.main else ["x"]
    with pytest.raises(SystemExit) as exit:
        command([*inputs, "--output-dir", ""])
    assert exit.value.code == 2 and capsys.readouterr().err.endswith("argument --output-dir: a folder needs a name\n")
