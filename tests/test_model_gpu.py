"""model_gpu.py without a GPU: whole steps and texts on the CPU, with NumPy's arrays for CuPy's and the kernels compiled by g++.

Card is as much of the module cupy as model_gpu.py uses.  Matrix products are those of --matmul ours, or of a cuBLAS in NumPy.
The judge is model_cpu.py or, to the bit, the engine itself where it computes in another way.  Each kernel by itself:
test_kernels.py and test_flash.py."""
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import math
import types
import weakref

import numpy as np
import pytest
from cases import parametrize, put, value_error
from numpy.testing import assert_allclose, assert_array_equal

import model_cpu
import model_gpu
from cuda_helpers import Array, CpuModule, from_bf16, guarded, to_bf16
from model_cpu import Config, Sampling


class Card:
    """A GPU with so many bytes of memory, the module cupy and CuPy's memory pool, all in one.  Launches and copies run at once
    but, while a graph is recorded, they are written down.  order: in which threads and blocks take turns."""
    def __init__(self, size=1 << 40, capability="90", order=("forward", 0)):
        self.size, self.limit, self.order = size, 0, order
        self.made, self.recorded, self.graphs = [], None, 0
        self.asnumpy, self.get_default_memory_pool = np.array, lambda: self
        self.free_all_blocks = lambda: None
        shared = {"MaxSharedMemoryPerMultiprocessor": (100 if capability == "89" else 228) << 10}
        stream = types.SimpleNamespace(synchronize=lambda: None, ptr=0, record=lambda event: event)
        event = types.SimpleNamespace(synchronize=lambda: None, record=lambda: None)
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True, Event=lambda disable_timing: event, Stream=self.record, get_current_stream=lambda: stream,
            Device=lambda: types.SimpleNamespace(compute_capability=capability, attributes=shared),
            runtime=types.SimpleNamespace(memGetInfo=lambda: (size - self.total_bytes(), size), driverGetVersion=lambda: 12020,
                                          memcpyAsync=self.queued(lambda to, source, size, *_: ctypes.memmove(to, source, size))))

    def get_limit(self):
        return self.limit

    def set_limit(self, size):
        self.limit = size

    def total_bytes(self):
        return sum(size for memory, size in self.made if memory())

    def empty(self, shape, dtype):
        size = math.prod(np.atleast_1d(shape)) * np.dtype(dtype).itemsize
        if self.total_bytes() + size > (self.limit or self.size):
            raise MemoryError
        array = memory = guarded(np.full(size, 0xFF, np.uint8))         # NaN
        while isinstance(memory, np.ndarray):
            memory = memory.base
        self.made.append((weakref.ref(memory), size))
        return array.view(dtype).reshape(shape).view(Array)

    def asarray(self, host):
        array = self.empty(host.shape, host.dtype)
        array[...] = host
        return array

    def zeros(self, shape, dtype):
        return self.asarray(np.zeros(shape, dtype))

    def queued(self, function):
        def call(*arguments, **options):
            if self.recorded is None:
                return function(*arguments, **options)
            self.recorded.append(functools.partial(function, *arguments, **options))
        return call

    def RawModule(self, code, options):
        name = "kernels.cu" if "rmsnorm_forward" in code else "flash_attn.cu"
        module = CpuModule(name, [option for option in options if not option.startswith("-arch")])
        module.order = self.order
        return types.SimpleNamespace(get_function=lambda name: self.queued(module.get_function(name)))

    @contextlib.contextmanager
    def record(self, non_blocking):
        def end():
            launches, self.recorded = self.recorded, None
            self.graphs += 1
            return types.SimpleNamespace(launch=lambda: [launch() for launch in launches])
        yield types.SimpleNamespace(ptr=77, begin_capture=lambda: setattr(self, "recorded", []), end_capture=end)


def matrix(address, kind, ld, rows, columns):
    """A matrix by columns at a raw address; kind: CUDA_R_32F or CUDA_R_16BF."""
    dtype = np.dtype({0: "f4", 14: "u2"}[kind])
    raw = np.frombuffer((ctypes.c_char * (dtype.itemsize * (ld * (columns - 1) + rows))).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(raw, (rows, columns), (dtype.itemsize, dtype.itemsize * ld))


class Cublas:
    """cuBLAS's products as its documentation has them, by columns: C (m,n) = op(A) op(B) + beta C, for one or for `count`."""
    handle, workspace = "handle", (4096, 1)

    def __init__(self, card):
        self.kinds = set()
        self.cublasGemmEx = card.queued(functools.partial(self.gemm, 3))
        self.cublasGemmStridedBatchedEx = card.queued(functools.partial(self.gemm, 4))
        self.cublasSetStream_v2 = self.cublasSetWorkspace_v2 = lambda *_: None

    def gemm(self, width, handle, transpose_a, transpose_b, m, n, k, alpha, *rest):
        rest = [getattr(x, "value", x) for x in rest]
        A, B, beta, (*C, compute, _) = rest[:width], rest[width:2 * width], rest[2 * width], rest[2 * width + 1:]
        assert alpha._obj.value == 1
        self.kinds.add(compute)
        for i in range(C[4] if width == 4 else 1):
            a, b, c = [matrix(x[0] + i * (x[3] if width == 4 else 0) * (4 >> x[1] // 14), *x[1:3], *shape) for x, shape in (
                (A, (k, m) if transpose_a else (m, k)), (B, (n, k) if transpose_b else (k, n)), (C, (m, n)))]
            a, b, old = [x if x.dtype == np.float32 else from_bf16(np.ascontiguousarray(x)) for x in (a, b, c)]
            product = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
            if beta._obj.value:
                product = product + old
            c[...] = product if c.dtype == np.float32 else to_bf16(product)


@pytest.fixture
def insert(monkeypatch):
    """-> function that puts a Card in the place of CuPy."""
    def pinned(shape, dtype):
        return np.zeros(shape, dtype)
    # fewer of the blocks of threads that a GPU needs to be busy and a CPU takes one by one
    put(monkeypatch, model_gpu, SUM_BLOCKS=8, MATRIX_BLOCKS=3, RESERVE=1 << 20)
    monkeypatch.setattr(model_gpu, "cupyx", types.SimpleNamespace(empty_pinned=pinned, zeros_pinned=pinned), raising=False)

    def insert(**options):
        card = Card(**options)
        card.cublas = Cublas(card)
        put(monkeypatch, model_gpu, cupy=card, load_cublas=lambda: card.cublas)
        return card
    return insert


@pytest.fixture
def card(insert):
    yield insert()


TINY = Config(dim=64, heads=2, kv_heads=1, layers=2, context=40, vocab=48, predict=3, mtp_weight=0.3)
MODES = [("fp32", "ours", 1e-5), ("bf16", "ours", 4e-2), ("bf16", "cublas", 4e-2), ("tf32", "cublas", 3e-3)]


def batch(B, T, seed=0, config=TINY):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab, (B, T))
    tokens[0, :3] = 5                                                   # a repeated token
    targets = rng.integers(0, config.vocab, (B, T + config.predict - 1))
    targets[0, 2:5] = -1
    return tokens, targets


def models(config=TINY, optimizer="adamw", **options):
    """-> (of this engine, of the reference), with the same weights, drawn wide, as a trained model's."""
    both = model_gpu.Model(config, optimizer=optimizer, **options), model_cpu.Model(config, optimizer=optimizer)
    flat = np.random.default_rng(3).standard_normal(model_cpu.param_count(config)).astype(np.float32) / 10
    flat[model_cpu.update_table(config, "adamw")[-1][1]] += 1
    for model in both:
        model.write(model.flat_params, flat)
    return both


def learn(model, *shape):
    losses = model.read(model.forward(*batch(*shape)))
    model.backward()
    return losses


def relative(x, reference):
    return np.linalg.norm(np.asarray(x, np.float64) - reference) / np.linalg.norm(reference)


def same(a, b):
    return all(map(np.array_equal, a, b))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("precision, matmul, bar, change", [
    *[(*mode, {}) for mode in MODES], ("fp32", "cublas", 1e-5, dict(hidden=72, norm_eps=0.25, rope_theta=20.0, predict=1)),
    ("fp32", "cublas", 1e-5, dict(tied=True, predict=1))])
def test_a_step_equals_the_reference(card, precision, matmul, bar, change):
    """Losses and every gradient, of two micro-batches and of rows with weights; logits and log-probabilities."""
    config = dataclasses.replace(TINY, **change)
    both = model, reference = models(config, precision=precision, matmul=matmul)
    tokens, targets = batch(3, 21, config=config)
    counted = model_cpu.count_targets(targets, 21, config.predict)
    for part, weights in (np.s_[:2], None), (np.s_[2:], None), (np.s_[:], [-9.0, 2.0, -40.0]):
        losses = [m.forward(tokens[part], targets[part], counted, weights) for m in both]
        assert_allclose(*losses, rtol=bar)
        model.backward()
        reference.backward()
        for name, grad in model.grads.items():
            assert relative(grad, reference.grads[name]) < bar, name
    assert relative(model.logits(tokens), reference.logits(tokens)) < bar
    assert relative(model.log_probs(tokens, targets), reference.log_probs(tokens, targets)) < bar
    assert card.cublas.kinds == (set() if matmul == "ours" else {77 if precision == "tf32" else 68})


@pytest.mark.filterwarnings("ignore:.*encountered in matmul")           # of what is left where nothing is to change
@parametrize("precision, matmul, optimizer, bar", [
    ("bf16", "cublas", "adamw", 1e-4), ("fp32", "ours", "muon", 1e-4), ("bf16", "cublas", "muon", 8e-2)])
def test_updates_equal_the_reference(card, precision, matmul, optimizer, bar):
    """From the same gradients, clipped; each matrix by itself; in bf16 the copy follows.  A norm that is not finite changes
    nothing, then and later."""
    model, reference = models(precision=precision, matmul=matmul, optimizer=optimizer)
    rng, hidden, size = np.random.default_rng(5), model_cpu.muon_part(TINY, "muon"), reference.flat_grads.size
    for step in range(3):
        flat = (0.01 * rng.standard_normal(size) * np.exp(rng.standard_normal(size))).astype(np.float32)
        moved = []
        for m in (model, reference):
            before = m.read(m.flat_params).astype(np.float64)
            m.write(m.flat_grads, flat)
            assert_allclose(m.update(0.1, decay=0.1, clip=0.7), np.linalg.norm(flat.astype(float)), rtol=1e-6)
            after = m.flat_params - 0.99 * before
            moved.append([*model_cpu.layer_matrices(after[hidden], TINY), after[:hidden.start], after[hidden.stop:]])
        assert max(map(relative, *moved)) < bar and not model.flat_grads.any()
        assert relative(model.m, reference.m) < 1e-6 and relative(model.v, reference.v) < 1e-6
        if precision == "bf16":
            assert_array_equal(model.flat_weights, to_bf16(np.array(model.flat_params)))
    before = [model.read(array) for array in (model.flat_params, model.m, model.v)]
    for wrong in np.nan, 1.0:
        model.flat_grads[...] = 1.0
        model.flat_grads[9000 if optimizer == "muon" else 0] = wrong
        model.update(0.1)
        assert same(before, (model.flat_params, model.m, model.v))


def test_a_graph_does_what_its_launches_do(insert, monkeypatch):
    """Recorded or not, in any order of threads, alone or on several GPUs: the same bits.  Each shape has its graphs; those of a
    few shapes are kept.  Gradients of several GPUs are added up once a step."""
    monkeypatch.setattr(model_gpu, "SHAPES", 1)
    runs = []
    for record_at, order in (2, "forward"), (99, "reverse"):
        monkeypatch.setattr(model_gpu, "RECORD_AT", record_at)
        card = insert(order=(order, 0))
        model, kept, sums = model_gpu.Model(TINY, matmul="cublas", optimizer="muon"), [], []
        if record_at == 99:
            model.communicator = types.SimpleNamespace(all_reduce=lambda array: sums.append(np.array(array)))
        for step, (B, T) in enumerate([(2, 9), (2, 9), (1, 18), (2, 9), (3, 20), (2, 9), (2, 9)]):
            for last in False, True:
                kept += model.later(model.forward(*batch(B, T, step)))()
                model.backward(last)
            assert len(sums) in (0, step + 1) and (not sums or np.array_equal(sums[-1], model.flat_grads))
            kept += [*model.later(model.update(0.01))(), model.read(model.flat_params)]
            assert len(model.buffers_by_shape) <= 2
        assert card.graphs > 4 if record_at == 2 else not card.graphs
        runs.append(kept)
    assert same(*runs)


def test_the_first_gradient_after_an_update_is_written_not_added(card):
    """Zeros need not be read: no product reads what it writes to, until there is something to add to."""
    model = model_gpu.Model(TINY, precision="fp32")
    matrices = [grad for name, grad in model.grads.items() if grad.ndim == 2 and name != "embed"]

    def gradient():
        learn(model, 2, 9)
        return list(map(model.read, matrices))
    once, twice = gradient(), gradient()
    model.update(lr=0.0, decay=0.0)
    for a, b, grad in zip(once, twice, matrices):
        assert_allclose(b, 2 * a, rtol=1e-5, atol=1e-7)
        grad[...] = np.nan
    assert same(once, gradient())


def test_backward_needs_a_forward_of_its_own(card):
    (model, reference), example = models(precision="fp32"), batch(2, 9)
    for m in (model, reference):
        for between in (m.backward, lambda m=m: m.logits(example[0]), lambda m=m: m.log_probs(*example), lambda m=m: m.update(0.0)):
            m.forward(*example)
            between()
            with value_error("^backward needs a forward of its own, and between them neither logits nor update.$"):
                m.backward()
        m.forward(*example)
        m.decoder.extend([1, 2])                                        # it has arrays of its own
        m.backward()


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("precision, matmul, bar, change", [
    ("fp32", "ours", 1e-5, dict(predict=9)), ("bf16", "ours", 4e-2, dict(dim=96, heads=3, hidden=2056, layers=1)),
    ("tf32", "cublas", 3e-3, {})])
def test_the_cache_equals_the_reference(card, precision, matmul, bar, change):
    """A prompt, then more tokens of it, many and few: the logits after them, and what is drawn.  Few rows have the same bits
    whether they are read together or one by one."""
    config = dataclasses.replace(TINY, context=290, **change)
    model, reference = models(config, precision=precision, matmul=matmul)
    tokens, decoder = batch(1, 290, config=config)[0], model.decoder
    expected, ids = reference.logits(tokens)[0], tokens[0].tolist()
    greedy = Sampling(temperature=0)
    for prompt, few in (1, 9), (23, 3), (140, 5), (200, 1), (285, 5):
        drawn, p = decoder.draw(ids[decoder.position:prompt], 1, config.predict, prompt, greedy)
        logits = expected[prompt - 1]
        chosen = np.take_along_axis(logits, drawn.T, axis=1)[:, 0]
        assert (chosen > logits.max(axis=1) - 2 * bar * np.abs(logits).max()).all()
        assert_allclose(p, np.exp(chosen[0]) / np.exp(logits[0]).sum(), rtol=8 * bar)
        found = decoder.extend(ids[prompt:prompt + few])
        assert relative(found, expected[prompt:prompt + few]) < bar and decoder.tokens == ids[:prompt + few]
        decoder.position = prompt
        one_by_one = [decoder.extend([token], last=1) for token in ids[prompt:prompt + few]]
        assert np.array_equal(np.concatenate(one_by_one)[:8], found[:8])
    decoder.position = 70
    with value_error("221 tokens at 70 do not fit the context of 290"):
        decoder.extend([1] * 221)
    with value_error("token id 48 is out of range"):
        decoder.draw([48] * 20, 1, 1, 90, greedy)
    assert decoder.position == 70 and relative(decoder.extend(ids[70:90], 3), expected[87:90]) < bar


@parametrize("precision, options", [("fp32", dict(temperature=0)), ("fp32", dict(temperature=1.2, top_p=0.9)),
                                    ("bf16", dict(temperature=0.8, top_k=6))])
def test_speculation_changes_nothing(card, precision, options):
    """Through a full window, over two calls, and from graphs.  Drafts are the default.  In fp32 the text and its probabilities
    are those of the CPU."""
    config = dataclasses.replace(TINY, predict=2)
    texts, traces = [], []
    model, reference = models(config, precision=precision, matmul="ours")
    for one, how in (model, dict(speculate=False)), (model, {}), (reference, {}):
        text, trace = [1, 2, 3] * 10, []
        one.decoder.forget()
        for most in 13, 2:
            text += [*model_cpu.generate(one, text, seed=2**64 - 5, most=most, vocab=45, trace=trace, **how, **options), 5]
        texts.append(text)
        traces.append(trace)
    assert texts[0] == texts[1] and sum(drafts for _, drafts, _ in traces[1]) > 10 and card.graphs and max(texts[0]) < 45
    assert [p for *_, p in traces[0]] == [p for *_, p in traces[1]]
    if precision == "fp32":
        assert texts[2] == texts[0]
        assert_allclose(*[[p for *_, p in trace] for trace in traces[::2]], rtol=1e-3)


def test_what_is_drawn_equals_the_cpu(card):
    """By every head after each of the last rows, of few tokens and of many, in every way of sampling, also from graphs."""
    both = models(precision="fp32")
    tokens, answers = batch(1, 40)[0][0].tolist(), []
    for n, rows, heads in (11, 1, 3), (3, 3, 3), (1, 1, 1), (3, 2, 2), (3, 1, 3), (9, 1, 1):
        for options in (0.0, 0, 1.0), (0.9, 7, 0.95), (1.0, 1 << 40, 1e-60), (1.3, 0, 1.0):
            for m in both:
                start = m.decoder.position
                answers.append(m.decoder.draw(tokens[start:start + n], rows, heads, 100 + n, Sampling(*options, 77, 46)))
                m.decoder.position = start
        for m in both:
            m.decoder.extend(tokens[m.decoder.position:][:n])
    for (ids, p), (expected, expected_p) in zip(answers[::2], answers[1::2]):
        assert np.array_equal(ids, expected)
        assert_allclose(p, expected_p, rtol=1e-4)


@parametrize("precision, bar", [("fp32", 1e-5), ("bf16", 4e-2)])
def test_many_answers_at_once(insert, precision, bar):
    """Prompts of several lengths, through full windows, from graphs: each answer is that of its prompt alone.  Where the memory
    is too small for all, they are drawn part by part; where it is too small for one, that is an error."""
    card = insert()
    model, reference = models(precision=precision, matmul="ours", training=False)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 48, n).tolist() for n in (1, 8, 38, 3, 17, 2)]
    sampling = Sampling(1.1, 9, 0.95, rng.integers(0, 1 << 63, 6), 45)

    def answers(m):
        return model_cpu.generate_batch(m, prompts, sampling, {7}, 6)
    found, before = answers(model), card.total_bytes()
    decoder = model.new_decoder(3, 40)                                  # held until the end of the test
    card.limit = 2 * card.total_bytes() - before
    parts = answers(model)
    card.limit = card.total_bytes() + 1000
    with pytest.raises(MemoryError):
        answers(model)
    lengths = np.array(list(map(len, prompts[:3])))
    for _ in range(2):                                                  # read whole, and then a token of each
        drawn = decoder.draw_rows(prompts[:3], lengths, dataclasses.replace(sampling, seed=sampling.seed[:3]))
        logits = decoder.buffers.logits.ravel()[:3 * 48].reshape(3, 48)
        for prompt, row, token in zip(prompts, logits, drawn.tolist()):
            assert relative(row, reference.logits([prompt])[0, -1, 0]) < bar
            prompt.append(token)
    if precision == "fp32":
        prompts = [prompt[:n] for prompt, n in zip(prompts, (1, 8, 38, 3, 17, 2))]
        assert found == parts == answers(reference)


# ---------------------------------------------------------------------------------------------------------------------
# Memory, and what is refused
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("optimizer", ["adamw", "muon"])
def test_rows_are_halved_until_a_step_fits(insert, optimizer):
    """Before the first step: then it needs no further memory, whatever the shape of as many tokens; and never within a step.
    CuPy leaves the reserve free; a limit that it has already stays."""
    def model(rows, **options):
        card = insert(**options)
        made = model_gpu.Model(TINY, precision="bf16", micro_batch=rows, optimizer=optimizer)
        return made, card, card.total_bytes()
    _, _, size = model(2)
    fits, card, used = model(9, size=size + model_gpu.RESERVE + 3000)
    assert fits.rows == 2 and used == size and card.limit == size + 3000
    for B, T in (26, 3), (2, 40), (9, 8):
        fits.flat_grads[...] = 0
        losses = learn(fits, B, T)
        fits.decoder.forget()
        fits.decoder.extend([1] * 20)
        assert card.total_bytes() == size
    with pytest.raises(MemoryError):
        fits.forward(*batch(9, 40))
    gradient = fits.read(fits.flat_grads)
    large, card, _ = model(1)
    assert np.array_equal(learn(large, 9, 8), losses) and np.array_equal(large.flat_grads, gradient)
    large.forward(*batch(3, 40))                                        # grows, and gives the old memory back first
    large.forward(*batch(9, 40))
    assert large.rows == 9 and card.total_bytes() < model(9)[2] + 1000
    with pytest.raises(MemoryError):
        model(4, size=size // 2)
    card = insert()
    card.limit = size
    assert model_gpu.Model(TINY, precision="bf16", micro_batch=8, optimizer=optimizer).rows == 2 and card.limit == size


def test_the_host_does_not_write_where_a_copy_still_reads(card, monkeypatch):
    """Copies here run no earlier than they must: when somebody waits for the event behind them."""
    late, behind = [], {}

    class Event:
        def __init__(self, disable_timing):
            behind[self] = []

        def record(self):
            behind[self] = late[:]

        def synchronize(self):
            for copy in behind[self]:
                copy()
    put(monkeypatch, card.cuda, Event=Event)
    inputs, sent = model_gpu.Inputs(model_gpu.typed(np.int32, tokens=4)), []
    inputs.device = types.SimpleNamespace(set=lambda pinned: late.append(
        functools.lru_cache(lambda: sent.append(pinned.view(np.int32)[0]))))
    for i in range(6):
        inputs.send(tokens=np.full(4, i))
    for copy in late:
        copy()
    assert sent == list(range(6))


def test_which_engine_serves(insert, monkeypatch):
    """What is missing is said in one sentence; the precision is the best that there is."""
    monkeypatch.setattr(model_gpu, "cupy", None)
    assert model_gpu.pick("auto") is model_gpu.pick("cpu") is model_cpu
    with value_error("needs CuPy"):
        model_gpu.Model(TINY)
    for capability, precision in ("75", "fp32"), ("80", "bf16"):
        card = insert(capability=capability)
        assert model_gpu.pick("auto") is model_gpu.pick("gpu") is model_gpu and model_gpu.default_precision() == precision
    card.cuda.is_available = lambda: False
    for driver, words in [(0, "no NVIDIA driver"), (12000, "finds no GPU"), (
            11990, "too old: it serves CUDA 11[.]99, this CuPy needs 12.0: .* cupy-cuda11x")]:
        put(monkeypatch, card.cuda.runtime, driverGetVersion=lambda: driver)
        card.cuda.runtime.runtimeGetVersion = lambda: 12090
        with value_error(words):
            model_gpu.pick("gpu")


def test_models_that_a_gpu_does_not_take(insert, monkeypatch):
    for sizes, words in [(dict(dim=8320, heads=65), "models up to 8192 wide and contexts up to 16384, not 8320 and 8"),
                         (dict(dim=96, heads=1), "heads 32, 64 or 128 wide, not 96: choose heads so that 96 / heads is")]:
        insert()
        with value_error(words):
            model_gpu.Model(Config(**dict(kv_heads=1, layers=1, context=8, vocab=8) | sizes))
    for capability, precision in ("75", "tf32"), ("60", "fp32"):
        insert(capability=capability)
        with value_error(f"{precision} needs a GPU of compute capability .* this one has {int(capability) / 10};"):
            model_gpu.Model(TINY, precision=precision)
    monkeypatch.setattr(insert(), "RawModule", lambda **_: ctypes.CDLL("libnvrtc.so.missing"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(RuntimeError("no nvrtc\nmore")))
    with value_error("^The GPU engine does not start; .*: run `make gpu` [(]no nvrtc[)].$"):
        model_gpu.Model(TINY)


def test_the_gpu_of_a_process(card):
    """That of its number on its host, or the only one that it sees; none is a sentence."""
    used = []
    card.cuda.Device = lambda number: types.SimpleNamespace(use=lambda: used.append(number))
    for count, number in (1, 3), (2, 1), (4, 3), (2, 2):
        card.cuda.runtime.getDeviceCount = lambda: count
        with contextlib.nullcontext() if number != count else value_error("^this host has 2 GPUs, too few for process 2.$"):
            model_gpu.take_gpu(number)
    assert used == [0, 1, 3]


@parametrize("name", ["Model", "Decoder"])
def test_both_engines_have_one_face(name):
    """The public methods, and their parameters; how an engine is made, by __init__, differs."""
    def face(engine):
        return {key: inspect.signature(member) if callable(member) else type(member)
                for key, member in inspect.getmembers(getattr(engine, name)) if not key.startswith("_")}
    assert face(model_gpu) == face(model_cpu)
