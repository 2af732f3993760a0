"""Checkpoints of a training run: safetensors and JSON, which run no code when they are read. Accelerate's own are
pickles.

`step-N/` holds `model.safetensors` with the parameters and persistent buffers, `optimizer.safetensors`, `state.json`
and, for each process, `random_states_RANK.json`.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from clip_moe.engine.digests import file_digest, value_digest
from clip_moe.engine.messages import one_line
from clip_moe.training.optimizers import make_states


def torch_states(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's generators: the CPU's, and that of another device."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state()]


def set_torch_states(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu" and len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1])


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators, as JSON can hold them."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": [state.tolist() for state in torch_states(device)],
    }


@contextmanager
def kept_random_states(device: torch.device) -> Iterator[None]:
    """Random numbers that are drawn in the block do not change those that are drawn after it."""
    states = random_states(device)
    try:
        yield
    finally:
        set_random_states(states, device)


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    set_torch_states([torch.tensor(state, dtype=torch.uint8) for state in states["torch"]], device)


MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, RANDOM_STATES = "state.json", "random_states"


def save_checkpoint(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoints: Path,
    step: int,
    limit: int,
) -> Path:
    """Write `step-N` of a prepared model and optimizer whole or not at all, then delete all but the newest `limit`."""
    partial, final = checkpoints / f"step-{step:08d}.partial", checkpoints / f"step-{step:08d}"
    parameters, buffers = _named_tensors(accelerator, model)
    # Copies: one may be a view of a weight, which a file of safetensors cannot hold beside it
    copies = {name: buffer.clone().contiguous() for name, buffer in buffers.items()}
    tensors = {MODEL: parameters | copies, OPTIMIZER: _moments(parameters, optimizer)}
    tensors = {name: _full_tensors(accelerator, file_tensors) for name, file_tensors in tensors.items()}
    for file_tensors in tensors.values():
        trained = {name: tensor for name, tensor in file_tensors.items() if name not in buffers}
        require_finite_weights(trained, f"step {step}", checkpoints)  # a buffer may well be infinite
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    _write(partial / f"{RANDOM_STATES}_{accelerator.process_index}.json", random_states(accelerator.device))
    if accelerator.is_main_process:
        for name, file_tensors in tensors.items():
            save_file(file_tensors, partial / name)
        digests = {name: file_digest(partial / name) for name in tensors}
        scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
        state = {"step": step, "num_processes": accelerator.num_processes, "scaler": scaler}
        trained = [name for name, parameter in parameters.items() if optimizer.optimizer.state.get(parameter)]
        state |= {"trained": trained, "sha256": digests}
        _write(partial / STATE, state)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(partial, final)
        for old in _finished(checkpoints)[:-limit]:
            shutil.rmtree(old.rename(old.with_suffix(".partial")))  # a kill leaves none that looks whole
    accelerator.wait_for_everyone()
    return final


@torch.no_grad()
def load_checkpoint(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Path,
) -> None:
    """Put what `save_checkpoint` wrote into a prepared model and optimizer, and set the random states."""
    parameters, buffers = _named_tensors(accelerator, model)
    state = _read(checkpoint / STATE)
    make_states(optimizer.optimizer)
    for name in parameters.keys() - set(state["trained"]):
        optimizer.optimizer.state.pop(parameters[name], None)
    files = {MODEL: parameters | buffers, OPTIMIZER: _moments(parameters, optimizer)}
    for file, there in files.items():
        stored = _read(checkpoint / file)
        if state["sha256"][file] != file_digest(checkpoint / file):
            _give_up(checkpoint, f"{file} is not what was written with its {STATE}")
        if unknown := sorted(stored.keys() ^ there.keys()):
            _give_up(checkpoint, f"{file} is of another model or optimizer: {', '.join(unknown[:3])}")
        for name, tensor in there.items():
            value = stored[name].to(tensor.device)
            if isinstance(tensor, DTensor):  # of FSDP2
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            tensor.copy_(value)
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    if state["num_processes"] == accelerator.num_processes:
        path = checkpoint / f"{RANDOM_STATES}_{accelerator.process_index}.json"
        set_random_states(_read(path), accelerator.device)
    else:
        accelerator.on_main_process(print)(
            f"warning: {checkpoint} is from {state['num_processes']} processes, but there are now "
            f"{accelerator.num_processes}: dropout and the router's noise will use other random numbers"
        )


def latest_checkpoint(checkpoints: Path) -> Path | None:
    finished = _finished(checkpoints)
    return finished[-1] if finished else None


def after_not_finite(checkpoints: Path) -> str:
    """Advice after a number became non-finite."""
    latest = latest_checkpoint(checkpoints)
    if latest is None:
        return "No checkpoint was written before it. Lower the learning rate, or check the data before it"
    return (
        "Lower the learning rate, or fix the data before it, and start the stage again: delete "
        f"{checkpoints.parent}, or choose another output folder. The same command would resume from {latest}"
    )


def require_finite_weights(tensors: dict[str, torch.Tensor], after: str, checkpoints: Path) -> None:
    """Raise a FloatingPointError that names the step (`after`), and the `checkpoints` before it."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise FloatingPointError(f"{after}: {name} is not finite after the step. {after_not_finite(checkpoints)}")


def _finished(checkpoints: Path) -> list[Path]:
    return sorted(path for path in checkpoints.glob("step-*") if path.suffix != ".partial")


def _named_tensors(
    accelerator: Accelerator, model: nn.Module
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Parameters and persistent buffers. Where processes have different buffers, those of the main process are kept."""
    model = accelerator.unwrap_model(model)
    persistent = model.state_dict().keys()
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    return parameters, {plain_name(name): buffer for name, buffer in model.named_buffers() if name in persistent}


def _moments(parameters: dict[str, nn.Parameter], optimizer) -> dict[str, torch.Tensor]:
    """The prepared optimizer's state of the parameters that had a gradient."""
    states = {name: optimizer.optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}


def plain_name(name: str) -> str:
    """The name of a parameter without what torch.compile, which Accelerate may call, adds to it."""
    return name.replace("_orig_mod.", "")


def _full_tensors(accelerator: Accelerator, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors on the CPU of the main process, those that FSDP2 splits put together; nothing elsewhere."""
    full = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # all processes take part
        if accelerator.is_main_process:
            full[name] = tensor.cpu().contiguous()
    return full


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write a record with its hash: a damaged random state would give other numbers, or kill the process."""
    path.write_text(json.dumps(record | {"seal": value_digest(record)}), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    """A file of a checkpoint."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        record = json.loads(path.read_text(encoding="utf-8"))
        seal = record.pop("seal", None) if isinstance(record, dict) else None
    except (OSError, SafetensorError, ValueError) as error:
        _give_up(path.parent, f"{path.name} is damaged: {one_line(error)}")
    if seal != value_digest(record):
        _give_up(path.parent, f"{path.name} is not what was written")
    return record


def _give_up(checkpoint: Path, reason: str) -> NoReturn:
    raise ValueError(
        f"cannot resume from the checkpoint {checkpoint}: {reason}. Delete it to resume from the one before it, if "
        "save_total_limit kept one, or to start again"
    )
