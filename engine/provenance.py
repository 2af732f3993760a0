"""The origin of a folder: the record of a stage, `manifest.json`, and the fingerprints of models.

Imports nothing heavy: commands that only read records start at once.
"""

import hashlib
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from clip_moe.engine.digests import file_digest, file_digests, value_digest
from clip_moe.engine.files import files_in, read_record, refuse_to_overwrite, write_text
from clip_moe.engine.hub import hub_commit
from clip_moe.engine.outcome import Training

if TYPE_CHECKING:
    from clip_moe.engine.stage import Stage

# In the folder of a stage, and of a run
MANIFEST, RECIPE = "manifest.json", "recipe.yaml"
LOG = "log.jsonl"  # of a stage that trains
ANSWER = "answer.json"  # of a stage that compares models: its verdict, and which to use
OVERVIEW = "overview.txt"  # of a stage that splits data: a sentence a line
CHECKPOINTS = "checkpoints"  # its folder of these, until it has finished
LOGS = "logs"  # the folder of the trackers

EVERYTHING = ("**/*.bin", "**/*.json", "**/*.model", "**/*.safetensors", "**/*.txt")
# Files that embeddings depend on: an expert's are the same in its own folder and in that of a mixture.
WEIGHTS = ("config.json", "*.bin", "*.safetensors", "*.index.json")
PROCESSOR = ("*token*.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*processor_config.json")


# Below transformers: clusters and digits; the fonts of the symbols; pictures; the icons, and what draws them
NUMBERS_DEPEND_ON = """
torch transformers accelerate numpy scikit-learn matplotlib pillow mkdocs-material resvg-py
""".split()
# A commit of the Hub
COMMIT = "[0-9a-f]{40}"


class Attempt(BaseModel):
    """One attempt at a stage: where it ran; `seconds` is None while it has not ended."""

    model_config = ConfigDict(strict=True, defer_build=True)

    device: str
    num_processes: int = Field(ge=1)
    commit: str | None
    versions: dict[str, str] = Field(default_factory=dict)
    seconds: FiniteFloat | None


class Record(BaseModel):
    """The origin of the folder of a stage."""

    model_config = ConfigDict(strict=True, validate_assignment=True, defer_build=True)

    format: Literal[1] = 1
    # Origin: settings that change what is computed, hashes of a user's own modules, inputs with digests, data
    stage: dict[str, Any]
    seed: int = 0
    mixed_precision: str = "no"
    code: dict[str, str] = Field(default_factory=dict)
    # Other modules that these imported while they ran, and files beside them
    reached: dict[str, str] = Field(default_factory=dict)
    inputs: dict[str, str] = Field(default_factory=dict)
    # See `clip_moe.data.identity.identity`
    data: dict[str, Any] | None = None
    # The models among the inputs, as settings name them
    models: list[str] = Field(default_factory=list)
    # Outcome: the digest of a model, the number of pairs trained on, and the fractions that `Stage.run` returns
    weights: str | None = None
    pairs: int | None = None
    duplicates: dict[Literal["shuffled", "left"], FiniteFloat] | None = None
    # Not part of the digest: losses are means over logged steps
    training: Training | None = None
    # Settings that a stage of a user's own adds to those of its kind
    own_settings: list[str] = Field(default_factory=list)
    # Paths in the recipe on the machine that ran it
    local: list[str] = Field(default_factory=list)
    attempts: list[Attempt] = Field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Raises a ValueError where the manifest of a folder is damaged."""
        return read_record(folder / MANIFEST, cls)

    def write(self, folder: Path) -> None:
        write_text(folder / MANIFEST, self.model_dump_json(indent=2))

    @property
    def digest(self) -> str:
        """Hash of the record, without machine, time and losses; later stages store it."""
        incidental = {"attempts", "local", "models", "own_settings", "training"}
        return value_digest(self.model_dump(mode="json", exclude=incidental))

    def is_of(self, folder: Path) -> bool:
        """Whether the model in a folder is what the stage wrote, as far as the record tells."""
        return self.weights is None or self.weights == weights_fingerprint(folder)

    def require_same(self, other: "Record", folder: Path) -> None:
        """Raises a ValueError if this record, of a folder, and the one of what would be made there now differ."""
        differences = self.differences(other)
        if not differences:
            return
        differing = "; ".join(f"{key}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in differences.items())
        kinds = {key.split(".")[0] for key in differences}
        kind = "data" if kinds == {"data"} else "code" if kinds <= {"code", "reached"} else "settings"
        is_commit = any(re.search(f"(^|@){COMMIT}$", str(new)) for _, new in differences.values())
        offline = ", or set HF_HUB_OFFLINE=1 to continue with the commit downloaded before" if is_commit else ""
        raise ValueError(
            f"{folder} was made with other {kind} ({differing}). Delete it to make it again, or choose another output "
            f"folder{offline}"
        )

    def differences(self, other: "Record") -> dict[str, tuple[Any, Any]]:
        """Key -> its values in the two records, where these differ. Inputs and data that one of them lacks count as the
        same: they may be gone where the other one is looked at, and settings name them."""

        def compared(record: Record, against: Record) -> dict[str, Any]:
            keys = "stage", "seed", "mixed_precision", "code", "reached"
            inputs = {key: digest for key, digest in record.inputs.items() if key in against.inputs}
            data = None if against.data is None else record.data
            return flatten({key: getattr(record, key) for key in keys} | {"inputs": inputs, "data": data})

        before, after = compared(self, other), compared(other, self)
        keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        return {key: (before.get(key), after.get(key)) for key in keys}


def stage_folder(folder: Path, reference: str, digest: str) -> Path:
    """The folder that a stage read: `reference` names a stage beside it, or a path. If both exist, it is the one whose
    record has this digest."""
    places = folder.parent / reference, Path(reference).absolute()
    stages = [place for place in places if (place / MANIFEST).is_file()]
    return next((place for place in stages if Record.read(place).digest == digest), (*stages, places[1])[0])


def trainings(folder: Path) -> dict[Path, Training]:
    """Folder of a stage -> its training, for the last training of a model's weights; several where it combines models.
    Empty where no record has one."""
    if not (folder / MANIFEST).is_file():
        return {}
    record = Record.read(folder)
    if record.training is not None or (folder / LOG).is_file():
        return {folder: record.training} if record.training else {}
    found = {}
    for reference in record.models:
        origin = stage_folder(folder, reference, digest := record.inputs.get(reference, ""))
        if (origin / MANIFEST).is_file() and Record.read(origin).digest == digest:
            found |= trainings(origin)
    return found


def goes_on(stage: "Stage", partial: Path) -> bool:
    """Whether an unfinished stage resumes. A stage of the main process alone starts over, and so does one that left
    only its manifest, its log or a best model without a checkpoint."""
    paths = [*partial.glob("*"), *partial.glob(f"{CHECKPOINTS}/step-*")]
    no_work = (MANIFEST, LOG, CHECKPOINTS)
    has_work = any(path.name not in no_work and path.suffix not in (".partial", ".tmp") for path in paths)
    return has_work and not stage.main_process_only


def record_before(stage: "Stage", final: Path, partial: Path) -> Record | None:
    """The record of a stage that finished or that resumes; None: it starts over.

    Raises:
        ValueError: the folder, or the one in which the stage works, holds something else.
    """
    if (final / MANIFEST).is_file():
        return Record.read(final)
    refuse_to_overwrite(final)
    if goes_on(stage, partial):
        return Record.read(partial)
    is_own = (partial / MANIFEST).is_file() and Record.read(partial).stage.get("name") == stage.name
    if partial.is_symlink() or (partial.exists() and not is_own and any(partial.iterdir())):
        raise ValueError(f"{partial}, the working folder of this stage, holds something else: move it away")
    return None


def flatten(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys."""
    flat = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _shown(value: Any) -> str:
    """A setting, or the beginning of a hash."""
    is_hash = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    return repr(value[:12] if is_hash else value)


def model_fingerprint(model: str | Path, patterns: Sequence[str] = EVERYTHING) -> str:
    """The identity of a model: the digest of its files for a folder, the commit for a hub repository.

    Args:
        patterns: which files count.
    """
    path = Path(model)
    if not path.is_dir():
        return f"{model}@{hub_commit(str(model))}"
    names = (name for name in files_in(path, hidden=True) if any(_matches(Path(name), pattern) for pattern in patterns))
    files = [file for file in sorted(path / name for name in names) if file.is_file()]
    files = [file for file in files if path / CHECKPOINTS not in file.parents]
    combined = hashlib.sha256()
    for file, digest in zip(files, file_digests(files), strict=True):
        combined.update(file.relative_to(path).as_posix().encode())
        combined.update(bytes.fromhex(digest))
    return combined.hexdigest()


def _matches(name: Path, pattern: str) -> bool:
    """Whether a path below a folder matches: `**/*.bin` in any folder, `*.bin` in this one alone."""
    return fnmatch(name.name, pattern.removeprefix("**/")) and (pattern.startswith("**/") or name.name == str(name))


def named_files(files: Iterable[str], processors: Iterable[str | None]) -> dict[str, str]:
    """Digests of files, and of processors in folders or on the Hub, by the names that settings have for them. Those
    that do not exist are left out."""
    digests = {file: file_digest(Path(file)) for file in files if Path(file).is_file()}
    for source in filter(None, processors):
        with suppress(FileNotFoundError, ConnectionError):
            digests[source] = model_fingerprint(source, PROCESSOR)
    return digests


def weights_fingerprint(model: str | Path) -> str:
    """The identity of a model's weights, which its scores store: see `model_fingerprint`.

    The processor counts, and of a mixture all experts and the encoder of metadata.
    """
    encoder_files = "encoder.json", "modules.json", "sentence_bert_config.json"
    return model_fingerprint(model, tuple(f"**/{pattern}" for pattern in (*WEIGHTS, *PROCESSOR, *encoder_files)))


def input_fingerprint(model: str | Path) -> str:
    """The identity of a stage's input: the digest of its record, or else `model_fingerprint`."""
    folder = Path(model)
    if not (folder / MANIFEST).is_file():
        return model_fingerprint(model)
    record = Record.read(folder)
    if not record.is_of(folder):
        raise ValueError(
            f"the model in {folder} was changed after its stage finished: delete the folder to make it again, or "
            f"copy it elsewhere without {MANIFEST} and use the copy"
        )
    return record.digest


def device_name(device: Any) -> str:
    """The name of an accelerator, or the type of the device and of the machine."""
    import torch

    name_of = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return name_of(device) if name_of else f"{device.type} ({platform.machine()})"


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def environment() -> dict:
    """The commit of this checkout, or the tag of this release, and the versions of what numbers depend on."""
    root, commit = Path(__file__).resolve().parents[1], None
    with suppress(OSError, subprocess.CalledProcessError, PackageNotFoundError):
        if (root / ".git").exists():  # not of a user's repository, in which a wheel is installed
            git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
            commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        else:
            commit = f"v{version('clip-moe')}"
    versions = {"python": platform.python_version()} | installed_versions(NUMBERS_DEPEND_ON)
    return {"commit": commit, "versions": versions}


def duplicates_line(shares: Mapping[str, float] | None, setting: str, noun: str = "text or image") -> str:
    """A sentence about pairs with the same text or image; `noun` names the one that was compared.

    Args:
        shares: see `Record.duplicates`; None for a stream, whose pairs are not counted.
        setting: the stage's `duplicates`.
    """
    met = "negatives of each other" if setting == "negative" else "positives of each other"
    if shares is None:
        return f"a stream: pairs of a batch with the same {noun} are {met}"
    shuffled, left = shares["shuffled"], shares["left"]
    if not shuffled and not left:
        return f"no two pairs of a batch have the same {noun}"
    if left < shuffled:  # equal where a sampler ignores them
        met = "kept apart" + f" but for {left:.1%}, {met}" * (left > 0)
    return f"in shuffled batches, {shuffled:.1%} of the pairs share a {noun}: {met}"
