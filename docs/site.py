"""Makes the README the first page of the site, points links to other files to the repository, and shows a picture's
`_dark` variant in the dark scheme."""

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
        if not path.exists():  # mkdocs reports broken links
            return match[0]
        if path == README:
            return "](index.md"
        if path.is_relative_to(DOCS):
            return f"]({path.relative_to(DOCS).as_posix()}"
        kind = "raw" if path.suffix == ".png" else "blob"  # a picture is shown, other files have a page
        return f"]({config.repo_url}/{kind}/main/{path.relative_to(README.parent).as_posix()}"

    def in_both_schemes(match):
        title, dark = match[1], f"{match[2]}_dark{match[3]}"
        if not (folder / dark).exists():
            return match[0]
        return f"![{title}]({match[2]}{match[3]}#only-light)![{title}]({dark}#only-dark)"

    markdown = re.sub(r"!\[([^]]*)\]\(([^)#\s]+)(\.\w+)\)", in_both_schemes, markdown)
    return re.sub(r"\]\((?!https?://|#)([^)#\s]+)", link, markdown)
