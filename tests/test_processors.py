"""conversion/processors.py: where a processor fits; what does not fit in test_meetings.py, for all commands."""

import importlib.util
import json
import shutil

import pytest
import tiny_families
from tiny_clip import change_json, processor, tiny_clip
from tiny_families import tiny_dense
from transformers import AutoProcessor, CLIPImageProcessorPil

from clip_moe.conversion.processors import copy_processor, load_processor, require_fit
from modeling_clip_moe.families import FAMILY_OF_TYPE

DENSE = tiny_clip()


def test_an_image_s_shape_may_not_be_kept_but_some_may_be_left_out():
    """A start token, which only a tokenizer that has it must write; and the tower of images."""
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, do_center_crop=False)  # right of square images
    with pytest.raises(ValueError, match=r"images of 3 x 16 x 31, but"):
        require_fit(DENSE.config, "model", "source", image_processor=images)
    tokenizer = processor().tokenizer
    tokenizer.bos_token = None
    require_fit(DENSE.config, "model", "source", tokenizer)
    require_fit(DENSE.config.text_config, "model", "source", processor().tokenizer, CLIPImageProcessorPil())


def test_a_siglips_tokenizer_is_saved_as_its_texts_are_read(tmp_path):
    """That of SigLIP 2 on the Hub tells no length; one that says another, or pads on the left, is refused."""
    family = FAMILY_OF_TYPE["siglip"]
    source = tiny_families.saved(family, tiny_dense(family), tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    length = settings.pop("model_max_length")
    for changes, message in (
        (
            {"model_max_length": 5},
            "model_max_length is 5 and .* set model_max_length to 8",
        ),
        ({"padding_side": "left", "model_max_length": length}, "pads texts on the left"),
    ):
        (source / "tokenizer_config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(ValueError, match=message):
            load_processor(source)
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "copy").mkdir()
    shutil.copy(source / "config.json", tmp_path / "copy")
    copy_processor(source, tmp_path / "copy")
    tokenizer = AutoProcessor.from_pretrained(tmp_path / "copy").tokenizer
    assert (tokenizer.model_max_length, tokenizer.model_input_names) == (length, ["input_ids"])


def test_a_vocabulary_alone_cuts_texts_at_what_the_model_takes(tmp_path):
    """As the Hub has Chinese-CLIP's. Padding on the left would be pooled."""
    family = FAMILY_OF_TYPE["chinese_clip"]
    source = tiny_families.saved(family, tiny_dense(family), tmp_path)
    vocabulary = load_processor(source).tokenizer.get_vocab()
    (source / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    tokenizer = load_processor(source).tokenizer
    assert (tokenizer.model_max_length, tokenizer.get_vocab()) == (8, vocabulary)
    (source / "tokenizer_config.json").write_text(json.dumps({"padding_side": "left"}))
    with pytest.raises(ValueError, match="pads texts on the left"):
        load_processor(source)


def test_a_siglip_of_sentencepiece_says_what_it_needs(tmp_path):
    """Its vocabulary is a `spiece.model`, which the package reads that is not installed here."""
    if importlib.util.find_spec("sentencepiece"):
        pytest.skip("sentencepiece is installed, so nothing is missing")
    family = FAMILY_OF_TYPE["siglip"]
    folder = tiny_families.saved(family, tiny_dense(family), tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "spiece.model").write_bytes(b"a vocabulary")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "SiglipTokenizer"}')
    with pytest.raises(ValueError, match="cannot load .*SiglipTokenizer requires the SentencePiece library"):
        load_processor(folder)


@pytest.mark.parametrize(
    ("family", "lowercase", "told"),
    [("siglip", False, 1), ("siglip", True, 0), ("siglip2", False, None), ("metaclip_2", False, 0), ("clip", False, 0)],
)
def test_capitals_that_a_siglip_never_saw_are_told(tmp_path, caplog, family, lowercase, told):
    family = FAMILY_OF_TYPE[family]
    folder = tiny_families.saved(family, tiny_dense(family), tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"} if lowercase else None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    change_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = load_processor(folder).tokenizer
    if told is None:  # transformers 5.23 lower-cases for SigLIP 2 whatever the file says, 5.17 does not
        told = int(tokenizer("A DOG")["input_ids"] != tokenizer("a dog")["input_ids"])
    assert caplog.text.count("is case-sensitive") == told
