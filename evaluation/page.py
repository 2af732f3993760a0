"""Pages that commands write: markdown, pictures, numbers as JSON, and HTML that holds text and pictures."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from records.files import locked, new_file, output_folder, read_record

# A score with its difference to a baseline, as `evaluation.report` and `model_cards.seeds` write it
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
th { cursor: pointer; }
th[aria-sort="descending"]::after { content: " ▾"; }
th[aria-sort="ascending"]::after { content: " ▴"; }
.better { color: light-dark(#0a6b2d, #6ddb8f); }
.worse { color: light-dark(#b3261e, #ff8a80); }
p:has(img) { overflow-x: auto; }
img { max-width: 100%; }
@media (max-width: 40rem) {
  body { margin: 1rem auto; padding: 0 .5rem; font-size: .85rem; }
  th, td { padding: .2rem .4rem; }
  th { min-width: 4rem; }
}
img[src^="data:image/png"] { background: #fff; }
"""
# A click on the head of a column sorts the lines by its numbers, from the highest; a second one turns them round.
# Where there is no number, texts count, and empty cells come last.
SORT = """
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], order = head.ariaSort === "descending" ? "ascending" : "descending";
  const sign = order === "ascending" ? 1 : -1, text = row => row.cells[head.cellIndex].textContent.trim();
  const number = text => parseFloat(text.replaceAll(",", ""));
  const compare = (a, b) => number(a) - number(b) || a.localeCompare(b);
  for (const other of head.parentNode.cells) other.ariaSort = null;
  head.ariaSort = order;
  body.append(...[...body.rows].sort((a, b) => !text(a) - !text(b) || sign * compare(text(a), text(b))));
});
"""
# Nothing is loaded and nothing else runs, whatever a text contains.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SORT.encode()).digest()).decode()}'"
)
# Pixels. A narrower picture could not be read: it scrolls
LEAST_SVG_WIDTH = 340


def write_page(
    path: Path,
    markdown: str,
    pictures: Mapping[str, Callable[[Path], None]] | None = None,
    data: Any = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write `path.md`, the pictures beside it, `path.html`, which holds both, and with data `path.json`: all of them,
    or none.

    Args:
        pictures: name of a file -> what draws it.
        settings: what the page was made with, which stand in its JSON, too: see `require_free_page`.
    """
    data = {**settings, **data} if settings else data
    # A stage works in NAME.partial until it has finished
    title = f"{path.resolve().parent.name.removesuffix('.partial')} {path.name}"
    with locked(path.parent), output_folder(path.parent), ExitStack() as files:
        require_free_page(path, settings or {})
        drawn = {}
        for name, draw in (pictures or {}).items():
            drawn[name] = files.enter_context(new_file(path.parent / name))
            draw(drawn[name])
        texts = {"html": html_page(markdown, drawn, title), "md": f"{markdown}\n"}
        if data is not None:
            texts["json"] = f"{json.dumps(data, indent=1, ensure_ascii=False)}\n"
        for kind, text in texts.items():
            files.enter_context(new_file(path.with_suffix(f".{kind}"))).write_text(text, encoding="utf-8")


def require_free_page(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises a ValueError if there is `path.json` of a page that was made with other settings, or is damaged."""
    path = path.with_suffix(".json")
    if not settings or not path.exists():
        return
    before = read_record(path, dict)
    for key, new in settings.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(new, dict):  # of these, what differs
            old, new = (
                {of: value for of, value in these.items() if (of, value) not in others.items()}
                for these, others in ((old, new), (new, old))
            )
        if old != new:
            raise ValueError(
                f"{path} holds another result, whose {key} is {old!r} and not {new!r}: choose another folder, or "
                "delete it"
            )


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
        if part.type == "image":
            name = str(part.attrGet("src"))
            content = pictures[name].read_bytes()
            png_width = int.from_bytes(content[16:20])
            kind, width = ("svg+xml", LEAST_SVG_WIDTH) if name.endswith(".svg") else ("png", png_width // 2)
            part.attrSet("src", f"data:image/{kind};base64,{base64.b64encode(content).decode()}")
            part.attrSet("style", f"min-width: {width}px")
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
            f"<body>\n{parser.renderer.render(tokens, parser.options, {})}<script>{SORT}</script></body>",
            "</html>\n",
        ]
    )


def _outcome(cell: str) -> str | None:
    """Whether a score is better or worse than the baseline's, by more than the interval of the difference. A difference
    without one is neither."""
    match = DIFFERENCE.fullmatch(cell.strip())
    if match is None or match["error"] is None or abs(float(match["mean"])) <= float(match["error"]):
        return None
    return "better" if float(match["mean"]) > 0 else "worse"
