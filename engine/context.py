"""Shared by the stages of one run: processes, seed, and the folders of stages. Importing it imports nothing heavy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_moe.engine.provenance import LOGS, MANIFEST
from clip_moe.engine.settings import Source

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin


@dataclass(frozen=True)
class Context:
    """Shared by the stages of one run.

    Args:
        new_accelerator: makes another `Accelerator` of the same processes: what was prepared with one enters its
            checkpoints.
        stages: names by which settings refer to stages, see `Recipe.stage_names`.
        alone: whether only the main process runs, so that nothing may synchronize with the others.
        rehearses: whether the stages are those of a rehearsal, with few samples.
    """

    output_dir: Path
    accelerator: Accelerator
    new_accelerator: Callable[[], Accelerator]
    stages: frozenset[str]
    seed: int
    alone: bool = False
    rehearses: bool = False
    # Bytes of samples that the running stage holds in memory, by kind
    sample_bytes: dict[str, int] = field(default_factory=dict)
    # See `kept`: kind -> key and object
    _last: dict[str, tuple[str, Any]] = field(default_factory=dict)
    # Identities of the data of the stage that runs: data may change between two stages
    _identities: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    def folder(self, reference: str) -> str:
        """The folder or hub name that a setting names: an earlier stage, a folder or a hub name."""
        return str(self.output_dir / reference) if reference in self.stages else reference

    def is_there(self, reference: str) -> bool:
        """True unless `reference` is an unfinished stage."""
        return reference not in self.stages or (self.output_dir / reference / MANIFEST).is_file()

    def resolve(self, source: Source) -> Source:
        """Samples with the folder as their source where that is a stage."""
        return source if source.is_drawn else dataclasses.replace(source, source=self.folder(source.source))

    def identity(self, source: Source) -> dict[str, Any] | None:
        """`Source.identity`, computed once for a stage. Every process has to ask."""
        source = self.resolve(source)
        key = str(source)
        if key not in self._identities:
            with self.main_process_first():
                self._identities[key] = source.identity()
        return self._identities[key]

    def forget_identities(self) -> None:
        """Data may have changed since they were looked at."""
        self._identities.clear()

    def kept(self, kind: str, key: str, make: Callable[[], Any]) -> Any:
        """Cached object of this kind if its key matches, else a new one from `make`: most stages of a recipe use the
        same. Every process has to ask."""
        if kind not in self._last or self._last[kind][0] != key:
            self._last.pop(kind, None)  # before there are two in memory
            with self.main_process_first():
                self._last[kind] = key, make()
        return self._last[kind][1]

    def main_process_first(self) -> AbstractContextManager:
        """The main process fills the caches that the others read."""
        return nullcontext() if self.alone else self.accelerator.main_process_first()

    def without_others(self) -> Context:
        """A copy for the main process while the others wait. Its caches are its own: the others have not read yet."""
        return dataclasses.replace(self, alone=True, _last=dict(self._last), _identities=dict(self._identities))


def choose_precision(mixed_precision: str | None) -> str | None:
    """The recipe's precision, else that of `accelerate launch` or its configuration (None). If none of them sets one,
    bf16 on GPUs that support it."""
    import torch

    if mixed_precision is not None or os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        return mixed_precision
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported(False) else None


def require_no_accumulation(plugin: DeepSpeedPlugin | None) -> None:
    """Raises a ValueError if DeepSpeed would accumulate gradients by its own count: the recipe has a setting for it."""
    steps = 1 if plugin is None else plugin.gradient_accumulation_steps
    if steps not in (1, "auto"):
        raise ValueError(
            f"DeepSpeed's gradient_accumulation_steps is {steps} (from its configuration or "
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS): set it to 1, and use gradient_accumulation_steps of the recipe"
        )


def make_accelerator(
    output_dir: str | Path, mixed_precision: str | None = None, trackers: tuple[str, ...] = ()
) -> Accelerator:
    """An `Accelerator` as a recipe wants it, on the CPU where there is nothing else.

    Args:
        mixed_precision: see `choose_precision`.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import (
        GradientAccumulationPlugin,
        InitProcessGroupKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    accelerator = Accelerator(
        # Without it, Accelerate starts several processes on a machine without a GPU and connects none of them.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=choose_precision(mixed_precision),
        log_with=list(trackers) or None,
        # Accelerate's variables would divide each gradient and compile models, and no record would say so
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_plugin=TorchDynamoPlugin(backend="no"),
        # Not beside the stages, one of which may be called as the trackers' project
        project_config=ProjectConfiguration(str(output_dir), logging_dir=str(Path(output_dir) / LOGS)),
        # The other processes wait while the first one evaluates or writes.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=12))],
    )
    require_no_accumulation(accelerator.state.deepspeed_plugin)
    missing = sorted(set(trackers) - {"all", *map(str, accelerator.log_with)})
    if missing:
        raise ValueError(f"trackers: cannot import {', '.join(missing)}; install it or remove it")
    # With ZeRO-3, transformers would split every model as it is built, also one that a single process builds
    unset_hf_deepspeed_config()
    return accelerator
