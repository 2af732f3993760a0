"""The stage that reads pairs once, and holds out a test."""

import dataclasses
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.provenance import OVERVIEW
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, PairsStage


@dataclass(config=STRICT, kw_only=True)
class SplitStage(PairsStage):
    """Reads pairs once, looks at them, and splits them into pairs to train on, to choose a model on (`validation`) and
    to test on. Other stages name it as their `data.source`.

    If the data have no split `test`, it holds out a tenth, and a tenth of the others to choose a model on. Training
    then has none of their captions or images, nor compressed or scaled copies of them. Where captions repeat as classes
    do, it holds out by image alone, and an `answer` stage scores by class. It prints the best scores that the captions
    allow, which an `answer` stage repeats in its report. Images in files of their own stay where they are.

        clip-moe split runs/pictures --data.source symbols --data.num_samples 64 --model training/symbol_clip
    """

    kind: ClassVar[str] = "split"

    # The pairs to train on, and their source, which may have the pairs to test on.
    data: NumberedData
    # Model whose tokenizer reads the captions: an earlier stage, a folder or a hub name.
    model: Model
    # The split to test on. Where the data have none of this name, one is held out.
    test_split: str = "test"
    # Fraction of the pairs to hold out.
    held_out: float = Field(default=0.1, gt=0, lt=1)
    # Fraction of the pairs that are not of the test, to choose a model on; 0: it is chosen on the test.
    validation: float = Field(default=0.1, ge=0, lt=1)

    def rehearsed(self, num_samples: int) -> typing.Self:
        """With all pairs: a few may all have one caption."""
        return self

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        """A hash of what a table names as its test, since `data` is what it names for training."""
        from clip_moe.data.annotations import NoSplit
        from clip_moe.data.identity import identity
        from clip_moe.data.local_data import is_here, is_table
        from clip_moe.engine.digests import value_digest

        if not is_table(inputs.data.source) or not is_here(inputs.data.source):
            return {}
        try:
            test = identity(dataclasses.replace(inputs.data, split=self.test_split, skip=None, num_samples=None))
        except NoSplit:
            return {}
        return {} if test is None else {"test_split": value_digest(test)}  # None: its pictures are gone

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import datasets
        import numpy as np

        from clip_moe.conversion.processors import load_processor
        from clip_moe.data.held_out import class_names, hold_out
        from clip_moe.data.near_copies import MOST_ALIKE, find_copies
        from clip_moe.data.overview import look_at
        from clip_moe.data.pairs import one_row_an_image, pairs_with_images
        from clip_moe.data.sources import has_split
        from clip_moe.engine.files import write_text
        from clip_moe.engine.intervals import shown_differences
        from clip_moe.engine.messages import join_names
        from clip_moe.evaluation.class_names import are_ids

        data, tokenizer = inputs.data, load_processor(inputs.model).tokenizer
        # Unreadable pairs are judged here, over all of them, not by what trains and measures. `find_copies` decodes
        # again: no other stage needs what it computes, while all of them share the first look
        train = pairs_with_images(data, decode=True)
        is_given = has_split(data, self.test_split)
        if is_given:
            test = pairs_with_images(dataclasses.replace(data, split=self.test_split, skip=None), decode=True)
            images = [part.select_columns("image") for part in (train, test)]
            copies = find_copies(datasets.concatenate_datasets(images))
            of_training = np.arange(len(train))
        else:
            copies = find_copies(train)
            of_training, of_test = hold_out(train, self.held_out, context.seed, tokenizer, copies)
            train, test = train.select(of_training), train.select(of_test)
        parts = {"train": train, "test": test}
        if self.validation:
            among = copies.among(of_training)
            try:
                of_training, of_validation = hold_out(train, self.validation, context.seed + 1, tokenizer, among)
            except ValueError as error:
                message = f"{error}, or hold out no pairs to choose a model on: --{self.name}.validation 0"
                raise ValueError(message) from None
            parts |= {"train": train.select(of_training), "validation": train.select(of_validation)}
        captions = [caption for part in parts.values() for caption in part["caption"]]
        names = class_names(captions, tokenizer) or []
        starts = dict(zip(parts, np.cumsum([0, *map(len, parts.values())]).tolist(), strict=False))
        names_of = {split: names[starts[split] : starts[split] + len(part)] for split, part in parts.items()}
        if is_given:
            lines = [f"The test is the split {self.test_split} of {data.source}."]
            of_test = np.arange(len(train), len(train) + len(test))
            same, near = copies.among(np.concatenate([of_training, of_test])).in_training(len(of_training))
            if same + near:
                lines.append(
                    f"{same + near:,} of the test's {len(test):,} images are in training, too: {same:,} with the same "
                    f"pixels, {near:,} that look like them, compressed or scaled."
                )
        else:
            together = "" if names else ", together with all that have the same caption"
            lines = [
                f"{data.source} has no split {self.test_split}, so {len(test) / (len(train) + len(test)):.0%} of its "
                f"pairs are held out as the test{together}."
            ]
            if number := len(np.unique(copies.near)):
                lines.append(
                    f"{number:,} images look like others, compressed or scaled, and are on one side with them."
                )
        if copies.num_too_alike:
            lines.append(
                f"{copies.num_too_alike:,} images look roughly like more than {MOST_ALIKE} others and count as "
                "different pictures."
            )
        if self.validation:
            lines.append(f"Of the others, {len(parts['validation']):,} are held out likewise, to choose a model on.")
        classes = set(names_of["train"])
        by_class = bool(names) and set(names) <= classes and not are_ids(list(set(names)))
        if names:
            how = "" if is_given else "held out by picture, and "
            score = f"by class, {len(set(names))} in all" if by_class else "by retrieval"
            lines.append(f"The captions repeat as classes do: the test is {how}scored {score}.")
            if missing := sorted(classes - set(names_of["test"])):
                lines.append(f"{len(missing)} of the classes have no picture in the test: {join_names(missing)}.")
        feature = datasets.ClassLabel(names=list(dict.fromkeys(names))) if by_class else None
        for split, part in parts.items():
            if feature is not None:
                part = part.remove_columns("caption").add_column("caption", names_of[split])
                if split != "train":
                    part = part.add_column("label", feature.str2int(names_of[split]), feature=feature)
            elif split != "train":
                part = one_row_an_image(part)
            parts[split] = part
        train, test = parts["train"], parts["test"]
        if len(test) < 2:
            raise ValueError(
                f"test_split: {self.test_split} of {data.source} has one image, but needs two to choose from"
            )
        datasets.DatasetDict(parts).save_to_disk(directory)
        lines += [shown_differences(len(test)), *look_at(train, test, tokenizer)]
        write_text(directory / OVERVIEW, "\n".join(lines) + "\n")
        print("\n".join(f"{self.name}: {line}" for line in lines))
