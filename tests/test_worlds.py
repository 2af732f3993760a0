"""All built-in worlds: how a recipe names them, their kinds and their tasks."""

import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from types import SimpleNamespace

import datasets
import numpy as np
import PIL.Image
import pytest
from documents import ROOT, blocks
from small_evaluation import small_tasks  # noqa: F401 (fixture)
from tiny_clip import error_of

import clip_moe
from clip_moe.conversion.stages.initialize import InitializeStage
from clip_moe.data import draw, icons, symbols
from clip_moe.data.arguments import DataArguments
from clip_moe.data.contact_sheet import contact_sheet
from clip_moe.data.drawing import png
from clip_moe.data.identity import identity
from clip_moe.data.local_data import missing_data
from clip_moe.data.pairs import load_pairs
from clip_moe.data.symbol_kinds import TOPIC_OF, TOPICS
from clip_moe.data.worlds import WORLDS, world
from clip_moe.evaluation.built_in_tasks import icon_tasks, symbol_tasks
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.report import write_report
from clip_moe.evaluation.tasks import TASKS, find_tasks, require_tasks, task_fingerprints

PAGE = ROOT / "docs" / "worlds.md"
ALL_TASKS = list(TASKS)  # tests have smaller ones
NO_ICONS = pytest.mark.skipif(find_spec("resvg_py") is None, reason="what icons need is not installed")
EACH = pytest.mark.parametrize("name", [pytest.param(n, marks=NO_ICONS) if n == "icons" else n for n in WORLDS])


def require_parts(drawn):
    """A world has what others need of it."""
    rows = drawn.load("test", drawn.caption_styles[-1], 3)
    assert rows.column_names == ["image", "caption", *drawn.attributes] and drawn.attributes[0] == "kind"
    assert drawn.build_tokenizer(64).model_max_length == 64


def require_same_rows(drawn):
    """A longer data set starts with the shorter one; splits and seeds differ; captions of all styles and numbers are of
    the same pictures."""
    kinds = drawn.kinds("all")[:16]

    def load(split="test", captions="web", number=20, seed=3, **more):
        rows = drawn.load(split, captions, number, kinds, seed, **more)
        return [np.asarray(image).tobytes() for image in rows["image"]], list(rows["caption"]), list(rows["kind"])

    few, many, others = load(), load(number=30), [load(seed=1), load("train")]
    assert few == tuple(part[:20] for part in many) and len(set(few[0])) == 20
    known_kinds = set(load(number=200)[2])
    for other in others:
        assert not set(other[0]) & set(few[0]) and set(other[2]) <= known_kinds
    for style in drawn.caption_styles:
        pictures, captions, _ = load(captions=style, captions_per_image=2)
        assert pictures == few[0] and [len(texts) for texts in captions] == [2] * 20
        assert [first for first, _ in captions] == load(captions=style)[1]


@EACH
def test_rows_follow_from_their_arguments(name):
    require_parts(world(name))
    require_same_rows(world(name))
    assert any(task.startswith(f"{name}_") for task in ALL_TASKS)


def test_a_world_of_ones_own(tmp_path, monkeypatch, dense):
    """That of the page is drawn, measured and recorded by its spelling; what it imports belongs to its data."""
    (block,) = (block.text for block in blocks(PAGE) if block.text.startswith("# my_worlds.py"))
    (tmp_path / "my_worlds.py").write_text(f"{block}\nimport my_inks\nNOTHING = None\n")
    (tmp_path / "my_inks.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for module in ("my_worlds", "my_inks"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    arguments = DataArguments(source="my_worlds:WORLD", num_samples=6, kinds="with green")
    assert set(load_pairs(arguments)["caption"]) == {"the flag of Ireland", "the flag of Italy"}
    require_parts(world("my_worlds:WORLD"))
    before, tasks = identity(arguments), find_tasks(["my_worlds:WORLD all"], seed=2)
    assert before.keys() == {"my_worlds", "my_inks"} and missing_data("my_worlds:WORLD") == ""
    assert tasks["flags_all"].title == "flags, all" and tasks["flags_all"].data == {"installed": before, "seed": 2}
    (result,) = evaluate_model(dense, tasks, tmp_path / "results")
    assert result["task"] == "flags_all" and result["num_samples"] == 3
    tower, inputs = {"text_config": {}, "vision_config": {}, "projection_dim": 8}, SimpleNamespace(tokenizer=None)
    stage = InitializeStage(stage="initialize", name="new", processor="my_worlds:WORLD", **tower)
    digests = stage.fingerprints(inputs)
    (tmp_path / "my_inks.py").write_text("RED = 200, 20, 41\n")
    assert identity(arguments) != before and stage.fingerprints(inputs)["processor"] != digests["processor"]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"source": "my.worlds:WORLD"}, "the world 'my.worlds:WORLD' cannot be imported: ModuleNotFoundError"),
        ({"source": "clip_moe.data.worlds:WORLDS"}, "'clip_moe.data.worlds:WORLDS' is not a clip_moe.data.world.World"),
        ({"source": "molecules"}, "the world molecules is lab.worlds.molecules:MOLECULES, in a checkout"),
        ({"source": "symbols", "split": "val"}, "symbols have no split 'val', only train, test"),
        ({"source": "symbols", "kinds": "cloud"}, "symbols have no set of kinds 'cloud', only all, letter, .*, half 2"),
        ({"source": "names", "kinds": "planet"}, "names have no set of kinds 'planet': give a number of towns, a mul"),
        ({"source": "names", "kinds": "4096 half 3"}, "names have no set of kinds '4096 half 3'"),
        ({"source": "symbols", "captions": "facts"}, "symbols have no captions 'facts', only web, "),
        ({"source": "names", "captions": "looks"}, "names have no captions 'looks', only web, "),
    ],
)
def test_worlds_that_are_none(settings, fault):
    with pytest.raises(ValueError, match=fault):
        DataArguments(num_samples=6, **settings)


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        ("my worlds:WORLD all", "unknown task 'my worlds:WORLD all': a world's is package.module:OBJECT KINDS"),
        ("my.worlds:WORLD all", "the task 'my.worlds:WORLD all': the world 'my.worlds:WORLD' cannot be imported"),
        ("clip_moe.data.symbols:SYMBOLS x", "the task .*: symbols have no set of kinds 'x', only all, letter"),
        ("molecules_512", "the task molecules_512 is now lab.worlds.molecules:MOLECULES 512, in a checkout"),
    ],
)
def test_tasks_of_worlds_that_are_none(task, fault):
    with pytest.raises(ValueError, match=fault):
        require_tasks([task])


def test_the_page_of_worlds_tells_what_is_drawn():
    page = PAGE.read_text(encoding="utf-8")
    assert (
        f"{len(TOPIC_OF)} kinds of symbols of {len(TOPICS)} topics" in page and f"of {len(symbols.KINDS)} kinds" in page
    )
    assert f"at least {symbols.SMALLEST_IMAGE} ×" in page
    assert f"{symbols.TWO_SHARE * 100:.0f} % have two symbols" in page
    assert f"{symbols.HABIT * 100:.0f} % of its pictures" in page


@pytest.mark.parametrize(("name", "more"), [("symbols", []), ("names", ["--number", "48"])])
def test_the_sheets_of_the_page(tmp_path, name, more):
    draw.draw.main([name, "--contact_sheet", str(tmp_path / "drawn.png"), *more])
    kept = ROOT / "docs" / f"{name}.png"
    drawn, expected = (np.asarray(PIL.Image.open(path).convert("RGB")) for path in (tmp_path / "drawn.png", kept))
    assert np.array_equal(drawn, expected) and kept.stat().st_size < 300_000
    with pytest.raises(SystemExit, match="error: nothing to draw: give --contact_sheet FILE or --folder"):
        draw.draw.main([name])


def test_a_sheet_shows_the_images_of_a_cluster_in_its_line(tmp_path):
    """Every cluster has one flat color; an image that cannot be read is red."""
    colors = [(10, 250, 10), (10, 10, 250), (250, 0, 0)]
    labels = np.array([2, 0, 1, 1, 0, 2, 2, 0, 1])
    flat = [png(np.full((8, 8, 3), color, np.uint8))["bytes"] for color in colors[:2]] + [b"x"]
    rows = [{"image": {"bytes": flat[label]}, "caption": ["", "a caption"]} for label in labels]
    rows = datasets.Dataset.from_list(rows)
    contact_sheet(tmp_path / "sheet.png", rows, labels, seed=0)
    pixels = np.asarray(PIL.Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)
    lines = [np.flatnonzero((np.abs(pixels - color).sum(axis=-1) < 30).any(axis=1)) for color in colors]
    assert all(len(line) > 20 for line in lines)
    assert lines[0].max() < lines[1].min() and lines[1].max() < lines[2].min()
    contact_sheet(tmp_path / "named.png", rows, labels, seed=0, names=np.array(["b", "c", "a"]))
    named = np.asarray(PIL.Image.open(tmp_path / "named.png").convert("RGB")).astype(int)
    assert np.flatnonzero((np.abs(named - colors[2]).sum(axis=-1) < 30).any(axis=1)).max() < named.shape[0] / 3


def not_installed(name):
    raise PackageNotFoundError(name)


def test_what_is_not_installed_ends_in_one_line(dense, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("clip_moe.engine.provenance.version", not_installed)
    for cached in ("_icons", "_numbered"):
        monkeypatch.setattr(icons, cached, getattr(icons, cached).__wrapped__)
    monkeypatch.setitem(TASKS, "icons_all", icon_tasks()["icons_all"])
    error = error_of(clip_moe.main, "evaluate", tmp_path / "out", "--models.dense", dense, "--tasks", "icons_all")
    assert "icons need mkdocs-material, which is not installed: pip install -e '.[icons]'" in error
    assert not (tmp_path / "out").exists()


def test_a_table_shows_the_mean_of_the_topics_alone(dense, tmp_path):  # noqa: F811
    """All scores stand below it."""
    results = evaluate_model(dense, {"symbols_topics": TASKS["symbols_topics"]}, tmp_path / "0")
    table = write_report(results, tmp_path / "report")
    assert table.splitlines()[0].count("zero-shot, 15 topics: mean accuracy") == 1 and "planet" not in table
    report = (tmp_path / "report" / "report.md").read_text()
    assert "accuracy/planet" in report and "a task for each of 15 topics" in report


def test_a_task_belongs_to_the_packages_that_it_is_drawn_from(monkeypatch):
    """A finished evaluation is refused after an upgrade, and scores of two versions are not compared."""
    monkeypatch.setattr("clip_moe.evaluation.tasks.TASKS", icon_tasks() | symbol_tasks())
    seen = set()
    for version in ("1", "2"):
        monkeypatch.setattr("clip_moe.engine.provenance.version", lambda package, v=version: v)
        tasks = find_tasks(["icons_512", "symbols_pairs"], seed=3)
        assert tasks["icons_512"].data == {"installed": dict.fromkeys(icons.PACKAGES, version), "seed": 3}
        assert tasks["symbols_pairs"].data == {"seed": 3}
        fingerprints = task_fingerprints(list(tasks))
        assert fingerprints.keys() == {"tasks.icons_512"}
        seen |= set(fingerprints.values())
    assert len(seen) == 2
