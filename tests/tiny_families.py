"""A tiny dense model of each family, and the processor that goes with it."""

import torch
import transformers
from tiny_clip import moved
from tiny_clip import processor as clip_processor

from modeling_clip_moe.families import FAMILIES

WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
# 2 is the end of a text in MetaCLIP 2, which pools there, and where CLIP would pool at the highest id
TEXT = WIDTH | {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
IMAGES = {"image_size": 16, "patch_size": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PATCHES = {"num_patches": 16, "patch_size": 4}


def tiny_dense(family, length=8, layers=4):
    """A dense model in which every parameter is random, for texts of so many tokens; of an image tower, the tower."""
    torch.manual_seed(0)
    text = TEXT | {"max_position_embeddings": length, "num_hidden_layers": layers}
    vision = WIDTH | (PATCHES if family.naflex else IMAGES) | {"num_hidden_layers": layers}
    if "text" not in family.towers:
        text |= NO_DROPOUT
    if family.name == "AltCLIP":  # its positions begin behind the padding token's number
        text["max_position_embeddings"] += TEXT["pad_token_id"] + 1
    towers = {"text_config": text, "vision_config": vision} if family in FAMILIES else vision
    model = moved(family.dense(family.dense.config_class(**towers)), "", seed=0)
    if family.name == "Chinese-CLIP":  # whose class makes the padding token's row zero whenever it is loaded
        model.text_model.embeddings.word_embeddings.weight.data[TEXT["pad_token_id"]] = 0
    return model.eval()


def tiny_processor(family, length=8):
    """A processor for it, which knows the letters of `tiny_clip.WORDS`."""
    if family.name in ("CLIP", "MoE-ViE"):
        processor = clip_processor()
        processor.tokenizer.model_max_length = length
        return processor
    images = {"size": {"height": 16, "width": 16}}
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    if family.name == "Chinese-CLIP":
        pieces = [f"##{letter}" for letter in letters[1:5]]
        vocab = {piece: number for number, piece in enumerate(["[UNK]", "[PAD]", "[CLS]", "[SEP]", *letters, *pieces])}
        tokenizer = transformers.BertTokenizer(vocab=vocab, model_max_length=length)
        images = transformers.ChineseCLIPImageProcessorPil(size=images["size"], crop_size=images["size"])
        return transformers.ChineseCLIPProcessor(images, tokenizer)
    if not family.sigmoid:
        vocab = [(token, -1.0) for token in ("<s>", "<pad>", "</s>", "<unk>", *letters)]
        tokenizer = transformers.XLMRobertaTokenizer(vocab=vocab, model_max_length=length)
        processor = transformers.AltCLIPProcessor if family.name == "AltCLIP" else transformers.CLIPProcessor
        return processor(transformers.CLIPImageProcessorPil(size=images["size"], crop_size=16), tokenizer)
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *letters]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = transformers.Siglip2Tokenizer(vocab=vocab, merges=[], padding_side="right", model_max_length=length)
    if family.naflex:
        images = transformers.Siglip2ImageProcessorPil(patch_size=4, max_num_patches=20)
        return transformers.Siglip2Processor(images, tokenizer)
    return transformers.SiglipProcessor(transformers.SiglipImageProcessorPil(**images), tokenizer)


def saved(family, model, folder, length=8):
    """Saves a model of a family with its processor; returns the folder."""
    model.save_pretrained(folder)
    tiny_processor(family, length).save_pretrained(folder)
    return folder
