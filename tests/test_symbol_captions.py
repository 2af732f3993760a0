"""What is said of symbols: detailed captions tell everything and never lie, web captions are short, vague and sometimes
wrong, and minimal pairs differ in one thing."""

import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from test_symbols import SMALL, encoded, told

from benchmarks.symbol_world import best_recall, caption_shares, read_caption, style_probe, whole_topics
from data import symbol_captions, symbols
from data.drawing import BACKGROUNDS, COLORS, OPPOSITE, POSITIONS, SIDES, TEXTURES
from data.symbol_kinds import KINDS, TOPIC_OF, TOPICS
from data.tokenizer import pieces_per_word
from data.worlds import build_processor


def words(text):
    return set(text.lower().replace(",", "").replace(".", "").replace(":", "").split())


@pytest.fixture(scope="module")
def web():
    return symbols.load("train", "web", 1500, image_size=SMALL)


@pytest.fixture(scope="module")
def detailed():
    return symbols.load("train", "detailed", 1500, image_size=SMALL)


@pytest.fixture(scope="module")
def tokenizer():
    return build_processor("symbols", 64, 32).tokenizer


def test_detailed_captions_tell_everything_and_never_lie(detailed):
    values = [*COLORS, *symbols.SIZES, *POSITIONS, *SIDES, *BACKGROUNDS, *TEXTURES]
    vocabulary = set(" ".join(values).split())
    for row in told(detailed):
        shown = {name: value for name, value in row.items() if name not in ("caption", "topic") and value}
        if row["second_kind"]:
            del shown["size"]  # the same of all of them
            shown["second_position"] = OPPOSITE[row["position"]]
        truth = set(" ".join(shown.values()).split())
        said = words(row["caption"])
        assert truth - said <= {"plain"}, row  # said with or without the word
        assert said & vocabulary - truth <= {"center"}, row


def test_captions_of_looks_tell_everything_but_the_kind():
    rows = told(symbols.load("train", "looks", 300, image_size=SMALL))
    for row in rows:
        shown = [row[name] for name in ("size", "color", "background", "texture", "second_color") if row[name]]
        shown.append("middle" if row["position"] == "center" else row["position"])
        assert set(" ".join(shown).split()) <= words(row["caption"]), row
        assert not words(row["topic"]) & words(row["caption"]), row
        assert all(f" {row[name]} " not in row["caption"] for name in ("kind", "second_kind")), row
    assert rows[0]["kind"] == told(symbols.load("train", "web", 1, image_size=SMALL))[0]["kind"]


def test_detailed_captions_say_which_symbol_has_which_color(detailed):
    for row in told(detailed):
        for kind, color in ((row["kind"], row["color"]), (row["second_kind"], row["second_color"])):
            ways = [f"{color} {kind}", f"{kind} in {color}", f"{kind}. It is {color} and", f"in {color} ink"]
            assert not kind or any(way in row["caption"] for way in [*ways, f"{color.capitalize()} {kind}"]), row


def test_web_captions_are_wrong_as_often_as_they_say(web, monkeypatch):
    """Half of the words that are drawn anew are told, and not right by chance."""
    shares = {}
    for share in (0.0, 1.0):
        monkeypatch.setattr(symbol_captions, "WRONG_SHARE", share)
        rows = told(symbols.load("train", "web", 1500, image_size=SMALL))
        shares[share] = np.mean([bool(kinds or inks) for _, kinds, inks in map(read_caption, rows)])
    assert shares[0.0] == 0 and 0.35 < shares[1.0] < 0.6
    wrong = caption_shares(web)["web captions with a kind or an ink that is not there"]
    monkeypatch.undo()
    assert abs(wrong / shares[1.0] - symbol_captions.WRONG_SHARE) < 0.03


def test_web_captions_are_vague(web):
    shares = caption_shares(web)
    assert 0.05 < shares["web captions with topics in place of kinds"] < 0.2
    assert 0.05 < shares["web captions that name no symbol"] < 0.25
    assert 0.5 < shares["web captions with the topic or a word of it"] < 0.95
    assert 3 < np.mean([len(words(caption)) for caption in web["caption"]]) < 9
    sizes, textures = set(symbols.SIZES), set(symbols.TEXTURES)
    complete = [bool(sizes & words(caption) and textures & words(caption)) for caption in web["caption"]]
    assert abs(np.mean(complete) - symbol_captions.COMPLETE) < 0.03


def test_topics_share_words():
    """A sun is in the sky and in the weather, a six on a die and in a hand."""
    topics_of, kinds_of = defaultdict(set), Counter()
    for name, topic in TOPICS.items():
        assert topic.short.keys() == topic.kinds.keys() and len(topic.words) == 5
        for kind, short in topic.short.items():
            assert words(short) <= words(kind)
            topics_of[short].add(name)
            kinds_of[name, short] += 1
    shared = {word for word, topics in topics_of.items() if len(topics) > 1}
    assert {"sun", "earth", "one", "six"} <= shared
    assert kinds_of["chess piece", "king"] == 2


def test_captions_fit_the_context(tokenizer):
    captions = [*symbols.load("test", "detailed", 1000, image_size=SMALL)["caption"]]
    longest = max(KINDS, key=len)
    scene = dict.fromkeys(symbols.ATTRIBUTES, "") | {"kind": longest, "second_kind": longest, "color": "purple"}
    scene |= {"second_color": "brown", "background": "turquoise", "texture": "checkered", "position": "bottom"}
    captions += [symbol_captions.caption(scene, "detailed", np.random.default_rng(seed)) for seed in range(20)]
    assert max(map(len, tokenizer(captions).input_ids)) <= 48 < tokenizer.model_max_length == 64


def test_the_tokenizer_knows_every_word(tokenizer, web, detailed):
    said = [*KINDS, *TOPICS, *(word for topic in TOPICS.values() for word in (*topic.words, *topic.short.values()))]
    styles = [list(values) for values in (COLORS, symbols.SIZES, POSITIONS, SIDES, BACKGROUNDS, TEXTURES)]
    templates = [template.format("cloud") for template in symbols.TEMPLATES]
    for captions in (said, *styles, templates, web["caption"], detailed["caption"]):
        assert pieces_per_word(tokenizer, captions) == 1.0


# --- minimal pairs


def test_pairs_differ_in_exactly_one_thing():
    kinds = [kind for kind in KINDS if not words(kind) & COLORS.keys()]  # so that what is black is ink
    pairs = symbols.load_minimal_pairs("test", 140, kinds)
    assert set(pairs.column_names) == {"image_0", "caption_0", "image_1", "caption_1", "attribute"}
    assert Counter(pairs["attribute"]) == dict.fromkeys(symbols.DIFFERENCES, 20)
    allowed = {"color": COLORS, "size": symbols.SIZES, "background": BACKGROUNDS}
    allowed |= {"position": [*POSITIONS, "corner"], "texture": [*TEXTURES, "without a pattern"], "kind": KINDS}
    allowed = {name: set(" ".join(values).split()) | {"a", "an"} for name, values in allowed.items()}
    for pair in told(pairs):
        texts = [pair["caption_0"], pair["caption_1"]]
        changed = words(texts[0]) ^ words(texts[1])
        if pair["attribute"] == "binding":
            inks = [[word for word in re.findall(r"\w+", text.lower()) if word in COLORS] for text in texts]
            assert inks[0] == inks[1][::-1] and len(set(inks[0])) == 2 and changed <= {"a", "an"}, pair
        else:
            assert changed and changed <= allowed[pair["attribute"]], pair
    assert all(one != other for one, other in zip(encoded(pairs, "image_0"), encoded(pairs, "image_1"), strict=True))


def test_binding_is_two_symbols_with_exchanged_colors():
    rng = np.random.default_rng(0)
    for _ in range(50):
        first = symbols.draw_scene(rng, KINDS, two=True)
        second = symbols._differ(first, "binding", KINDS, rng)
        exchanged = {"color": first["second_color"], "second_color": first["color"]}
        assert second == {**first, **exchanged} and first["color"] != first["second_color"]


@pytest.mark.parametrize("difference", ["kind", "color", "size", "position", "background", "texture"])
def test_a_scene_that_differs_in_one_value(difference):
    rng = np.random.default_rng(0)
    for _ in range(50):
        first = symbols.draw_scene(rng, KINDS, two=False)
        second = symbols._differ(first, difference, KINDS, rng)
        expected = {difference, "topic"} if first["topic"] != second["topic"] else {difference}
        assert {name for name in first if first[name] != second[name]} == expected
        assert second["topic"] == TOPIC_OF[second["kind"]]


# --- one kind alone, and what cannot be


def test_one_kind_alone():
    """Its second symbols are of the same kind, in another color."""
    rows = symbols.load("train", "web", 60, ["cloud"], image_size=SMALL)
    assert set(rows["kind"]) == {"cloud"} and set(rows["second_kind"]) == {"", "cloud"}
    assert len(symbols.load_minimal_pairs("test", 21, ["cloud", "comet"], image_size=SMALL)) == 21


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: symbols.load("validation", "web", 1), "split is 'validation', must be one of train, test"),
        (lambda: symbols.load("train", "short", 1), "captions is 'short', must be one of web, detailed"),
        (
            lambda: symbols.load("train", "web", 1, ["cloud", "clowd"]),
            r"kinds has \['clowd'\]; `data.symbols.KINDS` has",
        ),
        (lambda: symbols.load("train", "web", 1, []), "kinds has nothing; "),
        (lambda: symbols.load("train", "web", 1, image_size=15), "image_size is 15: symbols need at least 16 pixels"),
        (lambda: symbols.load("train", "web", 0), "num_samples is 0, must be at least 1"),
        (lambda: symbols.load("train", "web", 1, captions_per_image=0), "captions_per_image is 0, must be at least 1"),
        (lambda: symbols.load_minimal_pairs("val", 1), "split is 'val'"),
        (lambda: symbols.load_minimal_pairs("test", 1, ["planet"]), r"kinds has \['planet'\]"),
        (lambda: symbols.load_minimal_pairs("test", 1, image_size=-4), "image_size is -4"),
        (lambda: symbols.load_minimal_pairs("test", 0), "num_pairs is 0, must be at least 1"),
        (
            lambda: symbols.load_minimal_pairs("test", 1, ["cloud"] * 2),
            "kinds has 'cloud' alone: pairs .* at least two",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$") as error:
        call()
    assert len(str(error.value)) < 200


# --- what the benchmark finds


def test_style_does_not_tell_the_kind():
    train = symbols.load("train", "web", 2500, image_size=SMALL, two=False)
    test = symbols.load("test", "web", 500, image_size=SMALL, two=False)
    assert 0.01 < style_probe(train, test, "kind") < 0.15
    assert 0.3 < style_probe(train, test, "topic") < 0.7


def test_whole_topics(web):
    halves, quarters, topics, *_ = whole_topics(web)
    assert topics == pytest.approx(1) and 0.35 < halves < 0.5 < quarters < 0.8


def test_twins():
    """Two pictures of a scene, told the other way round; two of another with equal captions; and one alone."""
    rows = symbols.load("test", "detailed", 200, image_size=SMALL)
    (first, _), (other, alone) = ([row for row in rows if bool(row["second_kind"]) is two][:2] for two in (True, False))
    turned = {**first, "kind": first["second_kind"], "second_kind": first["kind"], "caption": "turned"}
    turned |= {"color": first["second_color"], "second_color": first["color"], "position": OPPOSITE[first["position"]]}
    five = type(rows).from_list([first, turned, other, other, alone], features=rows.features)
    assert best_recall(five) == (2 / 5, 3 / 5)
    assert best_recall(rows.select([0])) == (1, 1)
