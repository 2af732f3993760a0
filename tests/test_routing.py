"""What routers and fusion gates do: by hand, and as a small model records it."""

import numpy as np
import pytest
import small_experts
import torch
from transformers import CLIPModel

from evaluation.routing import RouterCounts, average_gates, chosen_experts, count_tokens

sparse, unnormalized, gated = small_experts.sparse, small_experts.unnormalized, small_experts.gated


def test_counts_by_hand():
    counts = RouterCounts(3)
    # Two captions of two tokens, two choices each; the last token is padding, and one choice found no room.
    sure, half, even, padding = [0.5, 0.25, 0.25], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3], [1, 0, 0]
    logits = torch.tensor([[sure, half], [even, padding]]).log()
    weights = torch.tensor([[[0.5, 0.25], [0.5, 0.0]], [[0.5, 0.125], [0.0, 0.0]]])
    counts.add(logits, weights, torch.tensor([[[0, 1], [0, 3]], [[2, 0], [3, 3]]]), torch.tensor([[1, 1], [1, 0]]))
    assert counts.pairs.tolist() == [[3, 1, 1], [1, 1, 0], [1, 0, 1]]
    assert (counts.num_tokens, counts.dropped()) == (3, pytest.approx(1 / 6))
    assert counts.mean_entropy() == pytest.approx((1.5 + 1 + np.log2(3)) / 3)
    assert counts.share_entropy() == pytest.approx(-(0.6 * np.log2(0.6) + 0.4 * np.log2(0.2)))
    counts.add(torch.tensor([[half]]).log(), torch.tensor([[[0.5, 0.125]]]), torch.tensor([[[1, 2]]]), None)
    np.testing.assert_allclose(counts.shares(), [3 / 4, 2 / 4, 2 / 4])
    np.testing.assert_allclose(counts.coactivation(), np.array([[3, 1, 1], [1, 2, 1], [1, 1, 2]]) / 4)
    assert counts.mean_weight() == (0.75 + 0.5 + 0.625 + 0.625) / 4
    assert counts.dropped() == pytest.approx(1 / 8)
    for value in ("shares", "mean_weight", "mean_entropy", "share_entropy", "dropped", "overflowing"):
        with pytest.raises(ValueError, match="has seen no token"):
            getattr(RouterCounts(3), value)()


def test_an_expert_that_computes_all_leaves_no_entropy():
    counts = RouterCounts(2)
    counts.add(torch.tensor([[[50.0, -50.0]]]), torch.ones(1, 1, 1), torch.tensor([[[0]]]), None)
    assert counts.share_entropy() == 0 == pytest.approx(counts.mean_entropy(), abs=1e-12)


@pytest.mark.parametrize("group_size", [None, 1, 2])
def test_what_would_be_dropped_is_what_that_capacity_drops(unnormalized, group_size, monkeypatch):
    """In the first sparse layer: later ones see what was dropped. Without a capacity in training, nothing would be. The
    last of three is a group of its own where groups are of two."""
    model, _ = unnormalized
    inputs = {
        "pixel_values": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        "input_ids": torch.randint(100, (3, 9), generator=torch.Generator().manual_seed(0)),
        "attention_mask": (torch.arange(9) < torch.tensor([9, 4, 6])[:, None]).long(),
    }

    def counted(batch_size=3, **fields):
        for config in (model.text_model.config, model.vision_model.config):
            for name, value in fields.items():
                monkeypatch.setattr(config, name, value)
        with torch.no_grad(), count_tokens(model) as counts:
            for start in range(0, 3, batch_size):
                model(**{name: tensor[start : start + batch_size] for name, tensor in inputs.items()})
        return {tower: layers[1] for tower, layers in counts.items()}

    free = counted(capacity_factor=1.0, capacity_group_size=group_size)
    limited = counted(group_size or 3, eval_capacity_factor=1.0, capacity_group_size=None)
    for tower in ("text", "vision"):
        assert 0.1 < free[tower].overflowing() < 0.9
        assert free[tower].overflowing() == pytest.approx(limited[tower].dropped())
        assert free[tower].dropped() == 0 and limited[tower].overflowing() == free[tower].overflowing()
    assert counted(capacity_factor=None, eval_capacity_factor=None)["text"].overflowing() == 0


def test_counts_are_those_the_model_records(sparse):
    model, _ = sparse
    inputs = {
        "pixel_values": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        "input_ids": torch.randint(100, (3, 9), generator=torch.Generator().manual_seed(0)),
        "attention_mask": (torch.arange(9) < torch.tensor([9, 4, 6])[:, None]).long(),
    }
    with torch.no_grad(), count_tokens(model) as counts:
        outputs = model(**inputs, output_expert_ids=True)
    assert {tower: sorted(layers) for tower, layers in counts.items()} == dict.fromkeys(counts, list(range(8)))
    for tower, recorded, tokens in (
        ("text", outputs.text_model_output.expert_ids, 19),
        ("vision", outputs.vision_model_output.expert_ids, 3 * 17),
    ):
        for layer, ids in enumerate(recorded):
            shares = [(ids == expert).sum().item() / tokens for expert in range(4)]
            np.testing.assert_allclose(counts[tower][layer].shares(), shares)
            assert sum(shares) == pytest.approx(2)
    with torch.no_grad():
        model(**inputs)
    assert counts["text"][0].num_tokens == 19  # outside of the block nothing counts


@pytest.mark.parametrize("eos_token_id", [90, 2])
def test_counts_at_the_tokens_that_reach_the_output(sparse, eos_token_id, monkeypatch):
    """The class token, and the token that the text tower pools at: by both of CLIP's rules."""
    model, _ = sparse
    monkeypatch.setattr(model.text_model.config, "eos_token_id", eos_token_id)
    input_ids = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    input_ids[:, -1] = 89
    input_ids[[0, 1], [4, 6]] = 90
    ends = [4, 6, 0] if eos_token_id == 90 else [4, 6, input_ids[2].argmax().item()]
    inputs = {
        "pixel_values": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        "input_ids": input_ids,
        "attention_mask": (torch.arange(9) <= torch.tensor([4, 6, 8])[:, None]).long(),
    }
    with torch.no_grad(), count_tokens(model, at_output=True) as counts:
        outputs = model(**inputs, output_expert_ids=True)
        texts = model.get_text_features(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    pooled = outputs.text_model_output.last_hidden_state[range(3), ends]
    assert torch.equal(model.text_projection(pooled), texts.pooler_output)  # so these are the pooled tokens
    for tower, recorded, positions, calls in (
        ("text", outputs.text_model_output.expert_ids, ends, 2),
        ("vision", outputs.vision_model_output.expert_ids, [0, 0, 0], 1),
    ):
        for layer, ids in enumerate(recorded):
            ids = ids[range(3), positions]
            assert counts[tower][layer].num_tokens == 3 * calls
            assert counts[tower][layer].pairs.diagonal().tolist() == [calls * (ids == e).sum().item() for e in range(4)]
            assert counts[tower][layer].mean_weight() == pytest.approx(1)
    with torch.no_grad():
        model(**inputs)
    assert counts["text"][0].num_tokens == 6 and not model.text_model._forward_pre_hooks


def test_a_dense_model_has_no_routing():
    with (
        pytest.raises(ValueError, match="no sparse layer"),
        count_tokens(CLIPModel.from_pretrained("training/symbol_clip")),
    ):
        pass


def test_gates_by_hand(gated):
    """Means over the tokens that are no padding, of what the last layer's gate makes of its input."""
    model, _ = gated
    inputs = {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        "input_ids": torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(0)),
        "attention_mask": torch.tensor([[1] * 9, [1] * 4 + [0] * 5]),
    }
    seen = {}
    layers = {"text": model.text_model.encoder.layers[7], "vision": model.vision_model.encoder.layers[7]}
    for tower, layer in layers.items():
        layer.mlp.router.register_forward_pre_hook(lambda _, args, tower=tower: seen.update({tower: args[0]}))
    with torch.no_grad(), average_gates(model) as gates, average_gates(model, at_output=True) as output_gates:
        model(**inputs)
        model(**inputs)
    tokens = {"text": seen["text"][inputs["attention_mask"].bool()], "vision": seen["vision"].flatten(0, 1)}
    ends = model.text_model.pooled_positions(inputs["input_ids"])
    pooled = {"text": seen["text"][[0, 1], ends], "vision": seen["vision"][:, 0]}
    for found, of_tokens in ((gates, tokens), (output_gates, pooled)):
        assert {tower: list(layers) for tower, layers in found.items()} == {"text": [5, 7], "vision": [5, 7]}
        for tower, layer in layers.items():
            expected = layer.mlp.fusion_gate.proj(of_tokens[tower]).sigmoid().mean().item()
            assert found[tower][7].mean() == pytest.approx(expected, abs=1e-6)
            assert 0 < expected < 1 and abs(expected - 0.5) > 1e-3  # which it is without a gate
    assert abs(gates["vision"][7].mean() - output_gates["vision"][7].mean()) > 1e-3


def test_more_experts_than_there_are(gated):
    model, _ = gated
    for number in (0, 5):
        with pytest.raises(ValueError, match=f"num_experts_per_tok={number} must be between 1 and num_experts=4"):
            with chosen_experts(model, number):
                pass
    with pytest.raises(KeyError), chosen_experts(model, 3):
        raise KeyError
    assert model.config.vision_config.num_experts_per_tok == 2
