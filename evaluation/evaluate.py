"""Measure a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed

from conversion.checkpoints import model_configs
from evaluation.embedder import usable_device
from evaluation.ensemble import open_model
from evaluation.measures import measure
from evaluation.results import require_free, write_result
from evaluation.task import Task
from modeling_clip_moe.families import TOWER_CONFIGS
from records.files import output_folder
from records.local_names import paths_here
from records.provenance import environment, weights_fingerprint


def evaluate_model(
    model: str | Path,
    tasks: Mapping[str, Task],
    output_dir: str | Path,
    *,
    name: str | None = None,
    batch_size: int = 64,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    changes: Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    state: PartialState | None = None,
) -> list[dict[str, Any]]:
    """Measure a model on tasks; each result is also written to `output_dir/TASK--NAME.json`.

    Args:
        model: a folder or hub name.
        tasks: name -> task; see `evaluation.tasks.find_tasks`.
        name: what the model is called in reports; default: its folder's or repository's name.
        device: default: the accelerator, if there is one.
        changes: what a mixture is measured with in place of its own configuration, see `require_changes`.
        num_workers, state: see `Embedder`. Of several processes, the main one alone writes results.

    Returns:
        One result a task: the metrics and all it takes to know what they mean.

    Raises:
        ValueError: there is a result of other weights, another dtype, another protocol or other changes under
            the same name, or of another batch size where scores depend on it.
    """
    set_seed(0)
    name = name or (Path(model).resolve() if Path(model).is_dir() else Path(model)).name
    output_dir, device = Path(output_dir), usable_device(device)
    reading = {"num_workers": num_workers, "state": state}
    opened = open_model(model, output_dir / "embeddings", batch_size, device, dtype, changes=changes, **reading)
    of_model = {
        "source": str(model),
        "weights": weights_fingerprint(model),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "batch_size": batch_size,
        "seed": 0,
        **({"depends_on_batch": True} if _depends_on_batch(model) else {}),
        **({"changes": dict(changes)} if changes else {}),
    }
    names = {}
    for key, task in tasks.items():  # before the work
        names[key] = {"model": name, "task": key, "protocol": task.protocol}
        require_free(names[key] | {"data": task.data} | of_model, output_dir)
    results = []
    with output_folder(output_dir):
        for key, task in tasks.items():
            result = names[key] | {"title": task.title, "data": task.data, **measure(task, opened)}
            if task.data_now is not None and task.data_now() != task.data:
                raise ValueError(f"{key}: its data changed while {name} was measured on them: measure it again")
            result |= {"primary": task.primary, **of_model, **environment(), "local": paths_here(task.data)}
            if state is None or state.is_main_process:
                write_result(result, output_dir)
            results.append(result)
    return results


def _depends_on_batch(model: str | Path) -> bool:
    """Whether experts have a capacity, so that what else is in a batch counts."""
    towers = [getattr(config, tower, None) for config in model_configs(model) for tower in TOWER_CONFIGS]
    return any(getattr(tower, "eval_capacity_factor", None) is not None for tower in towers)
