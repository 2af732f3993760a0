"""Each family around what is trained here: published, in pipelines, in other libraries."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from sentence_transformers import SentenceTransformer
from tiny_clip import moved
from tiny_families import saved, tiny_dense
from transformers import (
    AutoModel,
    AutoProcessor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    pipeline,
)

from conversion.commands import llava, publish
from conversion.presets import PRESETS
from conversion.upcycle import upcycle
from modeling_clip_moe.families import FAMILIES
from modeling_clip_moe.open_clip_adapter import load_clip

LENGTH = 64  # transformers' pipeline pads SigLIP's texts to it
TEXTS = ["a red cat", "a round cat"]
PIPELINE = """
import sys
sys.modules["modeling_clip_moe"] = None
from PIL import Image
from transformers import pipeline
classify = pipeline("zero-shot-image-classification", model=sys.argv[1], trust_remote_code=True)
scores = classify(Image.open(sys.argv[2]), candidate_labels=["red", "round"], hypothesis_template="a {} cat")
of_label = {score["label"]: score["score"] for score in scores}
print(type(classify.model).__module__.split(".")[0], of_label["red"], of_label["round"])
"""


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.model_type)
def family(request):
    return request.param


# Where an image is one tensor
of_one_size = pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if not family.naflex],
    ids=lambda family: family.model_type,
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "image.png"
    Image.effect_noise((40, 32), 80).convert("RGB").save(path)
    return path


@pytest.fixture(scope="module")
def published(family, tmp_path_factory):
    """A sparse model with experts that differ, as it is published."""
    folder = tmp_path_factory.mktemp(family.model_type)
    sparse = moved(upcycle(tiny_dense(family, LENGTH), PRESETS["clip_moe"]), ("experts", "router"), seed=1)
    saved(family, sparse, folder / "sparse", LENGTH)
    publish.main([str(folder / "sparse"), "user/sparse", "--dry-run", str(folder / "published")])
    return folder / "published"


@pytest.fixture(scope="module")
def inputs(family, published, image):
    padding = {"padding": "max_length", "truncation": True} if family.sigmoid else {"padding": True}
    padding |= {"max_num_patches": 20, "patch_size": 4} if family.naflex else {}  # else released models'
    return AutoProcessor.from_pretrained(published)(
        text=TEXTS, images=Image.open(image), return_tensors="pt", **padding
    )


def test_the_card_and_the_code_are_the_familys(family, published):
    card = (published / "README.md").read_text()
    assert f"A {family.name} with sparse Mixture-of-Experts layers" in card
    assert ("sigmoid()" in card) == ('padding="max_length"' in card) == family.sigmoid
    assert ("zhai2023siglip" in card) == (family.model_type == "siglip") and "{{ " not in card
    assert ("tschannen2025siglip2" in card) == family.naflex
    assert (published / f"{family.sparse.config_class.auto_classes['AutoModel'].split('.')[0]}.py").is_file()


def test_the_code_of_the_card_makes_what_the_model_reads(published, inputs, image):
    card = (published / "README.md").read_text()
    code = card.split("```python")[1].split("```")[0].replace("user/sparse", str(published))
    variables = {}
    exec(code.replace("image.png", str(image)), variables)
    torch.testing.assert_close(variables["inputs"]["pixel_values"], inputs["pixel_values"])


@torch.no_grad()
def test_without_the_package_a_pipeline_scores_as_the_model(family, published, inputs, image, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PIPELINE, published, image],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    module, *scores = done.stdout.split()
    logits = AutoModel.from_pretrained(published)(**inputs).logits_per_image[0]
    expected = logits.sigmoid() if family.sigmoid else logits.softmax(dim=-1)
    assert module == "transformers_modules"
    assert [float(score) for score in scores] == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.fixture
def model(published):
    return AutoModel.from_pretrained(published).eval()


@of_one_size
@torch.no_grad()
def test_sentence_transformers_and_open_clips_calls_embed_as_the_model(family, published, model, inputs, image):
    sentences = SentenceTransformer(str(published), device="cpu")
    if family.sigmoid:
        sentences[0].processing_kwargs = {"text": {"padding": "max_length"}}
    adapter, transform, tokenize = load_clip(str(published))
    texts = model.encode_text(inputs["input_ids"], inputs.get("attention_mask")).numpy()
    images = model.encode_image(inputs["pixel_values"]).numpy()
    for found, expected in (
        (sentences.encode(TEXTS), texts),
        (adapter.encode_text(tokenize(TEXTS)).numpy(), texts),
        (sentences.encode([Image.open(image)]), images),
        (adapter.encode_image(transform(Image.open(image))[None]).numpy(), images),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@of_one_size
@torch.no_grad()
def test_a_vision_tower_alone_is_exported_and_extracts_features(published, model, inputs, image, tmp_path):
    tower = model.vision_model
    tower.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(published).image_processor.save_pretrained(tmp_path)
    pooled = pipeline("image-feature-extraction", model=str(tmp_path))(Image.open(image), pool=True)
    torch.testing.assert_close(torch.tensor(pooled), tower(inputs["pixel_values"]).pooler_output)
    shapes = {"pixel_values": {0: torch.export.Dim("batch", min=1, max=64)}}
    program = torch.export.export(tower, (), {"pixel_values": torch.randn(2, 3, 16, 16)}, dynamic_shapes=shapes)
    images = torch.randn(5, 3, 16, 16)
    exported = program.module()(pixel_values=images).pooler_output
    torch.testing.assert_close(exported, tower(images).pooler_output, atol=1e-5, rtol=1e-5)


def test_lora_adapts_experts_and_merges(model, inputs):
    torch.manual_seed(0)
    experts = ["experts.up_proj", "experts.down_proj"]
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=experts, modules_to_save=["router"])
    adapted = get_peft_model(model, config)
    images = {name: torch.cat([value, value]) for name, value in inputs.items() if len(value) == 1}
    batch = {**inputs, **images, "pixel_values": torch.randn_like(images["pixel_values"])}
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    for _ in range(4):
        loss = adapted(**batch, return_loss=True, output_router_logits=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses) < losses[0]
    with torch.no_grad():
        expected = adapted(**batch).logits_per_image
        merged = adapted.merge_and_unload()
        assert type(merged) is type(model)
        torch.testing.assert_close(merged(**batch).logits_per_image, expected, atol=1e-4, rtol=1e-4)


@of_one_size
def test_a_llava_takes_the_tower_in_place_of_its_dense_one(family, published, tmp_path):
    vision = tiny_dense(family, LENGTH).config.vision_config.to_dict()
    if not family.sigmoid:  # transformers' LLaVA does not know MetaCLIP 2's tower, which is CLIP's
        vision["model_type"] = "clip_vision_model"
    text = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    whole = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=LlamaConfig(**text, num_hidden_layers=1).to_dict(),
            image_token_index=39,
            vision_feature_select_strategy="full" if family.sigmoid else "default",
        )
    )
    whole.save_pretrained(tmp_path / "llava")
    parts = AutoProcessor.from_pretrained(published)
    LlavaProcessor(image_processor=parts.image_processor, tokenizer=parts.tokenizer, patch_size=8).save_pretrained(
        tmp_path / "llava"
    )
    llava.main([str(tmp_path / "llava"), str(published), str(tmp_path / "out")])  # compares features with the tower's
    swapped = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert type(swapped.model.vision_tower) is type(AutoModel.from_pretrained(published).vision_model)
    ids = torch.tensor([[3, *[39] * swapped.config.image_seq_length, 4]])
    logits = swapped(input_ids=ids, pixel_values=torch.randn(1, 3, 16, 16), attention_mask=torch.ones_like(ids)).logits
    assert swapped.config.image_seq_length == 4 and logits.isfinite().all()
