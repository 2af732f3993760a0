"""Eight pairs in a source of every kind."""

import io
import json
import tarfile

import datasets
import numpy as np
import PIL.Image

CAPTIONS = [f"picture number {number}" for number in "zero one two three four five six seven".split()]


def picture(number):
    return PIL.Image.fromarray(np.full((16, 16, 3), 30 * number % 256, np.uint8))


def png(number=0):
    file = io.BytesIO()
    picture(number).save(file, "png")
    return file.getvalue()


def rows(captions, start=0):
    images = [{"bytes": png(start + number), "path": None} for number in range(len(captions))]
    return datasets.Dataset.from_dict({"image": images, "caption": captions}).cast_column("image", datasets.Image())


def write_shard(path, members):
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def images_and_texts(numbers, captions=None):
    """The members of a shard, whose captions are all the same where none are given."""
    members = []
    for number in numbers:
        caption = captions[number] if captions else "a caption"
        members += [(f"{number}.png", png(number)), (f"{number}.txt", caption.encode())]
    return members


def write_pictures(folder, first=0):
    """Files of the same names; with another `first`, of other pictures."""
    folder.mkdir(exist_ok=True)
    names = [f"{number}.png" for number in range(len(CAPTIONS))]
    for number, name in enumerate(names):
        (folder / name).write_bytes(png(first + number))
    return names


def image_folder(tmp_path, first=0):
    names = write_pictures(tmp_path / "folder", first)
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in zip(names, CAPTIONS, strict=True)]
    (tmp_path / "folder" / "metadata.jsonl").write_text("\n".join(lines))
    return {"source": str(tmp_path / "folder"), "caption_column": "text"}


def table(tmp_path):
    pictures = [{"bytes": png(number), "path": f"{number}.png"} for number in range(len(CAPTIONS))]
    rows = {"picture": pictures, "caption": CAPTIONS}
    return datasets.Dataset.from_dict(rows).cast_column("picture", datasets.Image())


def parquet(tmp_path):
    (tmp_path / "parquet").mkdir()
    rows = table(tmp_path)
    for part in range(2):
        rows.shard(2, part).to_parquet(tmp_path / "parquet" / f"{part}.parquet")
    return {"source": str(tmp_path / "parquet"), "image_column": "picture"}


def saved_to_disk(tmp_path):
    table(tmp_path).save_to_disk(tmp_path / "disk")
    return {"source": str(tmp_path / "disk"), "image_column": "picture"}


def webdataset(tmp_path):
    for part in range(2):
        write_shard(tmp_path / f"shard-{part}.tar", images_and_texts(range(part * 4, part * 4 + 4), CAPTIONS))
    return {"source": str(tmp_path / "shard-*.tar"), "image_column": "png", "caption_column": "txt"}


def turns(*texts):
    """Of a conversation, as LLaVA's files have them."""
    speakers = ["human", "gpt"] * len(texts)
    return [{"from": speaker, "value": text} for speaker, text in zip(speakers, texts, strict=False)]


def sharegpt4v(tmp_path, first=0):
    names = write_pictures(tmp_path / "images", first)
    entries = [
        {"id": name, "image": name, "conversations": turns("<image>\nWhat?", text)}
        for name, text in zip(names, CAPTIONS, strict=True)
    ]
    (tmp_path / "sharegpt4v.json").write_text(json.dumps(entries))
    return {"source": str(tmp_path / "sharegpt4v.json"), "image_root": str(tmp_path / "images")}


SOURCES = [image_folder, parquet, saved_to_disk, webdataset, sharegpt4v]


def damaged(tmp_path, share):
    """A ShareGPT4V-style set of 200 pairs of which a share has something wrong."""
    arguments = sharegpt4v(tmp_path)
    path = tmp_path / "sharegpt4v.json"
    entries = json.loads(path.read_text()) * 25
    whole = (tmp_path / "images" / "1.png").read_bytes()
    (tmp_path / "images" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "images" / "text.png").write_text("not an image")
    for number in range(round(share * len(entries))):
        entry = entries[10 + number] = json.loads(json.dumps(entries[10 + number]))
        if number % 4 == 3:
            entry["conversations"][1]["value"] = "  "
        else:
            entry["image"] = ["cut.png", "text.png", "nowhere.png"][number % 4]
    path.write_text(json.dumps(entries))
    return arguments


def saved_pairs(folder, captions):
    """A dataset with these captions on disk, and its settings."""
    rows(captions).save_to_disk(folder)
    return {"source": str(folder), "in_memory": True}
