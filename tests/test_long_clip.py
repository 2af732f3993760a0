"""Long-CLIP's loss against PCA and numbers by hand, value and gradient; and its stage."""

import copy

import pytest
import torch
from sklearn.decomposition import PCA
from tiny_runs import DENSE, TUNED, losses, run_stages, weights
from torch.nn.functional import cross_entropy, normalize

from training.stages.long_clip import TrainLongCLIPStage, primary_components

PAIRS, WIDTH, COMPONENTS = 8, 6, 2
SETTINGS = {"name": "x", "stage": "x", "model": "x", "data": {"source": "x"}, "max_steps": 1, "learning_rate": 1.0}
STAGE = TrainLongCLIPStage(
    **SETTINGS, global_batch_size=PAIRS, num_components=COMPONENTS, caption_weights=[0.3, 0.7], label_smoothing=0.1
)
SYMBOLS = {"source": "symbols", "num_samples": 24, "captions": "detailed"}
CAPTIONS = {
    "name": "captions",
    "stage": "captions",
    "model": "dense",
    "data": SYMBOLS,
    "captions": [{"policy": "full", "column": "caption"}, {"policy": "first_sentence", "column": "caption"}],
}
LONG = TUNED | {
    "stage": "train_long_clip",
    "data": {"source": "captions", "in_memory": True},
    "global_batch_size": 8,
    "max_steps": 4,
    "num_components": 3,
    "logging_steps": 1,
}


def features():
    """Embeddings of images, of their long and of their short captions."""
    generator = torch.Generator().manual_seed(0)
    images, long, short = (torch.randn(PAIRS, WIDTH, generator=generator) for _ in range(3))
    return images * torch.arange(1, WIDTH + 1), long, short


def two_towers():
    torch.manual_seed(0)
    return torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)])


def loss_of(towers, share=slice(None)):
    """The stage's loss of a part of the batch."""
    images, long, short = (tensor[share] for tensor in features())
    texts = torch.stack([long, short], dim=1).flatten(0, 1)
    embeds = normalize(towers[0](images), dim=-1), normalize(towers[1](texts), dim=-1)
    return STAGE.contrastive_loss(*embeds, torch.tensor([5.0]), torch.ones(len(images), 2).bool())


def plain_loss(towers):
    """Long with images, short with what sklearn's directions leave of them, which autograd gets by an SVD."""
    images, long, short = features()
    images, long, short = (
        normalize(tower(x), dim=-1) for tower, x in ((towers[0], images), (towers[1], long), (towers[1], short))
    )
    mean = images.mean(dim=0)
    left, sizes, right = torch.linalg.svd(images - mean, full_matrices=False)
    primary = left[:, :COMPONENTS] * sizes[:COMPONENTS] @ right[:COMPONENTS] + mean
    pca = PCA(COMPONENTS).fit(images.detach().numpy())
    reconstructed = pca.inverse_transform(pca.transform(images.detach().numpy()))
    torch.testing.assert_close(primary.detach(), torch.from_numpy(reconstructed), atol=1e-5, rtol=1e-4)
    total = 0.0
    for weight, image_side, text_side in ((0.3, images, long), (0.7, primary, short)):
        logits, targets = 5.0 * image_side @ text_side.T, torch.arange(PAIRS)
        for rows in (logits, logits.T):
            total = total + weight * cross_entropy(rows, targets, label_smoothing=0.1) / 2
    return total


def gradients(towers):
    return [parameter.grad.clone() for parameter in towers.parameters()]


def test_gradient_where_eigenvalues_are_equal():
    """Those within the chosen components, and those within the others: an SVD's gradient is not finite there."""
    images = torch.tensor([[3.0, 0, 0, 0], [0, 3, 0, 0], [-3, 0, 0, 0], [0, -3, 0, 0]]).requires_grad_()
    found = primary_components(images, 2)
    torch.testing.assert_close(found, images)
    (found * torch.arange(4.0)[:, None]).sum().backward()
    assert images.grad.isfinite().all() and images.grad.abs().max() > 0


def test_the_loss_is_the_plain_one():
    results = []
    for function in (plain_loss, loss_of):
        towers = two_towers()
        loss = function(towers).squeeze()
        loss.backward()
        results.append((loss.detach(), *gradients(towers)))
    for plain, ours in zip(*results, strict=True):
        assert plain.abs().max() > 1e-3
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_the_stage(tmp_path):
    """All parameters train, and the loss of the same few pairs falls."""
    output = run_stages(tmp_path, [DENSE, CAPTIONS, LONG | {"max_steps": 40, "global_batch_size": 24}])
    before, after = weights(output / "dense"), weights(output / "tuned")
    assert not [name for name in before if torch.equal(before[name], after[name])]
    of_steps = losses(output / "tuned")
    assert of_steps[-1] < 0.9 * of_steps[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": SYMBOLS}, "tuned: image 0 of symbols has no long and short caption"),
        ({"num_components": 7}, "num_components 7 leave nothing out of a batch of 8"),
    ],
)
def test_mistakes(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, copy.deepcopy([DENSE, CAPTIONS, LONG | changes]))
