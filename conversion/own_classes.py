"""`--import MODULE` of every command: classes of models of one's own."""

import os
from collections.abc import Sequence

import modeling_clip_moe
from clip_moe.engine.own_modules import code_of_models, import_object
from modeling_clip_moe.loading import SparseMoEMixin

OPTION = "--import"
# Environment variable that a process hands on to those that it starts
MODULES = "CLIP_MOE_IMPORT"


def import_own_classes(arguments: Sequence[str]) -> list[str]:
    """Registers the models of all modules that `--import MODULE` names, searched first in the working folder. Returns
    the other arguments. Raises a ValueError for a module without a whole sparse model of its own."""
    rest, waiting = [], list(arguments)
    while waiting:
        option, equals, module = waiting.pop(0).partition("=")
        if option != OPTION:
            rest.append(option + equals + module)
            continue
        if not equals:
            module = waiting.pop(0) if waiting else ""
        import_models(module)
        os.environ[MODULES] = " ".join([*os.environ.get(MODULES, "").split(), module])
    return rest


def import_handed_on() -> None:
    """Registers what the process that started this one has registered."""
    for module in os.environ.get(MODULES, "").split():
        import_models(module)


def import_models(module: str) -> None:
    """See `import_own_classes`."""
    imported = import_object(module, "module")
    classes = [value for value in vars(imported).values() if isinstance(value, type) and value.__module__ == module]
    models = [
        own for own in classes if issubclass(own, SparseMoEMixin) and getattr(own.config_class, "is_whole", False)
    ]
    if not models:
        raise ValueError(f"{OPTION} {module} has no subclass of a whole sparse model, such as CLIPMoEModel")
    for model in models:
        modeling_clip_moe.register_model(model)
    code_of_models()
