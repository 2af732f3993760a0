"""Whether experts do anything: the three measures by hand, and what cards take of them."""

import math

import pytest

from evaluation.expert_summary import summarize
from evaluation.intervals import LEVEL
from evaluation.task import Task
from records.result_schema import ExpertSummary, require_summary

NONE = {"load": lambda: None}
TASKS = {
    "photos": Task("retrieval", "photos", "40 photos", **NONE),
    "animals": Task("zero_shot", "animals", "10 photos", **NONE, metrics=["mean_per_class_recall"]),
}
ROUTED = {
    "photos": {
        "metrics": {"image_to_text_recall@1": 0.5, "text_to_image_recall@1": 0.4, "text_to_image_recall@5": 0.9},
        "num_samples": 40,
        "num_captions": 160,
    },
    "animals": {"metrics": {"mean_per_class_recall": 0.75}, "num_samples": 10},
}
MEAN = {
    "photos": {"metrics": {"image_to_text_recall@1": 0.2, "text_to_image_recall@1": 0.4}, "num_samples": 40},
    "animals": {"metrics": {"mean_per_class_recall": 0.8}, "num_samples": 10},
}


def cka(*pairs):
    """A matrix of three experts and of the routed model, which is like all, from the pairs 01, 02 and 12."""
    values = dict(zip([("0", "1"), ("0", "2"), ("1", "2")], pairs, strict=True))
    names = ["0", "1", "2", "routed"]

    def of(one, other):
        return 1.0 if one == other or "routed" in (one, other) else values[min(one, other), max(one, other)]

    title = {name: name if name == "routed" else f"expert {name}" for name in names}
    return {title[one]: {title[other]: of(one, other) for other in names} for one in names}


def test_summary_by_hand():
    entropy = {"text": {1: 0.5, 3: 1.5}, "vision": {3: 0.25}}
    agreement = {"images": cka(0.9, 0.6, 0.3), "texts": cka(0.6, 0.6, None)}
    found = summarize(TASKS, ROUTED, MEAN, entropy, agreement, 3)
    titles = ["photos: R@1 image→text", "photos: R@1 text→image", "animals: mean per class"]
    assert [score.title for score in found.collapse] == titles
    assert [(score.routed, score.mean) for score in found.collapse] == [(0.5, 0.2), (0.4, 0.4), (0.75, 0.8)]
    expected = [
        1.959964 * math.sqrt((one * (1 - one) + other * (1 - other)) / number)
        for one, other, number in ((0.5, 0.2, 40), (0.4, 0.4, 160))
    ]
    assert [score.error for score in found.collapse[:2]] == pytest.approx(expected, rel=1e-6)
    assert found.collapse[2].error is None  # a mean of means
    assert found.entropy.model_dump() == pytest.approx({"mean": 0.75, "lowest": 0.25, "highest": 1.5})
    assert found.most_entropy == math.log2(3)
    assert found.agreement.model_dump() == pytest.approx({"mean": 0.6, "lowest": 0.3, "highest": 0.9})
    assert [what for what, _ in found.rows[:3]] == [f"collapse test, {title}" for title in titles]
    assert [value for _, value in found.rows[:3]] == [
        "50.0% routed, 20.0% with the mean of the experts: -30.0 ± 19.8 points",
        "40.0% routed, 40.0% with the mean of the experts: +0.0 ± 10.7 points",
        "75.0% routed, 80.0% with the mean of the experts: +5.0 points",
    ]
    assert found.rows[3:] == [
        ("entropy of the routers", "0.75 of at most 1.58 bits (layers: 0.25 to 1.50)"),
        ("how alike the experts are", "CKA 0.600 (pairs: 0.300 to 0.900)"),
    ]
    assert f"{LEVEL:.0%} over test samples" in ExpertSummary.READING


def test_a_dense_tower_says_nothing_of_experts():
    agreement = {"images": cka(1.0, 1.0, 1.0), "texts": cka(0.2, 0.3, 0.4)}
    found = summarize(TASKS, ROUTED, MEAN, {"text": {1: 0.5}}, agreement, 3)
    assert found.agreement.model_dump() == pytest.approx({"mean": 0.3, "lowest": 0.2, "highest": 0.4})
    one = summarize(TASKS, ROUTED, MEAN, {"text": {1: 0.0}}, agreement, 1)
    assert one.agreement is None and [what for what, _ in one.rows][-1] == "entropy of the routers"


def test_what_is_no_summary_is_refused():
    good = summarize(TASKS, ROUTED, MEAN, {"vision": {0: 1}}, {"images": cka(0.2, 0.3, 0.4)}, 3).model_dump()
    assert require_summary(good, "experts.json").model_dump() == good
    for changes, message in (
        ({"entropy": {"mean": 1.0}}, "it lacks entropy.lowest, entropy.highest"),
        ({"collapse": []}, "collapse is .*at least 1 item"),
        ({"most_entropy": math.nan}, "most_entropy is nan"),
        ({"collapse": [good["collapse"][0] | {"mean": 1.5}]}, "collapse.0.mean is 1.5"),
    ):
        with pytest.raises(ValueError, match=f"the summary in experts.json is none of experts: {message}"):
            require_summary(good | changes, "experts.json")
    with pytest.raises(ValueError, match="it holds no JSON object"):
        require_summary([1], "experts.json")
