"""Recipes run whole, on models of a few thousand parameters: what they write and how they fail, alone and in pairs."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import TensorBoardTracker
from accelerate.utils import DeepSpeedPlugin
from documents import ROOT
from tiny_runs import DENSE, SPARSE, STEP, TUNED, launch_two, read_log, run_stages, same_weights, train, weights
from tiny_sources import damaged, rows
from transformers import AutoModel, AutoProcessor

from clip_moe.engine.context import require_no_accumulation
from clip_moe.engine.recipe import load_recipe
from modeling_clip_moe import CLIPMoEModel


def test_a_recipe_makes_models_that_load(whole):
    tuned = whole()
    output = tuned.parent
    assert {path.name for path in output.iterdir()} == {"dense", "sparse", "tuned", "recipe.yaml"}
    assert load_recipe(output / "recipe.yaml").output_dir == str(output)
    assert isinstance(AutoModel.from_pretrained(tuned), CLIPMoEModel) and not (tuned / "checkpoints").exists()
    assert AutoProcessor.from_pretrained(tuned).tokenizer.model_max_length == 16
    before, after = weights(output / "sparse"), weights(tuned)
    assert not [name for name in before if before[name].numel() > 0 and torch.equal(before[name], after[name])]
    log = read_log(tuned)
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "balance_loss", "z_loss", "dropped_tokens", "grad_norm"} <= set(log[0])
    assert log[0]["balance_loss"] >= 1 and 0 <= log[0]["dropped_tokens"] < 1


OWN_LOSS = """
from pydantic.dataclasses import dataclass
from clip_moe.engine.settings import STRICT
from clip_moe.training.stages.train import TrainStage

@dataclass(config=STRICT, kw_only=True)
class Cosine(TrainStage):
    \"""Pulls pairs together, at no temperature.\"""

    kind = "cosine"

    def contrastive_loss(self, image_embeds, text_embeds, logit_scale, pairing, logit_bias=None):
        return 1 - (image_embeds * text_embeds).sum(dim=-1).mean()
"""


def test_weights_that_no_loss_depends_on_are_named(tmp_path, monkeypatch, caplog):
    (tmp_path / "own_loss.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = {"source": "symbols", "num_samples": 8}
    run_stages(
        tmp_path / "run",
        [DENSE, TUNED | {"stage": "own_loss:Cosine", "data": data}, TUNED | {"name": "plain", "data": data}],
    )
    (message,) = [message for message in caplog.messages if "gradient" in message]
    assert message == "tuned: 1 of 78 trainable weights got no gradient and stay as they are: logit_scale"


def test_a_router_stage_between_equal_experts_says_so(tmp_path, caplog):
    step = {**STEP, "data": {"source": "symbols", "num_samples": 8}, "model": "sparse"}
    router, train = step | {"stage": "train_router"}, step | {"stage": "train", "trainable": r"\.router\."}
    other = [SPARSE | {"name": "other"}, router | {"name": "x", "model": "other"}]  # weights that do not sum to 1
    routed = [train | {"name": "one"}, router | {"name": "two"}]
    run_stages(tmp_path / "run", [DENSE, SPARSE | {"preset": "clip_moe"}, *routed, *other])
    messages = [message for message in caplog.messages if "equal experts" in message]
    for name, message in zip(("one", "two"), messages, strict=True):
        assert message.startswith(f"{name}: text_model.encoder.layers.0.mlp.router, text_model.encoder.layers.1.mlp.ro")


def errors(text):
    """Error messages of the processes; the launcher adds its own afterwards."""
    text = text.split("torch/distributed/elastic")[0].split("Traceback")[0]
    lines = [line for line in text.splitlines() if re.search("error|traceback|failed|exit", line, re.IGNORECASE)]
    # Where torchao is installed, its import fails to load kernels for GPUs, and has torch warn of an error in future
    return [line for line in lines if "torchao" not in line and "torch/utils/_pytree.py" not in line]


@pytest.mark.slow
def test_two_processes_warn_once_and_fail_with_one_line(tmp_path):
    """By torchrun. Both skip the image that is broken, and one that fails while the other one waits for it says why."""
    train(tmp_path, only=["dense", "sparse"], data=damaged(tmp_path, 0.005))
    script = tmp_path / "upcycle.py"
    script.write_text(
        "import os\n"
        "from clip_moe.training import commands, loop\n"
        "if os.environ['RANK'] == '1':\n"
        "    def fail(*_):\n"
        "        raise FloatingPointError('the loss of the second process')\n"
        "    loop.FirstFault.require = fail\n"
        "commands.run.main()\n"
    )
    torchrun = ("torchrun", "--nproc-per-node", "2")
    process = launch_two(tmp_path / "recipe.yaml", script=script, launcher=torchrun, stderr=subprocess.STDOUT)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 1 and text.count("1 of 200 pairs") == 1, text
    assert errors(text) == ["error: tuned: the loss of the second process"]


@pytest.mark.slow
def test_ctrl_c_of_two_processes_ends_in_one_line(tmp_path):
    train(tmp_path, only=["dense", "sparse"], max_steps=10_000)
    log = tmp_path / "out" / "tuned.partial" / "log.jsonl"
    process = launch_two(tmp_path / "recipe.yaml", stdout=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    text = process.communicate()[1]
    assert process.returncode != 0 and text.count("interrupted: nothing half-written") == 1
    assert not errors(text) and "training/commands.py" not in text


ACCELERATE = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_DYNAMO_BACKEND": "eager",
    "ACCELERATE_GRADIENT_CLIPPING": "1e-9",
}


def test_variables_of_accelerate_change_no_number(tmp_path, monkeypatch):
    """`accelerate launch` sets them by its configuration, a file in HF_HOME."""
    expected = train(tmp_path / "plain")
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    for name, value in ACCELERATE.items():
        monkeypatch.setenv(name, value)
    assert same_weights(train(tmp_path / "other"), expected)
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 4 .from its configuration or ACCELERATE_GR"):
        require_no_accumulation(DeepSpeedPlugin())
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    require_no_accumulation(DeepSpeedPlugin())


def test_trackers_that_cannot_start(tmp_path):
    """They end the run before it begins, or trains; what others hold is in integration/test_trackers.py."""
    missing = next(name for name in ("aim", "clearml", "dvclive", "mlflow") if not importlib.util.find_spec(name))
    with pytest.raises(ValueError, match=f"trackers: cannot import {missing}"):
        train(tmp_path, overrides={"trackers": ["tensorboard", missing]})
    assert not (tmp_path / "out" / "recipe.yaml").exists()
    logs = tmp_path / "out" / "logs"
    logs.parent.mkdir(exist_ok=True)
    logs.write_text("where tensorboard wants a folder")
    with pytest.raises(ValueError, match="tuned: trackers: tensorboard cannot start"):
        train(tmp_path, overrides={"trackers": ["tensorboard"]})
    assert not list(tmp_path.rglob("log.jsonl"))


def test_a_tracker_that_fails_is_left_out(tmp_path, monkeypatch, caplog):
    log, failed = TensorBoardTracker.log, []

    def fail(self, values, step, **more):
        if step > 2:
            failed.append(step)
            raise ConnectionError("the server\nis gone")
        log(self, values, step, **more)

    monkeypatch.setattr(TensorBoardTracker, "log", fail)
    train(tmp_path, overrides={"trackers": ["tensorboard"]})
    assert failed == [3] and len((tmp_path / "out" / "tuned" / "log.jsonl").read_text().splitlines()) == 6
    (warning,) = [message for message in caplog.messages if "tracker" in message]
    assert "the tracker tensorboard failed; training continues without it" in warning
    assert warning.endswith("ConnectionError: the server is gone")


# What a train stage says of its pairs


def test_training_on_a_stream_of_numbers_ends_in_one_line(run, tmp_path):
    rows(range(8)).to_parquet(tmp_path / "x.parquet")
    data = {"source": str(tmp_path / "x.parquet"), "streaming": True}
    with pytest.raises(ValueError, match="^tuned: 8 of 8 pairs .*its caption is not text: [0-7]. [^\n]*$"):
        run([DENSE, {**TUNED, "data": data}])


# The commands of docs/machines.md for several machines, as two processes of this one that meet over the network

# What Slurm does there: names the machines, and runs the command once on each
STAND_INS = {
    "scontrol": "#!/bin/bash\necho 127.0.0.1\necho elsewhere\n",
    "srun": """#!/bin/bash
shift
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@"
first=$?
wait $! || exit 1
exit $first
""",
}
TRAINED = TUNED | {"model": str(ROOT / "training" / "symbol_clip" / "quarter")}
TRAINED |= {"data": {"source": "symbols", "num_samples": 8, "in_memory": True}, "max_steps": 2}


@pytest.mark.slow
def test_slurm(tmp_path):
    recipe = {"output_dir": str(tmp_path / "out"), "stages": [TRAINED]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    bin = Path(sys.executable).parent
    variables = {"PATH": f"{tmp_path}:{bin}:{os.environ['PATH']}"}
    variables |= {"SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"SLURM_JOB_ID": str(os.getpid())}
    command = ["bash", ROOT / "training" / "slurm" / "upcycle.sbatch", "--config", tmp_path / "recipe.yaml"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("on 2 x cpu") == 1  # together, not each
    assert (tmp_path / "out" / "tuned" / "model.safetensors").is_file()
