"""Escape untrusted text for Markdown."""

import re

from clip_moe.engine.messages import one_line

# Characters that markdown does not show as text
MARKUP = re.compile(r"[\\|`<\[\]$~*]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
# The only markup in a cell of a table: a score in bold
BOLD = re.compile(r"\*\*[\d.]+%\*\*")
# Beginnings that make a line a heading, a quotation, a list or a rule
BLOCK = re.compile(r"^(\d*)([-+#.)](?=[-+#\s]|$)|>)")


def escape(text: object) -> str:
    """As one line that shows it as it is, also at the beginning of a line and in a cell of a table: whatever somebody
    else wrote enters markdown by this, or by `code`."""
    return BLOCK.sub(r"\1\\\2", MARKUP.sub(r"\\\g<0>", one_line(text)))


def item(text: object) -> str:
    """As an item of a list."""
    return f"- {escape(text)}"


def code(text: object) -> str:
    """In backticks; backticks inside become apostrophes."""
    return f"`{one_line(text).replace('`', chr(39))}`"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table whose columns also line up as plain text. Cells are shown as they are, but for scores in bold."""
    lines = [[cell if BOLD.fullmatch(cell) else escape(cell) for cell in line] for line in [header, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    formatted = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |" for line in lines]
    formatted.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(formatted)
