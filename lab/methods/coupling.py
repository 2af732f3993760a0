"""Experts are tied to their rows of the router (ERC, arXiv:2512.23447).

- {name: coupled, stage: lab.methods.coupling:CoupledStage, model: upcycled}
"""

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from clip_moe.conversion.upcycle import sparse_blocks
from clip_moe.engine.settings import STRICT
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.task import AuxiliaryLoss, mean_over_parts
from modeling_clip_moe.families import sparse_towers


@dataclass(config=STRICT, kw_only=True)
class CoupledStage(TrainStage):
    """A `train` stage with a loss that ties each expert to its row of the router."""

    # The weight of the loss.
    coupling_coef: float = Field(default=1.0, gt=0)
    # The answers of other experts to a row, and of an expert to other rows, have to stay below the expert's answer to
    # its own row times this. The paper has 1 for 64 experts, 0.5 for 256.
    coupling_alpha: float = Field(default=1.0, gt=0, le=1)

    def auxiliary_losses(self, model, inputs):
        if not sparse_towers(model.config):
            raise ValueError(f"{self.name}: the coupling goes with a sparse model, but {self.model} is dense")
        if any(block.num_experts == 1 for block in sparse_blocks(model).values()):
            raise ValueError(f"{self.name}: the coupling takes several experts, but a tower has one")
        if self.lora is not None:
            raise ValueError(f"{self.name}.lora: the coupling takes weights, which adapters replace: drop one")
        coupling = RouterExpertCoupling(model, self.coupling_coef, self.coupling_alpha)
        return [*super().auxiliary_losses(model, inputs), coupling]


class RouterExpertCoupling(AuxiliaryLoss):
    """An expert answers its own row of the router more than others do (ERC, arXiv:2512.23447).

    Row i of a router, each channel times a random number between 1 - e_i and 1 + e_i, is the input of all experts, of
    which M[i, j] is the norm of expert j's hidden units before the activation; e_i is half the distance to the nearest
    other row over the norm of row i. The loss of a layer is the mean over i and j of max(M[i, j] - alpha M[i, i], 0) +
    max(M[j, i] - alpha M[i, i], 0), j other than i; that of the model is the mean over its layers.

    Args:
        alpha: 1 in the paper for 64 experts, 0.5 for 256.
    """

    def __init__(self, model: PreTrainedModel, coef: float, alpha: float):
        super().__init__()
        self.coef, self.alpha = coef, alpha

    def forward(self, model, outputs, batch, progress, reduce):
        blocks = {block.router.weight: block for block in sparse_blocks(model).values()}  # of a shared encoder once
        losses = [coupling_loss(weight, block.experts.up_proj, self.alpha) for weight, block in blocks.items()]
        loss = mean_over_parts(torch.stack(losses).mean(), reduce)
        return self.coef * loss, {"coupling_loss": loss.detach()}


def coupling_loss(router: torch.Tensor, up_proj: torch.Tensor, alpha: float) -> torch.Tensor:
    """ERC's loss of one layer, a scalar, of a router (E, D) and the up projections (E, I, D) of its experts."""
    router, up_proj = router.float(), up_proj.float()
    num_experts = len(router)
    with torch.no_grad():
        own = torch.eye(num_experts, dtype=torch.bool, device=router.device)
        nearest = torch.cdist(router, router).masked_fill(own, torch.inf).min(dim=1).values
        reach = nearest / (2 * router.norm(dim=1))  # (E,)
        noise = 1 + reach[:, None] * (2 * torch.rand_like(router) - 1)
    norms = torch.einsum("id,jhd->ijh", router * noise, up_proj).norm(dim=-1)  # (E, E)
    most = alpha * norms.diagonal()[:, None]
    excess = (norms - most).relu() + (norms.T - most).relu()
    return excess.masked_fill(own, 0).sum() / num_experts**2
