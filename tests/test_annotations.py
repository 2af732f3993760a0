"""Pairs in csv and tsv tables and in JSONs of COCO and Karpathy: what is read, and what is refused."""

import dataclasses
import json
import unicodedata
from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet
import pytest
from tiny_sources import CAPTIONS, picture, png, write_pictures, write_shard

from clip_moe.data.arguments import DataArguments
from clip_moe.data.identity import identity
from clip_moe.data.images import decode_image
from clip_moe.data.pairs import load_pairs
from clip_moe.data.readable import read_pair
from clip_moe.data.sources import common_rows, open_rows
from clip_moe.data.texts import present_captions, present_texts

# Within a cell
LINE_BREAK = {",": "\n", "\t": " "}


def table(tmp_path, name="pairs.csv"):
    """As open_clip reads it."""
    separator = "\t" if name.endswith("tsv") else ","
    names = write_pictures(tmp_path / "images")
    cells = [f'"{text}{separator} ""said""{LINE_BREAK[separator]}NA"' for text in CAPTIONS]
    lines = [f"{image}{separator}{cell}" for image, cell in zip(names, cells, strict=True)]
    (tmp_path / name).write_text("\n".join([f"filepath{separator}title", *lines, ""]))
    columns = {"image_column": "filepath", "caption_column": "title"}
    return {"source": str(tmp_path / name), "image_root": str(tmp_path / "images"), **columns}


def coco(tmp_path):
    names = write_pictures(tmp_path / "images")
    images = [{"id": 100 - number, "file_name": name} for number, name in enumerate(names)]
    annotations = [{"image_id": 100 - n % 8, "id": n, "caption": f"{CAPTIONS[n % 8]} {n // 8}"} for n in range(16)]
    images.append({"id": 7, "file_name": "without.png"})
    content = {"info": {}, "images": images, "annotations": annotations[::-1]}
    (tmp_path / "captions.json").write_text(json.dumps(content, indent=1))
    return {"source": str(tmp_path / "captions.json"), "image_root": str(tmp_path / "images")}


def karpathy(tmp_path):
    names = write_pictures(tmp_path / "val2014")
    images = []
    for number, name in enumerate(names):
        sentences = [{"raw": f"{CAPTIONS[number]} {version}", "tokens": []} for version in range(2)]
        split = "train" if number < 5 else "restval" if number < 7 else "test"
        images.append({"filename": name, "filepath": "val2014", "split": split, "sentences": sentences})
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    return {"source": str(tmp_path / "dataset_coco.json"), "image_root": str(tmp_path)}


def require_pairs(arguments, captions):
    rows = list(load_pairs(arguments))
    assert [row["caption"] for row in rows] == captions
    for number, row in enumerate(rows):
        assert np.array_equal(decode_image(row["image"]), picture(number))


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize("name", ["pairs.csv", "pairs.tsv"])
def test_tables(tmp_path, name, streaming):
    separator = "\t" if name.endswith("tsv") else ","
    arguments = DataArguments(**table(tmp_path, name), streaming=streaming)
    expected = [f'{text}{separator} "said"{LINE_BREAK[separator]}NA' for text in CAPTIONS]
    require_pairs(arguments, expected)
    for split, part in (("test[:3]", expected[:3]), ("test[3:]", expected[3:])):
        assert [row["caption"] for row in load_pairs(dataclasses.replace(arguments, split=split))] == part
    with pytest.raises(ValueError, match=rf"{name} has no split 'train\+test', only train"):
        load_pairs(dataclasses.replace(arguments, split="train+test"))


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
def test_coco(tmp_path, streaming, caplog):
    source, expected = coco(tmp_path), [[f"{t} 1", f"{t} 0"] for t in CAPTIONS]
    require_pairs(DataArguments(**source, streaming=streaming), expected)
    assert "annotations" not in caplog.text
    content = json.loads(Path(source["source"]).read_text())
    content["annotations"] += [{"image_id": 5, "caption": "of none"}] * 2
    Path(source["source"]).write_text(json.dumps(content))
    require_pairs(DataArguments(**source, streaming=streaming), expected)
    assert "2 annotations have an image_id without an image, such as 5" in caplog.text
    content["annotations"] = [one | {"image_id": str(one["image_id"])} for one in content["annotations"]]
    Path(source["source"]).write_text(json.dumps(content))
    require_pairs(DataArguments(**source, streaming=streaming), expected)


def test_karpathy(tmp_path):
    source = karpathy(tmp_path)
    captions = [[f"{text} 0", f"{text} 1"] for text in CAPTIONS]
    require_pairs(DataArguments(**source), captions[:5])
    require_pairs(DataArguments(**source, split="train+restval"), captions[:7])
    require_pairs(DataArguments(**source, num_samples=2), captions[:2])
    test = DataArguments(**source, split="test")
    assert list(load_pairs(test)["caption"]) == captions[7:]
    assert common_rows(test, "train") == 0
    with pytest.raises(ValueError, match="no split 'val', only train, restval, test: set split"):
        load_pairs(DataArguments(**source, split="val"))


def test_tables_of_a_pattern_are_one(tmp_path):
    source = table(tmp_path) | {"source": str(tmp_path / "pairs*.csv")}
    (tmp_path / "pairs_2.csv").write_text("filepath,title\n7.png,more\n")
    rows = load_pairs(DataArguments(**source))
    assert len(rows) == 9 and rows[8]["caption"] == "more"
    (tmp_path / "pairs_2.csv").write_text("filepath,caption\n7.png,more\n")
    with pytest.raises(ValueError, match="pairs_2.csv: the header .*'caption'.* differs from .*'title'"):
        load_pairs(DataArguments(**source))


HEAD = "image,caption\n"
QUOTED = HEAD + '9.png,"two\nlines"\n'  # the next line is the fourth
IDS = '{"images": [{"id": 1, "file_name": "a.png"}, {"id": %s, "file_name": "b.png"}], "annotations": [%s]}'
ANNOTATION = '{"image_id": 3, "caption": "a"}'


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("x.csv", "image, caption\n0.png,a\n", "no column 'caption'; its columns are 'image', ' caption'"),
        ("x.csv", HEAD, "no pairs"),
        ("x.csv", "image,caption,caption\n0.png,a,b\n", "header .* has 'caption' 2 times: rename its columns"),
        ("x.csv", QUOTED + '0.png,"Big" dog\n', "line 4 cannot be read: "),
        # It would take the lines up to the next quote with it
        ("x.tsv", 'image\tcaption\n0.png\t"Star\n1.png\ttv of 12"\n', "line 2 .*a quoted cell does not end"),
        ("x.json", '{"images": 3}', "neither a list of entries nor an object with a list of images"),
        ("x.json", IDS % ('"1"', ANNOTATION), "2 images have the id 1: fix the ids"),
        ("x.json", IDS % (2, ANNOTATION), "no image has the id 3 of an annotation: fix the ids"),
    ],
)
def test_damaged_files_are_refused(tmp_path, file, text, message):
    """Others: test_fuzz.py."""
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        load_pairs(DataArguments(source=str(tmp_path / file)))


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_texts_that_are_lists_are_several_captions(tmp_path, ending, streaming):
    """As JSON, Python and numpy write them, which breaks lines above 75 letters."""
    path = tmp_path / f"pairs.{ending}"
    long = [f"a {'long ' * 10}caption {number}" for number in range(3)]
    lists = ['["a cat", null, "a dog"]', "['a cat', None, 'a dog']", "['a cat', nan, 'a dog']", "['a cat' 'a dog']"]
    lists.append(str(np.array(long)))
    assert "\n" in lists[-1]
    texts = [*lists, "NA", "[]"]
    table = pandas.DataFrame({"image": ["0.png"] * len(texts), "caption": texts})
    if ending == "parquet":  # as polars writes it
        columns = {"image": table["image"], "caption": pyarrow.array(texts, pyarrow.large_string())}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        table.to_csv(path, index=False)
    write_pictures(tmp_path / "images")
    options = {"source": str(path), "image_root": str(tmp_path / "images"), "max_unreadable": 0.5}
    rows = load_pairs(DataArguments(**options, streaming=streaming))
    found = [present_captions(row["caption"]) for row in rows]
    assert [texts for texts in found if texts] == [["a cat", "a dog"]] * 4 + [long]


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize("other", ["one", "[stop]", "[1, 2]", "[b'a']", "['a' ... 'b']", "[]x"])
def test_a_list_among_texts_stays_a_text(tmp_path, other, streaming, caplog):
    texts = ['["quoted title"]', other, None]
    names = write_pictures(tmp_path / "images")[: len(texts)]
    pandas.DataFrame({"image": names, "caption": texts}).to_csv(tmp_path / "pairs.csv", index=False)
    options = {"source": str(tmp_path / "pairs.csv"), "image_root": str(tmp_path / "images"), "max_unreadable": 0.5}
    rows = load_pairs(DataArguments(**options, streaming=streaming))
    assert [row["caption"] for row in rows if row["caption"]] == texts[:2]
    assert "pairs.csv: 1 captions are lists, such as '[\"quoted title\"]', but are read as text" in caplog.text


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize("ending", ["csv", "jsonl", "json", "parquet", "tar"])
def test_keys_of_objects_are_columns(tmp_path, ending, streaming):
    """Objects as such and as JSON in a text; without a key, one line has theirs."""
    objects = [{"caption": text, "more": ["a", text], "deep": {"er": text}} for text in CAPTIONS]
    names, path = write_pictures(tmp_path / "images"), tmp_path / f"pairs.{ending}"
    entries = [{"image": name, "json": of} for name, of in zip(names, objects, strict=True)]
    options = {"source": str(path), "image_root": str(tmp_path / "images"), "streaming": streaming}
    if ending == "tar":
        members = [(f"{n}.png", png(n), f"{n}.json", json.dumps(of).encode()) for n, of in enumerate(objects)]
        write_shard(path, [pair for image, content, *rest in members for pair in ((image, content), tuple(rest))])
        options |= {"image_root": None, "image_column": "png"}
    elif ending == "csv":
        pandas.DataFrame([entry | {"json": str(entry["json"])} for entry in entries]).to_csv(path, index=False)
    elif ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(entries), path)
    else:
        path.write_text(json.dumps(entries) if ending == "json" else "\n".join(map(json.dumps, entries)))
    for key, expected in (("caption", CAPTIONS), ("more", [["a", text] for text in CAPTIONS]), ("deep.er", CAPTIONS)):
        require_pairs(DataArguments(**options, caption_column=f"json.{key}"), expected)
    with pytest.raises(ValueError, match="no column 'json.text'; its columns are 'json', 'json.caption', 'json.more'"):
        load_pairs(DataArguments(**options, caption_column="json.text"))
    whole = DataArguments(**options, caption_column="json")
    problem = read_pair(next(iter(load_pairs(whole))), whole)[0] if streaming else None
    with pytest.raises(
        ValueError, match="is an object with the keys caption, more, deep: set caption_column to COLUMN"
    ):
        raise ValueError(problem) if streaming else load_pairs(whole)


@pytest.mark.parametrize("caption", ['[["a"], ["b"]]', '[{"raw": "a"}]', '{"a": 1}', "{'raw': 'a'}", {"raw": "a"}])
def test_structure_is_no_caption(caption):
    with pytest.raises(ValueError, match="its caption is (an object with the keys|a list of objects or lists)"):
        present_texts(caption)
    assert present_texts("{brackets} [that] are none") and present_texts("{1, 2}") and present_texts("[stop")


KINDS = {
    "splits": [{"split": "train"}] * 5 + [{"split": "Test"}] * 3,
    "broken": [{}] * 8,
    "conversations": [{"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "A"}]}] * 8,
    "broken conversations": [{"conversations": [{"value": "A"}]}] + [{"conversations": []}] + [{"title": 1}] * 6,
    "numbers": [{"size": number if number % 2 else "?", "score": float("nan")} for number in range(8)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_is_read_as_its_lines(tmp_path, kind, caplog):
    """Splits, names of columns, bad entries and their count."""
    names = write_pictures(tmp_path / "images")
    entries = [{"img": n, "text": t} | more for n, t, more in zip(names, CAPTIONS, KINDS[kind], strict=True)]
    if kind in ("splits", "broken"):
        entries[2:4] = [["no", "object"], 7]
    (tmp_path / "pairs.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(entries).encode())
    (tmp_path / "pairs.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, entries)).encode())
    column = "caption" if kind == "conversations" else "text"
    seen = []
    for ending, word in (("json", "entries count as missing: 2, 3"), ("jsonl", "lines count as missing: 3, 4")):
        options = {"source": str(tmp_path / f"pairs.{ending}"), "image_root": str(tmp_path / "images")}
        options |= {"image_column": "img", "caption_column": column, "max_unreadable": 0.5}
        seen.append([row["caption"] for row in load_pairs(DataArguments(**options))])
        assert word in caplog.text or kind not in ("splits", "broken")
        if kind == "splits":
            test = DataArguments(**options, split="test")
            assert list(load_pairs(test)["caption"]) == CAPTIONS[5:] and common_rows(test, "train") == 0
        with pytest.raises(ValueError, match=r"has no column 'nothing'; its columns are 'img', 'text'"):
            load_pairs(DataArguments(**options | {"caption_column": "nothing"}))
    lost = {"splits": [2, 3, 5, 6, 7], "broken": [2, 3], "broken conversations": [0]}.get(kind, [])
    expected = ["A"] * 8 if column == "caption" else [text for n, text in enumerate(CAPTIONS) if n not in lost]
    assert seen == [expected] * 2


def test_bad_entries_of_coco_and_karpathy_are_counted(tmp_path, caplog):
    source = karpathy(tmp_path)
    content = json.loads(Path(source["source"]).read_text())
    del content["images"][1]["filename"]
    Path(source["source"]).write_text(json.dumps(content))
    rows = load_pairs(DataArguments(**source, max_unreadable=0.5))
    assert len(rows) == 4 and "unreadable entries count as missing: 1; the first: invalid entry" in caplog.text
    source = coco(tmp_path)
    content = json.loads(Path(source["source"]).read_text())
    content["annotations"][3] = {"caption": "of none"}
    Path(source["source"]).write_text(json.dumps(content))
    assert sum(map(len, load_pairs(DataArguments(**source))["caption"])) == 15
    assert "unreadable entries count as missing: annotation 3; the first: invalid entry" in caplog.text


def test_lines_that_cannot_be_read_are_named_and_count_as_missing(tmp_path, caplog):
    names = write_pictures(tmp_path / "images")
    lines = [b"image,caption", *(name.encode() + b",a cat" for name in names[:6])]
    lines[3:3] = [b"x.png,caf\xe9", b"y.png", b"z.png,a,b"]
    (tmp_path / "pairs.csv").write_bytes(b"\n".join(lines))
    lines = [
        json.dumps({"image": name, "caption": "a cat", "size": size})
        for name, size in zip(names[:2], (1, "?"), strict=True)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join([lines[0], '{"image": "x.png", "cap', "[]", lines[1]]))
    for name, number, unread, read in (("csv", 3, "4, 5, 6", 6), ("jsonl", 2, "2, 3", 2)):
        source = {"source": str(tmp_path / f"pairs.{name}"), "image_root": str(tmp_path / "images")}
        assert len(load_pairs(DataArguments(**source, max_unreadable=0.5))) == read
        assert f"pairs.{name}: unreadable lines count as missing: {unread}; the first: " in caplog.text
        with pytest.raises(ValueError, match=f"{number} of {read + number} pairs"):
            load_pairs(DataArguments(**source))


@pytest.mark.parametrize(("table", "column"), [("pairs.csv", "image"), ("metadata.csv", "file_name")])
def test_names_of_files_in_another_form_of_unicode(tmp_path, table, column):
    picture(0).save(tmp_path / unicodedata.normalize("NFD", "café.png"))
    (tmp_path / table).write_text(f"{column},caption\n{unicodedata.normalize('NFC', 'café.png')},coffee\n")
    named = {"source": str(tmp_path / table), "image_root": str(tmp_path)}
    source = DataArguments(**named if column == "image" else {"source": str(tmp_path)})
    assert load_pairs(source)["caption"] == ["coffee"]
    before = identity(source)
    picture(1).save(tmp_path / unicodedata.normalize("NFD", "café.png"))
    assert before is not None and identity(source) != before


def test_a_column_split_has_splits(tmp_path, caplog):
    (tmp_path / "pairs.csv").write_text(
        "image,caption,split\na.png,a,train\nb.png,b,Val\nc.png,c,test\nd.png,d,train\n"
    )
    captions = {
        split: open_rows(DataArguments(source=str(tmp_path / "pairs.csv"), split=split))["caption"]
        for split in ("train", "validation", "val", "test[:1]", "train+test")
    }
    assert {split: list(texts) for split, texts in captions.items()} == {
        "train": ["a", "d"], "validation": ["b"], "val": ["b"], "test[:1]": ["c"], "train+test": ["a", "d", "c"],
    }  # fmt: skip
    assert common_rows(DataArguments(source=str(tmp_path / "pairs.csv"), split="val"), "validation") == 1
    (tmp_path / "other.csv").write_text("image,caption,split\na.png,a,train\nb.png,b,7\n")
    assert len(open_rows(DataArguments(source=str(tmp_path / "other.csv")))) == 2
    assert "other.csv: the column split is ignored, since it also holds '7'" in caplog.text


@pytest.mark.parametrize("caption", [None, float("nan"), 5, ["a", None], {"raw": "a"}], ids=str)
def test_a_caption_that_is_no_text_ends_no_json(tmp_path, caption):
    """Alone among texts it is missing, and among lists one of several."""
    names = write_pictures(tmp_path / "images")
    entries = [{"image": name, "caption": text} for name, text in zip(names[:3], ["a", caption, "c"], strict=True)]
    (tmp_path / "pairs.json").write_text(json.dumps([*entries, {"image": names[3]}]))
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, [*entries, {"image": names[3]}])))
    expected = [["a"], ["c"]] if not isinstance(caption, list) else [["a"], ["a"], ["c"]]
    for name in ("pairs.json", "pairs.jsonl"):
        source = {"source": str(tmp_path / name), "image_root": str(tmp_path / "images")}
        rows = load_pairs(DataArguments(**source, max_unreadable=0.5))
        assert [present_captions(row["caption"]) for row in rows] == expected


def test_marks_and_ends_of_lines_around_a_caption_are_none_of_it():
    assert present_captions(["\ufeff a cat\r\n", " \ufeff ", "\u200b", "\0", None, "a\r\ndog"]) == ["a cat", "a\r\ndog"]
