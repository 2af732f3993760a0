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
    private: bool | None = None,
    revision: str | None = None,
    pull_request: bool = False,
    license: str | None = None,
    base_model: str | None = None,
    yes: bool = False,
) -> str:
    """A model on the Hub: a folder that loads by itself, with its code, its processor, its card and its scores.

    What is published has to load in a process without this package and to compute there what it computes here;
    otherwise nothing is uploaded. The card is made of what the run that trained the model left: its recipe, its stages'
    records and the results of its evaluation.

        clip-moe publish training/name_clip_moe user/clip-moe --dry_run runs/published
        clip-moe publish runs/clip_moe_demo/clip_moe user/clip-moe --base_model user/base --license apache-2.0

    Args:
        source: a finished stage, or any folder of a model
        repository: user/name on the Hub
        dry_run: write the folder there and upload nothing
        private: whether a new repository is private
        revision: branch to upload to
        pull_request: propose the upload as a pull request
        license: the weights' license, as the Hub names it: mit, apache-2.0, ...; or other:NAME.
        base_model: the dense model on the Hub (default: what the recipe starts from)
        yes: do not ask before a model is published that the report of its run does not recommend
    """
    if dry_run is not None:
        from clip_moe.conversion.publishing.bundle import build

        with new_folder(dry_run) as folder:
            build(source, folder, repository, license, base_model, revision)
        return f"wrote {dry_run}; nothing was uploaded"
    from clip_moe.conversion.publish import publish as upload
    from clip_moe.conversion.publishing.lineage import Verdict

    verdict = Verdict.of(Path(source))
    if verdict and not verdict.is_recommended and not yes:
        advice = f"the report of {source} recommends {verdict.use_folder}, and not this model, {verdict.row}"
        if not sys.stdin.isatty():
            raise ValueError(f"{advice}: nothing was published; --yes publishes it all the same")
        if input(f"{advice}. Publish it all the same? [y/N] ").strip().lower() != "y":
            raise ValueError("nothing was published")

    address = upload(source, repository, license, base_model, private, revision, pull_request)
    return f"published at {address}"
