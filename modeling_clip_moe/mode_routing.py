"""The routing of MoDE: the weights that a task gives its data experts. Axes as in `modeling_clip_mode`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def routing_weights(
    metadata_embeds: Tensor,
    centers: Tensor,
    expert_of_center: Tensor,
    num_experts: int,
    temperature: float = 0.2,
    nearest_center_only: bool = True,
    routing: str = "released",
) -> Tensor:
    """
    How much each data expert counts for a task, with L pieces of metadata.

    `routing="paper"` (MoDE eq. 5 to 7, with the temperatures of appendix E): the similarity of metadata l and center s
    is A = exp(-|e_l - e_s|^2 / lambda), and an expert's weight the softmax of the sum of A over its centers and all
    metadata. With fewer than 10 pieces of metadata, A is multiplied by exp(0.5 - sqrt(L)), which makes weights more
    equal; with more than 200, lambda is divided by log(L), which makes them less so.

    `routing="released"` (the authors' code, facebookresearch/MetaCLIP, mode/post_report_ensemble.py):
    A = exp((a - |e_l - e_s|) * f) of the distance that is not squared, with f = log10(max(10, L - 200)) / lambda and
    a = exp(0.5 - sqrt(L)) below 10 pieces of metadata, else 0; the weights are the softmax of an eighth of the sums.
    The authors take for e_l the mean over the prompts of a class, of length 1 (mode/prep_feature.py). Their code routes
    classifications alone; tasks of other kinds are routed by the same formula here.

    Args:
        metadata_embeds: (..., L, d), the metadata of one task or of several: all class names of a classification
            (eq. 6), all captions of text retrieval (eq. 7), or each query of image retrieval by itself (queries, 1, d).
            Zeros, as TF-IDF gives for unknown words, are similar to no center.
        centers: (m, d), the fine-grained cluster centers.
        expert_of_center: (m,), the expert that each belongs to.
        temperature: lambda.
        nearest_center_only: whether A counts for the center nearest to l alone, and is 0 for the others.
        routing: `"paper"` or `"released"`.

    Returns:
        (..., n) weights that sum to 1, in float32.

    Raises:
        ValueError: a task without metadata, or embeddings of another size than the centers'.
        KeyError: an unknown routing.
    """
    divisor = {"paper": 1, "released": 8}[routing]
    length, size = metadata_embeds.shape[-2:] if metadata_embeds.dim() > 1 else (0, 0)
    if length == 0 or size != centers.shape[1]:
        raise ValueError(
            "A task needs one or more pieces of metadata, as embeddings (..., L, d) by the encoder that the centers "
            f"were made with: got {tuple(metadata_embeds.shape)}, but d is {centers.shape[1]}."
        )
    rows = metadata_embeds.reshape(-1, size)
    # In float64, where the matrix product of squared distances does not cancel
    centers, expert_of_center = centers.to(rows.device, torch.float64), expert_of_center.to(rows.device)
    per_row = []
    for chunk in rows.double().split(8192):  # bounds memory
        distances = chunk.square().sum(-1, keepdim=True) + centers.square().sum(-1) - 2 * chunk @ centers.T
        distances = distances.clamp_min(0)
        similarity = _similarity(distances, length, temperature, routing)
        if nearest_center_only:
            nearest = distances.argmin(-1, keepdim=True)
            similarity = torch.zeros_like(similarity).scatter(-1, nearest, similarity.gather(-1, nearest))
        similarity = similarity * (chunk != 0).any(-1, keepdim=True)
        per_row.append(similarity.new_zeros(len(chunk), num_experts).index_add(-1, expert_of_center, similarity))
    sums = torch.cat(per_row).reshape((*metadata_embeds.shape[:-1], num_experts)).sum(-2)
    return (sums / divisor).softmax(-1).float()


def _similarity(squared_distances: Tensor, length: int, temperature: float, routing: str) -> Tensor:
    """A of `routing_weights`, for a task with `length` pieces of metadata."""
    few = math.exp(0.5 - math.sqrt(length))
    if routing == "released":
        factor = math.log10(max(10, length - 200)) / temperature
        return (((few if length < 10 else 0.0) - squared_distances.sqrt()) * factor).exp()
    if length > 200:
        temperature = temperature / math.log(length)
    similarity = (-squared_distances / temperature).exp()
    return similarity * few if length < 10 else similarity


def side_by_side(embeds: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
    """
    (..., n * D), the embeddings (..., D) of n experts one after the other, each times its weight (..., n) if there are
    weights. The product of a row with weights and one without is the weighted sum of the experts' similarities
    (MoDE eq. 4).
    """
    if weights is not None:
        embeds = [weights[..., number, None] * part for number, part in enumerate(embeds)]
    return torch.cat(tuple(embeds), dim=-1)
