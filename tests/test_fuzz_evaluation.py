"""Damaged models, data, results and runs: the commands that measure, report and publish end in one line, or in success;
never in a traceback, and nothing half-written is left.

`pytest tests/test_fuzz_evaluation.py` prints the number of cases of each command at its end (with `-s`).
"""

import functools
import itertools
import resource
import tempfile
from pathlib import Path

import fuzz_evaluation
import pytest
from fuzz_evaluation import CUTS, MAINS, arguments, cases, ended, fields, rows, sample
from safetensors.numpy import load_file
from test_fuzz_conversion import CONFIGURATIONS, HALVES, NO_OBJECT, WEIGHTS, bytes_of, field, text
from test_report import result
from tiny_clip import WORDS

from records.result_schema import read_result

pytestmark = pytest.mark.slow

quiet, sources, small_tasks, check = (
    fuzz_evaluation.quiet,
    fuzz_evaluation.sources,
    fuzz_evaluation.small_tasks,
    fuzz_evaluation.check,
)

MODELS = [("evaluate", "dense"), ("evaluate", "sparse"), ("experts", "sparse"), ("publish", "sparse")]
MIXTURE = [("evaluate", "mixture"), ("publish", "mixture")]


@pytest.mark.parametrize("command, model", MODELS)
def test_models(check, small_tasks, command, model):
    for damage in sample(CONFIGURATIONS, command + model, 16):
        harmless = damage.func is field and damage.args[0] != ("model_type",)
        check(command, f"{model}/config.json", damage, model=model, may_succeed=harmless)
    for damage in WEIGHTS.values():
        check(command, f"{model}/model.safetensors", damage, model=model)
    for file, damage in sample(HALVES, command + model, 16):
        check(command, f"{model}/{file}", damage, model=model, may_succeed=damage.func is field)


@pytest.mark.parametrize("command, model", MIXTURE)
def test_mixtures(check, command, model):
    for damage in sample(CONFIGURATIONS, command + model, 8):
        harmless = damage.func is field and damage.args[0] != ("model_type",)
        check(command, f"{model}/expert_1/config.json", damage, model=model, may_succeed=harmless)
    for damage in sample(fields(["experts", "centers", "model_type", "temperature"]), command, 20):
        check(command, f"{model}/config.json", damage, model=model, may_succeed=True)
    for damage in sample(list(WEIGHTS.values()), command, 6):
        check(command, f"{model}/expert_1/model.safetensors", damage, model=model)


def of_rows(change, path):
    change(rows()).to_parquet(path)


DATA = [functools.partial(bytes_of, lambda content: b""), functools.partial(bytes_of, lambda content: b"x" * 100)]
DATA += CUTS
for change in (
    lambda r: r.select([]),
    lambda r: r.select([0]),
    lambda r: r.remove_columns("image"),
    lambda r: r.remove_columns("caption"),
    lambda r: r.remove_columns("label"),
    lambda r: r.rename_column("image", "Image"),
    *(
        lambda r, column=column, value=value: r.remove_columns(column).add_column(column, [value] * len(r))
        for column, value in itertools.product(
            ("image", "caption", "label"), (None, "", "no file", 3, 0.5, True, b"x", [], ["a"], [None], {"a": 1}, [[1]])
        )
    ),
):
    DATA.append(functools.partial(of_rows, change))


def test_data(check):
    for number, damage in enumerate(DATA):
        check("evaluate", f"data/{('test', 'test', 'train')[number % 3]}.parquet", damage, may_succeed=True)


@pytest.mark.parametrize("content", ["", "\n", "\0", "a\na\n", f"{WORDS[0]}\n", "\ud800", b"\xff\xfe\x00", b"\x89PNG"])
def test_classes(check, content):
    content = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    check("evaluate", "classes.txt", functools.partial(bytes_of, lambda _: content))


ARGUMENTS = [
    *(["--templates", template] for template in ("", "{", "{}{}", "{0.__class__}", "{!r}", "a", "\0", "{:9999999}")),
    *(["--batch-size", number] for number in ("0", "-1", "x", "1e3", "9" * 30)),
    *(["--num-samples", number] for number in ("0", "-1", "x", "1e3")),
    *(["--device", device] for device in ("meta", "nope", "cuda:99", "", "cpu:x")),
    *(["--split", split] for split in ("", "nonsense", "test[", "test[:0]", "*", "../x")),
    *(["--train-split", split] for split in ("", "nonsense")),
    *(["--dataset", data] for data in ("", "nowhere", "/", "symbols/x", "a/b/c", "{nope}.tar", "x\0y", "*.parquet")),
    *(["--image-column", column] for column in ("", "caption", "label", "nope")),
    *(["--caption-column", column] for column in ("", "image", "nope")),
    *(["--label-column", column] for column in ("", "image", "nope")),
    *(["--classes", path] for path in ("nowhere", ".", "x\0y")),
    *(["--tasks", tasks] for tasks in ("", ",", "nope", "retrieval,retrieval", "symbols_pairs,,")),
    *(["--name", name] for name in ("", " ", "\n")),
    *(["--model", model] for model in ("", "nowhere", "/", "a/b/c", "x\0y", "..")),
    *(["--output-dir", folder] for folder in ("", "x\0y", "/dev/null", "/dev/null/x", "x" * 300)),
]


@pytest.mark.parametrize("words", ARGUMENTS, ids=lambda words: repr(" ".join(words))[:40])
def test_arguments(check, words):
    check("evaluate", None, None, *words, may_succeed=words == ["--batch-size", "9" * 30])


RESULT_FILE = [functools.partial(text, content) for content in NO_OBJECT]
RESULT_FILE += CUTS + [functools.partial(bytes_of, lambda content: b"\xff" + content)]


RESULT_FIELDS = fields([*result("a"), "weights", "data", "num_captions", "texts", ("texts", "cut"), ("texts", "kind")])
RESULT_FIELDS += fields([("metrics", "recall"), ("primary", "recall")])


def test_results_that_are_there_and_kept_embeddings(check, sources, tmp_path):
    """Damaged, of the same evaluation: each is named, or what it holds has no part in the result."""
    kept = tmp_path / "kept"
    assert ended("evaluate", arguments(sources, kept, "evaluate", "dense")) is None
    whole = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    damages = sample(RESULT_FILE, "kept", 5) + sample(RESULT_FIELDS, "kept", 8)
    damages = {".json": damages, ".safetensors": [d for k, d in WEIGHTS.items() if k not in ("one less", "not finite")]}
    for path, content in whole.items():
        for damage in damages[path.suffix]:
            damage(path)
            check("evaluate", kept=kept, may_succeed=True)
            path.write_bytes(content)


def test_report_and_seeds(check):
    for damage in RESULT_FILE + RESULT_FIELDS:
        harmless = damage.func is field
        for command in ("report", "seeds"):
            check(command, "seed_0/retrieval--b.json", damage, may_succeed=harmless)


@pytest.mark.parametrize(
    "words",
    [["--baseline", ""], ["--baseline", "nope"], ["nowhere"], ["."], ["/dev/null"], ["x\0y"], ["--output-dir", ""]]
    + [["--output-dir", folder] for folder in ("x\0y", "/dev/null", "/dev/null/x", "x" * 300)],
    ids=repr,
)
@pytest.mark.parametrize("command", ["report", "seeds"])
def test_arguments_of_report_and_seeds(check, sources, command, words):
    if words[0].startswith("-"):
        check(command, None, None, *words)
    else:
        cases[command] += 1
        assert ended(command, [*words, *words, "--output-dir", sources / "nothing"]).startswith("error: ")
        assert not (sources / "nothing").exists()


@pytest.mark.parametrize(
    "words",
    [["--num-experts-per-tok", n] for n in ("0", "-1", "5", "9" * 30, "x")]
    + [["--tasks", tasks] for tasks in ("", "nope", "small,small", ",")]
    + [["--batch-size", "0"], ["--device", "meta"], ["--model", ""], ["--model", "nowhere"]]
    + [["--output-dir", folder] for folder in ("", "x\0y", "/dev/null", "/dev/null/x", "x" * 300)],
    ids=repr,
)
def test_arguments_of_experts(check, small_tasks, words):
    check("experts", None, None, *words, model="sparse")


def test_models_without_experts_and_data_of_experts(check, small_tasks):
    for model in ("dense", "mixture", "heads_of_64", "llava"):
        check("experts", model=model, may_succeed=model == "heads_of_64")
    for damage in sample(DATA, "experts", 10):
        check("experts", "data/test.parquet", damage, model="sparse", may_succeed=True)


@pytest.fixture
def full_disk(capsys):
    """Makes files end at a number of bytes for this process, as a full disk does; what it prints goes to none."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 10, 1000, 20_000], ids=["nothing", "no text", "no result", "no picture"])
@pytest.mark.parametrize("command", MAINS)
def test_full_disk(sources, small_tasks, tmp_path, full_disk, monkeypatch, command, size):
    """One line, and of what is there nothing is half written. What was done before is kept."""
    model = {"publish": "run/sparse", "experts": "sparse"}.get(command, "dense")
    argv = arguments(sources, tmp_path / "out", command, model)
    if command in ("evaluate", "experts"):  # data that a library prepares in folders of its own
        with tempfile.TemporaryDirectory() as other:
            assert ended(command, arguments(sources, Path(other) / "out", command, model)) is None
    full_disk(size)
    error = ended(command, argv)
    full_disk(resource.RLIM_INFINITY)
    cases[command] += 1
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    if error is None:  # its files are smaller
        assert left and max(path.stat().st_size for path in left) <= size
        return
    assert error.startswith("error: ") and "\n" not in error
    assert left or not list(tmp_path.iterdir())
    for path in left:
        assert command == "evaluate" and (path.parent.name == "embeddings" and load_file(path) or read_result(path))
