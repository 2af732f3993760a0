"""A CLIP and its contrastive loss in one module."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from clip_moe.training.gradient_cache import cached_gradient
from clip_moe.training.keep import Keep
from clip_moe.training.losses import Pairing, Reduce, all_reduce_sum
from clip_moe.training.optimizers import merge_adapters
from clip_moe.training.task import AuxiliaryLoss, Batch, Metrics, Task
from modeling_clip_moe.experts import CLIPMoEExperts
from modeling_clip_moe.families import sparse_towers
from modeling_clip_moe.sparse_moe import CLIPMoERouter

# The temperature is kept at or above 1 / MAX_LOGIT_SCALE (CLIP, section 2.5)
MAX_LOGIT_SCALE = 100.0


class ContrastiveTask(Task):
    """A dense or sparse CLIP together with its loss.

    Both are one module, so that the loss is computed inside the `forward` that DDP or FSDP wraps: `logit_scale` is used
    there, after the towers.

    Args:
        stage: whose losses and settings count, a `clip_moe.training.stages.train.TrainStage`.
        auxiliary_losses: others that are added.
        keep: a teacher whose embeddings are kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stage: Any,
        auxiliary_losses: Sequence[AuxiliaryLoss] = (),
        keep: Keep | None = None,
    ):
        super().__init__(model, auxiliary_losses)
        self.keep = keep
        self.stage, self.mini_batch_size = stage, stage.mini_batch_size
        self.biases = ExpertBiases(model, stage.expert_bias_update)
        # FSDP2 and ZeRO-3 split no scalar, which the scale of a dense CLIP is
        self.scale_shape, scale = model.logit_scale.shape, model.logit_scale
        if scale.ndim == 0:
            model.logit_scale = nn.Parameter(scale.detach().reshape(1), requires_grad=scale.requires_grad)

    def forward(
        self,
        batch: dict[str, torch.Tensor],
        only_embed: bool = False,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        reduce: Reduce = all_reduce_sum,
    ) -> tuple:
        """The global loss and what is logged of it: `loss` is the contrastive loss, for dense and sparse models alike,
        `total_loss` has those of routers and others added.

        Args:
            batch: this process's share, from a `PairLoader`.
            only_embed, gradients: for the two times that `clip_moe.training.gradient_cache` computes a part of a batch:
                the gradients by the images' and the texts' embeddings, by the scale and by `loss_parameters`.
            reduce: the sum of a tensor over the global batch, for the losses of routers and others.

        Returns:
            The loss, whose mean over the processes is the loss of the global batch, and named scalars, each to be
            averaged over the processes. With `only_embed`, the embeddings of images and texts, and what the loss takes.
            With `gradients`, a scalar whose gradient is that of the loss, the losses of the routers and the scalars.
        """
        sparse = sparse_towers(self.model.config)
        recorded = {"output_router_logits": True, "output_expert_ids": True} if sparse else {}
        batch = dict(batch)
        pairing = Pairing.take(batch)
        outputs = self.model(**batch, **recorded)
        scale = self.model.logit_scale.exp()
        auxiliary, metrics = torch.zeros((), device=scale.device), {}
        if sparse:
            auxiliary, metrics = self.stage.router_loss(self.model.config, outputs, batch, reduce)
        for auxiliary_loss in self.auxiliary_losses:
            with torch.autocast(scale.device.type, enabled=False):
                loss, values = auxiliary_loss(self.model, outputs, batch, self.progress, reduce)
            auxiliary, metrics = auxiliary + loss, metrics | values
        metrics["logit_scale"] = scale.detach().squeeze()
        with torch.autocast(outputs.image_embeds.device.type, enabled=False):
            embeds = outputs.image_embeds, outputs.text_embeds, scale, *self.loss_parameters().values()
            embeds = tuple(tensor.float() for tensor in embeds)
            if only_embed:
                return embeds
            if gradients is not None:
                carried = sum((value * gradient).sum() for value, gradient in zip(embeds, gradients, strict=True))
                return carried + auxiliary, auxiliary.detach(), metrics
            loss, losses = self.loss(embeds, pairing)
        loss = loss + auxiliary
        return loss, {**losses, **metrics, "total_loss": loss.detach()}

    def add_gradient(
        self, accelerator: Accelerator, prepared: nn.Module, batch: Batch, accumulation: int, synchronize: bool
    ) -> tuple[torch.Tensor, Metrics]:
        if self.keep is not None:
            batch = self.keep.embed(batch, accelerator, self.mini_batch_size)
        if self.mini_batch_size is None:
            return super().add_gradient(accelerator, prepared, batch, accumulation, synchronize)
        return cached_gradient(accelerator, prepared, batch, self.mini_batch_size, 1 / accumulation, synchronize)

    def after_step(self, accelerator: Accelerator) -> None:
        if self.model.logit_scale.requires_grad:
            clamp_(self.model.logit_scale, torch.tensor(MAX_LOGIT_SCALE).log().item())
        self.biases.move(accelerator)
        super().after_step(accelerator)

    def exported(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """With the adapters added to the weights, and the scale in the shape that it had before training."""
        if self.stage.lora is not None:
            state_dict = merge_adapters(self.model, self.stage.lora, state_dict)
        return state_dict | {"logit_scale": state_dict["logit_scale"].view(self.scale_shape)}

    def loss_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the contrastive loss takes beside the scale, by the names of its arguments."""
        return {"logit_bias": self.model.logit_bias} if hasattr(self.model, "logit_bias") else {}

    def loss(self, embeds: Sequence[torch.Tensor], pairing: Pairing) -> tuple[torch.Tensor, Metrics]:
        """The loss of embeddings, and what is logged of it: `loss`, the contrastive one, and with `keep` its own."""
        kept, metrics = 0.0, {}
        if self.keep is not None:
            kept = self.keep.loss(*embeds[:3], pairing)
            metrics["keep_loss"] = kept.detach()
            embeds, pairing = self.keep.new_pairs(embeds, pairing)
        contrastive = self.contrastive_loss(embeds, pairing)
        return contrastive + kept, {"loss": contrastive.detach(), **metrics, **self.chance(embeds, pairing)}

    def contrastive_loss(self, embeds: Sequence[torch.Tensor], pairing: Pairing) -> torch.Tensor:
        """The loss of embeddings of images, of texts, a scale, and of `loss_parameters`."""
        images, texts, scale, *values = embeds
        parameters = dict(zip(self.loss_parameters(), values, strict=True))
        return self.stage.contrastive_loss(images, texts, scale, pairing, **parameters)

    @torch.no_grad()
    def chance(self, embeds: Sequence[torch.Tensor], pairing: Pairing) -> dict[str, torch.Tensor]:
        """In the first step, `chance`: the loss of equal similarities, with the best bias if the loss has one."""
        if self.progress > 0:
            return {}
        images, texts, scale, *parameters = embeds
        equal = torch.zeros_like(images), torch.zeros_like(texts), scale

        def loss_with(bias: float) -> torch.Tensor:
            named = zip(self.loss_parameters(), parameters, strict=True)
            values = [torch.full_like(value, bias) if name == "logit_bias" else value for name, value in named]
            return self.contrastive_loss([*equal, *values], pairing)

        if "logit_bias" not in self.loss_parameters():
            return {"chance": loss_with(0.0)}
        below, loss, above = map(loss_with, (-1.0, 0.0, 1.0))
        if below != loss:  # sigmoid: positives * softplus(-bias) + negatives * softplus(bias)
            pairs = (below + above) / F.softplus(below.new_tensor([-1.0, 1.0])).sum()
            positives, negatives = (pairs - above + below) / 2, (pairs + above - below) / 2
            loss = positives * (pairs / positives).log() + negatives * (pairs / negatives).log()
        return {"chance": loss}


class ExpertBiases:
    """Balance without a loss (arXiv:2408.15664): the biases of a model's routers, and how many tokens each expert got
    since they last moved. A bias adds to the scores that choose experts, and not to their weights.

    With gradient checkpointing or `mini_batch_size`, tokens count twice; neither a sign nor a z-score changes when all
    counts double, so biases move alike.

    Args:
        update: what `RATE` multiplies: the "sign" of the difference from the mean count, or its "z_score", the
            difference over the standard deviation of the layer's counts (MoE-ViE, arXiv:2608.17402). The paper does not
            say which: here the population's, whose variance divides by E. A layer's experts are all that it has, and
            the root mean square of its moves is then `RATE`, as with the sign.

    Attributes:
        RATE: u, by which a bias moves in a step (section 4.1).
    """

    RATE = 1e-3

    def __init__(self, model: nn.Module, update: Literal["sign", "z_score"] = "sign"):
        self.update = update
        routers = (module for module in model.modules() if isinstance(module, CLIPMoERouter))
        # A router that does not train keeps its choices
        self.routers = [router for router in routers if router.expert_bias is not None and router.weight.requires_grad]
        self.counts = [torch.zeros_like(router.expert_bias) for router in self.routers]
        for number, router in enumerate(self.routers):
            router.register_forward_hook(self._counter(number))

    def _counter(self, number: int):
        def count(router: CLIPMoERouter, inputs: tuple, outputs: tuple) -> None:
            if router.training:
                # Dropped tokens count, too: the last column is for padding and for these
                ids = router.choose(router.score(outputs[0].detach()))[1]
                mask = inputs[1] if len(inputs) > 1 else None
                weights = torch.ones_like(ids) if mask is None else mask.long()[..., None].expand_as(ids)
                counts = self.counts[number] = self.counts[number].to(ids.device)
                counts.scatter_add_(0, ids.flatten(), weights.flatten().to(counts))

        return count

    @torch.no_grad()
    def move(self, accelerator: Accelerator) -> None:
        """Move each bias towards the mean count: up where an expert got fewer tokens, over all processes."""
        for router, counts in zip(self.routers, self.counts, strict=True):
            totals = accelerator.reduce(counts.to(router.expert_bias.device), "sum")
            shortfalls = totals.mean() - totals
            if self.update == "z_score":
                deviation = totals.std(correction=0)
                router.expert_bias += self.RATE * shortfalls / deviation.masked_fill(deviation == 0, torch.inf)
            else:
                router.expert_bias += self.RATE * shortfalls.sign()
            counts.zero_()


def drop_activations(model: PreTrainedModel, share: float) -> None:
    """While it trains, a share of the experts' activations is 0, each time others, and the rest is scaled up."""
    for module in model.modules():
        if isinstance(module, CLIPMoEExperts):
            # Every implementation of the experts calls it, those of transformers too
            module.act_fn = nn.Sequential(module.act_fn, nn.Dropout(share)).train(module.training)


@torch.no_grad()
def clamp_(parameter: nn.Parameter, maximum: float) -> None:
    """Clamp a parameter, or what this process has of it."""
    parameter.clamp_(max=maximum)
    if hasattr(parameter, "ds_id"):  # ZeRO-3 splits it, and trains a copy in float32
        from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

        parameter.ds_tensor.clamp_(max=maximum)
        safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter).clamp(max=maximum))
