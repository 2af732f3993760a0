"""What routers and fusion gates do, and which patches and words experts take: by hand, and as a small model records
it; and the pictures of it, which show their numbers."""

import numpy as np
import pytest
import small_evaluation
import small_experts
import torch
from matplotlib import cbook

from clip_moe.data.symbols import SYMBOLS
from clip_moe.evaluation import preferences
from clip_moe.evaluation.embedder import Embedder
from clip_moe.evaluation.routing import LayerCounts, averaged_experts, count_tokens
from clip_moe.evaluation.routing_pictures import draw_shares

sparse, unnormalized, gated = small_experts.sparse, small_experts.unnormalized, small_experts.gated
figures = small_evaluation.figures


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
    for tower, of_tokens in tokens.items():
        expected = layers[tower].mlp.fusion_gate.proj(of_tokens).sigmoid().mean().item()
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


def test_tokens_are_routed_as_the_model_records_it(sparse, embedder):
    model, _ = sparse
    images = list(SYMBOLS.load("test", "web", 6)["image"])
    texts = ["a seven", "a small red star on a gray background", "a heart", "a zero", "a purple disc"]
    of_images = preferences.route_images(embedder, images, layer=2)
    of_texts = preferences.route_texts(embedder, texts, layer=2)
    batch = embedder.processor.tokenizer(texts, padding=True, return_tensors="pt")
    options = {"output_expert_ids": True, "output_router_logits": True}
    with torch.no_grad():
        pictured = model.vision_model(**embedder.processor.image_processor(images, return_tensors="pt"), **options)
        written = model.text_model(**batch, **options)
    written_at = batch["attention_mask"] == 1
    for routed, outputs, shown in ((of_images, pictured, slice(None)), (of_texts, written, written_at)):
        for expert in range(4):
            assert np.array_equal(routed.computed[..., expert], (outputs.expert_ids[2] == expert).any(dim=-1))
        probabilities = outputs.router_logits[2].softmax(dim=-1).numpy()
        np.testing.assert_allclose(routed.probabilities[shown], probabilities[shown], atol=1e-5)
    assert (of_images.layer, of_images.grid, of_images.computed.shape) == (2, (4, 4), (6, 17, 4))
    for image, pixels in zip(images, of_images.pixels, strict=True):
        np.testing.assert_allclose(pixels, np.asarray(image) / 255, atol=1e-6)
    assert np.array_equal(of_texts.ids, batch["input_ids"])
    assert np.array_equal(of_texts.computed.sum(axis=-1), 2 * batch["attention_mask"])


def test_top_patches_by_hand():
    """Two images of a class token and two patches, three experts; the last computes nothing."""
    first = np.array([[0.9, 0.6, 0.3], [0.9, 0.8, 0.7]])
    probabilities = np.stack([first, 1 - first, 0 * first], axis=-1)
    routed = preferences.RoutedImages(0, probabilities, probabilities > 0.5, np.zeros((2, 1, 2, 3)), 1)
    assert routed.grid == (1, 2)
    assert preferences.top_patches(routed) == [[(1, 0), (0, 0)], [(0, 1)], []]


def test_words_against_chance_by_hand(embedder):
    """Of 40 words, expert 0 computes half: all of red, none of blue, half of star; of heart all, which is too rare."""
    tokenizer = embedder.processor.tokenizer
    texts = ["red star"] * 9 + ["blue star"] * 9 + ["heart"] * 4
    ids = tokenizer(texts, padding=True, return_tensors="np")["input_ids"]
    red, blue, star, heart = (tokenizer(word)["input_ids"][1] for word in ("red", "blue", "star", "heart"))
    computed = np.zeros((*ids.shape, 2), bool)
    computed[ids == red, 0] = computed[ids == blue, 1] = computed[ids == heart, 0] = True
    stars = np.argwhere(ids == star)
    for number, (row, place) in enumerate(stars):
        computed[row, place, number % 2] = True
    computed[:, 0, 1] = True  # begins the text, and is no word
    words = preferences.word_shares(preferences.RoutedTexts(0, computed / 2, computed, ids), tokenizer)
    assert dict(zip(words.ids, words.occurrences, strict=True)) == {red: 9, blue: 9, star: 18, heart: 4}
    assert words.chance.tolist() == [22 / 40, 18 / 40]
    shares = {red: [1, 0], blue: [0, 1], star: [0.5, 0.5], heart: [1, 0]}
    assert {token: row.tolist() for token, row in zip(words.ids, words.shares, strict=True)} == shares
    # (1 - 0.55) / sqrt(0.55 * 0.45 / 9) = 2.7 errors; (1 - 0.45) / sqrt(0.45 * 0.55 / 9) = 3.3
    assert [[words.ids[row] for row in words.preferred(expert)] for expert in (0, 1)] == [[], [blue]]
    more = preferences.WordShares(words.ids, 2 * words.occurrences, words.shares, words.chance)
    assert [more.ids[row] for row in more.preferred(0)] == [red]
    assert preferences.WordShares(words.ids, words.occurrences, words.shares, np.array([0.0, 1.0])).preferred(1) == []


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
