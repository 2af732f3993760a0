"""Single steps of the training loop, without its log and checkpoints."""

from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from tiny_clip_moe import gradients

from clip_moe.training.contrastive_task import ContrastiveTask
from clip_moe.training.loop import FirstFault, _compute_gradient
from clip_moe.training.losses import contrastive_loss, router_losses
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.stages.train_router import TrainRouterStage
from clip_moe.training.train_settings import LoopSettings
from lab.speed.steps import training_step

LOSSES = SimpleNamespace(
    contrastive_loss=lambda images, texts, scale, pairing: contrastive_loss(images, texts, scale),
    router_loss=router_losses,
    mini_batch_size=None,
    expert_bias_update="sign",
)


def steps_of(model, **settings):
    """A function that takes one training step on a batch."""
    settings = LoopSettings(learning_rate=1e-3, weight_decay=0.1, global_batch_size=8, **settings)
    settings.name, settings.task = "steps", lambda model: ContrastiveTask(model, LOSSES)
    accelerator = Accelerator(cpu=model.device.type == "cpu", mixed_precision="bf16")
    return training_step(model, settings, accelerator)[0]


def train_stage(batch_size, **settings):
    settings |= {"global_batch_size": batch_size, "max_steps": 1, "learning_rate": 1e-3}
    settings |= {"model": "x", "data": {"source": "symbols", "num_samples": 1}}
    if {"balance_top_k", "balance_mean", "text_router_weight"} & settings.keys():
        settings = {"balance_top_k": None, "balance_mean": "tower", "trainable": "."} | settings
        return TrainRouterStage(name="tuned", stage="train_router", **settings)
    return TrainStage(name="tuned", stage="train", **settings)


def gradient_of(model, stage, batch, accelerator=None, keep=None):
    """Logged values of a batch of this process, and the gradients."""
    accelerator = accelerator or Accelerator(cpu=True)
    task = stage.task(model.train(), SimpleNamespace())
    task.keep = keep
    task = accelerator.prepare(task)
    metrics = _compute_gradient(accelerator, task, iter([batch]), stage, 0, FirstFault("tuned", Path("nowhere")))
    metrics = {name: accelerator.reduce(value, "mean") for name, value in metrics.items()}
    return metrics, {name: gradient.clone() for name, gradient in gradients(model).items() if gradient is not None}


def assert_same_step(found, expected, rtol=1e-5):
    """Equal results of `gradient_of`, up to the rounding of small elements, which are differences of large ones."""
    (metrics, grads), (expected_metrics, expected_grads) = found, expected
    assert max(gradient.abs().max() for gradient in expected_grads.values()) > 1e-3
    assert grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        atol = 1e-7 + rtol * gradient.abs().max().item()
        torch.testing.assert_close(grads[name], gradient, rtol=0, atol=atol, msg=name)
    for compared in (metrics, expected_metrics):
        compared.pop("dropped_tokens", None)  # of texts, a mean of parts
    torch.testing.assert_close(metrics, expected_metrics)
