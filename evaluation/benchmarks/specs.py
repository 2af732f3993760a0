"""The benchmarks of the four papers, and all that lie on the Hub in CLIP_benchmark's layout: a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.benchmarks.layouts import (
    CaptionFiles,
    CaptionLines,
    ClassFolders,
    CocoCaptions,
    ImagePairs,
    Layout,
    Records,
    Shards,
)
from evaluation.task import Kind


@dataclass(frozen=True)
class Benchmark:
    """A data set, and the protocol by which it is measured.

    Args:
        name: by which it is asked for, and under which its results stand.
        title: in tables.
        kind: of the measure.
        layouts: in which a copy may lie, of which the first that fits is read.
        protocol: what is measured, in words.
        papers: the groups that it is in: a table of a paper each, or several.
        folders: names that its folder may have besides `name`.
        hub: its name on the Hub, where it is in the layout `Shards`.
        split: what is measured.
        train_split: what a linear probe is fitted to.
        metrics: that stand for it in a table; (): those of its kind.
        classes_of, templates_of: under which name an installed clip-benchmark has its classes and templates; None: it
            has none.
    """

    name: str
    title: str
    kind: Kind
    layouts: Sequence[Layout]
    protocol: str
    papers: frozenset[str] = frozenset()
    folders: Sequence[str] = ()
    hub: str | None = None
    split: str = "test"
    train_split: str = "train"
    metrics: Sequence[str] = ()
    classes_of: str | None = None
    templates_of: str | None = None

    @property
    def splits(self) -> list[str]:
        """Those that are read."""
        return [self.split, self.train_split] if self.kind == "linear_probe" else [self.split]

    @property
    def shapes(self) -> str:
        """How a copy may lie, in words."""
        shapes = " or ".join(layout.shape.replace("SPLIT", self.split) for layout in self.layouts)
        return shapes + "".join(f", and the same for {split}" for split in self.splits[1:])


# Papers that report the top-1 accuracy and others that report the mean per class both find their column
TOP_1_AND_PER_CLASS = ("accuracy", "mean_per_class_recall")
TOP_1_AND_5 = ("accuracy", "accuracy_top5")
RECALL_AT_1_AND_5 = tuple(f"{way}_recall@{k}" for k in (1, 5) for way in ("image_to_text", "text_to_image"))
RECALL_UP_TO_10 = (*RECALL_AT_1_AND_5, "image_to_text_recall@10", "text_to_image_recall@10")
# Of these, besides ImageNet, clip-benchmark 1.6.2 has class names
NAMED = frozenset(
    "clevr_closest_object_distance clevr_count_all country211 diabetic_retinopathy dmlab eurosat fer2013 flowers gtsrb "
    "kitti_closest_vehicle_distance mnist pcam pets svhn".split()
)


def _of_clip_benchmark(dataset: str, title: str, papers: str = "", **changes) -> Benchmark:
    """Classification in CLIP_benchmark's layout: `dataset` is its name there, without vtab/."""
    vtab, name = dataset.startswith("vtab-"), dataset.removeprefix("vtab-").replace("-", "_")
    is_imagenet = name.startswith(("imagenet", "objectnet"))
    has_all_classes = name in ("imagenet1k", "imagenetv2", "imagenet_sketch")
    benchmark = Benchmark(
        name=name,
        title=title,
        kind="zero_shot",
        layouts=(Shards(),),
        protocol=f"{title}, CLIP_benchmark's test split{' (that of VTAB)' if vtab else ''}",
        papers=frozenset(["clip_benchmark", *papers.split()]),
        folders=(f"wds_{dataset}", f"wds_{name}", dataset),
        hub=f"clip-benchmark/wds_{dataset}",
        classes_of="imagenet1k" if has_all_classes else name if name in NAMED else None,
        templates_of="imagenet1k" if is_imagenet else name,
    )
    return replace(benchmark, **changes)


def _captions_of_clip_benchmark(dataset: str, title: str, papers: str, **changes) -> Benchmark:
    benchmark = _of_clip_benchmark(dataset, title, papers, kind="retrieval", layouts=(Shards(captions=True),))
    protocol = f"{title}, Karpathy's test split, images with all their captions"
    return replace(benchmark, protocol=protocol, classes_of=None, templates_of=None, **changes)


def _of_authors(name: str, title: str, layouts: Sequence[Layout], protocol: str, papers: str, **changes) -> Benchmark:
    """Classification in layouts of its authors, or in CLIP_benchmark's."""
    benchmark = Benchmark(name, title, "zero_shot", (*layouts, Shards()), protocol, frozenset(papers.split()))
    benchmark = replace(benchmark, **changes)
    return replace(benchmark, folders=(f"wds_{name}", *benchmark.folders))


def _captions(
    name: str, title: str, layouts: Sequence[Layout], protocol: str, papers: str, *folders: str, **changes
) -> Benchmark:
    benchmark = Benchmark(name, title, "retrieval", layouts, protocol, frozenset(papers.split()), folders)
    return replace(benchmark, **changes)


def _docci(**changes) -> Records:
    layout = Records(
        files={"docci_descriptions.jsonlines": "images"},
        image=("image_file",),
        texts=("description",),
        split_key="split",
    )
    return replace(layout, **changes)


def _iiw(**changes) -> Records:
    """The set of 400 images: the scores of CLIP-FMoE are multiples of 1/400."""
    layout = Records(
        files={"IIW-400/data.jsonl": "docci_aar"}, image=("image/key", "image"), texts=("IIW",), suffix=".jpg"
    )
    return replace(layout, **changes)


def _flair(file: str, images: str) -> Records:
    """A file of captions as FLAIR publishes it (datasets/EVAL_DATASETS.md of ExplainableML/flair)."""
    return Records(files={file: images}, image=("image",), texts=("caption",), entries="annotations")


def _flickr30k(split_key: str | None, note: str = "") -> Records:
    return Records(
        files={"dataset_flickr30k.json": "flickr30k-images"},
        image=("filename",),
        texts=("sentences.raw",),
        entries="images",
        split_key=split_key,
        note=note,
    )


def _hateful_memes(file: str) -> Records:
    return Records(files={file: ""}, image=("img",), label="label")


DCI = Records(
    files={"annotations/*.json": "photos"}, image=("image",), texts=("short_caption", "extra_caption"), pieces="joined"
)
NOT_FLAIRS = "; captions are the pieces of its descriptions between full stops, not those of FLAIR's file"

# Tables of CLIP-FMoE with the same data sets, those of zero-shot classification and of retrieval
FMOE_11 = "clip_fmoe_table_1 clip_fmoe_table_6 clip_fmoe_table_7"
FMOE_17 = "clip_fmoe_table_6 clip_fmoe_table_7"
FMOE_EXPERTS = "clip_fmoe_table_4 clip_fmoe_table_18"
FMOE_LONG = "clip_fmoe_table_3 clip_fmoe_table_4 clip_fmoe_table_8 clip_fmoe_table_19"
CLIP_UP = "clip_up_table_1 clip_up_table_2"

_ROWS = (
    _of_clip_benchmark(
        "imagenet1k",
        "ImageNet",
        f"mode_26 {CLIP_UP} clip_moe_table_4 clip_moe_table_5 {FMOE_11} {FMOE_EXPERTS}",
        metrics=TOP_1_AND_5,
    ),
    _of_authors(
        "food101",
        "Food-101",
        [ClassFolders("images", listed="food101")],
        "Food-101, its authors' test split",
        f"mode_26 {FMOE_11} {FMOE_EXPERTS}",
        folders=("food-101",),
        templates_of="food101",
    ),
    _of_clip_benchmark("vtab-cifar10", "CIFAR-10", f"mode_26 clip_moe_table_5 {FMOE_17}"),
    _of_clip_benchmark("vtab-cifar100", "CIFAR-100", f"mode_26 clip_moe_table_5 {FMOE_17}"),
    _of_authors(
        "cub200",
        "CUB-200-2011",
        [ClassFolders("images", listed="cub")],
        "CUB-200-2011, its authors' test split",
        "mode_26",
        folders=("CUB_200_2011",),
    ),
    _of_clip_benchmark("sun397", "SUN397", f"mode_26 {FMOE_11} {FMOE_EXPERTS}"),
    _of_clip_benchmark("cars", "Stanford Cars", f"mode_26 {FMOE_11} {FMOE_EXPERTS}"),
    _of_clip_benchmark("fgvc_aircraft", "FGVC-Aircraft", f"mode_26 {FMOE_11}", metrics=TOP_1_AND_PER_CLASS),
    _of_clip_benchmark("vtab-dtd", "DTD", "mode_26"),
    _of_clip_benchmark("vtab-pets", "Oxford-IIIT Pets", f"mode_26 {FMOE_11}", metrics=TOP_1_AND_PER_CLASS),
    _of_clip_benchmark(
        "vtab-caltech101",
        "Caltech-101",
        f"mode_26 {FMOE_11} {FMOE_EXPERTS}",
        metrics=TOP_1_AND_PER_CLASS,
        classes_of="caltech101_vtab",
    ),
    _of_clip_benchmark(
        "vtab-flowers", "Flowers-102", f"mode_26 {FMOE_11} clip_fmoe_table_18", metrics=TOP_1_AND_PER_CLASS
    ),
    _of_clip_benchmark("mnist", "MNIST", "mode_26"),
    _of_clip_benchmark("fer2013", "FER-2013", "mode_26"),
    _of_clip_benchmark("stl10", "STL-10", "mode_26"),
    _of_clip_benchmark("vtab-eurosat", "EuroSAT", f"mode_26 {FMOE_11} {FMOE_EXPERTS}"),
    _of_clip_benchmark("vtab-resisc45", "RESISC45", "mode_26"),
    _of_clip_benchmark("gtsrb", "GTSRB", "mode_26"),
    _of_clip_benchmark("vtab-kitti_closest_vehicle_distance", "KITTI distance", "mode_26"),
    _of_clip_benchmark("country211", "Country211", f"mode_26 {FMOE_11}"),
    _of_clip_benchmark("vtab-pcam", "PatchCamelyon", "mode_26"),
    _of_authors("ucf101", "UCF-101", [ClassFolders()], "UCF-101, a frame of each video of its test split", "mode_26"),
    _of_authors(
        "kinetics700",
        "Kinetics-700",
        [ClassFolders()],
        "Kinetics-700, a frame of each video of its validation split",
        "mode_26",
        split="val",
        metrics=("mean_of_top1_and_top5",),
    ),
    _of_clip_benchmark("vtab-clevr_count_all", "CLEVR counts", "mode_26"),
    _of_authors(
        "hateful_memes",
        "Hateful Memes",
        [_hateful_memes("dev.jsonl"), _hateful_memes("dev_seen.jsonl")],
        "Hateful Memes, its development set",
        "mode_26",
        split="dev",
        metrics=("roc_auc",),
    ),
    _of_clip_benchmark("renderedsst2", "Rendered SST2", "mode_26"),
    # Robustness
    _of_clip_benchmark("imagenet_sketch", "ImageNet-Sketch", f"mode_table_3 {FMOE_17} {FMOE_EXPERTS}"),
    _of_clip_benchmark(
        "imagenetv2",
        "ImageNet-V2",
        f"mode_table_3 clip_up_table_5 clip_moe_table_5 {FMOE_11} clip_fmoe_table_18",
        metrics=TOP_1_AND_5,
    ),
    _of_clip_benchmark(
        "imagenet-a", "ImageNet-A", f"mode_table_3 clip_up_table_5 {FMOE_17} {FMOE_EXPERTS}", metrics=TOP_1_AND_5
    ),
    _of_clip_benchmark("imagenet-o", "ImageNet-O", f"mode_table_3 clip_moe_table_5 {FMOE_17} {FMOE_EXPERTS}"),
    _of_clip_benchmark(
        "imagenet-r", "ImageNet-R", f"mode_table_3 clip_up_table_5 {FMOE_17} {FMOE_EXPERTS}", metrics=TOP_1_AND_5
    ),
    # Retrieval
    _captions_of_clip_benchmark(
        "mscoco_captions",
        "COCO",
        f"{CLIP_UP} mode_table_4 clip_fmoe_table_2 clip_fmoe_table_3 clip_fmoe_table_4 clip_fmoe_table_19",
        metrics=RECALL_UP_TO_10,
    ),
    _captions(
        "mscoco_val2017",
        "COCO, validation set",
        [CocoCaptions()],
        "COCO, val2017, the first five captions of each image (Long-CLIP's protocol)",
        "clip_moe_table_2 clip_moe_table_4",
        "coco",
        metrics=RECALL_UP_TO_10,
    ),
    _captions_of_clip_benchmark(
        "flickr8k",
        "Flickr8k",
        "clip_fmoe_table_2 clip_fmoe_table_3 clip_fmoe_table_19",
        metrics=RECALL_AT_1_AND_5,
    ),
    _captions_of_clip_benchmark(
        "flickr30k",
        "Flickr30k",
        f"{CLIP_UP} mode_table_4 clip_fmoe_table_2 clip_fmoe_table_3 clip_fmoe_table_19",
        layouts=[Shards(captions=True), _flickr30k("split")],
        metrics=RECALL_UP_TO_10,
    ),
    _captions(
        "flickr30k_all",
        "Flickr30k, all images",
        [CaptionLines(), _flickr30k(None, "; here the images of Karpathy's list alone")],
        "Flickr30k, images of all splits with all their captions (Long-CLIP's protocol)",
        "clip_moe_table_2 clip_moe_table_4",
        "flickr30k",
        metrics=RECALL_UP_TO_10,
    ),
    _captions(
        "urban1k",
        "Urban-1k",
        [_flair("annotations/annotations.json", "images"), CaptionFiles()],
        "Urban-1k, images with a long caption each",
        FMOE_LONG,
        "Urban1k",
    ),
    _captions(
        "dci",
        "DCI",
        [DCI],
        "DCI, all images; the short and the extra caption of each are one, joined as FLAIR does",
        FMOE_LONG,
        "densely_captioned_images",
    ),
    _captions(
        "docci_long",
        "DOCCI, long",
        [_docci()],
        "DOCCI, test split, whole descriptions",
        "clip_fmoe_table_3",
        "docci",
    ),
    _captions(
        "docci",
        "DOCCI",
        [_flair("annotations/test_annotations.json", "images"), _docci(pieces="apart", note=NOT_FLAIRS)],
        "DOCCI, test split, several short captions an image (FLAIR's protocol)",
        "clip_fmoe_table_8",
    ),
    _captions(
        "iiw_long",
        "IIW, long",
        [_iiw(pieces="joined")],
        "IIW-400, whole descriptions, joined as FLAIR does",
        "clip_fmoe_table_3",
        "iiw",
        "imageinwords",
    ),
    _captions(
        "iiw",
        "IIW",
        [_flair("finegrained_annotations.json", ""), _iiw(pieces="apart", note=NOT_FLAIRS)],
        "IIW-400, several short captions an image (FLAIR's protocol)",
        "clip_fmoe_table_8",
        "imageinwords",
    ),
    # Pairs
    Benchmark(
        "mmvp_vlm",
        "MMVP-VLM",
        "pairs",
        (ImagePairs(),),
        "MMVP-VLM, all pairs; each statement, as a photo of it, must be closer to its own image",
        frozenset(["clip_moe_table_1", "clip_fmoe_table_17"]),
        ("MMVP_VLM",),
        metrics=("image",),
    ),
    # Image features
    replace(
        _of_clip_benchmark("imagenet1k", "ImageNet, linear probe", kind="linear_probe"),
        name="imagenet1k_linear_probe",
        protocol="ImageNet, CLIP_benchmark's test split, fitted to its training split",
        papers=frozenset(["mode_table_9"]),
    ),
    # In no paper's table
    _of_clip_benchmark("objectnet", "ObjectNet"),
    _of_clip_benchmark("voc2007", "VOC 2007"),
    _of_clip_benchmark("vtab-clevr_closest_object_distance", "CLEVR distance"),
    _of_clip_benchmark("vtab-diabetic_retinopathy", "Diabetic retinopathy"),
    _of_clip_benchmark("vtab-dmlab", "DMLab"),
    _of_clip_benchmark("vtab-dsprites_label_orientation", "dSprites orientation"),
    _of_clip_benchmark("vtab-dsprites_label_x_position", "dSprites x position"),
    _of_clip_benchmark("vtab-dsprites_label_y_position", "dSprites y position", templates_of=None),
    _of_clip_benchmark("vtab-smallnorb_label_azimuth", "SmallNORB azimuth"),
    _of_clip_benchmark("vtab-smallnorb_label_elevation", "SmallNORB elevation"),
    _of_clip_benchmark("vtab-svhn", "SVHN"),
)

BENCHMARKS = {benchmark.name: benchmark for benchmark in _ROWS}
# Name of a group -> the names of its benchmarks, in the order of the table
GROUPS = {
    group: [benchmark.name for benchmark in _ROWS if group in benchmark.papers]
    for group in sorted({group for benchmark in _ROWS for group in benchmark.papers})
}
