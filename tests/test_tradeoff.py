"""What was learned against what was kept, by hand."""

import json

import pytest

from evaluation.tradeoff import above_line, write_tradeoff

LINE = [(90, 0), (80, 20), (40, 60), (0, 50)]  # kept, learned


@pytest.mark.parametrize(
    ("point", "above"),
    [
        ((85, 10), 0),  # on it
        ((60, 60), 20),  # between two of its points, 40
        ((20, 55), -5),  # where it learned less for forgetting more, what kept more counts
        ((95, 5), 5),  # nothing on it keeps so much: the base, which learned nothing
        ((-1, 40), -20),
    ],
)
def test_above_a_line(point, above):
    assert above_line(point, LINE) == pytest.approx(above)


def test_above_a_line_that_comes_back():
    assert above_line((50, 30), [(60, 0), (40, 10), (55, 40)]) == pytest.approx(30 - 40)


@pytest.fixture
def folder(tmp_path):
    """A base, a line of three points, and a model that is 5, 6 and 7 points above it."""

    def of(*scores):
        return [{"image_to_text_recall@1": one / 100, "text_to_image_recall@1": one / 100} for one in scores]

    models = {
        "base": (of(0, 0, 0), of(100, 100, 100)),
        "dense, 50 %": (of(40, 40, 40), of(80, 80, 80)),
        "dense, 100 %": (of(60, 60, 60), of(20, 20, 20)),
        "sparse": (of(45, 46, 47), of(80, 80, 80)),
    }
    scores = {model: {"names_learned": learned, "names_kept": kept} for model, (learned, kept) in models.items()}
    (tmp_path / "seeds.json").write_text(json.dumps(scores))
    return tmp_path


def test_page_of_a_line_in_any_order(folder):
    scores = json.loads((folder / "seeds.json").read_text())
    (folder / "seeds.json").write_text(json.dumps({name: scores[name] for name in reversed(scores)}))
    rows = write_tradeoff(folder, "names_learned", "names_kept", "base").splitlines()
    assert [row.split()[-4:-1] for row in rows if "sparse" in row] == [["+6.0", "±", "2.5"]]


def test_page(folder):
    table = write_tradeoff(folder, "names_learned", "names_kept", "base")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["model", "learned", "kept", "above dense"]
    assert rows[2:] == [
        ["base", "0.0 ± 0.0", "100.0 ± 0.0", ""],
        ["dense, 100 %", "60.0 ± 0.0", "20.0 ± 0.0", ""],
        ["sparse", "46.0 ± 1.0", "80.0 ± 0.0", "+6.0 ± 2.5"],  # t = 4.30 of 1 / sqrt(3)
    ]
    assert table in (folder / "tradeoff.md").read_text() and (folder / "tradeoff.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("names_learned", "names_kept", "bass"), "no model 'bass'; there are base"),
        (("names_256", "names_kept", "base"), "'base' has no results of 'names_256'"),
    ],
)
def test_faults(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_tradeoff(folder, *arguments)


def test_no_line(folder):
    scores = json.loads((folder / "seeds.json").read_text())
    (folder / "seeds.json").write_text(json.dumps({name: scores[name] for name in ("base", "sparse")}))
    with pytest.raises(ValueError, match="no line of weight averages"):
        write_tradeoff(folder, "names_learned", "names_kept", "base")
