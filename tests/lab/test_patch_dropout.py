"""Patches that are left out while a model trains."""

import pytest
import torch
from tiny_families import tiny_dense

from clip_moe.conversion.checkpoints import load_clip
from lab.methods.patch_dropout import PatchDropoutStage, drop_patches
from modeling_clip_moe.families import FAMILIES


@pytest.mark.parametrize("family", [one for one in FAMILIES if not one.naflex], ids=lambda one: one.name)
def test_patch_dropout_leaves_patches_out(family):
    """The rest are whole patches in arbitrary order, with the gradient that they have alone."""
    model = tiny_dense(family).train()
    vision, size = model.vision_model, model.config.vision_config.image_size
    pixels = torch.randn(8, 3, size, size)
    whole = vision.embeddings(pixels)
    first = whole.shape[1] - (size // vision.config.patch_size) ** 2
    drop_patches(model, 0.3)
    entered = []
    vision.encoder.register_forward_pre_hook(
        lambda module, args, kwargs: entered.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    rows = vision.embeddings(pixels)
    number = rows.shape[1] - first
    assert number == 3 == round((whole.shape[1] - first) * 0.7) and torch.equal(rows[:, :first], whole[:, :first])
    same = (rows[:, first:, None] == whole[:, None, first:]).all(dim=-1)
    assert (same.sum(dim=2) == 1).all() and (same.sum(dim=1) <= 1).all()
    places = same.long().argmax(dim=2)
    assert len(places.unique(dim=0)) > 1
    weight = vision.embeddings.patch_embedding.weight
    kept = torch.stack([image[first:][image_places] for image, image_places in zip(whole, places, strict=True)])
    gradients = [torch.autograd.grad(patches.square().sum(), weight)[0] for patches in (rows[:, first:], kept)]
    torch.testing.assert_close(gradients[0], gradients[1])
    vision(pixels)
    assert entered[0].shape[1] == first + number
    model.eval()
    assert torch.equal(vision.embeddings(pixels), whole)


def test_a_share_that_leaves_no_patch_is_refused():
    model = load_clip("training/symbol_clip")  # 16 patches
    for share, problems in ((0.95, []), (0.99, ["patch_dropout: it leaves none of 16 patches: take at most 0.938"])):
        settings = {"name": "x", "stage": "x", "model": "x", "data": {"source": "x"}, "max_steps": 1}
        stage = PatchDropoutStage(**settings, learning_rate=1.0, global_batch_size=4, patch_dropout=share)
        assert list(stage.problems(model, 4)) == problems
