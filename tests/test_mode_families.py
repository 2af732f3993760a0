"""Mixtures of whole models of other families than CLIP, and of two."""

import copy

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from tiny_clip import command, moved
from tiny_families import saved, tiny_dense
from torch.nn.functional import logsigmoid
from transformers import AutoModel, AutoProcessor, CLIPModel

from clip_moe.conversion.assemble import convert
from clip_moe.conversion.checkpoints import load_config, load_mixture
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.processors import load_processor
from clip_moe.conversion.publishing.bundle import build
from clip_moe.conversion.publishing.card import render
from clip_moe.conversion.publishing.lineage import Lineage
from clip_moe.conversion.upcycle import upcycle
from clip_moe.conversion.verification import sample_inputs
from clip_moe.data.tokenizer import tokenize
from clip_moe.evaluation.ensemble import Ensemble, open_model
from clip_moe.evaluation.measures import embed_both, measure
from clip_moe.evaluation.sentence_encoders import ClipEncoder
from clip_moe.evaluation.task import Task
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel
from modeling_clip_moe.families import FAMILIES


def mix(folder, *experts):
    command("assemble", folder, "--experts", *experts)
    return folder


def two_experts(family):
    """A dense and a sparse one."""
    return tiny_dense(family), moved(upcycle(tiny_dense(family), PRESETS["clip_moe"]), "experts", seed=1)


@pytest.mark.parametrize("family", FAMILIES[1:4], ids=lambda family: family.model_type)
@torch.no_grad()
def test_a_mixture_scores_with_the_mean_of_its_experts(family, tmp_path):
    experts = two_experts(family)
    folders = [saved(family, expert, tmp_path / str(number)) for number, expert in enumerate(experts)]
    mixture, inputs = mix(tmp_path / "mixture", *folders), sample_inputs(experts[0].config)
    outputs = load_mixture(mixture)(**inputs, return_loss=True)
    logits = torch.stack([expert(**inputs).logits_per_text for expert in experts]).mean(dim=0)
    torch.testing.assert_close(outputs.logits_per_text, logits)
    configs = [expert.config for expert in experts]
    card = str(render(load_config(mixture), Lineage(), "user/mixture", None, None, configs))
    assert f"A mixture of 2 models ({family.name})" in card and ('padding="max_length"' in card) == family.sigmoid
    if family.sigmoid:  # each pair is a yes or a no
        pairs = [logsigmoid(logit if i == j else -logit) for i, row in enumerate(logits) for j, logit in enumerate(row)]
        torch.testing.assert_close(outputs.loss, -sum(pairs) / len(logits))


@pytest.fixture(scope="module")
def two_families(tmp_path_factory):
    """Two experts, a CLIP and a sparse SigLIP, and the folder of their mixture."""
    folder = tmp_path_factory.mktemp("families")
    clip, _, siglip, *_ = FAMILIES
    experts = tiny_dense(clip), two_experts(siglip)[1]
    folders = saved(clip, experts[0], folder / "clip"), saved(siglip, experts[1], folder / "siglip")
    return experts, mix(folder / "mixture", *folders)


@torch.no_grad()
def test_experts_of_two_families_read_by_their_own_processors(two_families):
    experts, folder = two_families
    texts, images = ["ab", "ba c"], pictures(3)
    cosines, logits, inputs = [], [], []
    for number, expert in enumerate(experts):
        processor = AutoProcessor.from_pretrained(folder / f"expert_{number}")
        inputs.append(processor(text=texts, images=images, padding="max_length", return_tensors="pt"))
        outputs = expert(**inputs[-1])
        cosines.append(outputs.text_embeds @ outputs.image_embeds.T)
        logits.append(outputs.logits_per_text)
    outputs = AutoModel.from_pretrained(folder)(expert_inputs=inputs)
    torch.testing.assert_close(outputs.logits_per_text, sum(logits) / 2)
    ensemble, rows = Ensemble(folder, None, 2, torch.device("cpu")), Dataset.from_dict({"image": images})
    texts, images = ensemble.map(lambda expert: expert.texts(texts)), ensemble.map(lambda expert: expert.images(rows))
    weights = ensemble.weights([["ab"]])[0]
    scores = sum(weight * a @ b.T for weight, a, b in zip(weights, texts, images, strict=True))
    scales = [expert.logit_scale.exp() for expert in experts]
    expected = sum(scale * cosine for scale, cosine in zip(scales, cosines, strict=True)) / sum(scales)
    torch.testing.assert_close(torch.tensor(scores), expected)


def test_a_mixture_of_two_families_says_what_it_needs(two_families, tmp_path):
    experts, folder = two_families
    inputs = sample_inputs(experts[0].config)
    mixture = AutoModel.from_pretrained(folder)
    for call in (lambda: mixture(**inputs), lambda: mixture.get_image_features(inputs["pixel_values"])):
        with pytest.raises(ValueError, match=r"experts read different inputs: pass expert_inputs.*expert_0, expert_1"):
            call()
    with pytest.raises(ValueError, match="Make the mixture with own_processors=True"):
        CLIPMoDEModel.from_experts(experts)
    assert CLIPMoDEModel.from_experts(experts, own_processors=True).config.projection_dim is None
    with pytest.raises(ValueError, match="sum needs embeddings of one size"):
        CLIPMoDEModel.from_experts(experts, own_processors=True, feature_ensemble="sum")


@pytest.mark.slow
def test_a_mixture_of_two_families_is_published_with_both_processors(two_families, tmp_path):
    build(two_families[1], tmp_path / "published", "user/mixture")
    card = (tmp_path / "published" / "README.md").read_text()
    assert "A mixture of 2 models (CLIP, SigLIP)" in card
    code = card.split("```python")[1].split("```")[0].replace("user/mixture", str(tmp_path / "published"))
    Image.new("RGB", (16, 16)).save(tmp_path / "image.png")
    exec(code.replace("image.png", str(tmp_path / "image.png")), {})


def test_the_card_of_two_sigmoid_families_scores_as_they_do():
    config = CLIPMoDEConfig(experts=["a", "b"], own_processors=True)
    dense = [tiny_dense(family).config for family in FAMILIES[2:4]]
    card = str(render(config, Lineage(), "user/mixture", None, None, dense))
    assert "model(expert_inputs=inputs).logits_per_image.sigmoid()" in card


def test_texts_that_are_not_padded_are_refused():
    experts, ids = two_experts(FAMILIES[2]), torch.zeros(2, 5, dtype=torch.long)
    mixture, images = CLIPMoDEModel.from_experts(experts), torch.zeros(2, 3, 16, 16)
    for call in (experts[1].get_text_features, mixture.get_text_features, lambda ids: mixture(ids, images)):
        with pytest.raises(ValueError, match='have 5 tokens a text, but SigLIP needs 8: pass padding="max_length"'):
            call(ids)


def test_a_first_expert_of_another_size_and_precision(two_families, tmp_path):
    """The others lose no digits to it, and a sum of embeddings of several sizes is refused before it is measured."""
    config = tiny_dense(FAMILIES[0]).config
    config.projection_dim = 16
    small = saved(FAMILIES[0], moved(CLIPModel(config), "", seed=0).bfloat16(), tmp_path / "small")
    mixture = mix(tmp_path / "mixture", small, two_families[1].parent / "siglip")
    before, after = two_families[0][1].state_dict(), AutoModel.from_pretrained(mixture).expert(1).state_dict()
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    with pytest.raises(ValueError, match="sum needs embeddings of one size"):
        open_model(mixture, None, 2, torch.device("cpu"), changes={"feature_ensemble": "sum"})


@pytest.fixture(scope="module")
def routed_by_images(two_families, tmp_path_factory):
    """A mixture in which every image is its own metadata, and a SigLIP's bias is far from a CLIP's 0."""
    (clip, siglip), first = two_families
    folder, siglip = tmp_path_factory.mktemp("routed_by_images"), copy.deepcopy(siglip)
    siglip.logit_bias.data.fill_(-9.0)
    saved(FAMILIES[2], siglip, folder / "siglip")
    encoder = ClipEncoder(str(first.parent / "clip"), "image")
    (folder / "encoder").mkdir()
    encoder.save(folder / "encoder")
    shades = Dataset.from_dict({"image": pictures(9)[::8]})
    settings = {"centers": torch.tensor(encoder.encode(shades)), "expert_of_center": torch.arange(2)}
    settings |= {"metadata_encoder": encoder.name, "metadata_modality": "image"}
    settings |= {"routing": "paper", "routing_temperature": 0.02}
    convert([first.parent / "clip", folder / "siglip"], folder / "mixture", folder / "encoder", **settings)
    return folder / "mixture"


def pictures(number):
    """From black to bright."""
    pixels = np.random.default_rng(0).integers(0, 256, (number, 20, 16, 3), dtype=np.uint8)
    shades = np.linspace(0, 1, number)[:, None, None, None]
    return [Image.fromarray(image) for image in (pixels * shades).astype(np.uint8)]


@torch.no_grad()
def test_images_that_route_themselves_are_ranked_as_the_mixture_scores_them(routed_by_images):
    images, captions = pictures(9), ["ab", "ba c", "c", "aab", "cab", "a c", "bb", "ac b", "cc a"]
    mixture, ensemble = load_mixture(routed_by_images), Ensemble(routed_by_images, None, 4, torch.device("cpu"))
    inputs = []
    for name in mixture.config.experts:
        processor = load_processor(routed_by_images / name)
        pixels = processor.image_processor(images, return_tensors="pt")
        inputs.append({**tokenize(processor.tokenizer, captions), **pixels})
    weights = mixture.route(torch.as_tensor(ensemble.encoder.encode(Dataset.from_dict({"image": images})))[:, None])
    logits = mixture(expert_inputs=inputs, routing_weights=weights[:, None]).logits_per_text
    rows = Dataset.from_dict({"image": images, "label": logits.argmax(dim=0)})
    images, texts = embed_both(ensemble, rows, captions)
    image_side = ensemble.image_side(images, ensemble.image_weights(rows))
    text_side = ensemble.text_side(texts, ensemble.weights([captions]))
    assert (text_side @ image_side.T).argsort(axis=1).tolist() == logits.argsort(dim=1).tolist()
    task = Task("zero_shot", "", "", lambda: (rows, 0), classes=captions, templates=["{}"])
    assert measure(task, ensemble)["metrics"]["accuracy"] == 1


def test_texts_are_cut_where_any_expert_cuts_them(two_families, tmp_path):
    _, _, siglip, *_ = FAMILIES
    short = saved(siglip, tiny_dense(siglip, 5), tmp_path / "short", 5)
    mixture = mix(tmp_path / "mixture", two_families[1].parent / "clip", short)
    ensemble = Ensemble(mixture, None, 4, torch.device("cpu"))
    rows = Dataset.from_dict({"image": pictures(2), "caption": ["reda b", "reda c"]})
    texts = measure(Task("retrieval", "", "", lambda: (rows, 0)), ensemble)["texts"]
    assert (texts["max_length"], texts["cut"], texts["alike"]) == (5, 2, 0)
