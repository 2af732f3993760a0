"""The weights of data experts: the printed equations and the authors' code, each against loops over single numbers and
against figures that were worked out by hand."""

import math

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tiny_clip_mode import mixture, unit

from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel, routing_weights
from modeling_clip_moe.configuration_clip_mode import DEFAULT_ROUTING

# Two experts, each with one center, a right angle apart
CENTERS, EXPERT_OF_CENTER = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
# At a squared distance of 0.4 from the first center, hence a distance of 0.632456
NEAR = [0.8, 0.6]
LENGTHS = [3, 10, 57, 201, 400]
# length -> the first expert's sum of A, and from it its weight: the second expert's sum is 0.
#   paper      A = exp(-0.4 / 0.2) = 0.135335; for 3 times exp(0.5 - sqrt 3) = 0.291694; above 200
#              exp(-2 log L) = 1 / L^2
#   released   A = exp((a - 0.632456) * 5 * log10(max(10, L - 200))), for 3 with a = 0.291694, else a = 0;
#              the factor is 5 up to 210, and 5 * 2.301030 = 11.505150 for 400; the sum is divided by 8
BY_HAND = {
    "paper": {
        3: (0.118429, 0.529573),
        10: (1.353353, 0.794677),
        57: (7.714111, 0.999554),
        201: (0.004975, 0.501244),
        400: (0.0025, 0.500625),
    },
    "released": {
        3: (0.545967, 0.517055),
        10: (0.423292, 0.513225),
        57: (2.412766, 0.574833),
        201: (8.508174, 0.743363),
        400: (0.276642, 0.508644),
    },
}


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
@pytest.mark.parametrize("length", [1, 9, 200, 210, 211, *LENGTHS])
def test_weights_are_those_of_a_plain_loop(length, nearest_only, routing):
    centers, metadata = unit(20, 6), unit(length, 6, seed=length)
    expert_of_center = torch.randint(3, (20,), generator=torch.Generator().manual_seed(2))
    options = 3, 0.2, nearest_only, routing
    expected = in_a_loop(metadata.tolist(), centers.tolist(), expert_of_center.tolist(), *options)
    found = routing_weights(metadata, centers, expert_of_center, *options)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(set(expected.round(4))) > 1


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("routing", ["paper", "released"])
def test_weights_are_those_worked_out_by_hand(length, routing):
    total, weight = BY_HAND[routing][length]
    found = routing_weights(torch.tensor([NEAR] * length), CENTERS, EXPERT_OF_CENTER, 2, routing=routing)
    assert found.tolist() == pytest.approx([weight, 1 - weight], abs=1e-6)
    difference = math.log(found[0] / found[1]) * (8 if routing == "released" else 1)
    assert difference == pytest.approx(total, abs=2e-5)


def test_few_metadata_soften_the_papers_weights_and_sharpen_the_released_ones():
    """The same term: a factor below 1 there, an addition within the exponent here."""
    metadata = torch.tensor([NEAR] * 9)
    for routing, without in (("paper", 9 * math.exp(-2)), ("released", 9 * math.exp(-5 * math.sqrt(0.4)))):
        first, second = routing_weights(metadata, CENTERS, EXPERT_OF_CENTER, 2, routing=routing).tolist()
        total = math.log(first / second) * (8 if routing == "released" else 1)
        assert (total > without) == (routing == "released") and abs(total - without) > 0.05


def test_released_routing_is_milder_for_sixteen_names():
    """All of one expert, at a distance of 0.405 from its center: 16 exp(-5 * 0.164) = 7.05 against
    16 exp(-5 * 0.405) / 8 = 0.264."""
    metadata = torch.tensor([[0.918, 0.39658]] * 16)
    paper, released = (
        routing_weights(metadata, CENTERS, EXPERT_OF_CENTER, 2, routing=routing) for routing in ("paper", "released")
    )
    assert paper.tolist() == pytest.approx([0.999, 0.001], abs=5e-4)
    assert released.tolist() == pytest.approx([0.57, 0.43], abs=5e-3)


def test_the_routing_of_a_model_is_kept_and_can_be_changed(tmp_path):
    metadata, model = unit(12, 6, seed=5), mixture(2)
    assert model.config.routing == DEFAULT_ROUTING
    model.config.routing = "released"
    model.save_pretrained(tmp_path)
    assert CLIPMoDEConfig.from_pretrained(tmp_path).routing == "released"
    weights = {}
    for routing in ("paper", "released"):
        changed = CLIPMoDEModel.from_pretrained(tmp_path, routing=routing)
        options = changed.centers, changed.expert_of_center, 2, 0.2, True, routing
        weights[routing] = changed.route(metadata)
        torch.testing.assert_close(weights[routing], routing_weights(metadata, *options))
    assert not torch.allclose(*weights.values(), atol=1e-3)
    kept = CLIPMoDEModel.from_pretrained(tmp_path)
    torch.testing.assert_close(kept.set_task(metadata), weights["released"])


def test_an_unknown_routing_is_refused():
    with pytest.raises(ValueError, match="routing must be paper or released, got 'printed'"):
        routing_weights(unit(3, 2), CENTERS, EXPERT_OF_CENTER, 2, routing="printed")
    with pytest.raises(StrictDataclassError, match="routing"):
        CLIPMoDEConfig(routing="printed")
