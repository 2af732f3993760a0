"""Publishes a model on the Hub: a folder that loads by itself, with its code, its processor, its card and its scores.

    python -m conversion.publish runs/clip_moe_demo/clip_moe user/clip-moe --base-model user/base --license apache-2.0
    python -m conversion.publish runs/clip_moe_demo/clip_moe user/clip-moe --dry-run runs/published

What is published has to load in a process without this package and to compute there what it computes here; otherwise
nothing is uploaded. The card is made of what the run that trained the model left: its recipe, its stages' manifests and
the results of its evaluation.
"""

import argparse
import tempfile
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id

from conversion.publishing.bundle import build
from records.files import new_folder, one_line_errors


def upload(
    folder: Path,
    repository: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    pull_request: bool = False,
) -> str:
    """Upload a folder in one commit, and create the repository if it is not there; returns its address.

    Args:
        revision: a branch, which is created if it is not there.
        pull_request: propose the commit instead of making it.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses; nothing of the folder is visible then.
        ConnectionError: it did not answer; again, nothing is visible.
    """
    api = HfApi()
    try:
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        info = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            create_pr=pull_request,
            commit_message="Publish the model",
        )
    except (OSError, ValueError):  # the Hub's own answers are among them
        raise
    except Exception as error:  # those of the HTTP library, which is another one in other versions of huggingface_hub
        raise ConnectionError(f"the upload to {repository} was cut off, nothing of it is visible: {error}") from error
    return info.pr_url or info.commit_url


def publish(source: str | Path, repository: str, license: str | None = None, base_model: str | None = None, **options):
    """Build, verify and upload a model; see `build` and `upload`. Returns the address."""
    validate_repo_id(repository)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / repository.split("/")[-1]
        folder.mkdir()
        build(source, folder, repository, license, base_model)
        return upload(folder, repository, **options)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m conversion.publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="FOLDER", help="a finished stage, or any folder of a model")
    parser.add_argument("repository", metavar="NAME", help="user/name on the Hub")
    parser.add_argument("--dry-run", type=Path, metavar="DIR", help="write the folder to DIR and upload nothing")
    parser.add_argument("--private", action="store_true", default=None, help="of a new repository")
    parser.add_argument("--revision", help="branch to upload to")
    parser.add_argument("--pull-request", action="store_true", help="propose the upload as a pull request")
    parser.add_argument("--license", help="of the weights, as the Hub names it: mit, apache-2.0, ...")
    parser.add_argument("--base-model", help="the dense model on the Hub (default: what the recipe starts from)")
    args = parser.parse_args(argv)
    with one_line_errors():
        validate_repo_id(args.repository)
        if args.dry_run is not None:
            with new_folder(args.dry_run) as folder:
                build(args.source, folder, args.repository, args.license, args.base_model)
            print(f"wrote {args.dry_run}; nothing was uploaded")
            return
        options = {"private": args.private, "revision": args.revision, "pull_request": args.pull_request}
        print(f"published at {publish(args.source, args.repository, args.license, args.base_model, **options)}")


if __name__ == "__main__":
    main()
