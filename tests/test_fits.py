"""What tells, before anything runs, that two stages are of other data, or that models read otherwise."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
from documents import ROOT

from data.sources import DataArguments
from training.estimates import AtMost, Expected, Uncounted, model_configs, other_rows, read_otherwise


def fault(theirs, ours):
    """Of two stages with these settings and numbers of pairs."""
    (one, of_one), (other, of_other) = (
        (Expected(data=DataArguments(**settings), pairs=pairs), pairs) for settings, pairs in (theirs, ours)
    )
    return other_rows("features", Expected(rows=one, pairs=of_one), other)


def saved(folder, name):
    folder.mkdir()
    (folder / name).write_text(json.dumps({}))
    return str(folder)


@pytest.mark.parametrize(
    ("source", "splits", "differ"),
    [
        ("symbols", ("train", "test"), True),
        ("user/pairs", ("train", "test"), True),
        ("state.json", ("train", "test"), False),
        ("dataset_dict.json", ("train", "test"), True),
        ("pairs.csv", ("train", "test"), False),
        ("shards/*.tar", ("train", "test"), False),
        ("pairs.csv", ("train", "train[:20%]"), True),
        ("captions.json", ("train", "restval"), True),
    ],
)
def test_a_split_chooses_rows_of_what_has_splits(tmp_path, monkeypatch, source, splits, differ):
    monkeypatch.chdir(tmp_path)
    name = saved(tmp_path / "saved", source) if source in ("state.json", "dataset_dict.json") else source
    number = {"num_samples": 8} if source == "symbols" else {}
    theirs, ours = ({"source": name, "split": split, **number} for split in splits)
    found = fault((theirs, "unknown"), (ours, "unknown"))
    expected = (
        f"features is of other data: split is '{splits[0]}' there and '{splits[1]}' here. Use the same data in both"
    )
    assert found == (expected if differ else "")


@pytest.mark.parametrize(("kind", "differ"), [(int, True), (AtMost, True), (Uncounted, False)])
def test_numbers_that_nothing_counted_are_not_compared(kind, differ):
    """500 and 200 may be all of 150 pairs."""
    theirs, ours = ({"source": "shards", "num_samples": number} for number in (500, 200))
    found = fault((theirs, kind(500)), (ours, kind(200)))
    assert found == (
        "features is of other data: the number of pairs is 500 there and 200 here. Use the same data in both" * differ
    )


def test_processors_are_compared_as_far_as_they_are_known(tmp_path):
    """Not where a model got longer texts since it had the processor."""
    for folder in ("one", "other"):
        shutil.copytree(ROOT / "training" / "symbol_clip", tmp_path / folder)
    path = tmp_path / "other" / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["image_processor"]["image_mean"] = [0.4, 0.5, 0.5]
    path.write_text(json.dumps(settings))
    one, other = (Expected(model_configs(str(tmp_path / name)), processor=tmp_path / name) for name in ("one", "other"))
    assert "image processor of" in read_otherwise([one, other])
    assert read_otherwise([one, one]) == read_otherwise([one, Expected()]) == ""
    longer = copy.deepcopy(other.configs)
    longer[0].text_config.max_position_embeddings += 1
    assert read_otherwise([one, replace(other, configs=longer)]) == ""
