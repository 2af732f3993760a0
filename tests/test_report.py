"""Results side by side."""

import json

import PIL.Image
import pytest

from evaluation import report
from evaluation.report import write_report


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


def test_table_and_picture(tmp_path):
    results = [result("dense"), result("sparse", value=0.625), result("dense", "pairs"), result("sparse", "pairs")]
    table = write_report(results, tmp_path, baseline="dense")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["model", "retrieval: R@1", "pairs: R@1"]
    assert rows[2:] == [["dense", "50.0%", "50.0%"], ["sparse", "62.5% (+12.5)", "50.0% (+0.0)"]]
    text = (tmp_path / "report.md").read_text()
    assert table in text and "1,000 images (1000 samples, 2 skipped)" in text and "commit abc" in text
    assert "retrieval: other" in text  # not only the primary metrics
    assert PIL.Image.open(tmp_path / "report.png").size[0] > 300


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "no results"),
        ([result("a"), result("a")], "two results of 'a' on retrieval"),
        ([result("a"), result("b", num_samples=999)], "num_samples is 1000 for 'a' but 999 for 'b'"),
        ([result("a"), result("b", protocol="all")], "protocol is '1,000 images' for 'a' but 'all' for 'b'"),
        ([result("a"), result("a", "pairs"), result("b")], "'b' has no result on pairs"),
        ([result("a"), result("b", metrics={"recall": 0.5})], "'b' and 'a' need the same metrics"),
        ([result("a"), result("b", metrics={"recall": 0.5, "other": 0.5, "more": 1})], "need the same metrics"),
        ([result("a", metrics={"other": 0.5})], "with the primary ones"),
        ([result("a", value=float("nan"))], "recall of 'a' is not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, results, message):
    with pytest.raises(ValueError, match=message):
        write_report(results, tmp_path)


def test_unknown_baseline(tmp_path):
    with pytest.raises(ValueError, match="'b' has no results; there are a"):
        write_report([result("a")], tmp_path, baseline="b")


def test_command(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(result("a")))
    report.main([str(tmp_path / "a.json"), "--output-dir", str(tmp_path / "out")])
    assert "50.0%" in capsys.readouterr().out and (tmp_path / "out" / "report.png").is_file()


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("{}", "lacks model"), ("3", "holds no JSON object"), ("null", "holds no JSON object")],
)
def test_files_that_are_no_results(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(SystemExit) as exit:
        report.main([str(tmp_path / "x.json"), "--output-dir", str(tmp_path)])
    assert message in exit.value.code


@pytest.mark.parametrize("key", sorted(set(result("a"))))
def test_every_part_of_a_result_is_needed(tmp_path, key):
    (tmp_path / "x.json").write_text(json.dumps({k: v for k, v in result("a").items() if k != key}))
    with pytest.raises(SystemExit) as exit:
        report.main([str(tmp_path / "x.json"), "--output-dir", str(tmp_path)])
    assert f"it lacks {key}" in exit.value.code


def test_a_bar_in_a_name_is_no_column(tmp_path):
    assert r"a\|b" in write_report([result("a|b")], tmp_path).splitlines()[2]
