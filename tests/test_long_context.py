"""Long-CLIP's stretch of the text positions: by hand, and on whole models."""

import json

import pytest
import tiny_families
import torch
from tiny_clip import command, processor, saved, tiny_clip
from tiny_families import tiny_dense
from transformers import AutoModel, AutoProcessor, CLIPTextModel

from clip_moe.conversion.long_context import POSITIONS, lengthen, stretch_positions
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import upcycle
from modeling_clip_moe import CLIPMoETextModelWithProjection
from modeling_clip_moe.families import FAMILY_OF_TYPE


def plain_stretch(table, keep, ratio):
    """Row by row."""
    rows = [row.tolist() for row in table]
    result = rows[:keep]
    for i in range(keep, len(rows)):
        following = rows[i + 1] if i + 1 < len(rows) else [2 * b - a for a, b in zip(rows[-2], rows[-1], strict=True)]
        for k in range(ratio):
            share = k / ratio
            result.append([(1 - share) * a + share * b for a, b in zip(rows[i], following, strict=True)])
    return torch.tensor(result)


def test_a_metaclip_2_embeds_short_texts_as_before(tmp_path):
    family = FAMILY_OF_TYPE["metaclip_2"]
    folder = tiny_families.saved(family, tiny_dense(family), tmp_path / "dense")
    command("long-context", tmp_path / "longer", "--model", folder, "--length", 14, "--keep", 5)
    assert AutoModel.from_pretrained(tmp_path / "longer").config.text_config.max_position_embeddings == 14


def model_of(sparse):
    return upcycle(tiny_clip(), PRESETS["clip_moe"]) if sparse else tiny_clip()


@pytest.mark.parametrize(("rows", "keep", "ratio"), [(77, 20, 4), (77, 20, 2), (12, 4, 3), (5, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stretch_by_hand(rows, keep, ratio, dtype):
    table = torch.randn(rows, 6, dtype=dtype, generator=torch.Generator().manual_seed(0))
    length = keep + (rows - keep) * ratio
    stretched = stretch_positions(table, length, keep)
    assert stretched.shape == (length, 6) and stretched.dtype == dtype
    torch.testing.assert_close(stretched.float(), plain_stretch(table, keep, ratio))
    assert torch.equal(stretched[:keep], table[:keep])
    assert torch.equal(stretched[keep::ratio], table[keep:])  # old rows stay, further apart


@pytest.mark.parametrize(
    ("stretch", "message"),
    [
        (lambda: stretch_positions(torch.zeros(77, 2), 247, 20), "77 .* to 247 .* stay: choose 134, 191, 248, 305"),
        (
            lambda: stretch_positions(torch.zeros(21, 2), 22, 20),
            "cannot stretch 21 positions to 22 if the first 20 stay",
        ),
        (lambda: lengthen(tiny_dense(FAMILY_OF_TYPE["siglip"]), 20, keep=2), "of type 'siglip'"),
        (lambda: lengthen(tiny_dense(FAMILY_OF_TYPE["chinese_clip"]), 20, keep=2), "of type 'chinese_clip'"),
    ],
)
def test_what_cannot_be_stretched(stretch, message):
    with pytest.raises(ValueError, match=message):
        stretch()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_command_changes_the_table_alone(sparse, tmp_path, capsys):
    model = model_of(sparse)
    short = saved(tmp_path / "short", model)
    command("long-context", tmp_path / "long", "--model", short, "--length", 36, "--keep", 4)
    assert capsys.readouterr().out.count("largest difference") == 2
    longer, whole = AutoModel.from_pretrained(tmp_path / "long"), AutoProcessor.from_pretrained(tmp_path / "long")
    inputs = whole.tokenizer(["a red cat " * 20, "a"], truncation=True, padding=True, return_tensors="pt")
    assert whole.tokenizer.model_max_length == 36 and inputs["input_ids"].shape == (2, 36)
    with torch.no_grad():
        outputs = [m.get_text_features(**inputs).pooler_output for m in (longer, lengthen(model, 36, keep=4))]
        short = [m.get_text_features(torch.tensor([[38, 7, 39]])).pooler_output for m in (longer, model)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*short)
    before, after = model.state_dict(), longer.state_dict()
    assert {name for name in before if not torch.equal(before[name], after.pop(name))} == {POSITIONS} and not after
    half = lengthen(model.half(), 36, keep=4)
    assert type(half) is type(model) and half.dtype == torch.float16 and not half.training
    assert half.config.text_config.max_position_embeddings == 36
    assert model.config.text_config.max_position_embeddings == 12


@pytest.mark.parametrize("tower", [CLIPTextModel, CLIPMoETextModelWithProjection])
def test_a_text_tower_alone(tower, tmp_path):
    """An image generator's text encoder, which stays of its class."""
    model_of("MoE" in tower.__name__).save_pretrained(tmp_path)
    model = tower.from_pretrained(tmp_path).eval()
    longer = lengthen(model, 36, keep=4)
    assert type(longer) is tower and longer.config.max_position_embeddings == 36
    before, after = model.state_dict(), longer.state_dict()
    (table,) = (name for name in before if not torch.equal(before[name], after[name]))
    torch.testing.assert_close(after[table], plain_stretch(before[table], 4, 4))


@pytest.mark.parametrize("padding", ["max_length", True])
def test_the_length_that_a_tokenizer_was_used_with_is_forgotten(padding, tmp_path):
    """A tokenizer is saved with how it last cut and padded, which the processor would go on doing."""
    used = processor()
    used(text=["a cat"], padding=padding, truncation=True, max_length=5)
    used.save_pretrained(saved(tmp_path / "short", tiny_clip()))
    command("long-context", tmp_path / "long", "--model", tmp_path / "short", "--length", 18, "--keep", 6)
    assert json.loads((tmp_path / "long" / "tokenizer_config.json").read_text())["model_max_length"] == 18
    again = AutoProcessor.from_pretrained(tmp_path / "long")
    assert len(again(text="a red cat " * 20, truncation=True)["input_ids"]) == 18
    assert len(again(text="a cat", padding="max_length")["input_ids"]) == 18
    assert again(text="a cat")["input_ids"] == processor()(text="a cat")["input_ids"]
