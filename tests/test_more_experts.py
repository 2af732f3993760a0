"""conversion/more_experts.py: who is copied, and what the copies are."""

import pytest
import torch
from tiny_clip import moved, tiny_clip
from tiny_runs import DENSE, SPARSE, run_stages

from conversion.checkpoints import load_sparse
from conversion.more_experts import add_experts, copied
from conversion.presets import PRESETS
from conversion.upcycle import upcycle


def test_who_is_copied():
    assert copied(torch.ones(3), 6) == [0, 1, 2, 0, 1, 2]
    assert copied(torch.tensor([1.0, 6.0, 2.9]), 7) == [0, 1, 2, 1, 1, 2, 1]  # 6/1, 6/2, 2.9/1, 6/3


def test_copies_and_their_rows():
    sparse = moved(upcycle(tiny_clip(), PRESETS["clip_moe"]), (".experts.", ".router."), seed=1)
    importance = {(t, n): torch.tensor([1.0, 9, 1, 1]) for t in ("text", "vision") for n in range(4)}
    more = add_experts(sparse, 6, importance)
    assert more.config.text_config.num_experts == 6 and sparse.config.text_config.num_experts == 4
    before, after = sparse.vision_model.encoder.layers[2].mlp, more.vision_model.encoder.layers[2].mlp
    for name, tensor in before.experts.named_parameters():
        assert torch.equal(after.experts.get_parameter(name), tensor[[0, 1, 2, 3, 1, 1]])
    rows, std = after.router.weight, before.router.weight.std()
    assert torch.equal(rows[:4], before.router.weight)
    distance = (rows[4:] - rows[1]).std() / std
    assert 0.005 < distance < 0.02 and not torch.equal(rows[4], rows[5])
    assert not torch.equal(
        add_experts(sparse, 6, importance, seed=1).vision_model.encoder.layers[2].mlp.router.weight, rows
    )


def test_its_stage_copies_what_the_loss_asks_for(tmp_path):
    data = {"source": "symbols", "num_samples": 16}
    more = {"name": "more", "stage": "add_experts", "model": "sparse", "num_experts": 6, "data": data, "batch_size": 8}
    folder = run_stages(tmp_path, [DENSE, SPARSE, more])
    sparse, more = load_sparse(folder / "sparse"), load_sparse(folder / "more")
    for tower in ("text", "vision"):
        rows = [getattr(model, f"{tower}_model").encoder.layers[1].mlp.router.weight for model in (sparse, more)]
        nearest = torch.cdist(rows[1][4:], rows[0]).argmin(dim=1)
        assert torch.equal(rows[1][:4], rows[0]) and len(nearest) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 4}, "num_experts: 4 are no more than the 4 that there are"),
        ({"num_experts": 6, "model": "dense"}, "it is dense"),
        ({"num_experts": 6, "data": {"source": "symbols", "num_samples": 8}}, "batch_size: 64 of 8 pairs"),
    ],
)
def test_what_cannot_be(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, [DENSE, SPARSE, {"name": "more", "stage": "add_experts", "model": "sparse"} | settings])
