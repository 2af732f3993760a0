"""Experts that are copied: which ones, and their rows of the router."""

import pytest
import torch
from tiny_clip import moved, tiny_clip
from tiny_runs import DENSE, SPARSE, run_stages
from tiny_sources import saved_pairs

from clip_moe.conversion.checkpoints import load_sparse
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import shared_config, sparse_blocks, upcycle
from lab.methods.more_experts import add_experts, copied
from modeling_clip_moe import CLIPMoEModel

MORE = {"name": "more", "stage": "lab.methods.more_experts:MoreExpertsStage", "model": "sparse", "num_experts": 6}


def test_who_is_copied():
    assert copied(torch.ones(3), 6) == [0, 1, 2, 0, 1, 2]
    assert copied(torch.tensor([1.0, 6.0, 2.9]), 7) == [0, 1, 2, 1, 1, 2, 1]  # 6/1, 6/2, 2.9/1, 6/3


def test_copies_and_their_rows():
    sparse = moved(upcycle(tiny_clip(), PRESETS["clip_moe"]), (".experts.", ".router."), seed=1)
    importance = {name: torch.tensor([1.0, 9, 1, 1]) for name in sparse_blocks(sparse)}
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


def test_a_shared_encoder_has_the_same_copies_and_biases_keep_their_digits():
    shared = CLIPMoEModel(shared_config(tiny_clip().config)).eval()
    routing = {f"{tower}_config": {"use_expert_bias": True} for tower in ("text", "vision")}
    sparse = upcycle(shared, PRESETS["clip_moe"], routing=routing).bfloat16()
    for block in sparse_blocks(sparse).values():
        block.router.expert_bias.copy_(torch.tensor([0.1234567, 0.3, 0.0, -0.7]))
    more = add_experts(sparse, 6)
    blocks = [getattr(more, f"{tower}_model").encoder.layers[0].mlp for tower in ("text", "vision")]
    assert torch.equal(blocks[0].router.weight, blocks[1].router.weight) and more.dtype == torch.bfloat16
    assert blocks[0].router.expert_bias.tolist()[:4] == pytest.approx([0.1234567, 0.3, 0.0, -0.7], abs=1e-7)


def test_its_stage_copies_the_experts_that_the_loss_asks_for(tmp_path):
    """Those that no token meets have no gradient."""
    biased = {f"{tower}_config": {"use_expert_bias": True} for tower in ("text", "vision")}
    sparse = run_stages(tmp_path, [DENSE, SPARSE | biased]) / "sparse"
    model = load_sparse(sparse)
    for block in sparse_blocks(model).values():
        block.router.expert_bias.copy_(torch.tensor([5.0, 0.0, 0.0, 5.0]))
    model.save_pretrained(sparse)
    (sparse / "manifest.json").unlink()  # which says that it was not changed
    data = {"source": "symbols", "num_samples": 16}
    more = MORE | {"model": str(sparse), "num_experts": 8, "data": data, "batch_size": 8}
    folder = run_stages(tmp_path / "again", [more])
    for name, block in sparse_blocks(load_sparse(folder / "more")).items():
        before = sparse_blocks(model)[name].router.weight
        assert torch.equal(block.router.weight[:4], before)
        assert set(torch.cdist(block.router.weight[4:], before).argmin(dim=1).tolist()) == {0, 3}
        assert block.router.expert_bias[4:].tolist() == [5.0] * 4


def test_equal_captions_are_no_negatives(tmp_path):
    """Where all are equal there is nothing to learn."""
    data = saved_pairs(tmp_path / "pairs", ["a harbour"] * 8)
    more = MORE | {"data": data, "batch_size": 4}
    with pytest.raises(ValueError, match="more.data: the loss of its batches has no gradient"):
        run_stages(tmp_path, [DENSE, SPARSE, more])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 4}, "num_experts: 4 are no more than the 4 that there are"),
        ({"model": "dense"}, "it is dense"),
        ({"num_experts": 10**9}, "1000000000 experts a layer need .* choose a smaller num_experts"),
        ({"data": {"source": "symbols", "num_samples": 8}}, "batch_size: 64 of 8 pairs"),
    ],
)
def test_what_cannot_be(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, [DENSE, SPARSE, MORE | settings])
