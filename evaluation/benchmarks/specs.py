"""The benchmarks of the four papers, and those that lie on the Hub in CLIP_benchmark's layout, with one class an image:
a row each; and which of them are in which table of a paper."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from clip_moe.evaluation.benchmarks.layouts import (
    Annotations,
    CaptionFiles,
    CaptionLines,
    ClassFolders,
    ImagePairs,
    Layout,
    Records,
    Shards,
)
from clip_moe.evaluation.task import RECALL_5, Kind


@dataclass(frozen=True)
class Benchmark:
    """A data set, and the protocol by which it is measured.

    Args:
        layouts: in which a copy may lie; the first that fits is read.
        protocol: what is measured, in words.
        folders: names that its folder may have besides `name`.
        hub: its name on the Hub, where it is in the first of the layouts.
        train_split: what a linear probe is fitted to.
        metrics: that stand for it in a table; (): those of its kind.
        numbers: whether its classes may be called by numbers.
        balanced: whether all classes have as many images, as ImageNet's 50: a copy with fewer of one lacks some.
    """

    name: str
    title: str
    kind: Kind
    layouts: Sequence[Layout]
    protocol: str
    folders: Sequence[str] = ()
    hub: str | None = None
    split: str = "test"
    train_split: str = "train"
    metrics: Sequence[str] = ()
    numbers: bool = False
    balanced: bool = False

    @property
    def splits(self) -> list[str]:
        """Those that are read."""
        return [self.split, self.train_split] if self.kind == "linear_probe" else [self.split]

    @property
    def shapes(self) -> str:
        """How a copy may lie, in words."""
        shapes = "; or ".join(layout.for_split(layout.shape, self.split) for layout in self.layouts)
        return shapes + "".join(f", and the same for {split}" for split in self.splits[1:])


# Papers that report the top-1 accuracy and others that report the mean per class both find their column
PER_CLASS = ("accuracy", "mean_per_class_recall")
TOP_5 = ("accuracy", "accuracy_top5")
RECALL_10 = (*RECALL_5, "image_to_text_recall@10", "text_to_image_recall@10")


def _shards(dataset: str, title: str, *more: Layout, folders: Sequence[str] = (), **changes) -> Benchmark:
    """Classification in CLIP_benchmark's layout, where `dataset` is its name without vtab/, or in layouts of others."""
    vtab, name = dataset.startswith("vtab-"), dataset.removeprefix("vtab-").replace("-", "_")
    settings = {
        "name": name,
        "kind": "zero_shot",
        "layouts": [Shards(), *more],
        "protocol": f"{title}, CLIP_benchmark's test split{' (that of VTAB)' if vtab else ''}",
        "folders": (f"wds_{dataset}", f"wds_{name}", dataset, *folders),
        "hub": f"clip-benchmark/wds_{dataset}",
    }
    return Benchmark(title=title, **settings | changes)


def _caption_shards(dataset: str, title: str, metrics: Sequence[str]) -> Benchmark:
    protocol = f"{title}, Karpathy's test split, images with all their captions"
    layouts = [Shards(text="txt")]
    return _shards(dataset, title, kind="retrieval", layouts=layouts, protocol=protocol, metrics=metrics)


def _classes(name: str, title: str, content: str, *folders: str, **changes) -> Benchmark:
    """Classification in folders, or in CLIP_benchmark's layout."""
    layouts, folders = (ClassFolders(), Shards()), (f"wds_{name}", *folders)
    return Benchmark(name, title, "zero_shot", layouts, f"{title}, {content}", folders, **changes)


def _captions(name: str, title: str, layouts: Sequence[Layout], protocol: str, *folders: str, **changes) -> Benchmark:
    return Benchmark(name, title, "retrieval", layouts, protocol, folders, **changes)


def _flair(file: str, images: str) -> Records:
    """A file of captions as FLAIR publishes it (datasets/EVAL_DATASETS.md of ExplainableML/flair)."""
    return Records(files=[file], images=images, texts=["caption"], entries="annotations")


DCI = Records(files=["annotations/*.json"], images="photos", texts=["short_caption", "extra_caption"], joined=True)
DOCCI = Records(
    files=["docci_descriptions.jsonlines"],
    images="images",
    image="image_file",
    texts=["description"],
    split_key="split",
)
# The set of 400 images: the scores of CLIP-FMoE are multiples of 1/400
IIW = Records(
    files=["IIW-400/data.jsonl"], images="docci_aar", image="image/key", texts=["IIW"], suffix=".jpg", joined=True
)
URBAN = CaptionFiles(files=["caption/*.txt"], images="image")
# As torchvision has ImageNet
IMAGENET = ClassFolders(images="SPLIT", test="val")
IMAGENET_FOLDERS = ("imagenet", "imagenet-1k", "ILSVRC2012", "ilsvrc2012")
IMAGENET_V2 = "imagenetv2-matched-frequency-format-val"
CLASSES_ALONE = ClassFolders(images="")

_ROWS = (
    _shards("imagenet1k", "ImageNet", IMAGENET, folders=IMAGENET_FOLDERS, metrics=TOP_5, balanced=True),
    _classes("food101", "Food-101", "its authors' test split", "food-101"),
    _shards("vtab-cifar10", "CIFAR-10"),
    _shards("vtab-cifar100", "CIFAR-100"),
    _classes("cub200", "CUB-200-2011", "its authors' test split", "CUB_200_2011"),
    _shards("sun397", "SUN397"),
    _shards("cars", "Stanford Cars"),
    _shards("fgvc_aircraft", "FGVC-Aircraft", metrics=PER_CLASS),
    _shards("vtab-dtd", "DTD"),
    _shards("vtab-pets", "Oxford-IIIT Pets", metrics=PER_CLASS),
    _shards("vtab-caltech101", "Caltech-101", metrics=PER_CLASS),
    _shards("vtab-flowers", "Flowers-102", metrics=PER_CLASS),
    _shards("mnist", "MNIST", numbers=True),
    _shards("fer2013", "FER-2013"),
    _shards("stl10", "STL-10"),
    _shards("vtab-eurosat", "EuroSAT"),
    _shards("vtab-resisc45", "RESISC45"),
    _shards("gtsrb", "GTSRB"),
    _shards("vtab-kitti_closest_vehicle_distance", "KITTI distance", numbers=True),
    _shards("country211", "Country211"),
    _shards("vtab-pcam", "PatchCamelyon"),
    _classes("ucf101", "UCF-101", "a frame of each video of its test split"),
    _classes(
        "kinetics700",
        "Kinetics-700",
        "a frame of each video of its validation split",
        split="val",
        metrics=["mean_of_top1_and_top5"],
    ),
    _shards("vtab-clevr_count_all", "CLEVR counts", numbers=True),
    _classes("hateful_memes", "Hateful Memes", "its development set", split="dev", metrics=["roc_auc"]),
    _shards("renderedsst2", "Rendered SST2"),
    # Robustness
    _shards("imagenet_sketch", "ImageNet-Sketch", CLASSES_ALONE, folders=["sketch", "ImageNet-Sketch"]),
    _shards("imagenetv2", "ImageNet-V2", CLASSES_ALONE, folders=[IMAGENET_V2], metrics=TOP_5, balanced=True),
    _shards("imagenet-a", "ImageNet-A", CLASSES_ALONE, metrics=TOP_5),
    _shards("imagenet-o", "ImageNet-O", CLASSES_ALONE),
    _shards("imagenet-r", "ImageNet-R", CLASSES_ALONE, metrics=TOP_5),
    # Retrieval
    _caption_shards("mscoco_captions", "COCO", RECALL_10),
    _captions(
        "mscoco_val2017",
        "COCO, validation set",
        [Annotations(files=["annotations/captions_val2017.json"], images="val2017")],
        "COCO, val2017, the first five captions of each image (Long-CLIP's protocol)",
        "coco",
        metrics=RECALL_10,
    ),
    _caption_shards("flickr8k", "Flickr8k", RECALL_5),
    _caption_shards("flickr30k", "Flickr30k", RECALL_10),
    _captions(
        "flickr30k_all",
        "Flickr30k, all images",
        [CaptionLines(files=["results_20130124.token"], images="flickr30k-images")],
        "Flickr30k, images of all splits with all their captions (Long-CLIP's protocol)",
        "flickr30k",
        metrics=RECALL_10,
    ),
    _captions("urban1k", "Urban-1k", [URBAN], "Urban-1k, images with a long caption each", "Urban1k"),
    _captions(
        "dci",
        "DCI",
        [DCI],
        "DCI, all images; the short and the extra caption of each are one, joined as FLAIR does",
        "densely_captioned_images",
    ),
    _captions("docci_long", "DOCCI, long", [DOCCI], "DOCCI, test split, whole descriptions", "docci"),
    _captions(
        "docci",
        "DOCCI",
        [_flair("annotations/test_annotations.json", "images")],
        "DOCCI, test split, several short captions an image (FLAIR's protocol)",
    ),
    _captions(
        "iiw_long",
        "IIW, long",
        [IIW],
        "IIW-400, whole descriptions, joined as FLAIR does",
        "iiw",
        "imageinwords",
    ),
    _captions(
        "iiw",
        "IIW",
        [_flair("finegrained_annotations.json", "")],
        "IIW-400, several short captions an image (FLAIR's protocol)",
        "imageinwords",
    ),
    # Pairs
    Benchmark(
        "mmvp_vlm",
        "MMVP-VLM",
        "pairs",
        (ImagePairs(),),
        "MMVP-VLM, all pairs; each statement, as a photo of it, must be closer to its own image",
        ("MMVP_VLM",),
        metrics=("image",),
    ),
    # Image features
    _shards(
        "imagenet1k",
        "ImageNet, linear probe",
        IMAGENET,
        folders=IMAGENET_FOLDERS,
        name="imagenet1k_linear_probe",
        kind="linear_probe",
        protocol="ImageNet, CLIP_benchmark's test split, fitted to its training split",
    ),
    # In no paper's table
    _shards("objectnet", "ObjectNet"),
    _shards("voc2007", "VOC 2007"),
    _shards("vtab-clevr_closest_object_distance", "CLEVR distance", numbers=True),
    _shards("vtab-diabetic_retinopathy", "Diabetic retinopathy", numbers=True),
    _shards("vtab-dmlab", "DMLab", numbers=True),
    _shards("vtab-dsprites_label_orientation", "dSprites orientation", numbers=True),
    _shards("vtab-dsprites_label_x_position", "dSprites x position", numbers=True),
    _shards("vtab-dsprites_label_y_position", "dSprites y position", numbers=True),
    _shards("vtab-smallnorb_label_azimuth", "SmallNORB azimuth", numbers=True),
    _shards("vtab-smallnorb_label_elevation", "SmallNORB elevation", numbers=True),
    _shards("vtab-svhn", "SVHN", numbers=True),
)

BENCHMARKS = {benchmark.name: benchmark for benchmark in _ROWS}


# Other names of benchmarks
ALIASES = {"imagenet": "imagenet1k"}

FMOE_TRANSFER = "food101 sun397 cars caltech101 eurosat imagenet1k"
FMOE_11 = f"{FMOE_TRANSFER} fgvc_aircraft pets flowers country211 imagenetv2"
HARDER = "imagenet_sketch imagenet_a imagenet_o imagenet_r"
# Tables of the papers
_TABLES = {
    "clip_fmoe_table_1": FMOE_11,
    "clip_fmoe_table_2": "mscoco_captions flickr8k flickr30k",
    "clip_fmoe_table_3": "mscoco_captions flickr8k flickr30k urban1k dci docci_long iiw_long",
    "clip_fmoe_table_4": f"{FMOE_TRANSFER} {HARDER} mscoco_captions urban1k dci",
    "clip_fmoe_table_6": f"{FMOE_11} {HARDER} cifar10 cifar100",
    "clip_fmoe_table_7": f"{FMOE_11} {HARDER} cifar10 cifar100",
    "clip_fmoe_table_8": "urban1k dci docci iiw",
    "clip_fmoe_table_17": "mmvp_vlm",
    "clip_fmoe_table_18": f"{FMOE_TRANSFER} {HARDER} flowers imagenetv2",
    "clip_fmoe_table_19": "mscoco_captions flickr8k flickr30k urban1k dci",
    "clip_moe_table_1": "mmvp_vlm",
    "clip_moe_table_2": "mscoco_val2017 flickr30k_all",
    "clip_moe_table_4": "imagenet1k mscoco_val2017 flickr30k_all",
    "clip_moe_table_5": "imagenet1k cifar10 cifar100 imagenetv2 imagenet_o",
    "clip_up_table_1": "imagenet1k mscoco_captions flickr30k",
    "clip_up_table_2": "imagenet1k mscoco_captions flickr30k",
    "clip_up_table_5": "imagenetv2 imagenet_a imagenet_r",
    "mode_26": "imagenet1k food101 cifar10 cifar100 cub200 sun397 cars fgvc_aircraft dtd pets caltech101 flowers mnist "
    "fer2013 stl10 eurosat resisc45 gtsrb kitti_closest_vehicle_distance country211 pcam ucf101 kinetics700 "
    "clevr_count_all hateful_memes renderedsst2",
    "mode_table_3": f"{HARDER} imagenetv2",
    "mode_table_4": "mscoco_captions flickr30k",
    "mode_table_9": "imagenet1k_linear_probe",
}
# Name of a group -> the names of its benchmarks, in the order of the rows above
GROUPS = {
    "clip_benchmark": [
        row.name for row in _ROWS if (row.hub or "").startswith("clip-benchmark/") and row.kind != "linear_probe"
    ],
    **{table: [name for name in BENCHMARKS if name in names.split()] for table, names in _TABLES.items()},
}
# MoDE's benchmarks are SLIP's (https://arxiv.org/abs/2112.12750), which takes the mean per class where that is usual
MEAN_PER_CLASS = ("mode_26",)


def means_of(metrics: Mapping[str, Collection[str]]) -> dict[str, dict[str, str]]:
    """Title -> benchmark -> metric, for every table of classification benchmarks that was measured whole. Its mean is
    what the paper calls the average.

    Args:
        metrics: benchmark -> the metrics that were measured, the main one first.
    """
    means: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for group, names in GROUPS.items():
        if len(names) > 1 and all(name in metrics and BENCHMARKS[name].kind == "zero_shot" for name in names):
            first = {name: next(iter(metrics[name])) for name in names}
            if group in MEAN_PER_CLASS:
                first |= {name: PER_CLASS[1] for name in names if PER_CLASS[1] in metrics[name]}
            means.setdefault(tuple(first.items()), []).append(group)
    return {
        f"mean of {len(columns)} benchmarks ({', '.join(groups)})": dict(columns) for columns, groups in means.items()
    }


def expand(name: str) -> list[str]:
    """The names of the benchmarks of a group, or that of one, or the name itself, which may be of another task."""
    return GROUPS.get(name) or [ALIASES.get(name, name)]
