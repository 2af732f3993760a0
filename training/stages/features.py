"""Stages that prepare a dataset for training: captions, features and clusters."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from conversion.processors import load_processor
from data.captions import CaptionPolicy, build_captions
from data.contact_sheet import contact_sheet
from data.pairs import caption_columns
from data.sources import DataArguments, Rows, no_column
from data.worlds import WORLDS
from evaluation.embedder import BATCHES_PER_SHARD, Embedder
from evaluation.feature_store import FeatureStore
from evaluation.feature_store import Rows as StoredRows
from modeling_clip_moe.configuration_clip_moe import embedding_size
from training.clusters import (
    FeatureClusters,
    Library,
    Method,
    accumulate,
    choose_method,
    combine,
    load_clusters,
    save_clusters,
    split,
)
from training.context import Context
from training.estimates import (
    AtMost,
    bytes_at_a_time,
    bytes_of_images,
    bytes_of_rows,
    text_length,
    unknown,
)
from training.loader import PairLoader
from training.settings import STRICT, Reads, dump
from training.stages.base import Model, NumberedData, Stage


@dataclass(config=STRICT, kw_only=True)
class CaptionsStage(Stage):
    """A dataset whose images have several captions each, for `caption_weights`; others use it as their `data.source`.

    The built-in worlds have the columns `caption` (detailed) and `raw_caption` (web).
    """

    kind: ClassVar[str] = "captions"
    main_process_only: ClassVar[bool] = True

    # Whose tokenizer counts tokens: an earlier stage, a folder or a hub name.
    model: Model
    # The images, with a column for each text that captions are made of.
    data: NumberedData
    # How the captions of an image are made, one policy after the other.
    captions: list[CaptionPolicy] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self):
        if self.data.captions_per_line:
            raise ValueError("data.captions_per_line: captions are built of whole texts; leave it out")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        tokenizer = load_processor(inputs.model).tokenizer
        rows = caption_columns(inputs.data, {policy.column for policy in self.captions})
        rows = build_captions(rows, self.captions, tokenizer, context.seed, self.data.num_workers or None)
        rows.save_to_disk(directory)
        missing = np.array([[not caption for caption in captions] for captions in rows["caption"]]).sum(axis=0)
        print(
            f"{self.name}: {len(rows)} images with {len(missing)} captions each, of which are missing: "
            f"{missing.tolist()}"
        )

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        columns = ("caption", "raw_caption")
        for policy in self.captions if self.data.source in WORLDS else ():
            if policy.column not in columns:
                yield "captions", no_column(self.data.source, [policy.column], columns)

    def open_data(self, arguments: DataArguments) -> Rows:
        return caption_columns(arguments, {policy.column for policy in self.captions})

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """Drawn pictures, once more where they have their captions. Of the model, only the tokenizer is read."""
        size = f"a copy of {self.data.source} with other captions"
        return super().cost(inputs) | {"memory": lambda: 2 * bytes_of_rows(inputs.data), "disk": unknown(size)}


@dataclass(config=STRICT, kw_only=True)
class EmbedStage(Stage):
    """The features of a whole dataset, by which it is clustered."""

    kind: ClassVar[str] = "embed"

    # An earlier stage, a folder or a hub name.
    model: Model
    # The pairs to embed.
    data: NumberedData
    # Samples that one process computes at a time.
    batch_size: int = Field(default=256, gt=0)
    # The weights of the L captions of an image, as in the stages that train on them: its text feature is their weighted
    # mean. None: the first caption that is not missing.
    caption_weights: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        accelerator, rows = context.accelerator, context.pairs(inputs.data)
        batch_size, weights = min(self.batch_size, len(rows)), self.caption_weights
        embedder = Embedder(inputs.model, None, batch_size, accelerator.device, state=accelerator)
        loader = PairLoader(rows, embedder.processor, self.data, batch_size, caption_weights=weights)
        about = {"data": dump(self.data), "dataset_fingerprint": context.data_fingerprint(rows)}
        store = FeatureStore(directory, len(rows), batch_size * BATCHES_PER_SHARD, about)
        store.write(accelerator, "features", embedder.compute(loader.in_order()))

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """On disk, features of images and texts in float32."""
        cost = super().cost(inputs)
        return cost | {
            "memory": lambda: cost["memory"]() + _bytes_of_batch(self, inputs),
            "disk": lambda: inputs.data.known_pairs * 2 * embedding_size(inputs.model.clip) * 4,
        }


@dataclass(config=STRICT, kw_only=True)
class ClusterStage(Stage):
    """Clusters of a dataset: K-means of image features, of text features or of both, whose labels are then combined.

    CLIP-MoE: 3 image and 3 text clusters a stage, with the labels of the stages before as `previous`.
    CLIP-FMoE: 4 image clusters, then 64 image clusters `within` each.
    """

    kind: ClassVar[str] = "cluster"
    main_process_only: ClassVar[bool] = True

    # An embed stage.
    features: Annotated[str, Reads("embed")]
    # The cluster stage that these refine: a cluster is then a combination of both labels.
    previous: Annotated[str, Reads("cluster")] | None = None
    # Whether the samples of each previous cluster are clustered by themselves, instead of all together.
    within: bool = False
    # Clusters of the image features. With 1, images do not count.
    num_image_clusters: int = Field(default=1, gt=0)
    # The same for text features.
    num_text_clusters: int = Field(default=1, gt=0)
    # Parts of a random permutation, to compare with (CLIP-FMoE appendix D).
    num_random_clusters: int = Field(default=1, gt=0)
    # What computes K-means. faiss (pip install faiss-cpu) learns centers from num_samples features and assigns all in
    # chunks, so that they need not fit into memory. None: scikit-learn up to 100,000 features, faiss above.
    method: Library | None = None
    # Starts of K-means; the best one counts. None: 10 up to 100,000 features, 1 above.
    n_init: int | None = Field(default=None, gt=0)
    # Features that faiss learns the centers of each K-means from, drawn at random. They are in memory at once. None:
    # 256 for each cluster, and at least 65,536.
    num_samples: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self):
        if self.within and self.previous is None:
            raise ValueError("within needs the clusters of a previous stage")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        source = Path(inputs.features)
        features = FeatureStore.open(source, "an embed stage", {"data": dict, "dataset_fingerprint": str})
        data, fingerprint = DataArguments(**features.about["data"]), features.about["dataset_fingerprint"]
        rows = context.pairs(data)
        if context.data_fingerprint(rows) != fingerprint:
            raise ValueError(f"{data.source} has changed since {source} was made; delete it to embed it anew")
        previous = None if inputs.previous is None else load_clusters(Path(inputs.previous), fingerprint)[0]
        features = {name: features[name] for name in ("image", "text")}
        method = self._method(len(rows))
        method_text = f"K-means by {method}" if self._has_kmeans else "random parts"
        print(f"{self.name}: {method_text}")
        columns, clusters = self._cluster(features, previous, context.seed, method)
        save_clusters(directory, clusters, dataset_fingerprint=fingerprint, method=method_text)
        # Labels that were found within a cluster mean nothing outside of it.
        columns = {"cluster": previous.labels, **columns} if self.within else columns
        labels, names = combine(columns)
        contact_sheet(directory / "clusters.png", rows, labels, context.seed, names=names)
        if previous is not None and not self.within:
            labels, names = combine({"cluster": clusters.labels})
            path = directory / "accumulated_clusters.png"
            contact_sheet(path, rows, labels, context.seed, names=names)
        sizes = np.bincount(clusters.labels)
        print(
            f"{self.name}: {len(sizes)} clusters of {sizes.min()} to {sizes.max()} samples; "
            f"look at {context.output_dir / self.name / 'clusters.png'}"
        )

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """Also the features that K-means holds; on disk an int64 a pair."""
        cost = super().cost(inputs)

        def memory() -> int:
            rows = cost["memory"]()
            if not self._has_kmeans:
                return rows
            size = embedding_size(inputs.features.clip) * 4
            if self.method == "faiss" or self._method(inputs.features.known_pairs).library == "faiss":
                most = max(self.num_image_clusters, self.num_text_clusters)
                return AtMost(rows + Method(num_samples=self.num_samples).samples(most) * size)
            pairs = inputs.features.known_pairs
            return rows + 2 * pairs * size  # scikit-learn centers a copy

        return cost | {"memory": memory, "disk": lambda: 8 * inputs.features.known_pairs}

    @property
    def _has_kmeans(self) -> bool:
        return self.num_image_clusters * self.num_text_clusters > 1

    def _method(self, num_features: int) -> Method:
        return choose_method(num_features, self.method, self.n_init, self.num_samples)

    def _cluster(
        self, features: dict[str, StoredRows], previous: FeatureClusters | None, seed: int, method: Method
    ) -> tuple[dict[str, np.ndarray], FeatureClusters]:
        """The labels by each modality, and the clusters that they make together with the previous ones."""
        numbers = {"image": self.num_image_clusters, "text": self.num_text_clusters, "random": self.num_random_clusters}
        groups, stage = None, 0 if previous is None else previous.tuples.shape[1]
        if self.within:
            groups, stage = previous.labels, 0
        columns = split(features, numbers, seed, groups, method, stage)
        labels = np.ravel_multi_index(tuple(columns.values()), [numbers[name] for name in columns])
        return columns, accumulate(labels, [features["image"], features["text"]], previous)


def _bytes_of_batch(stage: EmbedStage, inputs: SimpleNamespace) -> int:
    """What a layer computes of a batch, and its images or all that are kept in memory."""
    pairs, captions = inputs.data.known_pairs, len(stage.caption_weights or [1])
    at_a_time = min(stage.batch_size, pairs)
    tokens = text_length(inputs.model, inputs.data)
    computed = bytes_at_a_time(inputs.model, tokens * captions, at_a_time)
    images = pairs + at_a_time if stage.data.in_memory else at_a_time
    return computed + bytes_of_images(inputs.model, images)
