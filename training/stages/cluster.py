"""The stage that clusters the features of a dataset."""

import dataclasses
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.engine.stage import Stage


@dataclass(config=STRICT, kw_only=True)
class ClusterStage(Stage):
    """Clusters of a dataset: K-means of image features, of text features or of both, whose labels are then combined.

    CLIP-MoE: 3 image and 3 text clusters a stage, with the labels of the stages before as `previous`.
    CLIP-FMoE: 4 image clusters, then 64 image clusters `within` each.

        clip-moe cluster runs/clusters --features runs/features --num_image_clusters 2
    """

    kind: ClassVar[str] = "cluster"
    has_rows_of_pairs: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # A features stage.
    features: Annotated[str, Reads("features")]
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
    # chunks, so that they need not fit into memory. None: scikit-learn up to 100,000 features, the best of ten starts;
    # faiss above, of one.
    method: Literal["scikit-learn", "faiss"] | None = None
    # Features that faiss learns the centers of each K-means from, drawn at random. They are in memory at once. None:
    # 256 for each cluster, and at least 65,536.
    num_samples: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self):
        if self.within and self.previous is None:
            raise ValueError("within needs the clusters of a previous stage")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import numpy as np

        from clip_moe.data.arguments import DataArguments
        from clip_moe.data.contact_sheet import contact_sheet
        from clip_moe.evaluation.feature_store import FeatureStore
        from clip_moe.training.clusters import accumulate, choose_method, combine, load_clusters, save_clusters, split

        source = Path(inputs.features)
        features = FeatureStore.open(source, "a features stage", {"data": dict, "dataset_fingerprint": str})
        data, fingerprint = DataArguments(**features.about["data"]), features.about["dataset_fingerprint"]
        rows = context.pairs(data)
        if context.data_fingerprint(rows) != fingerprint:
            raise ValueError(f"{data.source} has changed since {source} was made; delete it to embed it anew")
        previous = None if inputs.previous is None else load_clusters(Path(inputs.previous), fingerprint)[0]
        features = {name: features[name] for name in ("image", "text")}
        method = choose_method(len(rows), self.method, self.num_samples)
        numbers = {"image": self.num_image_clusters, "text": self.num_text_clusters, "random": self.num_random_clusters}
        has_kmeans = self.num_image_clusters * self.num_text_clusters > 1
        method_text = f"K-means by {method}" if has_kmeans else "random parts"
        print(f"{self.name}: {method_text}")
        groups = previous.labels if self.within else None
        stage = 0 if previous is None or self.within else previous.tuples.shape[1]
        columns = split(features, numbers, context.seed, groups, method, stage)  # the labels by each modality
        labels = np.ravel_multi_index(tuple(columns.values()), [numbers[name] for name in columns])
        clusters = accumulate(labels, [features["image"], features["text"]], previous)
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

    def rehearsed(self, num_samples: int) -> typing.Self:
        """As many clusters as few samples have."""
        names = ("num_image_clusters", "num_text_clusters", "num_random_clusters")
        few = {name: min(getattr(self, name), max(1, num_samples // 64)) for name in names}
        return dataclasses.replace(super().rehearsed(num_samples), **few)
