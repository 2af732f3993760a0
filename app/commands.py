"""The command of this room: `clip-moe app`."""

from importlib.util import find_spec
from pathlib import Path

from clip_moe.engine.command_line import Folder, command


@command
def app(
    model: str,
    /,
    *,
    baseline: str | None = None,
    examples: str | None = None,
    space: Folder | None = None,
) -> str | None:
    """A page in the browser: drop an image, type labels, see what models say, and which experts take which patches.

    A model is a folder or a Hub name of a CLIP: dense, sparse, or a mixture of whole CLIPs. `--space` does
    not open the page: it writes a Space for the Hub that shows it.

        clip-moe app training/name_clip_moe
        clip-moe app training/name_clip_moe --space my_space

    Args:
        model: a folder or Hub name
        baseline: a folder or Hub name of the model beside it, such as the dense one
        examples: folder of pictures to try, with captions or with their labels as names; for a bundled model, those
            that it knows
        space: write a Space into this folder instead
    """
    if find_spec("gradio") is None:
        raise ValueError(
            "clip-moe app needs gradio: in a checkout, `make app` installs it into .venv-app: "
            '.venv-app/bin/clip-moe app; elsewhere, pip install "clip-moe[app] @ git+https://github.com/OWNER/clip-moe"'
        )
    from clip_moe.app.page import PICTURES, open_page, write_space

    examples = examples or PICTURES.get(Path(model).resolve().name)
    if space is None:
        return open_page(model, baseline, examples)
    write_space(space, model, baseline, examples)
    return f"{space} is a Space: hf upload USER/NAME {space} --repo-type space puts it on the Hub"
