"""The commands of docs/machines.md for several machines, as two processes of this one that meet over the network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_runs import TUNED

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
