"""Recipes run whole, on models of a few thousand parameters: what they write, how they resume, how they fail."""

import functools
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import PIL.Image
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tiny_runs import losses, recipe, same_weights, weights
from transformers import AutoModel, AutoProcessor

from modeling_clip_moe import CLIPMoEModel
from training import engine, stages
from training.commands import train
from training.recipe import load_recipe
from training.runner import run_recipe
from training.training_state import latest_checkpoint, save_checkpoint

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path):
    def run(overrides=None, stages=None, output="out", **training):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe(**training)))
        loaded = load_recipe(path, {"output_dir": str(tmp_path / output), **(overrides or {})})
        return run_recipe(loaded, stages)

    return run


def test_a_recipe_makes_models_that_load(run):
    output = run()
    assert {path.name for path in output.iterdir()} == {"dense", "sparse", "tuned", "recipe.yaml"}
    assert load_recipe(output / "recipe.yaml").output_dir == str(output)
    model, processor = AutoModel.from_pretrained(output / "tuned"), AutoProcessor.from_pretrained(output / "tuned")
    assert isinstance(model, CLIPMoEModel)
    assert processor.tokenizer.model_max_length == 16
    assert not (output / "tuned" / "checkpoints").exists()
    before, after = weights(output / "sparse"), weights(output / "tuned")
    still = [name for name in before if before[name].numel() > 0 and torch.equal(before[name], after[name])]
    assert not still
    log = [json.loads(line) for line in (output / "tuned" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "balance_loss", "z_loss", "dropped_tokens", "grad_norm"} <= set(log[0])
    assert log[0]["balance_loss"] >= 1 and 0 <= log[0]["dropped_tokens"] < 1


def test_a_run_whose_experts_got_few_tokens_says_so_at_its_end(run, caplog):
    whole_captions = {"dense.text_config.max_position_embeddings": 64}
    run(whole_captions, output="sound")
    assert not caplog.messages
    run(whole_captions | {"sparse.changes.capacity_factor": 0.1})
    (message,) = caplog.messages
    assert re.match(r"tuned: at its last step no expert computed \d\d% of the tokens, since too many", message)


def test_the_same_seed_gives_the_same_bits(run):
    first, second, other = run(output="a"), run(output="b"), run({"seed": 1}, output="c")
    assert same_weights(first / "tuned", second / "tuned")
    assert not same_weights(first / "tuned", other / "tuned")


def test_finished_stages_are_skipped_and_others_refused(run, capsys):
    output = run()
    written = (output / "tuned" / "model.safetensors").stat().st_mtime_ns
    run({"tuned.logging_steps": 5})
    assert "tuned: done before, skipped" in capsys.readouterr().out
    assert (output / "tuned" / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match=r"tuned was made with other settings \(stage\.learning_rate: 0\.01 -> 0\.5\)"):
        run({"tuned.learning_rate": 0.5})
    with pytest.raises(ValueError, match="seed: 0 -> 1"):
        run({"seed": 1})
    assert (output / "tuned" / "model.safetensors").stat().st_mtime_ns == written


def test_parts_of_a_recipe(run):
    with pytest.raises(ValueError, match="tuned.model: the stage 'sparse' has not finished"):
        run(stages=["tuned"])
    with pytest.raises(ValueError, match="no stage nope; its stages are dense, sparse, tuned"):
        run(stages=["nope"])
    output = run(stages=["dense", "sparse"])
    assert not (output / "tuned").exists()
    assert same_weights(run(stages=["tuned"]) / "tuned", run(output="whole") / "tuned")


def test_only_what_the_pattern_names_trains(run):
    output = run(trainable=r"\.(router|fusion_gate)\.", weight_decay=0.1)
    before, after = weights(output / "sparse"), weights(output / "tuned")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".router." in name} != set()


@pytest.mark.parametrize("steps", range(1, 6))
def test_interrupted_at_any_step_ends_in_the_same_bits(run, monkeypatch, steps):
    class Stop(Exception):
        pass

    count = iter(range(steps))
    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        if next(count, None) is None:
            raise Stop
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        with pytest.raises(Stop):
            run()
    resumed = run()
    whole = run(output="whole")
    assert same_weights(resumed / "tuned", whole / "tuned")
    assert losses(resumed / "tuned") == losses(whole / "tuned")


def test_killed_and_started_again(run, tmp_path):
    """SIGKILL at a random step, twice; the weights end as those of a run that nobody killed, to the bit."""
    steps = {"max_steps": 40, "save_steps": 3}
    run(stages=["dense", "sparse"], **steps)
    command = [sys.executable, "-m", "training.upcycle", "--config", str(tmp_path / "recipe.yaml")]
    command += ["--output-dir", str(tmp_path / "out")]
    log = tmp_path / "out" / "tuned.partial" / "log.jsonl"
    for _ in range(2):
        done = len(log.read_text().splitlines()) if log.exists() else 0
        last = random.SystemRandom().randint(done + 1, done + 12)
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        )
        while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < last):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it finished before it was killed"
    resumed = run(**steps)
    whole = run(output="whole", **steps)
    assert losses(resumed / "tuned") == losses(whole / "tuned")
    assert same_weights(resumed / "tuned", whole / "tuned")


@pytest.mark.slow
def test_two_processes_train_as_one(run, tmp_path):
    """Also with noise in the routers, as its groups are those of capacity."""
    noise = {f"sparse.{tower}_config.router_jitter_noise": 0.1 for tower in ("text", "vision")}
    run(noise, stages=["dense", "sparse"], global_batch_size=16)
    done = launch_two(tmp_path, *(part for key, value in noise.items() for part in (f"--{key}", str(value))))
    assert done.returncode == 0, done.stderr
    assert "on 2 x cpu" in done.stdout
    alone = run(noise, output="alone", global_batch_size=16)
    torch.testing.assert_close(losses(tmp_path / "out" / "tuned"), losses(alone / "tuned"), atol=1e-4, rtol=0)
    torch.testing.assert_close(weights(tmp_path / "out" / "tuned"), weights(alone / "tuned"), atol=1e-4, rtol=0)


def launch_two(tmp_path, *overrides, script="training/upcycle.py"):
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--quiet", "--cpu", "--num_processes", "2"]
    command += [script, "--config", str(tmp_path / "recipe.yaml"), "--output-dir", str(tmp_path / "out"), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def errors(text):
    lines = [line for line in text.splitlines() if re.search("error|traceback|failed|exit", line, re.IGNORECASE)]
    # Where torchao is installed, its import fails to load kernels for GPUs, and has torch warn of an error in future
    return [line for line in lines if "torchao" not in line and "torch/utils/_pytree.py" not in line]


@pytest.mark.slow
def test_two_processes_warn_once_and_fail_with_one_line(run, tmp_path):
    """Both cannot share the batch of 7, and both skip the image that is broken."""
    for number in range(150):
        PIL.Image.new("RGB", (32, 32), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "0.png").write_text("no image")
    pairs = [{"image": f"{number}.png", "conversations": [{"from": "gpt", "value": "red"}]} for number in range(150)]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    run(stages=["dense", "sparse"])
    data = {"source": str(tmp_path / "pairs.json"), "image_root": str(tmp_path)}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(data=data, max_steps=1)))
    done = launch_two(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("1 of 150 pairs") == 1
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(global_batch_size=7)))
    shutil.rmtree(tmp_path / "out" / "tuned")
    done = launch_two(tmp_path)
    assert done.returncode == 1
    (error,) = errors(done.stderr)
    assert error.startswith("error: ") and "tuned.global_batch_size: 7 cannot be shared by 2 processes" in error


@pytest.mark.slow
def test_the_process_that_fails_says_why(run, tmp_path):
    """The second one alone, while the first one waits for it."""
    run(stages=["dense", "sparse"])
    script = tmp_path / "upcycle.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from training import engine\n"
        "from training.commands import train\n"
        "from records.processes import launch_cpu_processes\n"
        "launch_cpu_processes('upcycle.py', sys.argv)\n"
        "if os.environ['RANK'] == '1':\n"
        "    def fail(*_):\n"
        "        raise FloatingPointError('the loss of the second process')\n"
        "    engine._require_finite = fail\n"
        "train.main()\n"
    )
    done = launch_two(tmp_path, script=str(script))
    assert done.returncode == 1
    assert errors(done.stderr) == ["error: tuned: the loss of the second process"]


@pytest.mark.slow
def test_ctrl_c_of_two_processes_ends_in_one_line(run, tmp_path):
    run(stages=["dense", "sparse"], max_steps=10_000)
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--quiet", "--cpu", "--num_processes", "2"]
    command += ["training/upcycle.py", "--config", str(tmp_path / "recipe.yaml"), "--output-dir", str(tmp_path / "out")]
    log = tmp_path / "out" / "tuned.partial" / "log.jsonl"
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    # Accelerate's launcher does not wait for the processes; the pipe's end does
    text = process.communicate()[1]
    assert process.returncode != 0
    ours = text.split("Traceback")[0]  # Accelerate's launcher adds its own
    assert text.count("interrupted: run the same command again") == 1
    assert not errors(ours) and "training/upcycle.py" not in text.replace(ours, "").split("KeyboardInterrupt")[0]


def test_gradient_checkpointing_changes_nothing(run):
    plain, checkpointed = run(output="a"), run(output="b", gradient_checkpointing=True)
    torch.testing.assert_close(losses(plain / "tuned"), losses(checkpointed / "tuned"), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_compiled_models_train_the_same_and_are_saved_by_their_own_names(run, monkeypatch):
    plain = run(output="a")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")  # traced, but nothing is generated
    AcceleratorState._reset_state(True)
    compiled = run(output="b", save_steps=2)
    AcceleratorState._reset_state(True)
    torch.testing.assert_close(losses(plain / "tuned"), losses(compiled / "tuned"), atol=1e-5, rtol=0)
    assert (
        load_file(plain / "tuned" / "model.safetensors").keys()
        == load_file(compiled / "tuned" / "model.safetensors").keys()
    )


def test_accumulation_averages_gradients(run, monkeypatch):
    """Twice the same batch, accumulated, is that batch's own step."""
    plain = run(output="plain", global_batch_size=4)
    original = engine.train

    def repeat(accelerator, model, batches, *rest):
        def twice(start):
            for batch in batches(start // 2):
                yield from (batch, batch)

        return original(accelerator, model, twice, *rest)

    monkeypatch.setattr(stages.train, "train", repeat)
    accumulated = run(output="accumulated", gradient_accumulation_steps=2)
    torch.testing.assert_close(losses(accumulated / "tuned"), losses(plain / "tuned"), atol=1e-5, rtol=0)


def test_a_batch_that_cannot_be_shared(run):
    with pytest.raises(ValueError, match="global_batch_size: 8 cannot be shared by 1 processes x 3"):
        run(gradient_accumulation_steps=3)


@pytest.fixture
def forget_precision():
    """So far as Accelerate is concerned, a process has one precision for all its life."""
    forget = functools.partial(AcceleratorState._reset_state, reset_partial_state=True)
    yield forget
    forget()


def test_mixed_precision(run, forget_precision):
    plain = run()
    forget_precision()
    mixed = run({"mixed_precision": "bf16"}, output="mixed")
    assert all(tensor.dtype == torch.float32 for tensor in weights(mixed / "tuned").values())
    assert losses(mixed / "tuned") != losses(plain / "tuned")
    torch.testing.assert_close(losses(mixed / "tuned")[0], losses(plain / "tuned")[0], atol=0.05, rtol=0)


def test_a_loss_that_is_not_finite_stops_the_run(run, monkeypatch):
    original, calls = stages.train.contrastive_loss, iter(range(100))

    def overflow(*args, **kwargs):
        loss = original(*args, **kwargs)
        return loss * float("nan") if next(calls) == 4 else loss

    with monkeypatch.context() as patch:
        patch.setattr(stages.train, "contrastive_loss", overflow)
        with pytest.raises(FloatingPointError, match=r"stage tuned, step 5: the loss is nan\. Lower the") as error:
            run()
    partial, kept = re.search("delete ([^,]+), or .* goes on from ([^,]+), which is finite", str(error.value)).groups()
    assert Path(partial).name == "tuned.partial" and Path(kept).name == "step-00000004" and Path(kept).is_dir()
    assert same_weights(run() / "tuned", run(output="whole") / "tuned")  # it can go on from there


def test_a_full_disk_leaves_the_last_checkpoint_whole(run, tmp_path, monkeypatch):
    """The process may write no more than a few bytes to a file once the first checkpoint is there."""
    original = engine.save_checkpoint
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(accelerator, model, optimizer, checkpoints, step, *others):
        if step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            return original(accelerator, model, optimizer, checkpoints, step, *others)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "save_checkpoint", save)
        with pytest.raises(
            OSError, match="step 4: the checkpoint .* could not be written .* earlier checkpoints are whole"
        ):
            run()
    checkpoints = tmp_path / "out" / "tuned.partial" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]
    assert same_weights(run() / "tuned", run(output="whole") / "tuned")


def test_a_kill_while_saving_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    first = save_checkpoint(accelerator, *prepared, tmp_path, 2, limit=1)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)  # all is written, but not yet under its name
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(accelerator, *prepared, tmp_path, 4, limit=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "step-00000004.partial"}
    assert latest_checkpoint(tmp_path) == first
    monkeypatch.undo()
    last = save_checkpoint(accelerator, *prepared, tmp_path, 4, limit=1)
    assert [path for path in tmp_path.iterdir()] == [last]


def test_trackers(run):
    output = run({"trackers": ["tensorboard"]})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "logs" / "clip_moe"))
    events.Reload()
    assert [event.step for event in events.Scalars("tuned/loss")] == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_is_not_there_ends_the_run_before_it_begins(run, tmp_path):
    missing = next(name for name in ("aim", "clearml", "dvclive", "mlflow") if not importlib.util.find_spec(name))
    with pytest.raises(ValueError, match=f"trackers: {missing} cannot be imported"):
        run({"trackers": ["tensorboard", missing]})
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_cannot_start_ends_the_run_before_it_trains(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "logs").write_text("where tensorboard wants a folder")
    with pytest.raises(ValueError, match="tuned: trackers: tensorboard cannot start"):
        run({"trackers": ["tensorboard"]})
    assert not list(tmp_path.rglob("log.jsonl"))


UPCYCLED = ["--config", "training/recipes/clip_up_symbols.yaml", "--stages", "upcycled"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.yaml"], "no recipe at nowhere.yaml"),
        (["--seed"], "--seed has no value"),
        (["seed", "1"], "'seed' is not an option"),
        (["--sede", "1"], "'sede' is neither an option"),
        (["--stages", "nope"], "no stage nope"),
        ([*UPCYCLED, "--upcycled.changes.num_expert", "4"], "a preset has no num_expert"),
        ([*UPCYCLED, "--upcycled.changes.num_experts", "1"], "num_experts_per_tok"),
        ([*UPCYCLED, "--upcycled.text_config.capacity", "4"], "has no field 'capacity'"),
        ([*UPCYCLED, "--upcycled.model", "nowhere/"], "nowhere"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_mistakes_end_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as exit:
        train.main([*arguments, "--output-dir", str(tmp_path / "out")])
    assert exit.value.code.startswith("error: ") and message in exit.value.code
