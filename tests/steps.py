"""Single steps of the training loop, without its log and checkpoints."""

from types import SimpleNamespace

from accelerate import Accelerator

from benchmarks.steps import training_step
from training.contrastive_task import ContrastiveTask
from training.losses import contrastive_loss, router_losses
from training.train_settings import LoopSettings

LOSSES = SimpleNamespace(
    contrastive_loss=lambda images, texts, scale, pairing: contrastive_loss(images, texts, scale),
    router_loss=router_losses,
)


def steps_of(model, **settings):
    """A function that takes one training step on a batch."""
    settings = LoopSettings(learning_rate=1e-3, weight_decay=0.1, global_batch_size=8, ema_decay=0.9, **settings)
    settings.name, settings.task = "steps", lambda model: ContrastiveTask(model, LOSSES)
    accelerator = Accelerator(cpu=model.device.type == "cpu", mixed_precision="bf16")
    return training_step(model, settings, accelerator)[0]
