"""mteb's tasks on our models, by examples/mteb_encoder.py."""

import mteb
import pytest
from backbones import BASE
from datasets import DatasetDict, load_dataset
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.abstasks.zeroshot_classification import AbsTaskZeroShotClassification
from mteb.models.model_implementations.clip_models import CLIPModel

from data import symbols
from evaluation.evaluate import evaluate_model
from evaluation.own_data import OwnTask
from evaluation.tasks import find_tasks
from examples.mteb_encoder import CLIPEncoder

KINDS = list(symbols.KINDS)[:40]


class SymbolKinds(AbsTaskZeroShotClassification):
    metadata = TaskMetadata(
        name="SymbolKinds",
        dataset={"path": "symbols", "revision": "none"},
        description="Kinds of symbols.",
        type="ZeroShotClassification",
        category="i2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="accuracy",
        modalities=["image", "text"],
        reference=None,
    )

    def load_data(self, **kwargs):
        rows = load_dataset("parquet", data_files={"test": self.file})["test"]
        labels = [KINDS.index(kind) for kind in rows["kind"]]
        self.dataset = DatasetDict(test=rows.select_columns("image").add_column("label", labels))
        self.data_loaded = True

    def get_candidate_labels(self):
        return [f"a picture of a {kind}" for kind in KINDS]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    file = tmp_path_factory.mktemp("symbols") / "test.parquet"
    symbols.load("test", "detailed", 80, KINDS, two=False).to_parquet(file)
    kinds = SymbolKinds()
    kinds.file = str(file)
    return kinds


def accuracy(encoder, task):
    (result,) = mteb.evaluate(encoder, task, cache=None, show_progress_bar=False).task_results
    return result.scores["test"][0]["accuracy"]


def test_a_sparse_model_and_its_dense_base_score_as_ours(task, repository, tmp_path):
    """The dense one also as by mteb's own class for CLIP."""
    classes = tmp_path / "classes.txt"
    classes.write_text("\n".join(KINDS))
    own = OwnTask(
        task="zero_shot",
        name="kinds",
        dataset=task.file,
        label_column="kind",
        classes=str(classes),
        templates=["a picture of a {}"],
    )
    for model in (str(repository), BASE):
        (ours,) = evaluate_model(model, find_tasks([own]), tmp_path / "scores")
        assert accuracy(CLIPEncoder(model), task) == ours["metrics"]["accuracy"] > 2 / len(KINDS)
    theirs = CLIPModel(BASE, None, "cpu")
    theirs.mteb_model_meta = CLIPEncoder(BASE).mteb_model_meta
    assert accuracy(theirs, task) == ours["metrics"]["accuracy"]
