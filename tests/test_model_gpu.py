"""model_gpu.py without a GPU: whole steps on the CPU, through NumPy arrays in CuPy's place and kernels compiled by g++.

fake_cupy() is as much of the module cupy as model_gpu.py uses, with the kernels of tests/cuda_on_cpu.h.  Matrix products are
those of --matmul ours, or of a cuBLAS in NumPy.  Each function of model_gpu.py by itself, at odd shapes: test_kernels.py."""
import collections
import contextlib
import ctypes
import dataclasses
import functools
import gc
import inspect
import math
import re
import sys
import types
import weakref

import numpy as np
import pytest
from cases import parametrize, put, refusal, value_error
from numpy.testing import assert_allclose, assert_array_equal

import bench
import model_cpu
import model_gpu
import script
from cuda_helpers import Array, CpuModule, check_guards, from_bf16, guarded, to_bf16
from model_cpu import Config, Sampling


class OutOfMemoryError(MemoryError):
    pass


def card(capability, **more):
    """A GPU.  Those of 8.9 have 100 KB of shared memory a multiprocessor, a Hopper has 228."""
    shared = {"MaxSharedMemoryPerMultiprocessor": (100 if capability == "89" else 228) << 10}
    return types.SimpleNamespace(compute_capability=capability, attributes=shared, **more)


class Event:
    def __init__(self, disable_timing=False):
        pass

    def synchronize(self):
        pass

    record = synchronize


def empty_pinned(shape, dtype):
    """As cupyx has it, in the memory of the fake."""
    size = math.prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize
    return np.frombuffer(model_gpu.cupy.cuda.alloc_pinned_memory(size), np.uint8).view(dtype).reshape(shape)


def zeros_pinned(shape, dtype):
    array = empty_pinned(shape, dtype)
    array[...] = 0
    return array


PINNED = types.SimpleNamespace(empty_pinned=empty_pinned, zeros_pinned=zeros_pinned)


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

    def queued(function):
        """A launch that, while a graph is recorded, is written down and not made."""
        def call(*arguments, **options):
            if pool.recorded is None:
                return function(*arguments, **options)
            pool.recorded.append(functools.partial(function, *arguments, **options))
            return 0
        return call

    def raw_module(code, options):
        pool.options.append(options)
        module = CpuModule("kernels.cu" if "rmsnorm_forward" in code else "flash_attn.cu",
                           [option for option in options if not option.startswith("-arch")])
        module.order = order
        return types.SimpleNamespace(get_function=lambda name: queued(module.get_function(name)))

    class Stream(contextlib.nullcontext):
        ptr = 77

        def __init__(self, non_blocking):
            super().__init__(self)
            assert non_blocking

        def begin_capture(self):
            pool.recorded = []

        def end_capture(self):
            recorded, pool.recorded = pool.recorded, None
            pool.graphs.append(len(recorded))
            return types.SimpleNamespace(launch=lambda: [launch() for launch in recorded])

    def set_limit(size):
        pool.limit = size or total_bytes                                # as CuPy has it, 0 is none

    def alloc_pinned_memory(size):
        pool.pinned.append(size)
        return bytearray(size)

    pool.get_limit = lambda: 0
    pool.set_limit, pool.total_bytes, pool.pinned, pool.options = set_limit, lambda: 0, [], []
    pool.queued, pool.recorded, pool.graphs = queued, None, []
    pool.free_all_blocks = lambda: pool.freed.append(len(made))

    def memcpy_async(to, source, size, kind, stream):
        assert kind == 1 and stream == 0                                # cudaMemcpyHostToDevice
        ctypes.memmove(to, source, size)

    runtime = types.SimpleNamespace(memGetInfo=lambda: (pool.limit, total_bytes), driverGetVersion=lambda: 12020,
                                    memcpyAsync=queued(memcpy_async))
    stream = types.SimpleNamespace(synchronize=lambda: None, ptr=0, record=lambda event: event.record() or event)
    cuda = types.SimpleNamespace(
        is_available=lambda: True, runtime=runtime, Event=Event, Stream=Stream, alloc_pinned_memory=alloc_pinned_memory,
        get_current_stream=lambda: stream,
        Device=lambda: card(capability),
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError))
    if not hasattr(model_gpu, "cupyx"):                                 # no CuPy here
        model_gpu.cupyx = PINNED
    return types.SimpleNamespace(empty=empty, zeros=zeros, asarray=asarray, asnumpy=np.array, RawModule=raw_module,
                                 get_default_memory_pool=lambda: pool, cuda=cuda), made


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """Fewer of the blocks of threads that a GPU needs to be busy and a CPU takes one by one."""
    put(monkeypatch, model_gpu, SUM_BLOCKS=8, MATRIX_BLOCKS=3)
    # what pins memory stands for itself, also where there is CuPy
    monkeypatch.setattr(model_gpu, "cupyx", PINNED, raising=False)


@pytest.fixture
def made(monkeypatch):
    """All arrays of the test, before none of which a kernel may write."""
    module, arrays = fake_cupy()
    monkeypatch.setattr(model_gpu, "cupy", module)
    yield arrays
    check_guards(*arrays)


@pytest.fixture
def pool(made):
    return model_gpu.cupy.get_default_memory_pool()


TINY = Config(dim=64, heads=2, kv_heads=1, layers=2, context=40, vocab=48, predict=3, mtp_weight=0.3)


def batch(config, B, T, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab, (B, T))
    tokens[0, :3] = 5                                                   # a repeated token
    targets = rng.integers(0, config.vocab, (B, T + config.predict - 1))
    targets[0, 2:5] = -1
    return tokens, targets


def gpu_model(config=TINY, precision="fp32", matmul="ours", **options):
    """Without cuBLAS, unless it is asked for."""
    return model_gpu.Model(config, precision=precision, matmul=matmul, **options)


def wide_models(config=TINY, optimizer="adamw", **options):
    """-> (of this engine, of the reference), with the same weights, drawn wide, as a trained model's."""
    models = gpu_model(config, optimizer=optimizer, **options), model_cpu.Model(config, optimizer=optimizer)
    rng = np.random.default_rng(3)
    flat = rng.standard_normal(model_cpu.param_count(config)).astype(np.float32) * np.float32(0.1)
    gains = model_cpu.update_table(config, "adamw")[-1][1].start
    flat[gains:] = 1 + flat[gains:]
    for model in models:
        model.write(model.flat_params, flat)
    return models


def learn(model, B, T, seed=0):
    """Forward and backward of a batch -> its losses"""
    losses = model.forward(*batch(model.config, B, T, seed))
    model.backward()
    return losses


def relative(x, reference):
    return np.linalg.norm(np.asarray(x, np.float64) - reference) / np.linalg.norm(reference)


SIZE = {0: 4, 14: 2}                                                    # bytes of a number; kind as in CUDA_TYPE


def columns_matrix(address, kind, rows, columns, ld):
    """A matrix by columns at a raw address."""
    size = SIZE[kind]
    assert ld >= rows
    raw = np.frombuffer((ctypes.c_char * (size * (ld * (columns - 1) + rows))).from_address(address), {0: "f4", 14: "u2"}[kind])
    return np.lib.stride_tricks.as_strided(raw, (rows, columns), (size, size * ld))


def plain(x):
    return x.value if hasattr(x, "value") else x


class FakeCublas:
    """cuBLAS's products as its documentation has them, in columns, on raw addresses: C (m,n) = alpha op(A) op(B) + beta C."""
    def __init__(self):
        self.algorithms, self.streams, self.workspace, self.loose, self.transpositions = set(), [], None, 0, 0

    def set_stream(self, handle, stream):
        self.streams.append(stream)
        self.workspace = None                               # as its documentation says

    def set_workspace(self, *workspace):
        self.workspace = tuple(plain(x) for x in workspace)

    def gemmEx(self, handle, transpose_a, transpose_b, m, n, k, alpha, A, type_a, lda, B, type_b, ldb, beta, C, type_c, ldc,
               compute, algorithm):
        assert handle == "handle" and algorithm == -1 and self.workspace == ("handle", 4096, 32 << 20)
        self.algorithms.add(compute)
        self.loose += (not transpose_a) + transpose_b       # operands that do not lie along the sum

        def read(*arguments):
            x = columns_matrix(*arguments)
            return x if x.dtype == np.float32 else from_bf16(np.ascontiguousarray(x))
        alpha, beta, A, B, C = alpha._obj.value, beta._obj.value, *map(plain, (A, B, C))
        a = read(A, type_a, *((k, m) if transpose_a else (m, k)), lda)
        b = read(B, type_b, *((n, k) if transpose_b else (k, n)), ldb)
        product = alpha * ((a.T if transpose_a else a) @ (b.T if transpose_b else b))
        result = product + beta * read(C, type_c, m, n, ldc) if beta else product            # beta 0: C may hold NaN
        columns_matrix(C, type_c, m, n, ldc)[...] = to_bf16(result) if type_c == 14 else result

    def gemmStridedBatchedEx(self, handle, transpose_a, transpose_b, m, n, k, alpha, A, type_a, lda, step_a, B, type_b, ldb,
                             step_b, beta, C, type_c, ldc, step_c, count, compute, algorithm):
        A, B, C, step_a, step_b, step_c = map(plain, (A, B, C, step_a, step_b, step_c))
        for i in range(count):
            self.gemmEx(handle, transpose_a, transpose_b, m, n, k, alpha, A + i * step_a * SIZE[type_a], type_a, lda,
                        B + i * step_b * SIZE[type_b], type_b, ldb, beta, C + i * step_c * SIZE[type_c], type_c, ldc,
                        compute, algorithm)


@pytest.fixture
def cublas(made, monkeypatch):
    fake, queued = FakeCublas(), model_gpu.cupy.get_default_memory_pool().queued
    library = types.SimpleNamespace(
        handle="handle", workspace=(4096, 32 << 20),
        cublasGemmEx=queued(fake.gemmEx), cublasGemmStridedBatchedEx=queued(fake.gemmStridedBatchedEx),
        cublasSetStream_v2=fake.set_stream, cublasSetWorkspace_v2=fake.set_workspace)
    monkeypatch.setattr(model_gpu, "load_cublas", lambda: library)
    return fake


STEPS = [("fp32", "ours", {}, 1e-5), ("bf16", "ours", {}, 4e-2), ("tf32", "cublas", {}, 3e-3),
         ("bf16", "cublas", {}, 4e-2),
         ("fp32", "cublas", dict(hidden=72, norm_eps=0.25, rope_theta=20.0), 1e-5), ("fp32", "cublas", dict(tied=True, predict=1), 1e-5)]


@parametrize("precision, matmul, change, bar", STEPS)
def test_a_whole_step_equals_the_reference(cublas, precision, matmul, change, bar):
    """Forward and backward in two micro-batches: losses, logits, every gradient tensor."""
    config = dataclasses.replace(TINY, **change)
    model, reference = wide_models(config, precision=precision, matmul=matmul)
    tokens, targets = batch(config, 3, 21)
    counted = model_cpu.count_targets(targets, 21, config.predict)
    for part in (np.s_[:2], np.s_[2:]):
        losses = [m.forward(tokens[part], targets[part], counted) for m in (model, reference)]
        assert_allclose(losses[0], losses[1], rtol=bar)
        model.backward()
        reference.backward()
    for name, grad in model.grads.items():
        assert relative(grad, reference.grads[name]) < bar, name
    assert relative(model.logits(tokens), reference.logits(tokens)) < bar
    assert cublas.algorithms == (set() if matmul == "ours" else {77 if precision == "tf32" else 68})


@parametrize("precision, bar", [("fp32", 1e-5), ("bf16", 4e-2)])
def test_the_weights_of_rows_equal_the_reference(made, precision, bar):
    found = []
    tokens, targets = batch(TINY, 4, 9)
    for model in wide_models(precision=precision):
        losses = model.forward(tokens, targets, [5, 1, 1], [-9.0, 2.0, 0.0, -40.0])
        model.backward()
        found.append((losses, model.flat_grads, model.log_probs(tokens, targets)))
    for ours, expected in zip(*found):
        assert relative(ours, expected) < bar


@pytest.mark.filterwarnings("ignore:.*encountered in matmul")           # of what is left where nothing is to change
@parametrize("precision, matmul, optimizer, bar", [
    ("fp32", "ours", "adamw", 1e-4), ("bf16", "cublas", "adamw", 1e-4), ("fp32", "ours", "muon", 1e-4), ("tf32", "cublas", "muon", 1e-4),
    ("bf16", "cublas", "muon", 8e-2)])
def test_updates_equal_the_reference(cublas, precision, matmul, optimizer, bar):
    """From the same gradients of two sizes; each matrix by itself; in bf16 the copy follows.  A norm that is not finite changes
    nothing, then and later."""
    model, reference = wide_models(precision=precision, matmul=matmul, optimizer=optimizer)
    rng, hidden = np.random.default_rng(5), model_cpu.muon_part(TINY, "muon")
    for step in range(1, 4):
        flat = 0.01 * rng.standard_normal(reference.flat_grads.size) * np.exp(rng.standard_normal(reference.flat_grads.size))
        moved = []
        for m in (model, reference):
            m.write(m.flat_grads, flat.astype(np.float32))
            before = np.array(m.flat_params, np.float64)
            assert abs(float(m.update(0.1, decay=0.1, clip=0.7)) / np.linalg.norm(flat) - 1) < 1e-6 and not m.flat_grads.any()
            after = np.array(m.flat_params, np.float64) - (1 - 0.1 * 0.1) * before
            moved.append([*model_cpu.layer_matrices(after[hidden], TINY), after[:hidden.start], after[hidden.stop:]])
        assert max(map(relative, *moved)) < bar and model.step == step
        assert relative(model.read(model.m), reference.m) < 1e-6 and relative(model.read(model.v), reference.v) < 1e-6
        if precision == "bf16":
            assert_array_equal(model.flat_weights, to_bf16(np.array(model.flat_params)))
    before = [model.read(array) for array in (model.flat_params, model.m, model.v)]
    model.flat_grads[...] = 1.0
    model.flat_grads[9000 if optimizer == "muon" else 0] = np.nan
    for _ in range(2):                                                  # the second with another gradient
        model.update(0.1)
        assert all(map(np.array_equal, before, (model.flat_params, model.m, model.v))) and model.flat_grads.any()
        model.flat_grads[...] = 1.0


def test_a_shape_that_comes_often_is_recorded(cublas, pool, monkeypatch):
    """The same losses, gradients and weights as launched one by one; each shape has its graphs, new memory new ones."""
    runs = []
    for at in (2, 1000):
        monkeypatch.setattr(model_gpu, "RECORD_AT", at)
        model, kept = gpu_model(matmul="cublas", optimizer="muon"), []
        for step, (B, T) in enumerate([(2, 9), (2, 9), (1, 18), (2, 9), (3, 20), (2, 9)]):
            losses = model.forward(*batch(TINY, B, T, step))
            kept += model.later(losses)()
            assert np.array_equal(kept[-1], losses) and losses[0] > 1
            model.backward()
            kept += [*model.later(model.update(0.01))(), model.read(model.flat_params)]
        runs.append(kept)
    assert all(map(np.array_equal, *runs))
    assert pool.graphs == [1 + 2 * 9 + 2 + 2, 2 + 2 + 2 * 15 + 1] and cublas.streams == [0, 77, 0, 77, 0, 0]


def test_an_error_while_a_graph_is_recorded(cublas, pool, monkeypatch):
    """cuBLAS comes back to the stream that there is; and the step is right, recorded or not."""
    model, expected = (gpu_model(matmul="cublas") for _ in range(2))
    monkeypatch.setattr(model_gpu, "RECORD_AT", 1)
    with monkeypatch.context() as patch:
        patch.setattr(model_gpu, "cross_entropy_forward", None)
        with pytest.raises(TypeError):
            learn(model, 2, 9)
    assert cublas.streams[-2:] == [77, 0] and cublas.workspace
    pool.recorded = None                                                # the stream has ended, and its recording
    for one in model, expected:
        learn(one, 2, 9)
    assert np.array_equal(model.flat_grads, expected.flat_grads)


def test_graphs_are_kept_of_so_many_shapes(cublas, monkeypatch):
    """A loop over ever new shapes does not fill the memory with what is kept for them."""
    monkeypatch.setattr(model_gpu, "SHAPES", 2)
    model, expected = (gpu_model(matmul="cublas") for _ in range(2))
    most = 0
    for T in range(3, 8):
        for one in model, expected:
            learn(one, 1, T)
            one.decoder.position = 0
            one.decoder.extend(range(T))
            one.decoder.extend([T])
        most = max(most, len(model.buffers_by_shape))
    assert most in (3, 4) and np.array_equal(model.flat_grads, expected.flat_grads)


def test_backward_needs_a_forward_of_its_own(made):
    """As on the CPU."""
    model, (tokens, targets) = gpu_model(), batch(TINY, 2, 9)
    for between in (model.backward, lambda: model.logits(tokens[:1]), lambda: model.log_probs(tokens, targets),
                    lambda: model.update(0.0), model.refresh):
        model.forward(tokens, targets)
        between()
        with value_error("^backward needs a forward of its own, and between them neither logits nor update.$"):
            model.backward()
    with value_error("^backward needs a forward of its own"):
        gpu_model().backward()
    model.forward(tokens, targets)
    model.decoder.extend([1, 2])                                        # it has arrays of its own
    model.backward()


@parametrize("optimizer", ["adamw", "muon"])
def test_the_gradients_of_several_gpus_are_added_up_once(cublas, monkeypatch, optimizer):
    """After the last micro-batch, the whole of them; all else has the bits of one GPU alone."""
    alone, one = (model_gpu.Model(TINY, precision="bf16", optimizer=optimizer) for _ in range(2))
    sums = []
    one.communicator = types.SimpleNamespace(all_reduce=lambda array: sums.append(array.copy()))
    for step in range(3):                                               # the third from a graph
        for model in alone, one:
            for part in range(3):
                model.forward(*batch(TINY, 2, 9, part), np.array([50, 50, 50]))
                model.backward(last=part == 2)
                assert model is alone or len(sums) == step + (part == 2)
        assert np.array_equal(alone.flat_grads, sums[-1])
        assert float(alone.update(0.01)) == float(one.update(0.01)) and np.array_equal(alone.flat_params, one.flat_params)


def test_products_that_cublas_refuses(cublas, monkeypatch):
    library = types.SimpleNamespace(handle="handle", workspace=(4096, 32 << 20), cublasGemmEx=lambda *call: 7, cublasSetStream_v2=cublas.set_stream,
                                    cublasSetWorkspace_v2=cublas.set_workspace)
    monkeypatch.setattr(model_gpu, "load_cublas", lambda: library)
    gpu = model_gpu.Gpu(TINY, "fp32", "cublas")
    a = np.zeros((3, 4), np.float32).view(Array)
    with pytest.raises(RuntimeError, match=r"^cuBLAS refuses a matmul of 3 x 4 by 4 x 3: status 7\.$"):
        model_gpu.gemm(gpu, a @ a.T, a, a, transpose_b=True)


def test_runs_are_bit_identical_whatever_the_order_of_threads(monkeypatch):
    results = []
    for order in (("reverse", 0), ("seeded", 2)):
        monkeypatch.setattr(model_gpu, "cupy", fake_cupy(order=order)[0])
        model = gpu_model(precision="bf16")
        losses = learn(model, 1, 19)
        norm = model.update(lr=1e-3)
        results.append((losses.tobytes(), norm.tobytes(), model.read(model.flat_params).tobytes()))
    assert results[0] == results[1]


def test_the_first_gradient_after_an_update_is_written_not_added(cublas):
    """Zeros need not be read: no product reads what it writes to, until there is something to add to."""
    model = gpu_model(matmul="cublas")
    matrices = [name for name, view in model.grads.items() if view.ndim == 2 and name != "embed"]

    def gradient():
        learn(model, 2, 9)
        return {name: model.read(model.grads[name]).copy() for name in matrices}
    once, twice = gradient(), gradient()
    model.update(lr=0.0, decay=0.0)
    for name in matrices:
        assert_allclose(twice[name], 2 * once[name], rtol=1e-5, atol=1e-7)
        model.grads[name][...] = np.nan
    assert all(map(np.array_equal, once.values(), gradient().values()))


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("precision, matmul, change, bar", [
    ("fp32", "ours", dict(predict=9), 1e-5), ("bf16", "ours", dict(dim=96, heads=3, hidden=2056, layers=1), 3e-2),
    ("tf32", "cublas", {}, 3e-3)])
def test_the_cache_equals_the_reference(cublas, monkeypatch, precision, matmul, change, bar):
    """Prompts and few rows, at any position; up to max(K, 8) rows have kernels of their own: the same bits as row by row."""
    config = dataclasses.replace(TINY, context=290, **change)
    model, reference = wide_models(config, precision=precision, matmul=matmul)
    tokens, decoder, few = batch(config, 1, 290)[0][0], model.decoder, max(8, config.predict)
    expected, launched, launch = reference.logits(tokens[None])[0], [], model.gpu.launch
    model.gpu.launch = lambda name, *rest, **more: launched.append(name) or launch(name, *rest, **more)
    for start, end in (0, 1), (1, 1 + few), (1 + few, 23), (23, 26), (26, 140), (137, 142), (142, 255), (255, 290), (5, 50):
        decoder.tokens = tokens[:start].tolist()                        # which the cache has from earlier calls
        launched.clear()
        found = decoder.extend(tokens[start:end])
        assert relative(found, expected[start:end]) < bar, (start, end)
        assert ("decode_qkv" in launched) == (end - start <= few) != ("rope" in launched)
        if end - start <= few:
            decoder.position = start
            assert np.concatenate([decoder.extend([token]) for token in tokens[start:end]]).tobytes() == found.tobytes()
    assert decoder.extend([1] * 20, 3).shape == (3, config.predict, config.vocab)
    with value_error("221 tokens at 70 do not fit the context of 290"):
        decoder.extend([1] * 221)
    assert decoder.position == 70


@parametrize("precision, options", [("fp32", dict(temperature=0)), ("fp32", dict(temperature=1.2, top_p=0.9)),
                                                ("bf16", dict(temperature=0.8, top_k=6))])
def test_speculation_changes_nothing(pool, precision, options):
    """Through a full window, over two calls, and from graphs once a step came often.  Drafts are the default.  In fp32 the text
    and its probabilities are those of the CPU."""
    config = dataclasses.replace(TINY, predict=2)
    texts, traces = [], []
    for how in dict(speculate=False), dict(), None:
        model, reference = wide_models(config, precision=precision)
        traces.append([])
        text, model = [1, 2, 3] * 10, model if how is not None else reference
        for most in (13, 2):
            text += [*model_cpu.generate(model, text, seed=2**64 - 5, most=most, vocab=45, trace=traces[-1], **(how or {}), **options), 5]
        texts.append((text, model.decoder.tokens))
    assert texts[0] == texts[1] and sum(drafts for _, drafts, _ in traces[1]) > 10 and model_gpu.Model.draft_heads == 1
    if precision == "fp32":
        assert texts[2][0] == texts[0][0] and max(texts[0][0]) < 45
        assert_allclose(*[[p for _, _, p in trace] for trace in traces[::2]], rtol=1e-3)
    assert set(pool.graphs) == {2 + 2 * 5 + 2}                           # copy and embedding, layers, logits and draw


def test_what_is_drawn_equals_the_cpu(made, monkeypatch):
    """By every head after each of the last rows, of few tokens and of many; also from a graph, of which each number of heads has
    its own; an answer stays when the next comes."""
    monkeypatch.setattr(model_gpu, "RECORD_AT", 2)
    (model, reference), answers = wide_models(), []
    tokens = batch(TINY, 1, 40)[0][0].tolist()
    for n, rows, heads in (11, 1, 3), (3, 3, 3), (1, 1, 1), (3, 2, 2), (3, 1, 3), (9, 1, 1):
        part = tokens[model.decoder.position:model.decoder.position + n]
        for options in (0.0, 0, 1.0), (0.9, 7, 0.95), (1.0, 1 << 40, 1e-60):
            before = model.decoder.position = reference.decoder.position
            answers.append([m.decoder.draw(part, rows, heads, 100 + n, Sampling(*options, 77, 46)) for m in (model, reference)])
            reference.decoder.position = before
        reference.decoder.extend(part)
    for (ids, p), (expected, expected_p) in answers:
        assert p.shape == expected_p.shape and np.array_equal(ids, expected)
        assert_allclose(p, expected_p, rtol=1e-4)
    # what crosses for it: no logits
    assert {*vars(model.decoder.host)} == {"tokens", "lengths", "times", "limits", "drawing", "seeds", "ids", "p"}


@parametrize("precision", ["fp32", "bf16"])
def test_many_answers_at_once_have_the_bits_of_one(made, precision):
    """Prompts of several lengths, of few tokens, through full windows, from graphs; in fp32 the ids are also the CPU's."""
    model, reference = wide_models(precision=precision)
    rng = np.random.default_rng(5)
    context = TINY.context
    prompts = [rng.integers(0, TINY.vocab, n).tolist() for n in (1, 8, context - 2, 3)]
    seeds = rng.integers(0, 1 << 63, len(prompts))
    sampling = Sampling(1.1, 9, 0.95, seeds, 45)
    answers = model_cpu.generate_batch(model, prompts, sampling, {7}, 6)
    if precision == "fp32":
        assert answers == model_cpu.generate_batch(reference, prompts, sampling, {7}, 6)
    for prompt, seed, answer in zip(prompts, seeds.tolist(), answers):
        if len(prompt) > 8:                                             # a longer one is read by other kernels
            continue
        alone = model_cpu.generate(model, prompt, 1.1, 9, 0.95, seed, 45, {7}, 6, speculate=False)
        assert answer[:len(answer) - (answer[-1] == 7)] == list(alone)


def test_what_is_drawn_is_read_once_the_gpu_has_drawn_it(made, monkeypatch):
    """Here the kernels run no earlier than when somebody waits for them."""
    (model, reference), queue = wide_models(), []
    launch = model.gpu.launch_early
    model.gpu.launch_early = lambda *arguments: queue.append(functools.partial(launch, *arguments))
    stream = types.SimpleNamespace(ptr=0, synchronize=lambda: [queue.pop(0)() for _ in range(len(queue))])
    monkeypatch.setattr(model_gpu.cupy.cuda, "get_current_stream", lambda: stream)
    for n in 11, 2, 1:
        (ids, p), (expected, expected_p) = [m.decoder.draw([7] * n, 1, 3, 5, Sampling(seed=9)) for m in (model, reference)]
        assert np.array_equal(ids, expected) and abs(p / expected_p - 1) < 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# Memory, launches, and what is refused
# ---------------------------------------------------------------------------------------------------------------------
def test_a_table_is_cut_out_of_memory():
    """Arrays start at multiples of 256 bytes, one after the other, and none lies in another."""
    table = [("a", (63,), np.float32), ("b", (2, 32), np.float32), ("c", (65,), np.float32), ("d", (1,), np.float64)]
    assert model_gpu.table_bytes(table) == 256 + 256 + 512 + 256
    memory = np.zeros(64 + 1280, np.uint8)
    arrays = vars(model_gpu.carve(memory, table, 64))
    assert [array.ctypes.data - memory.ctypes.data for array in arrays.values()] == [64, 320, 576, 1088]
    assert [(name, array.shape, array.dtype) for name, array in arrays.items()] == table


def test_buffers_that_grow_give_the_old_memory_back_first(pool):
    model, sizes = gpu_model(), []
    for B, T in (1, 8), (2, 30), (3, 20), (8, 11), (2, 40):
        kept = weakref.ref(model.inputs)
        model.forward(*batch(TINY, B, T))
        sizes.append(len(pool.freed))
        assert (kept() is None) == (len(sizes) in (2, 4))               # nothing holds the buffers of before
    assert sizes == [1, 2, 2, 3, 3]                                     # where more than ever before was asked for


def test_what_is_refused(made):
    """The batches that the CPU engine refuses, and what this one cannot do."""
    model, (tokens, targets) = gpu_model(), batch(TINY, 1, 6)
    for bad, words in [((tokens, targets.astype(float)), "targets must be integers"), ((tokens[0], targets), "array of integers"),
                       ((tokens, np.full_like(targets, -1)), "head 0 has no counted target")]:
        with value_error(words):
            model.forward(*bad)
    with value_error("token id 48 is out of range"):
        model.decoder.extend([5, 48])
    assert model.decoder.position == 0
    with value_error("^the GPU engine takes at most 65,535 rows at once, not 65,536.$"):
        model.logits(np.zeros((65536, 1), int))
    only = gpu_model(training=False)
    assert np.array_equal(only.forward(tokens, targets), model.forward(tokens, targets)) and only.flat_grads is only.m is None
    with value_error(r"^this model was made with training=False: it has no gradients\.$"):
        only.backward()


def test_an_early_launch_tells_the_driver_all(made, monkeypatch):
    """What cuLaunchKernelEx is handed: the structures of cuda.h, and the address of each argument."""
    gpu, seen, x = model_gpu.Gpu(TINY, "bf16", "ours"), [], np.empty(5, np.uint16).view(Array)
    monkeypatch.setattr(model_gpu.cupy, "ndarray", Array, raising=False)
    monkeypatch.setattr(model_gpu.cupy.cuda, "get_current_stream", lambda: types.SimpleNamespace(ptr=77))

    def driver(config, function, pointers, extra):
        numbers, (stream, attributes), count = np.frombuffer(config, np.uint32, 7), np.frombuffer(config, np.uint64, 2, 32), config[48:]
        assert numbers.tolist() == [5, 6, 1, 128, 1, 1, 0] and stream == 77 and count == bytes([1, 0, 0, 0, 0, 0, 0, 0])
        # an attribute: its number, here ..._PROGRAMMATIC_STREAM_SERIALIZATION, padding, and a union of 64 bytes
        assert ctypes.string_at(int(attributes), 72) == np.array([6, 0, 1] + 15 * [0], np.int32).tobytes()
        seen.append([ctypes.string_at(p, size) for p, size in zip(pointers, (8, 4, 4, 8, 8), strict=True)])
        assert function.value == 123 and extra is None
        return status
    gpu.launch_kernel, gpu.kernels["k"] = driver, types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=123))
    status = 0
    gpu.launch_early("k", (5, 6), 128, x, 3, 0.25, np.int64(1 << 40), None)
    status = 700
    with pytest.raises(RuntimeError, match="^CUDA refuses to launch k: status 700[.]$"):
        gpu.launch_early("k", (5, 6), 128, x, 3, 0.25, np.int64(1 << 40), None)
    values = [np.uint64(x.ctypes.data), np.int32(3), np.float32(0.25), np.int64(1 << 40), np.uint64(0)]
    assert seen == 2 * [[value.tobytes() for value in values]]


def test_compiling_is_told_if_it_takes_time(made, monkeypatch, capsys):
    said = []

    class Timer:
        def __init__(self, seconds, function):
            said.append(seconds)
            function()

        def start(self):
            said.append("start")

        def cancel(self):
            said.append("cancel")
    monkeypatch.setattr(model_gpu.threading, "Timer", Timer)
    model_gpu.Gpu(TINY, "fp32", "ours")
    assert said == [0.5, "start", "cancel"]
    assert capsys.readouterr().err == "Compiling the CUDA kernels for this GPU (kept for the next run).\n"
    monkeypatch.setattr(model_gpu, "compiled", None)
    with pytest.raises(TypeError):
        model_gpu.Gpu(TINY, "fp32", "ours")
    assert said[3:] == [0.5, "start", "cancel"]


def test_which_engine_serves(monkeypatch):
    """What is missing is said in one sentence."""
    monkeypatch.setattr(model_gpu, "cupy", None)
    assert model_gpu.pick("auto") is model_gpu.pick("cpu") is model_cpu
    with value_error("needs CuPy"):
        model_gpu.Model(TINY)
    module, _ = fake_cupy()
    monkeypatch.setattr(model_gpu, "cupy", module)
    assert model_gpu.pick("auto") is model_gpu.pick("gpu") is model_gpu
    module.cuda.is_available = lambda: False
    old = "too old: it serves CUDA {}, this CuPy needs 12.0: .* cupy-cuda11x"
    for driver, words in [(0, "no NVIDIA driver"), (11990, old.format("11[.]99")), (12000, "finds no GPU"), (13010, "finds no GPU")]:
        module.cuda.runtime.driverGetVersion = lambda: driver
        module.cuda.runtime.runtimeGetVersion = lambda: 12090
        with value_error(words):
            model_gpu.pick("gpu")


def test_models_that_a_gpu_does_not_take(made, monkeypatch):
    with value_error("precision must be one of"):
        gpu_model(precision="fp8")
    for sizes, words in [(dict(dim=8320, heads=65), "models up to 8192 wide and contexts up to 16384, not 8320 and 8"),
                         (dict(dim=96, heads=1), "heads 32, 64 or 128 wide, not 96: choose heads so that 96 / heads is one of these[.]$")]:
        with value_error(words):
            gpu_model(Config(**{**dict(kv_heads=1, layers=1, context=8, vocab=8), **sizes}))
    model_gpu.check_sizes(Config(dim=8192, heads=64, kv_heads=1, layers=1, context=16384, vocab=8))
    for capability, precision, least in ("80", "bf16", None), ("70", "fp32", None), ("79", "tf32", 8.0), ("69", "fp32", 7.0):
        monkeypatch.setattr(model_gpu, "cupy", fake_cupy(capability=capability)[0])
        words = f"{precision} needs a GPU of compute capability {least} or later, this one has {int(capability) / 10}; --precision fp32 needs"
        with contextlib.nullcontext() if least is None else value_error(re.escape(words)):
            gpu_model(precision=precision, training=False, seed=None)
    monkeypatch.setattr(model_gpu.cupy, "RawModule", lambda **_: (_ for _ in ()).throw(RuntimeError("no nvrtc\nmore")))
    monkeypatch.setattr(model_gpu, "capability", lambda: 90)
    assert refusal(gpu_model) == (
        "The GPU engine does not start; a CUDA library seems to be missing or does not fit the driver: run `make gpu` (no nvrtc).")


def test_the_gpu_of_a_process(made, monkeypatch):
    """That of its number on its host, or the only one that it sees; none is a sentence."""
    used = []
    cuda = model_gpu.cupy.cuda
    monkeypatch.setattr(cuda, "Device", lambda number: types.SimpleNamespace(use=lambda: used.append(number)))
    for count, number in (1, 3), (2, 1), (4, 3):
        cuda.runtime.getDeviceCount = lambda: count
        model_gpu.take_gpu(number)
    assert used == [0, 1, 3]
    for count, number in (2, 2), (0, 0):
        cuda.runtime.getDeviceCount = lambda: count
        with value_error(f"^this host has {count} GPUs, too few for process {number}.$"):
            model_gpu.take_gpu(number)


@parametrize("name", ["Model", "Decoder"])
def test_the_public_methods_of_both_engines_have_the_same_signatures(name):
    """And there are no others; how an engine is made, by __init__, differs."""
    def face(engine):
        members = inspect.getmembers(getattr(engine, name))
        return {key: inspect.signature(member) if callable(member) else type(member)
                for key, member in members if not key.startswith("_")}
    assert face(model_gpu) == face(model_cpu)
    assert {"Model": "update", "Decoder": "extend"}[name] in face(model_gpu)
