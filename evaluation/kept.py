"""Embeddings on disk, found by the digests of the batches that they are of."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from records.files import new_file, writing

# How often embeddings are looked for that another evaluation moves to another file at the same time
ATTEMPTS = 5


class KeptEmbeddings:
    """Files of embeddings in one folder, which any number of processes and evaluations may share.

    A file holds the normalized embeddings (n, D) of one batch after the other, of which the last may be smaller, and
    the digests of the batches. While embeddings are computed, parts are written. When all are there, they become one
    file, and the parts go.

    Args:
        key: what embeddings depend on beside what is embedded. Files of other keys do not count.
    """

    def __init__(self, folder: Path, key: str, batch_size: int):
        self.folder, self.batch_size = folder, batch_size
        self.prefix = hashlib.sha256(key.encode()).hexdigest()[:16]

    def digests(self) -> set[str]:
        """Those of all batches whose embeddings are there.

        Raises:
            ValueError: a file is damaged.
        """
        return {digest for of_file in self._files().values() for digest in of_file}

    def add_part(self, digests: Sequence[str], embeds: Sequence[np.ndarray]) -> None:
        """Keep the embeddings of some batches. Raises OSError where the file cannot be written."""
        self._write(self._path(digests, ".part"), digests, np.concatenate(embeds))

    def read(self, digests: Sequence[str]) -> np.ndarray:
        """(n, D), the embeddings of these batches in their order.

        Raises:
            ValueError: they are not there, or a file is damaged.
        """
        missing = set(digests)
        for _ in range(ATTEMPTS):
            found: dict[str, np.ndarray] = {}
            for path, of_file in self._files().items():
                with suppress(FileNotFoundError):  # another evaluation made one file of it and others
                    if of_file == list(digests):
                        return self._load(path)
                    if missing & set(of_file) - set(found):
                        embeds = self._load(path)
                        starts = range(0, len(embeds), self.batch_size)
                        batches = [embeds[start : start + self.batch_size] for start in starts]
                        found |= dict(zip(of_file, batches, strict=True))
            if missing <= set(found):
                return np.concatenate([found[digest] for digest in digests])
        raise ValueError(f"{self.folder} lacks embeddings that were written there: do all processes see this folder?")

    def join(self, digests: Sequence[str], embeds: np.ndarray) -> None:
        """Keep all batches in one file, without their parts."""
        path = self._path(digests, ".safetensors")
        if not path.exists():
            self._write(path, digests, embeds)
        for part, of_part in self._files().items():
            if part.suffix == ".part" and set(of_part) <= set(digests):
                part.unlink(missing_ok=True)

    def _path(self, digests: Sequence[str], suffix: str) -> Path:
        content = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]
        return self.folder / f"{self.prefix}-{content}{suffix}"

    def _files(self) -> dict[Path, list[str]]:
        """The files of this key, with the digests of their batches."""
        found = {}
        for path in sorted(self.folder.glob(f"{self.prefix}-*")):
            if path.suffix in (".part", ".safetensors"):
                with suppress(FileNotFoundError):
                    found[path] = self._read(path)[0]
        return found

    def _load(self, path: Path) -> np.ndarray:
        digests, embeds = self._read(path, whole=True)
        if embeds.dtype != np.float32 or embeds.ndim != 2:
            raise _damaged(path, f"it holds no embeddings but {embeds.dtype} of shape {embeds.shape}")
        if not np.allclose(np.linalg.norm(embeds, axis=1), 1, atol=1e-3):
            raise _damaged(path, "it holds embeddings that are not finite, or not of length 1")
        if -(-len(embeds) // self.batch_size) != len(digests):
            raise _damaged(path, f"it holds {len(embeds)} embeddings of {len(digests)} batches")
        return embeds

    def _read(self, path: Path, whole: bool = False) -> tuple[list[str], np.ndarray | None]:
        try:
            with safe_open(path, framework="numpy") as file:
                digests = (file.metadata() or {})["digests"].split()
                return digests, file.get_tensor("embeds") if whole else None
        except (SafetensorError, KeyError) as error:
            raise _damaged(path, str(error)) from error

    def _write(self, path: Path, digests: Sequence[str], embeds: np.ndarray) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)  # one that failed early may have taken the empty folder away
        with new_file(path) as partial, writing(path):
            save_file({"embeds": np.ascontiguousarray(embeds)}, partial, {"digests": " ".join(digests)})


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is damaged; delete it, and it is computed again: {reason}")
