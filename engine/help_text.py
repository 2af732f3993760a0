"""The text of `--help`, in lines as wide as the terminal."""

import shutil
import textwrap


def in_lines(text: str, indent: int = 0, first: str = "") -> str:
    """Paragraphs in lines of the terminal's width, or of 80 letters where there is no terminal. Lines that are indented
    are commands, which go on behind a backslash.

    Args:
        indent: spaces before each line.
        first: what stands before the text, in its first line.
    """
    width, paragraphs = shutil.get_terminal_size().columns, []
    options = {"break_long_words": False, "break_on_hyphens": False}
    for paragraph in text.strip("\n").split("\n\n"):
        if paragraph.startswith("    "):
            commands = paragraph.replace(" \\\n        ", " ").splitlines()
            lines = (textwrap.wrap(line, width - 2, subsequent_indent=" " * 8, **options) for line in commands)
            paragraphs.append("\n".join(" \\\n".join(line) for line in lines))
        else:
            head = first if first and not paragraphs else " " * indent
            words = " ".join(paragraph.split())
            lines = textwrap.wrap(words, width, initial_indent=head, subsequent_indent=" " * indent, **options)
            paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
