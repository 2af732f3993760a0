"""Gradient caching: batches whose activations do not fit into memory (GradCache, arXiv:2101.06983, section 3.2).

The embeddings of all parts are computed without a graph, then the loss's gradient by them; then each part once more, to
carry it on into the weights.
"""

import itertools
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from clip_moe.training.losses import Pairing, Reduce, all_reduce_sum
from clip_moe.training.training_state import set_torch_states, torch_states

TEXTS = ("input_ids", "attention_mask")  # (texts, S)
TEXT_KEYS = (*TEXTS, "text_keys", "kept_texts")


def split_batch(batch: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """A batch of a `PairLoader` in parts of `size` images, each with its captions, padded to their longest."""
    images = next(value for name, value in batch.items() if name not in TEXT_KEYS)
    captions = batch.get("caption_mask", torch.ones(len(images), 1))
    texts = [int(part.sum()) for part in captions.split(size)]  # of each part
    split = {name: value.split(texts if name in TEXT_KEYS else size) for name, value in batch.items()}
    parts = [{name: values[number] for name, values in split.items()} for number in range(len(texts))]
    for part in parts:
        if "attention_mask" in part:  # without the columns at the end that are padding in all texts
            length = int(part["attention_mask"].any(dim=0).nonzero().max()) + 1
            part |= {name: part[name][:, :length] for name in TEXTS}
    return parts


def cached_gradient(
    accelerator: Accelerator,
    task: nn.Module,
    batch: dict[str, torch.Tensor],
    size: int,
    factor: float,
    synchronize: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Add the gradient of a batch's loss to that of the weights, computing `size` images at a time.

    Args:
        task: a `clip_moe.training.contrastive_task.ContrastiveTask`, as Accelerate prepared it.
        batch: this process's, on the CPU: parts are sent to the device as they are computed.
        factor: what the gradient is multiplied by.
        synchronize: whether the gradients are averaged over the processes at the end.

    Returns:
        The loss of the batch, and what is logged of it, as `ContrastiveTask.forward` returns them.
    """
    parts, totals = split_batch(batch, size), []

    def sent(number: int) -> dict[str, torch.Tensor]:
        return send_to_device(parts[number], accelerator.device, non_blocking=True)

    embeds, states, auxiliaries, logged = [], [], [], []
    for number in range(len(parts)):
        states.append(torch_states(accelerator.device))
        with torch.no_grad():
            embeds.append(task(sent(number), only_embed=True, reduce=sums_of_parts(totals)))
    loss, losses, gradients = _gradient_by_embeds(accelerator, task, batch, embeds)
    totals = [all_reduce_sum(total) for total in totals]
    after = torch_states(accelerator.device)
    for number, part_gradients in enumerate(gradients):
        set_torch_states(states[number], accelerator.device)
        last = accelerator.sync_gradients = synchronize and number == len(parts) - 1
        with nullcontext() if last else accelerator.no_sync(task):
            reduce = sums_of_parts(totals, accelerator.num_processes)
            surrogate, auxiliary, metrics = task(sent(number), gradients=part_gradients, reduce=reduce)
            accelerator.backward(surrogate * factor)
        auxiliaries.append(auxiliary)
        logged.append(metrics)
    set_torch_states(after, accelerator.device)
    auxiliaries = torch.stack(auxiliaries)
    if not torch.allclose(auxiliaries, auxiliaries[0], rtol=0, atol=0, equal_nan=True):
        raise ValueError(
            "mini_batch_size: the router loss of this stage differs between parts of a batch: make it a function of "
            "sums from `reduce`"
        )
    metrics = {name: torch.stack([values[name] for values in logged]).mean(dim=0) for name in metrics}
    loss = loss + auxiliaries[0]
    return loss, {**losses, **metrics, "total_loss": loss}


def sums_of_parts(totals: list[torch.Tensor], num_processes: int | None = None) -> Reduce:
    """The `reduce` of one part of a batch; all parts are computed twice, and ask for the same sums.

    Args:
        totals: the sums, to which the part adds what it is given.
        num_processes: the second time, when the totals are those of all parts and processes: they are returned, and
            their gradient goes into the part that asks, so the gradients of all parts add up to that of the batch.
    """
    numbers = itertools.count()

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        number = next(numbers)
        if num_processes is not None:
            # As many times as there are processes, over which the gradient is averaged
            return totals[number] + num_processes * (tensor - tensor.detach())
        if number == len(totals):
            totals.append(torch.zeros_like(tensor))
        totals[number] += tensor.detach()
        return tensor

    return reduce


def _gradient_by_embeds(
    accelerator: Accelerator, task: nn.Module, batch: dict[str, torch.Tensor], embeds: list[tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[tuple[torch.Tensor, ...]]]:
    """The loss of a batch's embeddings, what is logged of it, and of each part the gradients by its images', by its
    texts' embeddings, and by the scale and the loss's parameters, which all parts share."""
    images, texts = ([part_embeds[place] for part_embeds in embeds] for place in (0, 1))
    leaves = [torch.cat(images), torch.cat(texts), *(value.clone() for value in embeds[0][2:])]
    for leaf in leaves:
        leaf.requires_grad_()
    pairing = send_to_device(Pairing.take(dict(batch)), accelerator.device)
    plain_task = accelerator.unwrap_model(task)
    loss, losses = plain_task.loss(leaves, pairing)
    # A bias has no gradient where a model of the sigmoid loss has CLIP's
    by_images, by_texts, *by_shared = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    by_images, by_texts = by_images.split(list(map(len, images))), by_texts.split(list(map(len, texts)))
    by_shared = [gradient / len(embeds) for gradient in by_shared]
    return loss.detach(), losses, [(*by_part, *by_shared) for by_part in zip(by_images, by_texts, strict=True)]
