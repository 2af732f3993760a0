"""Each family around what is trained here: published, in pipelines, in other libraries."""

import json
import re

import pytest
import torch
from converters import tiny_llava
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from PIL import Image
from programs import WITHOUT_PACKAGE, run_program
from safetensors.torch import load_file
from tiny_clip import moved
from tiny_clip_moe import inputs as tiny_inputs
from tiny_clip_moe import tiny_config
from tiny_families import saved, tiny_dense
from transformers import AutoModel, AutoProcessor, CLIPVisionConfig, LlavaForConditionalGeneration, LlavaProcessor

import clip_moe
from clip_moe.conversion.commands import publish
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.publishing import bundle
from clip_moe.conversion.upcycle import shared_config, upcycle
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.families import FAMILIES
from modeling_clip_moe.open_clip_adapter import load_clip

LENGTH = 64  # transformers' pipeline pads SigLIP's texts to it
TEXTS = ["a red cat", "a round cat"]
LONG = [*TEXTS, "a red cat " * 30]  # too long
SCORES_AND_EMBEDDINGS = """
import json
from PIL import Image
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from transformers import pipeline
repositories, texts, files = json.loads(sys.argv[1])
for family, (repository, padding, fixed_size) in repositories.items():
    classify = pipeline("zero-shot-image-classification", model=repository, trust_remote_code=True)
    scores = classify(Image.open(files[0]), candidate_labels=["red", "round"], hypothesis_template="a {} cat")
    scores_by_label = {score["label"]: score["score"] for score in scores}
    print(family, type(classify.model).__module__.split(".")[0], scores_by_label["red"], scores_by_label["round"])
    saved = [(f"{family}_first", repository), (f"{family}_again", f"{family}_first")]
    for name, folder in saved if fixed_size else []:
        model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
        assert type(model[0].model).__module__.startswith("transformers_modules.")
        model[0].processing_kwargs = padding or model[0].processing_kwargs
        images = model.encode([Image.open(file) for file in files])
        save_file({"texts": model.encode(texts), "images": images}, f"{name}.safetensors")
        model.save_pretrained(name)
"""


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.model_type)
def family(request):
    return request.param


# Where an image is one tensor
fixed_size = pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if not family.naflex],
    ids=lambda family: family.model_type,
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """A sparse model of each family with experts that differ, as it is published."""
    folders, root = {}, tmp_path_factory.mktemp("families")
    patch = pytest.MonkeyPatch()
    patch.setattr(bundle, "verify", lambda folder: None)  # `without_the_package` runs them all in one process
    for family in FAMILIES:
        folder = root / family.model_type
        sparse = moved(upcycle(tiny_dense(family, LENGTH), PRESETS["clip_moe"]), ("experts", "router"), seed=1)
        saved(family, sparse, folder / "sparse", LENGTH)
        folders[family.model_type] = folder / f"{family.model_type}-sparse"
        publish.main([str(folder / "sparse"), "user/sparse", "--dry_run", str(folders[family.model_type])])
    patch.undo()
    return folders


@pytest.fixture(scope="module")
def published(family, repositories):
    return repositories[family.model_type]


@pytest.fixture(scope="module")
def without_the_package(repositories, image, tmp_path_factory):
    """Outputs of all families in a program without this package, which takes long to import: a folder, and family ->
    module, score, score."""
    folder = tmp_path_factory.mktemp("without")
    Image.open(image).convert("L").save(folder / "gray.png")
    given = {
        family.model_type: (
            str(repositories[family.model_type]),
            {"text": {"padding": "max_length"}} if family.sigmoid else {},
            not family.naflex,
        )
        for family in FAMILIES
    }
    code, arguments = WITHOUT_PACKAGE + SCORES_AND_EMBEDDINGS, json.dumps([given, LONG, [str(image), "gray.png"]])
    printed = run_program(folder, "-c", code, arguments)
    lines = [line.split() for line in printed.splitlines()]
    return folder, {line[0]: line[1:] for line in lines if line and line[0] in given}


@pytest.fixture(scope="module")
def prepare(family, published, image):
    """Makes the inputs of an image and texts."""
    padding = {"padding": "max_length" if family.sigmoid else True, "truncation": True}
    padding |= {"max_num_patches": 20, "patch_size": 4} if family.naflex else {}  # else released models'
    processor = AutoProcessor.from_pretrained(published)
    return lambda texts: processor(text=texts, images=Image.open(image), return_tensors="pt", **padding)


@pytest.fixture(scope="module")
def inputs(prepare):
    return prepare(TEXTS)


def test_the_card_and_the_code_are_the_familys(family, published, inputs, image):
    """The card's code makes what the model reads."""
    card = (published / "README.md").read_text()
    assert f"A {family.name} with sparse Mixture-of-Experts layers" in card
    assert ("sigmoid()" in card) == ('padding="max_length"' in card) == family.sigmoid
    assert ("zhai2023siglip" in card) == (family.model_type == "siglip") and "{{ " not in card
    assert ("tschannen2025siglip2" in card) == family.naflex
    assert (published / f"{family.sparse.config_class.auto_classes['AutoModel'].split('.')[0]}.py").is_file()
    code = card.split("```python")[1].split("```")[0].replace("user/sparse", str(published))
    variables = {}
    exec(code.replace("image.png", str(image)), variables)
    torch.testing.assert_close(variables["inputs"]["pixel_values"], inputs["pixel_values"])


@torch.no_grad()
def test_without_the_package_a_pipeline_scores_as_the_model(family, published, inputs, without_the_package):
    module, *scores = without_the_package[1][family.model_type]
    logits = AutoModel.from_pretrained(published)(**inputs).logits_per_image[0]
    expected = logits.sigmoid() if family.sigmoid else logits.softmax(dim=-1)
    assert module == "transformers_modules"
    assert [float(score) for score in scores] == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.fixture
def model(published):
    return AutoModel.from_pretrained(published).eval()


@fixed_size
@torch.no_grad()
def test_sentence_transformers_embeds_as_the_model_without_the_package(
    family, published, model, prepare, image, without_the_package
):
    """Saved again, too; a text that is too long is cut, and a gray image is one of three channels."""
    folder = without_the_package[0]
    inputs, processor = prepare(LONG), AutoProcessor.from_pretrained(published).image_processor
    pictures = [Image.open(file).convert("RGB") for file in (image, folder / "gray.png")]
    pixels = processor(pictures, return_tensors="pt").pixel_values
    expected = {
        "texts": model.encode_text(inputs["input_ids"], inputs.get("attention_mask")),
        "images": model.encode_image(pixels),
    }
    for name in ("first", "again"):
        found = load_file(folder / f"{family.model_type}_{name}.safetensors")
        for kind, value in expected.items():
            torch.testing.assert_close(found[kind], value, rtol=0, atol=1e-5 * value.abs().max().item())


@fixed_size
@torch.no_grad()
def test_open_clips_calls_are_the_models(family, published, model, inputs, image):
    adapter, transform, tokenize = load_clip(str(published))
    tokens, pixels = tokenize(TEXTS), transform(Image.open(image))[None]
    assert tokens.shape == (2, LENGTH) and torch.equal(tokenize(TEXTS[0])[0], tokens[0])
    assert torch.equal(pixels, inputs["pixel_values"]) and adapter.logit_scale.ndim == 0
    texts = model.encode_text(inputs["input_ids"], inputs.get("attention_mask"))
    largest = max(1.0, texts.abs().max().item())  # more of MoE-ViE's, which no norm bounds
    torch.testing.assert_close(adapter.encode_text(tokens), texts, rtol=1.3e-6, atol=1e-5 * largest)
    torch.testing.assert_close(adapter.encode_image(pixels), model.encode_image(pixels))
    image_features, text_features, scale = adapter(pixels, tokens)
    expected = model(**inputs).logits_per_image - (model.logit_bias if family.sigmoid else 0)
    torch.testing.assert_close(scale * image_features @ text_features.T, expected)
    assert adapter(text=tokens)[0] is None


@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[3]], ids=["clip", "siglip2"], indirect=True, scope="module")
def test_lora_adapts_experts_and_routers_alone_and_merges(published, model, inputs):
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
    original, trained = AutoModel.from_pretrained(published).state_dict(), ""
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.abs().max() > 0 and ("lora_" in name or "router" in name), name
            trained += name
        else:
            name = re.sub(r"^base_model\.model\.|base_layer\.|original_module\.", "", name)
            assert parameter.grad is None and torch.equal(parameter, original[name])
    assert all(part in trained for part in ("attn", "experts", "router"))
    with torch.no_grad():
        expected = adapted(**batch).logits_per_image
        for implementation in ("eager", "grouped", "grouped_mm", "batched_mm"):
            adapted.get_base_model().set_experts_implementation(implementation)
            torch.testing.assert_close(adapted(**batch).logits_per_image, expected, atol=1e-4, rtol=1e-4)
        merged = adapted.merge_and_unload()
        assert type(merged) is type(model)
        torch.testing.assert_close(merged(**batch).logits_per_image, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("adapter", [LoraConfig, LoHaConfig])
def test_an_adapter_of_a_shared_encoder_is_saved_and_loaded(adapter, tmp_path):
    """Each tower has its own, on weights that are one."""
    shared = CLIPMoEModel(shared_config(tiny_config())).eval()
    shared.save_pretrained(tmp_path / "base")
    adapted, batch = get_peft_model(shared, adapter(r=2, target_modules=["q_proj"])), tiny_inputs()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(CLIPMoEModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits_per_image, adapted(**batch).logits_per_image)


@fixed_size
def test_a_llava_takes_the_tower_in_place_of_its_dense_one(family, published, tmp_path):
    vision = tiny_dense(family, LENGTH).config.vision_config
    has_class_token = not family.sigmoid and not family.has_own_dense
    if has_class_token:  # transformers' LLaVA does not know MetaCLIP 2's tower, which is CLIP's
        vision = CLIPVisionConfig.from_dict(vision.to_dict())
    llava, parts = tiny_llava(vision, 40, 39), AutoProcessor.from_pretrained(published)
    llava.config.vision_feature_select_strategy = "default" if has_class_token else "full"
    processor = LlavaProcessor(image_processor=parts.image_processor, tokenizer=parts.tokenizer, patch_size=8)
    for part in (llava, processor):
        part.save_pretrained(tmp_path / "llava")
    parts = ["--model", str(tmp_path / "llava"), "--tower", str(published)]
    clip_moe.main(["llava", str(tmp_path / "out"), *parts])  # compares features with the tower's
    swapped = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert type(swapped.model.vision_tower) is type(AutoModel.from_pretrained(published).vision_model)
    ids = torch.tensor([[3, *[39] * swapped.config.image_seq_length, 4]])
    logits = swapped(input_ids=ids, pixel_values=torch.randn(1, 3, 16, 16), attention_mask=torch.ones_like(ids)).logits
    assert swapped.config.image_seq_length == 4 and logits.isfinite().all()
