"""Code that configurations name: files of `modeling_clip_moe`, nothing else.

transformers runs what a configuration names, in this folder or on the Hub, for everybody who loads it with
`trust_remote_code=True`. So a model is loaded without trust, names of other code are removed from the published folder,
and that is checked before anything trusts it.
"""

import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import modeling_clip_moe
from clip_moe.conversion.checkpoints import KERNELS
from clip_moe.engine.files import files_in, read_json
from modeling_clip_moe import CLIPMoDEConfig
from modeling_clip_moe.families import FAMILY_OF_TYPE
from modeling_clip_moe.loading import OWN_CLASSES, with_relative_imports

CODE = {path.name: path for path in Path(modeling_clip_moe.__file__).parent.glob("*.py")}
# The files of a model, its processor or its encoder of metadata that hold settings, among which there may be code
SETTINGS_FILES = ("*config*.json", "modules.json", "encoder.json")
# Files without code and pickles: vocabularies, weights and the like
CONTENT = ("*.json", "*.safetensors", "vocab.txt", "merges.txt", "*.model")
# Keys of configurations that say where they were loaded from on this machine, and files there
LOCAL_KEYS = {"is_local", "local_files_only", "name_or_path", "_name_or_path"}
LOCAL_KEYS |= {"tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"}
# Where sentence-transformers names classes, and whose it may name
CLASSES, KNOWN_CLASSES = ("type", "types", "activation_function"), ("sentence_transformers.", "torch.nn.")


def cleaned(settings: Any, name: Path) -> Any:
    """The settings of a file without what is true on this machine alone and what names code that is not ours; warns of
    the latter."""
    kept, left_out = _cleaned(settings, name)
    for entry in left_out:
        print(f"warning: {name}: {entry} is left out: it names code that is not ours", file=sys.stderr)
    return kept


def require_trusted_code(folder: Path) -> None:
    """Raises a ValueError if a file of code is not this package's, to the byte, or a configuration names any other code
    or code that is not beside it."""
    for path in files_like(folder, ("*.py",)):
        own = next((with_relative_imports(own) for own in OWN_CLASSES.values() if own.name == path.name), "").encode()
        if path.read_bytes() != (own or (CODE[path.name].read_bytes() if path.name in CODE else None)):
            raise ValueError(
                f"{path} is not this package's: no code is trusted but that of modeling_clip_moe, and of a module that "
                "--import names"
            )
    for path in files_like(folder, SETTINGS_FILES):
        settings = read_json(path)
        _, foreign = _cleaned(settings, path)
        if foreign := foreign or [f"{name}, which is not there" for name in missing_code(settings, path.parent)]:
            raise ValueError(f"{path} names code that is not this package's: {'; '.join(foreign)}")


def missing_code(settings: Any, folder: Path) -> list[str]:
    """The files that settings without foreign code name and that are not in a folder."""
    auto_map = settings.get("auto_map", {}) if isinstance(settings, dict) else {}
    names = sorted({f"{name.split('.')[0]}.py" for name in auto_map.values()})
    return [name for name in names if not (folder / name).is_file()]


def files_like(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files in a folder and below whose names match a pattern."""
    paths = filter(Path.is_file, (folder / path for path in files_in(folder, hidden=True)))
    return sorted(path for path in paths if any(fnmatch(path.name, pattern) for pattern in patterns))


def _cleaned(settings: Any, path: Path, where: str = "") -> tuple[Any, list[str]]:
    """The settings, in which our own classes name our code, and the entries left out that named other code."""
    if isinstance(settings, list):
        parts = [_cleaned(value, path, f"{where}{i}.") for i, value in enumerate(settings)]
        return [value for value, _ in parts], [entry for _, entries in parts for entry in entries]
    if not isinstance(settings, dict):
        return settings, []
    own, kept, left_out = _own_auto_map(settings), {}, []
    for key, value in settings.items():
        if key == "auto_map":
            entries = value if isinstance(value, dict) else {"": value}
            left_out += [f"{where}auto_map.{name} {v!r}" for name, v in entries.items() if own.get(name) != v]
        elif key == "custom_pipelines" or key in KERNELS and "/" in str(value):
            left_out.append(f"{where}{key} {value!r}")
        elif key not in LOCAL_KEYS:
            if key in CLASSES:
                _require_known_classes(value, path, f"{where}{key}")
            kept[key], entries = _cleaned(value, path, f"{where}{key}.")
            left_out += entries
    return kept | ({"auto_map": own} if own else {}), left_out


def _own_auto_map(settings: dict) -> dict[str, str]:
    """Those of a class of this package, or of one that was registered."""
    models = [model for family in FAMILY_OF_TYPE.values() for model in (family.dense, family.sparse)]
    wholes = {CLIPMoDEConfig, *(model.config_class for model in models)}
    configs = [part for whole in wholes for part in (whole, *whole.sub_configs.values())]
    config_of_type = {config.model_type: config for config in configs}
    model_type = settings.get("model_type")
    config = config_of_type.get(model_type) if isinstance(model_type, str) else None
    return dict(getattr(config, "auto_classes", {}))


def _require_known_classes(value: Any, path: Path, where: str) -> None:
    for name in value.values() if isinstance(value, dict) else [value]:
        if isinstance(name, str) and "." in name and not name.startswith(KNOWN_CLASSES):
            raise ValueError(
                f"{path}: {where} {name!r} is neither sentence-transformers' own nor torch's: not published"
            )
