"""Results side by side, as markdown, as a picture and as a page that runs nothing and loads nothing."""

import base64
import html
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from clip_moe.engine.intervals import difference_reach, score_reach, share_reach
from clip_moe.engine.markdown import escape, item
from clip_moe.engine.messages import one_line
from clip_moe.evaluation.answer import answer
from clip_moe.evaluation.benchmarks.specs import GROUPS
from clip_moe.evaluation.commands import report
from clip_moe.evaluation.figures import plot_text
from clip_moe.evaluation.page import html_page
from clip_moe.evaluation.report import chance_sentences, write_report
from lab.law.estimate import CountedCaptions


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


def cells(page):
    """The texts of a page's cells, and their classes."""
    found = re.findall(r'<t[dh](?: class="(\w+)")?>(.*?)</t[dh]>', page)
    return [(html.unescape(text), outcome) for outcome, text in found]


def lines_of(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_what_is_not_above_chance_is_named():
    """50 of 1,000 right are above chance of 1 in 50 by more than the interval, 25 are not."""
    known, unknown = (result("m", value=share, chance={"recall": 0.02, "other": 1}) for share in (0.05, 0.025))
    assert chance_sentences([known, result("m", value=0.0)]) == []
    sentence = "Not shown to be above chance in retrieval (R@1 2.0%): *m*, *n*."
    assert chance_sentences([known, unknown, unknown | {"model": "n"}]) == [sentence]


def test_table_picture_and_page(tmp_path, figures, capsys):
    """The first model lacks a task, another one the baseline's; no cell is a score of something else."""
    results = [result("dense"), result("sparse", "pairs", value=0.75), result("sparse", value=0.625)]
    results += [result("wide", "pairs", value=0.25), result("worse", value=0.25, commit="def")]
    for number, content in enumerate(results):
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    (tmp_path / "manifest.json").write_text("{}")  # as in the folder of an evaluate stage
    files = [str(tmp_path / f"{number}.json") for number in range(5)] + [str(tmp_path / "manifest.json")]
    report.main([*files, "--output_dir", str(tmp_path / "scores"), "--baseline", "dense"])
    table = capsys.readouterr().out
    assert lines_of(table)[0] == ["model", "retrieval: R@1", "pairs: R@1"]
    assert lines_of(table)[2:] == [
        ["dense", "50.0%", ""],
        ["sparse", "62.5% (+12.5 ± 4.3)", "75.0%"],
        ["wide", "", "25.0%"],
        ["worse", "25.0% (-25.0 ± 4.2)", ""],
    ]
    assert {path.name for path in (tmp_path / "scores").iterdir()} == {"report.md", "report.svg", "report.html"}
    text = (tmp_path / "scores" / "report.md").read_text()
    assert table in text and "1,000 images (1000 samples, 2 skipped)" in text
    same = ", ".join(f"{model} (folder/{model})" for model in ("dense", "sparse", "wide"))
    assert f"- {same}: float32, commit abc, torch 2\n- worse (folder/worse): float32, commit def, torch 2" in text
    assert re.search(r"\| pairs: other +\| +\| 25.0% +\| 25.0% +\|", text)  # not only the primary metrics
    page = (tmp_path / "scores" / "report.html").read_text(encoding="utf-8")
    assert ("62.5% (+12.5 ± 4.3)", "better") in cells(page) and ("25.0% (-25.0 ± 4.2)", "worse") in cells(page)
    assert ("75.0%", "") in cells(page) and "<title>scores report</title>" in page
    (picture,) = re.findall(r'<img src="data:image/svg\+xml;base64,(\S+)" alt="scores"', page)
    assert base64.b64decode(picture) == (tmp_path / "scores" / "report.svg").read_bytes()
    low, high = figures[0].axes[0].get_xlim()  # where the scores are
    assert 15 < low < 25 - 2 and 75 + 2 < high < 85
    dots = [container.lines[0].get_data() for container in figures[0].axes[0].containers]
    np.testing.assert_equal([x for x, _ in dots], [[50, 62.5, np.nan, 25], [np.nan, 75, 25, np.nan]])
    (bar, *_) = figures[0].axes[0].containers[0].lines[2][0].get_segments()
    np.testing.assert_allclose(bar[:, 0], [50 - 196 * 0.5 / 1000**0.5, 50 + 196 * 0.5 / 1000**0.5], atol=0.01)


def test_many_tasks_have_a_line_each_and_the_means_of_papers(tmp_path, figures):
    """The mean over MoDE's 26 tasks takes the mean per class where there is one. Of a table that was measured in part
    there is none."""
    results = [
        result(model, task, value=share + number / 1000, primary={"recall": "accuracy"}, title=task)
        for model, share in (("dense", 0.25), ("sparse", 0.5))
        for number, task in enumerate(GROUPS["mode_26"])
    ]
    pets = GROUPS["mode_26"].index("pets")
    for pets_result in (results[pets], results[pets + 26]):
        pets_result["metrics"] = {"recall": 0.1, "mean_per_class_recall": 0.125}
        pets_result["primary"] = {"recall": "accuracy", "mean_per_class_recall": "mean per class"}
    header, _, *lines = lines_of(write_report(results, tmp_path, baseline="dense"))
    assert header == ["task", "dense", "sparse"] and len(lines) == 28
    assert lines[0] == ["imagenet1k: accuracy", "25.0%", "50.0% (+25.0 ± 4.2)"]
    mean = sum(0.125 if number == pets else 0.25 + number / 1000 for number in range(26)) / 26
    sparse = f"{mean + 0.25 * 25 / 26:.1%} (+{25 * 25 / 26:.1f})"
    assert lines[-1] == ["mean of 26 benchmarks (mode_26)", f"{mean:.1%}", sparse]
    assert len(figures[0].axes[0].get_yticks()) == 28


def test_one_picture_shows_no_difference(tmp_path, figures):
    """Neither does one that all models miss; bars reach to what is possible. Within its interval none is colored."""
    write_report([result("a"), result("b", value=0.52)], tmp_path, baseline="a")
    assert ("52.0% (+2.0 ± 4.4)", "") in cells((tmp_path / "report.html").read_text())
    results = [result(model, value=value, num_samples=1) for model, value in (("a", 0), ("b", 1), ("c", 0))]
    write_report(results, tmp_path, baseline="a")
    shown = [cell for cell in cells((tmp_path / "report.html").read_text()) if "(" in cell[0]]
    assert shown == [("100.0% (+100.0 ± 112.2)", ""), ("0.0% (+0.0 ± 79.3)", "")]
    bars = [bar for container in figures[-1].axes[0].containers for bar in container.lines[2][0].get_segments()]
    np.testing.assert_allclose([bar[:, 0] for bar in bars], [[0, 79.35], [20.65, 100], [0, 79.35]], atol=0.01)


def test_a_score_of_pairs_has_an_interval_and_a_mean_of_groups_that_of_their_own(tmp_path):
    """Without the numbers of samples of the groups it has none."""
    for number, (metric, sizes, error) in enumerate(
        [("group", {}, " ± 4.2"), ("accuracy", {}, ""), ("accuracy", {"color": 16, "size": 64}, " ± 16.6")]
    ):
        metrics = {metric: 0.375, f"{metric}/color": 0.25, f"{metric}/size": 0.5}
        changes = {"metrics": metrics, "primary": {metric: metric}, "group_samples": sizes}
        table = write_report([result(model, **changes) for model in "ab"], tmp_path / str(number), baseline="a")
        assert f"37.5% (+0.0{error})" in table
    parts = [difference_reach(share, share, number)[0] for share, number in ((0.25, 16), (0.5, 64))]
    assert 100 * (parts[0] ** 2 + parts[1] ** 2) ** 0.5 / 2 == pytest.approx(16.6, abs=0.05)


def test_intervals_are_the_published_ones():
    """Newcombe 1998, Statistics in Medicine 17, pages 873 to 890, Table II, method 10."""
    for share, other, number, low, high in (
        *((0.9, 0.3, 10, 0.1705, 0.8090), (6 / 7, 2 / 7, 7, 0.0582, 0.8062)),
        *((0, 0, 10, -0.2775, 0.2775), (1, 0, 10, 0.6075, 1.0)),
    ):
        below, above = difference_reach(share, other, number)
        assert (share - other - below, share - other + above) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([result("a"), result("a")], "two results of 'a' on retrieval"),
        ([result("a"), result("b", num_samples=999)], "num_samples is 1000 for 'a' but 999 for 'b'"),
        ([result("a"), result("b", metrics={"recall": 0.5})], "'b' and 'a' need the same metrics"),
        ([result("a", value=float("nan"))], "recall of 'a' is not a finite number"),
        ([result("a", num_samples=0)], "num_samples Input should be greater than 0"),
        ([result("a", data={"split": "test"}), result("b", data={"split": "train"})], "data is .*test.* but .*train"),
        ([result("a", weights="1"), result("a", "pairs", weights="2")], "'a' has results of different models: weights"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, results, message):
    with pytest.raises(ValueError, match=message):
        write_report(results, tmp_path / "out")
    with pytest.raises(ValueError, match="'b' has no results, only a"):
        write_report([result("a")], tmp_path / "out", baseline="b")
    assert not (tmp_path / "out").exists()


# What is more than text, at the start of a line or anywhere
HOSTILE = [
    *("a|b", "a\\|b", "two\nlines\r\n\n| of | a table |", "$\\frac{$", "$x", "a $ and a $", "_x_", "`code"),
    *("<script>alert(1)</script>", "[here](javascript:alert)", "![](http://example.org/counter.png)", "&lt;b&gt;"),
    *("![x](y.jpg)", "![x](y.jpg)|`c` <b>", "[x]: y.jpg", "~~~", "***", "\\", "<http://a.b>", "+ more", "1) one"),
    *("🙂 汉字", "\x00\x1b[31mred\u202e", "x" * 10_000, "__a__", "# big", "1. one", "- less", "> so", "---", "==="),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
def test_any_text_is_only_text(tmp_path, text, figures):
    """In names of models, tasks and titles: tables keep their shape, nothing is markup, and the picture its size."""
    results = [
        result(model, task, title=f"{text} {task}", primary={"recall": text}, protocol=text, source=text, dtype=text)
        for model in (text, "_plain_")
        for task in (text, "pairs")
    ]
    assert len(write_report(results, tmp_path, baseline=text).splitlines()) == 4
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    tables = [line for line in written.splitlines() if line.startswith("|")]
    # A bar is escaped if an odd number of backslashes stands before it.
    assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in tables] == [4] * 4 + [4] * 6
    assert len(written.splitlines()) == 25
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert {one_line(cell) for cell in (text, f"{text}: recall")} <= {cell for cell, _ in cells(page)}
    items = [html.unescape(line) for line in re.findall(r"<li>(.*?)</li>", page)]
    assert items[0].startswith(one_line(f"{text}: {text} (1000 samples")) and len(items) == 3
    body = page[page.index("<body>") :]
    elements = "body h1 h2 table thead tbody tr th td p img ul li".split()
    assert set(re.findall(r"<(\w+)", body)) == set(elements) and body.count("<img") == 1
    picture = ElementTree.parse(tmp_path / "report.svg").getroot()
    assert picture.get("width") == "374.4pt" and float(picture.get("height")[:-2]) < 400
    # matplotlib leaves out labels that begin with an underscore
    assert len(figures[0].legends[0].get_texts()) == 2
    assert figures[0].axes[0].get_yticklabels()[1].get_text() == " _plain_"


ROWS = ("base", "dense", "sparse")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_any_text_is_only_text_outside_of_reports(text):
    """In sentences of an answer and an estimate, in lists and alone in a line."""
    scores = {model: result(model, "learned", title=text, primary={"recall": text}) for model in ROWS}
    answered = answer(list(scores.values()), ["learned"], dict.fromkeys(ROWS, text), ["sparse"])
    parts = [
        f"**{answered.verdict}** {answered.advice}",
        answered.details,
        CountedCaptions(text, 3, 3, 2).sentence,
        item(text),
        escape(text),
    ]
    page = html_page("\n\n".join(parts), {}, text)
    body = page[page.index("<body>") :]
    assert set(re.findall(r"<(\w+)", body)) <= set("body p strong em code table thead tbody tr th td ul li".split())
    assert body.count("<p>") == 6 and body.count("<li>") == 1
    shown = one_line(text)
    assert body.endswith(f"<p>{html.escape(shown, quote=False).replace(chr(34), '&quot;')}</p>\n</body>\n</html>\n")
    assert f"<code>{html.escape(shown.replace('`', chr(39)), quote=False)}</code>" in body


def test_a_page_loads_and_runs_nothing():
    page = html_page("<script>alert(1)</script>\n\n<b onclick='a()'>x</b>", {}, "</title><script>")
    assert "<script" not in page and "<b " not in page and "&lt;script&gt;" in page
    assert "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "data:" not in html_page("![x](y.jpg)", {}, "page").partition("<body>")[2]  # a picture that is not its own


def test_columns_of_one_title_are_told_apart(tmp_path):
    """And long names that differ at their ends, in pictures."""
    assert escape("CLIP-MoE_4, k=2 (a_b)") == "CLIP-MoE_4, k=2 (a_b)"  # what needs no escape has none
    results = [result("a", f"retrieval-{task}", title="retrieval") for task in "xy"]
    header = write_report(results, tmp_path).splitlines()[0]
    assert "retrieval (retrieval-x): R@1" in header and "retrieval (retrieval-y): R@1" in header
    results[1]["title"] = "retrieval "  # which a table shows alike
    assert header == write_report(results, tmp_path).splitlines()[0]
    short = {plot_text(f"{'a long title ' * 6}, {part}", 60) for part in range(3)}
    assert len(short) == 3 and set(map(len, short)) == {60}


@pytest.mark.parametrize("metric", ["image_to_text_recall@1", "text_to_image_recall@1"])
@pytest.mark.parametrize(("images", "captions"), [(200, 10), (10, 50)])
def test_queries_of_one_caption_or_image_count_once(metric, images, captions):
    """They rise and fall together: 200 pictures of 10 captions, or 50 captions of 10 pictures, count as 10."""
    repeated = result("a", metrics={metric: 0.5}, num_samples=images, num_captions=captions)
    assert score_reach(repeated, metric) == share_reach(0.5, 10)
