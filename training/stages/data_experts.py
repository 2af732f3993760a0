"""The stages of MoDE: clusters of captions, their data experts, and the mixture of these."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar, Literal

import datasets
import numpy as np
import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from transformers import PreTrainedConfig

from data.contact_sheet import contact_sheet
from data.sources import DataArguments
from evaluation.feature_store import FeatureStore
from evaluation.sentence_encoders import (
    SentenceEncoder,
    TfidfEncoder,
    encode_metadata,
    load_encoder,
    open_encoder,
)
from records.files import new_folder
from training.clusters import (
    CENTERS,
    CaptionClusters,
    balanced_kmeans,
    group_centers,
    load_centers,
    nearest_centers,
    save_centers,
    save_clusters,
)
from training.context import Context
from training.estimates import AtMost, Expected, Unknown, size_of_weights
from training.features import CAPTION_BATCHES_PER_SHARD, CAPTIONED, READABLE, captions_of, encoder_features
from training.settings import STRICT, Reads, dump
from training.stages.base import NumberedData, Stage, inherited

# The folder of the encoder of captions, in that of an embed_captions stage
ENCODER = "encoder"
# Pairs that the samples in pictures are drawn from
SAMPLES_DRAWN_FROM = 20_000


@dataclass(config=STRICT, kw_only=True)
class EmbedCaptionsStage(Stage):
    """The sentence embeddings of a dataset's captions, by which data experts are found (MoDE section 3.2)."""

    kind: ClassVar[str] = "embed_captions"

    # A folder or hub name of sentence-transformers, of a text model of transformers, or of a CLIP, whose text tower is
    # used; "tfidf", which is fitted to these captions; or an earlier embed_captions stage, whose encoder is used again.
    encoder: Annotated[str, Reads("embed_captions", "model", literals=["tfidf"])]
    # The pairs whose captions are embedded.
    data: NumberedData
    # "image" embeds the images in place of the captions, with a CLIP as encoder, such as the seed model (MoDE section
    # 5.3, to compare with). Every test image then routes itself, by all centers.
    modality: Literal["text", "image"] = "text"
    # How a text model of transformers makes one embedding: the mean over its tokens, the first one (unsupervised
    # SimCSE), or the model's own pooler on the first one (supervised SimCSE).
    pooling: Literal["mean", "cls", "pooler"] = "mean"
    # Size of the embeddings of tfidf.
    dim: int = Field(default=64, gt=0)
    # tfidf leaves out words that a larger share of the captions has; what is said of everything hides topics.
    max_df: float = Field(default=1.0, gt=0, le=1)
    # Captions that are embedded at a time, by one process.
    batch_size: int = Field(default=256, gt=0)
    # In which precision embeddings are kept.
    dtype: Literal["float32", "float16"] = "float32"

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        accelerator, folder = context.accelerator, directory / ENCODER
        images = self.modality == "image"
        rows = context.pairs(inputs.data, images)
        if accelerator.is_main_process and not folder.is_dir():
            self._keep_encoder(inputs.encoder, rows, context.seed, folder)
        accelerator.wait_for_everyone()
        encoder = load_encoder(folder, accelerator.device)
        if encoder.modality != self.modality:
            raise ValueError(f"modality {self.modality}, but the encoder {encoder.name} is of the other")

        store = _store(directory, rows, self, encoder, context)
        compute = encoder_features(encoder, rows, self.batch_size, self.dtype)
        store.write(accelerator, "embeddings", compute)

    def output_config(self, inputs: SimpleNamespace) -> Expected:
        """The configuration of the encoder."""
        of_tfidf = (PreTrainedConfig(projection_dim=self.dim),)
        configs = of_tfidf if self.encoder == "tfidf" else inputs.encoder.configs
        return replace(inherited(self, inputs), configs=configs)

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        cost, output = super().cost(inputs), self.output_config(inputs)

        def memory() -> int:
            """Also a part of the embeddings, and what the encoder's layers compute of a batch."""
            if self.encoder == "tfidf":
                raise Unknown("tfidf counts all words of the captions")
            config = getattr(output.known_configs[0], "text_config", output.known_configs[0])
            tokens = config.max_position_embeddings * (8 * config.hidden_size + 3 * config.intermediate_size)
            part = CAPTION_BATCHES_PER_SHARD * self.batch_size * _embedding_size(output) * 4
            return AtMost(cost["memory"]() + part + self.batch_size * 4 * tokens)

        def disk() -> int:
            """The embeddings, and the encoder where that is not on the Hub."""
            kept = size_of_weights(output.known_configs) if Path(self.encoder).is_dir() else 0
            return inputs.data.known_pairs * _embedding_size(output) * np.dtype(self.dtype).itemsize + kept

        return cost | {"memory": memory, "disk": disk}

    def _keep_encoder(self, source: str, rows: datasets.Dataset, seed: int, folder: Path) -> None:
        if self.encoder != "tfidf" and (Path(source) / ENCODER).is_dir():
            with new_folder(folder) as partial:
                shutil.copytree(Path(source) / ENCODER, partial, dirs_exist_ok=True)
            return
        if self.encoder == "tfidf":
            encoder = TfidfEncoder.fit(captions_of(rows), self.dim, seed, self.max_df)
        else:
            encoder = open_encoder(source, self.pooling, modality=self.modality)
        with new_folder(folder) as partial:
            encoder.save(partial)


@dataclass(config=STRICT, kw_only=True)
class ClusterFineStage(Stage):
    """Fine-grained clusters of captions: centers by balanced K-means of their embeddings (MoDE eq. 1), and the nearest
    center of every pair (section 3.3), by any number of processes."""

    kind: ClassVar[str] = "cluster_fine"

    # An embed_captions stage.
    captions: Annotated[str, Reads("embed_captions")]
    # How many centers are learned from its embeddings.
    num_centers: int | None = Field(default=None, gt=0)
    # Instead, a cluster_fine stage of the same encoder, whose centers are taken.
    centers: Annotated[str, Reads("cluster_fine")] | None = None
    # Embeddings that the centers are learned from, drawn at random; None: all. They are in memory at once, in float32:
    # 6 GB for 2 million of size 768. More give similar clusters (MoDE appendix E).
    num_samples: int | None = Field(default=2_000_000, gt=0)
    # Rounds of K-means.
    iterations: int = Field(default=20, gt=0)
    # Other pairs to go to their nearest centers, whose captions are embedded here and not kept: for datasets whose
    # embeddings fit on no disk. None: those of `captions`.
    data: NumberedData | None = None
    # Captions of `data` that are embedded at a time, by one process.
    batch_size: int = Field(default=256, gt=0)

    @model_validator(mode="after")
    def _check(self):
        if (self.num_centers is None) == (self.centers is None):
            raise ValueError("exactly one of num_centers and centers must be set")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        accelerator, captions = context.accelerator, Path(inputs.captions)
        embedded = open_store(captions, "an embed_captions stage")
        if accelerator.is_main_process and not (directory / CENTERS).is_file():
            self._save_centers(inputs, embedded, context, directory)
        accelerator.wait_for_everyone()
        centers = load_centers(directory)
        on_device = torch.as_tensor(centers, device=accelerator.device)
        if self.data is None:
            store = FeatureStore(directory, embedded.num_rows, embedded.shard_size, embedded.about)
            features = embedded["embeddings"]

            def batches(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
                return ({"embeddings": features[pairs.start : pairs.stop]} for pairs in shards)

        else:
            encoder = load_encoder(captions / ENCODER, accelerator.device)
            rows = context.pairs(inputs.data, encoder.modality == "image")
            store = _store(directory, rows, self, encoder, context)
            batches = encoder_features(encoder, rows, self.batch_size)

        def compute(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
            return ({"labels": nearest_centers(batch["embeddings"], on_device)} for batch in batches(shards))

        store.write(accelerator, "labels", compute)
        if accelerator.is_main_process:
            sizes = np.bincount(store["labels"][:], minlength=len(centers))
            print(f"{self.name}: {sizes.sum()} pairs, {sizes.min()} to {sizes.max()} to each of {len(sizes)} centers")

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """The embeddings that the centers are learned from or a part of all, and drawn pictures; on disk an int32 a
        pair."""
        cost, pairs = super().cost(inputs), inherited(self, inputs)

        def memory() -> int:
            learned = 0 if self.num_centers is None else self._num_learned(inputs)
            rows = max(learned, CAPTION_BATCHES_PER_SHARD * self.batch_size)
            return AtMost(cost["memory"]() + rows * _embedding_size(inputs.captions) * 4)

        return cost | {"memory": memory, "disk": lambda: 4 * pairs.known_pairs}

    def _num_learned(self, inputs: SimpleNamespace) -> int:
        pairs = inputs.captions.known_pairs
        return min(pairs, self.num_samples or pairs)

    def _save_centers(self, inputs: SimpleNamespace, embedded: FeatureStore, context: Context, directory: Path) -> None:
        name = embedded.about["encoder"]
        if self.num_centers is None:
            centers = load_centers(Path(inputs.centers), name)
        else:
            sample = embedded["embeddings"].sample(self.num_samples or embedded.num_rows, context.seed)
            device = context.accelerator.device
            centers = balanced_kmeans(sample, self.num_centers, context.seed, self.iterations, device)[0]
        save_centers(directory, centers, name)


class LabelsStage(Stage):
    """A stage that keeps the expert of every pair."""

    main_process_only: ClassVar[bool] = True

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """Drawn pictures, and the labels, an int16 a pair, twice when they are put together."""
        cost, labels = super().cost(inputs), inputs.fine
        memory = {"memory": lambda: cost["memory"]() + 4 * labels.known_pairs}
        return cost | memory | {"disk": lambda: 2 * labels.known_pairs}


@dataclass(config=STRICT, kw_only=True)
class ClusterCoarseStage(LabelsStage):
    """The fine-grained centers grouped into data experts, and the expert of every pair (MoDE eq. 2 and 3).

    Cluster 0 has the largest range, and is to be trained first where there is no time for all.
    """

    kind: ClassVar[str] = "cluster_coarse"

    # A cluster_fine stage.
    fine: Annotated[str, Reads("cluster_fine")]
    # How many data experts there are.
    num_experts: int = Field(gt=0)
    # Give the pairs to the experts at random, as many to each as the clusters have: to compare with (MoDE section 5.1).
    random: bool = False

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        centers = load_centers(Path(inputs.fine))
        expert_of_center, coarse_centers = group_centers(centers, self.num_experts, context.seed)
        _save_experts(self, inputs, context, directory, (centers, expert_of_center, coarse_centers), self.random)


@dataclass(config=STRICT, kw_only=True)
class SelectStage(LabelsStage):
    """One cluster, 0, of the pairs whose fine-grained centers are nearest to the metadata of tasks that are known
    before training (MoDE section 5.5, retrieval-enhanced)."""

    kind: ClassVar[str] = "select"

    # A cluster_fine stage.
    fine: Annotated[str, Reads("cluster_fine")]
    # An embed_captions stage of its encoder.
    captions: Annotated[str, Reads("embed_captions")]
    # Class names, queries or captions.
    metadata: list[str] = Field(min_length=1)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        encoder = load_encoder(Path(inputs.captions) / ENCODER)
        centers = load_centers(Path(inputs.fine), encoder.name)
        if encoder.modality != "text":
            raise ValueError(f"metadata are texts, but {self.captions} embedded images")
        nearest = np.unique(nearest_centers(encode_metadata(encoder, self.metadata), torch.as_tensor(centers)))
        expert_of_center = np.where(np.isin(np.arange(len(centers)), nearest), 0, -1)
        center = centers[nearest].mean(axis=0, keepdims=True)
        _save_experts(self, inputs, context, directory, (centers, expert_of_center, center))


def _embedding_size(captions: Expected) -> int:
    """The size of an embedding, by the configuration of its encoder. Raises Unknown."""
    (config,) = captions.known_configs
    return getattr(config, "projection_dim", None) or config.hidden_size


def _store(
    directory: Path,
    rows: datasets.Dataset,
    stage: EmbedCaptionsStage | ClusterFineStage,
    encoder: SentenceEncoder,
    context: Context,
) -> FeatureStore:
    images = encoder.modality == "image"
    about = {
        "encoder": encoder.name,
        "data": dump(stage.data),
        "pairs": READABLE if images else CAPTIONED,
        "dataset_fingerprint": context.data_fingerprint(rows, images),
    }
    return FeatureStore(directory, len(rows), stage.batch_size * CAPTION_BATCHES_PER_SHARD, about)


def open_store(folder: Path, maker: str) -> FeatureStore:
    """What `_store` made. Raises see `FeatureStore.open`."""
    return FeatureStore.open(folder, maker, {"encoder": str, "data": dict, "dataset_fingerprint": str, "pairs": str})


def _save_experts(
    stage: ClusterCoarseStage | SelectStage,
    inputs: SimpleNamespace,
    context: Context,
    directory: Path,
    centers: tuple[np.ndarray, np.ndarray, np.ndarray],
    at_random: bool = False,
) -> None:
    """Keep the clusters and the expert of every pair, and draw some pairs of each.

    Args:
        centers: of `CaptionClusters`, all but the labels.
        at_random: give every expert as many pairs as its clusters have, but any.
    """
    store = open_store(Path(inputs.fine), "a cluster_fine stage")
    about = {key: store.about[key] for key in ("encoder", "dataset_fingerprint", "pairs")}
    images = about["pairs"] == READABLE
    rows = context.pairs(DataArguments(**store.about["data"]), images)
    if context.data_fingerprint(rows, images) != about["dataset_fingerprint"]:
        raise ValueError(f"the pairs have changed since {inputs.fine} was made; delete it to assign them anew")
    labels = centers[1][store["labels"][:]].astype(np.int16)
    if at_random:
        labels = np.random.default_rng(context.seed).permutation(labels)
    if not (labels >= 0).any():
        raise ValueError("no pair belongs to the centers that the metadata retrieve: name more of them")
    clusters = CaptionClusters(labels, *centers)
    save_clusters(directory, clusters, **about)
    drawn = np.random.default_rng(context.seed).permutation(np.flatnonzero(labels >= 0))[:SAMPLES_DRAWN_FROM]
    drawn = np.sort(drawn)
    titles = np.array([f"expert {label}" for label in labels[drawn]])
    contact_sheet(directory / "clusters.png", rows.select(drawn), titles, context.seed)
    sizes = np.bincount(labels[labels >= 0], minlength=len(clusters.coarse_centers))
    ranges = ", ".join(f"{size} pairs (range {r:.2f})" for size, r in zip(sizes, clusters.ranges, strict=True))
    print(f"{stage.name}: {ranges}; look at {context.output_dir / stage.name / 'clusters.png'}")
