"""Sparse layers learn from a running average of themselves (Cluster-aware Upcycling, arXiv:2604.13508).

- {name: distilled, stage: lab.methods.dense_teacher:DistilledStage, model: upcycled}
"""

import copy

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import is_sparse
from clip_moe.conversion.upcycle import sparse_blocks
from clip_moe.engine.settings import STRICT
from clip_moe.training.auxiliary_losses import TOWERS, AuxiliaryLoss
from clip_moe.training.stages.train import TrainStage
from modeling_clip_moe.router_losses import mean_over_tokens
from modeling_clip_moe.sparse_moe import CLIPMoESparseMoeBlock


@dataclass(config=STRICT, kw_only=True)
class DistilledStage(TrainStage):
    """A `train` stage whose sparse layers are drawn to an average of themselves."""

    # The weight of the loss.
    distillation_coef: float = Field(default=1.0, gt=0)
    # The share of the average that each step keeps.
    distillation_decay: float = Field(default=0.999, gt=0, lt=1)

    def auxiliary_losses(self, model, inputs):
        if not is_sparse(model.config):
            raise ValueError(f"{self.name}: the distillation goes with a sparse model, but {self.model} is dense")
        if self.lora is not None:
            raise ValueError(f"{self.name}.lora: the average of an adapter's factors is not that of weights: drop one")
        teacher = DenseTeacher(model, self.distillation_coef, self.distillation_decay)
        return [*super().auxiliary_losses(model, inputs), teacher]


class DenseTeacher(AuxiliaryLoss):
    """The sparse layers are drawn to a running average of themselves in which all experts compute every token
    (expert-ensemble self-distillation of Cluster-aware Upcycling, arXiv:2604.13508): y = sum_e g_e E_e(x).

    The teacher of a layer reads what the layer does. The loss of a layer is the squared distance of its output from the
    teacher's, over the squared norm of that, both as means over tokens; that of the model is the mean over its layers.
    The paper's distance, weight and decay could not be read: these are ours.

    Args:
        decay: the share of the average that each step keeps.
    """

    def __init__(self, model: PreTrainedModel, coef: float, decay: float):
        super().__init__()
        self.coef, self.decay = coef, decay
        blocks = {tower: [*sparse_blocks(getattr(model, f"{tower}_model")).values()] for tower in TOWERS}
        self.blocks = nn.ModuleDict(
            {tower: nn.ModuleList(map(_as_dense, of_tower)) for tower, of_tower in blocks.items()}
        )
        self.students, self.seen = blocks, {}
        for tower, of_tower in blocks.items():
            for number, block in enumerate(of_tower):
                block.register_forward_hook(self._recorder(tower, number))

    def _recorder(self, tower: str, number: int):
        def record(block: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            if block.training:
                self.seen[tower, number] = (*inputs, output)

        return record

    def train(self, mode: bool = True) -> "DenseTeacher":
        return super().train(False)  # without noise or dropout

    def forward(self, model, outputs, batch, progress, reduce):
        losses = []
        for (tower, number), (hidden_states, *mask, output) in self.seen.items():
            mask = mask[0] if mask else None
            with torch.no_grad():
                target = self.blocks[tower][number](hidden_states, mask).float()
            squares = torch.stack([(output.float() - target).square().sum(-1), target.square().sum(-1)], dim=-1)
            distance, norm = mean_over_tokens(squares.flatten(0, -2)[None], mask, reduce)[0]
            losses.append(distance / norm)
        self.seen.clear()
        loss = torch.stack(losses).mean()
        return self.coef * loss, {"distillation_loss": loss.detach()}

    @torch.no_grad()
    def after_step(self, accelerator):
        for tower, of_tower in self.students.items():
            for average, block in zip(self.blocks[tower], of_tower, strict=True):
                for mean, parameter in zip(average.parameters(), block.parameters(), strict=True):
                    mean.lerp_(parameter.detach(), 1 - self.decay)
                for mean, buffer in zip(average.buffers(), block.buffers(), strict=True):
                    mean.copy_(buffer)


def _as_dense(block: CLIPMoESparseMoeBlock) -> CLIPMoESparseMoeBlock:
    """A frozen copy of a block in which every expert computes every token."""
    block = copy.deepcopy(block).requires_grad_(False)
    block.config.num_experts_per_tok = block.config.num_experts
    block.config.capacity_factor = block.config.eval_capacity_factor = None
    return block
