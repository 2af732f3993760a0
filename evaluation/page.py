"""Pages that commands write: markdown, pictures, numbers as JSON, and HTML that holds text and pictures."""

import base64
import html
import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from clip_moe.engine.files import locked, new_file, output_folder

# A score with its difference to a baseline, as `clip_moe.evaluation.report` and `lab.cards.seeds` write it
DIFFERENCE = re.compile(r"[\d.]+%?(?: ± [\d.]+)? \((?P<mean>[+-][\d.]+)(?: ± (?P<error>[\d.]+))?\)")
STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --ground: light-dark(#fff, #181a1b); }
body { margin: 2rem auto; padding: 0 1rem; max-width: 80rem; font: 1rem/1.5 system-ui, sans-serif;
  color: light-dark(#222, #ddd); background: var(--ground); overflow-wrap: anywhere; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; min-width: 6rem; overflow-wrap: normal; }
th:first-child, td:first-child { position: sticky; left: 0; min-width: min(16rem, 35vw); max-width: min(20rem, 40vw);
  text-align: left; white-space: normal; background: var(--ground); }
.better { color: light-dark(#0a6b2d, #6ddb8f); }
.worse { color: light-dark(#b3261e, #ff8a80); }
p:has(img) { overflow-x: auto; }
p, ul { max-width: 60rem; }
img { max-width: 100%; }
img[src^="data:image/svg"] { width: 100%; }
@media (max-width: 40rem) {
  body { margin: 1rem auto; padding: 0 .5rem; font-size: .85rem; }
  th, td { padding: .2rem .3rem; }
  td { white-space: normal; }
  th { min-width: 3.4rem; font-size: .75rem; }
  th:first-child, td:first-child { min-width: 4.5rem; max-width: 28vw; }
}
img[src^="data:image/png"] { background: #fff; }
"""
# Nothing is loaded and nothing runs, whatever a text contains.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# Pixels. A narrower picture could not be read: it scrolls
LEAST_SVG_WIDTH = 340


def write_page(
    path: Path,
    markdown: str,
    pictures: Mapping[str, Callable[[Path], None]] | None = None,
    data: Any = None,
) -> None:
    """Write `path.md`, the pictures beside it, `path.html`, which holds both, and with data `path.json`: all of them,
    or none.

    Args:
        pictures: name of a file -> what draws it.
    """
    # A stage works in NAME.partial until it has finished
    title = f"{path.resolve().parent.name.removesuffix('.partial')} {path.name}"
    with locked(path.parent), output_folder(path.parent), ExitStack() as files:
        drawn = {}
        for name, draw in (pictures or {}).items():
            drawn[name] = files.enter_context(new_file(path.parent / name))
            draw(drawn[name])
        texts = {"html": html_page(markdown, drawn, title), "md": f"{markdown}\n"}
        if data is not None:
            texts["json"] = f"{json.dumps(data, indent=1, ensure_ascii=False)}\n"
        for kind, text in texts.items():
            files.enter_context(new_file(path.with_suffix(f".{kind}"))).write_text(text, encoding="utf-8")


def html_page(markdown: str, pictures: Mapping[str, Path], title: str) -> str:
    """A page with a table's differences in colors, and its pictures inside.

    Args:
        markdown: HTML in it is shown as text.
        pictures: file -> PNG or SVG, for each picture that the text names.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for cell, content in zip(tokens, tokens[1:], strict=False):
        if cell.type == "td_open" and (outcome := _outcome(content.content)):
            cell.attrSet("class", outcome)
    for part in (child for token in tokens for child in token.children or ()):
        name = str(part.attrGet("src"))
        if part.type == "image" and name in pictures:
            content = pictures[name].read_bytes()
            png_width = int.from_bytes(content[16:20])
            kind, width = ("svg+xml", LEAST_SVG_WIDTH) if name.endswith(".svg") else ("png", png_width // 2)
            part.attrSet("src", f"data:image/{kind};base64,{base64.b64encode(content).decode()}")
            part.attrSet("style", f"min-width: {width}px")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{parser.renderer.render(tokens, parser.options, {})}</body>
</html>
"""


def _outcome(cell: str) -> str | None:
    """Whether a score is better or worse than the baseline's, by more than the interval of the difference. A difference
    without one is neither."""
    match = DIFFERENCE.fullmatch(cell.strip())
    if match is None or match["error"] is None or abs(float(match["mean"])) <= float(match["error"]):
        return None
    return "better" if float(match["mean"]) > 0 else "worse"
