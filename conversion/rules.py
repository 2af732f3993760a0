"""Weight conversion as a table of rules, in which nothing is left over in silence: which source tensors become which
target tensors, and how. The idea is that of V-MoE's `initialization/rules.py` (https://github.com/google-research/vmoe).
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clip_moe.engine.messages import NAMES_PER_ERROR, join_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    r"""Turns the source tensors whose whole key matches `source` into the tensors named by `target`.

    | what | source | target | transform |
    |---|---|---|---|
    | rename | `a\.(weight\|bias)` | `b.\1` | |
    | transpose | `proj` | `proj.weight` | `lambda w: w.T` |
    | split | `qkv` | `("q", "k", "v")` | `lambda w: w.chunk(3)` |
    | tile | `mlp` | `experts` | `lambda w: w.expand(4, *w.shape)` |
    | take expert 2 | `experts` | `mlp` | `lambda w: w[2]` |
    | unstack | `experts` | `("expert.0", "expert.1")` | `lambda w: w.unbind()` |
    | stack (`merges=True`) | `expert\.\d+` | `experts` | `torch.stack` |
    | drop | `attn_mask` | `()` | `reason="a constant"` |

    `source` is a regular expression; `target` is a template or a tuple of them, with `\1` for the groups of `source`.
    With `merges`, `transform` gets the list of all source tensors that lead to the same targets, numbers in their keys
    in numerical order. A rule without target gives the reason.
    """

    source: str
    target: str | tuple[str, ...]
    transform: Callable[[Any], Tensor | Iterable[Tensor]] = lambda tensor: tensor
    merges: bool = False
    reason: str = ""


# Placeholders for parts of a name that a rule copies
PLACEHOLDERS = {"layer": r"\d+", "expert": r"\d+", "norm": "[12]", "kind": "weight|bias", "part": "[qkv]"}


def renaming(source: str, target: str | tuple[str, ...], **options) -> Rule:
    """A rule that renames, with `{placeholders}`. Without a transform, swapping the names gives its inverse."""
    pattern = re.sub(r"\\{(\w+)\\}", lambda match: f"(?P<{match[1]}>{PLACEHOLDERS[match[1]]})", re.escape(source))
    targets = (target,) if isinstance(target, str) else target
    return Rule(pattern, tuple(re.sub(r"\{(\w+)\}", r"\\g<\1>", name) for name in targets), **options)


def apply_rules(
    source: Mapping[str, Tensor], target: Mapping[str, Tensor] | None, rules: Sequence[Rule]
) -> dict[str, Tensor]:
    """Returns a state dict with exactly the keys and shapes of `target`, in the source's dtypes.

    The tensors may be views of the source's and of one another. With None for `target`, it is whatever the rules lead
    to: converting it back must show that nothing is missing.

    Raises:
        ValueError: some source key matches no rule or several, or leads to a key the target does not have; some target
            key is reached by no source tensor or by several; some shape is wrong. Names the keys, all kinds at once.
    """
    unknown, ambiguous, wrong = [], [], []
    jobs: dict[tuple[Rule, tuple[str, ...]], list[str]] = {}
    for key in source:
        matches = [(rule, match) for rule in rules if (match := re.fullmatch(rule.source, key))]
        if len(matches) != 1:
            (ambiguous if matches else unknown).append(key)
            continue
        rule, match = matches[0]
        templates = (rule.target,) if isinstance(rule.target, str) else rule.target
        if templates:
            jobs.setdefault((rule, tuple(match.expand(template) for template in templates)), []).append(key)
        else:
            logger.info("dropped %s: %s", key, rule.reason)

    state: dict[str, Tensor] = {}
    reached = set()
    for (rule, targets), keys in jobs.items():
        keys = sorted(keys, key=numerical_order)
        reached.update(targets)
        if target is not None and any(name not in target for name in targets):
            unknown.extend(keys)
        elif len(keys) > 1 and not rule.merges or any(name in state for name in targets):
            ambiguous.extend(keys)
        else:
            try:
                result = rule.transform([source[key] for key in keys] if rule.merges else source[keys[0]])
                tensors = (result,) if isinstance(result, Tensor) else tuple(result)
                state.update(zip(targets, tensors, strict=True))
            except (ValueError, RuntimeError, IndexError) as error:
                shapes = ", ".join(f"{key} {tuple(source[key].shape)}" for key in keys[:NAMES_PER_ERROR])
                wrong.append(f"{shapes} to {', '.join(targets)} ({error})")
    target = state if target is None else target
    for key, tensor in state.items():
        if tensor.shape != target[key].shape:
            wrong.append(f"{key} is {tuple(tensor.shape)} and must be {tuple(target[key].shape)}")

    problems = {
        "left over in the source": unknown,
        "missing from the source": [key for key in target if key not in reached],
        "converted by two rules or from two tensors": ambiguous,
        "of the wrong shape": wrong,
    }
    if any(problems.values()):
        raise ValueError(
            "the weights do not fit: " + "; ".join(f"{k}: {join_names(v)}" for k, v in problems.items() if v)
        )
    return state


def numerical_order(key: str) -> list[str | int]:
    """Sort key under which `experts.10` comes after `experts.2`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]
