"""Tiny data sets in the layouts in which benchmarks are published. Names of files and keys are written out here, and
none is taken from the specs. Each image has one brightness, by which a test knows it."""

import csv
import functools
import io
import json

import numpy as np
import PIL.Image
from tiny_sources import write_shard

NUMBER, STEP = 14, 18  # images, and by how much brighter each is than the one before
WORDS = ["red", "green", "blue", "large", "small", "dark", "light"]
BY_CLASS = sorted(range(NUMBER), key=lambda number: number % 7)  # where each class has a folder


def png(number, suffix="png", **options):
    file = io.BytesIO()
    image = PIL.Image.fromarray(np.full((8, 8, 3), STEP * number, np.uint8))
    image.save(file, {"jpg": "jpeg"}.get(suffix, suffix), **options)
    return file.getvalue()


def write_image(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(number))  # whatever the name says


def write_images(folder, name):
    """One of each number, whose name has the number."""
    for number in range(NUMBER):
        write_image(folder / name.format(number), number)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def write_lines(path, entries):
    write(path, "".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in entries))


def captions_of(number):
    return [f"a {WORDS[number % 7]} thing", f"number {number}"]


def description_of(number):
    """A text, and its pieces."""
    pieces = [f"On the left, a {WORDS[number % 7]} thing", f"it is number {number}"]
    return f"{pieces[0]}. {pieces[1]}.\n", pieces


def write_templates(folder, *templates):
    write_lines(folder / "zeroshot_classification_templates.txt", templates or ["a photo of a {c}."])


def write_names(folder, classes, templates=("a photo of a {c}.", "the {c}.")):
    write_lines(folder / "classnames.txt", classes)
    write_templates(folder, *templates)


def named(folder, order=range(NUMBER), classes=WORDS):
    """The numbers of images and their classes, whose names are written into the folder."""
    write_names(folder, classes)
    return [(number, classes[number % len(classes)]) for number in order]


# ---- CLIP_benchmark (clip_benchmark/webdataset_builder.py)


def shards(folder, split, suffix, texts):
    for shard in range(2):
        members = []
        for number in range(shard * 7, shard * 7 + 7):
            members.append((f"s{number:07}.webp", png(number, "webp", lossless=True)))
            members.append((f"s{number:07}.{suffix}", texts[number].encode()))
        (folder / split).mkdir(exist_ok=True)
        write_shard(folder / split / f"{shard}.tar", members)
    write_lines(folder / split / "nshards.txt", ["2"])


def class_shards(folder, split="test", classes=WORDS):
    shards(folder, split, "cls", [f"{number % len(classes)}" for number in range(NUMBER)])
    return named(folder, classes=classes)


def probe_shards(folder):
    class_shards(folder, "train")
    return class_shards(folder)


def caption_shards(folder):
    shards(folder, "test", "txt", ["\n".join(captions_of(number)) for number in range(NUMBER)])
    write_lines(folder / "dataset_type.txt", ["retrieval"])
    return [(number, captions_of(number)) for number in range(NUMBER)]


# ---- folders of classes


def birds(folder):
    """Folders with a number before the name, as CUB has them."""
    for number in range(NUMBER):
        name = f"{number % 7 + 1:03}.{WORDS[number % 7].title()}_bird"
        write_image(folder / "test" / name / f"{number:02}.jpg", number)
    write_templates(folder)
    return [(number, f"{WORDS[number % 7].title()} bird") for number in BY_CLASS]


def memes(folder):
    for number in range(NUMBER):
        write_image(folder / "dev" / str(number % 2) / f"{number:05}.png", number)
    return named(folder, sorted(range(NUMBER), key=lambda number: number % 2), ["kind", "mean"])


def frames(folder, split):
    """Named as the videos of UCF-101 are."""
    for number in range(NUMBER):
        name = f"Do{number % 7}{WORDS[number % 7].title()}Things"
        write_image(folder / split / name / f"v_{name}_g{number:02}.jpg", number)
    write_templates(folder)
    return [(number, f"Do{number % 7}{WORDS[number % 7].title()} Things") for number in BY_CLASS]


# ---- ImageNet and its variants


def in_folders(folder, *places, first=1440764, form="n{:08}"):
    """A folder for each class, called by its id, in the first place; images of other splits in the others."""
    for number in range(NUMBER):
        for place in places:
            write_image(folder / place / form.format(first + number % 7) / f"val_{number:08}.JPEG", number)
    return named(folder, BY_CLASS)


# ---- authors' layouts of captions


def flickr30k_token(folder):
    write_images(folder / "flickr30k-images", "{}.jpg")
    write_image(folder / "flickr30k-images" / "36979.jpg", 14)
    found = {number: [f"{caption} ." for caption in captions_of(number)] for number in [*range(NUMBER), 36979]}
    lines = [f"{number}.jpg#{i}\t{text}" for number, texts in found.items() for i, text in enumerate(texts)]
    write_lines(folder / "results_20130124.token", lines)
    return list(enumerate(found.values()))


def coco(folder):
    write_images(folder / "val2017", "{:012}.jpg")
    images, annotations = [], []
    for number in reversed(range(NUMBER)):
        images.append({"id": 100 + number, "file_name": f"{number:012}.jpg"})
        annotations += [{"image_id": 100 + number, "id": 6 * number + i, "caption": f"{number} {i}"} for i in range(6)]
    write(folder / "annotations" / "captions_val2017.json", {"images": images, "annotations": annotations})
    return [(number, [f"{number} {i}" for i in range(5)]) for number in reversed(range(NUMBER))]


def flair(folder, file, images, prefix=""):
    """One entry a caption, under the key `annotations`."""
    write_images(folder / images, prefix + "{}.jpg")
    entries, expected = [], [(n, [f"{caption}. And more" for caption in captions_of(n)]) for n in range(NUMBER)]
    for number, captions in expected:
        for caption in captions:
            entry = {"image": f"{prefix}{number}.jpg", "image_id": number, "caption_id": len(entries)}
            entries.append(entry | {"caption": caption})
    write(folder / file, {"annotations": entries})
    return expected


def urban1k(folder):
    write_images(folder / "image", "{:03}.jpg")
    captions = [f"{captions_of(number)[0]}, {number}" for number in range(NUMBER)]
    for number, caption in enumerate(captions):
        write(folder / "caption" / f"{number:03}.txt", f"{caption}\nanother line\n")
    return [(number, [caption]) for number, caption in enumerate(captions)]


def dci(folder):
    write_images(folder / "photos", "sa_{:03}.jpg")
    expected = []
    for number in range(NUMBER):
        text, pieces = description_of(number)
        entry = {"image": f"sa_{number:03}.jpg", "short_caption": "A thing.", "extra_caption": text, "mask_data": {}}
        write(folder / "annotations" / f"sa_{number:03}.json", entry)
        expected.append((number, [". ".join(["A thing", *pieces])]))
    return expected


def docci(folder):
    entries = []
    for number in range(NUMBER):
        name, split = f"test_{number:05}", "test" if number else "train"
        write_image(folder / "images" / f"{name}.jpg", number)
        entry = {"example_id": name, "split": split, "image_file": f"{name}.jpg"}
        entries.append(entry | {"description": description_of(number)[0]})
    write_lines(folder / "docci_descriptions.jsonlines", entries)
    return [(number, [description_of(number)[0]]) for number in range(1, NUMBER)]


def iiw(folder):
    """Beside the other two sets that people described."""
    write_images(folder / "docci_aar", "aar_test_{:05}.jpg")
    entries, expected = [], []
    for number in range(NUMBER):
        text, pieces = description_of(number)
        entries.append({"image/key": f"aar_test_{number:05}", "IIW": text, "IIW-P5B": "of a model"})
        expected.append((number, [". ".join(pieces)]))
    write_lines(folder / "IIW-400" / "data.jsonl", entries)
    write_lines(folder / "DOCCI_Test" / "data.jsonl", [{"image": "test_1", "IIW": "x"}])
    return expected


def mmvp(folder):
    rows = [["Question ID", "Type", "Statement"]]
    for number in range(NUMBER):
        kind = "Color and Appearance" if number < 8 else "Texts"
        write_image(folder / "MLLM_VLM Images" / kind / f"{number + 1}.jpg", number)
        rows.append([str(number + 1), kind, f'a {WORDS[number % 7]}, "odd" {{thing}}'])
    with open(folder / "Questions.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return [(number, f"a photo of {rows[number + 1][2]}") for number in range(NUMBER)]


# benchmark/webdatasets.txt of LAION-AI/CLIP_benchmark, without wds_voc2007_multilabel
WEBDATASETS = """
    wds_mscoco_captions wds_flickr8k wds_flickr30k wds_imagenet1k wds_imagenetv2 wds_imagenet_sketch wds_imagenet-a
    wds_imagenet-r wds_imagenet-o wds_objectnet wds_fer2013 wds_voc2007 wds_sun397 wds_cars wds_fgvc_aircraft wds_mnist
    wds_stl10 wds_gtsrb wds_country211 wds_renderedsst2 wds_vtab-caltech101 wds_vtab-cifar10 wds_vtab-cifar100
    wds_vtab-clevr_count_all wds_vtab-clevr_closest_object_distance wds_vtab-diabetic_retinopathy wds_vtab-dmlab
    wds_vtab-dsprites_label_orientation wds_vtab-dsprites_label_x_position wds_vtab-dsprites_label_y_position
    wds_vtab-dtd wds_vtab-eurosat wds_vtab-kitti_closest_vehicle_distance wds_vtab-flowers wds_vtab-pets wds_vtab-pcam
    wds_vtab-resisc45 wds_vtab-smallnorb_label_azimuth wds_vtab-smallnorb_label_elevation wds_vtab-svhn
""".split()
OF_CAPTIONS = "wds_mscoco_captions", "wds_flickr8k", "wds_flickr30k"
# Benchmark -> (the folder, what makes it) for each layout in which it may lie, in the order in which they are tried
COPIES = {}
for folder in WEBDATASETS:
    benchmark = folder.removeprefix("wds_").removeprefix("vtab-").replace("-", "_")
    COPIES[benchmark] = [(folder, caption_shards if folder in OF_CAPTIONS else class_shards)]
for benchmark, folder, make, *arguments in (
    ("imagenet1k", "imagenet", in_folders, "val"),
    ("imagenet1k_linear_probe", "wds_imagenet1k", probe_shards),
    ("imagenet1k_linear_probe", "imagenet", in_folders, "val", "train"),
    ("imagenetv2", "imagenetv2-matched-frequency-format-val", functools.partial(in_folders, first=7, form="{}"), ""),
    ("imagenet_sketch", "sketch", in_folders, ""),
    *((f"imagenet_{letter}", f"imagenet-{letter}", in_folders, "") for letter in "aor"),
    ("food101", "food-101", frames, "test"),
    ("food101", "wds_food101", class_shards),
    ("cub200", "CUB_200_2011", birds),
    ("cub200", "wds_cub200", class_shards),
    ("ucf101", "ucf101", frames, "test"),
    ("ucf101", "wds_ucf101", class_shards),
    ("kinetics700", "kinetics700", frames, "val"),
    ("kinetics700", "wds_kinetics700", class_shards, "val"),
    ("hateful_memes", "hateful_memes", memes),
    ("hateful_memes", "wds_hateful_memes", class_shards, "dev", ["kind", "mean"]),
    ("flickr30k_all", "flickr30k", flickr30k_token),
    ("mscoco_val2017", "coco", coco),
    ("urban1k", "Urban1k", urban1k),
    ("dci", "densely_captioned_images", dci),
    ("docci_long", "docci", docci),
    ("docci", "docci", flair, "annotations/test_annotations.json", "images"),
    ("iiw_long", "imageinwords", iiw),
    ("iiw", "imageinwords", flair, "finegrained_annotations.json", ".", "docci_aar/"),
    ("mmvp_vlm", "MMVP_VLM", mmvp),
):  # fmt: skip
    COPIES.setdefault(benchmark, []).append((folder, lambda place, f=make, a=arguments: f(place, *a)))


def make_copy(benchmark, folder, layout=0):
    """A copy in one of the layouts. Returns the number and the caption, captions or class of every image."""
    folder.mkdir(parents=True)
    return COPIES[benchmark][layout][1](folder)
