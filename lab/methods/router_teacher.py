"""A frozen dense model teaches the routers (TGR-MoE, arXiv:2604.21330).

- {name: taught, stage: lab.methods.router_teacher:TaughtStage, model: upcycled, teacher: dense}
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import load_dense
from clip_moe.conversion.upcycle import sparse_blocks
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.task import AuxiliaryLoss
from lab.methods import TOWERS, logits_and_mask
from lab.methods.ffn_inputs import ffn_inputs
from modeling_clip_moe.families import sparse_towers
from modeling_clip_moe.router_losses import mean_over_tokens


@dataclass(config=STRICT, kw_only=True)
class TaughtStage(TrainStage):
    """A `train` stage in whose first half a dense model teaches the routers."""

    # The dense model whose layers teach the routers, as the one that was upcycled.
    teacher: Model
    # The weight of what it teaches.
    teacher_coef: float = Field(default=5.0, gt=0)

    def auxiliary_losses(self, model, inputs):
        if not sparse_towers(model.config):
            raise ValueError(f"{self.name}.teacher: it goes with a sparse model, but {self.model} is dense")
        taught = RouterTeacher(model, load_dense(inputs.teacher, torch.float32), self.teacher_coef)
        return [*super().auxiliary_losses(model, inputs), taught]


class RouterTeacher(AuxiliaryLoss):
    """A frozen dense model teaches the routers in the first half of training (TGR-MoE, arXiv:2604.21330).

    A router of its own for each sparse layer reads what the dense FFN of that layer reads, and learns alone to use all
    experts alike and to be sure of each token: 0.005 (std(Imp) / mean(Imp))^2 + 0.005 entropy, where Imp_e is the mean
    probability of expert e. It begins as the model's router. The model's routers are drawn to it by `coef` / L times
    the sum over the L sparse layers of KL(teacher || router), a mean over tokens. The optimizer, its weight decay and
    the clipping of gradients take the teacher's routers as the model's.

    Args:
        teacher: a dense model with the layers of the sparse one.
        coef: 5 in the paper.

    Raises:
        ValueError: the teacher's layers are others.
    """

    READS_WEIGHTS = False
    UNTIL, IMPORTANCE, ENTROPY = 0.5, 0.005, 0.005
    # Configuration fields in which the towers of teacher and model must agree
    SIZES = "hidden_size num_hidden_layers patch_size image_size vocab_size max_position_embeddings".split()

    def __init__(self, model: PreTrainedModel, teacher: PreTrainedModel, coef: float):
        super().__init__()
        for tower in TOWERS:
            for name in self.SIZES:
                theirs, ours = (getattr(getattr(m.config, f"{tower}_config"), name, None) for m in (teacher, model))
                if theirs != ours:
                    raise ValueError(f"teacher: its {tower} tower has {name} {theirs}, the model's {ours}")
        # In a tuple: no part of the module, whose state is saved and split
        self.teacher, self.coef = (teacher.requires_grad_(False).eval(),), coef
        self.layers = {tower: getattr(model.config, f"{tower}_config") for tower in TOWERS}
        self.layers = {tower: sorted(getattr(config, "moe_layers", ())) for tower, config in self.layers.items()}
        blocks = [block for tower in TOWERS for block in sparse_blocks(getattr(model, f"{tower}_model")).values()]
        self.routers = nn.ParameterList(block.router.weight.detach().clone() for block in blocks)

    def forward(self, model, outputs, batch, progress, reduce):
        if progress >= self.UNTIL:  # unused parameters would stop DDP
            return 0 * sum(router.sum() for router in self.routers), {}
        routers, router_losses, divergences = iter(self.routers), [], []
        teacher = self.teacher[0].to(self.routers[0].device)
        for tower, features in ffn_inputs(teacher, batch, self.layers).items():
            router_logits, mask = logits_and_mask(tower, outputs, batch)
            for logits, hidden_states in zip(router_logits, features, strict=True):
                taught = F.linear(hidden_states.float(), next(routers).float()).log_softmax(dim=-1)
                probabilities, own = taught.exp(), logits.float().log_softmax(dim=-1)
                entropy = -(probabilities * taught).sum(dim=-1, keepdim=True)
                divergence = (probabilities.detach() * (taught.detach() - own)).sum(dim=-1, keepdim=True)
                values = torch.cat([probabilities, entropy, divergence], dim=-1)
                means = mean_over_tokens(values.flatten(0, -2)[None], mask, reduce)[0]
                importance, entropy, divergence = means[:-2], means[-2], means[-1]
                variation = importance.var(correction=0) / importance.mean().square()
                router_losses.append(self.IMPORTANCE * variation + self.ENTROPY * entropy)
                divergences.append(divergence)
        divergence = torch.stack(divergences).mean()
        loss = self.coef * divergence + torch.stack(router_losses).sum()
        return loss, {"router_divergence": divergence.detach()}
