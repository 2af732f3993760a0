"""docs/extending.md as it stands: its method runs, its loss is SigLIP's, and classes that are none end in one line."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from documents import ROOT, blocks, few_symbols, run_block
from test_losses import assert_same, data, plain_sigmoid_loss
from tiny_clip import error_of
from tiny_runs import read_log, run_stages, weights

from clip_moe.engine.own_modules import code_of_stage
from clip_moe.engine.provenance import Record
from clip_moe.engine.recipe import load_recipe, stage_class
from clip_moe.training.commands import run
from clip_moe.training.losses import Pairing

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "extending.md"
RECIPE, ORTHOGONAL = "my_method/recipe.yaml", "my_method/orthogonal.py"
NAMES = ["features", "clusters", "expert_1", "expert_2", "unified", "routed", "mine", "evaluation"]
EXPERTS, ROUTER = "my_method.stages:SigLIPExpertsStage", "my_method.stages:SigLIPRouterStage"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder in which the page's commands have run; tests leave its run as it is."""
    folder, text = tmp_path_factory.mktemp("own"), PAGE.read_text(encoding="utf-8")
    # Each file's name stands last before its block
    files = re.findall(r"`([\w/]+\.(?:py|yaml))`[^`]*(?:`[\w.]+:\w+`[^`]*)?```\w+\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in files] == ["my_method/stages.py", ORTHOGONAL, "my_method/interpolate.py", RECIPE]
    for name, content in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    (block,) = (block for block in blocks(PAGE) if block.language == "bash" and block.section == "The recipe")
    with pytest.MonkeyPatch.context() as patch, few_symbols():
        patch.chdir(folder)
        patch.setenv("CHECKOUT", str(ROOT))
        patch.setattr(sys, "path", list(sys.path))
        run_block(block)
    forget()
    return folder


@pytest.fixture
def own(done, monkeypatch):
    """The folder of the finished run as the working folder, its files imported anew."""
    monkeypatch.chdir(done)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield done
    forget()


def forget():
    """Later imports read the files anew."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("my_method", "losses", "wrong")]:
        del sys.modules[name]


def moved(run, before, after):
    old, new = weights(run / before), weights(run / after)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}, old.keys()


def test_the_method_runs(done):
    run = done / "runs/my_method"
    assert {path.name for path in run.iterdir()} == {*NAMES, "recipe.yaml"}
    for expert in ("expert_1", "expert_2"):
        trained, names = moved(run, "../../symbol_clip", expert)
        assert trained == {name for name in names if ".mlp." in name} != set()
    trained, names = moved(run, "unified", "routed")
    assert trained == {name for name in names if ".mlp.router." in name} != set()
    unified, routed, mine = (weights(run / name) for name in ("unified", "routed", "mine"))
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, (unified[name] + routed[name]) / 2, msg=name)
    report = (run / "evaluation" / "report.md").read_text()
    assert "| dense " in report and "| mine " in report
    # Manifests name the class and its code
    expert, router, mine, unified = (Record.read(run / name) for name in ("expert_1", "routed", "mine", "unified"))
    assert (expert.stage["stage"], expert.stage["bias"], expert.own_settings) == (EXPERTS, -10, ["bias"])
    assert router.stage["stage"] == ROUTER and "clusters" in router.inputs
    assert list(expert.code) == ["my_method.stages"] and len(expert.code["my_method.stages"]) == 64
    assert list(mine.code) == ["my_method.interpolate"] and unified.code == {}


def test_a_loss_that_sees_the_model(own, tmp_path):
    """In parts of a batch, too, it is that of the whole batch."""
    recipe, logs = yaml.safe_load(Path(RECIPE).read_text()), []
    settings = recipe["defaults"]["train"] | {"model": "runs/my_method/unified", "max_steps": 4, "logging_steps": 1}
    for name, parts in (("whole", {}), ("parts", {"mini_batch_size": 4})):
        stage = settings | {"name": name, "stage": "my_method.orthogonal:OrthogonalStage", **parts}
        logs.append(read_log(run_stages(tmp_path / name, [stage]) / name))
    values = [[entry["orthogonality"] for entry in log] for log in logs]
    assert values[0] == pytest.approx(values[1], rel=1e-4) and values[0][1] < values[0][0]
    assert [entry["total_loss"] for entry in logs[0]] == pytest.approx(
        [entry["total_loss"] for entry in logs[1]], rel=1e-3
    )


def test_the_loss_is_siglips(own, monkeypatch):
    monkeypatch.syspath_prepend(own)
    from my_method.stages import SigmoidLoss

    def of(loss, *settings):
        return lambda model: loss(*model.embeds(*data()[:2]), model.logit_scale.exp(), *settings)

    assert_same(of(SigmoidLoss(bias=-0.5).contrastive_loss, Pairing()), of(plain_sigmoid_loss, -0.5))


WRONG = """
from pydantic.dataclasses import dataclass
from clip_moe.engine.settings import STRICT
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.stages.train_router import TrainRouterStage

class Bare(TrainRouterStage):
    bias: float = 0.0

@dataclass(config=STRICT, kw_only=True)
class OtherLoss(TrainStage):
    bias: float = 0.0

@dataclass(config=STRICT, kw_only=True)
class Diamond(OtherLoss, TrainRouterStage):
    pass
"""


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("nowhere:Stage", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'$"),
        ("my_method.stages:Nothing", "module 'my_method.stages' has no attribute 'Nothing'$"),
        ("my_method.stages:MixedBatchSampler", "is not a subclass of clip_moe.engine"),
        ("wrong.raises:Stage", r"RuntimeError: no license \(.*raises.py, line 3\)$"),
        ("wrong.stages:Bare", r"must be decorated with pydantic's @dataclass\(config=STRICT\)"),
        ("wrong.stages:Diamond", "would not get its setting trainable from TrainRouterStage: give it a type"),
    ],
)
def test_what_is_no_stage_ends_in_one_line(own, stage, message):
    (own / "wrong").mkdir(exist_ok=True)
    (own / "wrong/stages.py").write_text(WRONG)
    (own / "wrong/raises.py").write_text("import os\n\nraise RuntimeError('no license')\n")
    (own / "wrong.yaml").write_text(yaml.safe_dump({"output_dir": "out", "stages": [{"name": "a", "stage": stage}]}))
    assert re.search(message, error_of(run.main, "--config", "wrong.yaml"))
    assert not (own / "out").exists()


def test_defaults_by_kind_and_by_class(own):
    recipe = yaml.safe_load(Path(RECIPE).read_text())
    recipe["defaults"] |= {"train_experts": {"order": "round_robin", "bias": -3.0}, EXPERTS: {"bias": -2.0}}

    def loaded():
        (own / "changed.yaml").write_text(yaml.safe_dump(recipe))
        return {stage.name: stage for stage in load_recipe("changed.yaml").stages}

    stages = loaded()
    assert (stages["expert_1"].order, stages["expert_1"].bias, stages["routed"].bias) == ("round_robin", -2.0, -10.0)
    assert stages["routed"].trainable == r"\.mlp\.router\."
    recipe["defaults"]["my_method.stages:Other"] = {}
    with pytest.raises(ValueError, match="defaults.my_method.stages:Other: no stage uses it"):
        loaded()


def test_the_working_folder_comes_before_that_of_the_command(own, monkeypatch):
    """`accelerate launch training/upcycle.py` puts training/ first, where there are `losses` and others."""
    (own / "losses.py").write_text((own / "my_method/interpolate.py").read_text())
    monkeypatch.setattr(sys, "path", [str(ROOT / "training"), *sys.path])
    assert stage_class("losses:InterpolateStage").__module__ == "losses"


def test_what_a_stage_imports_of_its_own_is_recorded(tmp_path, monkeypatch):
    """Modules beside it, whatever way they are imported, and no others; none is imported for it."""
    (tmp_path / "wrong" / "deep").mkdir(parents=True)
    (tmp_path / "wrong" / "__init__.py").write_text("")
    (tmp_path / "wrong" / "deep" / "__init__.py").write_text("from .sizes import SIZE\n")
    (tmp_path / "wrong" / "deep" / "sizes.py").write_text("import numpy\nSIZE = 3\n")
    (tmp_path / "wrong" / "unused.py").write_text("")
    (tmp_path / "wrong" / "later.py").write_text("raise RuntimeError\n")
    (tmp_path / "wrong" / "stages.py").write_text(
        "import losses\nfrom transformers import TrainerCallback\n"
        "from clip_moe.training.stages.train import TrainStage\n"
        "from wrong import deep\n\nclass Mine(TrainStage, TrainerCallback):\n    def run(self, context):\n"
        "        from wrong.later import value\n"
    )
    (tmp_path / "losses.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        mine = importlib.import_module("wrong.stages").Mine
        own = {"losses", "wrong", "wrong.deep", "wrong.deep.sizes", "wrong.later", "wrong.stages"}
        assert code_of_stage(mine).keys() == own | {"transformers.trainer_callback"}
    finally:
        forget()
