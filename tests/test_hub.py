"""Names on the Hub, here a local one: which commit is read and recorded, online and offline, and what is said where
there is none."""

import re

import huggingface_hub
import pytest
import stand_ins
import torch
from documents import PAGES, ROOT
from safetensors.torch import load_file, save_file
from tiny_runs import SPARSE, STEP, run_stages, weights
from tiny_sources import CAPTIONS, images_and_texts, rows, write_shard

import clip_moe
from clip_moe.conversion.checkpoints import load_clip
from clip_moe.conversion.processors import load_processor
from clip_moe.data.arguments import DataArguments
from clip_moe.data.identity import identity
from clip_moe.data.sources import open_rows
from clip_moe.engine.provenance import Record, model_fingerprint, named_files
from clip_moe.engine.runner import GO_ON
from clip_moe.evaluation.sentence_encoders import load_encoder, open_encoder

B32 = "openai/clip-vit-base-patch32"
UPCYCLED = SPARSE | {"model": B32}
SYMBOLS = {"source": "symbols", "num_samples": 8}
# What a stage adds to errors of the system
GO_ON = f". {GO_ON}"
# In pages, and not read from the Hub: what they are instead
NO_REPOSITORY = {
    "wds/kinds": "a folder's name for CLIP_benchmark",
    "user/base": "only named in a card",
    "user/name": "is uploaded to",
    "user/moe-vie": "named in a card; nothing is uploaded with --dry_run",
    "user/sparse-siglip": "named in a card; nothing is uploaded with --dry_run",
    "facebook/metaclip-2-...": "the beginning of names",
    "google/siglip...": "the beginning of names",
}
# Of metrics, patients and files
NO_NAMES = {"birds/accuracy", "clinic/patients", "direct/loss", "integration/test_publish.py", "test/0.parquet"}
NO_NAMES |= {"stages/KIND.py", "test/0.tar"}


@pytest.fixture
def clip(hub, models):
    hub.commit = hub.put(B32, models / "dense")
    hub.put("user/clip-moe", models / "sparse")
    return hub


def other_weights(hub, models, name=B32):
    """A newer commit, with other weights."""
    state = load_file(models / "dense" / "model.safetensors")
    state = {key: 2 * tensor for key, tensor in state.items()}
    files = dict(hub.files(name))
    path = models.parent / "other.safetensors"
    save_file(state, path, {"format": "pt"})
    return hub.put(name, files | {"model.safetensors": path.read_bytes()})


def test_every_hub_name_of_the_pages_has_a_repository():
    """Names in code, but paths and what else has a slash."""
    local = {path.name for path in ROOT.iterdir()} | {"runs", "my"}
    names = set()
    for page in PAGES:
        for block, span in re.findall(r"^```\w*\n(.*?)^```$|`([^`]+)`", page.read_text(encoding="utf-8"), re.M | re.S):
            words = re.split(r"[\s\"'`=,;(){}\[\]]+", block or span)
            names |= {word for word in words if re.fullmatch(r"[a-z][a-z0-9-]+/[\w.-]+", word)}
    names = {name for name in names if name.split("/")[0] not in local} - NO_NAMES
    assert names == stand_ins.ON_HUB.keys() | NO_REPOSITORY.keys()


def test_finetune_online_and_then_from_the_cache(clip, tmp_path, capsys):
    """The command of the front page, to its end; offline, the records and the weights are the same."""
    stand_ins.save_images(tmp_path / "photos", 40)
    flags = "--global_batch_size 4 --learning_rate 1e-3 --defaults.train.num_epochs 1".split()
    records = []
    for output in ("online", "offline"):
        clip.online(output == "online")
        asked = len(clip.requests)
        clip_moe.main(["finetune", str(tmp_path / "photos"), str(tmp_path / output), "--model", B32, *flags])
        assert (output == "online") == (len(clip.requests) > asked)
        names = ("pictures", "known", "upcycled", "dense", "dense_kept", "sparse_kept", "report")
        records.append([Record.read(tmp_path / output / name) for name in names])
    assert [record.inputs[B32] for record in records[0] if B32 in record.inputs] == [f"{B32}@{clip.commit}"] * 6
    assert [record.digest for record in records[0]] == [record.digest for record in records[1]]


def test_the_commit_of_a_record_is_the_one_that_is_loaded(clip, models):
    """Also where the repository moves on between the two; another process reads the new commit."""
    fingerprint = model_fingerprint(B32)
    commit = other_weights(clip, models)
    loaded = load_clip(B32).state_dict()
    assert fingerprint == f"{B32}@{clip.commit}" != f"{B32}@{commit}"
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(models / "dense").items())
    clip.online()
    assert model_fingerprint(B32) == f"{B32}@{commit}"
    assert torch.equal(load_clip(B32).logit_scale, 2 * loaded["logit_scale"])


def test_a_new_commit_is_noticed(clip, models, tmp_path, capsys):
    """A finished stage says so in one line; without the Hub, the run goes on with the commit that it began with, also
    after it was noticed."""
    stages = [UPCYCLED, {"name": "tuned", "stage": "train", "model": "sparse", **STEP, "data": SYMBOLS}]
    stages.append({"name": "compared", "stage": "average", "models": [B32, B32]})
    run_stages(tmp_path, stages[:1])
    commit = other_weights(clip, models)
    clip.online()
    message = f"sparse: .*other settings .inputs.{B32}: '{B32}@{clip.commit}' -> '{B32}@{commit}'.. Delete "
    with pytest.raises(ValueError, match=f"^{message}.*, or set HF_HUB_OFFLINE=1 to continue with .*before$"):
        run_stages(tmp_path, stages)
    clip.online(False)
    run_stages(tmp_path, stages)
    assert "sparse: done before, skipped" in capsys.readouterr().out
    assert Record.read(tmp_path / "out" / "compared").inputs == {B32: f"{B32}@{clip.commit}"}


COMMANDS = {
    "upcycle": "upcycle {out} --model {dense} --preset clip_up",
    "dense": "dense {out} --model {sparse} --take 0 --scale 1",
    "long-context": "long-context {out} --model {dense} --length 28 --keep 4",
    "average": "average {out} --models {dense} {dense}",
    "evaluate": "evaluate {out} --models.a {dense} --models.b {sparse} --tasks symbols_pairs --max_rows 4",
    "analyze": "analyze {out} --model {sparse} --tasks symbols_pairs --max_rows 4",
    "embed": "embed {out} --model {sparse} --data.source symbols --data.num_samples 4",
    "embed captions": "embed {out} --model {dense} --what captions --data.source symbols --data.num_samples 4",
    "efficiency": "efficiency {dense} {sparse} --batch_size 2 --output_dir {out}",
    "train": "train {out} --model {sparse} --data.source symbols --data.num_samples 8 --global_batch_size 4 "
    "--max_steps 1 --learning_rate 1e-3",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_hub_names(command, clip, tmp_path, monkeypatch):
    """Offline, too. What they leave names the commits, and nothing asks for a conversion of weights."""
    monkeypatch.setattr("clip_moe.evaluation.speed.SECONDS_OF_A_TURN", 0.01)
    names = {"dense": B32, "sparse": "user/clip-moe"}
    for number in range(2):
        clip.online(number == 0)
        clip_moe.main(COMMANDS[command].format(out=tmp_path / str(number), **names).split())
    text = "".join(path.read_text() for path in (tmp_path / "1").rglob("*.json"))
    for name in names.values():
        commit = clip.repositories["models", name].refs["main"]
        assert name not in COMMANDS[command].format(out="", **names) or f"{name}@{commit}" in text
    assert not [request for request in clip.requests if "discussions" in request]


def test_weights_in_the_oldest_layout(hub, tmp_path):
    """No thread asks a program on the Hub to convert them."""
    hub.put(B32, stand_ins.repository(B32))
    model, processor = load_clip(B32), load_processor(B32)
    assert model.num_parameters() and processor.image_processor.crop_size["height"] == 32
    assert not [request for request in hub.requests if "discussions" in request or "commits" in request]


UNREACHABLE = {"refused": "http://127.0.0.1:9", "no such server": "http://hub.invalid"}
FAULTS = {
    "missing": f"there is no folder {B32}, and no such model on the Hub: correct the name, or log in with `hf auth",
    "private": f"there is no folder {B32}, and no such model on the Hub: correct the name, or log in with `hf auth",
    "gated": f"{B32} is gated: accept its terms at http://127.0.0.1:[0-9]+/{B32}, and log in with `hf auth login`$",
    "offline": f"there is no folder {B32}, and it is not in .*: unset HF_HUB_OFFLINE, or name a copy on this machine$",
    "refused": f"there is no folder {B32}, and the Hub cannot be reached .*: connect to it, or name a copy",
    "no such server": f"there is no folder {B32}, and the Hub cannot be reached .*: connect to it, or name a copy",
}


@pytest.fixture
def error_of(hub, monkeypatch):
    """Runs a command that names a repository, of these files, with one of the faults; returns its line of error."""

    def error_of(fault, files, kind, *arguments):
        if fault != "missing":
            hub.put(B32, files, kind, gated=fault == "gated", private=fault == "private")
        hub.online(fault != "offline")
        if fault in UNREACHABLE:
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", UNREACHABLE[fault])
        monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("a library waits to try again"))
        with pytest.raises(SystemExit) as end:
            clip_moe.main(list(arguments))
        assert "\n" not in str(end.value)
        return str(end.value).removesuffix(GO_ON)

    return error_of


@pytest.mark.parametrize("command", ["upcycle", "evaluate", "embed captions", "efficiency"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_is_one_line(fault, command, hub, error_of, models, tmp_path):
    """After a request or three, not after the retries of a library."""
    arguments = COMMANDS[command].format(out=tmp_path / "out", dense=B32, sparse=B32).split()
    assert re.search(FAULTS[fault], error_of(fault, models / "dense", "models", *arguments))
    assert len(hub.requests) <= 4


def test_a_gated_model_with_a_token(hub, models, login):
    hub.put(B32, models / "dense", gated=True)
    assert load_clip(B32) is not None


def test_without_the_hub_the_cache_is_read(clip, monkeypatch, caplog):
    """HF_HUB_OFFLINE need not be set: a warning says so, and nothing is tried again."""
    load_processor(B32), load_clip(B32)
    clip.online()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", UNREACHABLE["refused"])
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("a library waits to try again"))
    load_processor(B32), load_clip(B32)
    assert model_fingerprint(B32) == f"{B32}@{clip.commit}"
    assert f"reading {B32} from the cache, commit {clip.commit[:12]}: the Hub said" in caplog.text


def test_a_processor_and_an_encoder_by_name(clip):
    """A processor is part of what a stage read."""
    assert named_files([], [B32, None, "a/b/c", "user/gone"]) == {B32: f"{B32}@{clip.commit}"}
    assert open_encoder(B32).encode(["a star"]).shape == (1, 16)


def test_an_encoder_that_only_its_name_keeps_stays_at_its_commit(clip, models, tmp_path):
    """A mixture's centers are embeddings by that commit. A process that reads another one says so."""
    encoder = open_encoder(B32)
    encoder.save(tmp_path)
    expected = encoder.encode(["a star"])
    commit = other_weights(clip, models)
    clip.online()
    assert (load_encoder(tmp_path).encode(["a star"]) == expected).all()
    clip.online(False)
    assert torch.equal(load_clip(B32).logit_scale, weights(models / "dense")["logit_scale"])  # the cache stays whole
    clip.online()
    assert (open_encoder(B32).encode(["a star"]) != expected).any()
    with pytest.raises(
        ValueError, match=f"{B32} is needed at commit {clip.commit}, but this process reads it at {commit}"
    ):
        load_encoder(tmp_path)


@pytest.fixture
def pictures(hub, tmp_path):
    """Data sets on the Hub: of parquet with and without a card, and of shards."""
    (tmp_path / "data").mkdir()
    rows(CAPTIONS).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    hub.commit = hub.put("user/pictures", tmp_path / "data", "datasets")
    (tmp_path / "data" / "README.md").write_text("---\nlicense: mit\n---\n")
    hub.put("user/with-card", tmp_path / "data", "datasets")
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "train-0.tar", images_and_texts(range(8), CAPTIONS))
    hub.put("user/shards", tmp_path / "shards", "datasets")
    return hub


@pytest.mark.parametrize("name", ["user/pictures", "user/with-card", "user/shards"])
def test_data_by_name(name, pictures):
    """Online, as a stream, and offline; the rows are those of the commit that the record has."""
    columns = {"image_column": "png", "caption_column": "txt"} if name == "user/shards" else {}
    arguments = DataArguments(source=name, **columns)
    commit = pictures.repositories["datasets", name].refs["main"]
    for is_online in (True, False):
        pictures.online(is_online)
        asked = len(pictures.requests)
        assert identity(arguments) == {"commit": commit}
        assert list(open_rows(arguments)[arguments.caption_column]) == CAPTIONS
        assert is_online == (len(pictures.requests) > asked)
    pictures.online()
    stream = open_rows(DataArguments(source=name, streaming=True, **columns))
    assert [row[arguments.caption_column] for row in stream] == CAPTIONS


def test_new_data_are_noticed(pictures, models, tmp_path):
    """A finished stage says so. Offline, it is skipped, and rows of an older commit do not pass for newer ones."""
    data = {"source": "user/pictures"}
    stages = [{"name": "tuned", "stage": "train", "model": str(models / "dense"), **STEP, "data": data}]
    run_stages(tmp_path, stages)
    assert Record.read(tmp_path / "out/tuned").data == {"commit": pictures.commit}
    rows(CAPTIONS[:4]).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    commit = pictures.put("user/pictures", tmp_path / "data", "datasets")
    pictures.online()
    with pytest.raises(ValueError, match=f"other data .data.commit: '{pictures.commit}' -> '{commit}'"):
        run_stages(tmp_path, stages)
    pictures.online(False)
    run_stages(tmp_path, stages)
    pictures.online()
    huggingface_hub.snapshot_download("user/pictures", repo_type="dataset")
    pictures.online(False)
    for streaming in (False, True):
        with pytest.raises(OSError, match=f"user/pictures was downloaded at another commit than {commit[:12]}: conn"):
            open_rows(DataArguments(**data, streaming=streaming))


@pytest.mark.parametrize("fault", ["missing", "gated", "offline", "refused"])
def test_data_that_cannot_be_read_are_one_line(fault, hub, error_of, models, tmp_path):
    (tmp_path / "data").mkdir()
    rows(CAPTIONS).to_parquet(tmp_path / "data" / "train.parquet")
    arguments = f"train {tmp_path / 'out'} --model {models / 'dense'} --data.source {B32} --global_batch_size 4"
    expected = FAULTS[fault].replace("model on", "dataset on").replace("no folder", "no file or folder")
    expected = expected.replace(f"/{B32}", f"/datasets/{B32}")
    more = "--max_steps", "1", "--learning_rate", "1e-3"
    assert re.search(expected, error_of(fault, tmp_path / "data", "datasets", *arguments.split(), *more))
    assert len(hub.requests) <= 6
