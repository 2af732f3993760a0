"""The principal components of features, through which a gradient flows (Long-CLIP, arXiv:2403.15378)."""

import torch


class _Projection(torch.autograd.Function):
    """The projection onto the eigenvectors of a symmetric matrix (D, D) with the largest eigenvalues.

    Through `eigh` alone, the gradient divides by differences of eigenvalues that do not count here, and which are often
    nearly 0: those within the chosen ones, and within the others.
    """

    @staticmethod
    def forward(ctx, matrix: torch.Tensor, number: int) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)  # in ascending order
        ctx.save_for_backward(values, vectors)
        ctx.number = number
        return vectors[:, -number:] @ vectors[:, -number:].T

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        values, vectors = ctx.saved_tensors
        others, chosen = vectors[:, : -ctx.number], vectors[:, -ctx.number :]
        gaps = values[-ctx.number :] - values[: -ctx.number, None]  # (D - number, number)
        change = others @ (others.T @ (gradient + gradient.T) @ chosen / gaps) @ chosen.T
        return (change + change.T) / 2, None


def primary_components(features: torch.Tensor, number: int) -> torch.Tensor:
    """Features reduced to their mean and their largest principal components (Long-CLIP section 3.3).

    The gradient flows through all of it, mean and directions of the components included, as in the authors' code.

    Args:
        features: (B, D), of the batch whose components count.
        number: how many components.

    Returns:
        (B, D), not normalized.
    """
    mean = features.mean(dim=0)
    centered = features - mean
    return centered @ _Projection.apply(centered.T @ centered, number) + mean
