"""Losses beside the contrastive one that a stage adds by its settings: of a teacher, of routers and their experts.

Each is a module of the task, so that what it learns or keeps is in checkpoints; none of it is in the trained model.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from clip_moe.conversion.upcycle import sparse_blocks
from clip_moe.training.ffn_inputs import ffn_inputs
from clip_moe.training.losses import all_reduce_sum
from modeling_clip_moe.sparse_moe import (
    CLIPMoESparseMoeBlock,
    load_balancing_loss,
    mean_over_tokens,
    router_scores,
)

Batch = Mapping[str, torch.Tensor]
TOWERS = ("text", "vision")


class AuxiliaryLoss(nn.Module):
    """A loss that sees model, outputs and batch. Autocast is off.

    Where a batch is computed in parts (`mini_batch_size`), it is called for each, and has to return the loss of the
    whole batch: a function of sums that `training.losses.all_reduce_sum` makes or, of weights alone, `mean_over_parts`.
    """

    # Whether it reads weights of the model, which FSDP2 splits
    READS_WEIGHTS = True

    def forward(
        self, model: PreTrainedModel, outputs: Any, batch: Batch, progress: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This process's part of the loss and scalars to log, as `TrainStage.router_loss` has them.

        Args:
            outputs: what the model returned, called with `output_router_logits=True, output_expert_ids=True`.
            progress: the share of the stage's steps that are done, from 0.
        """
        raise NotImplementedError

    def after_step(self, accelerator: Accelerator) -> None:
        """The optimizer has taken a step."""


def mean_over_parts(loss: torch.Tensor) -> torch.Tensor:
    """The mean of a loss of weights alone over processes and over the parts of a batch, with its gradient."""
    total = all_reduce_sum(torch.stack([loss, torch.ones_like(loss)]))
    return total[0] / total[1]


def _logits_and_mask(tower: str, outputs: Any, batch: Batch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    mask = batch["attention_mask"] if tower == "text" else batch.get("pixel_attention_mask")
    return getattr(outputs, f"{tower}_router_logits") or (), mask


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
                theirs, ours = (getattr(getattr(one.config, f"{tower}_config"), name, None) for one in (teacher, model))
                if theirs != ours:
                    raise ValueError(f"teacher: its {tower} tower has {name} {theirs}, the model's {ours}")
        # In a tuple: no part of the module, whose state is saved and split
        self.teacher, self.coef = (teacher.requires_grad_(False).eval(),), coef
        self.layers = {tower: getattr(model.config, f"{tower}_config") for tower in TOWERS}
        self.layers = {tower: sorted(getattr(config, "moe_layers", ())) for tower, config in self.layers.items()}
        blocks = [block for tower in TOWERS for block in sparse_blocks(getattr(model, f"{tower}_model")).values()]
        self.routers = nn.ParameterList(block.router.weight.detach().clone() for block in blocks)

    def forward(self, model, outputs, batch, progress):
        if progress >= self.UNTIL:  # unused parameters would stop DDP
            return 0 * sum(router.sum() for router in self.routers), {}
        routers, of_routers, divergences = iter(self.routers), [], []
        teacher = self.teacher[0].to(self.routers[0].device)
        for tower, features in ffn_inputs(teacher, batch, self.layers).items():
            of_layers, mask = _logits_and_mask(tower, outputs, batch)
            for logits, of_teacher in zip(of_layers, features, strict=True):
                taught = F.linear(of_teacher.float(), next(routers).float()).log_softmax(dim=-1)
                probabilities, own = taught.exp(), logits.float().log_softmax(dim=-1)
                entropy = -(probabilities * taught).sum(dim=-1, keepdim=True)
                divergence = (probabilities.detach() * (taught.detach() - own)).sum(dim=-1, keepdim=True)
                values = torch.cat([probabilities, entropy, divergence], dim=-1)
                means = mean_over_tokens(values.flatten(0, -2)[None], mask, all_reduce_sum)[0]
                importance, entropy, divergence = means[:-2], means[-2], means[-1]
                variation = importance.var(correction=0) / importance.mean().square()
                of_routers.append(self.IMPORTANCE * variation + self.ENTROPY * entropy)
                divergences.append(divergence)
        divergence = torch.stack(divergences).mean()
        loss = self.coef * divergence + torch.stack(of_routers).sum()
        return loss, {"router_divergence": divergence.detach()}


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

    def forward(self, model, outputs, batch, progress):
        blocks = {block.router.weight: block for block in sparse_blocks(model).values()}  # of a shared encoder once
        losses = [coupling_loss(weight, block.experts.up_proj, self.alpha) for weight, block in blocks.items()]
        loss = mean_over_parts(torch.stack(losses).mean())
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


class DenseTeacher(AuxiliaryLoss):
    """The sparse layers are drawn to a running average of themselves in which all experts compute every token
    (expert-ensemble self-distillation of Cluster-aware Upcycling, arXiv:2604.13508): y = sum_e g_e E_e(x).

    The teacher of a layer reads what the layer does. The loss of a layer is the squared distance of its output from the
    teacher's, over the squared norm of that, both as means over tokens; that of the model is the mean over its layers.
    The paper's distance, weight and decay could not be read: these are ours.

    Args:
        decay: of the average, a step.
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

    def forward(self, model, outputs, batch, progress):
        losses = []
        for (tower, number), (hidden_states, *mask, output) in self.seen.items():
            mask = mask[0] if mask else None
            with torch.no_grad():
                target = self.blocks[tower][number](hidden_states, mask).float()
            squares = torch.stack([(output.float() - target).square().sum(-1), target.square().sum(-1)], dim=-1)
            distance, norm = mean_over_tokens(squares.flatten(0, -2)[None], mask, all_reduce_sum)[0]
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


class AdaptiveSparsity(AuxiliaryLoss):
    """Keeps ReLU routers at `num_experts_per_tok` experts a token on average (ReMoE, arXiv:2412.14711, section 3).

    The load-weighted L1 of the scores has a weight of its own in each tower, which begins at 1e-8. After each step it
    is multiplied by 1.2 if tokens met more experts than that, and else divided by it.
    """

    READS_WEIGHTS = False
    START, FACTOR = 1e-8, 1.2

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.aims = {}  # tower -> K / E
        for tower in TOWERS:
            config = getattr(model.config, f"{tower}_config")
            if getattr(config, "moe_layers", ()) and config.scoring_func == "relu":
                self.aims[tower] = config.num_experts_per_tok / config.num_experts
                self.register_buffer(f"{tower}_weight", torch.tensor(self.START))
                self.register_buffer(f"{tower}_counts", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(self, model, outputs, batch, progress):
        total, metrics = 0.0, {}
        is_counted = torch.is_grad_enabled()  # not when parts of a batch are computed for their embeddings first
        for tower, aim in self.aims.items():
            of_layers, mask = _logits_and_mask(tower, outputs, batch)
            top_k = round(aim * of_layers[0].shape[-1])
            loss = load_balancing_loss(of_layers, top_k, mask, all_reduce_sum, "relu")
            with torch.no_grad():
                chosen = torch.stack([router_scores(logits, "relu").flatten(0, -2) > 0 for logits in of_layers])
                share = mean_over_tokens(chosen.float().mean(-1, keepdim=True), mask, all_reduce_sum).mean()
                if is_counted:
                    self.get_buffer(f"{tower}_counts").add_(torch.stack([share, torch.ones_like(share)]))
            total = total + self.get_buffer(f"{tower}_weight") * loss
            metrics[f"{tower}_experts_per_token"] = share * of_layers[0].shape[-1]
            metrics[f"{tower}_sparsity_weight"] = self.get_buffer(f"{tower}_weight").clone()
        return total, metrics

    @torch.no_grad()
    def after_step(self, accelerator):
        for tower, aim in self.aims.items():
            counts, weight = self.get_buffer(f"{tower}_counts"), self.get_buffer(f"{tower}_weight")
            weight.mul_(torch.where(counts[0] / counts[1] > aim, self.FACTOR, 1 / self.FACTOR))
            counts.zero_()
