"""Tiny data sets in the layouts in which benchmarks are published. Names of files and keys are written out here, and
none is taken from the specs. Each image has one brightness, by which a test knows it."""

import csv
import io
import json
import struct

import datasets
import numpy as np
import PIL.Image
from scipy.io import savemat
from tiny_sources import write_shard

NUMBER, STEP = 14, 18  # images, and by how much brighter each is than the one before
WORDS = ["red", "green", "blue", "large", "small", "dark", "light"]


def png(number, suffix="png", **options):
    file = io.BytesIO()
    image = PIL.Image.fromarray(np.full((8, 8, 3), STEP * number, np.uint8))
    image.save(file, {"jpg": "jpeg"}.get(suffix, suffix), **options)
    return file.getvalue()


def write_image(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(number))  # whatever the name says


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


def write_names(folder, classes, templates=("a photo of a {c}.", "the {c}.")):
    write_lines(folder / "classnames.txt", classes)
    write_lines(folder / "zeroshot_classification_templates.txt", templates)


# ---- CLIP_benchmark (clip_benchmark/webdataset_builder.py)


def shards(folder, split, suffix, texts):
    for shard in range(2):
        members = []
        for number in range(shard * 7, shard * 7 + 7):
            members.append((f"s{number:07}.webp", png(number, "webp", lossless=True)))
            text = texts[number]
            members.append((f"s{number:07}.{suffix}", text if isinstance(text, bytes) else text.encode()))
        (folder / split).mkdir(exist_ok=True)
        write_shard(folder / split / f"{shard}.tar", members)
    write_lines(folder / split / "nshards.txt", ["2"])


def class_shards(folder, classes=WORDS, split="test"):
    labels = [number % len(classes) for number in range(NUMBER)]
    shards(folder, split, "cls", [f"{label}" for label in labels])
    write_names(folder, classes)
    return [(number, classes[label]) for number, label in enumerate(labels)]


def probe_shards(folder):
    class_shards(folder, split="train")
    return class_shards(folder)


def caption_shards(folder):
    shards(folder, "test", "txt", ["\n".join(captions_of(number)) for number in range(NUMBER)])
    write_lines(folder / "dataset_type.txt", ["retrieval"])
    return [(number, captions_of(number)) for number in range(NUMBER)]


def shards_of(split, classes=WORDS):
    return lambda folder: class_shards(folder, classes, split)


# ---- authors' layouts of classes. The images of a class follow each other in what is expected


def food101(folder):
    names = [f"{WORDS[number % 7]}_food/{number}" for number in range(NUMBER)]
    for number, name in enumerate(names):
        write_image(folder / "images" / f"{name}.jpg", number)
    write_lines(folder / "meta" / "train.txt", names[:1])
    write_lines(folder / "meta" / "test.txt", names[1:])
    write_lines(folder / "zeroshot_classification_templates.txt", ["a photo of a {c}."])
    order = sorted(range(1, NUMBER), key=lambda number: (f"{WORDS[number % 7]}_food", str(number)))
    return [(number, f"{WORDS[number % 7]} food") for number in order]


def cub200(folder):
    names = [f"{n % 7 + 1:03}.{WORDS[n % 7].title()}_bird/{WORDS[n % 7].title()}_Bird_{n:04}" for n in range(NUMBER)]
    for number, name in enumerate(names):
        write_image(folder / "images" / f"{name}.jpg", number)
    write_lines(folder / "images.txt", [f"{number} {name}.jpg" for number, name in enumerate(names, 1)])
    write_lines(folder / "train_test_split.txt", [f"{number} {int(number == 1)}" for number in range(1, NUMBER + 1)])
    write_lines(folder / "zeroshot_classification_templates.txt", ["a photo of a {c}."])
    order = sorted(range(1, NUMBER), key=lambda number: (number % 7, number))
    return [(number, f"{WORDS[number % 7].title()} bird") for number in order]


def frames(split):
    def make(folder):
        for number in range(NUMBER):
            name = f"Do{number % 7}{WORDS[number % 7].title()}Things"
            write_image(folder / split / name / f"v_{name}_g{number:02}.jpg", number)
        write_lines(folder / "zeroshot_classification_templates.txt", ["a photo of a {c}."])
        order = sorted(range(NUMBER), key=lambda number: (number % 7, number))
        return [(number, f"Do{number % 7}{WORDS[number % 7].title()} Things") for number in order]

    return make


def hateful_memes(file):
    def make(folder):
        entries = []
        for number in range(NUMBER):
            write_image(folder / "img" / f"{number:05}.png", number)
            entries.append({"id": number, "img": f"img/{number:05}.png", "label": number % 2, "text": "words"})
        write_lines(folder / file, entries)
        write_names(folder, ["kind", "mean"])
        return [(number, ["kind", "mean"][number % 2]) for number in range(NUMBER)]

    return make


# ---- ImageNet and its variants


def in_folders(*places, first=1440764, form="n{:08}"):
    """A folder for each class, called by its id, in the first place; images of other splits in the others."""

    def make(folder):
        for number in range(NUMBER):
            for place in places:
                write_image(folder / place / form.format(first + number % 7) / f"val_{number:08}.JPEG", number)
        write_names(folder, WORDS)
        order = sorted(range(NUMBER), key=lambda number: (number % 7, number))
        return [(number, WORDS[number % 7]) for number in order]

    return make


def kaggle(folder):
    lines = []
    for number in range(NUMBER):
        write_image(folder / "ILSVRC" / "Data" / "CLS-LOC" / "val" / f"ILSVRC2012_val_{number:08}.JPEG", number)
        lines.append(f"ILSVRC2012_val_{number:08},n{number % 7:08} 1 2 3 4 n00000009 5 6 7 8 ")
    write_lines(folder / "LOC_val_solution.csv", ["ImageId,PredictionString", *lines])
    write_names(folder, WORDS)
    return [(number, WORDS[number % 7]) for number in range(NUMBER)]


def devkit(folder):
    """Its numbers of classes are in another order than the ids."""
    for number in range(NUMBER):
        write_image(folder / "val" / f"ILSVRC2012_val_{number + 1:08}.JPEG", number)
    kit = folder / "ILSVRC2012_devkit_t12" / "data"
    write_lines(kit / "ILSVRC2012_validation_ground_truth.txt", [str(7 - number % 7) for number in range(NUMBER)])
    synsets = [(number, f"n{8 - number:08}", "words") for number in range(1, 8)]
    fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)]
    savemat(kit / "meta.mat", {"synsets": np.array(synsets, dtype=fields)})
    write_names(folder, WORDS)
    return [(number, WORDS[number % 7]) for number in range(NUMBER)]


def babel_imagenet(folder):
    """All classes of ImageNet, of which three have a name. English names beside them count for nothing."""
    names = {1: WORDS[0], 3: WORDS[1], 999: WORDS[2]}
    for number in range(1000):
        write_image(folder / "val" / f"n{7 * number:08}" / "ILSVRC2012_val_00000001.JPEG", number % NUMBER)
    of_german = [list(names), list(names.values())]
    write(folder / "babel_imagenet.json", {"FR": [[0], ["tanche"]], "DE": of_german})
    write(folder / "nllb_dist13b_prompts.json", {"DE": ["a photo of a {}.", "the {}."], "FR": ["un  {} ."]})
    write_names(folder, ["tench"] * 1000, ["an English {c}."])
    return [(number % NUMBER, names.get(number, "none")) for number in range(1000)]


# ---- what torchvision downloads


def cifar(labels, file, names):
    def make(folder):
        rows = [bytes([9] * (labels - 1) + [number % 7]) + bytes([STEP * number] * 3072) for number in range(NUMBER)]
        (folder / file).write_bytes(b"".join(rows))
        write(folder / names, "\n".join([*WORDS[:6], "aquarium_fish", "", ""]))
        write_lines(folder / "zeroshot_classification_templates.txt", ["a photo of a {c}."])
        return [(number, [*WORDS[:6], "aquarium fish"][number % 7]) for number in range(NUMBER)]

    return make


def mnist(folder):
    images = struct.pack(">4i", 2051, NUMBER, 28, 28) + b"".join(bytes([STEP * n] * 784) for n in range(NUMBER))
    (folder / "t10k-images-idx3-ubyte").write_bytes(images)
    labels = struct.pack(">2i", 2049, NUMBER) + bytes(number % 7 for number in range(NUMBER))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(labels)
    write_names(folder, WORDS)
    return [(number, WORDS[number % 7]) for number in range(NUMBER)]


def stl10(folder):
    (folder / "test_X.bin").write_bytes(b"".join(bytes([STEP * number] * 27648) for number in range(NUMBER)))
    (folder / "test_y.bin").write_bytes(bytes(number % 7 + 1 for number in range(NUMBER)))
    write_lines(folder / "class_names.txt", WORDS)
    write_names(folder, WORDS)
    return [(number, WORDS[number % 7]) for number in range(NUMBER)]


def flowers(folder):
    """All images but the first are of the test split, the last ones first."""
    for number in range(NUMBER):
        write_image(folder / "jpg" / f"image_{number + 1:05}.jpg", number)
    savemat(folder / "imagelabels.mat", {"labels": [[n % 7 + 1 for n in range(NUMBER)]]}, do_compression=True)
    savemat(folder / "setid.mat", {"trnid": [[1]], "valid": [[1]], "tstid": [[*range(NUMBER, 1, -1)]]})
    write_names(folder, WORDS)
    return [(number, WORDS[number % 7]) for number in range(NUMBER - 1, 0, -1)]


def cars(folder):
    entries = []
    for number in range(NUMBER):
        write_image(folder / "cars_test" / f"{number + 1:05}.jpg", number)
        entries.append((1, 9, number % 7 + 1, f"{number + 1:05}.jpg"))
    fields = [(name, object) for name in ("bbox_x1", "bbox_x2", "class", "fname")]
    savemat(folder / "cars_test_annos_withlabels.mat", {"annotations": np.array([entries], dtype=fields)})
    write_names(folder, WORDS)
    return [(number, WORDS[number % 7]) for number in range(NUMBER)]


def svhn(folder):
    images = np.broadcast_to(STEP * np.arange(NUMBER, dtype=np.uint8), (32, 32, 3, NUMBER))
    labels = [[number % 7 or 10] for number in range(NUMBER)]
    savemat(folder / "test_32x32.mat", {"X": images, "y": np.array(labels, np.uint8)}, do_compression=True)
    write_names(folder, WORDS)
    return [(number, WORDS[number % 7]) for number in range(NUMBER)]


def listed(file, images, image, line, suffix=".jpg", header=()):
    """A list of images with their classes, or the numbers of these from 1 on."""

    def make(folder):
        lines = []
        for number in range(NUMBER):
            values = {"number": number, "word": WORDS[number % 7], "label": number % 7 + 1}
            write_image(folder / images / f"{image.format(**values)}{suffix}", number)
            lines.append(line.format(image=image.format(**values), **values))
        write_lines(folder / file, [*header, *lines])
        write_names(folder, WORDS if "{label}" in line else sorted(WORDS))
        return [(number, WORDS[number % 7]) for number in range(NUMBER)]

    return make


def sentiment(folder):
    for number in range(NUMBER):
        write_image(folder / "test" / ["negative", "positive"][number % 2] / f"{number:02}.png", number)
    write_lines(folder / "zeroshot_classification_templates.txt", ["the {c}."])
    order = sorted(range(NUMBER), key=lambda number: (number % 2, number))
    return [(number, ["negative", "positive"][number % 2]) for number in order]


def classes_of(number):
    """The first class is in no image alone."""
    return [WORDS[0], WORDS[number % 7]] if number % 7 else [WORDS[1]]


def voc(folder):
    for number in range(NUMBER):
        write_image(folder / "JPEGImages" / f"{number:06}.jpg", number)
    for word in WORDS:
        values = ["-1" if word not in classes_of(number) else str(number % 2) for number in range(NUMBER)]
        lines = [f"{number:06} {value:>2}" for number, value in enumerate(values)]
        write_lines(folder / "ImageSets" / "Main" / f"{word}_test.txt", lines)
        write_lines(folder / "ImageSets" / "Main" / f"{word}_trainval.txt", lines[:1])
    write_lines(folder / "zeroshot_classification_templates.txt", ["a photo of a {c}."])
    return [(number, ", ".join(sorted(classes_of(number)))) for number in range(NUMBER)]


def several_class_shards(folder):
    labels = []
    for number in range(NUMBER):
        file = io.BytesIO()
        np.save(file, np.array([word in classes_of(number) for word in WORDS], np.float32))
        labels.append(file.getvalue())
    shards(folder, "test", "npy", labels)
    write_lines(folder / "dataset_type.txt", ["multilabel"])
    write_names(folder, WORDS)
    return [(number, ", ".join(sorted(classes_of(number), key=WORDS.index))) for number in range(NUMBER)]


# ---- authors' layouts of captions


def karpathy(folder):
    images = []
    for number in range(NUMBER):
        write_image(folder / "flickr30k-images" / f"{number}.jpg", number)
        sentences = [{"raw": caption, "tokens": caption.split()} for caption in captions_of(number)]
        split = "test" if number else "train"
        images.append({"filename": f"{number}.jpg", "split": split, "sentences": sentences, "imgid": number})
    write(folder / "dataset_flickr30k.json", {"images": images, "dataset": "flickr30k"})
    return [(number, captions_of(number)) for number in range(1, NUMBER)]


def flickr30k_token(folder):
    """Beside Karpathy's file, which lacks some of the images."""
    karpathy(folder)
    write_image(folder / "flickr30k-images" / "36979.jpg", 14)
    write_lines(
        folder / "results_20130124.token",
        [f"{n}.jpg#{i}\t{caption} ." for n in [*range(NUMBER), 36979] for i, caption in enumerate(captions_of(n))],
    )
    found = [(number, [f"{caption} ." for caption in captions_of(number)]) for number in range(NUMBER)]
    return [*found, (14, [f"{caption} ." for caption in captions_of(36979)])]


def coco(folder):
    images, annotations = [], []
    for number in reversed(range(NUMBER)):
        write_image(folder / "val2017" / f"{number:012}.jpg", number)
        images.append({"id": 100 + number, "file_name": f"{number:012}.jpg"})
        annotations += [{"image_id": 100 + number, "id": 6 * number + i, "caption": f"{number} {i}"} for i in range(6)]
    write(folder / "annotations" / "captions_val2017.json", {"images": images, "annotations": annotations})
    return [(number, [f"{number} {i}" for i in range(5)]) for number in reversed(range(NUMBER))]


def flair(file, images, prefix=""):
    """One entry a caption, under the key `annotations`."""

    def make(folder):
        entries = []
        for number in range(NUMBER):
            write_image(folder / images / f"{prefix}{number}.jpg", number)
            for caption in captions_of(number):
                entry = {"image": f"{prefix}{number}.jpg", "image_id": number, "caption_id": len(entries)}
                entries.append(entry | {"caption": f"{caption}. And more"})
        write(folder / file, {"annotations": entries})
        return [(number, [f"{caption}. And more" for caption in captions_of(number)]) for number in range(NUMBER)]

    return make


def urban1k(folder):
    for number in range(NUMBER):
        write_image(folder / "image" / f"{number:03}.jpg", number)
        write(folder / "caption" / f"{number:03}.txt", f"{captions_of(number)[0]}, {number}\nanother line\n")
    return [(number, [f"{captions_of(number)[0]}, {number}"]) for number in range(NUMBER)]


def dci(folder):
    expected = []
    for number in range(NUMBER):
        write_image(folder / "photos" / f"sa_{number:03}.jpg", number)
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
    entries, expected = [], []
    for number in range(NUMBER):
        write_image(folder / "docci_aar" / f"aar_test_{number:05}.jpg", number)
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


# ---- compositional suites, and languages


def wrong_captions(number):
    """Of two parts, in turns."""
    return [f"a {WORDS[number % 7]} thing", f"a thing {WORDS[number % 7]}"]


def sugar_crepe(place):
    def make(folder):
        parts, expected = (
            ("add_att", "add_obj", "replace_att", "replace_obj", "replace_rel", "swap_att", "swap_obj"),
            [],
        )
        for part, name in enumerate(parts):
            entries = {}
            for number in (part, part + 7):
                write_image(folder / "val2017" / f"{number:012}.jpg", number)
                caption, negative = wrong_captions(number)
                entries[str(number)] = {
                    "filename": f"{number:012}.jpg", "caption": caption, "negative_caption": negative,
                }  # fmt: skip
                expected.append((number, [caption, negative]))
            write(folder / place / f"{name}.json", entries)
        return expected

    return make


def aro(file, attribute, entries_an_image=1):
    """A box in a white image counts."""

    def make(folder):
        entries, numbers = [], [*range(NUMBER)] * entries_an_image
        for number in numbers:
            image = PIL.Image.new("RGB", (20, 10), "white")
            image.paste((STEP * number,) * 3, (4, 2, 12, 9))
            (folder / "images").mkdir(exist_ok=True)
            image.save(folder / "images" / f"{number}.jpg", "png")
            right, wrong = wrong_captions(number)
            box = {"bbox_x": 4, "bbox_y": 2, "bbox_w": 8, "bbox_h": 7}
            entry = {
                "image_id": str(number),
                "image_path": f"{number}.jpg",
                "true_caption": right,
                "false_caption": wrong,
            }
            entries.append(entry | box | attribute(number))
        write(folder / file, entries)
        return [(number, wrong_captions(number)) for number in numbers]

    return make


def write_parquet(folder, columns):
    """Two files of the test split, as the Hub has them."""
    rows = datasets.Dataset.from_dict(columns)
    for name in columns:
        if name.startswith("image"):
            rows = rows.cast_column(name, datasets.Image())
    (folder / "data").mkdir()
    for shard in range(2):
        part = rows.shard(2, shard, contiguous=True)
        part.to_parquet(folder / "data" / f"test-0000{shard}-of-00002.parquet")


def order(folder):
    """The second order is that of the caption itself, which is no wrong one; the last caption has no other order."""
    captions = [[f"a {WORDS[number % 7]} thing {number}"] for number in range(NUMBER)]
    captions = [[right, f"thing a {number}", right, "thing", "a"] for number, (right,) in enumerate(captions)]
    captions[13] = captions[13][:1] * 5
    names = ["correct_caption", "hard_text_1", "hard_text_2", "hard_text_3", "hard_text_4"]
    columns = dict(zip(names, map(list, zip(*captions, strict=True)), strict=True))
    images = [{"bytes": png(number), "path": None} for number in range(NUMBER)]
    write_parquet(folder, {"images": images, **columns, "id": list(range(NUMBER))})
    return list(enumerate(captions))


TAGS = ["Object", "Relation", "Both"]


def winoground_pairs():
    return [(2 * pair + side, f"a {WORDS[(pair + side) % 7]} thing") for pair in range(7) for side in range(2)]


def winoground_parquet(folder):
    columns = {"id": list(range(7)), "collapsed_tag": [TAGS[pair % 3] for pair in range(7)], "tag": ["x"] * 7}
    for side in range(2):
        of_side = winoground_pairs()[side::2]
        columns[f"image_{side}"] = [{"bytes": png(number), "path": None} for number, _ in of_side]
        columns[f"caption_{side}"] = [caption for _, caption in of_side]
    write_parquet(folder, columns)
    return winoground_pairs()


def winoground_lines(folder):
    entries = []
    for pair in range(7):
        entry = {"id": pair, "collapsed_tag": TAGS[pair % 3], "tag": "x", "secondary_tag": "", "num_main_preds": 1}
        for side, (number, caption) in enumerate(winoground_pairs()[2 * pair : 2 * pair + 2]):
            entry |= {f"image_{side}": f"ex_{pair}_img_{side}", f"caption_{side}": caption}
            write_image(folder / "data" / "images" / f"ex_{pair}_img_{side}.png", number)
        entries.append(entry)
    write_lines(folder / "data" / "examples.jsonl", entries)
    return winoground_pairs()


def xm3600(language):
    def make(folder):
        entries = []
        for number in range(NUMBER):
            write_image(folder / "images" / f"{number:016x}.jpg", number)
            captions = {of: {"caption": [f"{of} {text}" for text in captions_of(number)]} for of in ("en", language)}
            entries.append({"image/key": f"{number:016x}", "image/locale": "de", **captions})
        write_lines(folder / "captions.jsonl", entries)
        return [(number, [f"{language} {text}" for text in captions_of(number)]) for number in range(NUMBER)]

    return make


# benchmark/webdatasets.txt of LAION-AI/CLIP_benchmark
WEBDATASETS = """
    wds_mscoco_captions wds_flickr8k wds_flickr30k wds_imagenet1k wds_imagenetv2 wds_imagenet_sketch wds_imagenet-a
    wds_imagenet-r wds_imagenet-o wds_objectnet wds_fer2013 wds_voc2007 wds_sun397 wds_cars wds_fgvc_aircraft wds_mnist
    wds_stl10 wds_gtsrb wds_country211 wds_renderedsst2 wds_vtab-caltech101 wds_vtab-cifar10 wds_vtab-cifar100
    wds_vtab-clevr_count_all wds_vtab-clevr_closest_object_distance wds_vtab-diabetic_retinopathy wds_vtab-dmlab
    wds_vtab-dsprites_label_orientation wds_vtab-dsprites_label_x_position wds_vtab-dsprites_label_y_position
    wds_vtab-dtd wds_vtab-eurosat wds_vtab-kitti_closest_vehicle_distance wds_vtab-flowers wds_vtab-pets wds_vtab-pcam
    wds_vtab-resisc45 wds_vtab-smallnorb_label_azimuth wds_vtab-smallnorb_label_elevation wds_vtab-svhn
    wds_voc2007_multilabel
""".split()
LANGUAGES = """ar bn cs da de el en es fa fi fil fr he hi hr hu id it ja ko mi nl no pl pt quz ro ru sv sw te th tr uk
    vi zh""".split()
CAPTIONED = ("wds_mscoco_captions", "wds_flickr8k", "wds_flickr30k")
# Benchmark -> (the folder, what makes it) for each layout in which it may lie, in the order in which they are tried
COPIES = {
    folder.removeprefix("wds_").removeprefix("vtab-").replace("-", "_"): [
        (folder, caption_shards if folder in CAPTIONED else class_shards)
    ]
    for folder in WEBDATASETS
} | {
    "imagenet1k": [
        ("wds_imagenet1k", class_shards),
        ("imagenet", in_folders("val")),
        ("ILSVRC2012", in_folders("validation")),
        ("imagenet", devkit),
        ("imagenet-1k", kaggle),
    ],
    "imagenet1k_linear_probe": [
        ("wds_imagenet1k", probe_shards),
        ("imagenet", in_folders("val", "train")),
        ("imagenet", in_folders("validation", "train")),
    ],
    "imagenetv2": [
        ("wds_imagenetv2", class_shards),
        ("imagenetv2-matched-frequency-format-val", in_folders("", first=7, form="{}")),
    ],
    "imagenet_sketch": [("wds_imagenet_sketch", class_shards), ("sketch", in_folders(""))],
    **{
        f"imagenet_{letter}": [(f"wds_imagenet-{letter}", class_shards), (f"imagenet-{letter}", in_folders(""))]
        for letter in "aor"
    },
    "cifar10": [
        ("wds_vtab-cifar10", class_shards),
        ("cifar-10-batches-bin", cifar(1, "test_batch.bin", "batches.meta.txt")),
    ],
    "cifar100": [
        ("wds_vtab-cifar100", class_shards),
        ("cifar-100-binary", cifar(2, "test.bin", "fine_label_names.txt")),
    ],
    "mnist": [("wds_mnist", class_shards), ("MNIST/raw", mnist)],
    "flowers": [("wds_vtab-flowers", class_shards), ("flowers-102", flowers)],
    "cars": [("wds_cars", class_shards), ("stanford_cars", cars)],
    "svhn": [("wds_vtab-svhn", class_shards), ("svhn", svhn)],
    "country211": [("wds_country211", class_shards), ("country211", in_folders("test", first=65, form="{:c}Z"))],
    "stl10": [("wds_stl10", class_shards), ("stl10_binary", stl10)],
    "fgvc_aircraft": [
        ("wds_fgvc_aircraft", class_shards),
        (
            "fgvc-aircraft-2013b",
            listed("data/images_variant_test.txt", "data/images", "{number:07}", "{image} {word}"),
        ),
    ],
    "dtd": [
        ("wds_vtab-dtd", class_shards),
        ("dtd/dtd", listed("labels/test1.txt", "images", "{word}/{word}_{number:04}.jpg", "{image}", "")),
    ],
    "pets": [
        ("wds_vtab-pets", class_shards),
        ("oxford-iiit-pet", listed("annotations/test.txt", "images", "{word}_{number}", "{image} {label} 1 1")),
    ],
    "gtsrb": [
        ("wds_gtsrb", class_shards),
        (
            "gtsrb",
            listed(
                "GT-final_test.csv",
                "GTSRB/Final_Test/Images",
                "{number:05}.ppm",
                "{image};53;54;6;5;48;49;{label}",
                suffix="",
                header=["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"],
            ),
        ),
    ],
    "renderedsst2": [("wds_renderedsst2", class_shards), ("rendered-sst2", sentiment)],
    "voc2007_multilabel": [("wds_voc2007_multilabel", several_class_shards), ("VOCdevkit/VOC2007", voc)],
    "food101": [("food-101", food101), ("wds_food101", shards_of("test"))],
    "cub200": [("CUB_200_2011", cub200), ("wds_cub200", shards_of("test"))],
    "ucf101": [("ucf101", frames("test")), ("wds_ucf101", shards_of("test"))],
    "kinetics700": [("kinetics700", frames("val")), ("wds_kinetics700", shards_of("val"))],
    "hateful_memes": [
        ("hateful_memes", hateful_memes("dev.jsonl")),
        ("hateful_memes", hateful_memes("dev_seen.jsonl")),
        ("wds_hateful_memes", shards_of("dev", ["kind", "mean"])),
    ],
    "flickr30k": [("wds_flickr30k", caption_shards), ("flickr30k", karpathy)],
    "flickr30k_all": [("flickr30k", flickr30k_token)],
    "mscoco_val2017": [("coco", coco)],
    "urban1k": [("Urban1k", flair("annotations/annotations.json", "images")), ("Urban1k", urban1k)],
    "dci": [("densely_captioned_images", dci)],
    "docci_long": [("docci", docci)],
    "docci": [("docci", flair("annotations/test_annotations.json", "images"))],
    "iiw_long": [("imageinwords", iiw)],
    "iiw": [("imageinwords", flair("finegrained_annotations.json", ".", "docci_aar/"))],
    "mmvp_vlm": [("MMVP_VLM", mmvp)],
    "sugar_crepe": [("sugar-crepe", sugar_crepe("data")), ("sugar_crepe", sugar_crepe(""))],
    "winoground": [("winoground", winoground_parquet), ("winoground", winoground_lines)],
    "aro_vg_relation": [
        ("aro", aro("visual_genome_relation.json", lambda number: {"relation_name": ["on", "under"][number > 3]}))
    ],
    "aro_vg_attribution": [
        (
            "aro",
            aro("visual_genome_attribution.json", lambda number: {"attributes": ["a", "bc"[number > 8]]}, 3),
        )
    ],
    "aro_coco_order": [("ARO-COCO-order", order)],
    "aro_flickr30k_order": [("ARO-Flickr-Order", order)],
    **{f"xm3600_{language}": [("xm3600", xm3600(language))] for language in LANGUAGES},
    "babel_imagenet_de": [("imagenet", babel_imagenet)],
}


def make_copy(benchmark, layout, folder):
    """A copy in one of the layouts. Returns the number and the caption, captions or class of every image."""
    folder.mkdir(parents=True)
    return COPIES[benchmark.name][list(benchmark.layouts).index(layout)][1](folder)


def make_all(benchmarks, root):
    for benchmark in benchmarks:
        make_copy(benchmark, benchmark.layouts[0], root / benchmark.name)
