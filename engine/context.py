"""What the stages of one run share: processes, seed, data, and where stages lie. Importing it imports nothing heavy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_moe.data.arguments import DataArguments
from clip_moe.data.worlds import is_world
from clip_moe.engine.provenance import LOGS, MANIFEST

if TYPE_CHECKING:
    import datasets
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from transformers import PreTrainedTokenizerBase

    from clip_moe.training.duplicates import Duplicates


@dataclass(frozen=True)
class Context:
    """What the stages of one run share.

    Args:
        stages: names by which settings refer to stages, see `Recipe.stage_names`.
        alone: whether only the main process runs, so that nothing may synchronize with the others.
        rehearses: whether the stages are those of a rehearsal, with few samples.
    """

    output_dir: Path
    accelerator: Accelerator
    stages: frozenset[str] = frozenset()
    seed: int = 0
    mixed_precision: str | None = None
    trackers: tuple[str, ...] = ()
    alone: bool = False
    rehearses: bool = False
    # Bytes of samples that the running stage holds in memory, by kind
    held: dict[str, int] = field(default_factory=dict)
    # The last pairs and the last duplicates that were asked for, by their keys: most stages of a recipe use the same
    _last: dict[str, tuple[str, Any]] = field(default_factory=dict)
    # Identities of the data of the stage that runs: data may change between two stages
    _identities: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    def folder(self, reference: str) -> str:
        """The folder or hub name that a setting names: an earlier stage, a folder or a hub name."""
        return str(self.output_dir / reference) if reference in self.stages else reference

    def is_there(self, reference: str) -> bool:
        """Whether what a setting names is no stage, or one that has finished."""
        return reference not in self.stages or (self.output_dir / reference / MANIFEST).is_file()

    def resolve(self, arguments: DataArguments) -> DataArguments:
        """With the folder as the source where that is a stage."""
        return dataclasses.replace(arguments, source=self.folder(arguments.source))

    def pairs(self, arguments: DataArguments, images: bool = True) -> datasets.Dataset | datasets.IterableDataset:
        """See `data.pairs.load_pairs`; the source may be a captions stage. Every process has to ask."""
        from clip_moe.data.pairs import load_pairs

        arguments = self.resolve(arguments)
        key = f"{arguments} {self.identity(arguments)} {images}"
        rows = self._kept("pairs", key, lambda: load_pairs(arguments, images))
        if is_world(arguments.source):  # others are mapped from files
            self.held["drawn"] = rows.data.nbytes
        return rows

    def readable(self, rows: datasets.Dataset, arguments: DataArguments) -> datasets.Dataset:
        """The pairs with a readable image, of pairs that were loaded without images. Every process has to ask."""
        from clip_moe.data.readable import readable_pairs

        if is_world(arguments.source):
            return rows
        with self._main_process_first():
            return readable_pairs(rows, arguments)[0]

    def data_fingerprint(self, rows: datasets.Dataset, images: bool = True) -> str:
        """See `data.identity.data_fingerprint`. Every process has to ask, as one reads while the others wait."""
        from clip_moe.data.identity import data_fingerprint

        with self._main_process_first():
            return data_fingerprint(rows, images)

    def duplicates(self, rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> Duplicates:
        """See `training.duplicates.Duplicates.of`. Every process has to ask, as one reads while the others wait."""
        from datasets.fingerprint import Hasher

        from clip_moe.data.identity import named_files_stamp
        from clip_moe.training.duplicates import Duplicates

        key = Hasher.hash(
            [rows._fingerprint, rows.column_names, named_files_stamp(rows) if "image" in rows.column_names else ""]
            + [sorted(tokenizer.get_vocab().items()), tokenizer.model_max_length]
        )
        return self._kept("duplicates", key, lambda: Duplicates.of(rows, tokenizer))

    def identity(self, arguments: DataArguments) -> dict[str, Any] | None:
        """See `data.identity.identity`. Every process has to ask."""
        from clip_moe.data.identity import identity

        arguments = self.resolve(arguments)
        key = str(arguments)
        if key not in self._identities:
            with self._main_process_first():
                self._identities[key] = identity(arguments)
        return self._identities[key]

    def forget_identities(self) -> None:
        """Data may have changed since they were looked at."""
        self._identities.clear()

    def without_others(self) -> Context:
        """A copy for the main process while the others wait. Its caches are its own: the others have not read yet."""
        return dataclasses.replace(self, alone=True, _last=dict(self._last), _identities=dict(self._identities))

    def new_accelerator(self) -> Accelerator:
        """Another `Accelerator` of the same processes: what was prepared with one enters its checkpoints."""
        return make_accelerator(self.output_dir, self.mixed_precision, self.trackers)

    def _kept(self, what: str, key: str, make: Callable[[], Any]) -> Any:
        """What was asked for last, or is made now."""
        if what not in self._last or self._last[what][0] != key:
            self._last.pop(what, None)  # before there are two in memory
            with self._main_process_first():
                self._last[what] = key, make()
        return self._last[what][1]

    def _main_process_first(self):
        """The main process fills the caches that the others read."""
        return nullcontext() if self.alone else self.accelerator.main_process_first()


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
            f"DeepSpeed's gradient_accumulation_steps is {steps}, by its configuration or "
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS: set it to 1, and gradient_accumulation_steps in the recipe"
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
        raise ValueError(f"trackers: {', '.join(missing)} cannot be imported; install it, or leave it out")
    # With ZeRO-3, transformers would split every model as it is built, also one that a single process builds
    unset_hf_deepspeed_config()
    return accelerator
