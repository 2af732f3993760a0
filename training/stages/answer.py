"""The stage that says what fine-tuning came to."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from evaluation.own_task import Wanted
from training.context import Context
from training.settings import STRICT
from training.stages.base import Data
from training.stages.evaluate import EvaluateStage

# Folders of bundled models -> what they know
KNOWN = {"symbol_clip": ["symbols_zero_shot"], "half": ["symbols_zero_shot"], "quarter": ["symbols_zero_shot"]}


@dataclass(config=STRICT, kw_only=True)
class AnswerStage(EvaluateStage):
    """What fine-tuning a dense and a sparse model from one base came to: what was learned, what was kept, whether experts
    helped, and which folder to use, above the report of an `evaluate` stage.

    Its rows `base`, `dense` and `sparse` are compared; others stand in the report alone.
    """

    kind: ClassVar[str] = "answer"

    # What was to be learned: a `split` stage, whose test is measured.
    data: Data
    # What the models should still know. None: of a bundled model, what it knows; of others, nothing is measured.
    tasks: list[Wanted] | None = None
