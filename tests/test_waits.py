from pathlib import Path

import pytest
import torch
from steps import LOSSES
from tiny_clip_moe import inputs, tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from clip_moe.training.contrastive_task import ContrastiveTask
from clip_moe.training.loop import FirstFault


@pytest.mark.parametrize(
    "system", [{"capacity_factor": 1.0, "capacity_group_size": 2}, {"fusion_gate": True, "norm_topk_prob": True}]
)
def test_forward_and_backward_read_no_value(system):
    """Fake tensors have none: whatever reads one, for which a GPU would be waited for, raises an error."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.autocast("cpu", torch.bfloat16):
        model = tiny_model(text={"intermediate_size": 32}, vision={"intermediate_size": 32}, **system).train()
        batch = {name: mode.from_tensor(value) for name, value in inputs(8).items()}
        finite = FirstFault("stage", Path("nowhere"))
        model.set_experts_implementation("grouped")
        loss, metrics = ContrastiveTask(model, LOSSES)(batch)
        finite.note("the loss", loss, 1)
        loss.backward()
        finite.note("the gradient", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), 1)
        assert all(weight.grad is not None for weight in model.parameters())
        for read in (loss.item, batch["input_ids"].tolist, batch["input_ids"].nonzero, finite.require):
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                read()
