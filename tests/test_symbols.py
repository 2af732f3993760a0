"""The worlds of symbols and of names: their rows are those that models were trained on, to the bit, and tokenizers know
their words; and the dense symbol CLIPs that come with the repository."""

import hashlib
import json
import re

import numpy as np
import pytest
from documents import BASE, ROOT
from tiny_clip import symbol_processor

from clip_moe.conversion.processors import load_image_processor
from clip_moe.data import names, symbols
from clip_moe.data.drawing import BACKGROUNDS, COLORS, TEXTURES
from clip_moe.data.names import NAMES
from clip_moe.data.symbol_kinds import KINDS, TOPICS, _fonts_of, _printed
from clip_moe.data.symbols import POSITIONS, SIDES, SYMBOLS
from clip_moe.data.tokenizer import pieces_per_word
from clip_moe.data.world import build_image_processor


@pytest.fixture(scope="module")
def tokenizer():
    return SYMBOLS.build_tokenizer(64)


def digest(rows):
    found = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            is_text = isinstance(row[name], str | list)
            found.update(name.encode())
            found.update(json.dumps(row[name]).encode() if is_text else np.asarray(row[name]).tobytes())
    return found.hexdigest()[:16]


HALF = symbols.KIND_SETS["half 1"]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (lambda: SYMBOLS.load("train", "web", 50), "535d421ae1d5fc6b"),
        (lambda: SYMBOLS.load("train", "detailed", 50), "606692e54a023599"),
        (lambda: symbols.ONE.load("test", "detailed", 20), "d16a133edf8650a6"),
        (lambda: SYMBOLS.load("train", "web", 20, HALF, captions_per_image=2), "28010a73e36c849a"),
        (lambda: symbols.load_minimal_pairs("test", 21), "ec337d7d9db10608"),
        (lambda: NAMES.load("train", "web", 50, names.kind_set("256")), "d9ce24614a450a33"),
        (lambda: NAMES.load("test", "detailed", 20, names.kind_set("256 half 2"), 1), "e5640f485df472a4"),
        (lambda: NAMES.load("train", "facts", 20, names.kind_set("all"), captions_per_image=2), "5ae032200bb7c3d3"),
    ],
)
def test_rows_are_those_that_models_were_trained_on(load, expected):
    """`training/recipes/symbol_base.yaml` and every recipe after it. Other digests mean other scores. So the shares of
    vague and of wrong captions stay those of lab/speed/results/symbol_world_cpu.md."""
    assert digest(load()) == expected


def test_tokenizers_are_those_of_the_models(tokenizer):
    kept = symbol_processor(64, 32).tokenizer.backend_tokenizer
    assert kept.to_str() == tokenizer.backend_tokenizer.to_str()
    for learned, expected in ((tokenizer, "aae16aa4a0906fcb"), (NAMES.build_tokenizer(20), "567cbf33f0857ede")):
        assert hashlib.sha256(learned.backend_tokenizer.to_str().encode()).hexdigest()[:16] == expected


def test_images_are_prepared_as_those_of_the_models():
    assert build_image_processor(32).to_dict() == load_image_processor(BASE).to_dict()


def test_towns_are_distinct():
    """A shield is its charges and its country's tint."""
    towns = names.kind_set("16384")
    for what in (names.name_of, names.facts_of, lambda town: (town % 8, names.charges_of(town))):
        assert len({what(town) for town in towns}) == len(towns)
    countries = [names.kind_set(f"256 country {country}") for country in range(1, 9)]
    assert sorted(sum(map(list, countries), [])) == list(names.kind_set("256"))


def test_the_page_says_how_many_test_drawings_are_training_drawings():
    """Fonts share some outlines."""
    known = []
    for character, files in _fonts_of("test").items():
        drawn = {_printed(character, file).tobytes() for file in _fonts_of("train")[character]}
        known.append([_printed(character, file).tobytes() in drawn for file in files])
    all_known, some_known = (sum(map(count, known)) for count in (all, any))
    page = (ROOT / "docs" / "worlds.md").read_text(encoding="utf-8")
    said = re.search(r"the test\s+drawings of (\d+) kinds, and some\s+drawings of (\d+) other kinds", page)
    assert said and [int(number) for number in said.groups()] == [all_known, some_known - all_known]


def test_the_tokenizer_knows_every_word_and_captions_fit(tokenizer):
    scenes = list(map(SYMBOLS.subjects(KINDS, "train", 0), range(1500)))
    web, detailed = ([SYMBOLS.caption(scene, style, rng) for scene, rng in scenes] for style in ("web", "detailed"))
    said = [*KINDS, *TOPICS, *(word for topic in TOPICS.values() for word in (*topic.words, *topic.short.values()))]
    styles = [list(values) for values in (COLORS, symbols.SIZES, POSITIONS, SIDES, BACKGROUNDS, TEXTURES)]
    templates = [template.format("cloud") for template in symbols.TEMPLATES]
    for captions in (said, *styles, templates, web, detailed):
        assert pieces_per_word(tokenizer, captions) == 1.0
    longest = max(KINDS, key=len)
    scene = dict.fromkeys(symbols.ATTRIBUTES, "") | {"kind": longest, "second_kind": longest, "color": "purple"}
    scene |= {"second_color": "brown", "background": "turquoise", "texture": "checkered", "position": "bottom"}
    captions = [symbols.caption(scene, "detailed", np.random.default_rng(seed)) for seed in range(20)]
    assert max(map(len, tokenizer([*detailed, *captions]).input_ids)) <= 48 < tokenizer.model_max_length
