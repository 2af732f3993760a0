"""The same pairs in every layout, loaded and streamed, give the same batches; a split is a split."""

import csv
import io
import json
import re
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import tiny_sources
import torch
from tiny_sources import images_and_texts, png, write_shard

from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.data.sources import open_rows
from clip_moe.evaluation.ensemble import open_model
from clip_moe.evaluation.measures import measure
from clip_moe.evaluation.own_data import retrieval_task
from clip_moe.training.loader import PairLoader
from clip_moe.training.samplers import Share

NUMBER = 24
CAPTIONS = [f"a picture of the number {number} and others" for number in range(NUMBER)]
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
SPLITS = {"train": slice(0, 20), "test": slice(20, 24)}


def rows_of(numbers):
    return tiny_sources.rows([CAPTIONS[number] for number in numbers], numbers[0])


def pictures(folder, numbers=range(NUMBER + 1)):
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        (folder / f"{number:03d}.png").write_bytes(png(number))


def write_image_folder(folder, numbers):
    pictures(folder, numbers)
    lines = [json.dumps({"file_name": f"{number:03d}.png", "caption": CAPTIONS[number]}) for number in numbers]
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def image_folder(folder):
    for split, part in SPLITS.items():
        write_image_folder(folder / split, range(NUMBER)[part])
    return {}


def parquet(folder):
    folder.mkdir()
    for split, part in SPLITS.items():
        for number in range(2):
            shard = rows_of(range(NUMBER)[part]).shard(2, number, contiguous=True)
            shard.to_parquet(folder / f"{split}-0000{number}-of-00002.parquet")
    return {}


def shards(folder):
    for split, part in SPLITS.items():
        numbers = range(NUMBER)[part]
        (folder / split).mkdir(parents=True)
        for number in range(2):
            half = numbers[number * len(numbers) // 2 :][: len(numbers) // 2]
            write_shard(folder / split / f"{number}.tar", images_and_texts(half, CAPTIONS))
    (folder / "train_stats.json").write_text("{}")
    return {"image_column": "png", "caption_column": "txt"}


def saved(folder):
    datasets.DatasetDict({split: rows_of(range(NUMBER)[part]) for split, part in SPLITS.items()}).save_to_disk(folder)
    return {}


LAYOUTS = {layout.__name__: layout for layout in (image_folder, parquet, shards, saved)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Settings of each layout."""
    place = tmp_path_factory.mktemp("layouts")
    return {name: {"source": str(place / name), **layout(place / name)} for name, layout in LAYOUTS.items()}


def read(settings, processor, size, number, start=0, rank=0, world_size=1, **more):
    """So many batches."""
    arguments = DataArguments(**settings, **more)
    loader = PairLoader(load_pairs(arguments), processor, arguments, Share(size, rank, world_size))
    return [batch for _, batch in zip(range(number), loader.batches(start), strict=False)]


def samples(batches):
    """Pixels and tokens of the pairs of batches, in an order that does not depend on theirs."""
    found = []
    for batch in batches:
        columns = (batch[key] for key in ("pixel_values", "input_ids", "attention_mask"))
        for pixels, ids, there in zip(*columns, strict=True):
            found.append((pixels.numpy().tobytes(), ids[there == 1].tolist()))
    return sorted(found)


def require_equal(batches, others):
    assert len(batches) == len(others)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(batches, others, strict=True) for key in a)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_give_the_same_batches(layout, sources, processor):
    """To the bit if they are loaded; streams have the same samples an epoch, also those that processes share."""
    expected = read(sources["image_folder"], processor, 4, 10)  # of two epochs
    require_equal(read(sources[layout], processor, 4, 10), expected)
    epoch = samples(expected[:5])
    assert len({pixels for pixels, _ in epoch}) == 20
    for num_workers in (0, 2):
        streamed = read(sources[layout], processor, 2, 10, streaming=True, num_workers=num_workers)
        assert samples(streamed) == epoch
    shares = [read(sources[layout], processor, 2, 5, rank=rank, world_size=2, streaming=True) for rank in range(2)]
    assert samples(sum(shares, [])) == epoch


@pytest.mark.parametrize(
    ("layout", "num_workers"), [*((layout, 0) for layout in LAYOUTS), ("parquet", 2), ("shards", 2)]
)
def test_streams_resume_where_they_stopped(layout, num_workers, sources, processor):
    options = {"streaming": True, "num_workers": num_workers}
    whole = read(sources[layout], processor, 3, 9, **options)  # more than an epoch
    require_equal(read(sources[layout], processor, 3, 4, start=5, **options), whole[5:])


@STREAMING
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_is_a_split(layout, streaming, sources):
    for split, part in SPLITS.items():
        rows = load_pairs(DataArguments(**sources[layout], split=split, streaming=streaming))
        assert sorted(row["caption"] for row in rows) == sorted(CAPTIONS[part])
    for split in ("nonsense", "train+nonsense"):
        with pytest.raises(ValueError, match=rf"has no split '{re.escape(split)}', only train, test: set split"):
            load_pairs(DataArguments(**sources[layout], split=split, streaming=streaming))
    if layout != "saved" and not streaming:
        for split, number in (("train+test", NUMBER), ("train[:3]", 3)):
            assert len(load_pairs(DataArguments(**sources[layout], split=split))) == number


def test_files_of_no_split_are_not_left_out_without_a_word_and_those_of_two_are_refused(tmp_path, caplog):
    for number, name in enumerate(["train-0", "test-0", "0", "1"]):
        rows_of([number]).to_parquet(tmp_path / f"{name}.parquet")
    assert load_pairs(DataArguments(source=str(tmp_path)))["caption"] == CAPTIONS[:1]
    assert f"{tmp_path}: 2 files are ignored (2 .parquet), such as 0.parquet" in caplog.text
    rows_of([1]).to_parquet(tmp_path / "test-train-overlap.parquet")
    for split in SPLITS:
        with pytest.raises(ValueError, match="overlap.parquet is in both splits .* and .* by its name"):
            load_pairs(DataArguments(source=str(tmp_path), split=split))


def test_a_pattern_is_all_its_files_whatever_the_split(sources):
    pattern = sources["parquet"]["source"] + "/test-*.parquet"
    for split in ("train", "test", "anything"):
        assert sorted(load_pairs(DataArguments(source=pattern, split=split))["caption"]) == CAPTIONS[SPLITS["test"]]


def test_pictures_are_read_beside_parquet_without_images(tmp_path):
    """As img2dataset leaves them."""
    pictures(tmp_path / "00000", range(3))
    for number in range(3):
        (tmp_path / "00000" / f"{number:03d}.txt").write_text(CAPTIONS[number])
    datasets.Dataset.from_dict({"url": ["x"] * 3, "caption": CAPTIONS[:3]}).to_parquet(tmp_path / "00000.parquet")
    assert load_pairs(DataArguments(source=str(tmp_path)))["caption"] == CAPTIONS[:3]


README = """---
configs:
- config_name: {}
  data_files:
  - split: train
    path: part_a/*.parquet
  - split: test
    path: part_b/*.parquet
{}---
# Pairs
"""


def test_a_readme_may_name_the_splits(tmp_path):
    """As that of a dataset on the Hub; the names of files count without it."""
    for name, numbers in (("part_a", range(3)), ("part_b", range(3, 5))):
        (tmp_path / name).mkdir()
        rows_of(numbers).to_parquet(tmp_path / name / "0.parquet")
    source = str(tmp_path)
    (tmp_path / "README.md").write_text(README.format("default", ""))
    for split, part in (("train", CAPTIONS[:3]), ("test", CAPTIONS[3:5]), ("train+test", CAPTIONS[:5])):
        assert load_pairs(DataArguments(source=source, split=split))["caption"] == part
    (tmp_path / "README.md").write_text(README.format("en", "- config_name: fr\n  data_files: part_b/*.parquet\n"))
    with pytest.raises(ValueError, match="README.md has several configurations, en, fr: name the files of one by"):
        load_pairs(DataArguments(source=source))
    (tmp_path / "README.md").write_text("# Pairs\n")
    assert len(load_pairs(DataArguments(source=source))) == 5


def test_a_saved_dataset_knows_its_split(tmp_path, sources):
    datasets.load_dataset(sources["parquet"]["source"], split="test").save_to_disk(tmp_path)
    for split, number in (("test", 4), ("test[1:]", 3)):
        assert len(load_pairs(DataArguments(source=str(tmp_path), split=split))) == number
    with pytest.raises(ValueError, match="has no split 'train', only test"):
        load_pairs(DataArguments(source=str(tmp_path)))


@pytest.mark.parametrize("save", ["to_parquet", "save_to_disk"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_of_splits_in_files_that_have_one_split_is_refused(tmp_path, save, streaming):
    rows, path = rows_of([0, 1, 2]), str(tmp_path / "rows.parquet")
    getattr(rows.add_column("split", ["train", "Test", "val"]), save)(path)
    with pytest.raises(ValueError, match=r"rows of several splits in its column split \(test, train, val\)"):
        open_rows(DataArguments(source=path, streaming=streaming))
    for names in (["train"] * 3, ["train", "b", "test"]):
        other = str(tmp_path / f"{names[1]}.parquet")
        getattr(rows.add_column("split", names), save)(other)
        assert len(list(open_rows(DataArguments(source=other, streaming=streaming)))) == 3


# Names of pictures and captions; the last two cannot be used: a picture without a caption, and one that is not there
ENTRIES = [*((f"{number:03d}.png", text) for number, text in enumerate(CAPTIONS)), ("024.png", None), ("x.png", "a")]


def beside_pictures(folder, name):
    pictures(folder / "pictures")
    return {"source": str(folder / name), "image_root": str(folder / "pictures")}


def as_table(folder, name, delimiter=",", encoding="utf-8"):
    text = io.StringIO()
    lines = [(image, caption or "NA") for image, caption in ENTRIES]
    csv.writer(text, delimiter=delimiter).writerows([("image", "caption"), *lines])
    (folder / name).write_bytes(text.getvalue().encode(encoding))
    return beside_pictures(folder, name)


def as_json(folder, name):
    entries = [{"image": image, "caption": caption} for image, caption in ENTRIES]
    text = json.dumps(entries) if name.endswith(".json") else "\n".join(map(json.dumps, entries))
    (folder / name).write_text(text)
    return beside_pictures(folder, name)


def as_parquet(folder, image, kind):
    """Images as `image` makes them of numbers."""
    folder.joinpath("rows").mkdir()
    images = [image(number) for number in range(NUMBER + 1)]
    broken = "x.png" if kind == pyarrow.string() else {"bytes": b"x"} if pyarrow.types.is_struct(kind) else b"x"
    captions = pyarrow.array([caption for _, caption in ENTRIES])
    table = pyarrow.table({"image": pyarrow.array([*images, broken], kind), "caption": captions})
    pyarrow.parquet.write_table(table, folder / "rows" / "0.parquet")
    return beside_pictures(folder, "rows")


def as_shards(folder, endings=("png",), suffix="tar", pattern="{0..1}.tar", **settings):
    members = []
    for number, (_, caption) in enumerate(ENTRIES[:-1]):
        name, ending = f"{number:03d}", endings[number % len(endings)]
        members += [(f"{name}.{ending}", png(number)), (f"{name}.txt", (caption or " ").encode())]
    for number, part in enumerate((members[:20], [*members[20:], ("x.txt", b"a")])):
        write_shard(folder / f"{number}.{suffix}", part)
    columns = {"image_column": ";".join(endings), "caption_column": "txt"}
    return {"source": str(folder / pattern), **columns, **settings}


def as_folder(folder, how):
    """Through a link, with a table above the pictures, or with a text beside each of them."""
    pictures(folder / "elsewhere")
    (folder / "data").mkdir()
    (folder / "data" / "pictures").symlink_to(folder / "elsewhere")
    if how == "texts":
        for number, caption in enumerate(CAPTIONS):
            (folder / "elsewhere" / f"{number:03d}.txt").write_text(caption + "\r\n")
        (folder / "elsewhere" / "x.png").write_bytes(b"x")
        (folder / "elsewhere" / "x.txt").write_text("a")
    else:
        lines = [json.dumps({"file_name": f"pictures/{image}", "caption": caption}) for image, caption in ENTRIES]
        (folder / "data" / "metadata.jsonl").write_text("\n".join(lines))
    return {"source": str(folder / "data")}


BYTES = {"bytes": pyarrow.binary(), "path": pyarrow.string()}
LAYOUTS_OF_ONE_SET = {
    "folder with a table": lambda folder: as_folder(folder, "table"),
    "folder with texts": lambda folder: as_folder(folder, "texts"),
    "csv": lambda folder: as_table(folder, "pairs.csv"),
    "tsv of Excel": lambda folder: as_table(folder, "pairs.tsv", "\t", "utf-16"),
    "json": lambda folder: as_json(folder, "pairs.json"),
    "json lines": lambda folder: as_json(folder, "pairs.jsonl"),
    "parquet": lambda folder: as_parquet(folder, lambda n: {"bytes": png(n), "path": None}, pyarrow.struct(BYTES)),
    "parquet without paths": lambda folder: as_parquet(
        folder, lambda n: {"bytes": png(n)}, pyarrow.struct({"bytes": pyarrow.binary()})
    ),
    "parquet of bytes": lambda folder: as_parquet(folder, png, pyarrow.binary()),
    "parquet of large bytes": lambda folder: as_parquet(folder, png, pyarrow.large_binary()),
    "parquet of names": lambda folder: as_parquet(folder, "{:03d}.png".format, pyarrow.string()),
    "shards": as_shards,
    "shards in a folder": lambda folder: as_shards(folder, pattern=""),
    "shards of two endings": lambda folder: as_shards(folder, ("jpg", "png"), pattern="{0,1}.tar"),
    "shards by an index": lambda folder: as_shards(folder, indexed=True),
    "compressed shards": lambda folder: as_shards(folder, suffix="tar.gz", pattern="*.tar.gz"),
}


@pytest.fixture(scope="module")
def model():
    return open_model("training/symbol_clip", None, 64, torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory, processor, model):
    """The samples of an epoch, and the scores, of a folder without a fault."""
    folder = tmp_path_factory.mktemp("expected") / "folder"
    write_image_folder(folder, range(NUMBER))
    settings = {"source": str(folder)}
    return samples(read(settings, processor, 4, 6)), measure(retrieval_task(DataArguments(**settings)), model)


@pytest.mark.parametrize("layout", LAYOUTS_OF_ONE_SET)
def test_the_same_pairs_in_every_layout(layout, tmp_path, processor, model, expected, caplog):
    """24 pairs, and two that cannot be used: loaded and streamed, and with the same scores. Files in a folder that name
    no split are of train, whatever is beside them."""
    settings = LAYOUTS_OF_ONE_SET[layout](tmp_path) | {"max_unreadable": 0.1}
    if Path(settings["source"]).is_dir():
        (Path(settings["source"]) / "test_notes.md").write_text("names of other files name no split")
        for streaming in (False, True):
            with pytest.raises(ValueError, match="has no split 'test', only train"):
                load_pairs(DataArguments(**settings, split="test", streaming=streaming))
    epoch, scores = expected
    assert samples(read(settings, processor, 4, 6)) == epoch
    assert "2 of 26 pairs" in caplog.text
    if settings.pop("indexed", False):
        return  # for training alone
    caplog.clear()
    assert samples(read(settings, processor, 4, 6, streaming=True)) == epoch
    assert re.search("2 of . pairs skipped so far", caplog.text)
    found = measure(retrieval_task(DataArguments(**settings)), model)
    assert scores["num_skipped"] == 0 and found == scores | {"num_skipped": 2}


def test_other_files_beside_parquet_are_counted(tmp_path, caplog):
    rows_of([0, 1]).to_parquet(tmp_path / "0.parquet")
    rows_of([2, 3]).to_parquet(tmp_path / "1.PARQUET")
    (tmp_path / "2.jsonl").write_text("{}")
    (tmp_path / "3.tar.md").write_text("")
    pictures(tmp_path / "assets", [5])
    assert len(load_pairs(DataArguments(source=str(tmp_path)))) == 4
    assert "3 files are ignored (1 .jsonl, 1 .md, 1 .png), such as 2.jsonl" in caplog.text
