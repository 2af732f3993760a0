"""Measure a model.

    python -m evaluation.evaluate --model runs/demo/clip_moe --tasks symbols_zero_shot,symbols_pairs --output-dir scores
    python -m evaluation.evaluate --model FOLDER --tasks retrieval --dataset my/dataset --split test --output-dir scores

Embeddings are computed once for every model and dataset and kept in OUTPUT_DIR/embeddings.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import set_seed

from conversion.files import one_line_errors, output_folder
from conversion.provenance import environment, model_fingerprint, weights_fingerprint
from evaluation.embedder import usable_device
from evaluation.ensemble import CHANGES, open_model
from evaluation.measures import measure
from evaluation.results import named_folder, require_free, task_name, write_result
from evaluation.task import PRIMARY_METRICS
from evaluation.tasks import (
    OWN_TASKS,
    TASKS,
    Task,
    add_own_data_options,
    own_tasks,
    parse_tasks,
    require_tasks,
)


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
) -> list[dict[str, Any]]:
    """Measure a model on tasks; each result is also written to `output_dir/TASK--NAME.json`.

    Args:
        model: a folder or hub name.
        tasks: name -> task; see `evaluation.tasks.find_tasks`, and `evaluation.results.task_name` for names in results.
        name: what the model is called in reports; default: its folder's or repository's name.
        device: default: the accelerator, if there is one.
        changes: what a mixture is measured with in place of its own configuration, see `require_changes`.

    Returns:
        One result a task: the metrics and all it takes to know what they mean.

    Raises:
        OSError: the output folder cannot be made.
        ValueError: a device that cannot compute, an empty name, or a result of other weights, another dtype, another
            protocol or other changes under the same name; else as `evaluation.ensemble.open_model`.
    """
    set_seed(0)
    name, output_dir, device = _model_name(model, name), Path(output_dir), usable_device(device)
    opened = open_model(model, output_dir / "embeddings", batch_size, device, dtype, changes=changes)
    of_model = {
        "source": str(model),
        "fingerprint": model_fingerprint(str(model)),
        "weights": weights_fingerprint(str(model)),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "batch_size": batch_size,
        "seed": 0,
        **({"changes": dict(changes)} if changes else {}),
    }
    names = {
        key: {"model": name, "task": task_name(key, task.data), "protocol": task.protocol}
        for key, task in tasks.items()
    }
    for of_task in names.values():  # before the work
        require_free(of_task | of_model, output_dir)
    results = []
    with output_folder(output_dir):
        for key, task in tasks.items():
            result = names[key] | {"title": task.title, "data": task.data, **measure(task, opened)}
            result |= {"primary": PRIMARY_METRICS[task.kind], **of_model, **environment()}
            write_result(result, output_dir)
            results.append(result)
    return results


def _change(text: str) -> tuple[str, Any]:
    """The type of an argument NAME=VALUE, whose value is read as YAML."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, yaml.safe_load(value)


def _model_name(model: str | Path, name: str | None) -> str:
    if name is None:
        name = (Path(model).resolve() if Path(model).is_dir() else Path(model)).name
    if not name.strip():
        raise ValueError(f"a model needs a name, not {name!r}")
    return name


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="folder or hub name of a CLIPModel, CLIPMoEModel or CLIPMoDEModel"
    )
    parser.add_argument("--tasks", required=True, help=f"{', '.join(TASKS)}; or with --dataset: {', '.join(OWN_TASKS)}")
    parser.add_argument("--output-dir", required=True, type=named_folder)
    parser.add_argument("--name", help="what reports call the model (default: its folder's name)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument(
        "--change",
        nargs="+",
        type=_change,
        default=[],
        metavar="NAME=VALUE",
        help=f"of a mixture, in place of its own configuration: {', '.join(CHANGES)}",
    )
    parser.add_argument("--device", help="default: the accelerator, if there is one")
    add_own_data_options(parser)
    args = parser.parse_args(argv)
    with one_line_errors():
        names = parse_tasks(args.tasks)
        require_tasks(names, [*TASKS, *OWN_TASKS])
        tasks = TASKS | own_tasks(names, args)
        results = evaluate_model(
            args.model,
            {name: tasks[name] for name in names},
            args.output_dir,
            name=args.name,
            batch_size=args.batch_size,
            device=args.device,
            dtype=getattr(torch, args.dtype),
            changes=dict(args.change),
        )
    for result in results:
        numbers = ", ".join(f"{metric} {value:.1%}" for metric, value in result["metrics"].items())
        print(f"{result['task']} ({result['num_samples']} samples, {result['num_skipped']} skipped): {numbers}")


if __name__ == "__main__":
    main()
