"""The worlds that this package draws, so that nothing needs a download; `icons` need an extra.

A world is a module with `load`, `kind_set`, `build_tokenizer`, `CAPTION_STYLES` and `TEMPLATES`; see `data.names` and
docs/worlds.md.
"""

from transformers import CLIPProcessor

from data import icons, names, symbols
from data.drawing import build_image_processor

WORLDS = {"icons": icons, "names": names, "symbols": symbols}


def build_processor(world: str, context_length: int, image_size: int) -> CLIPProcessor:
    """The `CLIPProcessor` of a world: it knows the words of its captions, and scales images to [-1, 1]."""
    tokenizer = WORLDS[world].build_tokenizer(context_length)
    return CLIPProcessor(image_processor=build_image_processor(image_size), tokenizer=tokenizer)
