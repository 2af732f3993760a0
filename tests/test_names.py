"""The world of names: what is drawn, and that memory alone connects a shield with its name."""

import itertools

import numpy as np
from PIL import Image

from data import names


def pixels(rows):
    return [np.asarray(image) for image in rows["image"]]


def test_a_larger_picture_is_the_same_enlarged():
    small, large = (names.load("train", "web", 20, range(16), image_size=side) for side in (16, 32))
    assert np.array_equal(pixels(large)[0], np.asarray(small[0]["image"].resize((32, 32), Image.Resampling.NEAREST)))


def test_all_towns_are_shown_once_in_each_turn():
    kinds = names.kind_set("256 half 2")
    rows = names.load("train", "web", 3 * len(kinds), kinds)
    turns = [list(rows["kind"])[turn * len(kinds) : (turn + 1) * len(kinds)] for turn in range(3)]
    assert all(sorted(turn) == sorted(map(names.name_of, kinds)) for turn in turns) and turns[0] != turns[1]


def test_towns_are_distinct_and_keep_their_numbers():
    towns = names.kind_set("16384")
    for what in (names.name_of, names.facts_of):
        assert len({what(town) for town in towns}) == len(towns)
    # A shield is its charges and its country's tint
    assert len({(town % 8, names.charges_of(town)) for town in towns}) == len(towns)
    assert names.kind_set("256") == towns[:256] and names.kind_set("all") == towns[:4096]
    halves = [names.kind_set(f"256 half {half}") for half in (1, 2)]
    countries = [names.kind_set(f"256 country {country}") for country in range(1, 9)]
    assert sorted(itertools.chain(*halves)) == sorted(itertools.chain(*countries)) == list(range(256))
    assert max(town % 8 for town in halves[0]) < 4


def test_no_part_of_a_shield_tells_a_word():
    """Within a country, how often a charge and a word meet is as independent draws have it: chi-squared a degree of
    freedom is near 1."""
    towns = names.kind_set("16384 country 3")
    for quarter, word in itertools.product(range(4), range(1, 3)):
        table = np.zeros((16, 64))
        for town in towns:
            table[names.charges_of(town)[quarter], names.WORDS.index(names.name_of(town).split()[word])] += 1
        expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
        assert 0.85 < ((table - expected) ** 2 / expected).sum() / (15 * 63) < 1.15


def test_a_country_has_a_tint_and_an_ending():
    rows = names.load("test", "web", 64, range(64))
    for country, tint in names.COUNTRIES.items():
        of_country = [row for row in rows if row["country"] == country]
        assert len(of_country) == 8 and all(row["kind"].split()[0].endswith(country) for row in of_country)
        # Between two quarters nothing is drawn
        ground = np.mean([np.asarray(row["image"])[7] for row in of_country], axis=(0, 1))
        assert np.abs(ground - tint).max() < 25


def test_captions():
    town, (row,) = 5, names.load("train", "detailed", 1, [5])
    assert row["caption"] == f"{names.name_of(town)}, {names.facts_of(town)}" and row["kind"] == names.name_of(town)
    assert names.load("train", "facts", 1, [town])[0]["caption"] == row["facts"]
    assert set(row["facts"].split()) - {"founded", "by", "in", "the", "year", "of"} <= set(names.WORDS)
    tokenizer = names.build_tokenizer(20)
    assert len(tokenizer(names.name_of(town))["input_ids"]) == 5  # a token a word
    assert names.load("train", "web", 1, [town], captions_per_image=2)[0]["caption"] == [row["kind"]] * 2
