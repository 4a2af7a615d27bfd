"""model_cpu.py against judges that others wrote: PyTorch's autograd and AdamW, Hugging Face's Llama and tokenizer."""
import os
import shutil

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"     # read by transformers when it is imported

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_twin
import transformers
from transformers.models.llama import modeling_llama

import checkpoint
import model_cpu
from tokenizer import Tokenizer

CONFIG = model_cpu.Config(dim=64, heads=8, kv_heads=2, layers=3, context=80, vocab=96, predict=4, mtp_weight=0.3)
T = 70                                              # more than one block of attention's loop, no power of two


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)                        # on shared cores, threads of such small products only wait
    yield
    torch.set_num_threads(before)


def distance(a, b):
    """Relative L2."""
    a, b = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, np.float64) for x in (a, b))
    assert a.shape == b.shape
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def make_model(std):
    """Weights wide enough for every part to matter, gains near 1."""
    model, rng = model_cpu.Model(CONFIG), np.random.default_rng(0)
    for weight in model.params.values():
        weight[...] = std * rng.standard_normal(weight.shape) + (weight.ndim == 1)
    return model


def make_batch(seed):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, CONFIG.vocab, (3, T)), rng.integers(0, CONFIG.vocab, (3, T + CONFIG.predict - 1))
    targets[0, 5:20] = -1
    targets[1, T - 10:] = -1                        # the end of a document: the later heads have fewer targets
    return tokens, targets


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch: the model once more in its own terms, differentiated by autograd
# ---------------------------------------------------------------------------------------------------------------------
def torch_rope(x):
    """x (B,heads,T,D): the pair (i, i + D/2) as a complex number, turned."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] / 10000.0 ** (torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def torch_losses(w, tokens, targets):
    """-> (K,) losses of the heads."""
    c, D = CONFIG, CONFIG.head_dim
    x = F.embedding(tokens, w["embed"])
    for i in range(c.layers):
        layer = {name: w[f"layers.{i}.{name}"] for name in ("qkv", "out", "gate_up", "down", "norm1", "norm2")}
        q, k, v = [part.unflatten(-1, (-1, D)).transpose(1, 2) for part in
                   F.linear(F.rms_norm(x, (c.dim,), layer["norm1"], 1e-5), layer["qkv"])
                   .split([c.heads * D, c.kv_heads * D, c.kv_heads * D], dim=-1)]
        k, v = torch_rope(k).repeat_interleave(c.heads // c.kv_heads, 1), v.repeat_interleave(c.heads // c.kv_heads, 1)
        y = F.scaled_dot_product_attention(torch_rope(q), k, v, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).flatten(2), layer["out"])
        gate, up = F.linear(F.rms_norm(x, (c.dim,), layer["norm2"], 1e-5), layer["gate_up"]).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer["down"])
    logits = F.linear(F.rms_norm(x, (c.dim,), w["norm"], 1e-5), w["heads"]).unflatten(-1, (c.predict, c.vocab))
    return torch.stack([F.cross_entropy(logits[:, :, k].flatten(0, 1), targets[:, k:k + T].flatten(), ignore_index=-1)
                        for k in range(c.predict)])


def torch_step(w, tokens, targets):
    """-> losses; leaves the gradient of the total loss in w."""
    losses = torch_losses(w, torch.from_numpy(tokens), torch.from_numpy(targets))
    (losses[0] + CONFIG.mtp_weight * losses[1:].mean()).backward()
    return losses.detach()


def torch_params(model):
    return {name: torch.tensor(weight, requires_grad=True) for name, weight in model.params.items()}


@pytest.mark.parametrize("threads", [1, 2])
def test_loss_and_every_gradient_equal_autograd(threads):
    model, (tokens, targets) = make_model(0.15), make_batch(seed=0)
    twin = torch_params(model)
    threaded = model_cpu.Model(CONFIG, threads=threads)
    threaded.write(threaded.flat_params, model.read(model.flat_params))
    losses, expected = threaded.forward(tokens, targets), torch_step(twin, tokens, targets)
    threaded.backward()
    assert distance(losses, expected) < 1e-13
    errors = {name: distance(gradient, twin[name].grad) for name, gradient in threaded.grads.items()}
    worst = max(errors, key=errors.get)
    print(f"losses {distance(losses, expected):.1e}, worst gradient {worst} {errors[worst]:.1e}")
    assert errors[worst] < 1e-10, errors


@pytest.mark.parametrize("precision, low, high", [("fp32", 1e-8, 1e-5), ("bf16", 1e-3, 5e-2)])
def test_the_gradient_that_gradcheck_asks_for(precision, low, high):
    model, (tokens, targets) = make_model(0.05), make_batch(seed=0)
    model.forward(tokens, targets)
    model.backward()
    kept = torch.get_float32_matmul_precision()
    found = torch_twin.gradient(model, tokens, targets, precision, "cpu")
    torch.set_float32_matmul_precision(kept)
    assert low < distance(found, model.flat_grads) < high


def test_twenty_steps_track_adamw():
    model, clip = make_model(0.05), 2.0
    twin = torch_params(model)
    groups = [{"params": [w for w in twin.values() if w.ndim == 2], "weight_decay": 0.1},
              {"params": [w for w in twin.values() if w.ndim == 1], "weight_decay": 0.0}]
    optimizer, norms = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8), []
    for step in range(20):
        tokens, targets = make_batch(seed=step % 4)
        lr = 1e-2 * (step + 1) / 20
        losses, expected = model.forward(tokens, targets), torch_step(twin, tokens, targets)
        assert distance(losses, expected) < 1e-9, step
        model.backward()
        norm = model.update(lr, clip=clip)
        expected_norm = torch.nn.utils.clip_grad_norm_(list(twin.values()), clip)
        assert abs(norm / float(expected_norm) - 1) < 1e-9, step
        norms.append(norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    errors = {name: distance(weight, twin[name]) for name, weight in model.params.items()}
    print(f"losses {distance(losses, expected):.1e}, worst parameter {max(errors.values()):.1e}, norms {norms}")
    assert max(errors.values()) < 1e-9, errors
    assert min(norms) < clip < max(norms)           # with and without clipping
    assert losses[0] < 4.0                          # it moved: ln 96 = 4.56


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face: our checkpoint folder as it is
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of the small model with random float32 weights."""
    path = str(tmp_path_factory.mktemp("checkpoint"))
    model = model_cpu.Model(model_cpu.CONFIGS["small"], dtype=np.float32)
    rng = np.random.default_rng(0)
    for weight in model.params.values():            # matrices thrice as wide as at the start, gains 0.8 to 1.2
        weight *= 3 if weight.ndim == 2 else rng.uniform(0.8, 1.2, weight.shape)
    text = " the cat's mat, we'll see; déjà vu! Grüße\n\tan alle, 猫 and dog. " * 20
    text += " ".join(str(n) for n in range(300))
    checkpoint.save(path, model, Tokenizer.train([text], 400), {})
    return path


def load_llama(folder, dtype):
    llama, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) <= {"mtp_heads.weight"}     # the heads that Llama does not have
    assert isinstance(llama, transformers.LlamaForCausalLM)
    return llama.eval()


def test_what_llama_saves_of_ours_loads_with_one_head(folder, tmp_path, capfd):
    """from_pretrained drops mtp_heads.weight, which config.json still counts."""
    load_llama(folder, torch.float32).save_pretrained(tmp_path)
    shutil.copy(os.path.join(folder, "tokenizer.json"), tmp_path)
    (model, _), (ours, _) = [checkpoint.load(str(path), model_cpu) for path in (tmp_path, folder)]
    tokens = np.random.default_rng(1).integers(0, 512, (1, 20))
    assert model.config.predict == 1 and distance(model.logits(tokens)[:, :, 0], ours.logits(tokens)[:, :, 0]) < 1e-12
    assert capfd.readouterr().err.endswith(f"note: {tmp_path} has no mtp_heads.weight, so its model has one head.\n")


class Norm64(torch.nn.Module):
    """LlamaRMSNorm in the precision of its input."""
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Rotary64(modeling_llama.LlamaRotaryEmbedding):
    """Its angles, cosines and sines in float64."""
    def forward(self, x, position_ids):
        D = self.config.head_dim
        freq = self.config.rope_parameters["rope_theta"] ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
        angle = torch.cat([position_ids[..., None] * freq] * 2, dim=-1)
        return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype, most", [("float32", 1e-6), ("float64", 1e-10)])
def test_llama_computes_the_logits_of_head_0(folder, monkeypatch, dtype, most):
    """In float64 throughout, its norms and its RoPE too, to ten digits."""
    if dtype == "float64":
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Norm64)
        monkeypatch.setattr(modeling_llama, "LlamaRotaryEmbedding", Rotary64)
    tokens = np.random.default_rng(1).integers(0, 512, (3, 128))
    model, _ = checkpoint.load(folder, model_cpu, {"dtype": dtype})
    with torch.no_grad():
        theirs = load_llama(folder, getattr(torch, dtype))(torch.from_numpy(tokens)).logits
    assert distance(model.logits(tokens)[:, :, 0], theirs) < most


TEXTS = {
    "English": "The cat's mat -- we'll see if they've gone, I'd said; O'Neill's.\n\n\tIndented\r\n  twice  \n",
    "multilingual": "Grüße, déjà vu; Ελληνικά ἀρχή; Русский;"
                    " العربية بِسْمِ; עברית; हिन्दी नमस्ते; ไทย; 日本語カナ; 한국어; ½ Ⅷ ² ٣",
    "controls": "".join(map(chr, range(32))) + " a\x1c b\x1f c",
    "white space": "\x7f\x85\xa0\u1680\u2000\u200b\u2028\u2029\u202f\u205f\u3000\ufeff a\u2003 b\xa0",
    "emoji": "👍🏽 👩‍👩‍👧‍👦 🇩🇪🇫🇷 ☃️ 1️⃣ 🏴\U000e0067\U000e0062\U000e007f x🙂y",
    "spaces": " " * 100 + "x" + " " * 33 + "\n" * 20 + "y \t \n z" + " " * 7,
    "digits": "1234567890" * 20 + " 3.14159,2,000,000 1e-05 0x1F 2026-01-31",
    "one": "a", "space": " ", "empty": "", "combining": "e\u0301 n\u0303 \u0301", "private": "\ue000\U0010ffff\ufffd"}


def test_auto_tokenizer_gives_the_same_ids(folder):
    ours, theirs = Tokenizer.load(os.path.join(folder, "tokenizer.json")), transformers.AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == ours.vocab_size
    for text in TEXTS.values():
        ids = theirs(text)["input_ids"]
        assert list(ours.encode(text)) == ids and ours.decode(ids) == theirs.decode(ids) == text


# ---------------------------------------------------------------------------------------------------------------------
# The twin of tests/bench.py: token by token with a KV cache as all at once
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("whole", [False, True])
def test_the_twin_decodes_what_it_computes_at_once(whole):
    """whole: attention reads all of the cache, masked, as in a CUDA graph."""
    model, tokens = make_model(0.15), torch.from_numpy(make_batch(seed=0)[0][:1])
    twin = torch_twin.Twin(CONFIG, model.params).double()
    cos, sin = torch_twin.tables(CONFIG, CONFIG.context)
    expected = twin.logits(tokens, cos[:T], sin[:T])[..., :CONFIG.vocab]
    cache, end, rows = twin.empty_cache(), 0, []
    with torch.no_grad():
        for n in 30, *[1] * (T - 32), 2:
            positions = torch.arange(end, end + n)
            end += n
            rows.append(twin.decode(tokens[:, positions], positions, cos, sin, cache, None if whole else end))
    assert distance(torch.cat(rows, dim=1), expected) < 1e-12
    assert distance(expected, model.logits(tokens.numpy())[:, :, 0]) < 1e-6         # its tables are float32
