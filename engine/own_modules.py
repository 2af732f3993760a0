"""A user's own code: stages and models named as `package.module:Class`, and digests of their modules and the files
beside them. Modules of this package and of installed ones do not count.

Imports are read from the source before a run. Files that code reaches in other ways, by importlib or as data, are noted
when they are opened.
"""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from clip_moe.engine.digests import file_digest
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Stage

# This repository's packages, whose commit is in each record, and Python's own
PACKAGES = {"clip_moe", "lab", "modeling_clip_moe"}
OURS = {*PACKAGES, *sys.stdlib_module_names}
# Libraries, which a user may have installed from a checkout, outside of site-packages: no code of their own
LIBRARIES = {"accelerate", "datasets", "matplotlib", "numpy", "PIL", "scipy", "sklearn", "torch", "transformers"}
ROOMS = {path.name for path in Path(__file__).parents[1].iterdir() if (path / "__init__.py").is_file()}
ROOT, PYTHON = Path(__file__).resolve().parents[1], sysconfig.get_path("stdlib")

# Files that `imported_files` has found, of any stage
_imported: set[str] = set()
# Path -> when it was first opened to be read; and what was opened to be written
_opened: dict[str, float] = {}
_written: set[str] = set()
# Folders of modules, and of packages, whose files count
_folders: set[str] = set()
_packages: set[str] = set()
# Where modules were searched before what is watched began, which may add folders
_places: list[str] = []
_watching, _since = 0, 0.0  # when it began


def import_object(spelling: str, kind: str) -> Any:
    """The object that `package.module:NAME` names, or the module where there is no NAME. The working folder is searched
    first, and what the module imports is noted.

    Args:
        kind: a word for it in the ValueError if it cannot be imported.
    """
    module, _, name = spelling.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with watching():
            imported = importlib.import_module(module)
            return getattr(imported, name) if name else imported
    except (Exception, SystemExit) as error:  # whatever the module raises
        frames = traceback.extract_tb(error.__traceback__)
        ours = (__file__, importlib.__file__, "<frozen")
        lines = [f" ({frame.filename}, line {frame.lineno})" for frame in frames if not frame.filename.startswith(ours)]
        reason = f"{type(error).__name__}: {error}{''.join(lines[-1:])}"
        if isinstance(error, ModuleNotFoundError) and error.name.split(".")[0] in ROOMS:
            reason += f"; did you mean clip_moe.{error.name}?"
        raise ValueError(f"the {kind} {spelling!r} cannot be imported: {reason}") from error


def import_stage(spelling: str) -> type[Stage]:
    """The class of a stage of one's own. Raises ValueError if the class is not a valid stage."""
    stage = import_object(spelling, "stage")
    if problem := _problem_of_stage(stage):
        raise ValueError(f"the stage {spelling!r} {problem}")
    code_of_stage(stage)
    return stage


def _problem_of_stage(stage: Any) -> str | None:
    if not (isinstance(stage, type) and issubclass(stage, Stage)):
        return "is not a subclass of clip_moe.engine.stage.Stage"
    if not is_pydantic_dataclass(stage) or stage.__pydantic_config__ != STRICT:
        return "must be decorated with pydantic's @dataclass(config=STRICT), STRICT of clip_moe.engine.settings"
    if stage.run is Stage.run:
        return "has no method `run`"
    for field in dataclasses.fields(stage):
        name = field.name
        nearest = next(c for c in stage.__mro__ if name in vars(c) or name in inspect.get_annotations(c))
        is_typed = name in inspect.get_annotations(nearest)
        if not is_typed or vars(nearest).get("__dataclass_fields__", {}).get(name) is not field:
            return (
                f"would not get its setting {name} from {nearest.__name__}: give it a type, as in `{name}: str = ...`, "
                "and mix in no second stage, but a dataclass with its own settings alone"
            )
    return None


def _own_classes(stage: type[Stage]) -> list[type]:
    """The classes that a stage is made of, the most general first, without those of this package."""
    return [parent for parent in reversed(stage.__mro__) if not _is_ours(parent.__module__)]


def code_of_stage(stage: type[Stage]) -> dict[str, str]:
    """`code_of` the modules of its own classes, as they were when this was first asked for."""
    return _code_of_classes(tuple(_own_classes(stage)))


def own_settings(stage: type[Stage]) -> list[str]:
    """The settings that its own classes add or change."""
    annotated = {name for parent in _own_classes(stage) for name in inspect.get_annotations(parent)}
    return [field.name for field in dataclasses.fields(stage) if field.name in annotated]


def code_of(modules: Iterable[str]) -> dict[str, str]:
    """Module -> digest of its file, for these modules and all that they import."""
    files = imported_files(modules)
    return {name: file_digest(files[name]) for name in sorted(files)}


def code_of_models() -> dict[str, str]:
    """`code_of` the modules whose models a user has registered, as they were when this was first asked for."""
    own = sys.modules.get("modeling_clip_moe.loading")  # where it was never imported, nothing is registered
    return _code_of_classes(tuple(own.OWN_CLASSES)) if own else {}


@functools.cache
def _code_of_classes(classes: tuple[type, ...]) -> dict[str, str]:
    return code_of({cls.__module__ for cls in classes})


def imported_files(modules: Iterable[str]) -> dict[str, Path]:
    """Module -> file, for these modules and all of the user's own that they import, directly or not. A module of an
    installed package has its file alone. Nothing is imported: stages import heavy packages late."""
    importlib.invalidate_caches()
    found, waiting = {}, list(modules := list(modules))
    while waiting:
        name = waiting.pop()
        if not name or name in found or _is_ours(name) or (name.split(".")[0] in LIBRARIES and name not in modules):
            continue
        waiting.append(name.rpartition(".")[0])
        file = _file_of(name)
        if file is None or not (is_own := _is_own(str(file))) and name not in modules:
            continue
        found[name] = file
        if is_own:
            _note_module(str(file), "." in name)
            _imported.add(str(file))
            waiting += _imports(name, file)
    return found


def _file_of(name: str) -> Path | None:
    """The file of a module. None: a namespace package, no module, or not installed."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is not None:
        return Path(loaded).absolute() if os.path.isfile(loaded) else None
    parts = name.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    for number in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:number]), spec.submodule_search_locations)
    return Path(spec.origin).absolute() if spec is not None and spec.has_location else None


def _is_ours(name: str) -> bool:
    """Whether a module is of this repository or Python's own, and not the user's of the same name."""
    if name.split(".")[0] not in OURS:
        return False
    file = _file_of(name)
    return file is None or not _is_own(str(file))


def _imports(name: str, path: Path) -> Iterator[str]:
    """Names of imported modules. `from a import b` also gives `a.b`, which may be none."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):  # a compiled one, or what raises where it is imported
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= package.count(".") + bool(package):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _is_own(path: str) -> bool:
    """Whether a file belongs to the user: not to Python, an installed package or this one."""
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts or path.startswith(f"{PYTHON}{os.sep}"):
        return False
    inside = Path(path).relative_to(ROOT).parts[0] if path.startswith(f"{ROOT}{os.sep}") else ""
    return inside not in PACKAGES | ROOMS


def _note_module(path: str, in_package: bool) -> None:
    folder = os.path.dirname(path)
    _folders.add(folder)
    if in_package or os.path.isfile(os.path.join(folder, "__init__.py")):
        _packages.add(folder)


def _note_open(event: str, arguments: tuple) -> None:
    """The hook of `watching`: notes own modules and what is read or written beside them."""
    if not _watching or event not in ("open", "os.rename"):
        return
    path = arguments[event == "os.rename"]  # its target
    if not isinstance(path, str | bytes | os.PathLike):
        return
    path = os.path.abspath(os.fsdecode(path))
    if path.endswith(".pyc"):
        if event == "os.rename":  # Python keeps what it has just read
            return
        try:
            path = importlib.util.source_from_cache(path)
        except ValueError:  # elsewhere than in __pycache__
            return
    key = _key(path, _search_path()) if path.endswith(".py") else path
    is_module = key != path and key.split(os.sep)[0] not in LIBRARIES and _is_own(path)
    if is_module:
        _note_module(path, False)
    if is_module or os.path.dirname(path) in _folders or path.startswith(tuple(f"{p}{os.sep}" for p in _packages)):
        if event == "os.rename" or arguments[2] & (os.O_WRONLY | os.O_RDWR):
            _written.add(path)
        else:
            _opened.setdefault(path, time.time())


@contextmanager
def watching() -> Iterator[None]:
    """Note the files that this process opens meanwhile."""
    global _watching, _since
    _install()
    if not _watching:
        _places[:], _since = _search_path(), time.time()
    _watching += 1
    try:
        yield
    finally:
        _watching -= 1


@functools.cache
def _install() -> None:
    sys.addaudithook(_note_open)  # for good: Python removes none


def reached_code(elsewhere: Collection[str] = ()) -> dict[str, str]:
    """Path below a folder of modules -> digest, for the files that were noted.

    Args:
        elsewhere: files and folders without modules that count in another way, as data and outputs do.

    Raises:
        ValueError: a file has changed since.
    """
    others = [Path(os.path.abspath(path)) for path in elsewhere]
    others = [other for other in others if not any(Path(folder).is_relative_to(other) for folder in _folders)]
    files = {}
    for path in sorted(_opened.keys() - _written - _imported):
        if os.path.isfile(path) and not any(Path(path).is_relative_to(other) for other in others):
            if os.stat(path).st_ctime > _opened[path]:
                if _opened[path] < _since:  # by an earlier stage of this process
                    continue
                raise ValueError(f"{path} changed after it was read: run again")
            files[_key(path, _places)] = file_digest(path)
    return files


def found_again(keys: Iterable[str]) -> dict[str, str]:
    """Current digests of the files of `reached_code`, without those that are gone."""
    found = {}
    for key in keys:
        paths = (os.path.join(folder, key) for folder in _search_path())
        if file := next(filter(os.path.isfile, paths), None):
            found[key] = file_digest(file)
    return found


def _search_path() -> list[str]:
    return [os.path.abspath(folder) for folder in (os.getcwd(), *sys.path)]


def _key(path: str, places: Iterable[str]) -> str:
    """A path relative to the first of these folders that contains it, or unchanged."""
    folder = next((folder for folder in places if path.startswith(f"{folder.rstrip(os.sep)}{os.sep}")), None)
    return path if folder is None else os.path.relpath(path, folder)
