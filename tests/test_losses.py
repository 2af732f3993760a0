"""Losses against obvious loops, value and gradient, in one process and in several."""

import operator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from several_processes import run_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clip_moe.training.losses import Pairing, all_reduce_sum, contrastive_loss, multi_positive_loss, router_losses
from modeling_clip_moe import CLIPMoEConfig, load_balancing_loss, router_z_loss

BATCH, WIDTH, EXPERTS, TOP_K = 6, 5, 4, 2


def plain_contrastive_loss(images, texts, scale, label_smoothing=0.0, is_right=operator.eq):
    """CLIP's loss, one pair at a time.

    Args:
        is_right: whether an image and a text of these numbers belong together.
    """
    total = 0.0
    for rows, columns, right in ((images, texts, is_right), (texts, images, lambda i, j: is_right(j, i))):
        for i in range(len(rows)):
            logits = torch.stack([scale * rows[i] @ columns[j] for j in range(len(columns))])
            smooth = (logits - logits.exp().sum().log()).mean()
            right_mean = mean_of_right(logits, [right(i, j) for j in range(len(columns))])
            total = total + (1 - label_smoothing) * right_mean - label_smoothing * smooth
    return total / (2 * len(images))


def mean_of_right(logits, right):
    """The mean of the cross entropies of each right column, among all that are wrong and itself."""
    right = torch.tensor(right)
    losses_of_right = [(logit.exp() + logits[~right].exp().sum()).log() - logit for logit in logits[right]]
    return torch.stack(losses_of_right).mean()


def plain_sigmoid_loss(images, texts, scale, bias, is_right=operator.eq):
    """SigLIP's loss, one image and one text at a time (arXiv:2303.15343, section 3.2)."""
    total = 0.0
    for i in range(len(images)):
        for j in range(len(texts)):
            logit = scale * images[i] @ texts[j] + bias
            total = total + (1 + (-logit if is_right(i, j) else logit).exp()).log()
    return total / len(images)


# Six pairs with duplicates: 0 and 1 have the same text, 1 and 2 the same image, so that by pair 1 text 0 is right for
# image 2; 4 is 3 once more
IMAGE_KEYS, TEXT_KEYS = torch.tensor([10, 20, 20, 30, 30, 50]), torch.tensor([1, 1, 2, 3, 3, 4])


def is_known(image, text):
    """Whether some pair has that image and that text."""
    pairs = set(zip(IMAGE_KEYS.tolist(), TEXT_KEYS.tolist(), strict=True))
    return (IMAGE_KEYS[image].item(), TEXT_KEYS[text].item()) in pairs


class Model(nn.Module):
    """Two linear towers, a router and the temperature: enough to see every gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor([1.5]))
        self.logit_bias = nn.Parameter(torch.tensor([-1.0]))
        self.weights = nn.Parameter(torch.tensor([0.1, 0.6, 0.3]))  # of three captions

    def forward(self, function):
        return function(self)

    def embeds(self, images, texts):
        return nn.functional.normalize(self.image(images), dim=-1), nn.functional.normalize(self.text(texts), dim=-1)


def data():
    generator = torch.Generator().manual_seed(1)
    images, texts = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    tokens = torch.randn(BATCH, 7, WIDTH, generator=generator)
    mask = torch.arange(7) < torch.tensor([7, 3, 5, 1, 2, 6])[:, None]
    return images, texts, tokens, mask.long()


def with_routers(model, share=slice(None)):
    """This process's part of the contrastive and of the router losses."""
    tokens, mask = (tensor[share] for tensor in data()[2:])
    logits = (model.router(tokens), model.router(tokens + 1))
    balance = load_balancing_loss(logits, TOP_K, mask, reduce=all_reduce_sum)
    return contrastive(model, share) + balance + 0.1 * router_z_loss(logits, mask, reduce=all_reduce_sum)


def contrastive(model, share=slice(None), chunk_size=None, smoothing=0.0, with_bias=False, with_keys=False):
    embeds = model.embeds(*(tensor[share] for tensor in data()[:2]))
    pairing = Pairing(None, IMAGE_KEYS[share], TEXT_KEYS[share]) if with_keys else None
    bias = model.logit_bias if with_bias else None
    return contrastive_loss(*embeds, model.logit_scale.exp(), chunk_size, smoothing, bias, pairing)


def plain_multi_positive_loss(images, texts, scale, weights, mask, is_right=lambda i, j, c: i == j):
    """CLIP-FMoE eq. 4, one caption and one pair at a time; texts (B, L, D), those without mask are not there.

    Args:
        is_right: whether image i and caption c of image j belong together.
    """
    total = 0.0
    for i in range(len(images)):
        there = [c for c in range(texts.shape[1]) if mask[i, c]]
        whole = sum(weights[c] for c in there)
        for c in there:
            others = [j for j in range(len(images)) if mask[j, c]]
            to_texts = torch.stack([scale * images[i] @ texts[j, c] for j in others])
            to_images = torch.stack([scale * texts[i, c] @ images[j] for j in range(len(images))])
            loss = mean_of_right(to_texts, [is_right(i, j, c) for j in others])
            loss = loss + mean_of_right(to_images, [is_right(j, i, c) for j in range(len(images))])
            total = total + weights[c] / whole * loss
    return total / (2 * len(images))


CAPTION_MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
# Captions of `IMAGE_KEYS`' images: 0 and 3 have one at the same place, 4 and 5 at different ones
CAPTION_KEYS = torch.tensor([[1, 2, 3], [4, 0, 5], [0, 6, 0], [1, 0, 8], [0, 9, 10], [11, 12, 9]])


def is_known_caption(image, other, caption):
    """Whether some pair has that image and that caption of another one."""
    pairs = {(IMAGE_KEYS[i].item(), CAPTION_KEYS[i, c].item()) for i, c in CAPTION_MASK.nonzero().tolist()}
    return (IMAGE_KEYS[image].item(), CAPTION_KEYS[other, caption].item()) in pairs


def several_captions(model, share=slice(None)):
    """Image embeddings (B, D) and those of three captions each (B, 3, D)."""
    images, texts, *_ = data()
    captions = torch.stack([texts, texts.roll(1, -1), 0.5 * texts + texts.roll(2, -1)], dim=1)
    image_embeds, text_embeds = model.embeds(images[share], captions[share].flatten(0, 1))
    return image_embeds, text_embeds.unflatten(0, (-1, 3))


def multi_positive(
    model, share=slice(None), chunk_size=None, weights=None, mask=CAPTION_MASK, with_bias=False, with_keys=False
):
    keys = (IMAGE_KEYS[share], CAPTION_KEYS[share][mask[share]]) if with_keys else ()
    settings = model.weights if weights is None else weights, Pairing(mask[share], *keys), chunk_size
    bias = model.logit_bias if with_bias else None
    return multi_positive_loss(*several_captions(model, share), model.logit_scale.exp(), *settings, logit_bias=bias)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def plain(loss, *settings, with_bias=False):
    def of(model):
        bias = [model.logit_bias] if with_bias else []
        return loss(*model.embeds(*data()[:2]), model.logit_scale.exp(), *bias, *settings)

    return of


def plain_captions(*settings):
    def of(model):
        inputs = *several_captions(model), model.logit_scale.exp(), model.weights, CAPTION_MASK
        return plain_multi_positive_loss(*inputs, *settings)

    return of


sigmoid, duplicates = partial(contrastive, with_bias=True), partial(contrastive, with_keys=True)
plain_sigmoid = plain(plain_sigmoid_loss, with_bias=True)
plain_of_duplicates = plain(plain_sigmoid_loss, is_known, with_bias=True)
# Of three captions, the first alone has a weight, or is there
ONE_OF_SEVERAL = {"weights": torch.tensor([1.0, 0, 0]), "mask": torch.ones_like(CAPTION_MASK), "with_bias": True}
ALONE = {"weights": torch.ones(3), "mask": torch.tensor([[True, False, False]] * BATCH), "with_bias": True}
# A function of a model and of a process's share of the batch, and its obvious loop
FORMULAS = {
    "contrastive": (contrastive, plain(plain_contrastive_loss)),
    "smoothed": (partial(contrastive, smoothing=0.1), plain(plain_contrastive_loss, 0.1)),
    "duplicates": (partial(duplicates, smoothing=0.1), plain(plain_contrastive_loss, 0.1, is_known)),
    "sigmoid": (sigmoid, plain_sigmoid),
    "sigmoid of duplicates": (partial(duplicates, with_bias=True), plain_of_duplicates),
    "sigmoid, one of several": (partial(multi_positive, **ONE_OF_SEVERAL), plain_sigmoid),
    "sigmoid, one alone": (partial(multi_positive, **ALONE), plain_sigmoid),
    "captions": (multi_positive, plain_captions()),
    "captions of duplicates": (partial(multi_positive, with_keys=True), plain_captions(is_known_caption)),
}
ON_PROCESSES = {name: ours for name, (ours, _) in FORMULAS.items()}
ON_PROCESSES |= {f"{name} in chunks": partial(ours, chunk_size=2) for name, ours in ON_PROCESSES.items()}
ON_PROCESSES["routers"] = with_routers


def worker(folder):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results, share = {}, slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    for name, function in ON_PROCESSES.items():
        model = DistributedDataParallel(Model(), find_unused_parameters=True)
        loss = model(partial(function, share=share))
        loss.backward()
        results[name] = loss.detach(), gradients(model.module)
    torch.save(results, folder / f"{rank}.pt")
    # A DDP module that outlives the group destroys it while it holds the GIL, for which the group's thread may wait.
    del model, loss
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    run_processes(2, worker, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_same(ours, plain):
    """Two functions of a model have the same value and the same gradients."""
    results = []
    for function in (plain, ours):
        model = Model()
        loss = function(model).squeeze()
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    (_, expected), (_, found) = results
    assert expected.keys() == found.keys() and all(gradient.abs().max() > 0 for gradient in expected.values())
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 100])
@pytest.mark.parametrize("name", FORMULAS)
def test_losses_are_the_plain_ones(name, chunk_size):
    ours, expected = FORMULAS[name]
    assert_same(partial(ours, chunk_size=chunk_size), expected)


def test_equal_texts_and_images_are_right():
    known = [[is_known(i, j) for j in range(BATCH)] for i in range(BATCH)]
    assert sum(map(sum, known)) == 13
    assert Pairing(None, IMAGE_KEYS, TEXT_KEYS).positive_texts(torch.empty(BATCH, WIDTH)).tolist() == known


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_PROCESSES)
def test_several_processes_equal_one(processes, name):
    model = Model()
    loss = ON_PROCESSES[name](model)
    loss.backward()
    parts, grads = zip(*(results[name] for results in processes), strict=True)
    torch.testing.assert_close(sum(parts) / len(parts), loss.detach(), atol=1e-6, rtol=1e-6)
    assert len(set(map(float, parts))) == len(parts)  # each has its own part
    for parameter, gradient in gradients(model).items():
        assert gradient.abs().max() > 1e-4, parameter
        torch.testing.assert_close(grads[0][parameter], gradient, atol=1e-6, rtol=1e-4, msg=parameter)
        assert all(torch.equal(process_grads[parameter], grads[0][parameter]) for process_grads in grads)


def routed(text, vision, top_k=1, **changes):
    """A configuration and outputs with these router logits of layers, and a batch without padding."""
    towers, outputs = {}, SimpleNamespace()
    for tower, logits in (("text", text), ("vision", vision)):
        ids = SimpleNamespace(expert_ids=tuple(layer_logits.topk(top_k).indices for layer_logits in logits))
        vars(outputs).update({f"{tower}_router_logits": logits, f"{tower}_model_output": ids})
        settings = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": len(logits)}
        settings |= {"moe_layers": list(range(len(logits))), "num_experts": EXPERTS, "num_experts_per_tok": top_k}
        towers[f"{tower}_config"] = settings
    config = CLIPMoEConfig(**towers, **{"router_aux_loss_coef": 1.0} | changes)
    return config, outputs, {"attention_mask": torch.ones(text[0].shape[:2])}


@pytest.mark.parametrize("balance_top_k", [None, 1])
@pytest.mark.parametrize("balance_mean", ["tower", "layer", "token", "tower_token", "shared"])
def test_router_losses_by_hand(balance_top_k, balance_mean):
    """Three sparse text layers and one sparse vision layer, or three of one encoder, token by token; texts and images
    have padding."""
    *_, mask = data()
    patches = torch.arange(4) < torch.arange(1, BATCH + 1)[:, None]
    batch = {"attention_mask": mask, "pixel_attention_mask": patches}
    generator = torch.Generator().manual_seed(2)
    text = tuple(torch.randn(BATCH, 7, EXPERTS, generator=generator) for _ in range(3))
    layers = 3 if balance_mean == "shared" else 1
    vision = tuple(torch.randn(BATCH, 4, EXPERTS, generator=generator) for _ in range(layers))
    coefficients = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.25}
    config, outputs, _ = routed(text, vision, TOP_K, **coefficients)

    def balance_of(tokens):
        load, probability, z = torch.zeros(EXPERTS), torch.zeros(EXPERTS), 0.0
        for token in tokens:
            for expert in token.topk(balance_top_k or TOP_K).indices:
                load[expert] += 1 / (len(tokens) * (balance_top_k or TOP_K))
            probability += token.softmax(-1) / len(tokens)
            z += token.logsumexp(-1) ** 2 / len(tokens)
        return 0.5 * EXPERTS * (load * probability).sum() + 0.25 * z

    text_logits = [logits[mask.bool()] for logits in text]
    vision_logits = [logits[patches] for logits in vision]
    expected = {
        "tower": sum(map(balance_of, text_logits)) / 3 + balance_of(vision_logits[0]),
        "layer": sum(map(balance_of, text_logits + vision_logits)) / 4,
        "token": balance_of(torch.cat(text_logits + vision_logits)),
        "tower_token": balance_of(torch.cat(text_logits)) + balance_of(torch.cat(vision_logits)),
        "shared": sum(balance_of(torch.cat(both)) for both in zip(text_logits, vision_logits, strict=False)) / 3,
    }[balance_mean]
    loss, metrics = router_losses(config, outputs, batch, all_reduce_sum, balance_top_k, balance_mean)
    torch.testing.assert_close(loss, expected)
    if balance_mean == "tower":
        half, _ = router_losses(config, outputs, batch, all_reduce_sum, balance_top_k, balance_mean, 0.5)
        torch.testing.assert_close(half, sum(map(balance_of, text_logits)) / 3 / 2 + balance_of(*vision_logits))
    assert metrics["dropped_tokens"] == 0

    def violation(tokens):
        loads = tokens.topk(TOP_K).indices.flatten().bincount(minlength=EXPERTS)
        return loads.max() / loads.float().mean() - 1

    by_hand = (
        sum(sum(map(violation, tower_logits)) / len(tower_logits) for tower_logits in (text_logits, vision_logits)) / 2
    )
    torch.testing.assert_close(metrics["max_violation"], by_hand)


def test_float32_under_autocast():
    images, texts = Model().embeds(*data()[:2])
    with torch.autocast("cpu", torch.bfloat16):
        loss = contrastive_loss(images, texts, torch.tensor([50.0]))
    assert torch.equal(loss, contrastive_loss(images, texts, torch.tensor([50.0])))
