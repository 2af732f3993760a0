"""The glyph world is repeatable, truthful in its detailed captions, and readable by CLIP."""

import hashlib
import json
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import PIL.Image
import pytest
import torch
from datasets import Image
from transformers import AutoProcessor, CLIPConfig, CLIPModel

from data import drawing, glyphs
from data.worlds import build_processor

NUM_SAMPLES = 300


def encoded(dataset, column="image"):
    """The images' bytes as they are stored."""
    return dataset.cast_column(column, Image(decode=False))[column]


def words(text):
    return set(text.lower().replace(",", " ").replace(".", " ").replace(":", " ").split())


def stem(value):
    """The word of a caption that tells an attribute's value."""
    return set(value.split())


@pytest.fixture(scope="module")
def web():
    return glyphs.load("train", "web", NUM_SAMPLES)


@pytest.fixture(scope="module")
def detailed():
    return glyphs.load("train", "detailed", NUM_SAMPLES)


@pytest.fixture(scope="module")
def processor():
    return build_processor("glyphs", 64, 32)


def test_domains_are_disjoint_and_hold_digits_and_shapes():
    assert len(glyphs.KINDS) == 16 and len(glyphs.SEEN_KINDS) == 9 and len(glyphs.UNSEEN_KINDS) == 7
    assert set(glyphs.SEEN_KINDS) | set(glyphs.UNSEEN_KINDS) == set(glyphs.KINDS)
    for kinds in (glyphs.SEEN_KINDS, glyphs.UNSEEN_KINDS):
        assert set(kinds) & set(glyphs.DIGITS) and set(kinds) & set(glyphs.SHAPES)


@pytest.mark.parametrize("style", glyphs.CAPTION_STYLES)
def test_same_arguments_same_bits(style):
    first, second = (glyphs.load("test", style, 40, seed=3) for _ in range(2))
    assert first.to_list() == second.to_list()
    assert encoded(first) == encoded(second)
    # A longer dataset starts with the shorter one.
    assert glyphs.load("test", style, 60, seed=3).select(range(40)).to_list() == first.to_list()


def test_same_bits_in_another_process():
    program = (
        "import hashlib, json; from datasets import Image; from data import glyphs;"
        "rows = glyphs.load('train', 'web', 20).cast_column('image', Image(decode=False)).to_list();"
        "print(hashlib.sha256(b''.join(row['image']['bytes'] for row in rows)).hexdigest(),"
        "json.dumps([row['caption'] for row in rows]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=glyphs.__file__.rsplit("/", 2)[0],
        env={"PYTHONHASHSEED": "7", "PATH": ""},
    )
    digest, captions = result.stdout.split(" ", 1)
    rows = glyphs.load("train", "web", 20)
    assert digest == hashlib.sha256(b"".join(image["bytes"] for image in encoded(rows))).hexdigest()
    assert json.loads(captions) == list(rows["caption"])


def test_splits_and_seeds_differ():
    base, other_seed, other_split = (
        encoded(glyphs.load(split, "web", 30, seed=seed)) for split, seed in [("train", 0), ("train", 1), ("test", 0)]
    )
    sets = [{image["bytes"] for image in images} for images in (base, other_seed, other_split)]
    assert all(len(images) == 30 for images in sets)
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])


def test_no_pen_stroke_is_in_both_splits():
    train, test = (drawing._digit_images(split) for split in ("train", "test"))
    for digit in drawing.DIGITS:
        seen = {image.tobytes() for image in train[digit]}
        assert len(train[digit]) > 100 and len(test[digit]) > 20
        assert not seen & {image.tobytes() for image in test[digit]}


def test_both_caption_styles_describe_the_same_images(web, detailed):
    assert encoded(web) == encoded(detailed)
    assert list(web["caption"]) != list(detailed["caption"])


def test_columns(detailed):
    row = detailed[0]
    assert set(row) == {"image", "caption", *glyphs.ATTRIBUTES}
    assert row["image"].mode == "RGB" and row["image"].size == (32, 32)
    assert glyphs.load("train", "web", 1, image_size=48)[0]["image"].size == (48, 48)
    for name, values in glyphs.ATTRIBUTES.items():
        assert set(detailed[name]) == set(values), name


def test_only_the_kinds_asked_for():
    assert set(glyphs.load("train", "web", 100, kinds=glyphs.UNSEEN_KINDS)["kind"]) == set(glyphs.UNSEEN_KINDS)


def test_detailed_captions_tell_every_attribute_and_never_lie(detailed):
    vocabulary = {word for values in glyphs.ATTRIBUTES.values() for value in values for word in value.split()}
    for row in detailed:
        truth = set.union(*(stem(row[name]) for name in glyphs.ATTRIBUTES))
        # "plain" is said with or without the word.
        assert truth - words(row["caption"]) <= {"plain"}, row["caption"]
        assert (words(row["caption"]) & vocabulary) - truth <= {"center"}, row["caption"]
        assert row["caption"].count(".") >= 2


def test_detailed_captions_are_distinct():
    captions = list(glyphs.load("test", "detailed", 1000)["caption"])
    assert len(set(captions)) >= 0.99 * len(captions)


def test_web_captions_are_partial_and_one_in_ten_is_wrong():
    rows = glyphs.load("train", "web", 2000).remove_columns("image").to_list()
    number = {str(index): digit for index, digit in enumerate(glyphs.DIGITS)}
    named, wrong = [], []
    for row in rows:
        said = {number.get(word, word) for word in words(row["caption"])}
        named.append(sum(bool(stem(row[name]) & said) for name in glyphs.ATTRIBUTES))
        told = [said & set(glyphs.ATTRIBUTES[name]) for name in ("kind", "color", "background")]
        wrong.append(
            any(not words <= {row[name]} for words, name in zip(told, ("kind", "color", "background"), strict=True))
        )
        assert told[0]
    assert 1 <= np.mean(named) <= 3
    # Of the wrong words (kind, color, background) about half fall on an attribute that the caption does not tell.
    assert 0.03 <= np.mean(wrong) <= 0.1
    assert len({row["caption"] for row in rows}) > 1000


def test_web_captions_use_every_word_of_the_detailed_ones_attributes(web):
    rows = glyphs.load("train", "web", 2000)
    said = set.union(*(words(caption) for caption in rows["caption"]))
    for name, values in glyphs.ATTRIBUTES.items():
        for value in set(values) - {"center"}:
            assert stem(value) <= said, (name, value)


def test_several_captions_an_image():
    rows = glyphs.load("test", "detailed", 10, captions_per_image=3)
    single = glyphs.load("test", "detailed", 10)
    assert encoded(rows) == encoded(single)
    for several, one in zip(rows["caption"], single["caption"], strict=True):
        assert len(several) == 3 and several[0] == one


def test_ink_stands_out_from_background():
    for row in glyphs.load("test", "web", 200):
        image = np.asarray(row["image"], dtype=float)
        ink, background = (
            np.array(glyphs.COLORS[row["color"]], float),
            np.array(glyphs.BACKGROUNDS[row["background"]], float),
        )
        distances = np.linalg.norm(image[:, :, None] - np.stack([ink, background]), axis=-1)
        # The share of pixels nearer to the ink than to the background: some, but not most.
        share = (distances[..., 0] < distances[..., 1]).mean()
        assert 0.01 < share < 0.75, (row["kind"], row["color"], row["background"], row["size"], share)

    luma = [0.299, 0.587, 0.114]
    darkest_texture = 0.8 * min(np.dot(luma, color) for color in glyphs.BACKGROUNDS.values())
    assert max(np.dot(luma, color) for color in glyphs.COLORS.values()) + 40 < darkest_texture


@pytest.mark.parametrize("attribute", list(glyphs.ATTRIBUTES))
def test_attributes_can_be_seen(attribute):
    """Mean images of an attribute's values are nearest to new mean images of the same values."""
    others = {"kind": "disc", "color": "red", "size": "large", "position": "center", "background": "white"}
    fixed = {**others, "texture": "plain"}

    def mean_image(value, seed):
        rng = np.random.default_rng(seed)
        return np.mean([glyphs.render({**fixed, attribute: value}, "train", rng, 32) for _ in range(20)], axis=0)

    values = glyphs.ATTRIBUTES[attribute]
    first, second = (np.stack([mean_image(value, seed).ravel() for value in values]) for seed in (0, 1))
    nearest = np.linalg.norm(first[:, None] - second[None], axis=-1).argmin(axis=1)
    assert list(nearest) == list(range(len(values)))


def test_pairs_differ_in_exactly_one_attribute():
    pairs = glyphs.load_minimal_pairs("test", 60)
    assert set(pairs.column_names) == {"image_0", "caption_0", "image_1", "caption_1", "attribute"}
    assert [pairs["attribute"].count(name) for name in glyphs.ATTRIBUTES] == [10] * 6
    assert pairs.to_list() == glyphs.load_minimal_pairs("test", 60).to_list()
    values = {name: {word for value in values for word in value.split()} for name, values in glyphs.ATTRIBUTES.items()}
    values["texture"] |= {"without", "a", "pattern"}
    values["position"] |= {"corner"}
    for pair in pairs.remove_columns(["image_0", "image_1"]).to_list():
        changed = words(pair["caption_0"]) ^ words(pair["caption_1"])
        name = pair["attribute"]
        assert changed and changed <= values[name] | {"an", "a", "digit"}, pair
    first, second = encoded(pairs, "image_0"), encoded(pairs, "image_1")
    assert all(a["bytes"] != b["bytes"] for a, b in zip(first, second, strict=True))


def test_detailed_captions_fit_the_context(processor):
    rows = glyphs.load("train", "detailed", 1500, seed=9, image_size=8)
    lengths = [len(ids) for ids in processor.tokenizer(list(rows["caption"])).input_ids]
    assert max(lengths) <= processor.tokenizer.model_max_length == 64


def test_each_attribute_word_is_one_token(processor):
    for values in glyphs.ATTRIBUTES.values():
        for value in values:
            tokens = processor.tokenizer.tokenize(value)
            assert tokens == [f"{word}</w>" for word in value.split()]


def test_tokenizer_is_deterministic_and_reads_any_text():
    tokenizer = glyphs.build_tokenizer(64)
    assert tokenizer.backend_tokenizer.to_str() == glyphs.build_tokenizer(64).backend_tokenizer.to_str()
    text = "zürich 日本 🙂 a RED seven!"
    ids = tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in ids[1:-1]
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == text.lower().replace(" ", "")


def test_processor_round_trip(tmp_path, processor, detailed):
    processor.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded) is type(processor) and type(loaded.tokenizer) is type(processor.tokenizer)
    texts, images = list(detailed["caption"])[:8], list(detailed["image"])[:8]
    before, after = (p(text=texts, images=images, padding=True, return_tensors="pt") for p in (processor, loaded))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert loaded.tokenizer.model_max_length == 64


def test_pixels_are_neither_cropped_nor_resampled(processor, detailed):
    image = detailed[0]["image"]
    pixels = processor(images=image, return_tensors="pt").pixel_values[0]
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(pixels, expected, atol=1e-6, rtol=0)


def test_clip_pools_at_the_end_token(processor, detailed):
    tokenizer = processor.tokenizer
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # With an end token of 2, transformers falls back to the highest id of a sequence.
    assert ids["eos_token_id"] == len(tokenizer) - 1 != 2
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(
            text_config={**tower, "vocab_size": len(tokenizer), "max_position_embeddings": 64, **ids},
            vision_config={**tower, "image_size": 32, "patch_size": 8},
        )
    ).eval()
    captions = list(detailed["caption"])[:8]
    batch = tokenizer(captions, padding="max_length", return_tensors="pt")
    with torch.no_grad():
        padded = model.get_text_features(**batch).pooler_output
        hidden = model.text_model(**batch).last_hidden_state
        alone = torch.cat(
            [model.get_text_features(**tokenizer(text, return_tensors="pt")).pooler_output for text in captions]
        )
        ends = batch.attention_mask.sum(dim=1) - 1
        pooled = model.text_projection(hidden[torch.arange(len(captions)), ends])
    torch.testing.assert_close(padded, alone)
    torch.testing.assert_close(padded, pooled)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glyphs.load("validation", "web", 1), "'validation', must be one of train, test"),
        (lambda: glyphs.load("train", "short", 1), "'short', must be one of web, detailed"),
        (lambda: glyphs.load("train", "web", 1, kinds=["ten"]), "ten.*zero, one"),
        (lambda: glyphs.load("train", "web", 1, kinds=[]), "nothing"),
        (lambda: glyphs.load("train", "web", 1, image_size=3), "image_size is 3: glyphs need at least 4 pixels"),
        (lambda: glyphs.load_minimal_pairs("val", 1), "'val'"),
        (lambda: glyphs.load_minimal_pairs("test", 1, kinds=["ten"]), "ten"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_contact_sheet(tmp_path, monkeypatch, web, detailed):
    """Every image stands over its own two captions."""
    drawn = []
    with monkeypatch.context() as patch:
        patch.setattr("matplotlib.pyplot.close", drawn.append)
        glyphs.main(["--contact-sheet", str(tmp_path / "sheet.png")])
    (figure,) = drawn
    assert len(figure.axes) == 48
    for axis, first, second in zip(figure.axes, web, detailed, strict=False):
        assert np.array_equal(axis.get_images()[0].get_array()[::4, ::4], first["image"])
        assert axis.get_title().replace("\n", " ") == f"{first['caption']}  {second['caption']}"
    assert PIL.Image.open(tmp_path / "sheet.png").size == tuple((70 * figure.get_size_inches()).round())
    plt.close(figure)


@pytest.mark.parametrize("path", ["nowhere/x.png", ".", "file/x.png"])
def test_a_contact_sheet_that_cannot_be_written(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=f"^error: {path} cannot be written: [^\n]*$"):
        glyphs.main(["--contact-sheet", path])
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
