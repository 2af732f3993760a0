"""Tasks on own data: pairs, templates of a file, and what cannot be measured."""

import io
import json
import logging

import datasets
import numpy as np
import PIL.Image
import pytest
import small_evaluation
from small_evaluation import plain_embedding

from data import symbols
from data.sources import DataArguments
from evaluation import evaluate
from evaluation.evaluate import evaluate_model
from evaluation.own_data import OwnTask, pairs_task, read_templates, retrieval_task, zero_shot_task
from evaluation.pairs import pair_metrics
from evaluation.tasks import TASKS, find_tasks, parse_tasks, problems_of_data

dense = small_evaluation.dense


@pytest.fixture
def pairs(tmp_path):
    """Twelve, with captions that are short enough for the model."""
    rows = symbols.load_minimal_pairs("test", 12)
    for side in range(2):
        captions = [" ".join(caption.split()[:6]) for caption in rows[f"caption_{side}"]]
        rows = rows.remove_columns(f"caption_{side}").add_column(f"caption_{side}", captions)
    rows.to_parquet(tmp_path / "pairs.parquet")
    return rows


def pairs_of(tmp_path, **changes):
    return OwnTask(task="pairs", dataset=str(tmp_path / "pairs.parquet"), **changes)


def test_pairs_by_one_embedding_at_a_time(dense, pairs, tmp_path):
    (result,) = evaluate_model(dense, find_tasks([pairs_of(tmp_path, label_column="attribute")]), tmp_path)
    embed = plain_embedding(dense)
    images, texts = (
        np.stack([[embed(row[f"{kind}_{side}"]) for side in range(2)] for row in pairs])
        for kind in ("image", "caption")
    )
    assert result["metrics"] == pytest.approx(pair_metrics(images, texts, pairs["attribute"]))
    assert result["primary"] == {"group": "group score"} and result["num_samples"] == 12


def test_pairs_without_attributes(dense, pairs, tmp_path):
    (result,) = evaluate_model(dense, find_tasks([pairs_of(tmp_path)]), tmp_path)
    assert set(result["metrics"]) == {"text", "image", "group"}


def test_pairs_on_other_columns_and_below_a_root(dense, tmp_path, capsys):
    """As paths, from the command line."""
    entries = []
    (tmp_path / "pictures").mkdir()
    for number, row in enumerate(symbols.load_minimal_pairs("test", 4)):
        entry = {f"text_{side}": row[f"caption_{side}"] for side in range(2)}
        for side in range(2):
            entry[f"photo_{side}"] = f"{number}_{side}.png"
            row[f"image_{side}"].save(tmp_path / "pictures" / entry[f"photo_{side}"])
        entries.append(entry)
    datasets.Dataset.from_list(entries).to_parquet(tmp_path / "pairs.parquet")
    command = ["--model", str(dense), "--dataset", str(tmp_path / "pairs.parquet"), "--image-column", "photo"]
    command += ["--caption-column", "text", "--image-root", str(tmp_path / "pictures"), "--tasks", "pairs"]
    evaluate.main([*command, "--output-dir", str(tmp_path / "scores")])
    assert "pairs-pairs.parquet-text-" in capsys.readouterr().out
    (tmp_path / "pictures" / "2_1.png").unlink()
    with pytest.raises(SystemExit, match="1 of 4 pairs of .* cannot be used; the first is pair 2: its image cannot"):
        evaluate.main([*command, "--output-dir", str(tmp_path / "scores")])


def test_a_pair_of_which_one_side_cannot_be_read_is_left_out(pairs, tmp_path):
    captions = list(pairs["caption_1"])
    captions[3] = " "
    pairs.remove_columns("caption_1").add_column("caption_1", captions).to_parquet(tmp_path / "pairs.parquet")
    arguments = DataArguments(source=str(tmp_path / "pairs.parquet"), split="test", max_unreadable=0.1)
    rows, skipped = pairs_task(arguments).load()
    assert (len(rows), skipped) == (11, 1) and rows["caption_0"][:] == [
        *pairs["caption_0"][:3],
        *pairs["caption_0"][4:],
    ]


def with_column(tmp_path, rows, name, values):
    rows = rows.remove_columns(name) if name in rows.column_names else rows
    rows.add_column(name, values).to_parquet(tmp_path / "pairs.parquet")


@pytest.mark.parametrize("caption", [["a", "b"], ["a"]])
def test_captions_of_pairs_are_no_lists(pairs, tmp_path, caption):
    with_column(tmp_path, pairs, "caption_1", [caption] * 12)
    with pytest.raises(ValueError, match=r"12 of 12 pairs of .* the first is pair 0: its caption is no text but \['a'"):
        pairs_of(tmp_path).make().load()


@pytest.mark.parametrize(
    ("values", "feature", "names"),
    [
        (["color", None, "a\nb "], None, ["color", "none", "a b"]),
        (["", "x/y", " "], None, ["none", "x/y", "none"]),
        ([1, None, 2], None, ["1", "none", "2"]),
        ([None, None, None], None, ["none", "none", "none"]),
        ([0, 1, -1], datasets.ClassLabel(names=["color", "shape"]), ["color", "shape", "none"]),
    ],
)
def test_what_differs_in_pairs_has_a_name(dense, pairs, tmp_path, values, feature, names):
    rows = pairs.add_column("label", values * 4)
    (rows.cast_column("label", feature) if feature else rows).to_parquet(tmp_path / "pairs.parquet")
    (result,) = evaluate_model(dense, find_tasks([pairs_of(tmp_path)]), tmp_path / "scores")
    assert result["metrics"].keys() == {"text", "image", "group", *(f"group/{name}" for name in names)}


@pytest.mark.parametrize("value", [["color"], 0.5, {"a": 1}, b"color"])
def test_what_differs_in_pairs_is_a_text_or_an_integer(pairs, tmp_path, value):
    with_column(tmp_path, pairs, "label", [value] * 12)
    (problem,) = problems_of_data([pairs_of(tmp_path)])
    assert "what differs in a pair is a text or an integer, but column label of" in problem
    assert problems_of_data([pairs_of(tmp_path, label_column="none")]) == []


@pytest.mark.parametrize("side", [0, 1])
def test_the_images_of_pairs_are_part_of_their_fingerprint(tmp_path, side):
    images = [f"{number}.png" for number in range(2)]
    for number, name in enumerate(images):
        PIL.Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name)
    rows = [{"image_0": images[0], "image_1": images[1], "caption_0": "a", "caption_1": "b"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "pairs.parquet")
    before = pairs_of(tmp_path, image_root=str(tmp_path)).fingerprint()
    assert before == pairs_of(tmp_path, image_root=str(tmp_path)).fingerprint()
    PIL.Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / images[side])
    assert before != pairs_of(tmp_path, image_root=str(tmp_path)).fingerprint()


def test_spellings_of_a_path_are_one_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spellings = [("data/images", "root"), ("data/images/", "root/"), ("./data//images", "./root")]
    tasks = [OwnTask(task="retrieval", dataset=data, image_root=root).make() for data, root in spellings]
    assert [task.data for task in tasks] == [tasks[0].data] * 3 and tasks[0].data["source"] == "data/images"
    assert OwnTask(task="zero_shot", dataset="./symbols").arguments().source == "./symbols"  # a folder, not the world


@pytest.mark.parametrize("task", ["pairs", "zero_shot", "linear_probe"])
def test_tasks_of_a_world_are_built_in(task):
    assert f"symbols_{task}" in TASKS
    with pytest.raises(ValueError, match=f"of symbols, it is the built-in task symbols_{task}"):
        OwnTask(task=task, dataset="symbols", num_samples=4)


def retrieval_of(tmp_path, captions, **changes):
    images = [PIL.Image.new("RGB", (8, 8), (number, 0, 0)) for number in range(len(captions))]
    rows = datasets.Dataset.from_dict({"image": images, "caption": captions}).cast_column("image", datasets.Image())
    rows.to_parquet(tmp_path / "captions.parquet")
    return retrieval_task(DataArguments(source=str(tmp_path / "captions.parquet"), split="test", **changes))


@pytest.mark.parametrize(
    ("captions", "changes", "warned"),
    [
        (["a\nb", "c\nd\n"], {}, True),
        (["a\nb", "c\nd\n"], {"captions_per_line": True}, False),
        (["a\nb", "c"], {}, False),
        (["a\n", "c\n"], {}, False),
        ([["a\nb"], ["c\nd"]], {}, False),
    ],
)
def test_captions_one_a_line_in_one_cell(tmp_path, caplog, captions, changes, warned):
    with caplog.at_level(logging.WARNING):
        retrieval_of(tmp_path, captions, **changes).load()
    assert ("If each is a caption, say so: captions_per_line" in caplog.text) == warned


@pytest.mark.parametrize("in_files", [False, True])
def test_rows_of_one_image_score_as_one_row_with_all_captions(dense, tmp_path, in_files):
    (tmp_path / "images").mkdir()
    rows, lists = [], []
    for number, row in enumerate(symbols.load("test", "web", 8, captions_per_image=3)):
        row["image"].save(tmp_path / "images" / f"{number}.png")
        path = str(tmp_path / "images" / f"{number}.png")
        image = path if in_files else {"bytes": (tmp_path / "images" / f"{number}.png").read_bytes(), "path": None}
        captions = [" ".join(caption.split()[:6]) for caption in row["caption"]]
        lists.append({"image": image, "caption": captions})
        rows += [{"image": image, "caption": caption} for caption in captions]
    rows = rows[::3] + rows[1::3] + rows[2::3]
    results = []
    for name, entries in (("lists", lists), ("rows", rows)):
        table = datasets.Dataset.from_list(entries)
        table = table if in_files else table.cast_column("image", datasets.Image())
        table.to_parquet(tmp_path / f"{name}.parquet")
        task = OwnTask(task="retrieval", dataset=str(tmp_path / f"{name}.parquet"))
        results += evaluate_model(dense, find_tasks([task]), tmp_path / "scores")
    assert results[0]["metrics"] == results[1]["metrics"]
    assert [(result["num_samples"], result["num_captions"]) for result in results] == [(8, 24)] * 2


@pytest.mark.parametrize("labels", [[0.5, 1.0], [[0], [1]], [{"a": 1}, {"a": 2}], [None, "x"], [b"x", b"y"]])
def test_labels_of_other_types(tmp_path, labels):
    images = [PIL.Image.new("RGB", (8, 8))] * 2
    datasets.Dataset.from_dict({"image": images, "label": labels}).to_parquet(tmp_path / "x.parquet")
    arguments = DataArguments(source=str(tmp_path / "x.parquet"), split="test", caption_column="label")
    with pytest.raises(ValueError, match="labels are integers or texts, but row 0 of column label has"):
        zero_shot_task(arguments, ["a {}"], ["one", "two"])


def test_images_of_other_modes_score_as_the_same_in_rgb(dense, tmp_path):
    """A palette, CMYK, gray, and one that EXIF turns."""
    rgb = [row["image"] for row in symbols.load("test", "web", 4)]
    rgb[2] = rgb[2].convert("L").convert("RGB")
    turned, exif = rgb[3].transpose(PIL.Image.Transpose.ROTATE_90), PIL.Image.Exif()
    exif[0x0112] = 6
    rgb[0] = rgb[0].quantize(16).convert("RGB")
    others = [
        (rgb[0].quantize(16), {"format": "png"}),
        (rgb[1].convert("CMYK"), {"format": "tiff"}),
        (rgb[2].convert("L"), {"format": "png"}),
        (turned, {"format": "png", "exif": exif}),
    ]
    results = []
    for name, images in (("rgb", [(image, {"format": "png"}) for image in rgb]), ("others", others)):
        files = [io.BytesIO() for _ in images]
        for file, (image, options) in zip(files, images, strict=True):
            image.save(file, **options)
        rows = {"image": [{"bytes": file.getvalue(), "path": None} for file in files], "caption": list("abcd")}
        datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(tmp_path / f"{name}.parquet")
        task = OwnTask(task="retrieval", dataset=str(tmp_path / f"{name}.parquet"))
        results += evaluate_model(dense, find_tasks([task]), tmp_path / "scores")
    assert results[0]["metrics"] == results[1]["metrics"] and results[1]["num_skipped"] == 0


def test_templates_of_a_file(tmp_path):
    (tmp_path / "templates.txt").write_text("a {c}.\nthe {}!\n")
    assert read_templates([str(tmp_path / "templates.txt")]) == ["a {}.", "the {}!"]
    assert read_templates(["a {c}", "b {}"]) == ["a {}", "b {}"]
    (tmp_path / "templates.txt").write_text("a {c}.\n\n")
    with pytest.raises(ValueError, match="templates.txt has no template in line 2: every line needs one"):
        read_templates([str(tmp_path / "templates.txt")])


@pytest.mark.parametrize("text", ["a,b,c", "a, b ,c", "a b c", " a,  b\nc "])
def test_names_between_commas_or_spaces(text):
    assert parse_tasks(text) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "pairs"], "the task pairs needs --dataset"),
        (["--tasks", "retrieval", "--dataset", "x", "--num-samples", "0"], "--dataset x: num_samples Input should be"),
        (
            ["--tasks", "retrieval", "--dataset", "x", "--caption-column", "image"],
            "--dataset x: the column image cannot",
        ),
        (["--tasks", "retrieval", "--dataset", "symbols"], "num_samples must say how many symbols to draw"),
        (
            ["--tasks", "linear_probe", "--dataset", "x", "--train-split", "test"],
            "--dataset x: a linear probe is fitted to another split than test: set train_split",
        ),
        (
            ["--tasks", "pairs", "--dataset", "x", "--label-column", "caption_0"],
            "--dataset x: the column caption_0 cannot also tell what differs in pairs",
        ),
        (
            ["--tasks", "pairs", "--dataset", "x", "--label-column", "photo_1", "--image-column", "photo"],
            "--dataset x: the column photo_1 cannot also tell what differs in pairs",
        ),
        (["--tasks", "pares", "--dataset", "x"], "unknown task pares: did you mean 'pairs'"),
        (
            ["--tasks", "zero_shot", "--dataset", "x", "--classes", ""],
            "--dataset x: classes String should",
        ),
    ],
)
def test_options_that_contradict_each_other(tmp_path, options, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}") as error:
        evaluate.main(["--model", "nowhere", "--output-dir", str(tmp_path / "out"), *options])
    assert "\n" not in error.value.code and error.value.code.count("--dataset x") < 2
    assert not (tmp_path / "out").exists()


def test_a_result_says_what_was_chosen(dense, tmp_path):
    symbols.load("test", "web", 8).to_parquet(tmp_path / "x.parquet")
    task = OwnTask(task="zero_shot", dataset=str(tmp_path / "x.parquet"), label_column="kind", templates=["a {c}."])
    (result,) = evaluate_model(dense, find_tasks([task]), tmp_path / "scores")
    (file,) = (tmp_path / "scores").glob("*.json")
    assert json.loads(file.read_text()) == result
    assert result["data"]["templates"] == ["a {}."] and result["data"]["split"] == "test"
