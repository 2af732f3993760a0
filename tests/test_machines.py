"""The commands of docs/machines.md for several machines, as two processes of this one that meet over the network."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from tiny_runs import DENSE, TUNED, run_stages, weights

from records import processes

ROOT = Path(__file__).parents[1]
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
TRAINED = TUNED | {"data": {"source": "symbols", "num_samples": 8, "in_memory": True}, "max_steps": 2}


@pytest.mark.slow
def test_slurm(tmp_path):
    one = run_stages(tmp_path / "one", [DENSE, TRAINED])
    recipe = {"output_dir": str(tmp_path / "two"), "stages": [DENSE, TRAINED]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    config = yaml.safe_load((ROOT / "training" / "accelerate" / "ddp.yaml").read_text())
    config |= {"distributed_type": "MULTI_CPU", "use_cpu": True}
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump(config))
    bin = Path(sys.executable).parent
    variables = {"CONFIG": str(tmp_path / "cpu.yaml"), "PATH": f"{tmp_path}:{bin}:{os.environ['PATH']}"}
    variables |= {"SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"SLURM_JOB_ID": str(os.getpid())}
    command = ["bash", ROOT / "training" / "slurm" / "upcycle.sbatch", "--config", tmp_path / "recipe.yaml"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("on 2 x cpu") == 1  # together, not each
    torch.testing.assert_close(weights(tmp_path / "two" / "tuned"), weights(one / "tuned"), atol=1e-5, rtol=1e-4)


def test_what_accelerate_was_asked_for_is_read(tmp_path):
    """Options count more than the configuration file, as for Accelerate."""
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "use_cpu": True}
    config |= {"num_processes": 4, "num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump(config))
    command = ["accelerate", "launch", "--quiet", f"--config_file={tmp_path / 'cpu.yaml'}", "--machine-rank", "1"]
    asked = processes._accelerate_settings([*command, "--num_processes", "6"])
    found = asked.num_processes, asked.num_machines, asked.machine_rank, asked.main_process_ip, asked.main_process_port
    assert found == (6, 2, 1, "10.0.0.1", 29500)
    assert processes._accelerate_settings(["accelerate", "launch", "--cpu"]).num_processes == 1


@pytest.mark.parametrize("name", ["upcycle.py", "clip_moe"])
def test_machines_have_the_same_number_of_processes(monkeypatch, name):
    command = ["accelerate", "launch", "--cpu", "--num_processes", "3", "--num_machines", "2", name]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    parent = SimpleNamespace(cmdline=lambda: command)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    with pytest.raises(SystemExit, match="--num_processes 3 cannot be shared by 2 machines"):
        processes.launch_cpu_processes(name, [name])
