"""Balance without a loss: a bias for each expert, which moves towards balance once a step (arXiv:2408.15664).

The bias adds to the scores that choose experts, and not to their weights, so no gradient works against the task's.
"""

import torch
from accelerate import Accelerator
from torch import nn

from modeling_clip_moe.sparse_moe import CLIPMoERouter


class ExpertBiases:
    """The biases of a model's routers, and how many tokens each expert got since they last moved.

    With gradient checkpointing or `mini_batch_size`, tokens count twice; only the sign of a difference counts, so
    biases move alike.

    Attributes:
        RATE: u, by which a bias moves in a step (section 4.1).
    """

    RATE = 1e-3

    def __init__(self, model: nn.Module):
        routers = (module for module in model.modules() if isinstance(module, CLIPMoERouter))
        # A router that does not train keeps its choices
        self.routers = [router for router in routers if router.expert_bias is not None and router.weight.requires_grad]
        self.counts = [torch.zeros_like(router.expert_bias) for router in self.routers]
        for number, router in enumerate(self.routers):
            router.register_forward_hook(self._counter(number))

    def _counter(self, number: int):
        def count(router: CLIPMoERouter, inputs: tuple, outputs: tuple) -> None:
            if router.training:
                # What capacity drops counts too: the last column is that of padding and of these
                ids = router.choose(router.score(outputs[0].detach()))[1]
                mask = inputs[1] if len(inputs) > 1 else None
                weights = torch.ones_like(ids) if mask is None else mask.long()[..., None].expand_as(ids)
                counts = self.counts[number] = self.counts[number].to(ids.device)
                counts.scatter_add_(0, ids.flatten(), weights.flatten().to(counts))

        return count

    @torch.no_grad()
    def move(self, accelerator: Accelerator) -> None:
        """Move each bias by `RATE` towards the mean count: up where an expert got fewer tokens, over all processes."""
        for router, counts in zip(self.routers, self.counts, strict=True):
            totals = accelerator.reduce(counts.to(router.expert_bias.device), "sum")
            router.expert_bias += self.RATE * (totals.mean() - totals).sign()
            counts.zero_()
