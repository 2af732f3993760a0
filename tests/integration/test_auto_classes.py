"""Auto classes and pipelines on a published folder, with the package and without it: same names, same numbers."""

import json

import pytest
import torch
from PIL import Image
from programs import run_program
from safetensors.torch import load_file
from transformers import CLIPImageProcessorPil, CLIPTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from modeling_clip_moe import CLIPMoEVisionModel

# With the package there is nothing to trust; without it, everything
EVERYTHING = """
import json, sys, torch
folder, vision, image, output, package = sys.argv[1:]
if package == "yes":
    import modeling_clip_moe
    trust = {}
else:
    sys.modules["modeling_clip_moe"] = None
    trust = {"trust_remote_code": True}
from PIL import Image
from safetensors.torch import save_file
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers import (
    AutoConfig, AutoModel, AutoModelForImageClassification, AutoModelForZeroShotImageClassification,
    AutoProcessor, AutoTokenizer, pipeline
)
image = Image.open(image)
names = ["a star", "a heart"]
config = AutoConfig.from_pretrained(folder, **trust)
processor = AutoProcessor.from_pretrained(folder, **trust)
inputs = processor(text=names, images=image, padding=True, return_tensors="pt")
models = {
    "model": AutoModel.from_pretrained(folder, **trust),
    "zero_shot": AutoModelForZeroShotImageClassification.from_pretrained(folder, **trust),
}
torch.manual_seed(0)  # the classifier is new
classifier = AutoModelForImageClassification.from_pretrained(folder, num_labels=3, **trust)
towers = {
    "vision": AutoModel.from_pretrained(vision, **trust),
    "vision_of_whole": AutoModel.from_pretrained(folder, config=config.vision_config, **trust),
}
text = AutoModel.from_pretrained(folder, config=config.text_config, **trust)
tensors = {}
with torch.no_grad():
    for name, model in models.items():
        tensors[name] = model(**inputs).logits_per_image.contiguous()
    for name, tower in towers.items():
        tensors[name] = tower(inputs["pixel_values"]).last_hidden_state
    tensors["text_of_whole"] = text(inputs["input_ids"], inputs["attention_mask"]).pooler_output
    tensors["classes"] = classifier(inputs["pixel_values"]).logits
classify = pipeline("zero-shot-image-classification", model=folder, **trust)
scores = classify(image, candidate_labels=["star", "heart"], hypothesis_template="a {}")
embed = pipeline("image-feature-extraction", model=vision, **trust)
tensors["features"] = torch.tensor(embed(image))
tensors["pooled"] = torch.tensor(embed(image, pool=True))
save_file(tensors, output)
everything = [config, processor, processor.image_processor, AutoTokenizer.from_pretrained(folder, **trust)]
everything += [AutoImageProcessor.from_pretrained(folder, **trust), classifier, text]
everything += [*models.values(), *towers.values(), classify.model, embed.model]
print(json.dumps({
    "names": [type(thing).__name__ for thing in everything],
    "remote": [type(model).__module__.startswith("transformers_modules") for model in everything[5:]],
    "config": config.to_dict(),
    "scores": scores,
}))
"""


@pytest.fixture(scope="module")
def vision(repository, tmp_path_factory):
    """Folder of the vision tower alone."""
    folder = tmp_path_factory.mktemp("tower") / "vision"
    CLIPMoEVisionModel.from_pretrained(repository).save_pretrained(folder)
    AutoImageProcessor.from_pretrained(repository).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def results(repository, vision, image, tmp_path_factory):
    """(what was printed, tensors) with the package and without it."""
    place = tmp_path_factory.mktemp("results")
    results = []
    for package in ("yes", "no"):
        arguments = [repository, vision, image, place / package, package]
        printed = json.loads(run_program(place, "-c", EVERYTHING, *arguments))
        results.append((printed, load_file(place / package)))
    return results


def test_with_the_package_and_without_it_everything_is_the_same(results):
    (with_package, expected), (without, found) = results
    assert not any(with_package.pop("remote")) and all(without.pop("remote"))
    assert with_package == without
    assert with_package["names"] == [
        *("CLIPMoEConfig", "CLIPProcessor", "CLIPImageProcessorPil", "CLIPTokenizer", "CLIPImageProcessorPil"),
        *("CLIPMoEForImageClassification", "CLIPMoETextModel", "CLIPMoEModel", "CLIPMoEModel"),
        *("CLIPMoEVisionModel", "CLIPMoEVisionModel", "CLIPMoEModel", "CLIPMoEVisionModel"),
    ]
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_the_numbers_are_those_of_the_model(results, model, processor, image):
    printed, tensors = results[0]
    inputs = processor(text=["a star", "a heart"], images=Image.open(image), padding=True, return_tensors="pt")
    outputs = model(**inputs)
    vision = outputs.vision_model_output
    for name in ("model", "zero_shot"):
        torch.testing.assert_close(tensors[name], outputs.logits_per_image)
    for name in ("vision", "vision_of_whole", "features"):
        torch.testing.assert_close(tensors[name], vision.last_hidden_state)
    text = outputs.text_model_output.last_hidden_state[range(2), inputs["attention_mask"].sum(dim=-1) - 1]
    torch.testing.assert_close(tensors["text_of_whole"], text)
    torch.testing.assert_close(tensors["pooled"], model.vision_model(inputs["pixel_values"]).pooler_output)
    scores = {score["label"]: score["score"] for score in printed["scores"]}
    star, heart = outputs.logits_per_image.softmax(dim=-1)[0].tolist()
    assert scores == {"star": pytest.approx(star, rel=1e-5), "heart": pytest.approx(heart, rel=1e-5)}


def test_the_files_of_old_programs_are_enough(repository, processor, image, tmp_path):
    for name in ("preprocessor_config.json", "vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((repository / name).read_bytes())
    text, image = "a large red star on blue paper", Image.open(image)
    tokenizer = CLIPTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert tokenizer(text).input_ids == processor.tokenizer(text).input_ids
    pixel_values = CLIPImageProcessorPil.from_pretrained(tmp_path)(image, return_tensors="pt").pixel_values
    assert torch.equal(pixel_values, processor(images=image, return_tensors="pt").pixel_values)
