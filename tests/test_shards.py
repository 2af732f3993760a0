"""Shards that are read by an index, beside the same shards loaded whole."""

import gzip
import io
import itertools
import tarfile

import pytest
import torch
from datasets import Dataset
from tiny_sources import images_and_texts, png, write_shard

from clip_moe.data import images
from clip_moe.data.arguments import DataArguments
from clip_moe.data.identity import data_fingerprint
from clip_moe.data.pairs import load_pairs
from clip_moe.data.shards import read_member
from clip_moe.data.sources import open_rows
from clip_moe.training import loader as loader_module
from clip_moe.training.loader import PairLoader
from clip_moe.training.samplers import Share


@pytest.fixture
def shards(tmp_path):
    """Two shards of three and two pairs, whose pictures differ."""
    captions = [f"picture {number}" for number in range(5)]
    write_shard(tmp_path / "0.tar", images_and_texts(range(3), captions))
    write_shard(tmp_path / "1.tar", images_and_texts(range(3, 5), captions))
    return str(tmp_path / "*.tar")


def arguments(source, **settings):
    return DataArguments(**{"source": source, "image_column": "png", "caption_column": "txt"} | settings)


def test_a_changed_shard_is_indexed_anew_and_known_as_other_data(shards, tmp_path):
    known = [data_fingerprint(load_pairs(arguments(shards, indexed=True))) for _ in range(2)]
    content = bytearray((tmp_path / "0.tar").read_bytes())
    content[600] ^= 1  # of an image alone
    (tmp_path / "0.tar").write_bytes(bytes(content))
    known.append(data_fingerprint(load_pairs(arguments(shards, indexed=True))))
    write_shard(tmp_path / "1.tar", images_and_texts(range(2, 4), ["another"] * 5))
    after = load_pairs(arguments(shards, indexed=True))
    assert list(after["caption"])[3:] == ["another", "another"]
    known.append(data_fingerprint(after))
    assert known[0] == known[1] and len(set(known)) == 3
    (tmp_path / "0.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:520])
    with pytest.raises(OSError, match="0.tar ends before byte .*: has it changed since it was indexed"):
        images.decode_image(after[0]["image"])


def one_shard(tmp_path, members, **settings):
    write_shard(tmp_path / "0.tar", members)
    return arguments(str(tmp_path / "0.tar"), indexed=True, **settings)


def test_a_column_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="the shards have no column png; .*0.tar has jpg, txt"):
        load_pairs(one_shard(tmp_path, [("0.jpg", b"x"), ("0.txt", b"a")]))


def test_names_with_dots_and_folders_are_keys_up_to_the_first_dot(tmp_path):
    members = [("a.b/0.png", png(1)), ("a.b/0.txt", b"first"), ("a.b/1.txt", b"second"), ("a.b/1.PNG", png(2))]
    rows = open_rows(one_shard(tmp_path, members))
    assert list(rows["txt"]) == ["first", "second"]
    assert [read_member(image["path"]) for image in rows["png"]] == [png(1), png(2)]


def test_what_does_not_go_with_it():
    for settings in ({"streaming": True}, {"in_memory": True}):
        with pytest.raises(ValueError, match="indexed excludes worlds, streaming and in_memory"):
            arguments("shards/*.tar", indexed=True, **settings)


def test_images_of_other_files_are_not_looked_at_either(tmp_path):
    Dataset.from_dict({"image": [{"bytes": b"x"}], "txt": ["one"]}).to_parquet(tmp_path / "pairs.parquet")
    rows = load_pairs(arguments(str(tmp_path / "pairs.parquet"), indexed=True, image_column="image"))
    assert list(rows["caption"]) == ["one"]


def batches(processor, data, start=0, number=4):
    loader = PairLoader(load_pairs(data), processor, data, Share(2, seed=3))
    return list(itertools.islice(loader.batches(start), number))


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}])
def test_batches_are_those_of_the_loaded_shards(shards, processor, settings):
    expected, indexed = batches(processor, arguments(shards)), arguments(shards, indexed=True, **settings)
    torch.testing.assert_close(batches(processor, indexed), expected, rtol=0, atol=0)
    torch.testing.assert_close(batches(processor, indexed, start=3, number=1), expected[3:], rtol=0, atol=0)


def test_an_unreadable_image_is_replaced_by_the_next_and_counted(tmp_path, processor, caplog):
    members = images_and_texts(range(4), ["zero", "one", "two", "three"])
    members[2] = ("1.png", b"no image")
    data = one_shard(tmp_path, members, max_unreadable=0.3)
    two = batches(processor, data, number=2)
    ids = [text for batch in two for text in batch["input_ids"]]
    assert sorted(processor.batch_decode(ids, skip_special_tokens=True)) == ["three", "two", "two", "zero"]
    assert f"1 of 4 pairs of {data.source} cannot be used; the first is pair 1 ({data.source}" in caplog.text
    assert ".tar#" in caplog.text and "): it is not an image" in caplog.text
    with pytest.raises(ValueError, match="1 of 4 pairs of .*More than max_unreadable = 1% is an error"):
        batches(processor, one_shard(tmp_path, members), number=2)


def test_a_reader_judges_by_what_it_tried(tmp_path, processor, monkeypatch):
    """A worker sees a part of all pairs: their share counts, not their number."""
    monkeypatch.setattr(loader_module, "STREAM_TRIAL", 8)
    members = images_and_texts(range(40))
    for number in range(0, 40, 4):
        members[2 * number] = (f"{number}.png", b"no image")
    data = one_shard(tmp_path, members, max_unreadable=0.2)
    pairs = PairLoader(load_pairs(data), processor, data, Share(2)).pairs
    with pytest.raises(ValueError, match="3 of 11 pairs of .* More than max_unread"):
        [pairs[None, number] for number in range(20)]


def test_two_samples_of_one_name_are_two(tmp_path):
    members = [("1.png", png(1)), ("1.txt", b"one"), ("1.png", png(2)), ("1.txt", b"two")]
    assert list(load_pairs(one_shard(tmp_path, members))["caption"]) == ["one", "two"]


def test_a_shard_that_is_lost_is_missed(tmp_path):
    for number in (0, 2):
        write_shard(tmp_path / f"{number}.tar", images_and_texts(range(3)))
    with pytest.raises(ValueError, match="no file matches .*/1.tar"):
        load_pairs(arguments(f"{tmp_path}/{{0..2}}.tar"))


def test_the_ending_that_is_named_first_is_taken(tmp_path):
    members = [("0.png", png(1)), ("0.webp", png(2)), ("0.txt", b"a")]
    for column, number in (("webp;png", 2), ("png;webp", 1)):
        (row,) = load_pairs(one_shard(tmp_path, members, image_column=column))
        assert read_member(row["image"]["path"]) == png(number)


DAMAGES = {
    "several in one": lambda content: content * 2,
    "a header": lambda content: content[:1024] + b"\xff" * 512 + content[1536:],
    "cut": lambda content: content[:2048],
    "cut at a header": lambda content: content[:1024],
    "no archive": lambda content: b"this is no archive",
    "zeros": lambda content: content[:2048] + bytes(2**18),
}


@pytest.mark.parametrize("way", ["streaming", "indexed"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_nothing_behind_a_damage_is_lost_without_a_word(tmp_path, damage, way):
    for number in range(2):  # not in the first of them alone
        write_shard(tmp_path / f"{number}.tar", images_and_texts(range(4 * number, 4 * number + 4)))
    (tmp_path / "1.tar").write_bytes(damage((tmp_path / "1.tar").read_bytes()))
    with pytest.raises(ValueError, match=r"1.tar is no tar, or is cut or damaged, or several in one: copy or download"):
        list(load_pairs(arguments(str(tmp_path / "*.tar"), **{way: True})))


def test_a_damaged_stream_ends_in_one_line_of_its_worker(tmp_path, processor):
    write_shard(tmp_path / "0.tar", images_and_texts(range(4)))
    (tmp_path / "1.tar").write_bytes(DAMAGES["a header"]((tmp_path / "0.tar").read_bytes()))
    with pytest.raises(ValueError, match=r"\A[^\n]*1.tar is no tar, or is cut[^\n]*\Z"):
        batches(processor, arguments(str(tmp_path / "*.tar"), streaming=True, num_workers=2), number=9)


def test_files_that_no_sample_takes_are_counted(tmp_path, caplog):
    """Links, as tar writes them for files with several names, and names with dots, which are those of one sample."""
    write_shard(tmp_path / "0.tar", images_and_texts(range(2)))
    with tarfile.open(tmp_path / "0.tar", "a") as tar:
        for name in ("2.png", "2.txt"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, name.replace("2", "1")
            tar.addfile(link)
        for name in ("video.01.png", "video.02.png"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert len(load_pairs(arguments(str(tmp_path / "0.tar"), max_unreadable=0.5))) == 2
    assert "0.tar: 2 links to other files are ignored, such as 2.png: create it with tar --hard-deref" in caplog.text
    assert "0.tar: 2 files are ignored, such as video.01.png: in shards, a sample's name ends" in caplog.text


def test_shards_may_be_compressed_and_end_with_more_zeros(tmp_path):
    write_shard(tmp_path / "0.tar", images_and_texts(range(3)))
    whole = (tmp_path / "0.tar").read_bytes()
    (tmp_path / "0.tar").write_bytes(whole + bytes(2**16))
    (tmp_path / "1.tar.gz").write_bytes(gzip.compress(whole))
    for source, number in (("", 6), ("0.tar", 3)):
        assert len(load_pairs(arguments(str(tmp_path / source)))) == number
