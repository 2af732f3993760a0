"""One model on two processes, by transformers' own plans, and on devices with too little memory for it."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.commands.config.config_args import load_config_from_file
from documents import BASE, ROOT
from safetensors.torch import load_file, save_file
from several_processes import run_processes
from tiny_clip import moved
from tiny_runs import as_stage, launch_two, read_log, same_weights, train, weights
from transformers import AutoProcessor, CLIPConfig, CLIPModel
from transformers.distributed import DistributedConfig

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import upcycle
from clip_moe.data.symbols import SYMBOLS
from modeling_clip_moe import CLIPMoEModel, CLIPMoEVisionModelWithProjection, loading
from modeling_clip_moe.modeling_moe_vie import MoEViEModel, ViEModel

# Attention heads of an even number, which two processes can share
HEADS = {
    "text": {"hidden_size": 64, "num_attention_heads": 2},
    "vision": {"hidden_size": 128, "num_attention_heads": 4},
}
ACCELERATE = ROOT / "training" / "accelerate"
PRESET = {
    "clip_fmoe": PRESETS["clip_fmoe"],
    # So little room that training drops many choices: their id E is one that no process has an expert for
    "clip_up": replace(PRESETS["clip_up"], num_experts=4, capacity_factor=1.0),
    # Gated FFNs without biases, beside a shared one
    "moe_vie": replace(PRESETS["moe_vie"], num_experts=6, moe_mlp_bias=False, router_aux_loss_coef=0.01),
}
NEW = [int(part) for part in transformers.__version__.split(".")[:2]] >= [5, 23]
# Preset, class, what is split over the two processes. What versions before 5.23 split wrong is in docs/limits.md
CASES = {"tp": ("clip_fmoe", CLIPMoEModel, {"tp_size": 2})}
if NEW:
    CASES |= {
        "tp_tower": ("clip_fmoe", CLIPMoEVisionModelWithProjection, {"tp_size": 2, "ep_size": 2}),
        "ep": ("clip_up", CLIPMoEModel, {"tp_size": 2, "ep_size": 2}),
        "fsdp": ("clip_fmoe", CLIPMoEModel, {"fsdp_size": 2}),
        "fsdp_ep": ("clip_up", CLIPMoEModel, {"fsdp_size": 2, "ep_size": 2}),
        "vie_tp_ep": ("moe_vie", MoEViEModel, {"tp_size": 2, "ep_size": 2}),
        "vie_fsdp": ("moe_vie", MoEViEModel, {"fsdp_size": 2}),
    }


def shares_of(case: str, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The batch of each process: all of it, or half."""
    if "fsdp_size" not in CASES[case][2]:
        return [batch, batch]
    return [{name: tensor.chunk(2)[rank] for name, tensor in batch.items()} for rank in range(2)]


def evaluate_and_train(model, inputs):
    """Outputs in evaluation, outputs in training, and the gradients of the latter's loss."""
    if isinstance(model, CLIPMoEModel):
        inputs, output = {**inputs, "return_loss": True, "output_router_logits": True}, "logits_per_image"
    else:
        inputs, output = {"pixel_values": inputs["pixel_values"]}, "image_embeds"
    with torch.no_grad():
        evaluated = getattr(model.eval()(**inputs), output)
    outputs = model.train()(**inputs)
    loss = outputs.loss if "return_loss" in inputs else outputs.image_embeds.square().sum(dim=-1).mean()
    loss.backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return evaluated.clone(), getattr(outputs, output).detach().clone(), gradients


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def worker(folder):
    rank, batch = int(os.environ["RANK"]), load_file(folder / "batch.safetensors")
    for case, (preset, model_class, sizes) in CASES.items():
        model = model_class.from_pretrained(folder / preset, distributed_config=DistributedConfig(**sizes))
        local = {
            name: (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel() / parameter.numel()
            for name, parameter in model.named_parameters()
        }
        results = evaluate_and_train(model, shares_of(case, batch)[rank])
        model.save_pretrained(folder / f"{case}_saved")
        torch.save((local, *results), folder / f"{case}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def random_dense(model_class: type[CLIPModel | ViEModel]) -> CLIPModel | ViEModel:
    config = CLIPConfig.from_pretrained(BASE).to_dict()
    for tower, fields in HEADS.items():
        config[f"{tower}_config"] |= fields | {"intermediate_size": 256, "num_hidden_layers": 4}
    torch.manual_seed(0)
    return model_class(model_class.config_class(**config | {"model_type": model_class.config_class.model_type}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, a batch, and what two processes made of both."""
    folder = tmp_path_factory.mktemp("distributed")
    for name, preset in PRESET.items():  # no bias is zero, no two experts are the same
        dense = random_dense(ViEModel if name == "moe_vie" else CLIPModel)
        moved(upcycle(dense, preset, seed=0), "mlp", 0, scale=0.01).save_pretrained(folder / name)
    rows = SYMBOLS.load("test", "detailed", 8)
    texts, images = list(rows["caption"]), list(rows["image"])
    batch = AutoProcessor.from_pretrained(BASE)(text=texts, images=images, padding=True, return_tensors="pt")
    assert batch["attention_mask"].min() == 0
    save_file(dict(batch), folder / "batch.safetensors")
    run_processes(2, worker, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_compute_train_and_save_as_one(case, folder):
    preset, model_class, _ = CASES[case]
    shares = shares_of(case, load_file(folder / "batch.safetensors"))
    model = model_class.from_pretrained(folder / preset)
    expected, sums = [], {}
    for share in shares:
        model.zero_grad()
        *outputs, gradients = evaluate_and_train(model, share)
        expected.append(outputs)
        sums = {name: sums.get(name, 0) + gradient for name, gradient in gradients.items()}
    # The processes' gradients are those of the mean loss
    gradients = {name: gradient / 2 for name, gradient in sums.items()}
    assert all(gradient.abs().max() > 1e-6 for name, gradient in gradients.items() if "k_proj.bias" not in name)
    for rank in range(2):
        _, evaluated, trained, found = torch.load(folder / f"{case}_{rank}.pt")
        torch.testing.assert_close((evaluated, trained), tuple(expected[rank]), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(found, gradients, atol=1e-5, rtol=1e-4)
    if preset == "clip_up":
        assert (expected[0][0] - expected[0][1]).abs().max() > 0.1  # training did drop choices
    # They save what one does
    model_class.from_pretrained(folder / preset).save_pretrained(folder / f"{case}_expected")
    assert same_weights(folder / f"{case}_expected", folder / f"{case}_saved")
    model_class.from_pretrained(folder / f"{case}_saved")


@pytest.mark.parametrize("case", CASES)
def test_each_process_holds_its_part(case, folder):
    *_, sizes = CASES[case]
    split = "q_proj. k_proj. v_proj. out_proj.weight fc1. fc2.weight gate_proj. up_proj. down_proj.weight".split()
    split *= "tp_size" in sizes
    split += [".experts."] * ("ep_size" in sizes)
    if "fsdp_size" in sizes:
        split = [""]
    for rank in range(2):
        parts, *_ = torch.load(folder / f"{case}_{rank}.pt")
        if "fsdp_size" in sizes:
            for one_row in ("logit_scale", "vision_model.head.probe"):
                assert parts.pop(one_row, 1 - rank) == 1 - rank
        for name, part in parts.items():
            # Of an odd number of rows, one process has one more
            expected = 0.5 if any(key in name for key in split) and ("fsdp_size" in sizes or "head." not in name) else 1
            assert part == pytest.approx(expected, abs=0.05), name


@pytest.mark.parametrize("sizes", [{"fsdp_size": 2, "ep_size": 2}, {"enable_expert_parallel": True}], ids=str)
def test_what_old_versions_get_wrong_is_refused(folder, monkeypatch, sizes):
    monkeypatch.setattr(loading, "transformers_version", "5.22.2")
    with pytest.raises(ValueError, match="5.22.2 trains split experts wrongly: use transformers 5.23 or newer"):
        CLIPMoEModel.from_pretrained(folder / "clip_up", distributed_config=SimpleNamespace(**sizes))


def test_parts_on_the_disk_compute_the_same(folder, tmp_path):
    rows, path = load_file(folder / "batch.safetensors"), folder / "clip_fmoe"
    whole, sizes = CLIPMoEModel.from_pretrained(path), {"cpu": "4MB"}
    split = CLIPMoEModel.from_pretrained(path, device_map="auto", max_memory=sizes, offload_folder=tmp_path)
    assert {"cpu", "disk"} == set(split.hf_device_map.values())
    for key in ("text_model.encoder.layers", "vision_model.encoder.layers"):
        placed = [name for name in split.hf_device_map if name.startswith(key)]
        assert all(len(name.split(".")) <= 4 for name in placed)  # no layer is taken apart
    with torch.no_grad():
        expected, found = whole(**rows), split(**rows)
    torch.testing.assert_close(found.logits_per_image, expected.logits_per_image)
    torch.testing.assert_close(found.image_embeds, expected.image_embeds)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Four steps of CLIP-UP, of two batches each, and what one process makes of them."""
    return four_steps(tmp_path_factory.mktemp("training"))


def four_steps(folder, **settings):
    train(folder, global_batch_size=16, gradient_accumulation_steps=2, max_steps=4, **settings)
    return folder / "recipe.yaml"


def assert_same_run(folder, expected):
    logs = []
    for run in (folder, expected):
        records = read_log(run / "tuned")
        logs.append(
            [(r["step"], r["total_loss"], r["grad_norm"], r["logit_scale"], r["learning_rate"]) for r in records]
        )
    assert len(logs[1]) == 4
    torch.testing.assert_close(logs[0], logs[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weights(folder / "tuned"), weights(expected / "tuned"), atol=1e-4, rtol=0)


def finished(name, recipe, output, *more):
    """Errors of the recipe with one of our configuration files, on two processes: none where it succeeds."""
    options, script = ["--config_file", ACCELERATE / f"{name}.yaml"], "tests/integration/sharded_on_cpu.py"
    process = launch_two(recipe, "--output_dir", output, *more, script=script, options=options)
    _, error = process.communicate(timeout=300)
    return error if process.returncode else ""


def test_fsdp2(tmp_path):
    """With losses that have a model of their own, interrupted and resumed."""
    taught = {"change": as_stage("lab.methods.router_teacher:TaughtStage"), "teacher": "dense", "keep": "dense"}
    recipe, output = four_steps(tmp_path / "one", **taught), tmp_path / "two"
    assert "error: tuned: interrupted" in finished("fsdp2", recipe, output, "--interrupt")
    assert list(output.glob("*/checkpoints/step-00000002"))
    assert not finished("fsdp2", recipe, output)
    assert_same_run(output, recipe.parent / "out")


def test_fsdp2_refuses_losses_of_whole_weights(recipe, tmp_path):
    refused = finished("fsdp2", recipe, tmp_path, "--tuned.stage", "lab.methods.coupling:CoupledStage")
    assert "error: tuned: RouterExpertCoupling reads whole weights" in refused


def test_zero3(recipe, tmp_path):
    pytest.importorskip("deepspeed", reason="runs where deepspeed was installed by hand: pip builds it from source")
    assert "DeepSpeed save checkpoints as pickles" in finished("deepspeed_zero3", recipe, tmp_path)
    assert not finished("deepspeed_zero3", recipe, tmp_path, "--tuned.save_steps", "null")
    assert_same_run(tmp_path, recipe.parent / "out")


@pytest.mark.parametrize("path", sorted(ACCELERATE.iterdir()), ids=lambda path: path.name)
def test_configuration_files(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == 8 and not config.use_cpu
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed_zero3": "DEEPSPEED"}
    assert config.distributed_type.value == kinds[path.stem]
