"""Names on the Hub: the commit of each that this process reads. Importing it imports nothing heavy."""

import functools
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from clip_moe.engine.local_names import is_hub_name
from clip_moe.engine.messages import one_line, warn_once

# (name, type) -> the commit that this process reads, and who named it
_commits: dict[tuple[str, str], tuple[str, Literal["hub", "cache", "record"]]] = {}


def hub_commit(name: str, repo_type: str = "model") -> str:
    """The commit of a repository that this process reads: the newest at the first call, or the last one read on this
    machine if the Hub cannot be reached.

    Args:
        repo_type: "model" or "dataset".

    Raises:
        FileNotFoundError: there is no such repository, or it is private or gated for this user.
        ConnectionError: the Hub cannot be reached, and the cache lacks it.
    """
    return _resolve(name, repo_type)[0]


def pin_commit(name: str, commit: str) -> None:
    """Pin a model to the commit that a record names. Raises a ValueError if this process reads another one already."""
    if _commits.setdefault((name, "model"), (commit, "record"))[0] != commit:
        raise ValueError(
            f"{name} is needed at commit {commit}, but this process reads it at {hub_commit(name)}: run it separately"
        )


def hub_options(source: str | Path, repo_type: str = "model") -> dict[str, Any]:
    """The arguments by which `from_pretrained`, `cached_file` and `snapshot_download` read `hub_commit`; none for a
    folder. The newest commit is noted in the cache, for reading without the Hub. Raises see `hub_commit`."""
    if str(source) and Path(source).is_dir():
        return {}
    commit, origin = _resolve(str(source), repo_type)
    if origin == "hub":
        _remember(str(source), repo_type)
    return {"revision": commit, "local_files_only": origin == "cache"}


def _resolve(name: str, repo_type: str) -> tuple[str, Literal["hub", "cache", "record"]]:
    """The commit, and who named it."""
    if (name, repo_type) not in _commits:
        _commits[name, repo_type] = _find(name, repo_type)
    return _commits[name, repo_type]


def _find(name: str, repo_type: str) -> tuple[str, Literal["hub", "cache"]]:
    if not is_hub_name(name):
        raise FileNotFoundError(f"no such folder: {name} is neither a folder nor a hub name")
    from huggingface_hub import HfApi, constants, snapshot_download  # takes a while
    from huggingface_hub.errors import OfflineModeIsEnabled

    api = HfApi()
    try:  # it leaves the cache as it is: a finished stage that refuses the newest commit can go on offline
        info = api.repo_info(name, repo_type=repo_type, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        if getattr(info, "gated", False):  # its files alone are, not this information
            api.auth_check(name, repo_type=repo_type)
        return info.sha, "hub"
    except Exception as error:  # those of the HTTP library, too, which is another one in other versions
        try:
            folder = snapshot_download(name, repo_type=repo_type, allow_patterns=[], local_files_only=True)
        except (OSError, ValueError):
            raise _reason(error, name, repo_type, api.endpoint) from error
        commit = Path(folder).name
        if not isinstance(error, OfflineModeIsEnabled):
            warn_once(f"reading {name} from the cache, commit {commit[:12]}: the Hub said {one_line(error)}")
        return commit, "cache"


@functools.cache
def _remember(name: str, repo_type: str) -> None:
    """Note the newest commit in the cache, which does so when a file is requested without a revision, even a missing
    one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with suppress(EntryNotFoundError):
        hf_hub_download(name, "README.md" if repo_type == "dataset" else "config.json", repo_type=repo_type)


def _reason(error: Exception, name: str, repo_type: str, endpoint: str) -> OSError:
    """Why a repository cannot be read, and what to do."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    is_data = repo_type == "dataset"
    nothing = f"there is no {'file or folder' if is_data else 'folder'} {name}"
    if isinstance(error, GatedRepoError):
        page = f"{endpoint}/{'datasets/' * is_data}{name}"
        return FileNotFoundError(f"{name} is gated: accept its terms at {page}, and log in with `hf auth login`")
    if isinstance(error, RepositoryNotFoundError):
        way_out = "correct the name, or log in with `hf auth login` if it is private"
        return FileNotFoundError(f"{nothing}, and no such {repo_type} on the Hub: {way_out}")
    way_out = "or name a copy on this machine"
    if isinstance(error, OfflineModeIsEnabled):
        return ConnectionError(f"{nothing}, and it is not in the cache of the Hub: unset HF_HUB_OFFLINE, {way_out}")
    return ConnectionError(f"{nothing}, and the Hub cannot be reached ({one_line(error)}): connect to it, {way_out}")
