"""Long-CLIP's loss against PCA and numbers by hand, value and gradient; and its stage."""

from functools import partial

import pytest
import torch
from sklearn.decomposition import PCA
from test_losses import plain_contrastive_loss
from tiny_runs import DENSE, TUNED, losses, run_stages, weights
from torch.nn.functional import normalize

from clip_moe.training.losses import Pairing
from lab.methods.long_clip import TrainLongCLIPStage, primary_components

PAIRS, WIDTH, COMPONENTS = 8, 6, 2
SETTINGS = {"name": "x", "stage": "x", "model": "x", "data": {"source": "x"}, "max_steps": 1, "learning_rate": 1.0}
STAGE = TrainLongCLIPStage(
    **SETTINGS, global_batch_size=PAIRS, num_components=COMPONENTS, caption_weights=[0.3, 0.7], label_smoothing=0.1
)
SYMBOLS = {"source": "symbols", "num_samples": 24, "captions": "detailed"}
POLICIES = [{"policy": policy, "column": "caption"} for policy in ("full", "first_sentence")]
CAPTIONS = {"name": "captions", "stage": "captions", "model": "dense", "data": SYMBOLS, "captions": POLICIES}
LONG = TUNED | {
    "stage": "lab.methods.long_clip:TrainLongCLIPStage",
    "data": {"source": "captions", "in_memory": True},
    "num_components": 3,
}
LONG |= {"global_batch_size": 8, "max_steps": 4, "logging_steps": 1}


def loss_of(towers, images, long, short, keys):
    """The stage's own."""
    texts = torch.stack([long, short], dim=1).flatten(0, 1)
    embeds = normalize(towers[0](images), dim=-1), normalize(towers[1](texts), dim=-1)
    pairing = Pairing(torch.ones(PAIRS, 2).bool(), torch.arange(PAIRS), keys.flatten())
    return STAGE.contrastive_loss(*embeds, torch.tensor([5.0]), pairing).squeeze()


def plain_loss(towers, images, long, short, keys):
    """Long with images, short with what sklearn's directions leave of them, which autograd gets by an SVD."""
    sides = (towers[0], images), (towers[1], long), (towers[1], short)
    images, long, short = (normalize(tower(features), dim=-1) for tower, features in sides)
    mean = images.mean(dim=0)
    left, sizes, right = torch.linalg.svd(images - mean, full_matrices=False)
    primary = left[:, :COMPONENTS] * sizes[:COMPONENTS] @ right[:COMPONENTS] + mean
    pca = PCA(COMPONENTS).fit(images.detach().numpy())
    reconstructed = pca.inverse_transform(pca.transform(images.detach().numpy()))
    torch.testing.assert_close(primary.detach(), torch.from_numpy(reconstructed), atol=1e-5, rtol=1e-4)
    total = 0.0
    for place, (weight, image_side, text_side) in enumerate(((0.3, images, long), (0.7, primary, short))):
        are_equal = partial(lambda place, i, j: keys[i, place] == keys[j, place], place)
        total = total + weight * plain_contrastive_loss(image_side, text_side, 5.0, 0.1, are_equal)
    return total


@pytest.mark.parametrize("equal", [(), ([0, 1], 0), ([2, 3], 1)], ids=["different", "long", "short"])
def test_the_loss_is_the_plain_one(equal):
    """Equal texts are positives among those of their place."""
    images, long, short = torch.randn(3, PAIRS, WIDTH)
    images, keys = images * torch.arange(1, WIDTH + 1), torch.arange(2 * PAIRS).view(PAIRS, 2)
    if equal:
        keys[equal] = -1
    towers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)])
    losses_of = [function(towers, images, long, short, keys) for function in (loss_of, plain_loss)]
    torch.testing.assert_close(*losses_of, atol=1e-5, rtol=1e-4)
    ours, plain = (torch.autograd.grad(loss, [*towers.parameters()]) for loss in losses_of)
    assert min(gradient.abs().max() for gradient in plain) > 1e-3
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_gradient_where_eigenvalues_are_equal():
    """Those within the chosen components, and those within the others: an SVD's gradient is not finite there."""
    images = torch.tensor([[3.0, 0, 0, 0], [0, 3, 0, 0], [-3, 0, 0, 0], [0, -3, 0, 0]]).requires_grad_()
    found = primary_components(images, 2)
    torch.testing.assert_close(found, images)
    (found * torch.arange(4.0)[:, None]).sum().backward()
    assert images.grad.isfinite().all() and images.grad.abs().max() > 0


def test_the_stage(tmp_path):
    """All parameters train, and the loss of the same few pairs falls."""
    output = run_stages(tmp_path, [DENSE, CAPTIONS, LONG | {"max_steps": 40, "global_batch_size": 24}])
    before, after = weights(output / "dense"), weights(output / "tuned")
    assert not [name for name in before if torch.equal(before[name], after[name])]
    step_losses = losses(output / "tuned")
    assert step_losses[-1] < 0.9 * step_losses[0]


def test_mistakes(tmp_path):
    for changes, message in (
        ({"data": SYMBOLS}, "tuned: image 0 of symbols has no long and short caption"),
        ({"num_components": 7}, "num_components 7 leave nothing out of a batch of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            run_stages(tmp_path, [DENSE, CAPTIONS, LONG | changes])
