"""The world of icons: that its names are apart, what is drawn, and CLIP-UP's recipe on it."""

import json
import re

import numpy as np
import pytest
from documents import ROOT, run_page
from transformers import AutoModel

from clip_moe.data import icons
from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.evaluation.tasks import TASKS
from clip_moe.training.commands import run

pytest.importorskip("resvg_py", reason="the icons extra is not installed")
SETS = ("brands", "all", "other artists")


def names_of(kinds):
    return [icons.icon(kind).name for kind in kinds]


def test_no_two_names_are_one():
    names = names_of(icons.kind_set("all"))
    assert len({name.replace(" ", "") for name in names}) == len(names)
    assert all(re.fullmatch("[a-z0-9]+( [a-z0-9]+)*", name) for name in names)
    assert "credit card off outline" in names and "stackoverflow" in names
    read = icons.ICONS.build_tokenizer(20)(names)["input_ids"]
    assert len(set(map(tuple, read))) == len(names) and max(map(len, read)) <= 20


def test_sets_of_kinds_nest():
    brands, everything, others = map(icons.kind_set, SETS)
    assert icons.kind_set("brands 256") == brands[:256] == everything[:256] and everything[: len(brands)] == brands
    assert {icons.icon(kind).artist for kind in brands} == {"simple icons"}
    assert {icons.icon(kind).artist for kind in everything} == set(icons.ARTISTS.values())
    assert not set(others) & set(everything)
    artist_of = {icons.icon(kind).name: icons.icon(kind).artist for kind in everything}
    assert all(artist_of[icons.icon(kind).name] != icons.icon(kind).artist for kind in others)
    assert len(set(names_of(others))) == len(others)


def test_an_icon_is_dark_on_light_wherever_it_is():
    number = names_of(icons.kind_set("brands")).index("webstorm")  # a square with two letters
    pictures = [
        icons.draw(number, "train", np.random.default_rng(seed), 32)[0].astype(int).sum(axis=2) for seed in range(40)
    ]
    corners = {tuple(np.argwhere(picture < np.median(picture) + 150)[0]) for picture in pictures}
    assert len({y for y, _ in corners}) == len({x for _, x in corners}) == 5  # moved by 0 to 4 pixels
    dark = [np.mean(picture < (picture.min() + picture.max()) / 2) for picture in pictures]
    assert 0.5 < min(dark) and max(dark) < 0.77  # of a square of 28 pixels


def test_captions():
    (row,) = icons.ICONS.load("train", "detailed", 1, [5])
    assert row["caption"] == f"{row['kind']}, drawn by simple icons" and row["artist"] == "simple icons"
    assert icons.ICONS.load("train", "web", 1, [5], captions_per_image=2)[0]["caption"] == [row["kind"]] * 2
    rows = load_pairs(DataArguments(source="icons", num_samples=16, kinds="brands 16"))
    assert sorted(rows["caption"]) == sorted(names_of(range(16)))
    assert set(icons.ICONS.examples) <= set(names_of(icons.kind_set("brands")))  # a card's examples


def test_the_page_tells_what_is_there():
    """The numbers are those of the versions in constraints.txt, and the licenses lie in the package."""
    page = (ROOT / "docs" / "worlds.md").read_text(encoding="utf-8")
    brands, everything, others = (f"{len(icons.kind_set(kinds)):,}" for kinds in SETS)
    assert f"{brands} brands, or an icon of one of {everything} names" in page
    assert f"`other artists` are {others} icons" in page
    artists = [icons.icon(kind).artist for kind in icons.kind_set("all")]
    assert [f"{artists.count(artist):,}" for artist in icons.ARTISTS.values()] == re.findall(
        r"^\| \[\w.*\| ([\d,]+) \|$", page.split("## The icons")[1].split("## The symbols")[0], re.MULTILINE
    )
    drawn = [icons._mask(icons.icon(kind).path, 28).tobytes() for kind in icons.kind_set("all")]
    times = {drawing: drawn.count(drawing) for drawing in set(drawn)}
    shared = [times[drawing] > 1 for drawing in drawn]
    assert not any(shared[: len(icons.kind_set("brands"))]) and f"{sum(shared)} share one with another name" in page
    told = {"simple": "CC0 1.0", "material": "Apache 2.0", "fontawesome": "CC BY 4.0", "octicons": "MIT License"}
    for artist, words in told.items():
        (license,) = icons._folder().joinpath(artist).glob("LICENSE*")
        assert words in license.read_text(encoding="utf-8") and words.removesuffix(" License") in page


def test_the_guide_for_own_pictures_runs(tmp_path, monkeypatch):
    (tmp_path / "training").symlink_to(ROOT / "training")
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / "docs" / "own_pictures.md")
    report = (tmp_path / "runs/logos/long/report.md").read_text(encoding="utf-8")
    assert "pictures of the test: R@1 text→image" in report
    assert (tmp_path / "runs/logos/experts/experts.md").is_file()
    lines = (tmp_path / "my/logos/test/metadata.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["caption"] for line in lines) == sorted(names_of(range(16)))


def test_the_recipe_runs(tmp_path, capsys):
    settings = {"config": ROOT / "lab/recipes/clip_up_icons.yaml", "output-dir": tmp_path / "out"}
    settings |= {f"{stage}.max_steps": 2 for stage in ("defaults.train", "seed_model", "dense_same_multiply_adds")}
    settings |= {"defaults.train.data.num_samples": 64, "defaults.train.global_batch_size": 32}
    settings |= {"evaluation.tasks": "[icons_brands, icons_other_artists]"}
    run.main([str(word) for key, value in settings.items() for word in (f"--{key}", value)])
    table = capsys.readouterr().out
    assert "logos of brands: R@1 image→text" in table and "icons of other artists: R@5 text→image" in table
    model = AutoModel.from_pretrained(tmp_path / "out" / "clip_up")
    assert model.config.vision_config.moe_layers == [1] and model.config.vision_config.num_experts == 8
    rows, _ = TASKS["icons_other_artists"].load()
    assert sorted(rows["caption"]) == sorted(names_of(icons.kind_set("other artists")))
