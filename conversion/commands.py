"""The command of this room: `clip-moe publish`."""

import sys
from pathlib import Path

from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.files import new_folder


@command
def publish(
    source: str,
    repository: str,
    /,
    *,
    dry_run: Folder | None = None,
    license: str | None = None,
    base_model: str | None = None,
    private: bool = False,
    yes: bool = False,
) -> str:
    """A model on the Hub: a folder that loads by itself, with its code, its processor, its card and its scores.

    Nothing is uploaded unless the folder loads in a process without this package and computes there what it computes
    here. The card is made of the recipe, the stages' records and the results of the run that trained the model.

    For a branch or a pull request, give the folder of --dry_run to `hf upload`.

        clip-moe publish training/name_clip_moe user/clip-moe --dry_run runs/published
        clip-moe publish runs/clip_moe_demo/clip_moe user/clip-moe --base_model user/base --license apache-2.0

    Args:
        source: a finished stage, or any folder of a model
        repository: user/name on the Hub
        dry_run: write the folder there and upload nothing
        license: the weights' license, as the Hub names it: mit, apache-2.0, ...; or other:NAME.
        base_model: the dense model on the Hub (default: what the recipe starts from)
        private: create a private repository; an existing one stays as it is
        yes: publish without asking, even if the report of the run does not recommend this model
    """
    from clip_moe.conversion.publishing import bundle
    from clip_moe.conversion.publishing.lineage import Verdict

    if dry_run is not None:
        with new_folder(dry_run) as folder:
            bundle.build(source, folder, repository, license, base_model)
        return f"wrote {dry_run}; nothing was uploaded"
    verdict = Verdict.of(Path(source))
    if verdict and not verdict.is_recommended and not yes:
        advice = f"the report of {source} recommends {verdict.use_folder}, not this model, {verdict.row}"
        answer = input(f"{advice}. Publish it anyway? [y/N] ") if sys.stdin.isatty() else ""
        if answer.strip().lower() != "y":
            raise ValueError(f"{advice}: nothing was published; --yes publishes it anyway")
    return f"published at {bundle.publish(source, repository, license, base_model, private)}"
