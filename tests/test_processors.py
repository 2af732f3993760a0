"""conversion/processors.py: whether a processor fits the model that it goes with."""

import pytest
from tiny_clip import processor, tiny_clip
from transformers import AutoProcessor, CLIPConfig, CLIPImageProcessorPil, CLIPProcessor

from conversion.processors import copy_processor, require_fit
from modeling_clip_moe import CLIPMoDEModel

OTHER_IMAGES = r"source makes images of 3 x 24 x 24, but .* takes 3 x 16 x 16: take the image processor that"


@pytest.fixture
def source(tmp_path):
    """A processor whose images are larger than those of `tiny_clip`."""
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=24)
    CLIPProcessor(image_processor, processor().tokenizer).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_images_of_another_size_are_refused(source, tmp_path):
    folder = tmp_path / "model"
    tiny_clip().save_pretrained(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=OTHER_IMAGES):
        copy_processor(source, folder)
    assert sorted(folder.iterdir()) == before
    sizes = {"image_size": 24, "patch_size": 8}
    CLIPConfig(text_config={"vocab_size": 40, "eos_token_id": 39}, vision_config=sizes).save_pretrained(folder)
    copy_processor(source, folder)
    assert AutoProcessor.from_pretrained(folder).to_dict() == AutoProcessor.from_pretrained(source).to_dict()


def test_the_processor_of_a_mixture_fits_its_experts(source, tmp_path):
    CLIPMoDEModel.from_experts([tiny_clip(), tiny_clip()]).save_pretrained(tmp_path / "mixture")
    with pytest.raises(ValueError, match=OTHER_IMAGES):
        copy_processor(source, tmp_path / "mixture")


def test_an_image_processor_that_keeps_an_image_s_shape_is_seen():
    """It gets square images right."""
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, do_center_crop=False)
    with pytest.raises(ValueError, match=r"images of 3 x 16 x 31, but"):
        require_fit(tiny_clip().config, "model", "source", image_processor=images)


def test_a_tokenizer_may_have_no_start_token():
    """Only one that has it and does not write it is refused."""
    tokenizer = processor().tokenizer
    tokenizer.bos_token = None
    require_fit(tiny_clip().config, "model", "source", tokenizer)


def test_a_text_tower_alone_takes_any_images(source):
    config = tiny_clip().config.text_config
    require_fit(config, "model", source, processor().tokenizer, CLIPImageProcessorPil())
    config.vocab_size = 39
    with pytest.raises(ValueError, match="the tokenizer of source has 40 tokens, but vocab_size is 39 in model"):
        require_fit(config, "model", "source", processor().tokenizer)


@pytest.mark.parametrize("length, fits", [(2, False), (3, True), (12, True), (13, False), (10**30, False)])
def test_context_length(length, fits):
    tokenizer, config = processor().tokenizer, tiny_clip().config.text_config  # of 12 positions
    tokenizer.model_max_length = length
    if fits:
        require_fit(config, "model", "source", tokenizer)
    else:
        with pytest.raises(ValueError, match=f"model_max_length is {length} and max_position_embeddings is 12"):
            require_fit(config, "model", "source", tokenizer)
