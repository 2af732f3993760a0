"""The symbol world: its pictures are repeatable, in other fonts for the test, and show what their columns say. What is
said of them is in test_symbol_captions.py."""

import hashlib
import itertools
import json
import re
import shutil
from pathlib import Path

import matplotlib
import numpy as np
import PIL.Image
import pytest
from datasets import Image

from data import symbols
from data.drawing import BACKGROUNDS, COLORS, DIGITS, SIDES, TEXTURES
from data.symbol_kinds import KINDS, TOPIC_OF, TOPICS

SMALL = 16  # the smallest pictures, where only what is told of them matters


def encoded(dataset, column="image"):
    """The images' bytes as they are stored."""
    return [image["bytes"] for image in dataset.cast_column(column, Image(decode=False))[column]]


def told(rows):
    """The rows without their images."""
    return rows.remove_columns([name for name in rows.column_names if name.startswith("image")]).to_list()


@pytest.fixture(scope="module")
def web():
    return symbols.load("train", "web", 1500, image_size=SMALL)


@pytest.fixture(scope="module")
def detailed():
    return symbols.load("train", "detailed", 1500, image_size=SMALL)


@pytest.fixture
def other_fonts():
    """Fonts are looked up anew within a test, and after it."""
    symbols._fonts_of.cache_clear()
    yield
    symbols._fonts_of.cache_clear()


# --- what must stay


def digest(rows):
    found = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            is_text = isinstance(row[name], str | list)
            found.update(name.encode())
            found.update(json.dumps(row[name]).encode() if is_text else np.asarray(row[name]).tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (lambda: symbols.load("train", "web", 50), "535d421ae1d5fc6b"),
        (lambda: symbols.load("train", "detailed", 50), "606692e54a023599"),
        (lambda: symbols.load("test", "web", 50), "a06e077183d7f271"),
        (lambda: symbols.load("test", "detailed", 50), "18d2890c05379ba1"),
        (lambda: symbols.load("test", "detailed", 20, two=False), "d16a133edf8650a6"),
        (
            lambda: symbols.load("train", "web", 20, symbols.KIND_SETS["half 1"], captions_per_image=2),
            "28010a73e36c849a",
        ),
        (lambda: symbols.load_minimal_pairs("test", 21), "ec337d7d9db10608"),
    ],
)
def test_rows_are_those_that_models_were_trained_on(load, expected):
    """`training/recipes/symbol_base.yaml` and every recipe after it. Other digests mean other scores."""
    assert digest(load()) == expected


def test_tokenizer_is_that_of_the_models():
    text = symbols.build_tokenizer(64).backend_tokenizer.to_str()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "aae16aa4a0906fcb"


# --- rows


@pytest.mark.parametrize("style", symbols.CAPTION_STYLES)
def test_same_arguments_same_bits(style):
    first, second = (symbols.load("test", style, 30, seed=3) for _ in range(2))
    assert told(first) == told(second) and encoded(first) == encoded(second)
    # A longer dataset starts with the shorter one.
    assert encoded(symbols.load("test", style, 40, seed=3).select(range(30))) == encoded(first)


def test_splits_and_seeds_differ():
    images = [
        set(encoded(symbols.load(split, "web", 30, seed=seed)))
        for split, seed in [("train", 0), ("train", 1), ("test", 0)]
    ]
    assert all(len(part) == 30 for part in images)
    assert not (images[0] & images[1] or images[0] & images[2] or images[1] & images[2])


def test_both_caption_styles_describe_the_same_pictures(web, detailed):
    assert encoded(web) == encoded(detailed)
    scenes = [[{**row, "caption": ""} for row in told(rows)] for rows in (web, detailed)]
    assert scenes[0] == scenes[1] and list(web["caption"]) != list(detailed["caption"])


def test_columns(detailed):
    row = symbols.load("train", "detailed", 1)[0]
    assert set(row) == {"image", "caption", *symbols.ATTRIBUTES}
    assert row["image"].mode == "RGB" and row["image"].size == (32, 32)
    assert symbols.load("train", "web", 1, image_size=48)[0]["image"].size == (48, 48)
    assert set(symbols.load("test", "web", 3000, image_size=SMALL)["kind"]) == set(KINDS)
    for row in told(detailed):
        assert row["topic"] == TOPIC_OF[row["kind"]] and row["second_color"] != row["color"]


def test_several_captions_an_image():
    rows, single = (symbols.load("test", "web", 10, captions_per_image=number) for number in (3, 1))
    assert encoded(rows) == encoded(single)
    for several, one in zip(rows["caption"], single["caption"], strict=True):
        assert len(several) == 3 and several[0] == one


def test_two_symbols_in_a_picture(detailed):
    two = [row for row in told(detailed) if row["second_kind"]]
    assert abs(len(two) / len(detailed) - symbols.TWO) < 0.04
    assert {row["position"] for row in two} == set(SIDES) and {row["size"] for row in two} == {"small"}
    assert all(row["kind"] != row["second_kind"] for row in two)
    same = np.mean([row["topic"] == TOPIC_OF[row["second_kind"]] for row in two])
    assert symbols.SAME_TOPIC - 0.08 < same < symbols.SAME_TOPIC + 0.15  # others may be of the topic too
    rows = symbols.load("train", "detailed", 60, two=False, image_size=SMALL)
    assert set(rows["second_kind"]) == set(rows["second_color"]) == {""}
    assert all(symbols.load("train", "detailed", 60, two=True, image_size=SMALL)["second_kind"])


def test_both_symbols_are_in_the_picture():
    """Each half has the ink of its own symbol."""
    scene = {"kind": "cloud", "color": "red", "size": "small", "position": "left", "background": "white"}
    scene |= {"texture": "plain", "second_kind": "black heart suit", "second_color": "green"}
    for position in SIDES:
        image = symbols.render({**scene, "position": position}, "train", np.random.default_rng(0), 32).astype(float)
        x, y = (np.array(SIDES[position]) > 0) * 16
        half = image[y : y + 16] if position in ("top", "bottom") else image[:, x : x + 16]
        distances = [np.linalg.norm(half - COLORS[color], axis=-1).min() for color in ("red", "green")]
        assert distances[0] < 40 < 80 < distances[1], position


def test_topics_have_habits(detailed):
    """Their own color, ground and texture in about half of the pictures and a share of the other half."""
    for name, values in (("color", COLORS), ("background", BACKGROUNDS), ("texture", TEXTURES)):
        usual = [row[name] == getattr(TOPICS[row["topic"]], name) for row in told(detailed)]
        expected = symbols.HABIT + (1 - symbols.HABIT) / len(values)
        assert abs(np.mean(usual) - expected) < 0.05, name


# --- kinds and fonts


def test_kinds():
    assert len(TOPICS) == 15 and 170 <= len(KINDS) == len(set(KINDS)) == len(TOPIC_OF)
    characters = [text for topic in TOPICS.values() for text in topic.kinds.values() if text]
    assert len(characters) == len(set(characters)) and all(len(text) == 1 for text in characters)
    assert [kind for kind in KINDS if not TOPICS[TOPIC_OF[kind]].kinds[kind]] == [f"digit {name}" for name in DIGITS]


def test_kind_sets_part_the_kinds():
    sets = symbols.KIND_SETS
    assert sets["all"] == KINDS and set(TOPICS) < set(sets)
    for names in (TOPICS, ["half 1", "half 2"], [f"quarter {number}" for number in (1, 2, 3, 4)]):
        kinds = [kind for name in names for kind in sets[name]]
        assert sorted(kinds) == sorted(KINDS), names
        for one, other in itertools.combinations(names, 2):  # whole topics
            assert not {TOPIC_OF[kind] for kind in sets[one]} & {TOPIC_OF[kind] for kind in sets[other]}
    sizes = [len(sets[f"half {number}"]) for number in (1, 2)]
    assert max(sizes) < 1.1 * min(sizes)


def test_no_font_is_in_both_splits():
    fonts = {split: set(symbols.FONTS[split]) for split in ("train", "test")}
    assert len(fonts["train"]) > 3 and len(fonts["test"]) > 3 and not fonts["train"] & fonts["test"]
    used = {split: set().union(*symbols._fonts_of(split).values()) for split in fonts}
    assert not used["train"] & used["test"]
    assert {split: {Path(file).stem for file in files} for split, files in used.items()} == fonts
    several = [len(files) > 1 for files in symbols._fonts_of("test").values()]
    assert np.mean(several) > 0.5


def test_the_page_says_how_many_test_drawings_are_training_drawings():
    """Fonts share some outlines."""
    known = []
    for character, files in symbols._fonts_of("test").items():
        drawn = {symbols._printed(character, file).tobytes() for file in symbols._fonts_of("train")[character]}
        known.append([symbols._printed(character, file).tobytes() in drawn for file in files])
    all_known, some_known = (sum(map(count, known)) for count in (all, any))
    page = (Path(__file__).parents[1] / "docs" / "worlds.md").read_text(encoding="utf-8")
    said = re.search(r"the test\s+drawings of (\d+) kinds, and some of those of (\d+) more", page)
    assert said and [int(number) for number in said.groups()] == [all_known, some_known - all_known]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_character_is_drawn(split):
    """Neither blank nor the box that a font draws for what it lacks."""
    boxes = {}
    for character, files in symbols._fonts_of(split).items():
        for file in files:
            if file not in boxes:
                boxes[file] = symbols._printed("\U000f1234", file).tobytes()
            drawn = symbols._printed(character, file)
            assert drawn.tobytes() != boxes[file], (character, file)
            assert 0.02 < (np.asarray(drawn) > 127).mean() < 0.9, (character, file)


def test_fonts_that_lack_a_character(monkeypatch, other_fonts):
    """A real font of matplotlib that has no chess pieces, as the first one and as another."""
    monkeypatch.setitem(symbols.FONTS, "test", ["DejaVuSans-BoldOblique", "STIXGeneral"])
    assert len(symbols._fonts_of("test")["♔"]) == 1 < len(symbols._fonts_of("test")["A"])
    symbols._fonts_of.cache_clear()
    monkeypatch.setitem(symbols.FONTS, "test", ["DejaVuSerif-BoldItalic", "DejaVuSans-BoldOblique"])
    for call in (lambda: symbols.load("test", "web", 1), lambda: symbols.load_minimal_pairs("test", 1)):
        with pytest.raises(
            ValueError, match=r"^the font DejaVuSerif-BoldItalic of matplotlib .* has no .*\(U\+.*$"
        ) as error:
            call()
        assert "\n" not in str(error.value) and matplotlib.__version__ in str(error.value)
    symbols.load("train", "web", 1)


@pytest.mark.parametrize("content", [None, b"", b"no font\nat all"], ids=["missing", "empty", "text"])
def test_fonts_that_are_not_there(monkeypatch, tmp_path, other_fonts, content):
    folder = tmp_path / "fonts" / "ttf"
    folder.mkdir(parents=True)
    for name in symbols.FONTS["test"]:
        shutil.copy(symbols._font_file(name), folder)
    broken = folder / f"{symbols.FONTS['test'][1]}.ttf"
    broken.unlink() if content is None else broken.write_bytes(content)
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    with pytest.raises(ValueError, match=f"^matplotlib .* has no font {symbols.FONTS['test'][1]}: [^\n]*$"):
        symbols.load("test", "web", 1)


# --- sheets


def test_the_pictures_of_the_docs_are_those_of_the_command(tmp_path):
    symbols.main(["--contact-sheet", str(tmp_path / "symbols.png"), "--samples", str(tmp_path / "symbol_samples.png")])
    for name in ("symbols.png", "symbol_samples.png"):
        kept = Path(__file__).parents[1] / "docs" / name
        drawn, expected = (np.asarray(PIL.Image.open(path).convert("RGB")) for path in (tmp_path / name, kept))
        assert drawn.shape == expected.shape and (drawn == expected).all() and kept.stat().st_size < 150_000, name
    sheet = drawn_sheet(tmp_path / "symbols.png")
    assert len(sheet) == len(KINDS) + len(TOPICS)
    assert len({cell for cell in sheet}) == len(sheet)


def drawn_sheet(path, width=78, height=59, columns=12):
    """The bytes of each cell that is not empty."""
    pixels = np.asarray(PIL.Image.open(path).convert("L"))
    cells = [
        pixels[y : y + height, x : x + width]
        for y in range(0, len(pixels), height)
        for x in range(0, columns * width, width)
    ]
    return [cell.tobytes() for cell in cells if cell.min() < cell.max()]


@pytest.mark.parametrize("path", ["nowhere/x.png", ".", "file/x.png"])
def test_a_sheet_that_cannot_be_written(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=f"^error: [^\n]*'{path}'$"):
        symbols.main(["--contact-sheet", path])
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
