"""The worlds that this package draws, so that nothing needs a download; some need other packages.

A world is a module with `load`, `kind_set`, `build_tokenizer`, `CAPTION_STYLES`, `SPLITS` and `TEMPLATES`; see
`data.names` and docs/worlds.md. It is imported when it is asked for. One in `INSTALLED` has `versions`,
too: of what it is drawn from.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import CLIPProcessor

INSTALLED = ("characters", "icons", "molecules")
WORLDS = (*INSTALLED, "names", "symbols")


def world(name: str) -> ModuleType:
    """The module of one of `WORLDS`."""
    return importlib.import_module(f"clip_moe.data.{name}")


def build_processor(name: str, context_length: int, image_size: int) -> "CLIPProcessor":
    """The `CLIPProcessor` of a world: it knows the words of its captions, and scales images to [-1, 1]."""
    from transformers import CLIPProcessor

    from clip_moe.data.drawing import build_image_processor

    tokenizer = world(name).build_tokenizer(context_length)
    return CLIPProcessor(image_processor=build_image_processor(image_size), tokenizer=tokenizer)
