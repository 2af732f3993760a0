"""The worlds that this package draws, so that nothing needs a download.

A world is a module with `load`, `load_minimal_pairs`, `build_tokenizer`, `KINDS`, `KIND_SETS` and `TEMPLATES`; see
`data.glyphs`.
"""

from data import glyphs, symbols

WORLDS = {"glyphs": glyphs, "symbols": symbols}
