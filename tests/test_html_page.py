"""A page holds all that its markdown says, and what is inside runs nothing and loads nothing."""

import base64
import html
import json
import re

import pytest
import small_evaluation
from hypothesis import given
from hypothesis import strategies as st
from test_report import HOSTILE, result

from evaluation import report
from evaluation.html_page import html_page
from evaluation.report import markdown_table, write_report
from evaluation.seeds import write_seeds
from records.markdown import escape, item, one_line

figures = small_evaluation.figures

# What is more than text, at the start of a line or anywhere
MARKS = [*HOSTILE[:-1], *("__a__", "a__b_", "# big", "1. one", "- less", "> so", "+ 1", "---", "2)", "===", "***")]


def cells(page):
    """The texts of a page's cells, and their classes."""
    found = re.findall(r'<t[dh](?: class="(\w+)")?>(.*?)</t[dh]>', page)
    return [(html.unescape(text), outcome) for outcome, text in found]


def write_runs(tmp_path, *scores):
    """A folder of results for each seed, with the scores of two models."""
    folders = [tmp_path / f"seed {seed}" for seed in range(len(scores[0]))]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        for model, of_model in zip(("dense", "sparse"), scores, strict=True):
            content = json.dumps(result(model, value=of_model[seed]))
            (folder / f"retrieval--{model}.json").write_text(content)
    return folders


def test_report(tmp_path):
    results = [result("dense"), result("sparse", value=0.625), result("worse", value=0.25), result("same")]
    write_report(results, tmp_path / "scores", baseline="dense")
    page = (tmp_path / "scores" / "report.html").read_text(encoding="utf-8")
    assert cells(page)[:10] == [
        ("model", ""), ("retrieval: R@1", ""),
        ("dense", ""), ("50.0%", ""),
        ("sparse", ""), ("62.5% (+12.5 ± 4.3)", "better"),
        ("worse", ""), ("25.0% (-25.0 ± 4.1)", "worse"),
        ("same", ""), ("50.0% (+0.0 ± 4.4)", ""),
    ]  # fmt: skip
    (picture,) = re.findall(r'<img src="data:image/png;base64,(\S+)" alt="scores"', page)
    assert base64.b64decode(picture) == (tmp_path / "scores" / "report.png").read_bytes()
    assert "<title>scores report</title>" in page and "<h2>How it was measured</h2>" in page


def test_seeds(tmp_path, figures):
    """A difference is better or worse where it exceeds its interval."""
    folders = write_runs(tmp_path, (0.5, 0.5, 0.5), (0.60, 0.62, 0.67))
    write_seeds(folders, tmp_path / "out", baseline="dense")
    page = (tmp_path / "out" / "seeds.html").read_text(encoding="utf-8")
    assert cells(page)[3::2] == [("50.0 ± 0.0", ""), ("63.0 ± 3.6 (+13.0 ± 9.0)", "better")]
    (picture,) = re.findall(r'<img src="data:image/png;base64,(\S+)" alt="mean and spread"', page)
    assert base64.b64decode(picture) == (tmp_path / "out" / "seeds.png").read_bytes()
    assert "![mean and spread](seeds.png)" in (tmp_path / "out" / "seeds.md").read_text()
    dense, sparse = (line.get_segments()[0] for line in figures[0].axes[0].collections)  # error bars
    assert [dense[0][1], dense[1][1]] == [50, 50]
    assert [sparse[0][1], sparse[1][1]] == pytest.approx([63 - 3.6056, 63 + 3.6056], abs=1e-3)

    (tmp_path / "noise").mkdir()
    write_seeds(write_runs(tmp_path / "noise", (0.5, 0.5), (0.4, 0.62)), tmp_path / "out", baseline="dense")
    page = (tmp_path / "out" / "seeds.html").read_text(encoding="utf-8")
    assert cells(page)[-1] == ("51.0 ± 15.6 (+1.0 ± 139.8)", "")


@pytest.mark.parametrize("text", MARKS, ids=range(len(MARKS)))
@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
def test_names_are_text(tmp_path, text):
    """Of a model, a task and a metric: each stands in its cell or line as it is, and makes no element."""
    named = {"title": text, "primary": {"recall": text}, "protocol": text, "source": text}
    write_report([result(text, text, **named), result("plain", text, **named)], tmp_path, baseline=text)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    expected = {text, f"{text}: {text}", f"{text}: recall"}
    assert {one_line(cell) for cell in expected} <= {cell for cell, _ in cells(page)}
    lines = [html.unescape(line) for line in re.findall(r"<li>(.*?)</li>", page)]
    assert lines[0].startswith(one_line(f"{text}: {text} (1000 samples")) and len(lines) == 3
    body = page[page.index("<body>") :]
    elements = "body h1 h2 table thead tbody tr th td p img ul li".split()
    assert set(re.findall(r"<(\w+)", body)) == set(elements) and body.count("<img") == 1


@given(st.text(max_size=30) | st.text("_*#-+>=.)1 a\\|`<[]!&;~", max_size=12))
def test_whatever_is_in_a_text_is_shown_as_it_is(text):
    page = html_page(f"{markdown_table(['a', 'b'], [[text, 'c']])}\n\n{item(text)}\n{item('end')}", {}, text)
    assert cells(page)[2] == (one_line(text), "")
    assert [html.unescape(line) for line in re.findall(r"<li>(.*?)</li>", page)] == [one_line(text), "end"]


def test_a_page_runs_nothing_and_loads_nothing(tmp_path):
    page = html_page("<script>alert(1)</script>\n\n<b onclick='a()'>x</b>", {}, "</title><script>")
    assert "<script" not in page and "<b " not in page and "&lt;script&gt;" in page
    assert "content=\"default-src 'none'; img-src data:;" in page and "http" not in page.replace("http-equiv", "")
    with pytest.raises(ValueError, match="there is no picture b.png for the page; there are a.png"):
        html_page("![x](b.png)", {"a.png": tmp_path / "a.png"}, "x")


def test_ordinary_texts_need_no_escape():
    assert escape("CLIP-MoE_4, k=2 (a_b)") == "CLIP-MoE_4, k=2 (a_b)" and item("0.5 and 3 - 2") == "- 0.5 and 3 - 2"


def test_command(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(result("a")))
    report.main([str(tmp_path / "a.json"), "--output-dir", str(tmp_path / "out")])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.md", "report.png", "report.html"}
