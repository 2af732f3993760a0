"""open_clip's calls: equal to the model's own, and taken by CLIP_benchmark's metrics, which agree with ours."""

import numpy as np
import pytest
import torch
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
from torch.utils.data import DataLoader
from transformers import CLIPModel

from data import glyphs
from evaluation.retrieval import retrieval_metrics
from evaluation.zero_shot import class_embeddings, zero_shot_metrics
from modeling_clip_moe import CLIPMoDEModel
from modeling_clip_moe.open_clip_adapter import load_clip

BASE = "training/glyph_clip"
TEMPLATES = ["a picture of a {c}", "a small {c}"]


@pytest.fixture(scope="module")
def adapted(repository):
    return load_clip(str(repository))


@pytest.fixture(scope="module")
def images(adapted):
    """(image, class, caption) of 60 glyphs."""
    _, transform, _ = adapted
    samples = glyphs.load("test", "detailed", 60)
    return [(transform(sample["image"]), sample["kind"], sample["caption"]) for sample in samples]


@torch.no_grad()
def test_embeddings_are_the_models(adapted, model, processor):
    adapter, transform, tokenize = adapted
    texts = ["a red star", "a large blue heart on green paper with dots, in the upper left corner " * 4]
    inputs = processor(text=texts, padding=True, truncation=True, return_tensors="pt")
    expected = model.get_text_features(**inputs).pooler_output
    torch.testing.assert_close(adapter.encode_text(tokenize(texts)), expected)
    assert tokenize(texts).shape == (2, model.config.text_config.max_position_embeddings)
    assert torch.equal(tokenize(texts[0])[0], tokenize(texts)[0])

    image = glyphs.load("test", "detailed", 1)[0]["image"]
    pixel_values = processor(images=image, return_tensors="pt").pixel_values
    assert torch.equal(transform(image)[None], pixel_values)
    expected = model.get_image_features(pixel_values).pooler_output
    torch.testing.assert_close(adapter.encode_image(pixel_values), expected)

    image_features, text_features, scale = adapter(pixel_values, tokenize(texts))
    outputs = model(**inputs, pixel_values=pixel_values)
    torch.testing.assert_close(scale * image_features @ text_features.T, outputs.logits_per_image)
    assert adapter.logit_scale.ndim == 0 and adapter(text=tokenize(texts))[0] is None


def test_zero_shot_classification_of_clip_benchmark(adapted, images):
    adapter, _, tokenize = adapted
    names = list(glyphs.KINDS)
    labels = np.array([names.index(kind) for _, kind, _ in images])
    data = DataLoader([(image, label) for (image, _, _), label in zip(images, labels, strict=True)], batch_size=16)
    classifier = zeroshot_classification.zero_shot_classifier(adapter, tokenize, names, TEMPLATES, "cpu", amp=False)
    logits, target = zeroshot_classification.run_classification(adapter, classifier, data, "cpu", amp=False)
    with torch.no_grad():
        image_embeds = adapter.encode_image(torch.stack([image for image, _, _ in images]), normalize=True)
        prompts = [tokenize([template.format(c=name) for template in TEMPLATES]) for name in names]
        prompt_embeds = torch.stack([adapter.encode_text(texts, normalize=True) for texts in prompts])
    found = (logits.argmax(dim=1) == target).float().mean().item()
    metrics = zero_shot_metrics(image_embeds.numpy(), class_embeddings(prompt_embeds.numpy()), labels)
    assert found == pytest.approx(metrics["accuracy"]) and found > 0.5


def test_retrieval_of_clip_benchmark(adapted, images):
    adapter, _, tokenize = adapted
    data = DataLoader(
        [(image, [caption]) for image, _, caption in images],
        batch_size=16,
        collate_fn=lambda batch: (torch.stack([image for image, _ in batch]), [texts for _, texts in batch]),
    )
    found = zeroshot_retrieval.evaluate(adapter, data, tokenize, "cpu", amp=False, recall_k_list=[1, 5])
    with torch.no_grad():
        image_embeds = adapter.encode_image(torch.stack([image for image, _, _ in images]), normalize=True)
        text_embeds = adapter.encode_text(tokenize([caption for _, _, caption in images]), normalize=True)
    expected = retrieval_metrics(image_embeds.numpy(), text_embeds.numpy(), np.arange(len(images)), ks=(1, 5))
    assert found["image_retrieval_recall@5"] == pytest.approx(expected["text_to_image_recall@5"])
    assert found["text_retrieval_recall@1"] == pytest.approx(expected["image_to_text_recall@1"])
    assert found["text_retrieval_recall@5"] > 1.5 * 5 / len(images)


def test_a_dense_clip_is_taken_and_a_mixture_refused(tmp_path):
    adapter, _, tokenize = load_clip(BASE)
    assert isinstance(adapter.model, CLIPModel) and adapter.encode_text(tokenize("a star")).ndim == 2
    CLIPMoDEModel.from_experts([adapter.model, adapter.model]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expert_0"):
        load_clip(str(tmp_path))
