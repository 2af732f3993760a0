"""`clip-moe finetune`: from pictures with captions to an answer."""

import json
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from test_report import result
from tiny_runs import run_stages
from tiny_sources import picture

import clip_moe
from clip_moe.engine.intervals import shown_differences
from clip_moe.engine.recipe import load_recipe
from clip_moe.evaluation.answer import answer as answer_of
from clip_moe.evaluation.results import slug

FLAGS = ["--global_batch_size", "16", "--learning_rate", "1e-3"]
MODELS = ("dense", "dense half way", "dense kept", "sparse kept")
NUMBERS = [f"number {number}" for number in range(120)]


def small(number):
    """A picture, no two alike."""
    image = picture(number % 8)
    image.putpixel((number // 16, number % 16), (255, 0, 0))
    return image


def noise(number):
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8))


def pictures(folder, captions, split=".", draw=small, save=lambda image, path: image.save(f"{path}.png")):
    """A folder of pictures."""
    (folder / split).mkdir(parents=True)
    lines = []
    for number, caption in enumerate(captions):
        save(draw(number), folder / split / f"{number}")
        (file,) = (folder / split).glob(f"{number}.*")
        lines.append(json.dumps({"file_name": file.name, "caption": caption}))
    (folder / split / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def split(folder, data, model, validation=0):
    """The stage that splits data, in a run of its own. Returns its folder."""
    stage = {"name": "pictures", "stage": "split", "data": {"source": str(data)}, "model": str(model)}
    stage["validation"] = validation
    return run_stages(folder / "run", [stage]) / "pictures"


def answer(scores, folders=None, metrics=None, keep_at_least=1.0, chosen=None, **changes):
    """The sentences on `scores`, model -> its score of each task, learned first."""
    folders = folders or {model: f"in/{model}" for model in scores}
    metrics = metrics or {"learned": "accuracy", "kept": "accuracy"}
    results = [
        result(model, task, primary={metric: "accuracy"}, metrics={metric: score}, **changes)
        for model, task_scores in scores.items()
        for (task, metric), score in zip(metrics.items(), task_scores, strict=False)
    ]
    sparse = [model for model in scores if model.startswith("sparse")]
    answered = answer_of(results, ["learned"], folders, sparse, keep_at_least=keep_at_least, chosen=chosen)
    return f"**{answered.verdict}** {answered.advice}\n\n{answered.details}"


def finetune(data, output, model, *flags):
    clip_moe.main(["finetune", str(data), str(output), "--model", str(model), *FLAGS, *flags])


@pytest.mark.slow
def test_a_folder_without_a_test(tmp_path, dense, capsys):
    output = tmp_path / "out"
    data = pictures(tmp_path / "data", [f"a picture of number {number // 2}" for number in range(60)])
    flags = ["--defaults.train.num_epochs", "1", "--keep_tasks", "symbols_pairs", "--keep_at_least", "100"]
    finetune(data, output, dense, *flags)
    told = capsys.readouterr().out
    rows = datasets.load_from_disk(str(output / "pictures"))
    train, test, chosen = (set(rows[split]["caption"]) for split in ("train", "test", "validation"))
    assert train.isdisjoint(test | chosen) and test.isdisjoint(chosen)
    assert [len(rows[split]) for split in ("train", "test", "validation")] == [48, 6, 6]
    report = (output / "report" / "report.md").read_text()
    assert "pictures: 6 of the others are held out in the same way, to choose a model on." in told
    assert "pictures: Training has 48 pairs with " in told
    assert (
        "Not shown to be above chance in attribute pairs, first 1000 rows (group score 16.7%): *base*."
        in told[: told.index("dense: begins")]
    )
    assert not (output / "before" / "chosen--base.json").exists()
    title, first, _, table, picture, gains, *scores = report.split("\n\n")
    assert title == "# Did the model learn your pictures, and did experts help?"
    shown = re.findall(r"!\[picture \d\]\((\w+.png)\) \| (a picture of number \d+) \| (.+) \|", table)
    assert 3 <= len(shown) <= 6 and len(table.splitlines()) == 2 + len(shown)
    for name, said, own in shown:
        assert (output / "report" / name).is_file() and name.startswith("hit" if own == "the same" else "miss")
        assert said in test and own in {"the same", *test} - {said}
    verdict = json.loads((output / "report" / "answer.json").read_text())
    assert first.startswith(f"**{verdict['verdict']}** ")
    assert verdict["use"].split(",")[0] in ("base", "dense", "sparse")
    assert picture == "![learned over kept](frontier.png)" and (output / "report" / "frontier.png").is_file()
    assert [line.split("|")[1].strip() for line in gains.splitlines()[2:]] == ["base", *MODELS]
    assert "*Learned*: own pictures, R@1 image→text among 3 captions; own pictures, R@1 text→image among 6" in scores[0]
    assert "; *Kept*" not in scores[0] and ". *Kept*: " in scores[0]
    assert first in told and told.splitlines()[-1] == first.replace("**", "")
    assert re.search(r"[+-]\d+\.\d ± \d+\.\d points", first)
    folder = re.search(r"[uU]se `(.+)`", first)[1]
    assert Path(folder).parent in (output, dense.parent) and Path(folder).is_dir()
    for row, line in zip(("base", *MODELS), gains.splitlines()[2:], strict=True):
        kept = json.loads((output / "report" / f"symbols_pairs--{slug(row)}.json").read_text())["metrics"]
        assert line.split("|")[4].strip() == f"{kept['group']:.1%}"
    assert "10% of its pairs are held out" in report
    assert "3 different captions, 3 of which training never sees" in report


def test_classes_as_captions(tmp_path, dense, capsys):
    """Whose names are markup of a picture that is not there."""
    classes = ["![x](y.jpg)", "[a](b)", "red_circle", "a dog."]
    captions = [classes[number % 4] for number in range(80)] + classes[:1] * 8
    data, output = pictures(tmp_path / "data", captions), tmp_path / "out"
    finetune(data, output, dense, "--defaults.train.num_epochs", "1")
    told, report = capsys.readouterr().out, (output / "report" / "report.md").read_text()
    rows = datasets.load_from_disk(str(output / "pictures"))
    assert [len(rows[split]) for split in ("train", "test", "validation")] == [71, 9, 8]
    names = {"![x](y.jpg)", "[a](b)", "red circle", "a dog."}
    assert set(rows["train"]["caption"]) == set(rows["test"]["caption"]) == names
    line = "The captions repeat as classes do: the test is held out by picture, and scored by class, 4 in all."
    assert line in report and f"pictures: {line}" in told and "one by one" not in told + report
    result = json.loads((output / "report" / "learned--dense.json").read_text())
    assert result["num_samples"] == 9 and "4 classes, 1 templates: '{}'" in result["protocol"]
    assert "*Learned*: own pictures, accuracy." in report
    assert re.search(rf"^\| dense +\| {result['metrics']['accuracy']:.1%}", report, re.M)
    assert "9 for what was learned. Another" in report and "A test of 9 pictures shows" in report
    assert "A test of 9 pictures shows differences of" in told
    assert r"'!\[x\](y.jpg)'" in report and (output / "report" / "report.html").is_file()


def test_a_class_without_a_test_picture_is_named(tmp_path, dense):
    captions = [f"class {number % 2}" for number in range(40)]
    data = pictures(tmp_path / "data", captions, "train")
    pictures(data, ["class 1", "class 1"], "test")
    overview = (split(tmp_path, data, dense) / "overview.txt").read_text()
    assert "1 of the classes have no picture in the test: class 0." in overview


@pytest.mark.parametrize(
    ("save", "same", "near"),
    [
        (lambda picture, path: picture.save(f"{path}.png", compress_level=1), 6, 0),
        (lambda picture, path: picture.save(f"{path}.webp", lossless=True), 6, 0),
        (lambda picture, path: picture.save(f"{path}.jpg"), 0, 6),
        (lambda picture, path: picture.resize((48, 48)).save(f"{path}.png"), 0, 6),
        (lambda picture, path: picture.rotate(90).save(f"{path}.png"), 0, 0),
    ],
    ids=["png", "webp", "jpeg", "smaller", "turned"],
)
def test_copies_in_a_given_test_are_counted(tmp_path, dense, capsys, save, same, near):
    data = tmp_path / "data"
    pictures(data, NUMBERS[:12], "train", noise)
    others = [f"other {number}" for number in range(4)]
    pictures(data, ["“Number 0.”", "number&#32;1", *others], "test", noise, save)
    rows = datasets.load_from_disk(split(tmp_path, data, dense))
    assert (len(rows["train"]), rows["test"]["caption"][2:]) == (12, others)
    told = capsys.readouterr().out
    line = f"{same + near} of the test's 6 images are in training, too: {same} with the same pixels, {near} that look"
    assert (line in told) == bool(same + near) and ("in training, too" in told) == bool(same + near)
    assert "2 of these are in training with other punctuation, quotes, case or HTML." in told


@pytest.mark.parametrize(("names", "scored"), [("cat dog emu", "by class, 3 in all"), ("0 1 2", "by retrieval")])
def test_a_given_test_of_classes_is_scored_by_class(tmp_path, dense, capsys, names, scored):
    data, names = tmp_path / "data", names.split()
    pictures(data, [names[number % 3] for number in range(30)], "train")
    pictures(data, [names[number % 3] for number in range(6)], "test")
    rows = datasets.load_from_disk(split(tmp_path, data, dense))
    assert f"The captions repeat as classes do: the test is scored {scored}." in capsys.readouterr().out
    assert ("label" in rows["test"].column_names) == (scored != "by retrieval")


@pytest.mark.parametrize("table", [False, True], ids=["folder", "table"])
def test_other_pictures_of_the_test_are_noticed(tmp_path, dense, table):
    """Of the stage that reads them, and of the one that measures by them."""
    data = pictures(tmp_path / "data", NUMBERS[:6], "train")
    pictures(data, NUMBERS[6:8], "test")
    if table:
        lines = [f"{split}/{n}.png,{split} {n},{split}" for split, of in (("train", 6), ("test", 2)) for n in range(of)]
        (tmp_path / "data" / "pairs.csv").write_text("\n".join(["image,caption,split", *lines]))
        data = {"source": str(data / "pairs.csv"), "image_root": str(data)}
    settings = data if table else {"source": str(data)}
    stages = [{"name": "pictures", "stage": "split", "data": settings, "model": str(dense), "validation": 0}]
    answer = {"name": "answer", "stage": "answer", "split": "pictures", "tasks": ["symbols_pairs"]}
    answer |= {"models": dict.fromkeys(("base", "dense", "sparse"), str(dense)), "max_rows": 2}
    folder = run_stages(tmp_path / "run", [*stages, answer])
    image = tmp_path / "data" / "test" / "1.png"
    picture(5).resize((40, 40)).save(image)
    for alone in (stages, [answer | {"split": str(folder / "pictures")}]):
        with pytest.raises(ValueError, match="pictures was made|answer was made|Delete"):
            run_stages(tmp_path / "run", alone)
    shutil.rmtree(tmp_path / "data")  # what is gone is not compared
    run_stages(tmp_path / "run", [*stages, answer])


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        (["a dog"] * 40, "cannot hold out 10% of the 40 pairs as a test"),
        (["a dog"] * 19 + ["a cat"], "cannot hold out 10% of the 20 pairs as a test"),
        (NUMBERS[:5], "cannot hold out 10% of the 5 pairs as a test"),
        ([""] * 40, "40 of 40 pairs of .* cannot be used"),
    ],
    ids=["captions alike", "two captions", "five pictures", "no captions"],
)
def test_what_cannot_be_learned_from_is_one_line(tmp_path, dense, captions, message):
    with pytest.raises(SystemExit, match=f"^error: pictures: .*{message}"):
        finetune(pictures(tmp_path / "data", captions), tmp_path / "out", dense)
    assert not (tmp_path / "out" / "dense").exists()


def test_inputs_stand_where_aliases_do(tmp_path):
    stages = "stages: [{name: a, stage: average, models: [*first, *others]}]"
    (tmp_path / "recipe.yaml").write_text(
        f"inputs: {{first: &first x, others: &others y}}\noutput_dir: out\n{stages}\n"
    )
    (stage,) = load_recipe(tmp_path / "recipe.yaml", {"first": "z"}).stages
    assert stage.models == ["z", "y"]


ROWS = ("base", "dense", "dense kept", "sparse kept")


@pytest.mark.parametrize(
    ("learned", "kept", "verdict", "then"),
    [
        ((0.2, 0.4, 0.3, 0.6), (0.8, 0.8, 0.8, 0.8), "Experts helped: +20.0", "Use `in/sparse kept`"),
        (
            (0.2, 0.4, 0.3, 0.41),
            (0.8, 0.8, 0.8, 0.8),
            "Whether experts helped is inconclusive: +1.0",
            "than dense is",
        ),
        ((0.2, 0.6, 0.3, 0.4), (0.8, 0.8, 0.8, 0.8), "Experts did not help: -20.0", "Use `in/dense`, the dense model"),
        ((0.2, 0.6, 0.3, 0.4), (0.8, 0.7, 0.8, 0.8), "Experts helped: +10.0", "Use `in/sparse kept`"),
        (
            (0.2, 0.6, 0.3, 0.4),
            (0.8, 0.7, 0.8, 0.7),
            "No verdict on experts: only dense models keep",
            "Use `in/dense",
        ),
        ((0.2, 0.6, 0.3, 0.4), (0.8, 0.7, 0.75, 0.7), "No verdict on experts: no model keeps", "--keep_at_least 5.0"),
        ((0.4, 0.41, 0.4, 0.4), (0.8, 0.8, 0.8, 0.8), "Whether experts helped is inconclusive: -1.0", "use `in/base`"),
        ((0.9, 0.4, 0.3, 0.6), (0.8, 0.8, 0.8, 0.8), "Experts helped: +20.0", "The sparse kept model is worse"),
    ],
)
def test_verdicts(learned, kept, verdict, then):
    told = answer(dict(zip(ROWS, zip(learned, kept, strict=True), strict=True)))
    assert told.startswith(f"**{verdict}") and then in told.split("\n\n")[0]
    row = next(line for line in told.splitlines() if line.startswith("| dense kept"))
    for score, base in ((learned[2], learned[0]), (kept[2], kept[0])):
        assert f"{score:.1%}" in row and f"{100 * (score - base):+.1f} ± " in row
    assert ("keeps too little" in row) == (kept[2] < 0.79)
    beaten = any(one >= learned[2] and other >= kept[2] for one, other in zip(learned[1::2], kept[1::2], strict=True))
    assert ("on the frontier" in row) != beaten
    assert "over the pictures of each test, 1,000 for what was learned. Another" in told


def test_what_may_be_lost_decides():
    """Of the models that lost no more than allowed, the one that learned most. Where its interval reaches below the
    limit, the report says that this is inconclusive."""
    scores = dict(zip(ROWS, ((0.2, 0.8), (0.6, 0.6), (0.4, 0.785), (0.5, 0.7)), strict=True))
    for limit, used in ((0, "base"), (2, "dense kept"), (10, "sparse kept"), (100, "dense")):
        told = answer(scores, keep_at_least=limit)
        assert re.search(r"[uU]se `in/(.+?)`", told)[1] == used, limit
        assert (f"That it keeps within {limit} points is inconclusive" in told) == (limit in (2, 10)), limit


def test_the_model_is_chosen_on_other_pictures_than_the_test():
    scores = {
        "base": (0.2, 0.2, 0.8),
        "dense": (0.6, 0.5, 0.8),
        "dense kept": (0.5, 0.6, 0.8),
        "sparse kept": (0.7, 0.4, 0.8),
    }
    metrics = dict.fromkeys(("learned", "chosen", "kept"), "accuracy")
    told = answer(scores, metrics=metrics, chosen="chosen")
    assert "Experts helped: +20.0" in told and "Use `in/dense kept`, the dense kept model" in told
    assert "Of the models that keep enough, the one to use learned most of 1,000 other pictures." in told


def test_pictures_to_choose_on_are_in_neither_split(tmp_path, dense):
    """Nor compressed ones, under another caption."""
    data = pictures(tmp_path / "data", NUMBERS[:60], draw=lambda number: noise(number // 2))
    for number in range(1, 60, 2):
        Image.open(data / f"{number}.png").save(data / f"{number}.png", "JPEG")
    parts = datasets.load_from_disk(split(tmp_path, data, dense, validation=0.2))
    assert {name: len(part) for name, part in parts.items()} == {"train": 42, "test": 6, "validation": 12}
    numbers = {name: {int(text.split()[1]) for text in part["caption"]} for name, part in parts.items()}
    assert set.union(*numbers.values()) == {*range(60)}
    assert all({number ^ 1 for number in part} == part for part in numbers.values())
    few = pictures(tmp_path / "few", NUMBERS[:6], "train")
    pictures(few, NUMBERS[6:8], "test")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="or choose the model on the test: --pictures.validation 0"):
        split(tmp_path / "other", few, dense, validation=0.1)


@pytest.mark.parametrize("number", [5, 6])
def test_classes_stay_classes_when_few_pictures_are_left(tmp_path, dense, capsys, number):
    """Of five pictures of a class, four are left after the test, which would be no class."""
    data = pictures(tmp_path / "data", [f"class {row // number}" for row in range(12 * number)])
    parts = datasets.load_from_disk(split(tmp_path, data, dense, validation=0.1))
    assert all("label" in parts[name].column_names for name in ("test", "validation"))
    assert len(set(parts["train"]["caption"])) == 12 and "scored by class, 12 in all" in capsys.readouterr().out


def test_training_ends_with_the_best_weights_on_pictures_to_choose_on(tmp_path, dense, capsys):
    """And minds that they are others."""
    rows = split(tmp_path, pictures(tmp_path / "data", NUMBERS[:60]), dense, validation=0.1)
    held_out = {"task": "retrieval", "dataset": str(rows), "split": "validation"}
    tuned = {"name": "tuned", "stage": "train", "model": str(dense), "data": {"source": str(rows)}, "max_steps": 2}
    tuned |= {"evaluation": {"every_steps": 1, "load_best_model_at_end": True, "tasks": [held_out]}}
    tuned |= {"global_batch_size": 8, "learning_rate": 1e-3}
    run_stages(tmp_path / "tuned", [tuned])
    assert re.search(r"tuned: ends with the weights after step [12], of the best mean score, ", capsys.readouterr().out)
    changed = datasets.load_from_disk(str(rows))["validation"][0]["caption"].removeprefix("number ")
    picture(5).resize((40, 40)).save(tmp_path / "data" / f"{changed}.png")
    with pytest.raises(ValueError, match="tuned was made|Delete"):
        run_stages(tmp_path / "tuned", [tuned])


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (10, "A test of 10 pictures shows differences of 37 points and more; 5 take about 800."),
        (800, "A test of 800 pictures shows differences of 5 points and more."),
    ],
)
def test_before_training_it_is_said_what_the_test_can_show(number, sentence):
    """Newcombe's interval of 50 % against 50 % reaches 6.9 points with 400 pictures, 4.9 with 800."""
    assert shown_differences(number) == sentence


def test_what_was_not_measured_was_not_forgotten():
    told = answer({"base": [0.2], "dense": [0.4], "sparse": [0.6]})
    assert told.startswith("**Experts helped: +20.0") and "10 for what" not in told
    assert "*Kept* was not measured: name benchmarks by `--keep_tasks`." in told


def test_without_an_interval_the_difference_in_what_was_kept_counts_alone():
    """Mean per-class recall is no mean over samples."""
    scores = {"base": (0.2, 0.9), "dense": (0.4, 0.9), "sparse": (0.6, 0.89)}
    metrics = {"learned": "accuracy", "kept": "mean_per_class_recall"}
    told = answer(scores, metrics=metrics)
    assert "Use `in/sparse`" in told and re.search(r"\| -1.0 +\|", told) and "keeps within" not in told
    assert "Use `in/dense`" in answer(scores, metrics=metrics, keep_at_least=0.5)


def test_a_picture_that_cannot_be_read_is_left_out_before_the_test_is_held_out(tmp_path, dense):
    data = pictures(tmp_path / "data", NUMBERS)
    (data / "7.png").write_bytes(b"no picture")
    rows = datasets.load_from_disk(split(tmp_path, data, dense))
    captions = {*rows["train"]["caption"], *rows["test"]["caption"]}
    assert len(captions) == 119 and "number 7" not in captions


def test_a_sparse_model_is_refused_before_the_pictures_are_read(tmp_path, sparse):
    data = pictures(tmp_path / "data", NUMBERS[:40])
    with pytest.raises(SystemExit, match="upcycled: .* already sparse"):
        finetune(data, tmp_path / "out", sparse)
    assert not (tmp_path / "out" / "pictures").exists()


def test_a_step_of_one_pair_is_refused(tmp_path, dense):
    data = pictures(tmp_path / "data", NUMBERS[:40])
    with pytest.raises(SystemExit, match="a step of one pair has no negatives"):
        clip_moe.main(["finetune", str(data), str(tmp_path / "out"), "--model", str(dense), "--global_batch_size", "1"])
    assert not (tmp_path / "out").exists()
