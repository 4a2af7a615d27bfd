"""model_gpu.py without a GPU: whole steps on the CPU, through NumPy arrays in CuPy's place and kernels compiled by g++.

fake_cupy() is as much of the module cupy as model_gpu.py uses, with the kernels of tests/cuda_on_cpu.h.  The matrix
products are those of --matmul ours."""
import gc
import os
import re
import subprocess
import sys
import types
import weakref

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
import model_cpu
import model_gpu
from cuda_helpers import CpuModule, check_guards, guarded
from model_cpu import Config


class Array(np.ndarray):
    """A NumPy array with the few attributes of a CuPy array that model_gpu.py uses."""
    data = property(lambda self: types.SimpleNamespace(ptr=self.ctypes.data))

    def set(self, host):
        assert host.dtype == self.dtype and host.shape == self.shape
        self[...] = host


class OutOfMemoryError(MemoryError):
    pass


class Event:
    def __init__(self, disable_timing=False):
        pass

    def synchronize(self):
        pass

    record = synchronize


def fake_cupy(total_bytes=1 << 40, capability="90", order=("forward", 0)):
    """(module, list of the arrays that it has handed out).  order: in which threads and blocks take turns."""
    made, pool = [], types.SimpleNamespace(limit=total_bytes, freed=[])

    def empty(shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size > pool.limit:
            raise OutOfMemoryError
        made.append(guarded(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape)).view(Array))      # NaN
        return made[-1]

    def zeros(shape, dtype):
        array = empty(shape, dtype)
        array[...] = 0
        return array

    def asarray(host):
        array = empty(host.shape, host.dtype)
        array[...] = host
        return array

    def raw_module(code, options):
        module = CpuModule("kernels.cu" if "rmsnorm_forward" in code else "flash_attn.cu", list(options))
        module.order = order
        return module

    def set_limit(size):
        pool.limit = size or total_bytes                                # as CuPy has it, 0 is none

    def alloc_pinned_memory(size):
        pool.pinned.append(size)
        return bytearray(size)

    pool.set_limit, pool.total_bytes, pool.pinned = set_limit, lambda: 0, []
    pool.free_all_blocks = lambda: pool.freed.append(len(made))
    runtime = types.SimpleNamespace(memGetInfo=lambda: (pool.limit, total_bytes))
    cuda = types.SimpleNamespace(
        is_available=lambda: True, runtime=runtime, Event=Event, alloc_pinned_memory=alloc_pinned_memory,
        Device=lambda: types.SimpleNamespace(compute_capability=capability),
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError))
    return types.SimpleNamespace(empty=empty, zeros=zeros, asarray=asarray, asnumpy=np.array, RawModule=raw_module,
                                 get_default_memory_pool=lambda: pool, cuda=cuda), made


@pytest.fixture
def made(monkeypatch):
    module, arrays = fake_cupy()
    monkeypatch.setattr(model_gpu, "cupy", module)
    return arrays


TINY = Config(dim=64, heads=2, kv_heads=1, layers=2, context=40, vocab=48, predict=3, mtp_weight=0.3)


def batch(config, B, T, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab, (B, T))
    tokens[0, :3] = 5                                                   # a repeated token
    targets = rng.integers(0, config.vocab, (B, T + config.predict - 1))
    targets[0, 2:5] = -1
    return tokens, targets


def widen(model, reference):
    """Weights drawn wide, as a trained model's, into both."""
    rng = np.random.default_rng(3)
    flat = rng.standard_normal(model_cpu.param_count(model.config)).astype(np.float32) * np.float32(0.1)
    gains = model_cpu.param_count(model.config, decayed_only=True)
    flat[gains:] = 1 + flat[gains:]
    model.write("params", flat)
    reference.write("params", flat)


def relative(x, reference):
    return np.linalg.norm(np.asarray(x, np.float64) - reference) / np.linalg.norm(reference)


@pytest.mark.parametrize("precision, attention, loss_bar, bar", [
    ("fp32", "flash", 1e-6, 3e-6), ("fp32", "naive", 1e-6, 3e-6), ("bf16", "flash", 3e-3, 4e-2),
    ("bf16", "naive", 3e-3, 4e-2), ("tf32", "flash", 1e-3, 3e-3)])
def test_a_whole_step_equals_the_reference(made, precision, attention, loss_bar, bar):
    """Forward, backward in two micro-batches, update; every gradient tensor, the norm and the new parameters."""
    model = model_gpu.Model(TINY, precision=precision, attention=attention, matmul="ours")
    reference = model_cpu.Model(TINY)
    widen(model, reference)
    tokens, targets = batch(TINY, 3, 37)
    counted = model_cpu.count_targets(targets, 37, TINY.predict)
    for part in (np.s_[:2], np.s_[2:]):
        losses = [m.forward(tokens[part], targets[part], counted) for m in (model, reference)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=loss_bar)
        model.backward()
        reference.backward()
    for name, grad in model.grads.items():
        assert relative(grad, reference.grads[name]) < bar, name
    norms = [float(m.update(lr=1e-2, clip=0.5)) for m in (model, reference)]
    assert abs(norms[0] / norms[1] - 1) < bar
    assert not model.flat_grads.any()
    assert relative(model.read("m"), reference.m) < bar
    # the first update is lr * sign(g) nearly everywhere: where g is near 0, rounding decides
    step = 1e-2 * (1 + 0.1 * np.abs(reference.flat_params).max())
    off = np.abs(model.read("params") - reference.flat_params) > 0.01 * step
    assert off.mean() < (0.1 if precision == "bf16" else 1e-3)
    assert model.step == 1
    check_guards(*made)


def test_the_bf16_copy_follows_the_parameters(made):
    model = model_gpu.Model(TINY, precision="bf16", attention="naive", matmul="ours")
    model.forward(*batch(TINY, 1, 8))
    model.backward()
    model.update(lr=1e-2)
    copy = (model.copy.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(copy, model.flat_params, rtol=2 ** -8)
    model.params["layers.0.qkv"][0, 0] = 1.5
    model.refresh()
    assert model.weights["layers.0.qkv"][0, 0] == 0x3FC0


def test_runs_are_bit_identical_whatever_the_order_of_threads(monkeypatch):
    results = []
    for order in (("forward", 0), ("reverse", 0), ("seeded", 2)):
        monkeypatch.setattr(model_gpu, "cupy", fake_cupy(order=order)[0])
        model = model_gpu.Model(TINY, precision="bf16", matmul="ours")
        losses = model.forward(*batch(TINY, 2, 19))
        model.backward()
        norm = model.update(lr=1e-3)
        results.append((losses.tobytes(), norm.tobytes(), model.read("params").tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("precision, bar", [("fp32", 1e-5), ("bf16", 3e-2)])
def test_logits_and_cached_decoding(made, precision, bar):
    model = model_gpu.Model(TINY, precision=precision, matmul="ours")
    reference = model_cpu.Model(TINY)
    widen(model, reference)
    tokens = batch(TINY, 2, 24)[0]
    expected = reference.logits(tokens)
    assert relative(model.logits(tokens), expected) < bar
    steps = [model.extend(tokens[0, start:end]) for start, end in ((0, 11), (11, 12), (12, 15), (15, 24))]
    assert [len(step) for step in steps] == [11, 1, 3, 9] and model.position == 24
    assert relative(np.concatenate(steps), expected[0]) < bar
    model.position = 11                                                  # roll back: the same rows, one by one
    singly = np.concatenate([model.extend(tokens[0, i:i + 1]) for i in range(11, 15)])
    assert singly.tobytes() == np.concatenate(steps[1:3]).tobytes()
    with pytest.raises(ValueError, match="do not fit the context of 40"):
        model.extend([1] * 26)
    check_guards(*made)


def test_greedy_generation_equals_the_cpu_beyond_the_context(made):
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours")
    reference = model_cpu.Model(TINY)
    widen(model, reference)
    streams = [model_cpu.generate(m, [1, 2, 3] * 11, temperature=0) for m in (model, reference)]
    assert [next(streams[0]) for _ in range(12)] == [next(streams[1]) for _ in range(12)]


def test_a_norm_that_is_not_finite_stops_all_updates(made):
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours")
    before = model.read("params")
    model.forward(*batch(TINY, 1, 8))
    model.backward()
    model.flat_grads[7] = np.inf
    assert not np.isfinite(model.update(lr=1e-2))
    assert model.flat_grads[7] == np.inf
    model.flat_grads[...] = 1.0
    assert np.isfinite(model.update(lr=1e-2))
    np.testing.assert_array_equal(model.read("params"), before)


def test_a_head_without_targets_and_masked_micro_batches(made):
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours")
    tokens, targets = batch(TINY, 1, 6)
    targets[...] = -1
    targets[0, 0] = 3                                                    # only head 0 has a target
    losses = model.forward(tokens, targets)
    model.backward()
    assert losses[0] > 0 and not losses[1:].any()
    assert np.isfinite(model.flat_grads).all()
    np.testing.assert_array_equal(model.grads["heads"][TINY.vocab:], 0)
    targets[...] = -1
    with pytest.raises(ValueError, match="head 0 has no counted target"):
        model.forward(tokens, targets)
    assert not model.forward(tokens, targets, [5, 5, 5]).any()           # other micro-batches have some


def test_save_and_load(made, tmp_path):
    from tokenizer import Tokenizer
    tokenizer = Tokenizer.train(["a few words to train a tokenizer"], 260)
    config = Config(dim=32, heads=1, kv_heads=1, layers=1, context=8, vocab=264, predict=2)
    model = model_gpu.Model(config, precision="bf16", matmul="ours", attention="naive")
    model.forward(*batch(config, 1, 8))
    model.backward()
    model.update(lr=1e-2)
    model_gpu.save(str(tmp_path), model, tokenizer, {"seen": 8})
    again, _ = model_gpu.load(str(tmp_path), model_gpu, {"precision": "fp32", "matmul": "ours", "attention": "naive"})
    assert model_gpu.load_state(str(tmp_path), again) == {"seen": 8} and again.step == 1
    for what in ("params", "m", "v"):
        np.testing.assert_array_equal(again.read(what), model.read(what))


@pytest.mark.parametrize("precision, attention", [("fp32", "flash"), ("bf16", "naive")])
def test_the_memory_plan_is_what_is_allocated(made, precision, attention):
    model = model_gpu.Model(TINY, precision=precision, attention=attention, matmul="ours", micro_batch=2)
    model.extend([1])
    plan = model_gpu.memory_plan(TINY, 2, TINY.context, precision, attention)
    small = sum(array.nbytes for array in (model.losses, model.state, model.partial, model.gpu.cos, model.gpu.sin))
    assert sum(array.nbytes for array in made) == sum(plan.values()) - model_gpu.CUBLAS_BYTES + small
    count = len(made)
    model.forward(*batch(TINY, 2, 40))
    model.backward()
    model.update(lr=0.0)
    model.forward(*batch(TINY, 1, 7))
    assert len(made) == count                                            # nothing more was allocated


@pytest.mark.parametrize("precision, attention", [("fp32", "flash"), ("bf16", "naive")])
def test_what_is_reserved_serves_any_rows_of_as_many_tokens(made, precision, attention):
    """Shorter and more rows, longer and fewer: no array and no pinned memory is made anew, and the results have the bits of
    a model that has seen no other shape."""
    pool = model_gpu.cupy.get_default_memory_pool()
    model = model_gpu.Model(TINY, precision=precision, attention=attention, matmul="ours", micro_batch=2)
    counts = len(made), len(pool.pinned), len(pool.freed)
    for B, T in (2, 40), (80, 1), (1, 40), (10, 8), (3, 26), (2, 40), (5, 16):
        model.forward(*batch(TINY, B, max(T, 3), seed=B)) if T >= 3 else model.forward(
            np.full((B, T), 5), np.full((B, T + 2), 7))
        model.backward()
        assert (len(made), len(pool.pinned), len(pool.freed)) == counts, (B, T)
    model.flat_grads[...] = 0
    fresh = model_gpu.Model(TINY, precision=precision, attention=attention, matmul="ours")
    results = []
    for one in (model, fresh):
        losses = one.forward(*batch(TINY, 9, 8))
        one.backward()
        results.append((losses.tobytes(), one.flat_grads.tobytes()))
    assert results[0] == results[1]
    check_guards(*made)


def test_buffers_that_grow_give_the_old_memory_back_first(made):
    pool = model_gpu.cupy.get_default_memory_pool()
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours")
    sizes = []
    for B, T in (1, 8), (2, 8), (1, 10), (1, 40), (2, 8), (8, 5):
        model.forward(*batch(TINY, B, T))
        sizes.append(len(pool.freed))
    assert sizes == [1, 2, 2, 3, 3, 3]                                  # where more than ever before was asked for
    inputs = model_gpu.table_bytes(model_gpu.input_table(TINY, 1, 40))
    assert pool.pinned[-2:] == [inputs, inputs] and len(pool.pinned) == 2 + 2 * 3       # the first two: for decoding
    kept = weakref.ref(model.reserved[3])
    model.forward(*batch(TINY, 9, 5))
    assert kept() is None                                               # nothing holds the buffers of before


def test_pinned_memory_is_not_written_while_copies_from_it_are_queued(made, monkeypatch):
    """Both of a pair of pinned arrays, and memory that others have just given back."""
    order = []

    class Noted(Event):
        def record(self):
            order.append(("record", id(self)))

        def synchronize(self):
            order.append(("wait", id(self)))
    monkeypatch.setattr(model_gpu.cupy.cuda, "Event", Noted)
    table = model_gpu.input_table(TINY, 1, 4)
    inputs = model_gpu.Inputs(model_gpu.cupy.zeros(model_gpu.table_bytes(table), np.uint8), table)
    assert [what for what, _ in order] == ["record", "wait"] and len({event for _, event in order}) == 1
    order.clear()
    for i in range(4):
        inputs.send({"tokens": np.full(4, i, np.int32)})
        assert (inputs.device[:16].view(np.int32) == i).all()
    waits = [event for what, event in order if what == "wait"]
    assert [what for what, _ in order] == 4 * ["wait", "record"] and waits[0] != waits[1] and waits[:2] == waits[2:]
    assert [event for what, event in order if what == "record"] == waits


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_both_engines_refuse_the_same_batches(made, engine):
    model = model_cpu.Model(TINY) if engine == "cpu" else model_gpu.Model(TINY, precision="fp32", matmul="ours")
    tokens, targets = batch(TINY, 1, 6)
    for bad, words in [((tokens, targets.astype(float)), "targets must be integers"),
                       ((tokens.astype(float), targets), "array of integers"), ((tokens, targets[:, 1:]), "of the shape"),
                       ((tokens, np.full_like(targets, 48)), "target id 48"), ((tokens + 48, targets), "token id"),
                       ((tokens, np.full_like(targets, -2)), "target id -2"), ((tokens[0], targets), "array of integers"),
                       ((np.zeros((1, 41), int), np.zeros((1, 43), int)), "41 tokens do not fit the context of 40")]:
        with pytest.raises(ValueError, match=words):
            model.forward(*bad)


def test_a_memory_limit_ends_with_its_model(made):
    pool = model_gpu.cupy.get_default_memory_pool()
    before, limit = pool.limit, 200 << 20
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours", memory_limit=limit)
    assert pool.limit == limit - model_gpu.CUBLAS_BYTES
    with pytest.raises(ValueError, match="A micro-batch of 4000 x 40 tokens needs"):
        model.forward(np.zeros((4000, 40), int), np.zeros((4000, 42), int))
    del model
    gc.collect()
    assert pool.limit == before


def test_peak_of_the_card(monkeypatch):
    """The first name that fits counts, so that an A100 is no A10; an unknown card has no peak."""
    for name, precision, peak in [("NVIDIA H200", "bf16", 989e12), ("NVIDIA H100 PCIe", "bf16", 756e12),
                                  ("NVIDIA A100-SXM4-80GB", "tf32", 156e12), ("NVIDIA A10", "bf16", 125e12),
                                  ("NVIDIA H200", "fp32", None), ("NVIDIA T4", "bf16", None)]:
        runtime = types.SimpleNamespace(getDeviceProperties=lambda _, name=name: {"name": name.encode()})
        fake = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime, Device=lambda: types.SimpleNamespace(id=0)))
        monkeypatch.setattr(model_gpu, "cupy", fake)
        assert model_gpu.peak_flops(precision) == peak, name


def test_largest_micro_batch():
    config = model_cpu.CONFIGS["big"]
    total = sum(model_gpu.memory_plan(config, 64, 512, "bf16").values())
    assert 9.5 * 2 ** 30 < total < 11.5 * 2 ** 30
    assert model_gpu.largest_micro_batch(config, 512, "bf16", total) == 64
    assert model_gpu.largest_micro_batch(config, 512, "bf16", total - 1) == 63
    assert model_gpu.largest_micro_batch(config, 512, "bf16", 1 << 30) == 0


def test_errors_are_one_sentence(monkeypatch):
    monkeypatch.setattr(model_gpu, "cupy", None)
    assert model_gpu.pick("auto") is model_cpu and model_gpu.pick("cpu") is model_cpu
    with pytest.raises(ValueError, match="needs CuPy"):
        model_gpu.pick("gpu")
    with pytest.raises(ValueError, match="needs CuPy"):
        model_gpu.Model(TINY)
    with pytest.raises(ValueError, match="must be auto, cpu or gpu"):
        model_gpu.pick("tpu")
    module, _ = fake_cupy()
    monkeypatch.setattr(model_gpu, "cupy", module)
    assert model_gpu.pick("auto") is model_gpu and model_gpu.pick("gpu") is model_gpu
    for arguments, words in [({"precision": "fp8"}, "precision must be one of"),
                             ({"attention": "fast"}, "attention must be"),
                             ({"matmul": "fast"}, "matmul must be one of")]:
        with pytest.raises(ValueError, match=words):
            model_gpu.Model(TINY, **arguments)
    with pytest.raises(ValueError, match="heads 32, 64 or 128 wide"):
        model_gpu.Model(Config(dim=48, heads=2, kv_heads=1, layers=1, context=8, vocab=8), matmul="ours")
    module, _ = fake_cupy(total_bytes=80 << 20)
    monkeypatch.setattr(model_gpu, "cupy", module)
    config = Config(dim=64, heads=1, kv_heads=1, layers=2, context=64, vocab=512)
    with pytest.raises(ValueError, match="A micro-batch of 4096 x 64 tokens needs .* use --micro-batch [1-9]"):
        model_gpu.Model(config, precision="fp32", matmul="ours", micro_batch=4096)
    for capability, precision, words in [("75", "bf16", "bf16 needs a GPU .* this one has 7.5: use --precision fp32"),
                                         ("61", "fp32", "fp32 needs a GPU of compute capability 7.0")]:
        monkeypatch.setattr(model_gpu, "cupy", fake_cupy(capability=capability)[0])
        with pytest.raises(ValueError, match=words):
            model_gpu.Model(TINY, precision=precision)
    module.cuda.is_available = lambda: False
    module.cuda.runtime.runtimeGetVersion = lambda: 12090
    monkeypatch.setattr(model_gpu, "cupy", module)
    for driver, words in [(0, "no NVIDIA driver"), (11040, "too old: it serves CUDA 11.4"), (12090, "finds no GPU")]:
        module.cuda.runtime.driverGetVersion = lambda: driver
        with pytest.raises(ValueError, match=words):
            model_gpu.pick("gpu")


def test_the_script_says_in_one_sentence_that_there_is_no_gpu():
    if model_gpu.why_no_gpu() is None:
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, os.path.join(ROOT, "model_gpu.py")], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_two_engines_have_the_same_functions_in_the_same_order():
    """Every x_forward and x_backward of model_cpu.py has a function of that name here, or a kernel or function that
    says it covers it; those of both files come in the same order."""
    texts = {}
    for name in ("model_cpu.py", "model_gpu.py", "kernels.cu", "flash_attn.cu"):
        with open(os.path.join(ROOT, name), encoding="utf-8") as file:
            texts[name] = file.read()
    pairs = r"^def (\w+_(?:forward|backward)|\w+_update)\("
    cpu, gpu = (re.findall(pairs, texts[name], re.MULTILINE) for name in ("model_cpu.py", "model_gpu.py"))
    assert [name for name in gpu if name in cpu] == [name for name in cpu if name in gpu]
    for name in cpu:                                                     # a fused kernel names what it covers
        assert name in gpu or name in texts["model_gpu.py"], name
        assert name in ("linear_forward", "block_forward", "block_backward", "attention_forward", "attention_backward",
                        "linear_backward") or name in texts["kernels.cu"], name

    def faces(text):
        body = text.split("\nclass Model:")[1].split("\n# ------")[0]
        return re.findall(r"^    def (\w+)\(", body, re.MULTILINE)
    shared = set(faces(texts["model_cpu.py"])) & set(faces(texts["model_gpu.py"]))
    assert {"refresh", "read", "write", "trunk", "logits", "forward", "backward", "update", "extend"} <= shared
    order = [[name for name in faces(texts[file]) if name in shared] for file in ("model_cpu.py", "model_gpu.py")]
    assert order[0] == order[1]


def test_the_flash_kernels_are_launched_as_their_own_tests_do():
    test_flash = pytest.importorskip("test_flash")
    for version, D in test_flash.VERSIONS:
        assert model_gpu.flash_kernels(version, D) == test_flash.geometry(version, D)


def test_every_kernel_is_launched_and_says_how():
    """Each kernel of kernels.cu has its launch geometry above it and a launch in model_gpu.py."""
    with open(os.path.join(ROOT, "kernels.cu"), encoding="utf-8") as file:
        lines = file.read().split("\n")
    with open(os.path.join(ROOT, "model_gpu.py"), encoding="utf-8") as file:
        python = file.read()
    text = re.sub(r"__launch_bounds__\(\d+\)\s*", "", "\n".join(lines))
    names = re.findall(r'extern "C" __global__ void (\w+)\(', text)
    assert sorted(names) == sorted(model_gpu.KERNELS)
    for name in names:
        assert python.count(f'"{name}"') >= 2, f"{name} is never launched"
    assert sum(line.startswith("// Grid (") for line in lines) >= len(names) - 2       # two share a template's comment
