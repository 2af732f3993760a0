"""The stage that clusters a dataset."""

import dataclasses
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.messages import join_names
from clip_moe.engine.settings import STRICT, Reads, refuse
from clip_moe.engine.stage import Stage

if typing.TYPE_CHECKING:
    import numpy as np

    from clip_moe.evaluation.feature_store import FeatureStore

# Embeddings that fine-grained centers are learned from, unless num_samples says: 6 GB in float32 of size 768
CENTER_SAMPLES = 2_000_000
# Settings of K-means alone, and of fine-grained centers alone
KMEANS_SETTINGS = "num_image_clusters", "num_text_clusters", "num_random_clusters", "previous", "within"
CENTERS_SETTINGS = "random", "data"
# Pairs that the pictures are drawn from
SAMPLES_DRAWN_FROM = 20_000


@dataclass(config=STRICT, kw_only=True)
class ClusterStage(Stage):
    """Clusters of a dataset: K-means of image features, of text features or of both, or groups of fine-grained centers.

    CLIP-MoE: 3 image and 3 text clusters a stage, with the labels of the stages before as `previous`.
    CLIP-FMoE: 4 image clusters, then 64 image clusters `within` each.
    MoDE: 1,024 fine-grained centers of captions by balanced K-means (eq. 1), grouped into 4 clusters (eq. 2), each for
    a data expert. Every pair belongs to the cluster of its nearest center (section 3.3). Cluster 0 has the largest
    range, and is to be trained first where there is no time for all.

        clip-moe cluster runs/clusters --features runs/embeddings --num_image_clusters 2
        clip-moe cluster runs/coarse --features runs/sentences --num_centers 4 --num_clusters 2
    """

    kind: ClassVar[str] = "cluster"
    has_rows_of_pairs: ClassVar[bool] = True

    # An embed stage of both images and captions; for num_centers and centers, of captions or images alone.
    features: Annotated[str, Reads("embed")]
    # Clusters of the image features. With 1, images do not count.
    num_image_clusters: int = Field(default=1, gt=0)
    # The same for text features.
    num_text_clusters: int = Field(default=1, gt=0)
    # Parts of a random permutation, as a baseline (CLIP-FMoE appendix D).
    num_random_clusters: int = Field(default=1, gt=0)
    # The cluster stage that these refine: a cluster is then a combination of both labels.
    previous: Annotated[str, Reads("cluster")] | None = None
    # Cluster the samples of each previous cluster separately, instead of all together.
    within: bool = False
    # Features that centers are learned from, drawn at random: those of K-means of more than 100,000, and fine-grained
    # ones. They are in memory at once. None: 256 for each cluster and at least 65,536; for fine-grained ones 2 million.
    num_samples: int | None = Field(default=None, gt=0)

    # Fine-grained centers that are learned from the captions' embeddings (MoDE).
    num_centers: int | None = Field(default=None, gt=0)
    # Instead of num_centers, a cluster stage whose fine-grained centers and pairs are reused.
    centers: Annotated[str, Reads("cluster")] | None = None
    # Clusters that the fine-grained centers are grouped into.
    num_clusters: int | None = Field(default=None, gt=0)
    # Instead of num_clusters: class names, queries or captions of tasks that are known before training. The centers
    # nearest to them are cluster 0, and all others belong to none (MoDE section 5.5, retrieval-enhanced).
    metadata: list[str] | None = Field(default=None, min_length=1)
    # Shuffle the assignment, keeping cluster sizes, as a baseline (MoDE section 5.1).
    random: bool = False
    # Assign these pairs to the centers. Their captions are embedded on the fly and not stored, for datasets too large
    # to store. None: those of `features`, or of `centers`.
    data: NumberedData | None = None

    @model_validator(mode="after")
    def _check(self):
        choices = {"num_centers", "centers"}, {"num_clusters", "metadata"}
        given = {name for name in choices[0] | choices[1] if getattr(self, name) is not None}
        unused = self.changed(*(KMEANS_SETTINGS if given else CENTERS_SETTINGS))
        refuse(
            (self.within and self.previous is None, "within needs the clusters of a previous stage"),
            (
                given and any(len(given & choice) != 1 for choice in choices),
                "fine-grained centers need one of num_centers and centers, and one of num_clusters and metadata, got "
                f"{join_names(sorted(given))}",
            ),
            (unused, f"{join_names(unused)}: only valid {'without' if given else 'with'} num_centers or centers"),
        )
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        """K-means is for the main process; any number of processes find the nearest of fine-grained centers."""
        is_fine = self.num_clusters is not None or self.metadata is not None
        store = self._assign(inputs, context, directory) if is_fine else None
        if context.accelerator.is_main_process and is_fine:
            self._group(store, inputs, context.without_others(), directory)
        elif context.accelerator.is_main_process:
            self._split(inputs, context.without_others(), directory)

    def rehearsed(self, num_samples: int) -> typing.Self:
        """As many clusters as few samples have."""
        names = ("num_image_clusters", "num_text_clusters", "num_random_clusters")
        few = {name: min(getattr(self, name), max(1, num_samples // 64)) for name in names}
        few["num_centers"] = self.num_centers and min(self.num_centers, num_samples // 4)
        return dataclasses.replace(super().rehearsed(num_samples), **few)

    def _split(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        """K-means of features, by modality."""
        import numpy as np

        from clip_moe.data.contact_sheet import contact_sheet
        from clip_moe.training.clusters import READABLE, accumulate, combine, load_clusters, save_clusters, split
        from clip_moe.training.pair_features import open_store, pairs_of

        store = open_store(Path(inputs.features), "an embed stage", by_encoder=False)
        rows, fingerprint = pairs_of(store, context), store.about["dataset_fingerprint"]
        previous = None if inputs.previous is None else load_clusters(Path(inputs.previous), fingerprint)[0]
        features = {name: store[name] for name in ("image", "text")}
        numbers = {"image": self.num_image_clusters, "text": self.num_text_clusters, "random": self.num_random_clusters}
        groups = previous.labels if self.within else None
        stage = 0 if previous is None or self.within else previous.tuples.shape[1]
        columns = split(features, numbers, context.seed, groups, self.num_samples, stage)  # the labels by each modality
        labels = np.ravel_multi_index(tuple(columns.values()), [numbers[name] for name in columns])
        clusters = accumulate(labels, [features["image"], features["text"]], previous)
        save_clusters(directory, clusters, dataset_fingerprint=fingerprint, pairs=READABLE)
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

    def _assign(self, inputs: SimpleNamespace, context: Context, directory: Path) -> "FeatureStore":
        """Keep the fine-grained centers, and return the store of the nearest one of every pair (`labels`)."""
        import torch

        from clip_moe.evaluation.feature_store import FeatureStore, save_arrays
        from clip_moe.evaluation.sentence_encoders import BATCH_SIZE, load_encoder
        from clip_moe.training.clusters import CENTERS, READABLE, balanced_kmeans, load_centers, nearest_centers
        from clip_moe.training.pair_features import BATCHES_PER_SHARD, ENCODER, encode_pairs, new_store, open_store

        accelerator = context.accelerator
        captions = open_store(Path(inputs.features), "an embed stage", by_encoder=True)
        encoder_name, images = captions.about["encoder"], captions.about["pairs"] == READABLE
        modality = "image" if images else "text"
        if accelerator.is_main_process and not (directory / CENTERS).is_file():
            if self.centers is not None:
                fine_centers = load_centers(Path(inputs.centers), encoder_name)
            else:
                sample = captions[modality].sample(self.num_samples or CENTER_SAMPLES, context.seed)
                fine_centers = balanced_kmeans(sample, self.num_centers, context.seed, accelerator.device)[0]
            save_arrays(directory / CENTERS, {"centers": fine_centers}, {"encoder": encoder_name})
        accelerator.wait_for_everyone()
        if self.data is None and self.centers is not None:
            return open_store(Path(inputs.centers), "a cluster stage with num_centers", by_encoder=True)
        centers = torch.as_tensor(load_centers(directory, encoder_name), device=accelerator.device)
        if self.data is None:
            store = FeatureStore(directory, captions.num_rows, captions.shard_size, captions.about)
            features = captions[modality]

            def batches(shards: list[range]) -> "typing.Iterator[dict[str, np.ndarray]]":
                return ({modality: features[pairs.start : pairs.stop]} for pairs in shards)

        else:
            from clip_moe.data.pairs import shared_pairs

            encoder = load_encoder(Path(inputs.features) / ENCODER, accelerator.device)
            rows, shard_size = shared_pairs(context, inputs.data, images), BATCH_SIZE * BATCHES_PER_SHARD
            store = new_store(directory, rows, self.data, shard_size, context, images, encoder_name)
            batches = encode_pairs(encoder, rows, BATCH_SIZE)

        def compute(shards: list[range]) -> "typing.Iterator[dict[str, np.ndarray]]":
            return ({"labels": nearest_centers(batch[modality], centers)} for batch in batches(shards))

        store.write(accelerator, "labels", compute)
        return store

    def _group(self, store: "FeatureStore", inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        """Group the fine-grained centers, and give each pair the cluster of its center."""
        import numpy as np

        from clip_moe.data.contact_sheet import contact_sheet
        from clip_moe.evaluation.sentence_encoders import encode_metadata, load_encoder
        from clip_moe.training.clusters import (
            Clusters,
            center_ranges,
            group_centers,
            load_centers,
            save_clusters,
            select_centers,
        )
        from clip_moe.training.pair_features import ENCODER, pairs_of

        about = {key: store.about[key] for key in ("encoder", "dataset_fingerprint", "pairs")}
        fine_centers, rows = load_centers(directory, about["encoder"]), pairs_of(store, context)
        if self.metadata is None:
            cluster_of_center, centers = group_centers(fine_centers, self.num_clusters, context.seed)
        else:
            encoder = load_encoder(Path(inputs.features) / ENCODER)
            if encoder.modality != "text":
                raise ValueError(f"metadata are texts, but {self.features} embedded images")
            cluster_of_center, centers = select_centers(fine_centers, encode_metadata(encoder, self.metadata))
        labels = cluster_of_center[store["labels"][:]].astype(np.int16)
        if self.random:
            labels = np.random.default_rng(context.seed).permutation(labels)
        if not (labels >= 0).any():
            raise ValueError("no pair belongs to the centers that the metadata retrieve: add more metadata")
        tuples = np.arange(len(centers))[:, None]
        save_clusters(directory, Clusters(labels, centers, tuples, fine_centers, cluster_of_center), **about)
        drawn = np.random.default_rng(context.seed).permutation(np.flatnonzero(labels >= 0))[:SAMPLES_DRAWN_FROM]
        drawn = np.sort(drawn)
        titles = np.array([f"expert {label}" for label in labels[drawn]])
        contact_sheet(directory / "clusters.png", rows.select(drawn), titles, context.seed)
        sizes = np.bincount(labels[labels >= 0], minlength=len(centers))
        ranges = center_ranges(fine_centers, cluster_of_center, centers)
        sizes = ", ".join(f"{size} pairs (range {r:.2f})" for size, r in zip(sizes, ranges, strict=True))
        print(f"{self.name}: {sizes}; look at {context.output_dir / self.name / 'clusters.png'}")
