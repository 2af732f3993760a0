"""Stages of one's own, which a recipe names as `package.module:Class`: docs/extending.md."""

import dataclasses
import functools
import inspect
import re
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from clip_moe.engine.own_modules import OURS, code_of, import_object
from clip_moe.engine.provenance import OwnStage
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Stage


def import_stage(stage: str) -> type[Stage]:
    """The class that `package.module:Class` names, see `import_object`."""
    value = import_object(stage, "stage")
    if not (isinstance(value, type) and issubclass(value, Stage)):
        raise ValueError(f"{stage!r} is no stage: its class must be a subclass of clip_moe.engine.stage.Stage")
    problem = _problem_of_class(value)
    if problem:
        raise ValueError(f"the stage {stage!r} {problem}")
    own_stage(value)
    return value


@functools.cache
def own_stage(stage: type[Stage]) -> dict[str, Any]:
    """What a record has of a stage outside of this package, `code` and `own`; nothing of one within."""
    own = [parent for parent in reversed(stage.__mro__) if parent.__module__.split(".")[0] not in OURS]
    if not own:
        return {}
    code = code_of({parent.__module__ for parent in own})  # as it is now: it may change while a run takes its time
    annotated = {name for parent in own for name in inspect.get_annotations(parent)}
    text = " ".join((stage.__doc__ or "").split())
    if text.startswith(f"{stage.__name__}("):  # which a dataclass has where nobody wrote one
        text = ""
    sentence = re.match(r".*?[.!?](?=\s|$)", text)
    settings = [field.name for field in dataclasses.fields(stage) if field.name in annotated]
    return {"code": code, "own": OwnStage(does=sentence[0] if sentence else text, settings=settings)}


def _problem_of_class(stage: type[Stage]) -> str:
    """Why a class would not do what it says, or nothing."""
    if not is_pydantic_dataclass(stage) or stage.__pydantic_config__ != STRICT:
        return (
            "must be decorated with pydantic's @dataclass(config=STRICT, kw_only=True), STRICT of "
            "clip_moe.engine.settings"
        )
    for field in dataclasses.fields(stage):
        says = next(c for c in stage.__mro__ if field.name in vars(c) or field.name in inspect.get_annotations(c))
        if field.name not in inspect.get_annotations(says):
            return f"sets {field.name} without a type, as in `{field.name}: str = ...`, so it would keep its old value"
        if vars(says).get("__dataclass_fields__", {}).get(field.name) is not field:
            return (
                f"would not get its setting {field.name} from {says.__name__}, but from a class before it: a class "
                "that is mixed in must be a dataclass with its own settings alone, and no stage"
            )
    return ""
