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
        pairs = pairs_with_images(data, decode=True)
        rows, given = {"train": np.arange(len(pairs))}, None
        if is_given := has_split(data, self.test_split):
            given = pairs_with_images(dataclasses.replace(data, split=self.test_split, skip=None), decode=True)
            rows["test"] = np.arange(len(pairs), len(pairs) + len(given))
        sources = [pairs, given] if is_given else [pairs]
        copies = find_copies(datasets.concatenate_datasets([part.select_columns("image") for part in sources]))
        # Once, over all: what is left after a test is held out may look otherwise
        names = class_names([caption for part in sources for caption in part["caption"]], tokenizer)

        def hold_out_of_training(split: str, share: float, seed: int) -> None:
            own_names = names and [names[row] for row in rows["train"]]
            train, apart = hold_out(
                pairs.select(rows["train"]), share, seed, tokenizer, copies.among(rows["train"]), own_names
            )
            rows["train"], rows[split] = rows["train"][train], rows["train"][apart]

        if not is_given:
            hold_out_of_training("test", self.held_out, context.seed)
        if self.validation:
            try:
                hold_out_of_training("validation", self.validation, context.seed + 1)
            except ValueError as error:
                raise ValueError(f"{error}, or choose the model on the test: --{self.name}.validation 0") from None
        if is_given:
            lines = [f"The test is the split {self.test_split} of {data.source}."]
            among = copies.among(np.concatenate([rows["train"], rows["test"]]))
            same, near = among.in_training(len(rows["train"]))
            if same + near:
                lines.append(
                    f"{same + near:,} of the test's {len(given):,} images are in training, too: {same:,} with the same "
                    f"pixels, {near:,} that look like them, compressed or scaled."
                )
        else:
            together = "" if names else ", together with all that have the same caption"
            lines = [
                f"{data.source} has no split {self.test_split}, so {len(rows['test']) / len(pairs):.0%} of its "
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
            number = len(rows["validation"])
            lines.append(f"{number:,} of the others are held out in the same way, to choose a model on.")
        names_in = {split: [names[row] for row in numbers] if names else [] for split, numbers in rows.items()}
        classes = set(names_in["train"])
        by_class = bool(names) and set(names) <= classes and not are_ids(list(set(names)))
        if names:
            how = "" if is_given else "held out by picture, and "
            score = f"by class, {len(set(names))} in all" if by_class else "by retrieval"
            lines.append(f"The captions repeat as classes do: the test is {how}scored {score}.")
            if missing := sorted(classes - set(names_in["test"])):
                lines.append(f"{len(missing)} of the classes have no picture in the test: {join_names(missing)}.")
        feature = datasets.ClassLabel(names=list(dict.fromkeys(names))) if by_class else None
        parts = {}
        for split, numbers in rows.items():
            part = given if is_given and split == "test" else pairs.select(numbers)
            if feature is not None:
                part = part.remove_columns("caption").add_column("caption", names_in[split])
                if split != "train":
                    part = part.add_column("label", feature.str2int(names_in[split]), feature=feature)
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
