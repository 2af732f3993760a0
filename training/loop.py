"""The one training loop: step, clip, schedule, log, checkpoint, resume."""

import json
import logging
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, ProcessorMixin, get_cosine_schedule_with_warmup
from transformers.modeling_layers import GradientCheckpointingLayer

from clip_moe.conversion.checkpoints import load_clip
from clip_moe.engine.files import new_file, read_log, save
from clip_moe.engine.messages import join_names, one_line
from clip_moe.engine.program import in_words, peak_memory
from clip_moe.engine.provenance import CHECKPOINTS, LOG, flatten
from clip_moe.engine.settings import dump, refuse
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.progress import progress
from clip_moe.training.optimizers import make_optimizer
from clip_moe.training.task import Task
from clip_moe.training.train_settings import Evaluation, LoopSettings
from clip_moe.training.training_state import (
    after_not_finite,
    kept_random_states,
    latest_checkpoint,
    load_checkpoint,
    plain_name,
    require_finite_weights,
    save_checkpoint,
)
from modeling_clip_moe.expert_kernels import RECOMPILE_LIMIT
from modeling_clip_moe.sparse_moe import SparseEncoderLayer
from modeling_clip_moe.torch_internals import set_recompile_limit

logger = logging.getLogger(__name__)
# Folder of the best model that was measured, before the number of its step; and the file of its score
BEST, SCORE = "best-", "score.json"


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Turn gradient checkpointing on, without a backward pass through layers that lie below all that trains."""
    # The name before transformers 5.23
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    # Reentrant checkpointing would lose the gradient of the router losses without a word.
    enable({"use_reentrant": False})
    # transformers makes the embeddings' output require a gradient, for the reentrant kind. The other needs none.
    model.disable_input_require_grads()


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the encoder layers of a dense or sparse CLIP, one by one: all of a kind share what is compiled."""
    torch.compiler.reset()  # few kinds are kept: those of models before are forgotten
    set_recompile_limit(RECOMPILE_LIMIT)
    for module in model.modules():
        if isinstance(module, SparseEncoderLayer):
            module.compile_parts()
        elif isinstance(module, GradientCheckpointingLayer):
            module.compile()


def train(
    accelerator: Accelerator,
    task: Task,
    batches: Callable[[int], Iterator[dict[str, torch.Tensor]]],
    settings: LoopSettings,
    total_steps: int,
    directory: Path,
    scores: "Scores | None" = None,
) -> dict[str, torch.Tensor]:
    """Train a model, from its last checkpoint in `directory` if there is one.

    Args:
        accelerator: a fresh one: what was prepared with it before would enter the checkpoints.
        task: the model with its loss.
        batches: `batches(start)` yields this process's batches for ever, from batch number `start` of the run.
        total_steps: optimizer steps of the whole run.
        directory: gets `checkpoints/`, which the caller deletes, and `log.jsonl`.
        scores: measures the model now and then.

    Returns:
        The trained model's state dict, gathered from all processes; empty on those that do not save it.

    Raises:
        FloatingPointError: the loss, the gradient or a trained weight is not finite. The checkpoints stay.
    """
    require_processes(settings, task, accelerator)
    start_trackers(accelerator, settings)
    model, checkpoints = task.model, directory / CHECKPOINTS
    latest = latest_checkpoint(checkpoints)
    step = 0 if latest is None else int(latest.name.removeprefix("step-"))
    task, optimizer, scheduler = _prepare(accelerator, task, settings, step, total_steps)
    plain_task = accelerator.unwrap_model(task)
    if latest is not None:
        load_checkpoint(accelerator, task, optimizer, latest)
        accelerator.on_main_process(print)(f"{settings.name}: goes on from step {step}")
    finite = FirstFault(settings.name, checkpoints)
    log = Log(directory / LOG, step, settings.global_batch_size, accelerator, settings.name)
    stream = batches(step * settings.gradient_accumulation_steps)
    first, since_logged = step, []
    bar = progress(settings.name, total_steps, initial=step, shown=accelerator.is_main_process, leave=True)
    while step < total_steps:
        plain_task.progress = step / total_steps
        metrics = _compute_gradient(accelerator, task, stream, settings, step, finite)
        if step == first:
            _warn_without_gradient(accelerator, plain_task, settings.name)
        grad_norm = _clip_gradient(accelerator, task, settings, step, finite)
        learning_rate = max(scheduler.get_last_lr())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        plain_task.after_step(accelerator)
        step += 1
        since_logged.append(metrics)
        is_saved = bool(settings.save_steps) and step % settings.save_steps == 0 and step < total_steps
        # Logged means begin after a checkpoint, so that a resumed run has the same
        is_logged = step == 1 or step % settings.logging_steps == 0 or is_saved or step == total_steps
        is_measured = scores is not None and (step % scores.settings.every_steps == 0 or step == total_steps)
        if is_logged or is_measured:
            finite.require()
        if is_logged:
            values = {name: accelerator.reduce(value, "mean").item() for name, value in _mean(since_logged).items()}
            since_logged.clear()
            values |= {"grad_norm": grad_norm.item(), "learning_rate": learning_rate}
            speed = log.images_per_second(step)
            log.write(step, values | {"images_per_second": speed})
            bar.set_postfix_str(_summary(values, speed), refresh=False)
        bar.update()
        with log.paused():
            if is_measured and (measured := scores.measure(_gather_weights(accelerator, task), step)):
                log.write(step, measured)
            if is_saved:
                save_checkpoint(accelerator, task, optimizer, checkpoints, step, settings.save_total_limit)
        if step == first + 1:
            memory = in_words(peak_memory(accelerator.device))
            accelerator.on_main_process(print)(
                f"{settings.name}: {memory} of memory at most, after one step", flush=True
            )
    bar.close()
    call_trackers(accelerator, lambda tracker: tracker.finish())
    state_dict = _gather_weights(accelerator, task)
    if accelerator.is_main_process and scores is not None and scores.settings.load_best_model_at_end:
        score, folder = scores.best()
        state_dict = load_clip(str(folder), dtype=torch.float32).state_dict()
        after = f"after step {int(folder.name.removeprefix(BEST)):,}"
        print(f"{settings.name}: ends with the weights {after}, of the best mean score, {score:.1%}")
    buffers = dict(model.named_buffers())
    trained = {name: tensor for name, tensor in state_dict.items() if name not in buffers}
    require_finite_weights(trained, f"stage {settings.name}, step {step}", checkpoints)
    return state_dict


def require_processes(settings: LoopSettings, task: Task, accelerator: Accelerator) -> None:
    """Raises a ValueError where FSDP or DeepSpeed cannot train a task, or save its checkpoints."""
    kind, losses = accelerator.distributed_type, list(task.auxiliary_losses)
    is_fsdp, is_deepspeed = kind is DistributedType.FSDP, kind is DistributedType.DEEPSPEED
    readers = [type(loss).__name__ for loss in losses if loss.READS_WEIGHTS]
    refuse(
        (
            is_fsdp and getattr(task.model.config, "shared_encoder", False),
            "FSDP cannot split a shared encoder. Train it with DDP",
        ),
        (is_deepspeed and losses, "DeepSpeed has no auxiliary losses. Use DDP"),
        (is_fsdp and readers, f"{', '.join(readers)} reads whole weights, which FSDP2 splits. Use DDP"),
        (
            is_deepspeed and task.mini_batch_size,
            "mini_batch_size: DeepSpeed does not support it. Use DDP or FSDP2",
        ),
        (
            settings.save_steps and (is_deepspeed or is_fsdp and not accelerator.is_fsdp2),
            "save_steps: FSDP version 1 and DeepSpeed save checkpoints as pickles, which run code when they are read. "
            "Remove save_steps, or split the model with training/accelerate/fsdp2.yaml",
        ),
    )


def _prepare(
    accelerator: Accelerator, task: nn.Module, settings: LoopSettings, step: int, total_steps: int
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The model with its loss and the optimizer, as Accelerate wraps them, and the schedule."""
    model = task.model
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
    if settings.torch_compile is True or settings.torch_compile == "auto" and accelerator.device.type == "cuda":
        compile_layers(model)
    task.train()
    optimizer = make_optimizer(task, settings, accelerator.device)
    warmup = settings.warmup_steps if settings.warmup_steps >= 1 else settings.warmup_steps * total_steps
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # which a schedule that does not start at 0 looks for
    # Not prepared: Accelerate would step the schedule once for every process.
    scheduler = get_cosine_schedule_with_warmup(optimizer, round(warmup), total_steps, last_epoch=step - 1)
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        # It clips by itself, and wants to know the batch, which it does not use
        config = accelerator.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = 1
        config["gradient_clipping"] = settings.max_grad_norm or 0.0
    task, optimizer = accelerator.prepare(task, optimizer)
    return task, optimizer, scheduler


def _compute_gradient(
    accelerator: Accelerator,
    task: nn.Module,
    stream: Iterator[dict[str, torch.Tensor]],
    settings: LoopSettings,
    step: int,
    finite: "FirstFault",
) -> dict[str, torch.Tensor]:
    """Add up the gradients of the batches of a step, and return the mean of what they log."""
    accumulation, logged = settings.gradient_accumulation_steps, []
    plain_task = accelerator.unwrap_model(task)
    for micro_step in range(accumulation):
        # Gradients are averaged over the processes once a step
        is_last = micro_step == accumulation - 1
        loss, metrics = plain_task.add_gradient(accelerator, task, next(stream), accumulation, is_last)
        finite.note("the loss", loss, step + 1)
        logged.append(metrics)
    return _mean(logged)


def _mean(metrics: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([values[name].float() for values in metrics]).mean(dim=0) for name in metrics[-1]}


def _warn_without_gradient(accelerator: Accelerator, task: nn.Module, stage: str) -> None:
    """Warn of trainable weights that no loss depends on: they stay as they are."""
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return  # gradients are elsewhere, or split
    trainable = {plain_name(name).removeprefix("model."): p for name, p in task.named_parameters() if p.requires_grad}
    without = [name for name, parameter in trainable.items() if parameter.grad is None]
    if without and accelerator.is_main_process:
        message = "%s: %d of %d trainable weights got no gradient and stay as they are: %s"
        logger.warning(message, stage, len(without), len(trainable), join_names(without))


def _clip_gradient(
    accelerator: Accelerator, task: nn.Module, settings: LoopSettings, step: int, finite: "FirstFault"
) -> torch.Tensor:
    """The norm that the gradient had."""
    parameters = [p for p in task.parameters() if p.requires_grad]
    grad_norm = torch.as_tensor(accelerator.clip_grad_norm_(parameters, settings.max_grad_norm or math.inf))
    if isinstance(grad_norm, DTensor):  # of FSDP2
        grad_norm = grad_norm.full_tensor()
    if accelerator.scaler is None:
        # With a loss scaler an overflowing gradient is normal: the scaler skips the step and lowers its scale.
        finite.note("the gradient", grad_norm, step + 1)
    return grad_norm


def _gather_weights(accelerator: Accelerator, task: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the model of a prepared task, to be saved; empty on processes that do not save it."""
    state_dict = accelerator.get_state_dict(task) or {}  # what is gathered is often on the main process alone
    named = ((plain_name(name), value) for name, value in state_dict.items())
    # Others are what a loss keeps
    state_dict = {name.removeprefix("model."): value for name, value in named if name.startswith("model.")}
    return accelerator.unwrap_model(task).exported(state_dict) if state_dict else {}


def start_trackers(accelerator: Accelerator, settings: LoopSettings) -> None:
    """Start the trackers that the recipe names, if any."""
    flat = flatten(dump(settings))
    try:
        plain = {key: str(value) if isinstance(value, list) else value for key, value in flat.items()}
        accelerator.init_trackers("clip_moe", config=plain)
    except Exception as error:  # every tracker raises its own
        raise ValueError(f"trackers: {', '.join(map(str, accelerator.log_with))} cannot start: {error}") from error


def call_trackers(accelerator: Accelerator, call: Callable[[GeneralTracker], None]) -> None:
    """Call every tracker. One that fails is left out from then on: `log.jsonl` holds what it lacks."""
    for tracker in list(accelerator.trackers) if accelerator.is_main_process else ():
        try:
            call(tracker)
        except Exception as error:  # every tracker raises its own
            accelerator.trackers.remove(tracker)
            reason = one_line(f"{type(error).__name__}: {error}")
            message = "the tracker %s failed; training continues without it (log.jsonl has everything): %.300s"
            logger.warning(message, tracker.name, reason)


class Log:
    """`log.jsonl`, one line a logged step, and the trackers."""

    def __init__(self, path: Path, step: int, batch_size: int, accelerator: Accelerator, stage: str):
        self.path, self.accelerator, self.stage = path, accelerator, stage
        self.first, self.batch_size, self.started = step, batch_size, time.perf_counter()
        if accelerator.is_main_process:
            # A run that was killed may have logged steps after its last checkpoint, which are about to be done again.
            lines = read_log(path) if step and path.exists() else []
            kept = [f"{json.dumps(line)}\n" for line in lines if line["step"] <= step]
            with new_file(path) as partial:
                partial.write_text("".join(kept), encoding="utf-8")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No image is trained on meanwhile, and the time does not count."""
        started = time.perf_counter()
        yield
        self.started += time.perf_counter() - started

    def images_per_second(self, step: int) -> float:
        """The speed since the beginning of this attempt, without the time of scores and checkpoints."""
        return float(f"{(step - self.first) * self.batch_size / (time.perf_counter() - self.started):.8g}")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log the values of a step, or what the model scores after it."""
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        # MLflow takes no other signs: `recall@1` is `recall_1` in all trackers
        named = {re.sub(r"[^\w./ -]", "_", f"{self.stage}/{name}"): value for name, value in values.items()}
        call_trackers(self.accelerator, lambda tracker: tracker.log(named, step=step))


def _summary(values: dict[str, float], images_per_second: float) -> str:
    parts = [f"loss {values['loss']:.3f}"]
    if "balance_loss" in values:
        parts += [f"balance {values['balance_loss']:.2f}", f"dropped {values['dropped_tokens']:.1%}"]
    return ", ".join([*parts, f"{images_per_second:.0f} images/s"])


class FirstFault:
    """The first loss or gradient of a run that is not finite. Values stay on the device, which nothing waits for, until
    something is to be kept: a line of the log, a score or a checkpoint."""

    def __init__(self, stage: str, checkpoints: Path):
        self.stage, self.checkpoints = stage, checkpoints
        self.noted: list[tuple[str, torch.Tensor]] = []

    def note(self, quantity: str, value: torch.Tensor, step: int) -> None:
        self.noted.append((f"step {step}: {quantity}", value.detach()))

    def require(self) -> None:
        """Raises a FloatingPointError with the first fault, if there is one."""
        values = torch.stack([value.float().reshape(()) for _, value in self.noted]).tolist()
        for (name, _), value in zip(self.noted, values, strict=True):
            if not math.isfinite(value):
                advice = after_not_finite(self.checkpoints)
                raise FloatingPointError(f"stage {self.stage}, {name} is {value}. {advice}")
        self.noted.clear()


class Scores:
    """Measures the model of a stage now and then.

    Args:
        folder: holds the model while it is measured.
    """

    def __init__(
        self,
        settings: Evaluation,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        accelerator: Accelerator,
        folder: Path,
    ):
        self.settings, self.model, self.processor, self.accelerator = settings, model, processor, accelerator
        self.folder, self.tasks = folder / "measured.partial", settings.open_tasks()

    def measure(self, state_dict: dict[str, torch.Tensor], step: int) -> dict[str, float]:
        """`TASK/METRIC` -> score of the model with these weights. All processes take part; those but the main one get
        nothing. Measuring draws no random numbers of training. With `load_best_model_at_end`, the best model is kept.
        """
        scores = {}
        if self.accelerator.is_main_process:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            save(self.model, self.folder, state_dict=state_dict)
            save(self.processor, self.folder)
            size, device = self.settings.batch_size, self.accelerator.device
            with kept_random_states(device), tempfile.TemporaryDirectory() as results:
                measured = evaluate_model(
                    self.folder, self.tasks, results, name="model", batch_size=size, device=device
                )
            for name, result in zip(self.tasks, measured, strict=True):
                scores |= {f"{name}/{metric}": score for metric, score in result["metrics"].items()}
            if self.settings.load_best_model_at_end:
                self._keep_if_best(mean(mean(r["metrics"][name] for name in r["primary"]) for r in measured), step)
            shutil.rmtree(self.folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return scores

    def _keep_if_best(self, score: float, step: int) -> None:
        """Keeps the measured model instead of the best so far. A kill leaves one of the two, or both."""
        known = self.best()
        if known is None or score > known[0]:
            (self.folder / SCORE).write_text(json.dumps(score), encoding="utf-8")
            kept = self.folder.with_name(f"{BEST}{step:08}")
            shutil.rmtree(kept, ignore_errors=True)
            self.folder.rename(kept)
            if known is not None and known[1] != kept:
                shutil.rmtree(known[1])

    def best(self) -> tuple[float, Path] | None:
        """The highest mean score, and the folder of its model."""
        files = self.folder.parent.glob(f"{BEST}*/{SCORE}")  # a kill may leave a folder without it
        return max(((json.loads(file.read_text(encoding="utf-8")), file.parent) for file in files), default=None)
