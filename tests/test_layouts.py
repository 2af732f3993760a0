"""The same pairs in every layout, loaded and streamed, give the same training; a split is a split."""

import io
import json
import os

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from tiny_sources import write_shard
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from data.pairs import load_pairs
from data.sources import DataArguments
from data.worlds import build_processor
from training.loader import PairLoader

NUMBER = 24
CAPTIONS = [f"a picture of the number {number} and others" for number in range(NUMBER)]
SPLITS = {"train": slice(0, 20), "test": slice(20, 24)}


@pytest.fixture(scope="module")
def processor():
    return build_processor("symbols", 16, 16)


def picture(number):
    """A PNG or a JPEG, some of them to be turned, transparent or of 16 bits."""
    rng, file, options = np.random.default_rng(number), io.BytesIO(), {}
    shape = (20, 16 + number)
    if number % 4 == 0:
        image = PIL.Image.fromarray(rng.integers(0, 65536, shape, dtype=np.uint16))
    else:
        image = PIL.Image.fromarray(rng.integers(0, 256, (*shape, 3 + (number % 4 == 1)), dtype=np.uint8))
    if number % 4 == 2:
        options["exif"] = PIL.Image.Exif()
        options["exif"][0x0112] = 6
    image.save(file, "jpeg" if number % 4 == 2 else "png", **options)
    return file.getvalue()


def suffix(number):
    return "jpg" if number % 4 == 2 else "png"


def rows_of(numbers):
    return datasets.Dataset.from_dict(
        {
            "image": [{"bytes": picture(number), "path": None} for number in numbers],
            "caption": [CAPTIONS[number] for number in numbers],
        },
        features=datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")}),
    )


def write_image_folder(folder, numbers):
    folder.mkdir(parents=True)
    lines = []
    for number in numbers:
        name = f"{number:03d}.{suffix(number)}"
        (folder / name).write_bytes(picture(number))
        lines.append(json.dumps({"file_name": name, "caption": CAPTIONS[number]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def members(numbers):
    """Of a shard: images under one suffix, as shards have them, whatever they are."""
    return [
        (f"{n:03d}.{kind}", content)
        for n in numbers
        for kind, content in (("png", picture(n)), ("txt", CAPTIONS[n].encode()))
    ]


def image_folder(folder):
    for split, part in SPLITS.items():
        write_image_folder(folder / split, range(NUMBER)[part])
    return {}


def parquet(folder):
    folder.mkdir()
    for split, part in SPLITS.items():
        rows = rows_of(range(NUMBER)[part])
        for number in range(2):
            name = f"{split}-0000{number}-of-00002.parquet"
            rows.shard(2, number, contiguous=True).to_parquet(folder / name)
    return {}


def shards(folder):
    for split, part in SPLITS.items():
        numbers = range(NUMBER)[part]
        half = len(numbers) // 2
        (folder / split).mkdir(parents=True)
        for number, half_of_them in enumerate((numbers[:half], numbers[half:])):
            write_shard(folder / split / f"{number}.tar", members(half_of_them))
    (folder / "train_stats.json").write_text("{}")
    return {"image_column": "png", "caption_column": "txt"}


def saved(folder):
    parts = {split: rows_of(range(NUMBER)[part]) for split, part in SPLITS.items()}
    datasets.DatasetDict(parts).save_to_disk(folder)
    return {}


LAYOUTS = {layout.__name__: layout for layout in (image_folder, parquet, shards, saved)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Settings of each layout."""
    place = tmp_path_factory.mktemp("layouts")
    return {name: {"source": str(place / name), **layout(place / name)} for name, layout in LAYOUTS.items()}


def tiny_clip(processor):
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = processor.tokenizer
    text = CLIPTextConfig(
        **tower, vocab_size=len(tokenizer), max_position_embeddings=16, eos_token_id=tokenizer.eos_token_id
    )
    vision = CLIPVisionConfig(**tower, image_size=16, patch_size=8)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def losses(loader, processor, number=10):
    model, losses = tiny_clip(processor), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _, batch in zip(range(number), loader.batches(0), strict=False):
        loss = model(**batch, return_loss=True).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def expected(sources, processor):
    """The losses of training on the first layout, and the pairs of each of its epochs."""
    arguments = DataArguments(**sources["image_folder"])
    loader = PairLoader(load_pairs(arguments), processor, arguments, 4)
    return losses(loader, processor), samples(loader, 5)


def samples(loader, number):
    """Pixels and tokens of the pairs of this many batches, in an order that does not depend on theirs."""
    found = []
    for _, batch in zip(range(number), loader.batches(0), strict=False):
        length = batch["input_ids"].shape[1]
        tokens = torch.nn.functional.pad(batch["input_ids"], (0, 16 - length), value=-1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, 16 - length))
        for pixels, ids, there in zip(batch["pixel_values"], tokens, mask, strict=True):
            found.append((pixels.numpy().tobytes(), ids[there == 1].tolist()))
    return sorted(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_layouts_train_alike_to_the_bit(layout, sources, processor, expected):
    arguments = DataArguments(**sources[layout])
    loader = PairLoader(load_pairs(arguments), processor, arguments, 4)
    assert losses(loader, processor) == expected[0]
    assert len(set(expected[0])) == 10


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_have_the_same_samples_an_epoch(layout, num_workers, sources, processor, expected):
    arguments = DataArguments(**sources[layout], streaming=True, num_workers=num_workers)
    loader = PairLoader(load_pairs(arguments), processor, arguments, 2)
    assert samples(loader, 10) == expected[1]
    assert len({pixels for pixels, _ in expected[1]}) == 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_processes_share_a_stream(layout, sources, processor, expected):
    arguments = DataArguments(**sources[layout], streaming=True)
    loaders = [PairLoader(load_pairs(arguments), processor, arguments, 2, rank, world_size=2) for rank in range(2)]
    assert sorted(sum((samples(loader, 5) for loader in loaders), [])) == expected[1]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "saved"])
def test_streams_in_the_order_of_their_files_train_alike(layout, sources, processor, monkeypatch):
    """Without shuffling, streams give the same losses to the bit. (Saved to disk, the order is that of parquet.)"""
    monkeypatch.setattr("datasets.IterableDataset.shuffle", lambda rows, **_: rows)
    found = []
    for name in (layout, "saved"):
        arguments = DataArguments(**sources[name], streaming=True)
        found.append(losses(PairLoader(load_pairs(arguments), processor, arguments, 4), processor))
    assert found[0] == found[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_resume_where_they_stopped(layout, num_workers, sources, processor):
    arguments = DataArguments(**sources[layout], streaming=True, num_workers=num_workers)
    loader = PairLoader(load_pairs(arguments), processor, arguments, 3)
    whole = [batch for _, batch in zip(range(9), loader.batches(0), strict=False)]  # more than an epoch
    rest = [batch for _, batch in zip(range(4), loader.batches(5), strict=False)]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(whole[5:], rest, strict=True) for key in a)


# ---- splits


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_is_a_split(layout, streaming, sources):
    for split, part in SPLITS.items():
        rows = load_pairs(DataArguments(**sources[layout], split=split, streaming=streaming))
        assert sorted(row["caption"] for row in rows) == sorted(CAPTIONS[part])
    with pytest.raises(ValueError, match=r"has no split 'nonsense', only train, test: set split \(--split\)"):
        load_pairs(DataArguments(**sources[layout], split="nonsense", streaming=streaming))


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize("layout", ["image_folder", "parquet", "shards", "saved"])
def test_files_that_name_no_split_are_train(layout, streaming, tmp_path):
    columns = {}
    if layout == "image_folder":
        write_image_folder(tmp_path / "x", range(4))
    elif layout == "parquet":
        (tmp_path / "x").mkdir()
        rows_of(range(4)).to_parquet(tmp_path / "x" / "0.parquet")
        (tmp_path / "x" / "test_notes.md").write_text("names of other files name no split")
    elif layout == "shards":
        (tmp_path / "x").mkdir()
        write_shard(tmp_path / "x" / "0.tar", members(range(4)))
        (tmp_path / "x" / "0.parquet").write_text("img2dataset writes one beside each shard")
        columns = {"image_column": "png", "caption_column": "txt"}
    else:
        rows_of(range(4)).save_to_disk(tmp_path / "x")
    arguments = {"source": str(tmp_path / "x"), "streaming": streaming, **columns}
    assert len(list(load_pairs(DataArguments(**arguments)))) == 4
    if layout == "saved":  # it does not know its split
        assert len(list(load_pairs(DataArguments(**arguments, split="test")))) == 4
    else:
        with pytest.raises(ValueError, match="has no split 'test', only train"):
            load_pairs(DataArguments(**arguments, split="test"))


def test_files_of_no_split_are_not_left_out_without_a_word(tmp_path, caplog):
    for number, name in enumerate(["train-0", "test-0", "0", "1"]):
        rows_of([number]).to_parquet(tmp_path / f"{name}.parquet")
    assert load_pairs(DataArguments(source=str(tmp_path)))["caption"] == CAPTIONS[:1]
    assert f"those of 2 .parquet files do not, such as {tmp_path / '0.parquet'}: they are not read" in caplog.text


def test_parts_and_sums_of_splits(sources):
    for layout, settings in sources.items():
        if layout != "saved":
            assert len(load_pairs(DataArguments(**settings, split="train+test"))) == NUMBER
            assert len(load_pairs(DataArguments(**settings, split="train[:3]"))) == 3
        with pytest.raises(ValueError, match="has no split 'train\\+nonsense', only train, test"):
            load_pairs(DataArguments(**settings, split="train+nonsense"))


@pytest.mark.parametrize("split", ["train", "test", "anything"])
def test_a_pattern_is_all_its_files(split, sources):
    settings = sources["parquet"] | {"source": sources["parquet"]["source"] + "/test-*.parquet"}
    assert sorted(load_pairs(DataArguments(**settings, split=split))["caption"]) == CAPTIONS[SPLITS["test"]]


def test_a_file_is_no_pattern(tmp_path):
    rows_of([0]).to_parquet(tmp_path / "x[1].parquet")
    rows_of([1]).to_parquet(tmp_path / "x1.parquet")
    assert load_pairs(DataArguments(source=str(tmp_path / "x[1].parquet")))["caption"] == CAPTIONS[:1]


def test_a_saved_dataset_knows_its_split(tmp_path, sources):
    rows = datasets.load_dataset(sources["parquet"]["source"], split="test")
    rows.save_to_disk(tmp_path / "x")
    assert len(load_pairs(DataArguments(source=str(tmp_path / "x"), split="test"))) == 4
    with pytest.raises(ValueError, match="has no split 'train', only test"):
        load_pairs(DataArguments(source=str(tmp_path / "x")))


def test_links_to_folders_are_not_lost_without_a_word(tmp_path, sources):
    os.symlink(sources["parquet"]["source"], tmp_path / "more")
    rows_of([0]).to_parquet(tmp_path / "0.parquet")
    with pytest.raises(ValueError, match=r"link to a folder, .*more, which is not followed: name files by a pattern"):
        load_pairs(DataArguments(source=str(tmp_path)))
    assert len(load_pairs(DataArguments(source=str(tmp_path / "**" / "*.parquet")))) == 1 + NUMBER
