"""The origin of a model on its card, and the examples that it shows."""

import re

import pytest
from markdown_it import MarkdownIt
from published_runs import card_of, change_model, lineage_of, made, run, write_analysis

from clip_moe.conversion.publishing.card import _stage_row
from clip_moe.conversion.publishing.lineage import DataOrigin, Lineage
from clip_moe.data import names
from clip_moe.data.symbols import KINDS
from clip_moe.data.worlds import world
from clip_moe.engine.provenance import Record

pytestmark = pytest.mark.slow

made, run  # noqa: B018, fixtures


def test_a_card_tells_whether_the_experts_do_anything(run):
    write_analysis(run)
    text = card_of(lineage_of(run)).text
    assert re.findall("^##+ (.+)$", text, re.MULTILINE)[2:4] == ["Do the experts do anything?", "How it was made"]
    page = MarkdownIt().enable("table").render(text)
    collapse = "75.0% routed, 50.0% with the mean of the experts: -25.0 ± 6.2 points"
    for measured, found in (
        ("collapse test, retrieval, my_*photos*: R@1 image→text", collapse),
        ("entropy of the routers", "1.50 of at most 2.00 bits (layers: 1.25 to 1.75)"),
        ("how alike the experts are", "CKA 0.500 (pairs: 0.250 to 0.875)"),
    ):
        assert f"<td>{measured}</td>\n<td>{found}</td>" in page
    write_analysis(run, summary={"collapse": []})
    with pytest.raises(ValueError, match="experts.json has no valid summary of experts: .*; most_"):
        lineage_of(run)
    change_model(run)
    assert "Do the experts" not in card_of(lineage_of(run)).text


def test_a_card_names_the_method():
    sigmoid = {"stage": "upcycle", "preset": "clip_up", "changes": {}, "text_config": {"scoring_func": "sigmoid"}}
    adapted = {"stage": "train", "max_steps": 9, "lora": {"r": 2}}
    averaged = {"stage": "average", "models": ["base", "tuned"], "weights": [0.5, 0.5]}
    records = [Record(stage=stage) for stage in (sigmoid, adapted, averaged)]
    records.append(Record(stage={"stage": "my.module:Stage", "bias": -10}, own_settings=["bias"]))
    assert [_stage_row(record)[1] for record in records] == [
        "preset clip_up, text_config {'scoring_func': 'sigmoid'}",
        "max_steps 9, lora {'r': 2}",
        "models ['base', 'tuned'], weights [0.5, 0.5]",
        "bias -10",
    ]


def told(**lineage):
    return " ".join(card_of(Lineage(**lineage)).text.split())


OWN = DataOrigin("clip_arts", "local", "columns image and caption", 5612)
SYMBOLS = DataOrigin("symbols", "world", "web captions of half 1", 16000)
SCRATCH = {"scratch": Record(stage={"stage": "initialize"})}


def test_limits_by_origin():
    text = told(stages=SCRATCH, data=[OWN])
    pairs = "5,612 pairs of clip_arts (local, columns image and caption)"
    assert f"It was trained from nothing on {pairs}. Of other kinds of images" in text and "inherits" not in text
    assert "From random weights, by" in text and "The license of the weights was not given here." in text
    text = told(stages=SCRATCH, data=[SYMBOLS], unknown=["symbol_clip"])
    assert "It inherits the limits of symbol_clip, a local folder of unknown lineage. Since then it has been" in text
    assert "trained on 16,000 pairs of symbols (web captions of half 1)" in text
    text = told(bases=["openai/clip-vit-base-patch32"])
    assert "It inherits the limits of OpenAI's CLIP: biases of captions from the web" in text
    text = told(stages={"mine": Record(stage={"stage": "my.module:Stage"})})
    assert "From weights of unknown origin, by" in text and "from nothing" not in text


def test_examples_are_of_the_models_own_data():
    assert told(data=[SYMBOLS]).count('["a picture of a snowman", "a picture of a cloud"]') == 4
    text = told(stages=SCRATCH, data=[OWN])
    assert text.count('["one text about the image", "another text"]') == 4 and "a cat" not in text
    assert '"a photo of a cat"' in told(bases=["openai/clip-vit-large-patch14"])
    assert set(world("names").examples) <= {names.name_of(town) for town in range(4096)}
    assert set(world("symbols").examples) <= {
        f"a picture of {article} {kind}" for kind in KINDS for article in ("a", "an")
    }
