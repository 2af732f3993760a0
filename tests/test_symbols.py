"""The symbol world: its rows are those that models were trained on, to the bit, and its tokenizer knows their words."""

import hashlib
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from data import symbol_captions, symbols
from data.drawing import BACKGROUNDS, COLORS, POSITIONS, SIDES, TEXTURES
from data.symbol_kinds import KINDS, TOPIC_OF, TOPICS
from data.tokenizer import pieces_per_word
from data.worlds import build_processor

SMALL = 16  # the smallest pictures, where only what is told of them matters


@pytest.fixture(scope="module")
def web():
    return symbols.load("train", "web", 1500, image_size=SMALL)


@pytest.fixture(scope="module")
def detailed():
    return symbols.load("train", "detailed", 1500, image_size=SMALL)


@pytest.fixture(scope="module")
def tokenizer():
    return build_processor("symbols", 64, 32).tokenizer


# --- what must stay


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
        (lambda: symbols.load("train", "web", 50), "535d421ae1d5fc6b"),
        (lambda: symbols.load("train", "detailed", 50), "606692e54a023599"),
        (lambda: symbols.load("test", "detailed", 20, two=False), "d16a133edf8650a6"),
        (lambda: symbols.load("train", "web", 20, HALF, captions_per_image=2), "28010a73e36c849a"),
        (lambda: symbols.load_minimal_pairs("test", 21), "ec337d7d9db10608"),
    ],
)
def test_rows_are_those_that_models_were_trained_on(load, expected):
    """`training/recipes/symbol_base.yaml` and every recipe after it. Other digests mean other scores. So the shares of
    vague and of wrong captions stay those of benchmarks/results/symbol_world_cpu.md."""
    assert digest(load()) == expected


def test_tokenizer_is_that_of_the_models(tokenizer):
    assert hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16] == "aae16aa4a0906fcb"


# --- kinds and fonts


def test_kind_sets_part_the_kinds():
    sets = symbols.KIND_SETS
    assert sets["all"] == KINDS and set(TOPICS) < set(sets)
    for names in (TOPICS, ["half 1", "half 2"], [f"quarter {number}" for number in (1, 2, 3, 4)]):
        assert sorted(kind for name in names for kind in sets[name]) == sorted(KINDS), names
        for one, other in itertools.combinations(names, 2):  # whole topics
            assert not {TOPIC_OF[kind] for kind in sets[one]} & {TOPIC_OF[kind] for kind in sets[other]}
    sizes = [len(sets[f"half {number}"]) for number in (1, 2)]
    assert max(sizes) < 1.1 * min(sizes)


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


# --- captions


def test_the_tokenizer_knows_every_word_and_captions_fit(tokenizer, web, detailed):
    said = [*KINDS, *TOPICS, *(word for topic in TOPICS.values() for word in (*topic.words, *topic.short.values()))]
    styles = [list(values) for values in (COLORS, symbols.SIZES, POSITIONS, SIDES, BACKGROUNDS, TEXTURES)]
    templates = [template.format("cloud") for template in symbols.TEMPLATES]
    for captions in (said, *styles, templates, web["caption"], detailed["caption"]):
        assert pieces_per_word(tokenizer, captions) == 1.0
    longest = max(KINDS, key=len)
    scene = dict.fromkeys(symbols.ATTRIBUTES, "") | {"kind": longest, "second_kind": longest, "color": "purple"}
    scene |= {"second_color": "brown", "background": "turquoise", "texture": "checkered", "position": "bottom"}
    captions = [symbol_captions.caption(scene, "detailed", np.random.default_rng(seed)) for seed in range(20)]
    assert max(map(len, tokenizer([*detailed["caption"], *captions]).input_ids)) <= 48 < tokenizer.model_max_length
