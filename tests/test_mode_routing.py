"""The weights of data experts: the printed equations and the authors' code, each against loops over single numbers."""

import math

import numpy as np
import pytest
import torch
from tiny_clip_mode import unit

from modeling_clip_moe import routing_weights


def in_a_loop(metadata, centers, expert_of_center, num_experts, temperature, nearest_only, routing):
    """The weights, one number at a time."""
    length, totals = len(metadata), [0.0] * num_experts
    for embed in metadata:
        similarities = []
        for center in centers:
            squared = sum((a - b) ** 2 for a, b in zip(embed, center, strict=True))
            if routing == "paper":
                divisor = temperature / math.log(length) if length > 200 else temperature
                similarity = math.exp(-squared / divisor)
                if length < 10:
                    similarity *= math.exp(0.5 - math.sqrt(length))
            else:
                add = math.exp(0.5 - math.sqrt(length)) if length < 10 else 0.0
                multiply = 1 / temperature * math.log10(max(10, length - 200))
                similarity = math.exp((add - math.sqrt(squared)) * multiply)
            similarities.append(similarity)
        for number, similarity in enumerate(similarities):
            if not nearest_only or similarity == max(similarities):
                totals[expert_of_center[number]] += similarity
    powers = np.exp((np.array(totals) - max(totals)) / (8 if routing == "released" else 1))
    return powers / powers.sum()


@pytest.mark.parametrize("routing", ["paper", "released"])
@pytest.mark.parametrize("nearest_only", [True, False])
@pytest.mark.parametrize("length", [1, 3, 9, 10, 57, 200, 201, 210, 211, 400])
def test_weights_are_those_of_a_plain_loop(length, nearest_only, routing):
    centers, metadata = unit(20, 6), unit(length, 6, seed=length)
    expert_of_center = torch.randint(3, (20,), generator=torch.Generator().manual_seed(2))
    options = 3, 0.2, nearest_only, routing
    expected = in_a_loop(metadata.tolist(), centers.tolist(), expert_of_center.tolist(), *options)
    found = routing_weights(metadata, centers, expert_of_center, *options)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(set(expected.round(4))) > 1
