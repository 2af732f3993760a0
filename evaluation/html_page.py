"""Markdown that our commands write, as one HTML page that needs no other file and no network."""

import base64
import html
import re
from collections.abc import Mapping
from pathlib import Path

from markdown_it import MarkdownIt

# A score with its difference to a baseline, as `evaluation.report` and `evaluation.seeds` write it
DIFFERENCE = re.compile(r"[\d.]+%?(?: ± [\d.]+)? \((?P<mean>[+-][\d.]+)(?: ± (?P<error>[\d.]+))?\)")
STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --ground: light-dark(#fff, #181a1b); }
body { margin: 2rem auto; padding: 0 1rem; max-width: 80rem; font: 1rem/1.5 system-ui, sans-serif;
  color: light-dark(#222, #ddd); background: var(--ground); overflow-wrap: anywhere; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; min-width: 6rem; overflow-wrap: normal; }
th:first-child, td:first-child { position: sticky; left: 0; min-width: 16rem; max-width: 20rem;
  text-align: left; white-space: normal; background: var(--ground); }
.better { color: light-dark(#0a6b2d, #6ddb8f); }
.worse { color: light-dark(#b3261e, #ff8a80); }
p:has(img) { overflow-x: auto; }
img { max-width: 100%; background: #fff; }
"""
# Nothing is loaded and nothing runs, whatever a text contains.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def html_page(markdown: str, pictures: Mapping[str, Path], title: str) -> str:
    """A page with a table's differences in colors, and its pictures inside.

    Args:
        markdown: HTML in it is shown as text.
        pictures: file -> PNG, for each picture that the text names.

    Raises:
        ValueError: the text names another picture.
        OSError: a picture cannot be read.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for cell, content in zip(tokens, tokens[1:], strict=False):
        if cell.type == "td_open" and (outcome := _outcome(content.content)):
            cell.attrSet("class", outcome)
    for part in (child for token in tokens for child in token.children or ()):
        if part.type == "image":
            content = _read_picture(str(part.attrGet("src")), pictures)
            part.attrSet("src", f"data:image/png;base64,{base64.b64encode(content).decode()}")
            # A wide picture scrolls before it becomes too small to read. A PNG has its width at this place.
            part.attrSet("style", f"min-width: {int.from_bytes(content[16:20]) // 2}px")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            f"<body>\n{parser.renderer.render(tokens, parser.options, {})}</body>",
            "</html>\n",
        ]
    )


def _outcome(cell: str) -> str | None:
    """Whether a score is better or worse than the baseline's, by more than the interval of the difference. A difference
    without one is neither."""
    found = DIFFERENCE.fullmatch(cell.strip())
    if found is None or found["error"] is None or abs(float(found["mean"])) <= float(found["error"]):
        return None
    return "better" if float(found["mean"]) > 0 else "worse"


def _read_picture(name: str, pictures: Mapping[str, Path]) -> bytes:
    if name not in pictures:
        raise ValueError(f"there is no picture {name} for the page; there are {', '.join(pictures) or 'none'}")
    return pictures[name].read_bytes()
