"""model_cpu.py against judges that others wrote: PyTorch's autograd, AdamW and Muon, Hugging Face's Llama."""
import os
import shutil

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"     # read by transformers when it is imported

import numpy as np
import torch
import torch_twin
import transformers
from cases import parametrize, put
from transformers.models.llama import modeling_llama

import checkpoint
import model_cpu
from tokenizer import Tokenizer

# The further heads count 0.375 / 3 each, which float32 has exactly.
CONFIG = model_cpu.Config(dim=64, heads=8, kv_heads=2, layers=3, context=80, vocab=264, predict=4, mtp_weight=0.375)
T = 70                                              # more than one block of attention's loop, no power of two


torch.set_num_threads(1)                            # on shared cores, threads of such small products only wait


def distance(a, b):
    """Relative L2."""
    a, b = [torch.as_tensor(x).detach().double() for x in (a, b)]
    assert a.shape == b.shape
    return torch.dist(a, b) / b.norm()


def make_model(std, **options):
    """Weights wide enough for every part to matter, gains near 1, all of them float32's, as PyTorch's twin takes them."""
    model = model_cpu.Model(CONFIG, **options)
    rng = np.random.default_rng(0)
    for weight in model.params.values():
        weight[...] = (std * rng.standard_normal(weight.shape) + (weight.ndim == 1)).astype(np.float32)
    return model


def make_batch(seed):
    """Of 20 of the tokens: so a few steps teach something."""
    rng = np.random.default_rng(seed)
    tokens, targets = [rng.integers(0, 20, (3, width)) for width in (T, T + CONFIG.predict - 1)]
    targets[0, 5:20] = -1
    targets[1, T - 10:] = -1                        # the end of a document: the later heads have fewer targets
    return tokens, targets


def twin_of(model):
    """Its twin in PyTorch, all of it in float64, RoPE's tables too."""
    return torch_twin.Twin(CONFIG, model.params, torch.float64).double()


def worst_of(arrays, twin, part):
    errors = [distance(array, part(twin.weights[name.replace(".", "_")])) for name, array in arrays.items()]
    return np.max(errors)                           # max() would skip a NaN


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch: autograd, AdamW, and the twin of tests/bench.py
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("threads", [1, 2])
def test_loss_and_every_gradient_equal_autograd(threads):
    model = make_model(0.15, threads=threads)
    twin = twin_of(model)
    batch = make_batch(seed=0)
    losses, total = torch_twin.make_losses(twin, compiled=False)(*map(torch.from_numpy, batch))
    total.backward()
    assert distance(model.forward(*batch), losses) < 1e-13
    model.backward()
    assert worst_of(model.grads, twin, lambda weight: weight.grad) < 1e-10


@parametrize("optimizer", ["adamw", "muon"])
def test_twenty_steps_track_pytorchs(optimizer):
    """With and without clipping.  What the twin compiles before leaves no trace."""
    model = make_model(0.05, optimizer=optimizer)
    twin = twin_of(model)
    step = torch_twin.Step(twin, compiled=False, optimizer=optimizer)
    step.warm_up(*map(torch.from_numpy, make_batch(seed=3)))
    norms = []
    for i in range(20):
        lr = 1e-2 * (i + 1) / 20
        batch = make_batch(seed=i % 4)
        losses = model.forward(*batch)
        model.backward()
        norms.append(model.update(lr))
        assert distance(losses, step(*map(torch.from_numpy, batch), lr)) < 1e-9
    assert worst_of(model.params, twin, lambda weight: weight) < 1e-9
    assert min(norms) < 1 < max(norms) and losses[0] < 4.0              # it moved: ln 264 = 5.58


def test_the_gradients_that_bench_compares():
    """In bf16 the whole residual stream of the hardest twin is bf16, so its gradient is further off than the plain one's."""
    model, batch = make_model(0.05), make_batch(seed=0)
    model.forward(*batch)
    model.backward()
    single, plain, hardest = [distance(torch_twin.gradient(model, *batch, precision, "cpu", hardest), model.flat_grads)
                              for precision, hardest in (("fp32", True), ("bf16", False), ("bf16", True))]
    assert 1e-8 < single < 1e-5 and 1e-3 < plain < hardest < 5e-2


@parametrize("whole", [False, True])
def test_the_twin_decodes_what_it_computes_at_once(whole):
    """Token by token with a KV cache.  whole: attention reads all of the cache, masked, as in a CUDA graph."""
    model = make_model(0.15)
    twin = twin_of(model)
    tokens = make_batch(seed=0)[0][:1]
    tables = torch_twin.tables(CONFIG, CONFIG.context, dtype=torch.float64)
    cache, rows = twin.empty_cache(), []
    for positions in torch.arange(T).split([30, *[1] * (T - 32), 2]):
        seen = None if whole else positions[-1] + 1
        rows.append(twin.decode(torch.from_numpy(tokens)[:, positions], positions, *tables, cache, seen))
    assert distance(torch.cat(rows, 1), model.logits(tokens)[:, :, 0]) < 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face: our checkpoint folder as it is
# ---------------------------------------------------------------------------------------------------------------------
def load_llama(folder, dtype):
    llama, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) <= {"mtp_heads.weight"}     # the heads that Llama does not have
    assert isinstance(llama, transformers.LlamaForCausalLM)
    return llama.eval()


def both_logits(folder, model, tokens):
    """-> those of head 0, ours and theirs in float32."""
    with torch.no_grad():
        theirs = load_llama(folder, torch.float32)(torch.from_numpy(tokens)).logits
    return model.logits(tokens)[:, :, 0], theirs


def greedy_text(folder, prompt, most):
    """-> the ids with which transformers goes on."""
    llama = load_llama(folder, torch.float32)
    ids = llama.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False, eos_token_id=[-1])
    return ids[0, len(prompt):].tolist()


class Rotary64(modeling_llama.LlamaRotaryEmbedding):
    """Its cosines and sines of angles in float64."""
    def forward(self, x, position_ids):
        D = self.config.head_dim
        frequency = self.config.rope_parameters["rope_theta"] ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
        angle = torch.cat([position_ids[..., None] * frequency] * 2, -1)
        return angle.cos(), angle.sin()


def test_llama_computes_the_logits_of_head_0_and_what_it_saves_has_that_head(tmp_path, monkeypatch, err_text):
    """In float64 throughout: its own norms and RoPE are in float32.  from_pretrained drops mtp_heads.weight, which
    config.json still counts."""
    put(monkeypatch, modeling_llama, LlamaRMSNorm=torch.nn.RMSNorm, LlamaRotaryEmbedding=Rotary64)
    checkpoint.save(tmp_path / "ours", make_model(0.15, dtype=np.float32), Tokenizer.train([], 260), {})
    llama = load_llama(tmp_path / "ours", torch.float64)
    llama.save_pretrained(tmp_path)
    shutil.copy(tmp_path / "ours/tokenizer.json", tmp_path)
    tokens, _ = make_batch(seed=1)
    for folder in tmp_path / "ours", tmp_path:
        model, _ = checkpoint.load(str(folder), model_cpu)
        assert distance(model.logits(tokens)[:, :, 0], llama(torch.from_numpy(tokens)).logits) < 1e-12
    assert model.config.predict == 1 and f"{tmp_path} has no mtp_heads.weight" in err_text()
