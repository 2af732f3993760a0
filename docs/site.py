"""The README is the first page of the site, links to what is no page of it lead to the repository, and a picture with
a `_dark` one beside it gives way to that one in the dark scheme."""

import re
from pathlib import Path

from mkdocs.structure.files import File

DOCS, README = Path(__file__).parent, Path(__file__).parents[1] / "README.md"


def on_files(files, config):
    files.append(File.generated(config, "index.md", content=README.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    folder = README.parent if page.file.src_uri == "index.md" else DOCS

    def link(match):
        path = (folder / match[1]).resolve()
        if not path.exists():  # which mkdocs says, if it is a link
            return match[0]
        if path == README:
            return "](index.md"
        if path.is_relative_to(DOCS):
            return f"]({path.relative_to(DOCS).as_posix()}"
        kind = "raw" if path.suffix == ".png" else "blob"  # a picture is shown, other files have a page
        return f"]({config.repo_url}/{kind}/main/{path.relative_to(README.parent).as_posix()}"

    def of_scheme(match):
        dark = f"{match[2]}_dark{match[3]}"
        of_dark = f"![{match[1]}]({dark}#only-dark)"
        return f"![{match[1]}]({match[2]}{match[3]}#only-light){of_dark}" if (folder / dark).exists() else match[0]

    markdown = re.sub(r"!\[([^]]*)\]\(([^)#\s]+)(\.\w+)\)", of_scheme, markdown)
    return re.sub(r"\]\((?!https?://|#)([^)#\s]+)", link, markdown)
