"""Sentence encoders: what captions are clustered by, and what compares a task's metadata with the clusters (MoDE); and
one of images, to compare with.

An encoder is kept in a folder: `encoder.json` says what it is, and the weights lie beside it unless they come from the
Hub.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from safetensors.numpy import load_file, save_file

from clip_moe.conversion.checkpoints import has_file, load_clip, load_config, loading
from clip_moe.conversion.processors import load_processor, load_tokenizer, mark_padding, require_fit
from clip_moe.engine.digests import short_digest
from clip_moe.engine.files import save, writing
from clip_moe.engine.hub import hub_commit, hub_options, pin_commit
from clip_moe.engine.local_names import is_hub_name
from clip_moe.engine.provenance import installed_versions, weights_fingerprint
from clip_moe.evaluation.batches import ImageBatches, TextBatches
from clip_moe.evaluation.embedder import embed
from modeling_clip_moe.families import is_clip

SETTINGS_FILE, TFIDF_WEIGHTS = "encoder.json", "tfidf.safetensors"
# How the last hidden states become one: their mean over the tokens; the first of them (unsupervised SimCSE); or the
# model's own pooler, a layer on the first one (supervised SimCSE)
Pooling = Literal["mean", "cls", "pooler"]
Modality = Literal["text", "image"]
BATCH_SIZE = 256


class TfidfEncoder:
    """TF-IDF of words, reduced by a truncated SVD: needs no download. MoDE section 5.3 finds its clusters weaker, since
    they group captions of the same words.

    Args:
        words: the vocabulary.
        idf: (words,), their inverse document frequencies.
        components: (d, words), the right singular vectors.
    """

    modality = "text"

    def __init__(self, words: Sequence[str], idf: np.ndarray, components: np.ndarray):
        self.words, self.idf, self.components = list(words), idf, components
        self.vectorizer = _vectorizer(vocabulary=self.words)
        self.vectorizer.idf_ = idf
        self.projection = components.T.astype(np.float64)
        self.name = f"tfidf-{short_digest([self.words, idf.tolist(), components.tolist()])}"

    @classmethod
    def fit(cls, texts: Sequence[str], dim: int, seed: int, max_df: float = 1.0) -> "TfidfEncoder":
        """`max_df`: words that a larger share of the texts has are left out; what is said of all hides topics."""
        from sklearn.decomposition import TruncatedSVD

        vectorizer = _vectorizer(max_df=max_df)
        counts = vectorizer.fit_transform(texts)
        if counts.shape[1] < dim:
            number = counts.shape[1]
            raise ValueError(f"{len(texts)} texts have {number} different words, fewer than dim {dim}: lower dim")
        # Contiguous: safetensors writes memory as it lies
        components = np.ascontiguousarray(TruncatedSVD(dim, random_state=seed).fit(counts).components_, np.float32)
        return cls(vectorizer.get_feature_names_out().tolist(), vectorizer.idf_, components)

    def encode(self, texts: Sequence[str], batch_size: int = BATCH_SIZE) -> np.ndarray:
        """(texts, d) normalized; zeros for a text without a known word."""
        from sklearn.preprocessing import normalize

        return normalize(self.vectorizer.transform(texts) @ self.projection).astype(np.float32)

    def save(self, folder: Path) -> None:
        save_file({"idf": self.idf, "components": self.components}, folder / TFIDF_WEIGHTS)
        _write(folder, {"kind": "tfidf", "words": self.words})


class TextEncoder:
    """A model of the sentence-transformers library, or a text model of transformers with a pooling on it.

    Args:
        source: a folder or hub name.
        pooling: how a text model pools, see `Pooling`; a model of the library has its own.
        name: what it is called; None: a hub name as it is, a folder's with a hash of its weights; and the pooling.
    """

    modality = "text"

    def __init__(self, source: str, pooling: Pooling, name: str | None, device: str | torch.device):
        version = installed_versions(["sentence-transformers"]).get("sentence-transformers", "0")
        if int(version.partition(".")[0]) < 6:  # older ones run the modules that a folder brings
            raise ValueError(f"{source} is a sentence encoder: pip install 'sentence-transformers>=6', not {version}")
        from sentence_transformers import SentenceTransformer

        self.source, self.pooling, is_whole = source, pooling, has_file(source, ["modules.json"])
        self.name = name or (_name(source) if is_whole else f"{_name(source)}:{pooling}")
        hub = hub_options(source)
        with loading(source):
            model = {"model_name_or_path": source, **hub} if is_whole else {"modules": _modules(source, pooling, hub)}
            self.model = SentenceTransformer(**model, device=str(device), trust_remote_code=False)

    def encode(self, texts: Sequence[str], batch_size: int = BATCH_SIZE) -> np.ndarray:
        """(texts, d) normalized."""
        return self.model.encode(list(texts), batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False)

    def save(self, folder: Path) -> None:
        if Path(self.source).is_dir():
            with writing(folder):
                self.model.save(str(folder / "model"))
        _write(folder, {"kind": "text", "name": self.name, "source": self.source, "pooling": self.pooling})


def _modules(source: str, pooling: Pooling, hub: dict[str, Any]) -> list[torch.nn.Module]:
    from sentence_transformers.sentence_transformer import modules

    output, name = "last_hidden_state", "token_embeddings"
    if pooling == "pooler":
        output, name = "pooler_output", "sentence_embedding"
    method = {"text": {"method": "forward", "method_output_name": output}}
    hub_kwargs = {f"{part}_kwargs": dict(hub) for part in ("model", "processor", "config")}
    transformer = modules.Transformer(source, modality_config=method, module_output_name=name, **hub_kwargs)
    if pooling == "pooler":
        if getattr(transformer.model, "pooler", None) is None:
            raise ValueError(f"{source} has no pooler: use pooling mean or cls")
        return [transformer]
    return [transformer, modules.Pooling(transformer.get_embedding_dimension(), pooling)]


class ClipEncoder:
    """A tower of a dense or sparse CLIP. Clusters of images are what MoDE section 5.3 compares with.

    Args:
        source: a folder or hub name.
        name: what it is called; None: a hub name as it is, a folder's with a hash of its weights; and that it is of
            images.
    """

    def __init__(
        self, source: str, modality: Modality = "text", name: str | None = None, device: str | torch.device = "cpu"
    ):
        self.source, self.modality = source, modality
        self.name = name or (_name(source) if modality == "text" else f"{_name(source)}:image")
        if modality == "image":
            self.processor = load_processor(source)
        else:
            self.processor, config = load_tokenizer(source), load_config(source)
            require_fit(config, source, source, self.processor)
            mark_padding(config, self.processor)
        self.model = load_clip(source).eval().to(device)

    def encode(self, items: Sequence[str] | Dataset, batch_size: int = BATCH_SIZE) -> np.ndarray:
        """(items, d) normalized: of texts, or of the images of rows. Raises see `embed`."""
        if self.modality == "image":
            batches = ImageBatches(items, "image", self.processor.image_processor, batch_size)
        else:
            batches = TextBatches(items, self.processor, batch_size)
        return np.concatenate([embed(self.model, batches[number])[self.modality] for number in range(len(batches))])

    def save(self, folder: Path) -> None:
        if Path(self.source).is_dir():
            save(self.model, folder / "model")
            save(self.processor, folder / "model")
        _write(folder, {"kind": self.modality, "name": self.name, "source": self.source})


SentenceEncoder = TfidfEncoder | TextEncoder | ClipEncoder


def open_encoder(
    source: str,
    pooling: Pooling = "mean",
    name: str | None = None,
    device: str | torch.device = "cpu",
    modality: Modality = "text",
) -> SentenceEncoder:
    """The encoder of a folder or hub name: a tower of a CLIP, or a sentence encoder, see `TextEncoder`."""
    is_whole = has_file(source, ["modules.json"])
    if modality == "image" or (not is_whole and is_clip(load_config(source))):
        return ClipEncoder(source, modality, name, device)
    return TextEncoder(source, pooling, name, device)


def load_encoder(folder: str | Path, device: str | torch.device = "cpu") -> SentenceEncoder:
    """The encoder that `save` kept in a folder."""
    folder = Path(folder)
    if not (folder / SETTINGS_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} has no sentence encoder. An embed stage of captions or images keeps it in encoder/, a mixture "
            "in metadata_encoder/: copy the one that the cluster centers were made with"
        )
    with loading(folder):
        settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        if settings["kind"] == "tfidf":
            arrays = load_file(folder / TFIDF_WEIGHTS)
            idf, components = arrays["idf"], arrays["components"]
            if not (components.shape[1] == len(idf) and np.isfinite(idf).all() and np.isfinite(components).all()):
                raise ValueError(f"{TFIDF_WEIGHTS} does not match its words, or has non-finite numbers")
            return TfidfEncoder(settings["words"], idf, components)
        source = str(folder / "model") if (folder / "model").is_dir() else settings["source"]
        kind, name, pooling = settings["kind"], settings["name"], settings.get("pooling", "mean")
    if source == settings["source"] and "commit" in settings:
        pin_commit(source, settings["commit"])
    return open_encoder(source, pooling, name, device, kind)


def encode_metadata(encoder: SentenceEncoder, texts: Sequence[str]) -> np.ndarray:
    """(texts, d) the embeddings of a task's metadata, normalized. Each text needs a word that the encoder knows."""
    embeds = encoder.encode(texts)
    unknown = [text for text, embed in zip(texts, embeds, strict=True) if not embed.any()]
    if unknown:
        raise ValueError(f"the encoder {encoder.name} knows no word of {unknown[0]!r} ({len(unknown)} of {len(texts)})")
    return embeds


def _vectorizer(**options):
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(token_pattern=r"(?u)\b\w+\b", **options)  # words of one letter count, too


def _name(source: str) -> str:
    """A hub name as it is; of a folder the last part, and a hash of the weights, by which two of one name differ."""
    folder = Path(source).resolve()
    return f"{folder.name}-{weights_fingerprint(folder)[:8]}" if folder.is_dir() else source


def _write(folder: Path, settings: dict) -> None:
    if is_hub_name(settings.get("source", "")):
        settings["commit"] = hub_commit(settings["source"])
    (folder / SETTINGS_FILE).write_text(json.dumps(settings) + "\n", encoding="utf-8")
