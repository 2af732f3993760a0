"""Routers and fusion gates, and which expert a patch gets: by hand, and as a small model records
it; and the pictures of it, which show their numbers."""

import numpy as np
import pytest
import small_experts
import torch
from matplotlib import cbook

from clip_moe.data.symbols import SYMBOLS
from clip_moe.evaluation.embedder import Embedder
from clip_moe.evaluation.routing import LayerCounts, averaged_experts, count_tokens
from clip_moe.evaluation.routing_pictures import draw_shares, route_images

sparse, unnormalized, gated = small_experts.sparse, small_experts.unnormalized, small_experts.gated


@pytest.fixture(scope="module")
def embedder(sparse):
    return Embedder(sparse[1], None, 4, torch.device("cpu"))


def some_inputs(batch_size=3, lengths=(9, 4, 6)):
    return {
        "pixel_values": torch.randn(batch_size, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        "input_ids": torch.randint(100, (batch_size, 9), generator=torch.Generator().manual_seed(0)),
        "attention_mask": (torch.arange(9) < torch.tensor(lengths)[:, None]).long(),
    }


def test_counts_by_hand():
    counts = LayerCounts(3)
    # Two captions of two tokens, two choices each; the last token is padding, and one choice found no room.
    sure, half, even, padding = [0.5, 0.25, 0.25], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3], [1, 0, 0]
    probabilities = torch.tensor([[sure, half], [even, padding]], dtype=torch.float64)
    weights = torch.tensor([[[0.5, 0.25], [0.5, 0.0]], [[0.5, 0.125], [0.0, 0.0]]])
    gate = torch.tensor([[[0.5, 0.75], [1, 0.5]], [[0.25, 0.25], [9, 9]]])
    ids, mask = torch.tensor([[[0, 1], [0, 3]], [[2, 0], [3, 3]]]), torch.tensor([[1, 1], [1, 0]])
    counts.add(probabilities, weights, ids, mask, gate)
    assert counts.computed.tolist() == [3, 1, 1]
    means = counts.means()
    assert means["dropped"] == pytest.approx(1 / 6) and means["gate"] == pytest.approx(3.25 / 6)
    assert means["entropy"] == pytest.approx((1.5 + 1 + np.log2(3)) / 3)
    assert means["share_entropy"] == pytest.approx(-(0.6 * np.log2(0.6) + 0.4 * np.log2(0.2)))
    counts.add(torch.tensor([[half]]), torch.tensor([[[0.5, 0.125]]]), torch.tensor([[[1, 2]]]), None)
    means = counts.means()
    assert means["shares"] == [3 / 4, 2 / 4, 2 / 4] and means["weight"] == (0.75 + 0.5 + 0.625 + 0.625) / 4
    one = LayerCounts(2)
    one.add(torch.tensor([[[1.0, 0.0]]]), torch.ones(1, 1, 1), torch.tensor([[[0]]]), None)
    assert one.means()["share_entropy"] == 0 == pytest.approx(one.means()["entropy"], abs=1e-12)
    assert one.means()["gate"] is None


def test_counts_are_those_the_model_records(sparse):
    """Of all tokens that are no padding."""
    model, inputs = sparse[0], some_inputs(lengths=(5, 7, 9))
    with torch.no_grad(), count_tokens(model) as counts:
        outputs = model(**inputs, output_expert_ids=True)
        model.get_text_features(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    for tower, calls in (("text", 2), ("vision", 1)):
        assert list(counts[tower]) == list(range(8))
        for layer, ids in enumerate(outputs[f"{tower}_model_output"].expert_ids):
            of = counts[tower][layer]
            # Padding has the id of no expert
            assert of.computed.tolist() == [calls * int((ids == expert).sum()) for expert in range(4)]
            assert of.num_tokens == calls * int((ids < 4).any(dim=-1).sum())
            assert of.means()["weight"] == pytest.approx(1)
    tokens = counts["text"][0].num_tokens
    with torch.no_grad():
        model(**inputs)  # outside of the block nothing counts
    assert counts["text"][0].num_tokens == tokens


def test_gates_are_those_of_the_tokens(gated):
    """Means over the tokens that are no padding, of what the last layer's gate makes of its input."""
    model, inputs, seen = gated[0], some_inputs(2, (9, 4)), {}
    layers = {"text": model.text_model.encoder.layers[7], "vision": model.vision_model.encoder.layers[7]}
    for tower, layer in layers.items():
        layer.mlp.register_forward_pre_hook(lambda _, args, tower=tower: seen.update({tower: args[0]}))
    with torch.no_grad(), count_tokens(model) as counts:
        model(**inputs)
        model(**inputs)
    tokens = {"text": seen["text"][inputs["attention_mask"].bool()], "vision": seen["vision"].flatten(0, 1)}
    for tower, tower_tokens in tokens.items():
        expected = layers[tower].mlp.fusion_gate.proj(tower_tokens).sigmoid().mean().item()
        assert list(counts[tower]) == [5, 7] and abs(expected - 0.5) > 1e-3  # which it is without a gate
        assert counts[tower][7].means()["gate"] == pytest.approx(expected, abs=1e-6)


def test_changes_of_the_model_end_with_the_block(gated):
    model, _ = gated
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(KeyError), averaged_experts(model):
        for name, parameter in model.named_parameters():
            assert (parameter == parameter[0]).all() or ".experts." not in name
        raise KeyError
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_patches_are_routed_as_the_model_records_it(sparse, embedder):
    images = list(SYMBOLS.load("test", "web", 6)["image"])
    routed = route_images(embedder, images, layer=2)
    inputs = embedder.processor.image_processor(images, return_tensors="pt")
    with torch.no_grad():
        outputs = sparse[0].vision_model(**inputs, output_router_logits=True)
    np.testing.assert_allclose(routed.probabilities, outputs.router_logits[2].softmax(dim=-1), atol=1e-5)
    assert (routed.layer, routed.grid, routed.probabilities.shape) == (2, (4, 4), (6, 17, 4))
    for image, pixels in zip(images, routed.pixels, strict=True):
        np.testing.assert_allclose(pixels, np.asarray(image) / 255, atol=1e-6)


def test_heat_maps_name_their_numbers(tmp_path, figures):
    """Of shares, a line a layer, a column an expert."""
    text = {0: {"shares": [0.1, 0.9]}, 2: {"shares": [0.2, 0.8]}}
    routing = {"text": text, "vision": {1: {"shares": [0.3, 0.7]}}}
    draw_shares(routing, tmp_path / "shares.png", r"costs $\frac$ a token")
    (shares,) = figures
    assert {axis.get_title(): [text.get_text() for text in axis.texts] for axis in shares.axes} == {
        "text tower": ["10", "90", "20", "80"],
        "vision tower": ["30", "70"],
    }
    title = shares._suptitle.get_text()
    assert title == r"costs \$\frac\$ a token" and not cbook.is_math_text(title)
