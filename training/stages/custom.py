"""Stages of one's own, which a recipe names as `package.module:Class`: docs/extending.md."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from records.digests import file_digest
from records.provenance import OwnStage
from training.settings import STRICT
from training.stages.base import Stage

IMPORTLIB = importlib.__file__
# This repository's packages, whose commit is in each record, and Python's own
PACKAGES = {"benchmarks", "conversion", "data", "evaluation", "model_cards", "modeling_clip_moe", "records", "training"}
OURS = {*PACKAGES, *sys.stdlib_module_names}


def import_stage(stage: str) -> type[Stage]:
    """The class that `package.module:Class` names. The working folder is searched first."""
    module, _, name = stage.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises
        raise ValueError(f"the stage {stage!r} cannot be imported: {_reason(error)}") from error
    if not (isinstance(value, type) and issubclass(value, Stage)):
        raise ValueError(f"{stage!r} is no stage: its class must be a subclass of training.stages.base.Stage")
    problem = _problem_of_class(value)
    if problem:
        raise ValueError(f"the stage {stage!r} {problem}")
    own_stage(value)  # as it is now: the file may change while the run takes its time
    return value


@functools.cache
def own_stage(stage: type[Stage]) -> dict[str, Any]:
    """What a record has of a stage outside of this package, `code` and `own`; nothing of one within."""
    own = [parent for parent in reversed(stage.__mro__) if parent.__module__.split(".")[0] not in OURS]
    if not own:
        return {}
    modules = {name: path for parent in own for name, path in _with_imports(parent.__module__).items()}
    code = {name: file_digest(modules[name]) for name in sorted(modules)}
    annotated = {name for parent in own for name in inspect.get_annotations(parent)}
    text = " ".join((stage.__doc__ or "").split())
    if text.startswith(f"{stage.__name__}("):  # which a dataclass has where nobody wrote one
        text = ""
    sentence = re.match(r".*?[.!?](?=\s|$)", text)
    settings = [field.name for field in dataclasses.fields(stage) if field.name in annotated]
    return {"code": code, "own": OwnStage(does=sentence[0] if sentence else text, settings=settings)}


def _with_imports(name: str) -> dict[str, Path]:
    """The files of a module and of those that it imports from the folder of its package or the working folder, and so
    on; of an installed library that a stage inherits from, the one file. None is imported for it: stages import late
    what is heavy."""
    file = Path(sys.modules[name].__file__)
    if "site-packages" in file.parts:
        return {name: file}
    top = file.parents[name.count(".") + (file.name == "__init__.py")]
    folders, found, waiting = (top, Path.cwd()), {}, [name]
    while waiting:
        name = waiting.pop()
        if name in found or name.split(".")[0] in OURS:
            continue
        places = [Path(folder, *name.split(".")) for folder in folders]
        files = [path for place in places for path in (place / "__init__.py", place.with_name(f"{place.name}.py"))]
        if path := next(filter(Path.is_file, files), None):
            found[name] = path
            waiting += _imports(name, path)
    return found


def _imports(name: str, path: Path) -> Iterator[str]:
    """The names of the modules that the code of one imports, and perhaps of what it takes of them."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _reason(error: Exception) -> str:
    """What was raised; and where in one's own files."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if not f.filename.startswith("<frozen") and f.filename not in (__file__, IMPORTLIB)]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _problem_of_class(stage: type[Stage]) -> str:
    """Why a class would not do what it says, or nothing."""
    if not is_pydantic_dataclass(stage) or stage.__pydantic_config__ != STRICT:
        return "must be decorated with pydantic's @dataclass(config=STRICT, kw_only=True), STRICT of training.settings"
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
