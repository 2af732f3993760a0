"""Results side by side."""

import json
import re

import numpy as np
import PIL.Image
import pytest
import small_evaluation
from hypothesis import given
from hypothesis import strategies as st

from evaluation import report
from evaluation.report import arrange, best_of, markdown_table, plot_text, write_report

figures = small_evaluation.figures


def result(model, task="retrieval", value=0.5, **changes):
    return {
        "model": model,
        "task": task,
        "title": task,
        "protocol": "1,000 images",
        "metrics": {"recall": value, "other": 0.25},
        "primary": {"recall": "R@1"},
        "num_samples": 1000,
        "num_skipped": 2,
        "source": f"folder/{model}",
        "dtype": "float32",
        "commit": "abc",
        "versions": {"torch": "2"},
    } | changes


def test_table_and_picture(tmp_path, figures):
    results = [result("dense"), result("sparse", value=0.625), result("dense", "pairs"), result("sparse", "pairs")]
    table = write_report(results, tmp_path, baseline="dense")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["model", "retrieval: R@1", "pairs: R@1"]
    assert rows[2:] == [["dense", "50.0%", "50.0%"], ["sparse", "62.5% (+12.5 ± 4.3)", "50.0% (+0.0 ± 4.4)"]]
    text = (tmp_path / "report.md").read_text()
    assert table in text and "1,000 images (1000 samples, 2 skipped)" in text and "commit abc" in text
    assert "retrieval: other" in text  # not only the primary metrics
    (figure,) = figures
    heights = [[bar.get_height() for bar in bars] for bars in figure.axes[0].containers]
    assert heights == [[50, 50], [62.5, 50]]  # a color a model, a place a task
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["retrieval\nR@1", "pairs\nR@1"]
    assert PIL.Image.open(tmp_path / "report.png").size == pytest.approx(130 * figure.get_size_inches(), abs=1)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "no results"),
        ([result("a"), result("a")], "two results of 'a' on retrieval"),
        ([result("a"), result("b", num_samples=999)], "num_samples is 1000 for 'a' but 999 for 'b'"),
        ([result("a"), result("b", protocol="all")], "protocol is '1,000 images' for 'a' but 'all' for 'b'"),
        ([result("a"), result("b", metrics={"recall": 0.5})], "'b' and 'a' need the same metrics"),
        ([result("a"), result("b", metrics={"recall": 0.5, "other": 0.5, "more": 1})], "need the same metrics"),
        ([result("a", metrics={"other": 0.5})], "with the primary ones"),
        ([result("a", value=float("nan"))], "recall of 'a' is not finite"),
        ([result("a", data={"split": "test"}), result("b", data={"split": "train"})], "data is .*test.* but .*train"),
        ([result("a", num_captions=5), result("b", num_captions=6)], "num_captions is 5 for 'a' but 6 for 'b'"),
        ([result("a", weights="1"), result("a", "pairs", weights="2")], "'a' has results of different models: weights"),
        ([result("a"), result("a", "pairs", dtype="bfloat16")], "'a' has results of different models: dtype"),
        (
            [result("a", depends_on_batch=True, batch_size=8), result("a", "pairs", batch_size=9)],
            "'a' has results of different models: batch_size is 8 on retrieval but 9 on pairs",
        ),
        ([result("a", value=1e308)], "recall of 'a' is not finite, or no share from 0 to 1"),
        ([result("a", value=-0.5)], "no share from 0 to 1"),
        ([3], "a result is a dictionary or a file, not 3"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, results, message):
    with pytest.raises(ValueError, match=message):
        write_report(results, tmp_path)


def test_a_partial_set_of_results_makes_a_partial_report(tmp_path, figures):
    """The first model lacks a task, another one the baseline's; no cell is a score of something else."""
    results = [result("dense"), result("sparse", "pairs", value=0.75), result("sparse", value=0.625)]
    results += [result("wide", "pairs", value=0.25)]
    table = write_report(results, tmp_path, baseline="dense")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["model", "retrieval: R@1", "pairs: R@1"]
    assert rows[2:] == [["dense", "50.0%", ""], ["sparse", "62.5% (+12.5 ± 4.3)", "75.0%"], ["wide", "", "25.0%"]]
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"\| pairs: other +\| +\| 25.0% +\| 25.0% +\|", text) and "- pairs: 1,000 images" in text
    (figure,) = figures
    heights = [[bar.get_height() for bar in bars] for bars in figure.axes[0].containers]
    np.testing.assert_equal(heights, [[50, np.nan], [62.5, 75], [np.nan, 25]])
    assert [text.get_text() for text in figure.axes[0].texts] == ["50", "", "62", "75", "", "25"]


def test_unknown_baseline(tmp_path):
    with pytest.raises(ValueError, match="'b' has no results; there are a"):
        write_report([result("a")], tmp_path, baseline="b")


def test_command(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(result("a")))
    report.main([str(tmp_path / "a.json"), "--output-dir", str(tmp_path / "out")])
    table = capsys.readouterr().out
    assert table.splitlines()[2].split("|")[1:3] == [" a     ", " 50.0%          "]
    assert table in (tmp_path / "out" / "report.md").read_text()
    write_report([result("a")], tmp_path / "same")
    for name in ("report.md", "report.png"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "x.json is no JSON that can be read"),
        ("[" * 100_000, "x.json is no JSON that can be read"),
        ("[" * 900 + "]" * 900, "nested in more than 50 levels"),
        ("1" * 5000, "x.json is no JSON that can be read"),
        ("{}", "lacks model"),
        ("3", "holds no JSON object"),
        ("null", "holds no JSON object"),
        ("[]", "holds no JSON object"),
    ],
)
def test_files_that_are_no_results(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(SystemExit) as exit:
        report.main([str(tmp_path / "x.json"), "--output-dir", str(tmp_path)])
    assert message in exit.value.code


def test_a_folder_is_no_result(tmp_path):
    with pytest.raises(SystemExit) as exit:
        report.main([str(tmp_path), "--output-dir", str(tmp_path)])
    assert exit.value.code == f"error: {tmp_path} is a folder: name the results in it, as {tmp_path}/*.json"


@pytest.mark.parametrize("key", sorted(set(result("a"))))
def test_every_part_of_a_result_is_needed(tmp_path, key):
    (tmp_path / "x.json").write_text(json.dumps({k: v for k, v in result("a").items() if k != key}))
    with pytest.raises(SystemExit) as exit:
        report.main([str(tmp_path / "x.json"), "--output-dir", str(tmp_path)])
    assert f"it lacks {key}" in exit.value.code


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": {"recall": "good", "other": 0.5}}, "metrics.recall is 'good'"),
        ({"metrics": {"recall": None, "other": 0.5}}, "metrics.recall is None"),
        ({"metrics": {"recall": True, "other": 0.5}}, "metrics.recall is True"),
        ({"metrics": {"recall": 10**400, "other": 0.5}}, "metrics.recall is 1000"),
        ({"metrics": None}, "metrics is None"),
        ({"metrics": [0.5]}, "metrics is [0.5]"),
        ({"primary": {}}, "primary is {}"),
        ({"primary": ["recall"]}, "primary is ['recall']"),
        ({"model": ["a"]}, "model is ['a']"),
        ({"model": ""}, "model is ''"),
        ({"title": "\ud800"}, "title is '\\ud800'"),
        ({"task": None}, "task is None"),
        ({"num_samples": "many"}, "num_samples is 'many'"),
        ({"versions": "2"}, "versions is '2'"),
    ],
)
def test_parts_of_the_wrong_kind(tmp_path, change, message):
    (tmp_path / "x.json").write_text(json.dumps(result("a") | change))
    with pytest.raises(SystemExit) as exit:
        report.main([str(tmp_path / "x.json"), "--output-dir", str(tmp_path / "out")])
    assert exit.value.code.startswith("error: ") and message in exit.value.code and "x.json" in exit.value.code
    with pytest.raises(ValueError):
        write_report([result("a") | change], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["file", "file/below"])
def test_an_output_folder_that_cannot_be_made(tmp_path, part):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "x.json").write_text(json.dumps(result("a")))
    with pytest.raises(SystemExit) as exit:
        report.main([str(tmp_path / "x.json"), "--output-dir", str(tmp_path / part)])
    assert exit.value.code.startswith("error: ") and "file" in exit.value.code
    assert (tmp_path / "file").read_text() == "mine"


def test_a_bar_in_a_name_is_no_column(tmp_path):
    assert r"a\|b" in write_report([result("a|b")], tmp_path).splitlines()[2]


HOSTILE = [
    "a|b",
    "a\\|b",
    "two\nlines\r\n\n| of | a table |",
    "$\\frac{$",
    "$x",
    "a $ and a $",
    "_x_",
    "`code",
    "<script>alert(1)</script>",
    "[here](javascript:alert)",
    "![](http://example.org/counter.png)",
    "&lt;b&gt;",
    "🙂 汉字",
    "\x00\x1b[31mred\u202e",
    "x" * 10_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
def test_any_text_is_only_text(tmp_path, text):
    """In names of models, tasks and titles: the table keeps its shape, nothing is markup, and the picture its size."""
    results = [
        result(model, task, title=f"{text} {task}", primary={"recall": text}, protocol=text, source=text, dtype=text)
        for model in (text, "plain")
        for task in (text, "pairs")
    ]
    table = write_report(results, tmp_path, baseline=text)
    assert len(table.splitlines()) == 4
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    tables = [line for line in written.splitlines() if line.startswith("|")]
    # A bar is escaped if an odd number of backslashes stands before it.
    counts = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in tables]
    assert counts == [4] * 4 + [4] * 6
    assert len(written.splitlines()) == 26
    unescaped = re.sub(r"\\.", "", written)
    assert not re.search(r"[`<$]|\]\(j|\]\(h|_x_|&lt;", unescaped)
    width, height = PIL.Image.open(tmp_path / "report.png").size
    assert width < 2000 and height < 2000


def test_every_model_is_in_the_legend(tmp_path, figures):
    """matplotlib leaves out labels that begin with an underscore."""
    write_report([result("_x_"), result("$y$"), result("z")], tmp_path)
    labels = [text.get_text().strip() for text in figures[0].axes[0].get_legend().get_texts()]
    assert labels == ["_x_", r"\$y\$", "z"]


def test_a_picture_of_many_models_and_tasks_is_not_endless(tmp_path):
    results = [result(f"model {i} {'long ' * 20}", f"task {j}") for i in range(20) for j in range(20)]
    write_report(results, tmp_path)
    width, height = PIL.Image.open(tmp_path / "report.png").size
    assert width <= 10_000 and height <= 3_000


def test_texts_in_tables_and_pictures():
    table = markdown_table(["a_b: R@1", "**50.1%**"], [["a\nb", "5.0% ± 1"]])
    assert table.splitlines()[0].split("|")[1:3] == [" a_b: R@1 ", " **50.1%** "]  # what needs no escape has none
    assert table.splitlines()[2].startswith("| a b ")
    assert [plot_text(text) for text in ("a_b", "_a", "a$b", "a\nb", "x" * 50)] == [
        "a_b", " _a", r"a\$b", "a b", "x" * 39 + "…"
    ]  # fmt: skip


def test_columns_of_one_title_are_told_apart(tmp_path):
    results = [result("a", "retrieval-x", title="retrieval"), result("a", "retrieval-y", title="retrieval")]
    header = write_report(results, tmp_path).splitlines()[0]
    assert "retrieval (retrieval-x): R@1" in header and "retrieval (retrieval-y): R@1" in header


def test_all_that_the_results_of_a_model_were_computed_with(tmp_path):
    write_report([result("a"), result("a", "pairs", commit="def")], tmp_path)
    assert all(f"commit {commit}, torch 2" in (tmp_path / "report.md").read_text() for commit in ("abc", "def"))


def test_the_best_of_several_models_has_no_weights():
    """Who looks for the scores of a model by its weights must not find those of an oracle."""
    results = [result("a", value=0.5, weights="1", fingerprint="2"), result("b", value=0.6, weights="3")]
    (best,) = best_of(results, "best", ["a", "b"])
    assert best["metrics"]["recall"] == 0.6 and not {"weights", "fingerprint"} & set(best)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(result("a"))), anything, max_size=3), anything)
def test_whatever_is_in_a_file_is_a_result_or_an_error(tmp_path_factory, change, other):
    path = tmp_path_factory.getbasetemp() / "any.json"
    for content in (result("a") | change, other):
        path.write_text(json.dumps(content))
        try:
            table = arrange([path])
        except ValueError:
            continue
        assert all(
            isinstance(value, int | float) for value in table[content["model"]][content["task"]]["metrics"].values()
        )


@given(st.text(st.characters(), max_size=60))
def test_whatever_is_in_a_text_is_one_cell_and_one_label(text):
    table = markdown_table(["model", text], [[text, "50.0%"]])
    lines = table.split("\n")
    assert len(table.splitlines()) == len(lines) == 3
    assert all(re.sub(r"\\.", "", line).count("|") == 3 for line in lines)
    label = plot_text(text)
    assert label.isprintable() and len(label.replace(r"\$", "$")) <= 41 and not re.search(r"(?<!\\)\$", label)
