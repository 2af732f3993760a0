"""Which parameters train, and which of those decay."""

import re

from torch import nn

# Biases, norms, the class embedding and the temperature: as CLIP (section 2.5) and everybody after it.
NO_DECAY = re.compile(r"(bias|norm\d?\.weight|class_embedding|logit_scale)$")


def set_trainable(model: nn.Module, pattern: str) -> tuple[list[str], list[str]]:
    """Train the parameters in whose name, or one of whose names, the regular expression is found; freeze the others.

    Returns:
        The names of the trainable and of the frozen parameters.

    Raises:
        ValueError: the pattern is no regular expression, or is found in no name.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"trainable pattern {pattern!r} is not a regular expression: {error}") from error
    names = {True: [], False: []}
    found = {
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)  # an encoder of both towers has two names
        if compiled.search(name)
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter in found)
        names[parameter.requires_grad].append(name)
    if not names[True]:
        examples = ", ".join(names[False][:3])
        raise ValueError(f"trainable pattern {pattern!r} is found in no parameter's name; names are {examples}, ...")
    return names[True], names[False]


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> list[dict]:
    """AdamW's groups of the trainable parameters: those that decay, with `decay_all` all, and those that do not.

    A parameter is left alone for its name, not for its rank: the stacked biases of experts have two axes.
    """
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[decay_all or NO_DECAY.search(name) is None].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]
