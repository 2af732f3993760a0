"""The world of names: its rows and its tokenizer are those that models were trained on, to the bit."""

import hashlib

import pytest
from test_symbols import digest

from data import names


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (lambda: names.load("train", "web", 50, names.kind_set("256")), "d9ce24614a450a33"),
        (lambda: names.load("test", "detailed", 20, names.kind_set("256 half 2"), 1), "e5640f485df472a4"),
        (lambda: names.load("train", "facts", 20, names.kind_set("all"), captions_per_image=2), "5ae032200bb7c3d3"),
    ],
)
def test_rows_are_those_that_models_were_trained_on(load, expected):
    """Other digests mean other scores."""
    assert digest(load()) == expected


def test_tokenizer_is_that_of_the_models():
    tokenizer = names.build_tokenizer(20)
    assert hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16] == "567cbf33f0857ede"


def test_towns_are_distinct():
    """A shield is its charges and its country's tint."""
    towns = names.kind_set("16384")
    for what in (names.name_of, names.facts_of, lambda town: (town % 8, names.charges_of(town))):
        assert len({what(town) for town in towns}) == len(towns)
    countries = [names.kind_set(f"256 country {country}") for country in range(1, 9)]
    assert sorted(sum(map(list, countries), [])) == list(names.kind_set("256"))
