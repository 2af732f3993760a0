"""LLaVA's training: its files, which tokens are learned, and both stages to their end."""

import json
import re
import string

import PIL.Image
import pytest
import torch
from several_processes import run_processes, train_recipe
from tiny_runs import DENSE, SPARSE, ended_by_a_checkpoint, read_log, run_stages, same_weights, weights
from tiny_sources import turns, write_pictures
from transformers import AutoProcessor, LlamaConfig, LlamaForCausalLM, LlamaTokenizer, LlavaForConditionalGeneration

from clip_moe.data.arguments import DataArguments
from clip_moe.training.samplers import Share
from lab.conversations import load_conversations
from lab.llava import IGNORED, ConversationLoader, LlavaTask, build
from modeling_clip_moe import CLIPMoEVisionModel

LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = {**LLAMA, "max_position_embeddings": 512}
LLAVA = {"name": "llava", "stage": "lab.llava:LlavaStage", "tower": "sparse", "text_config": LLAMA}
TRAIN = {"stage": "lab.llava:TrainLlavaStage", "data": {"source": "symbols", "num_samples": 12}, "max_length": 400}
TRAIN |= {"global_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 1}
PROJECTED = {"name": "projected", "model": "llava", "prompt": "plain", **TRAIN}
EVERYTHING = "multi_modal_projector|language_model|lm_head"
TUNED = {"name": "tuned", "model": "projected", "trainable": EVERYTHING, **TRAIN}


DISC = {"image": "0.png", "conversations": turns("<image>\nWhat?", "A disc.", "Which color?", "Red.")}
TEXT = {"conversations": turns("Why?", "So.")}


@pytest.fixture
def file(tmp_path):
    """Writes entries in LLaVA's layout, and returns how they are read."""
    write_pictures(tmp_path)
    (tmp_path / "broken.png").write_text("not an image")

    def write(entries, **arguments):
        path = tmp_path / "conversations.json"
        path.write_text(json.dumps(entries))
        return DataArguments(source=str(path), image_root=str(tmp_path), **arguments)

    return write


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A folder with a random LLaVA, whose images have 4 tokens."""
    folder = tmp_path_factory.mktemp("llava")
    return run_stages(folder, [DENSE, SPARSE, LLAVA]) / "llava"


@pytest.fixture
def loader(llava, file):
    """Makes a loader whose batches have all of its entries, in order."""

    def make(entries, prompt="chat", max_length=400, folder=llava):
        arguments, rows = file(entries), load_conversations(file(entries))
        kinds = AutoProcessor, LlavaForConditionalGeneration.config_class
        processor, config = (kind.from_pretrained(folder) for kind in kinds)
        share = Share(len(rows), 0, 1, 0)
        loader = ConversationLoader(rows, processor, config, arguments, share, prompt, max_length)
        loader.sampler.global_batches = lambda rng: [[*range(len(rows))]]
        return loader

    return make


def question(text):
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def learned(loader, batch, row=0):
    """The text of the tokens that the loss sees."""
    labels = batch["labels"][row]
    return loader.processor.tokenizer.decode(labels[labels != IGNORED])


def assert_as_prepared(loader, batch):
    """The first row begins as the processor itself prepares the question, and what is learned begins after it."""
    prompt = loader.processor.apply_chat_template(question("What?"), add_generation_prompt=True)
    image = PIL.Image.open(loader.arguments.image_root + "/0.png")
    inputs = loader.processor(text=prompt, images=image, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    assert torch.equal(inputs["input_ids"][0], batch["input_ids"][0, :length])
    assert batch["labels"][0, length - 1] == IGNORED and batch["labels"][0, length] != IGNORED
    assert torch.equal(inputs["pixel_values"], batch["pixel_values"])


def test_llavas_layout(file, tmp_path):
    entries = [
        {"id": "a", "image": "0.png", "conversations": turns("What?\n<image>", "A disc.", "Which color?", "Red.")},
        {"id": "b", "conversations": turns("<image>Why?", "So.", "And then?")},
        {"id": "c", "image": "1.png", "conversations": [{"from": "gpt", "value": "Hi."}, *turns("<image>", "A star.")]},
    ]
    rows = list(load_conversations(file(entries)))
    assert rows == [
        {"image": str(tmp_path / "0.png"), "turns": ["<image>\nWhat?", "A disc.", "Which color?", "Red."]},
        {"image": str(tmp_path / "1.png"), "turns": ["<image>\n", "A star."]},
        {"image": None, "turns": ["Why?", "So."]},
    ]
    assert list(load_conversations(file(entries, skip=1, num_samples=1))) == rows[2:]


def test_what_is_no_conversation_is_refused_and_what_cannot_be_read_is_counted(file, caplog):
    good = {"image": "0.png", "conversations": turns("<image>\na", "b")}
    with pytest.raises(ValueError, match="entry 1 needs turns of human and gpt"):
        load_conversations(file([good, {"image": "0.png"}]))
    broken = [good, {"image": "broken.png", "conversations": turns("a", "b")}]
    with pytest.raises(ValueError, match="1 of 2 pairs .* cannot be used.*broken.png"):
        load_conversations(file(broken))
    assert len(load_conversations(file(broken, max_unreadable=0.5))) == 1 and "1 of 2 pairs" in caplog.text


def test_only_answers_are_learned(loader):
    made = loader([DISC, TEXT])
    batch = next(made.batches(0))
    assert learned(made, batch, 0).split() == "a disc . <|endoftext|>red . <|endoftext|>".split()
    assert learned(made, batch, 1).split() == "so . <|endoftext|>".split()
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
    assert (batch["input_ids"] == made.processor.image_token_id).sum(dim=1).tolist() == [4, 0]
    assert batch["pixel_values"].shape == (1, 3, 32, 32) and batch["cut"].tolist() == [0, 0]
    assert_as_prepared(made, batch)
    made = loader([DISC], "plain")  # the image and its caption
    batch = next(made.batches(0))
    text = made.processor.tokenizer.decode(batch["input_ids"][0])
    assert text.split() == ("<|startoftext|>" + 4 * "<image>" + "a disc .").split()
    assert learned(made, batch).split() == ["a", "disc", "."]


def test_long_conversations_are_cut_and_counted(loader):
    entries = [DISC, TEXT, {"conversations": turns("Why? " * 100, "So.")}]
    whole = [len(loader(entries).encode(row)[0]) for row in loader(entries).rows["turns"]]
    made = loader(entries, max_length=whole[0] - 3)
    batch = next(made.batches(0))
    assert batch["input_ids"].shape[1] == whole[0] - 3 and batch["cut"].tolist() == [1, 0, 1]
    assert learned(made, batch, 2) == ""
    with pytest.raises(ValueError, match="max_length 20 cuts an image, which takes 4 tokens after the prompt"):
        next(loader(entries, max_length=20).batches(0))


def test_the_loss_is_the_mean_over_answers_and_the_tower_computes_as_at_inference(loader, llava):
    entries = [
        {"image": "0.png", "conversations": turns("<image>\nWhat?", "A disc.")},
        {"conversations": turns("Why?", "So it is, since it was so before.")},
    ]
    model = LlavaForConditionalGeneration.from_pretrained(llava)
    task = LlavaTask(model).train()
    assert model.training and not model.model.vision_tower.training
    batch = next(loader(entries).batches(0))
    loss, metrics = task(dict(batch))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    log_probs = model(**inputs).logits.log_softmax(dim=-1)
    losses = [
        -log_probs[row, position - 1, token]
        for row, labels in enumerate(batch["labels"])
        for position, token in enumerate(labels)
        if token != IGNORED
    ]
    torch.testing.assert_close(loss, sum(losses) / len(losses))
    assert metrics["answer_tokens"] == len(losses) and metrics["cut_conversations"] == 0


@pytest.mark.slow
def test_both_stages_train_what_they_say_and_resume(llava, tmp_path):
    stages = [PROJECTED | {"model": str(llava)}, TUNED]
    output = run_stages(tmp_path, stages)
    built, projected, tuned = (weights(folder) for folder in (llava, output / "projected", output / "tuned"))
    for before, after, part in ((built, projected, "projector"), (projected, tuned, EVERYTHING)):
        changed = {name for name in built if not torch.equal(before[name], after[name])}
        assert changed == {name for name in built if re.search(part, name)}
    log = read_log(output / "tuned")
    assert log[-1]["loss"] < log[0]["loss"] and log[0]["cut_conversations"] == 0

    model = LlavaForConditionalGeneration.from_pretrained(output / "tuned")
    assert type(model.model.vision_tower) is CLIPMoEVisionModel
    processor = AutoProcessor.from_pretrained(output / "tuned")
    prompt = processor.apply_chat_template(question("What is it?"), add_generation_prompt=True)
    inputs = processor(text=prompt, images=PIL.Image.effect_noise((40, 32), 80).convert("RGB"), return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > inputs["input_ids"].shape[1]

    overrides = {"output_dir": str(tmp_path / "again")}
    for _ in range(2):  # each train stage has one checkpoint
        with ended_by_a_checkpoint():
            run_stages(tmp_path, stages, overrides)
    again = run_stages(tmp_path, stages, overrides)
    assert same_weights(output / "tuned", again / "tuned")


@pytest.mark.slow
def test_parts_of_a_step_and_processes_train_as_the_whole(llava, file, tmp_path):
    """However many tokens are learned in each, also where a process has no images."""
    entries = [{"image": f"{number}.png", "conversations": turns("What?", f"It is {number}.")} for number in range(3)]
    entries += [{"conversations": turns("Why?", "So it is " + "and was " * number)} for number in (0, 4, 2, 9, 1)]
    data = {"source": file(entries).source, "image_root": str(tmp_path)}
    stages = [TUNED | {"model": str(llava), "data": data, "max_steps": 4, "save_steps": None}]
    logs = [read_log(run_stages(tmp_path, stages) / "tuned")]
    assert len({entry["answer_tokens"] for entry in logs[0]}) > 1
    parts = {"output_dir": str(tmp_path / "parts"), "tuned.gradient_accumulation_steps": 2}
    logs.append(read_log(run_stages(tmp_path, stages, parts) / "tuned"))
    run_processes(2, train_recipe, "--config", tmp_path / "recipe.yaml", "--output_dir", tmp_path / "two")
    logs.append(read_log(tmp_path / "two" / "tuned"))
    for name in ("loss", "grad_norm", "answer_tokens"):
        whole, *others = ([entry[name] for entry in log] for log in logs)
        assert others == [pytest.approx(whole, rel=1e-4, abs=1e-4)] * 2


def test_a_language_model_gets_eyes(llava, loader, tmp_path):
    """A Llama with the kind of tokenizer that Vicuna has: spaces belong to the words after them."""
    tokens = ["<unk>", "<s>", "</s>", "▁A", "▁R", "▁", *string.ascii_letters, *"\n.,:?'"]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = LlamaTokenizer(vocab=vocab, merges=[("▁", "A"), ("▁", "R")], add_bos_token=True)
    tokenizer.save_pretrained(tmp_path / "llama")
    language_model = LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2))
    language_model.save_pretrained(tmp_path / "llama")
    (tmp_path / "llava").mkdir()
    build(llava.parent / "sparse", tmp_path / "llava", tmp_path / "llama")
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava")
    made = loader([DISC], folder=tmp_path / "llava")
    tokenizer_of_both, table = made.processor.tokenizer, model.get_input_embeddings().weight
    assert len(table) % 64 == 0 and len(table) >= len(tokenizer) + 2 == len(tokenizer_of_both)
    assert torch.equal(table[: len(tokenizer)], language_model.get_input_embeddings().weight)
    text = tokenizer_of_both("What? A disc.", return_tensors="pt").input_ids
    assert text[0, 0] == 1
    torch.testing.assert_close(model(text).logits[..., : len(tokenizer)], language_model(text).logits)
    batch = next(made.batches(0))
    assert learned(made, batch) == "A disc.</s> Red.</s>"
    assert_as_prepared(made, batch)


def test_what_cannot_train_is_refused(llava, tmp_path):
    stages = [LLAVA | {"tower": str(llava.parent / "sparse")}, TUNED | {"model": "llava"}]
    for key, value, message in (
        ("tuned.trainable", ".", "tuned.trainable: .*LLaVA's tower stays frozen"),
        ("tuned.max_length", 4096, "more than the 512 that the language model reads"),
        ("llava.language_model", "a/b", "exactly one of language_model and text_config"),
        ("llava.text_config", {"hidden": 4}, "LlamaConfig has no field 'hidden'"),
    ):
        with pytest.raises(ValueError, match=message):
            run_stages(tmp_path, stages, {key: value})
    assert not list(tmp_path.rglob("log.jsonl"))
