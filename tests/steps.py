"""Single steps of the training loop, without its log and checkpoints."""

from pathlib import Path
from types import SimpleNamespace

from accelerate import Accelerator

from training import engine
from training.contrastive_task import ContrastiveTask
from training.engine import FirstFault, LoopSettings
from training.losses import contrastive_loss, router_losses

LOSSES = SimpleNamespace(
    contrastive_loss=lambda images, texts, scale, pairing: contrastive_loss(images, texts, scale),
    router_loss=router_losses,
)


def steps_of(model, **settings):
    """A function that takes one training step on a batch."""
    settings = LoopSettings(learning_rate=1e-3, weight_decay=0.1, global_batch_size=8, ema_decay=0.9, **settings)
    settings.name, settings.task = "steps", lambda model: ContrastiveTask(model, LOSSES)
    accelerator = Accelerator(cpu=model.device.type == "cpu", mixed_precision="bf16")
    task, optimizer, scheduler = engine._prepare(accelerator, model, settings, 0, 10)
    average, finite = engine._weight_average(accelerator, task, settings), FirstFault("steps", Path("nowhere"))

    def step(batch):
        engine._compute_gradient(accelerator, task, model, iter([batch]), settings, (0, 0), finite)
        engine._clip_gradient(accelerator, task, settings, 0, finite)
        engine._take_step(optimizer, scheduler, model, settings, average)

    return step
