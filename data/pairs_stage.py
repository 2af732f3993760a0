"""A stage that makes a dataset of pairs. Importing it imports nothing heavy."""

from typing import ClassVar

from pydantic.dataclasses import dataclass

from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Stage


@dataclass(config=STRICT, kw_only=True)
class PairsStage(Stage):
    """A stage whose folder holds pairs, which other stages may name as their `data.source`."""

    kind: ClassVar[str] = "pairs"
    main_process_only: ClassVar[bool] = True
