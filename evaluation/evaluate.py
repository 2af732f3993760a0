"""Measure a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed

from clip_moe.conversion.checkpoints import model_configs
from clip_moe.engine.files import output_folder
from clip_moe.engine.local_names import paths_here
from clip_moe.engine.own_modules import code_of_models
from clip_moe.engine.provenance import environment, weights_fingerprint
from clip_moe.evaluation.embedder import usable_device
from clip_moe.evaluation.ensemble import open_model
from clip_moe.evaluation.measures import measure
from clip_moe.evaluation.results import write_result
from clip_moe.evaluation.task import Task
from modeling_clip_moe.families import TOWER_CONFIGS


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
        tasks: name -> task; see `clip_moe.evaluation.tasks.find_tasks`.
        name: the model's name in reports; default: its folder's or repository's.
        device: default: the accelerator, if there is one.
        changes: see `clip_moe.evaluation.ensemble.Ensemble`.
        num_workers, state: see `Embedder`. Of several processes, the main one alone writes results.
    """
    set_seed(0)
    name = name or (Path(model).resolve() if Path(model).is_dir() else Path(model)).name
    output_dir, device = Path(output_dir), usable_device(device)
    kept = output_dir / "embeddings"
    options = {"dtype": dtype, "num_workers": num_workers, "state": state}
    opened = open_model(model, kept, batch_size, device, changes, **options)
    about_model = {
        "source": str(model),
        "weights": weights_fingerprint(model),
        "code": code_of_models(),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "batch_size": batch_size,
        "seed": 0,
    }
    towers = [getattr(config, tower, None) for config in model_configs(model) for tower in TOWER_CONFIGS]
    if any(getattr(tower, "eval_capacity_factor", None) is not None for tower in towers):
        about_model["depends_on_batch"] = True  # the capacity of experts is shared by a batch
    if changes:
        about_model["changes"] = dict(changes)
    results = []
    with output_folder(output_dir):
        for key, task in tasks.items():
            result = {"model": name, "task": key, "protocol": task.protocol, "title": task.title, "data": task.data}
            result |= measure(task, opened)
            result |= {"primary": task.primary, **about_model, **environment(), "local": paths_here(task.data)}
            if state is None or state.is_main_process:
                write_result(result, output_dir)
            results.append(result)
    return results
