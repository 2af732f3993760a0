"""Texts that are cut, and those that a model cannot tell apart: counted, told, and an error between classes."""

import itertools
import logging
import random

import datasets
import pytest
import torch
from small_evaluation import with_captions

from clip_moe.data import symbols, tokenizer
from clip_moe.data.overview import look_at
from clip_moe.data.symbols import SYMBOLS
from clip_moe.data.tokenizer import learn_tokenizer, read_texts
from clip_moe.engine.command_line import run_stage
from clip_moe.engine.messages import warn_once
from clip_moe.engine.result_schema import TextCounts
from clip_moe.evaluation.embedder import Embedder
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.measures import measure
from clip_moe.evaluation.report import write_report
from clip_moe.evaluation.task import Task
from clip_moe.evaluation.texts import count_texts

LONG = "a small red star on a white ground with a blue ring around it " * 2


@pytest.fixture
def embedder(dense):
    """Of a model that reads 16 tokens."""
    return Embedder(dense, None, 8, torch.device("cpu"))


@pytest.fixture(autouse=True)
def warnings(caplog):
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def task_on(rows, kind="retrieval", **more):
    return Task(kind, "title", "", lambda: (rows, 0), **more)


def classes_of(rows, names, templates=("{}",), **more):
    """A zero-shot task in which the images have these names in turn."""
    rows = with_captions(rows, list(itertools.islice(itertools.cycle(names), len(rows))))
    return task_on(rows, more.pop("kind", "zero_shot"), classes=names, templates=templates, **more)


def test_texts_are_read_in_parts_as_the_tokenizer_reads_each(monkeypatch):
    monkeypatch.setattr(tokenizer, "TEXTS_AT_ONCE", 3)
    learned = learn_tokenizer(["red star", "blue ring"], 600, 8)
    written = ["red star", "Red  STAR", "red star " * 9, "blue", "red star " * 8, "e\u0301", "é", "star red"]
    ids = [tuple(learned(text, truncation=True)["input_ids"]) for text in written]
    read = read_texts(learned, written)
    for one, other in itertools.combinations(range(len(written)), 2):
        assert (read.digests[one] == read.digests[other]) == (ids[one] == ids[other])
    assert read.is_cut == [number in (2, 4) for number in range(len(written))]
    assert len(set(ids)) == 5 and (read.texts, read.max_length) == (written, 8)
    # A text is pooled at its first end token: what stands after it is not read
    first, second, third = read_texts(learned, ["red <|endoftext|> star", "red <|endoftext|> x", "red star"]).digests
    assert first == second != third


@pytest.mark.parametrize("seed", range(3))
def test_counts_by_looking_at_every_two_texts(seed):
    random.seed(seed)
    learned = learn_tokenizer(["a b c"], 520, 4)  # two words are read
    written = [" ".join(random.choices("abcA", k=random.randint(1, 3))) for _ in range(60)]
    owners, contests = [random.randrange(20) for _ in written], [random.randrange(3) for _ in written]
    read = [tuple(learned(text, truncation=True)["input_ids"]) for text in written]
    places = list(zip(contests, owners, written, read, strict=True))

    def number(condition):
        return sum(any(a[0] == b[0] and a[1] != b[1] and condition(a, b) for b in places) for a in places)

    counts = count_texts(task_on(None), "captions", read_texts(learned, written), owners, contests)
    alike = number(lambda place, other: place[3] == other[3] and place[2] != other[2])
    repeated = number(lambda place, other: place[2] == other[2])
    cut = sum(text.count(" ") == 2 for text in written)
    assert counts == TextCounts(kind="captions", number=60, max_length=4, cut=cut, alike=alike, repeated=repeated)
    assert 0 < counts.repeated < 60 and 0 < counts.alike < 60 and counts.cut


@pytest.mark.parametrize(("captions", "told"), [(["a", "a", "a", "b"], True), (["a", "a", "b", "c"], False)])
def test_recall_where_most_captions_are_repeated_is_told(captions, told, warnings):
    learned = learn_tokenizer(["a b c"], 520, 4)
    count_texts(task_on(None), "captions", read_texts(learned, captions), range(4))
    assert ("4 captions" in warnings.text) == told


def test_captions_that_differ_after_the_cut_are_told_once(dense, embedder, warnings, tmp_path):
    rows = SYMBOLS.load("test", "web", 8)
    captions = [LONG + "one", LONG + "two", "a Star", "a star", "a moon", "a moon", "a ring", "a dot"]
    task = task_on(with_captions(rows, captions))
    result = measure(task, embedder)
    assert result["texts"] == dict(kind="captions", number=8, max_length=16, cut=2, alike=4, repeated=2, best={})
    sentence = (
        "of 8 captions, 2 longer than the 16 tokens of the tokenizer and cut; 2 the same as another; 4 with the same "
        "tokens as a different text: the model cannot tell them apart"
    )
    evaluate_model(dense, {"retrieval": task}, tmp_path)
    write_report(list(tmp_path.glob("*.json")), tmp_path / "report")
    assert f"- dense on retrieval: {sentence}" in (tmp_path / "report" / "report.md").read_text()
    assert [record.getMessage() for record in warnings.records] == [f"title: {sentence}"]


def test_a_report_begins_with_what_captions_allow(dense, tmp_path, capsys):
    """Of three images, the first two have captions that the tokenizer reads alike: both tie, and find one image."""
    rows = with_captions(SYMBOLS.load("test", "web", 3), ["a Star", "a star", "a moon"])
    rows.save_to_disk(tmp_path / "rows")
    tasks = [f"{{task: retrieval, dataset: {tmp_path / 'rows'}}}", "symbols_zero_shot"]
    run_stage("evaluate", [str(tmp_path / "out"), "--models.m", str(dense), "--tasks", *tasks, "--max_rows", "3"])
    assert f"its report is {tmp_path / 'out' / 'report.md'}" in capsys.readouterr().out
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    allowed = "allow no model more than R@1 image→text 33.3% and text→image 66.7%."
    assert report.splitlines()[2] == f"The captions of retrieval, rows, first 3 rows {allowed}"


def test_captions_of_one_image_need_not_be_told_apart_and_those_of_a_pair_do(embedder, warnings):
    rows = with_captions(SYMBOLS.load("test", "web", 2), [["a Star", "a star", "a star"], ["a moon", "A moon"]])
    counts = measure(task_on(rows), embedder)["texts"]
    assert (counts["number"], counts["alike"], counts["repeated"]) == (5, 0, 0) and not warnings.records
    rows = symbols.load_minimal_pairs("test", 3)
    for side, captions in enumerate((["a star", "a moon", "a dot"], ["A star", "a moon", "a star"])):
        rows = rows.remove_columns(f"caption_{side}").add_column(f"caption_{side}", captions)
    counts = measure(task_on(rows, "pairs"), embedder)["texts"]
    assert [counts[key] for key in ("number", "cut", "alike", "repeated")] == [6, 0, 2, 2]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([LONG + "one", LONG + "two"], "all prompts are cut at 16 tokens, before they differ: shorten names"),
        (["moon", "Star", "star"], "its tokenizer ignores the difference, such as case: rename one"),
        (["\xe9", "e\u0301"], "its tokenizer ignores the difference"),
    ],
)
def test_classes_of_equal_prompts_are_an_error(embedder, names, why):
    with pytest.raises(ValueError) as error:
        measure(classes_of(SYMBOLS.load("test", "web", 6), names, ("{}", "a picture of a {}")), embedder)
    assert f"title: the model cannot tell the classes {names[-2]!r} and {names[-1]!r} apart: {why}" in str(error.value)
    assert "\n" not in str(error.value)


def test_classes_that_may_have_equal_prompts(embedder, warnings):
    """Where one template or their groups tell them apart, or a benchmark's authors gave two classes one name, as
    ImageNet's did (rows then have the numbers of the classes)."""
    rows = SYMBOLS.load("test", "web", 6)
    counts = measure(classes_of(rows, ["star", "moon"], ("{}", LONG + "{}")), embedder)["texts"]
    assert [counts[key] for key in ("kind", "number", "cut", "alike")] == ["prompts", 4, 2, 2]
    assert "title: of 4 prompts, 2 longer than the 16 tokens" in warnings.text
    names = ["star", "star", "moon"]
    numbered = classes_of(rows, names).load()[0].add_column("label", [0, 1, 2] * 2)
    counts = measure(task_on(numbered, "zero_shot", classes=names, templates=["{}"]), embedder)["texts"]
    assert (counts["alike"], counts["repeated"]) == (0, 2)
    names = ["star", "moon", "Star"]
    apart, together = (dict(zip(names, groups, strict=True)) for groups in ("xxy", "xxx"))
    tasks = [classes_of(rows, names, kind="zero_shot_groups", group_of_class=groups) for groups in (apart, together)]
    assert measure(tasks[0], embedder)["texts"]["alike"] == 0
    with pytest.raises(ValueError, match="cannot tell the classes 'star' and 'Star' apart"):
        measure(tasks[1], embedder)


# --- the best that captions allow, counted by hand


def rows(captions):
    return captions and datasets.Dataset.from_dict({"caption": captions})


@pytest.mark.parametrize(
    ("train", "test", "sentences"),
    [
        # Of the six pictures, "a cat" and "A cat" tie; of the five captions, both find the same image, which is right
        # for one. Training never sees "a fish"
        (
            ["a dog", "a dog", "a dog", "a cat", "a bird", "salt &amp; pepper"],
            ["a dog", "a dog", "a cat", "A cat", "a bird", "a fish"],
            [
                "Training has 6 pairs with 4 different captions; the most frequent, 'a dog', belongs to 3 (50.0%).",
                "The test has 6 images with 5 different captions, 1 of which training never sees.",
                "The greatest R@1 that these captions allow is image→text 66.7% and text→image 80.0%; with the "
                "captions of training alone, image→text 50.0% and text→image 60.0%.",
                "2 captions have the same tokens as another caption: they differ only in case, spaces or after "
                "truncation.",
                "1 pairs have HTML in their caption, such as `&amp;`: write the character.",
            ],
        ),
        # The tokenizer reads "A dog", a caption of the first image alone, as "a dog"
        (
            ["a dog"],
            [["a dog", "A dog"], ["a cat", "a dog"]],
            ["The greatest R@1 that these captions allow is image→text 100.0% and text→image 100.0%; with the"],
        ),
        # Of six rows, three have one caption, and a fourth and a fifth one each that the tokenizer reads alike
        (
            ["a dog", "a dog", "a dog", "a cat", "A cat", "a bird"],
            None,
            ["The greatest R@1 that these captions allow is image→text 66.7% and text→image 75.0%."],
        ),
    ],
    ids=["six pictures", "several captions an image", "training alone"],
)
def test_what_captions_allow(train, test, sentences, tokenizer):
    lines = look_at(rows(train), rows(test), tokenizer)
    assert all(any(line.startswith(sentence) for line in lines) for sentence in sentences), lines
