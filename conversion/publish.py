"""Publishes a model on the Hub, as a folder that loads by itself."""

import tempfile
from pathlib import Path

from huggingface_hub import HfApi, get_token

from clip_moe.conversion.publishing.bundle import build


def upload(
    folder: Path, repository: str, private: bool | None = None, revision: str | None = None, pull_request: bool = False
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


def publish(
    source: str | Path,
    repository: str,
    license: str | None = None,
    base_model: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    pull_request: bool = False,
) -> str:
    """Build, verify and upload a model; see `build` and `upload`. Returns the address. Raises a ValueError without a
    token."""
    if get_token() is None:
        raise ValueError("publishing needs a token that may write: run `hf auth login`, or set HF_TOKEN")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / repository.split("/")[-1]
        folder.mkdir()
        build(source, folder, repository, license, base_model, revision)
        return upload(folder, repository, private, revision, pull_request)
