"""model_gpu.py without a GPU: whole steps on the CPU, through NumPy arrays in CuPy's place and kernels compiled by g++.

fake_cupy() is as much of the module cupy as model_gpu.py uses, with the kernels of tests/cuda_on_cpu.h.  The matrix
products are those of --matmul ours."""
import contextlib
import ctypes
import dataclasses
import functools
import gc
import inspect
import itertools
import math
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
import bench
import checkpoint
import model_cpu
import model_gpu
from cuda_helpers import CpuModule, check_guards, from_bf16, guarded, to_bf16
from model_cpu import Config, Sampling


class Array(np.ndarray):
    """A NumPy array with the few attributes of a CuPy array that model_gpu.py uses."""
    data = property(lambda self: types.SimpleNamespace(ptr=self.ctypes.data))

    def set(self, host):
        assert host.dtype == self.dtype and host.shape == self.shape
        self[...] = host

    def get(self, out=None, blocking=True):
        assert blocking == (out is None)
        if out is None:
            return np.array(self)
        assert out.dtype == self.dtype and out.shape == self.shape
        out[...] = self
        return out


class OutOfMemoryError(MemoryError):
    pass


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
        Device=lambda: types.SimpleNamespace(compute_capability=capability),
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError))
    if not hasattr(model_gpu, "cupyx"):                                 # no CuPy here
        model_gpu.cupyx = PINNED
    return types.SimpleNamespace(empty=empty, zeros=zeros, asarray=asarray, asnumpy=np.array, RawModule=raw_module,
                                 get_default_memory_pool=lambda: pool, cuda=cuda), made


@pytest.fixture(autouse=True)
def fewer_blocks(monkeypatch):
    """Blocks of threads that a GPU needs to be busy and a CPU takes one by one."""
    monkeypatch.setattr(model_gpu, "SUM_BLOCKS", 8)


@pytest.fixture(autouse=True)
def no_pinned_memory(monkeypatch):
    """What pins memory stands for itself, also where there is CuPy."""
    monkeypatch.setattr(model_gpu, "cupyx", PINNED, raising=False)


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
    gains = model_cpu.update_table(model.config, "adamw")[-1][1].start
    flat[gains:] = 1 + flat[gains:]
    model.write(model.flat_params, flat)
    reference.write(reference.flat_params, flat)


def relative(x, reference):
    return np.linalg.norm(np.asarray(x, np.float64) - reference) / np.linalg.norm(reference)


@pytest.mark.parametrize("precision, loss_bar, bar", [("fp32", 1e-6, 3e-6), ("bf16", 3e-3, 4e-2), ("tf32", 1e-3, 3e-3)])
def test_a_whole_step_equals_the_reference(made, precision, loss_bar, bar):
    """Forward, backward in two micro-batches, update; every gradient tensor, the norm and the new parameters."""
    model = model_gpu.Model(TINY, precision=precision, matmul="ours")
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
    assert relative(model.read(model.m), reference.m) < bar
    # the first update is lr * sign(g) nearly everywhere: where g is near 0, rounding decides
    step = 1e-2 * (1 + 0.1 * np.abs(reference.flat_params).max())
    off = np.abs(model.read(model.flat_params) - reference.flat_params) > 0.01 * step
    assert off.mean() < (0.1 if precision == "bf16" else 1e-3)
    assert model.step == 1
    check_guards(*made)


def muon_step(model, reference, lr=0.1, decay=0.1, clip=0.7):
    """The same gradients, of two sizes, into both; -> of each matrix that Muon takes what it moved by, in both."""
    rng, moved = np.random.default_rng(5), []
    flat = rng.standard_normal(reference.flat_grads.size) * np.exp(rng.standard_normal(reference.flat_grads.size))
    flat = (0.01 * flat).astype(np.float32)
    for m in (model, reference):
        m.write(m.flat_grads, flat)
        before = np.array(m.flat_params, np.float64)
        norm = float(m.update(lr, decay=decay, clip=clip))
        assert abs(norm / np.linalg.norm(flat.astype(np.float64)) - 1) < 1e-6 and not m.flat_grads.any()
        hidden = model_cpu.muon_part(m.config, "muon")
        after = np.array(m.flat_params, np.float64) - (1 - lr * decay) * before
        moved.append([layer[place].reshape(shape) for layer in after[hidden].reshape(m.config.layers, -1)
                      for shape, place in model_cpu.matrix_table(m.config)])
        moved[-1].append(np.concatenate([after[:hidden.start], after[hidden.stop:]]))
    return moved


@pytest.mark.parametrize("precision, bar", [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 8e-2)])
def test_a_step_of_muon_equals_the_reference(made, precision, bar):
    """Three steps: every matrix by itself, what AdamW updates beside it, the means, and the copy in bf16."""
    model = model_gpu.Model(TINY, precision=precision, matmul="ours", optimizer="muon")
    reference = model_cpu.Model(TINY, optimizer="muon")
    widen(model, reference)
    for _ in range(3):
        ours, theirs = muon_step(model, reference)
        assert len(ours) == 2 * 7 + 1
        for matrix, expected in zip(ours, theirs):
            assert relative(matrix, expected) < bar
        assert relative(model.read(model.m), reference.m) < 1e-6 and relative(model.read(model.v), reference.v) < 1e-6
        if precision == "bf16":
            np.testing.assert_array_equal(model.flat_weights, to_bf16(np.array(model.flat_params)))
    assert model.v.size == reference.v.size == model.m.size - 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 176 * 64)
    check_guards(*made)


def test_muon_leaves_all_alone_where_the_norm_is_not_finite(made):
    for at, updates in ((0, 1), (9000, 2)):                 # of AdamW's part, of Muon's
        model = model_gpu.Model(TINY, precision="bf16", matmul="ours", optimizer="muon")
        before = model.read(model.flat_params)
        model.flat_grads[...] = 1.0
        model.flat_grads[at] = np.nan
        grads = model.read(model.flat_grads)
        for _ in range(updates):
            model.update(0.1)
            np.testing.assert_array_equal(model.flat_grads, grads)
            assert np.array_equal(model.flat_params, before) and not model.m.any() and not model.v.any()


def columns_matrix(address, kind, rows, columns, ld):
    """A matrix by columns at a raw address; kind as in CUDA_TYPE."""
    size = {0: 4, 14: 2}[kind]
    assert ld >= rows
    raw = np.frombuffer((ctypes.c_char * (size * (ld * (columns - 1) + rows))).from_address(address), {0: "f4", 14: "u2"}[kind])
    return np.lib.stride_tricks.as_strided(raw, (rows, columns), (size, size * ld))


class FakeCublas:
    """cuBLAS's products as its documentation has them, in columns, on raw addresses: C (m,n) = alpha op(A) op(B) + beta C."""
    def __init__(self):
        self.algorithms, self.streams, self.workspace, self.loose, self.transpositions = set(), [], None, 0, 0

    def set_stream(self, handle, stream):
        self.streams.append(stream)
        self.workspace = None                               # as its documentation says

    def set_workspace(self, *workspace):
        self.workspace = workspace

    def geam(self, handle, transpose_a, transpose_b, m, n, alpha, A, lda, beta, B, ldb, C, ldc):
        """C (m,n) = alpha op(A) + beta op(B); with beta 0 B is not read."""
        assert handle == "handle"
        alpha, beta = (ctypes.c_float.from_address(address).value for address in (alpha, beta))
        a = columns_matrix(A, 0, *((n, m) if transpose_a else (m, n)), lda)
        assert beta == 0 and (B, ldb, transpose_b) == (C, ldc, False)       # where both must be the same
        columns_matrix(C, 0, m, n, ldc)[...] = alpha * (a.T if transpose_a else a)
        self.transpositions += 1

    def gemmEx(self, handle, transpose_a, transpose_b, m, n, k, alpha, A, type_a, lda, B, type_b, ldb, beta, C, type_c, ldc,
               compute, algorithm):
        assert handle == "handle" and algorithm == -1 and self.workspace == ("handle", 4096, 32 << 20)
        self.algorithms.add(compute)
        self.loose += (not transpose_a) + transpose_b       # operands that do not lie along the sum

        def read(*arguments):
            x = columns_matrix(*arguments)
            return x if x.dtype == np.float32 else from_bf16(np.ascontiguousarray(x))
        alpha, beta = (ctypes.c_float.from_address(address).value for address in (alpha, beta))
        a = read(A, type_a, *((k, m) if transpose_a else (m, k)), lda)
        b = read(B, type_b, *((n, k) if transpose_b else (k, n)), ldb)
        product = alpha * ((a.T if transpose_a else a) @ (b.T if transpose_b else b))
        result = product + beta * read(C, type_c, m, n, ldc) if beta else product            # beta 0: C may hold NaN
        columns_matrix(C, type_c, m, n, ldc)[...] = to_bf16(result) if type_c == 14 else result

    def gemmStridedBatchedEx(self, handle, transpose_a, transpose_b, m, n, k, alpha, A, type_a, lda, step_a, B, type_b, ldb,
                             step_b, beta, C, type_c, ldc, step_c, count, compute, algorithm):
        size = {0: 4, 14: 2}
        for i in range(count):
            self.gemmEx(handle, transpose_a, transpose_b, m, n, k, alpha, A + i * step_a * size[type_a], type_a, lda,
                        B + i * step_b * size[type_b], type_b, ldb, beta, C + i * step_c * size[type_c], type_c, ldc,
                        compute, algorithm)


@pytest.fixture
def cublas(made, monkeypatch):
    fake, queued = FakeCublas(), model_gpu.cupy.get_default_memory_pool().queued
    library = types.SimpleNamespace(
        cublasGemmEx=queued(fake.gemmEx), cublasGemmStridedBatchedEx=queued(fake.gemmStridedBatchedEx),
        cublasSgeam=queued(fake.geam), cublasSetStream_v2=fake.set_stream, cublasSetWorkspace_v2=fake.set_workspace)
    monkeypatch.setattr(model_gpu, "load_cublas", lambda: ("handle", library, (4096, 32 << 20)))
    return fake


@pytest.mark.parametrize("precision, bar, compute", [("fp32", 3e-6, 68), ("tf32", 3e-3, 77), ("bf16", 4e-2, 68)])
def test_a_whole_step_through_cublas(cublas, precision, bar, compute):
    model, reference = model_gpu.Model(TINY, precision=precision), model_cpu.Model(TINY)
    widen(model, reference)
    tokens, targets = batch(TINY, 2, 21)
    for m in (model, reference):
        m.forward(tokens, targets)
        m.backward()
    for name, grad in model.grads.items():
        assert relative(grad, reference.grads[name]) < bar, name
    assert relative(model.logits(tokens), reference.logits(tokens)) < bar
    expected = reference.logits(tokens)[0]
    assert relative(model.decoder.extend(tokens[0]), expected) < bar and cublas.algorithms == {compute}
    model.decoder.position = 0
    cublas.algorithms.clear()
    few = model.decoder.extend(tokens[0, :8])                   # kernels of their own, which do not round to TF32
    assert relative(few, expected[:8]) < (3e-6 if precision == "tf32" else bar) and not cublas.algorithms


def test_a_shape_that_comes_often_is_recorded(cublas, monkeypatch):
    """The same losses, gradients and weights as launched one by one; each shape has its graphs, new memory new ones."""
    pool, runs = model_gpu.cupy.get_default_memory_pool(), []
    for at in (2, 1000):
        monkeypatch.setattr(model_gpu, "RECORD_AT", at)
        model, kept = model_gpu.Model(TINY, precision="fp32", optimizer="muon"), []
        for step, (B, T) in enumerate([(2, 9), (2, 9), (1, 18), (2, 9), (3, 20), (2, 9)]):
            losses = model.forward(*batch(TINY, B, T, step))
            kept += model.later(losses)()
            assert np.array_equal(kept[-1], losses) and losses[0] > 1
            model.backward()
            kept += [*model.later(model.update(0.01))(), model.read(model.flat_params)]
        runs.append(kept)
    assert all(map(np.array_equal, *runs))
    assert pool.graphs == [1 + 2 * 9 + 2 + 2, 2 + 2 + 2 * 15 + 1] and cublas.streams == [0, 77, 0, 77, 0, 0]


def test_an_error_while_a_graph_is_recorded(cublas, monkeypatch):
    """cuBLAS comes back to the stream that there is; and the step is right, recorded or not."""
    model, expected = (model_gpu.Model(TINY, precision="fp32") for _ in range(2))
    monkeypatch.setattr(model_gpu, "RECORD_AT", 1)
    with monkeypatch.context() as patch:
        patch.setattr(model_gpu, "cross_entropy_forward", None)
        with pytest.raises(TypeError):
            model.forward(*batch(TINY, 2, 9))
    assert cublas.streams[-2:] == [77, 0] and cublas.workspace
    model_gpu.cupy.get_default_memory_pool().recorded = None                # the stream has ended, and its recording
    for one in model, expected:
        one.forward(*batch(TINY, 2, 9))
        one.backward()
    assert np.array_equal(model.flat_grads, expected.flat_grads)


def test_graphs_are_kept_of_so_many_shapes(made, monkeypatch):
    """A loop over ever new shapes does not fill the memory with what is kept for them."""
    monkeypatch.setattr(model_gpu, "SHAPES", 3)
    model, most = model_gpu.Model(TINY, precision="fp32", matmul="ours", micro_batch=2), 0
    expected = model_gpu.Model(TINY, precision="fp32", matmul="ours")
    for T in range(3, 12):
        for one in model, expected:
            one.forward(*batch(TINY, 1, T))
            one.backward()
            one.decoder.position = 0
            one.decoder.extend(range(T))
            one.decoder.extend([T])
        most = max(most, len(model.buffers_by_shape), len(model.decoder.replays))
    assert most in (4, 5) and np.array_equal(model.flat_grads, expected.flat_grads)


def test_backward_needs_a_forward_of_its_own(made):
    """As on the CPU."""
    model, (tokens, targets) = model_gpu.Model(TINY, precision="fp32", matmul="ours"), batch(TINY, 2, 9)
    for between in model.backward, lambda: model.logits(tokens[:1]), lambda: model.update(0.0), model.refresh:
        model.forward(tokens, targets)
        between()
        with pytest.raises(ValueError, match="^backward needs a forward of its own, and between them neither logits nor update.$"):
            model.backward()
    with pytest.raises(ValueError, match="^backward needs a forward of its own"):
        model_gpu.Model(TINY, precision="fp32", matmul="ours").backward()
    model.update(0.0, decay=0.0)
    gradients = []
    for between in (lambda: None, lambda: model.decoder.extend([1, 2])):
        model.forward(tokens, targets)
        between()
        model.backward()
        gradients.append(model.read(model.flat_grads))
        model.update(0.0, decay=0.0)
    assert np.array_equal(*gradients) and gradients[0].any()


class Alone:
    """In train.Nccl's place, of one GPU: notes which part of the model's gradient is to be added up, and what it holds then."""
    def __init__(self, model):
        self.model, self.asked = model, []

    def all_reduce(self, array):
        assert array.dtype == np.float32 and array.flags.c_contiguous
        start = (array.ctypes.data - self.model.flat_grads.ctypes.data) // 4
        self.asked.append((start, start + array.size, np.array(array)))

    def wait(self):
        self.model.flat_grads[:] = 0.5                                  # what a sum yet under way will leave there
        self.asked.append("wait")

    def part(self, count):
        return slice(count)

    def all_gather(self, array):
        """Of one GPU there is nothing to bring."""


@pytest.mark.parametrize("bucket, count, optimizer", [(1, 3, "adamw"), (1, 3, "muon"), (50_000, 2, "muon"), (1 << 24, 1, "muon")])
def test_the_gradient_is_added_up_while_the_backward_goes_on(cublas, monkeypatch, bucket, count, optimizer):
    """Every number once, when nobody writes to it any more: from the end to the front in parts of a bucket, the gains last;
    only in the last micro-batch, and with the same bits as without other GPUs.  The update waits."""
    monkeypatch.setattr(model_gpu, "BUCKET", bucket)
    alone, one = (model_gpu.Model(TINY, precision="bf16", optimizer=optimizer) for _ in range(2))
    one.communicator = Alone(one)
    counted, asked = np.array([50, 50, 50]), one.communicator.asked
    for step in range(2):                                               # the second begins with a gradient of 0 again
        for model in alone, one:
            for part in range(3):
                losses = model.forward(*batch(TINY, 2, 9, part), counted)
                model.backward(last=part == 2)
                if part == 1:
                    assert asked == []
            model.losses_seen = model.later(losses)()[0]
        assert np.array_equal(alone.losses_seen, one.losses_seen) and np.array_equal(alone.flat_grads, one.flat_grads)
        gains = model_cpu.update_table(TINY, optimizer)[3][1]
        *parts, last = asked
        assert last[:2] == (gains.start, gains.stop) and parts[0][1] == gains.start and parts[-1][0] == 0
        assert all(above[0] == below[1] for above, below in zip(parts, parts[1:]))
        assert all(stop - start >= bucket for start, stop, _ in parts[:-1])
        assert len(parts) == count                      # of the largest number: layer 1 with the heads, layer 0, embedding
        for start, stop, snapshot in asked:
            np.testing.assert_array_equal(snapshot, one.flat_grads[start:stop])
        asked.clear()
        alone.flat_grads[:] = 0.5
        norms = [float(model.update(0.01)) for model in (alone, one)]
        assert norms[0] == norms[1] and asked == ["wait"] and not one.flat_grads.any()
        assert np.array_equal(alone.flat_params, one.flat_params)
        asked.clear()


class Parts:
    """In train.Nccl's place, for one rank alone: notes what is gathered; what all have then comes from `whole`, a list."""
    def __init__(self, size=1, rank=0, whole=()):
        self.size, self.rank, self.whole, self.asked = size, rank, list(whole), []

    def part(self, count):
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def wait(self):
        self.asked.append("wait")

    def all_gather(self, array):
        self.asked.append(array.copy())
        if self.whole:
            array[:] = self.whole.pop(0)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_muon_is_shared_out(cublas, precision):
    """Each of several GPUs makes the products of its part of the matrices of a shape, and has all before it moves the weights:
    the weights of one alone, on each.  Of five GPUs some have no part."""
    def moved(communicator):
        model = model_gpu.Model(TINY, precision=precision, optimizer="muon")
        model.flat_grads[:] = np.random.default_rng(1).standard_normal(model.flat_grads.size)
        model.communicator = communicator
        model.update(0.01)
        return model.flat_params, model.m

    params, m = moved(None)
    assert all(map(np.array_equal, moved(every := Parts()), (params, m)))
    first, *whole = every.asked
    assert first == "wait" and sorted(map(len, whole)) == [2, 4, 4, 4]
    for size, rank in (2, 0), (2, 1), (5, 0), (5, 3):
        one = Parts(size, rank, whole)
        assert all(map(np.array_equal, moved(one), (params, m)))
        for matrices, array in zip(whole, one.asked[1:]):
            mine = range(len(matrices))[one.part(len(matrices))]
            assert [np.array_equal(*pair) for pair in zip(array, matrices)] == [i in mine for i in range(len(matrices))]


def test_the_breakdown_of_a_step_sees_every_launch(cublas, monkeypatch):
    """Also those that a CUDA graph would make as one."""
    monkeypatch.setattr(model_gpu, "RECORD_AT", 1)
    cupy, model = model_gpu.cupy, model_gpu.Model(TINY, precision="fp32")
    cupy.ndarray, cupy.cuda.get_elapsed_time = Array, lambda start, end: 2.0
    cupy.cuda.Device = lambda: types.SimpleNamespace(synchronize=lambda: None, compute_capability="90")

    def step():
        model.forward(*batch(TINY, 2, 9))
        model.backward()
        model.update(0.01)
    step()
    records = bench.record_launches(cupy, model_gpu, model, step)
    assert len(records) == 23 + 35 + 8 and model_gpu.RECORD_AT == 1     # forward, backward, AdamW in four parts
    assert sum(name.startswith("product") for name, *_ in records) == 1 + 2 * 4 + 2 + 2 * 8
    assert {seconds for _, seconds, *_ in records} == {2e-3}
    model = model_gpu.Model(TINY, precision="tf32")
    step()
    records = bench.record_launches(cupy, model_gpu, model, step)
    kinds = [name.split()[1] for name, *_ in records if name.startswith("product")]
    assert kinds == 9 * ["forward"] + 9 * ["weight", "input"]
    N, C = 18, TINY.dim
    moved = [moved for name, _, moved, _ in records if name == "transposed"]
    qkv, square, up = 4 * C * 2 * C, 4 * C * C, 4 * C * 2 * TINY.hidden     # bytes of the weights
    weights = 4 * C * 3 * TINY.vocab, *2 * (up // 2, up, square, qkv)
    assert moved == [2 * size for weight in weights for size in (4 * N * C, weight)]


def test_the_benchmark_of_a_step(cublas, monkeypatch, capsys):
    """Each round and what comes after it makes as many steps as it says."""
    cupy, model_steps = model_gpu.cupy, []
    cupy.ndarray, cupy.cuda.get_elapsed_time = Array, lambda start, end: 2.0
    cupy.cuda.runtime.getDeviceProperties = lambda device: {"name": b"Card 1"}
    cupy.cuda.Device = lambda: types.SimpleNamespace(synchronize=lambda: model_steps.append(made.step), compute_capability="90")
    model = model_gpu.Model
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cupy.get_default_memory_pool().used_bytes = lambda: 5 << 30
    monkeypatch.setattr(bench, "ceilings", lambda *rest: (1e12, 1e12))
    monkeypatch.setitem(model_cpu.CONFIGS, "small", TINY)
    made = model(TINY, precision="fp32")
    monkeypatch.setattr(model_gpu, "Model", lambda *rest, **more: made)
    arguments = types.SimpleNamespace(model="small", batch=1, context=9, precision="fp32", matmul="cublas", optimizer="adamw",
                                      peer=None, rounds=2, steps=4)
    bench.bench_train(arguments)
    assert model_steps == [3, 13, 23, 27, 28]               # warmed up, two rounds, in a row, by kernel
    said = capsys.readouterr().out
    assert "B 1 x T 9, fp32, Card 1: ten steps a round, best of 2;" in said
    assert re.search(r"\n  ours, +[\d.]+ ms, 4 steps in a row\n", said)
    arguments.steps = 0
    bench.bench_train(arguments)
    assert "in a row" not in capsys.readouterr().out


@pytest.mark.parametrize("capability, precision, transposes", [("90", "tf32", True), ("90", "fp32", False), ("90", "bf16", False),
                                                          ("80", "tf32", False), ("89", "tf32", False), ("100", "tf32", False),
                                                          ("120", "tf32", False)])
def test_operands_are_transposed_for_hopper_in_tf32(cublas, monkeypatch, capability, precision, transposes):
    """There no product but a weight's gradient has an operand that does not lie along the sum, and that has one."""
    monkeypatch.setattr(model_gpu.cupy.cuda, "Device", lambda: types.SimpleNamespace(compute_capability=capability))
    model = model_gpu.Model(TINY, precision=precision)
    model.forward(*batch(TINY, 2, 21))
    assert cublas.loose == cublas.transpositions == 0
    model.backward()
    products = 1 + 4 * TINY.layers
    assert (cublas.transpositions, cublas.loose) == ((2 * products, products) if transposes else (0, 3 * products))
    assert not model_gpu.Model(TINY, precision=precision, matmul="ours").gpu.transposes


def test_room_to_transpose_the_smaller_operand(cublas):
    """In what work_tables gives to models and batches of any shape: both gradients of every product of the backward."""
    rng = np.random.default_rng(3)

    def random(*shape):
        return rng.standard_normal(shape).astype(np.float32).view(Array)
    for _ in range(12):
        c = dataclasses.replace(TINY, kv_heads=int(rng.choice([1, 2])), vocab=8 * int(rng.integers(1, 30)),
                                predict=int(rng.integers(1, 4)), dim=int(rng.choice([64, 128])), hidden=8 * int(rng.integers(1, 60)))
        N, gpu = int(rng.integers(1, 400)), model_gpu.Gpu(c, "tf32", "cublas")
        shape = {name: shape for name, shape, _ in model_gpu.work_tables(c, 1, N, "tf32")[1]}["space"]
        for O, I in [(c.qkv_width, c.dim), (c.dim, c.dim), (2 * c.hidden, c.dim), (c.dim, c.hidden), (c.predict * c.vocab, c.dim)]:
            x, w, dout, space, cublas.transpositions = random(N, I), random(O, I), random(N, O), random(*shape), 0
            dx, dw = random(N, I), random(O, I)
            add = bool(rng.integers(2))
            expected = add * dw + dout.T @ x
            model_gpu.linear_backward(gpu, dx, dw, dout, x, w, space, add)
            np.testing.assert_allclose(dw, expected, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(dx, dout @ w, rtol=1e-3, atol=1e-3)
            assert cublas.transpositions == 2
    for precision in "fp32", "bf16":
        assert ("space", (0,), np.float32) in model_gpu.work_tables(TINY, 1, 9, precision)[1]
    assert "space" not in [name for name, *_ in model_gpu.decode_tables(TINY, "tf32")[1]]


def test_products_that_cublas_refuses(cublas, monkeypatch):
    library = types.SimpleNamespace(cublasGemmEx=lambda *call: 7, cublasSgeam=lambda *call: 8, cublasSetStream_v2=cublas.set_stream,
                                    cublasSetWorkspace_v2=cublas.set_workspace)
    monkeypatch.setattr(model_gpu, "load_cublas", lambda: ("handle", library, (4096, 32 << 20)))
    gpu = model_gpu.Gpu(TINY, "fp32", "cublas")
    a = np.zeros((3, 4), np.float32).view(Array)
    with pytest.raises(RuntimeError, match=r"^cuBLAS refuses a matmul of 3 x 4 by 4 x 3: status 7\.$"):
        model_gpu.gemm(gpu, a @ a.T, a, a, transpose_b=True)
    with pytest.raises(RuntimeError, match=r"^cuBLAS refuses to transpose 3 x 4: status 8\.$"):
        model_gpu.transposed(gpu, a, np.zeros(12, np.float32).view(Array))


@pytest.mark.parametrize("precision, bar", [("fp32", 1e-4), ("bf16", 8e-2)])
def test_muon_through_cublas(cublas, made, precision, bar):
    """Within the memory of a small micro-batch that is there already, and of one made for it."""
    for micro_batch in (None, 6):
        model = model_gpu.Model(TINY, precision=precision, optimizer="muon", micro_batch=micro_batch)
        reference = model_cpu.Model(TINY, optimizer="muon")
        widen(model, reference)
        for matrix, expected in zip(*muon_step(model, reference)):
            assert relative(matrix, expected) < bar
        tokens, targets = batch(TINY, 2, 21)
        np.testing.assert_allclose(model.forward(tokens, targets), reference.forward(tokens, targets), rtol=0.02)
        plan = model_gpu.memory_plan(TINY, micro_batch or 1, TINY.context if micro_batch else 1, precision, optimizer="muon")
        if micro_batch:
            assert len(model.work) == plan["activations"] + plan["logits and scratch"]
    check_guards(*made)


def test_products_in_every_layout(cublas, monkeypatch):
    """Views with rows further apart, transposed operands, written and added: cuBLAS's and ours."""
    rng = np.random.default_rng(0)
    M, N, K = 24, 40, 16

    def operand(rows, columns):
        return rng.standard_normal((rows, columns + 8)).astype(np.float32).view(Array)[:, :columns]

    for matmul in "cublas", "ours":
        gpu = model_gpu.Gpu(TINY, "fp32", matmul)
        for transpose_a, transpose_b, add in itertools.product((False, True), repeat=3):
            a = operand(*((K, M) if transpose_a else (M, K)))
            b = operand(*((N, K) if transpose_b else (K, N)))
            out = operand(M, N)
            expected = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
            expected = np.asarray(expected + out if add else expected)
            beside = out.base[:, N:].copy()
            model_gpu.gemm(gpu, out, a, b, transpose_a, transpose_b, add)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(out.base[:, N:], beside)


def test_the_bf16_copy_follows_the_parameters(made):
    model = model_gpu.Model(TINY, precision="bf16", matmul="ours")
    model.forward(*batch(TINY, 1, 8))
    model.backward()
    model.update(lr=1e-2)
    copy = (model.flat_weights.astype(np.uint32) << 16).view(np.float32)
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
        results.append((losses.tobytes(), norm.tobytes(), model.read(model.flat_params).tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("precision, bar", [("fp32", 1e-5), ("bf16", 3e-2)])
def test_logits_and_cached_decoding(made, precision, bar):
    model = model_gpu.Model(TINY, precision=precision, matmul="ours")
    reference = model_cpu.Model(TINY)
    widen(model, reference)
    tokens = batch(TINY, 2, 40)[0]
    expected = reference.logits(tokens)
    assert relative(model.logits(tokens), expected) < bar
    decoder = model.decoder

    def extend(*ends):
        return [decoder.extend(tokens[0, start:end]) for start, end in zip((decoder.position, *ends), ends)]
    steps = extend(11, 12, 15, 30, 39)                                  # a prompt, few, few, prompts at an offset
    assert [len(step) for step in steps] == [11, 1, 3, 15, 9] and decoder.position == 39
    assert relative(np.concatenate(steps), expected[0, :39]) < bar
    assert max(relative(step, expected[0, end - len(step):end]) for step, end in zip(steps, (11, 12, 15, 30, 39))) < bar
    decoder.position = 11                                                # roll back: the same rows, one by one
    singly = np.concatenate(extend(12, 13, 14, 15))
    assert singly.tobytes() == np.concatenate(steps[1:3]).tobytes()
    assert relative(np.concatenate(extend(26, 39, 40)), expected[0, 15:]) < bar         # over what stood there
    decoder.position = 0                                                 # few from the start, then a prompt
    assert relative(np.concatenate(extend(1, 9, 20)), expected[0, :20]) < bar
    with pytest.raises(ValueError, match="21 tokens at 20 do not fit the context of 40"):
        decoder.extend([1] * 21)
    assert decoder.tokens == tokens[0, :20].tolist()
    check_guards(*made)


@pytest.mark.parametrize("precision, bar", [("fp32", 1e-5), ("tf32", 3e-3), ("bf16", 3e-2)])
def test_a_prompt_after_a_long_text(made, precision, bar):
    """More than a block of the attention's rows stands before it, and ends in the midst of one."""
    config = dataclasses.replace(TINY, context=290, layers=1)
    model, reference = model_gpu.Model(config, precision=precision, matmul="ours"), model_cpu.Model(config)
    widen(model, reference)
    tokens = batch(config, 1, 290)[0][0]
    expected = reference.logits(tokens[None])[0]
    for start, end in (0, 128), (128, 137), (137, 140), (140, 255), (255, 290):
        assert model.decoder.position == start and relative(model.decoder.extend(tokens[start:end]), expected[start:end]) < bar
    check_guards(*made)


SAMPLING = [dict(temperature=0), dict(temperature=0.8, top_k=6), dict(temperature=1.2, top_p=0.9),
            dict(top_k=9, top_p=0.7)]


@pytest.mark.parametrize("options", SAMPLING)
def test_generation_equals_the_cpu_beyond_the_context(made, options):
    """And within it, of ids below vocab; the probabilities too."""
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours")
    reference = model_cpu.Model(TINY)
    widen(model, reference)
    for start, most in ([1, 2, 3] * 12, 8), ([7], 4):
        traces = [], []
        texts = [list(model_cpu.generate(m, start, seed=2 ** 64 - 5, vocab=45, most=most, speculate=False, trace=trace,
                                         **options)) for m, trace in zip((model, reference), traces)]
        assert texts[0] == texts[1] and len(texts[0]) == most and max(texts[0]) < 45
        np.testing.assert_allclose(*[[p for _, _, p in trace] for trace in traces], rtol=1e-3)


def test_what_is_drawn_equals_the_cpu(made):
    """By every head after each of the last rows, of few tokens and of many."""
    model, reference = model_gpu.Model(TINY, precision="fp32", matmul="ours"), model_cpu.Model(TINY)
    widen(model, reference)
    tokens = batch(TINY, 1, 40)[0][0].tolist()
    for n, rows, heads in (11, 1, 3), (3, 3, 3), (1, 1, 1), (8, 2, 2), (9, 1, 1), (5, 1, 3):
        part = tokens[model.decoder.position:model.decoder.position + n]
        for options in (0.0, 0, 1.0), (0.9, 7, 0.95), (1.1, 1 << 40, 1.0), (1.0, 0, 1e-60):
            before = model.decoder.position = reference.decoder.position
            (ids, p), (expected, expected_p) = [m.decoder.draw(part, rows, heads, 100 + n, Sampling(*options, 77, 46))
                                                for m in (model, reference)]
            assert ids.shape == (rows, heads) and p.shape == (rows,) and np.array_equal(ids, expected)
            np.testing.assert_allclose(p, expected_p, rtol=1e-4)
            reference.decoder.position = before
        reference.decoder.extend(part)


def test_draws_of_several_numbers_of_heads_from_graphs(made, monkeypatch):
    """Each number has its graph; an answer stays when the next comes."""
    monkeypatch.setattr(model_gpu, "RECORD_AT", 1)
    model, reference, answers = model_gpu.Model(TINY, precision="fp32", matmul="ours"), model_cpu.Model(TINY), []
    widen(model, reference)
    for heads in 1, 3, 2, 1:
        answers.append([m.decoder.draw([5, 9], 2, heads, 7, Sampling(seed=3)) for m in (model, reference)])
        assert model.decoder.tokens == reference.decoder.tokens
    for (ids, p), (expected, expected_p) in answers:
        assert np.array_equal(ids, expected)
        np.testing.assert_allclose(p, expected_p, rtol=1e-4)
    assert {*model.decoder.host} == {"tokens", "place", "drawing", "seed", "ids", "p"}      # what crosses for it: no logits


def test_what_is_drawn_is_read_once_the_gpu_has_drawn_it(made, monkeypatch):
    """Here the kernels run no earlier than when somebody waits for them."""
    model, reference, queue = model_gpu.Model(TINY, precision="fp32", matmul="ours"), model_cpu.Model(TINY), []
    widen(model, reference)
    launch = model.gpu.launch_early
    model.gpu.launch_early = lambda *arguments: queue.append(functools.partial(launch, *arguments))
    stream = types.SimpleNamespace(ptr=0, synchronize=lambda: [queue.pop(0)() for _ in range(len(queue))])
    monkeypatch.setattr(model_gpu.cupy.cuda, "get_current_stream", lambda: stream)
    for n in 11, 2, 1:
        (ids, p), (expected, expected_p) = [m.decoder.draw([7] * n, 1, 3, 5, Sampling(seed=9)) for m in (model, reference)]
        assert np.array_equal(ids, expected) and abs(p / expected_p - 1) < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", SAMPLING[:3])
def test_speculation_changes_nothing(made, precision, options):
    """Through a full window, over two calls, and from graphs once a step came ten times. Drafts are the default."""
    config = dataclasses.replace(TINY, predict=2)
    pool, texts, trace = model_gpu.cupy.get_default_memory_pool(), [], []
    for how in dict(speculate=False), dict(trace=trace):
        model = model_gpu.Model(config, precision=precision, matmul="ours")
        widen(model, model_cpu.Model(config))
        text = [1, 2, 3] * 10
        for most in (13, 2):
            text += [*model_cpu.generate(model, text, seed=4, most=most, **how, **options), 5]
        texts.append((text, model.decoder.position, model.decoder.tokens))
    assert texts[0] == texts[1] and sum(drafts for _, drafts, _ in trace) > 10 and model_gpu.Model.draft_heads == 1
    assert pool.graphs == 2 * [2 + 2 * 5 + 2]                           # copy and embedding, layers, logits and draw
    model.update(1e-3)
    assert model.decoder.tokens == []


def test_a_step_from_a_graph_has_the_logits_of_one_launched(made, monkeypatch):
    """At any position, of the number of tokens that it was recorded with."""
    pool, runs = model_gpu.cupy.get_default_memory_pool(), []
    tokens = batch(TINY, 1, 40)[0][0]
    for record_at in (2, 1000):
        monkeypatch.setattr(model_gpu, "RECORD_AT", record_at)
        model = model_gpu.Model(TINY, precision="bf16", matmul="ours")
        widen(model, model_cpu.Model(TINY))
        run = []
        for position, n in (0, 11), (11, 3), (14, 1), (15, 3), (18, 1), (19, 3), (4, 3), (7, 1):
            model.decoder.position = position
            run.append(model.decoder.extend(tokens[position:position + n]))
        runs.append(run)
    assert all(map(np.array_equal, *runs)) and pool.graphs == [14, 14]


def test_a_prompt_of_another_length_has_the_same_launches(cublas, made, monkeypatch):
    """Up to a multiple of so many rows, at one position: from a graph the third time, and what the rows beyond the prompt hold
    reaches no logits; where a window ends, they end, too."""
    monkeypatch.setattr(model_gpu, "PROMPT_ROWS", 16)
    pool = model_gpu.cupy.get_default_memory_pool()
    model, reference = model_gpu.Model(TINY, precision="fp32"), model_cpu.Model(TINY)
    widen(model, reference)
    tokens = batch(TINY, 1, 40)[0]
    expected = reference.logits(tokens)[0]
    for position, n, graphs in [(0, 11, 0), (0, 9, 0), (0, 16, 1), (0, 13, 1), (16, 9, 1), (16, 16, 1), (16, 12, 2), (29, 11, 2),
                                (29, 10, 2), (29, 9, 3), (0, 40, 3)]:
        model.decoder.tokens = tokens[0, :position].tolist()            # which the cache has from earlier calls
        logits = model.decoder.extend(tokens[0, position:position + n])
        assert relative(logits, expected[position:position + n]) < 1e-5 and len(pool.graphs) == graphs, (position, n)
    check_guards(*made)


def test_a_norm_that_is_not_finite_stops_all_updates(made):
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours")
    before = model.read(model.flat_params)
    model.forward(*batch(TINY, 1, 8))
    model.backward()
    model.flat_grads[7] = np.inf
    assert not np.isfinite(model.update(lr=1e-2))
    assert model.flat_grads[7] == np.inf
    model.flat_grads[...] = 1.0
    assert np.isfinite(model.update(lr=1e-2))
    np.testing.assert_array_equal(model.read(model.flat_params), before)


@pytest.mark.parametrize("matmul", ["ours", "cublas"])
def test_the_first_gradient_after_an_update_is_written_not_added(cublas, matmul):
    """Zeros need not be read: no product reads what it writes to, until there is something to add to."""
    model = model_gpu.Model(TINY, precision="fp32", matmul=matmul)
    matrices = [name for name, view in model.grads.items() if view.ndim == 2 and name != "embed"]

    def gradient():
        model.forward(*batch(TINY, 2, 9))
        model.backward()
        return {name: model.read(model.grads[name]).copy() for name in matrices}
    once, twice = gradient(), gradient()
    model.update(lr=0.0, decay=0.0)
    assert not model.flat_grads.any()
    for name in matrices:
        assert once[name].any()
        np.testing.assert_allclose(twice[name], 2 * once[name], rtol=1e-5, atol=1e-7)
        model.grads[name][...] = np.nan
    for expected in once, twice:
        again = gradient()
        for name in matrices:
            np.testing.assert_array_equal(again[name], expected[name])


def test_the_gradient_check_sees_the_graphs_of_both_directions(made, monkeypatch):
    import gradcheck
    model, pool = model_gpu.Model(TINY, precision="fp32", matmul="ours"), model_gpu.cupy.get_default_memory_pool()
    losses, gradient = gradcheck.whole_step(model, *batch(TINY, 2, 9))
    assert not pool.graphs
    monkeypatch.setattr(model_gpu, "RECORD_AT", 2)
    again, same = gradcheck.whole_step(model, *batch(TINY, 2, 9))
    assert len(pool.graphs) == 2 and np.array_equal(losses, again) and np.array_equal(gradient, same) and gradient.any()


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head(made, precision, tied):
    """A head that is the embedding adds its gradient to the embedding's."""
    config = dataclasses.replace(TINY, tied=tied, predict=1 if tied else 3)
    tokens, targets = batch(config, 3, 40)
    model, reference = model_gpu.Model(config, precision=precision, matmul="ours", micro_batch=3), model_cpu.Model(config, 0)
    assert (model.weights["heads"] is model.weights["embed"]) == tied
    for m in model, reference:
        m.forward(tokens, targets)
        m.backward()
    assert relative(model.read(model.flat_grads), reference.flat_grads) < (1e-5 if precision == "fp32" else 2e-2)


def test_save_and_load(made, tmp_path):
    from tokenizer import Tokenizer
    tokenizer = Tokenizer.train(["a few words to train a tokenizer"], 260)
    config = Config(dim=32, heads=1, kv_heads=1, layers=1, context=8, vocab=264, predict=2)
    model = model_gpu.Model(config, precision="bf16", matmul="ours")
    model.forward(*batch(config, 1, 8))
    model.backward()
    model.update(lr=1e-2)
    checkpoint.save(str(tmp_path), model, tokenizer, {"seen": 8})
    again, _ = checkpoint.load(str(tmp_path), model_gpu, {"precision": "fp32", "matmul": "ours"})
    assert checkpoint.load_state(str(tmp_path), again) == {"seen": 8} and again.step == 1
    for what in ("flat_params", "m", "v"):
        np.testing.assert_array_equal(again.read(getattr(again, what)), model.read(getattr(model, what)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_plan_is_what_is_allocated(made, precision):
    model = model_gpu.Model(TINY, precision=precision, matmul="ours", micro_batch=2)
    model.decoder.extend([1])
    plan = model_gpu.memory_plan(TINY, 2, TINY.context, precision)
    small = sum(array.nbytes for array in (model.losses, model.state, model.partial, model.gpu.cos, model.gpu.sin))
    assert sum(array.nbytes for array in made) == sum(plan.values()) - model_gpu.CUBLAS_BYTES - model_gpu.CONTEXT_BYTES + small
    count = len(made)
    model.forward(*batch(TINY, 2, 40))
    model.backward()
    model.update(lr=0.0)
    model.forward(*batch(TINY, 1, 7))
    assert len(made) == count                                            # nothing more was allocated


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_reserved_serves_any_rows_of_as_many_tokens(made, precision):
    """Shorter and more rows, longer and fewer: no array and no pinned memory is made anew, and the results have the bits of
    a model that has seen no other shape."""
    pool = model_gpu.cupy.get_default_memory_pool()
    model = model_gpu.Model(TINY, precision=precision, matmul="ours", micro_batch=2)
    counts = len(made), len(pool.pinned), len(pool.freed)
    for B, T in (80, 1), (1, 40), (3, 26), (5, 16):
        model.forward(*batch(TINY, B, max(T, 3), seed=B)) if T >= 3 else model.forward(
            np.full((B, T), 5), np.full((B, T + 2), 7))
        model.backward()
        assert (len(made), len(pool.pinned), len(pool.freed)) == counts, (B, T)
    model.flat_grads[...] = 0
    fresh = model_gpu.Model(TINY, precision=precision, matmul="ours")
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
    sizes = [len(pool.freed)]
    for B, T in (1, 8), (2, 30), (3, 20), (8, 11), (2, 40), (20, 6):
        model.forward(*batch(TINY, B, T))
        sizes.append(len(pool.freed))
    assert sizes == [1, 1, 2, 2, 3, 3, 3]                               # where more than ever before was asked for
    inputs = model_gpu.table_bytes(model_gpu.input_table(TINY, 3, 40))
    assert pool.pinned[-2:] == [inputs, inputs] and len(pool.pinned) == 1 + 2 * 3       # the first: for decoding
    kept = weakref.ref(model.inputs)
    model.forward(*batch(TINY, 11, 11))
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
    stream = types.SimpleNamespace(synchronize=lambda: order.append("all that is queued"))
    monkeypatch.setattr(model_gpu.cupy.cuda, "get_current_stream", lambda: stream)
    table = model_gpu.input_table(TINY, 1, 4)
    inputs = model_gpu.Inputs(table)
    assert order == ["all that is queued"]
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
    if engine == "gpu":
        with pytest.raises(ValueError, match="^the GPU engine takes at most 65,535 rows at once, not 65,536.$"):
            model.logits(np.zeros((65536, 1), int))
    for bad, words in [((tokens, targets.astype(float)), "targets must be integers"),
                       ((tokens.astype(float), targets), "array of integers"), ((tokens, targets[:, 1:]), "integers .B, T.K-1. ="),
                       ((tokens, np.full_like(targets, 48)), "target id 48"), ((tokens + 48, targets), "token id"),
                       ((tokens, np.full_like(targets, -2)), "target id -2"), ((tokens[0], targets), "array of integers"),
                       ((np.zeros((1, 41), int), np.zeros((1, 43), int)), "41 tokens do not fit the context of 40")]:
        with pytest.raises(ValueError, match=words):
            model.forward(*bad)
    for bad, words in ([5, 48], "token id 48 is out"), ([-1], "token id -1 is out"), ([5] * 9 + [48], "token id 48 is out"):
        with pytest.raises(ValueError, match=words):
            model.decoder.extend(bad)
        assert model.decoder.position == 0


def test_the_pool_is_given_what_cublas_leaves(made):
    pool, given = model_gpu.cupy.get_default_memory_pool(), []
    set_limit = pool.set_limit
    pool.set_limit = lambda size: given.append(size) or set_limit(size)
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours", memory_limit=(644 << 20) + 12_345_678)
    assert given == [12_345_678]
    del model
    gc.collect()
    assert given == [12_345_678, 0]
    for limit in (644 << 20, 5):                            # 0 would be no limit at all
        with pytest.raises((ValueError, MemoryError)):
            model_gpu.Model(TINY, precision="fp32", matmul="ours", memory_limit=limit)
        gc.collect()
        assert given[2:] == [1, 0]
        del given[2:]
    model_gpu.Model(TINY, precision="fp32", matmul="ours")
    gc.collect()
    assert given == [12_345_678, 0] and model_gpu.CUBLAS_BYTES + model_gpu.CONTEXT_BYTES == 644 << 20


def recorder(config=TINY, matmul="ours", precision="bf16"):
    """(stands for a Gpu, list of what it launched)."""
    launched = []

    def launch(name, grid, threads, *arguments, shared=0):
        launched.append([name, grid, threads, shared, *(
            x if isinstance(x, np.ndarray) else (type(x).__name__, x.item()) for x in map(model_gpu.as_argument, arguments))])
    gpu = types.SimpleNamespace(config=config, cublas=None, precision=precision, transposes=False, launch=launch, launch_early=launch,
                                flash=[("F", 32, 64, 7), ("DQ", 48, 96, 8), ("DKDV", 16, 128, 9)])
    gpu.cos, gpu.sin, gpu.eps = np.zeros(1), np.ones(1), config.norm_eps
    return gpu, launched


def array(*shape, dtype=np.uint16):
    return np.empty(shape, dtype).view(Array)


def launches_of(function, *arguments, gpu=None, **options):
    """[[name, grid, threads, shared, arguments ...], ...]; of arrays that are arguments, their number."""
    gpu, launched = gpu or recorder()
    function(gpu, *arguments, **options)
    given = [x for x in [*arguments, *options.values(), gpu.cos, gpu.sin] if isinstance(x, np.ndarray)]

    def shown(x):
        return next(i for i, y in enumerate(given) if isinstance(y, np.ndarray) and np.shares_memory(x, y)) \
            if isinstance(x, np.ndarray) else x
    return [[shown(x) for x in launch] for launch in launched]


def i32(*numbers):
    return [("int32", x) for x in numbers]


def f32(*numbers):
    return [("float32", float(np.float32(x))) for x in numbers]


NO_ARRAY = ("uint64", 0)


def test_threads_of_a_row():
    widths = {8: 32, 256: 32, 264: 64, 512: 64, 520: 96, 768: 96, 776: 128, 2056: 288, 8192: 1024}
    assert {C: model_gpu.row_threads(C) for C in widths} == widths
    assert [model_gpu.ceil_div(n, 8) for n in (0, 1, 7, 8, 9, 16, 17)] == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("N, C, threads, columns", [(1, 8, 32, 1), (3, 256, 32, 1), (7, 264, 64, 2),
                                                    (5, 776, 128, 4), (2, 2056, 288, 9)])
def test_launches_of_embedding_and_norm(N, C, threads, columns):
    x, out, gain, rstd, before = array(N, C), array(N, C), array(C), array(N), array(N, C)
    tokens, embed, starts = array(N), array(24, C), array(25)
    assert launches_of(model_gpu.embedding_forward, out, tokens, embed) == [
        ["embedding_forward", (N,), threads, 0, 0, 1, 2, *i32(C)]]
    assert launches_of(model_gpu.embedding_backward, embed, x, tokens, starts) == [
        ["embedding_backward", (24, columns), 256, 0, 0, 1, 2, 3, *i32(C)]]
    gpu = recorder(dataclasses.replace(TINY, norm_eps=0.25))
    norm = ["rmsnorm_forward", (N,), threads, 0, 0, 1, 2]
    assert launches_of(model_gpu.rmsnorm_forward, out, rstd, x, gain, before, gpu=gpu) == [
        [*norm, 4, NO_ARRAY, 3, *i32(C), *f32(0.25)]]
    assert launches_of(model_gpu.rmsnorm_forward, out, rstd, x, gain, before, increment=array(N, C)) == [
        [*norm, 4, 5, 3, *i32(C), *f32(1e-5)]]


@pytest.mark.parametrize("N, blocks", [(1, 1), (1055, 1055), (1056, 1056), (1057, 1056), (5000, 1056)])
@pytest.mark.parametrize("C, columns", [(8, 1), (32, 1), (40, 2), (264, 9)])
def test_launches_of_the_norms_backward(N, blocks, C, columns):
    names = array(N, C), array(C), array(N, C), array(N, C), array(N), array(C), array(1056, C)
    for add in (False, True):
        assert launches_of(model_gpu.rmsnorm_backward, *names, add=add) == [
            ["rmsnorm_backward", (blocks,), 32 + 32 * (C > 256), 0, 0, 2, 6, 3, 4, 5, *i32(N, C, add)],
            ["column_sum", (columns,), 1024, 0, 1, 6, *i32(blocks, C)]]


@pytest.mark.parametrize("n, groups", [(1, 1), (4, 1), (5, 2), (17, 5)])
def test_launches_of_a_decoded_layer(n, groups):
    """3 query heads and 1 key/value head, 32 wide; F = 40."""
    config = Config(dim=96, heads=3, kv_heads=1, layers=1, context=8, vocab=8, hidden=40, norm_eps=0.25)
    gpu, launched = recorder(config)
    x, cache = array(n, 96), array(8, 160)
    w = {"norm1": array(96), "qkv": array(160, 96), "out": array(96, 96), "norm2": array(96), "gate_up": array(80, 96),
         "down": array(96, 40)}
    shared = {name: array(8) for name in ("y", "h", "place")}
    model_gpu.decode_block(gpu, w, x, cache, shared)
    names = {**w, **shared, "x": x, "cache": cache, "cos": gpu.cos, "sin": gpu.sin}

    def shown(x):
        return next(name for name, y in names.items() if x is y) if isinstance(x, np.ndarray) else x
    assert [[shown(x) for x in launch] for launch in launched] == [
        ["decode_qkv", (20, groups), 128, 0, "cache", "x", "norm1", "qkv", "cos", "sin", "place",
         *i32(n, 96, 5, 4, 32), *f32(0.25)],
        ["decode_attention", (3, n), 512, 0, "y", "cache", "place", *i32(3, 1, 32)],
        ["decode_residual", (48, groups), 128, 0, "x", "y", "out", *i32(n, 96, 96)],
        ["decode_swiglu", (10, groups), 128, 0, "h", "x", "norm2", "gate_up", *i32(n, 96, 40), *f32(0.25)],
        ["decode_residual", (48, groups), 128, 0, "x", "h", "down", *i32(n, 40, 96)]]


def test_arguments_of_a_kernel():
    """Types by their size: 32 bits for Python's numbers, a null pointer for None; all else as it is."""
    kept = array(3), np.int64(7), np.uint64(8), np.float32(0.5)
    given = [model_gpu.as_argument(x) for x in (3, True, 0.1, np.float64(0.1), None, *kept)]
    assert [(type(x), x) for x in given[:5]] == [
        (np.int32, 3), (np.int32, 1), (np.float32, np.float32(0.1)), (np.float32, np.float32(0.1)), (np.uint64, 0)]
    assert all(x is y for x, y in zip(given[5:], kept, strict=True))
    with pytest.raises(OverflowError):
        model_gpu.as_argument(1 << 31)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""
    _fields_ = [*((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, whose value is a union of 64 bytes."""
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


def test_an_early_launch_tells_the_driver_all(made, monkeypatch):
    """What cuLaunchKernelEx is handed: the structures of cuda.h, and the address of each argument."""
    gpu, seen = model_gpu.Gpu(TINY, "bf16", "ours"), []
    monkeypatch.setattr(model_gpu.cupy, "ndarray", Array, raising=False)
    stream = types.SimpleNamespace(ptr=77)
    monkeypatch.setattr(model_gpu.cupy.cuda, "get_current_stream", lambda: stream)

    def driver(config, function, pointers, extra):
        assert len(config) == ctypes.sizeof(LaunchConfig) == 56 and extra is None
        config = LaunchConfig.from_buffer_copy(config)
        attribute = LaunchAttribute.from_address(config.attributes)
        assert model_gpu.EARLY.nbytes == ctypes.sizeof(LaunchAttribute) == 72
        values = [ctypes.string_at(p, size) for p, size in zip(pointers, (8, 4, 4, 8, 8), strict=True)]
        seen.append(([getattr(config, name) for name, _ in LaunchConfig._fields_ if name != "attributes"],
                     (attribute.id, list(attribute.value)), function.value, values))
        return status
    gpu.launch_kernel, gpu.kernels["k"], x = driver, types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=123)), array(5)
    status = 0
    gpu.launch_early("k", (5, 6), 128, x, 3, 0.25, np.int64(1 << 40), None)
    status = 700
    with pytest.raises(RuntimeError, match="CUDA refuses to launch k: status 700[.]"):
        gpu.launch_early("k", (7, 6), 64, x, 3, 0.25, np.int64(1 << 40), None)
    values = [np.uint64(x.ctypes.data), np.int32(3), np.float32(0.25), np.int64(1 << 40), np.uint64(0)]
    early = 6, [1] + 15 * [0]               # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    for (config, attribute, function, given), numbers in zip(seen, ([5, 6, 1, 128], [7, 6, 1, 64]), strict=True):
        assert config == [*numbers, 1, 1, 0, 77, 1] and attribute == early and function == 123
        assert given == [value.tobytes() for value in values]


@pytest.mark.parametrize("capability, version, early", [("90", 12030, True), ("90", 12020, False), ("89", 13000, False),
                                                        ("120", 13000, True)])
def test_launches_are_early_where_the_gpu_and_its_driver_can(made, monkeypatch, capability, version, early):
    monkeypatch.setattr(model_gpu.cupy.cuda.runtime, "driverGetVersion", lambda: version)
    monkeypatch.setattr(model_gpu.cupy.cuda, "Device", lambda: types.SimpleNamespace(compute_capability=capability))
    driver, load = types.SimpleNamespace(cuLaunchKernelEx=object()), ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver if name == "libcuda.so.1" else load(name))
    assert model_gpu.Gpu(TINY, "bf16", "ours").launch_kernel is (driver.cuLaunchKernelEx if early else None)


@pytest.mark.parametrize("M, N, grid", [(1, 8, (1, 1)), (64, 128, (2, 1)), (65, 136, (3, 2)),
                                        (130, 520, (9, 3)), (63, 64, (1, 1))])
def test_launches_of_products(M, N, grid):
    """linear_forward and its backward, which adds where it is told to."""
    def without_arrays(launch, *arrays):
        assert launch[4:7] == [("uint64", x.ctypes.data) for x in arrays]
        return launch[:4] + launch[7:]
    for dtype in np.uint16, np.float32:
        single = dtype == np.float32
        out, w, x = array(M, N, dtype=dtype), array(N, 24), array(M, 24)
        launch, = launches_of(model_gpu.linear_forward, out, x, w)
        assert without_arrays(launch, out, x, w) == ["matmul", grid, 256, 0, *i32(M, N, 24, 24, 1, 1, 24, N, 0, single)]
        # M inputs and N outputs of 24 rows: dw (N,M), dx (24,M)
        dx, dw, dout, x, w = array(24, M, dtype=dtype), array(N, M, dtype=np.float32), array(24, N), array(24, M), array(N, M)
        for add in False, True:
            weight, inputs = launches_of(model_gpu.linear_backward, dx, dw, dout, x, w, None, add)
            assert without_arrays(weight, dw, dout, x) == [
                "matmul", grid[::-1], 256, 0, *i32(N, M, 24, 1, N, M, 1, M, add, 1)]
            assert without_arrays(inputs, dx, dout, w) == [
                "matmul", (-(-M // 64), 1), 256, 0, *i32(24, M, N, N, 1, M, 1, M, 0, single)]


@pytest.mark.parametrize("config, N, T, blocks, sizes", [
    # two blocks from 96 N / 16 > 256 on, then 128 N / 16
    (TINY, 1, 1, 1, (3, 32, 128)), (TINY, 42, 21, 1, (3, 32, 128)), (TINY, 43, 43, 2, (3, 32, 128)),
    (dict(heads=1), 64, 8, 2, (2, 64, 192)), (dict(heads=1), 32, 8, 1, (2, 64, 192)),
    (dict(heads=1), 33, 3, 2, (2, 64, 192)), (TINY, 342, 9, 9, (3, 32, 128))])
def test_launches_of_rope(config, N, T, blocks, sizes):
    gpu = recorder(dataclasses.replace(TINY, **config) if isinstance(config, dict) else config)
    heads, D, width = sizes
    assert launches_of(model_gpu.rope_forward, array(N, width), T, 0, gpu=gpu) == [
        ["rope", (blocks,), 256, 0, 0, 1, 2, *i32(N, T, heads, D, width)]]
    gpu[0].cos, gpu[0].sin = np.zeros((50, D // 2), np.float32), np.ones((50, D // 2), np.float32)
    gpu[1].clear()
    model_gpu.rope_forward(gpu[0], array(N, width), T, 11)
    (*_, cos, sin, a, b, c, d, e), = gpu[1]
    assert [a, b, c, d, e] == i32(N, T, heads, D, width)
    assert cos.ctypes.data == gpu[0].cos[11].ctypes.data and sin.ctypes.data == gpu[0].sin[11].ctypes.data


@pytest.mark.parametrize("T, blocks", [(1, (1, 1, 1)), (32, (1, 1, 2)), (33, (2, 1, 3)), (48, (2, 1, 3)),
                                       (49, (2, 2, 4)),
                                       (96, (3, 2, 6)), (97, (4, 3, 7))])
def test_launches_of_attention(T, blocks):
    """3 rows, 4 query and 2 key/value heads; blocks of 32 and 48 queries, of 16 keys."""
    gpu, B = recorder(dataclasses.replace(TINY, heads=4, kv_heads=2)), 3
    out, lse, qkv = array(B * T, 64), array(B, 4, T), array(B * T, 128)
    assert launches_of(model_gpu.attention_forward, out, lse, qkv, B, T, gpu=gpu) == [
        ["F", (4, B, blocks[0]), 64, 7, 0, 1, 2, *i32(T, 4, 2)]]
    for first in (0, 31, 32, 33, 64, 95, T - 1):
        gpu[1].clear()
        if first < T:                           # the blocks from that one on that has it
            (_, grid, *_), = launches_of(model_gpu.attention_forward, out, lse, qkv, B, T, gpu=gpu, first=first)
            assert grid == (4, B, len({row // 32 for row in range(first, T)}))
    gpu[1].clear()
    dqkv, dout, delta = array(B * T, 128), array(B * T, 64), array(B, 4, T)
    assert launches_of(model_gpu.attention_backward, dqkv, dout, out, lse, qkv, delta, gpu=gpu) == [
        ["DQ", (4, B, blocks[1]), 96, 8, 0, 5, 1, 2, 3, 4, 6, 7, *i32(T, 4, 2)],
        ["DKDV", (2, B, blocks[2]), 128, 9, 0, 5, 1, 3, 4, 6, 7, *i32(T, 4, 2)]]


@pytest.mark.parametrize("F, blocks", [(8, 1), (2048, 1), (2056, 2), (16384, 8), (16392, 9)])
def test_launches_of_swiglu(F, blocks):
    out, gate_up = array(3, F), array(3, 2 * F)
    launched = [(3, blocks), 256, 0, 0, 1, *i32(F)]
    assert launches_of(model_gpu.swiglu_forward, out, gate_up) == [["swiglu_forward", *launched]]
    assert launches_of(model_gpu.swiglu_backward, gate_up, out) == [["swiglu_backward", *launched]]


def test_launches_of_the_loss():
    losses, logits, nll, targets, weight, divisor = (array(3), array(14, 3 * 48), array(14, 3), array(2 * 9),
                                                     array(3), array(3))
    assert launches_of(model_gpu.cross_entropy_forward, losses, nll, logits, targets, weight, divisor, 7) == [
        ["cross_entropy", (42,), 128, 0, 2, 1, 3, 4, *i32(7, 3, 48)],
        ["cross_entropy_sum", (3,), 1024, 0, 0, 1, 5, *i32(14, 3)]]


@pytest.mark.parametrize("n, blocks", [(8, 1), (2048, 1), (2056, 2), (8200, 5), (131080, 65)])
def test_launches_of_the_update(n, blocks):
    state, partial, grad = array(3), array(24), array(n)
    for hidden, sizes in ((slice(0, 3), (0, n - 3, 3)), (slice(2, 5), (2, n - 5, 3)), (slice(n, n), (n, 0, 0))):
        gpu, launched = recorder()
        model_gpu.gradient_norm(gpu, state, partial, grad, hidden, 0.5)
        *sums, norm = launched
        assert [launch[-1] for launch in sums] == [("int64", size) for size in sizes]
        assert [launch[-2].size for launch in sums] == list(sizes)
        assert norm[:4] + norm[6:] == ["gradient_norm", (1,), 1024, 0, *i32(16, 24), *f32(0.5)]
    param, m, v, copy = array(n), array(n), array(n), array(n)
    numbers = dict(step=3, lr=0.25, beta1=0.5, beta2=0.75, eps=0.125, decay=0.0625)
    expected = [("int64", n)] + f32(0.25, 0.5, 0.75, 0.125, 0.0625, 1 / (1 - 0.125), 1 / (1 - 0.75 ** 3))
    for weights, shown in ((copy, 1), (None, NO_ARRAY)):
        launch, = launches_of(model_gpu.adamw_update, param, weights, grad, m, v, state, **numbers)
        after = [2, 3, 4, 5] if weights is copy else [1, 2, 3, 4]
        assert launch == ["adamw", (blocks,), 256, 0, 0, shown, *after, *expected]


def test_launches_of_muon(monkeypatch):
    """Two kinds of matrices 24 x 40 in three layers that are 5000 numbers apart; of the products only which are made."""
    products = []
    monkeypatch.setattr(model_gpu, "gemm", lambda gpu, out, a, b, transpose_a=False, transpose_b=False: products.append(
        [names[x.ctypes.data] for x in (out, a, b)] + [transpose_a, transpose_b]))
    work = {"X": array(6, 24, 40), "Y": array(6, 24, 40), "A": array(6, 24, 24), "B": array(6, 24, 24),
            "squares": array(6, model_gpu.MATRIX_BLOCKS)}
    names = {x.ctypes.data: name for name, x in work.items()}
    state, flats = array(3), {name: array(15000) for name in ("param", "copy", "grad", "m")}
    gpu, launched = recorder()
    model_gpu.muon_update(gpu, list(flats.values()), (0, 1000), work, state, lr=0.5, decay=0.25, communicator=None)
    arrays = {"state": state, **work, **flats}

    def shown(x):
        if not isinstance(x, np.ndarray):
            return x
        name, base = next((name, base) for name, base in arrays.items() if np.shares_memory(x, base))
        return name, (x.ctypes.data - base.ctypes.data) // base.strides[0]
    shown_all = [[shown(x) for x in launch] for launch in launched]
    place = [("state", 0), ("int64", 5000), *i32(960)]
    blocks = model_gpu.MATRIX_BLOCKS, 3
    momentum, step = f32(0.95), f32(1 - 0.5 * 0.25, 0.2 * 0.5 * math.sqrt(40))
    for i in range(2):
        first, second = shown_all[2 * i:2 * i + 2]
        assert first == ["muon_momentum", blocks, 256, 0, ("squares", 3 * i), ("m", 1000 * i), ("grad", 1000 * i), *place, *momentum]
        assert second == ["muon_input", blocks, 256, 0, ("X", 3 * i), ("grad", 1000 * i), ("m", 1000 * i), ("squares", 3 * i),
                          *place, *momentum]
    assert shown_all[4:9] == 5 * [["muon_polynomial", (1, 6), 256, 0, ("B", 0), ("A", 0), *i32(24), *f32(3.4445, -4.775, 2.0315)]]
    assert products == [product for x, y in ("XY", "YX", "XY", "YX", "XY") for product in (
        ["A", x, x, False, True], ["B", "A", "A", False, False], [y, "B", x, False, False])]
    assert shown_all[9:] == [
        ["muon_apply", (1, 3), 256, 0, ("param", 1000 * i), ("copy", 1000 * i), ("Y", 3 * i), *place, *step] for i in range(2)]
    products.clear()
    tall = {**work, "X": array(6, 40, 24), "Y": array(6, 40, 24)}
    names.update({x.ctypes.data: name for name, x in tall.items()})
    model_gpu.newton_schulz(gpu, *(tall[name] for name in "XYAB"))
    assert products[:4] == [["A", "X", "X", True, False], ["B", "A", "A", False, False], ["Y", "X", "B", False, False],
                            ["A", "Y", "Y", True, False]] and products[-1][0] == "Y"


DECODED = ["decode_qkv", "decode_attention", "decode_residual", "decode_swiglu", "decode_residual"]
PROMPT = ["rmsnorm_forward", "matmul", "rope", "flash", "matmul", "rmsnorm_forward", "matmul", "swiglu_forward",
          "matmul"]


def noted(model):
    """The list to which every launch of this model adds (name, grid, threads, shared, numbers) from now on."""
    seen, launch = [], model.gpu.launch

    def note(name, grid, threads, *arguments, shared=0):
        seen.append((name, grid, threads, shared, [int(x) for x in arguments if type(x) in (int, bool, np.int32)]))
        launch(name, grid, threads, *arguments, shared=shared)
    model.gpu.launch = note
    return seen


def test_launches_of_decoding(made, monkeypatch):
    """Grids and numbers of extend and draw, of 32 tokens and of 3 and 9 more, and what refresh asks for."""
    monkeypatch.setattr(model_gpu, "PROMPT_ROWS", 1)
    config = Config(dim=64, heads=2, kv_heads=1, layers=1, context=44, vocab=48, predict=3, hidden=2056)
    for precision in ("bf16", "fp32"):
        model = model_gpu.Model(config, precision=precision, matmul="ours")
        seen = noted(model)

        def launched(name):
            return [call[1:3] + call[4:] for call in seen if call[0].startswith(name)]
        model.decoder.extend([1] * 32)                              # 32 x 3 heads x 32 / 16 = 192 threads
        assert launched("rope") == [((1,), 256, [32, 32, 3, 32, 128])]
        assert launched("flash") == [((2, 1, 1), 128, [32, 2, 1])]
        assert launched("swiglu_forward") == [((32, 2), 256, [2056])]
        assert launched("draw") == [((1, 3), 1024, [48])]   # of the last row
        assert launched("decode") == []
        logits = [(grid, numbers[:3]) for grid, _, numbers in launched("matmul")[-2:]]
        assert logits == [((3, 1), [1, 144, 64]), ((3, 1), [32, 144, 64])]      # for draw, for the caller
        seen.clear()
        model.decoder.extend([1] * 3)
        assert [call[0] for call in seen] == ["embedding_forward", *DECODED, "decode_logits", "draw"]
        assert launched("embedding_forward") == [((3,), 32, [64])]
        assert launched("decode_logits") == [((18, 1), 128, [3, 64, 144])]
        assert launched("draw") == [((3, 3), 1024, [48])]
        assert launched("decode_attention") == [((2, 3), 512, [2, 1, 32])]
        assert all(call[3] == 0 for call in seen)
        seen.clear()
        model.decoder.draw([1] * 3, 2, 1, 5, Sampling())    # of head 0 alone
        assert launched("decode_logits") == [((6, 1), 128, [3, 64, 48])] and launched("draw") == [((3, 1), 1024, [48])]
        model.decoder.position = 35
        seen.clear()
        model.decoder.draw([1] * 9, 1, 2, 5, Sampling())    # a prompt at an offset
        assert launched("rope") == [((1,), 256, [9, 44, 3, 32, 128])] and launched("draw") == [((1, 2), 1024, [48])]
        assert launched("flash") == [((2, 1, 1), 128, [44, 2, 1])]
        (grid, _, numbers), = launched("matmul")[-1:]
        assert (grid, numbers[:3]) == ((2, 1), [1, 96, 64])
        model.decoder.position = 0
        seen.clear()
        model.decoder.extend([1] * 43)
        assert launched("rope") == [((2,), 256, [43, 43, 3, 32, 128])]
        seen.clear()
        model.refresh()
        size = model_cpu.param_count(config)
        assert seen == ([("copy_weights", (-(-size // 2048),), 256, 0, [])] if precision == "bf16" else [])
    seen = []
    for size, blocks in ((2048, 1), (2056, 2), (4096, 2), (4104, 3), (16392, 9)):
        model = types.SimpleNamespace(flat_weights=array(size), flat_params=array(size), gpu=recorder()[0],
                                      decoder=types.SimpleNamespace(forget=lambda: None))
        seen.clear()
        model.gpu.launch = lambda *arguments: seen.append(arguments)
        model_gpu.Model.refresh(model)
        (name, grid, threads, *arguments), = seen
        assert (name, grid, threads) == ("copy_weights", (blocks,), 256) and arguments[2] == size
        assert arguments[0] is model.flat_weights and arguments[1] is model.flat_params
        assert type(arguments[2]) is np.int64


@pytest.mark.parametrize("predict, most", [(3, 8), (8, 8), (9, 9)])
def test_few_rows_are_as_many_as_the_heads_or_eight(made, predict, most):
    config = Config(dim=32, heads=1, kv_heads=1, layers=2, context=40, vocab=8, predict=predict)
    model = model_gpu.Model(config, precision="bf16", matmul="ours")
    seen = noted(model)
    for position, n in (0, 1), (0, most), (0, most + 1), (20, 1), (20, most), (20, most + 1):
        model.decoder.tokens = [1] * position                           # whatever the cache has of them
        seen.clear()
        assert model.decoder.extend([1] * n).shape == (n, predict, 8)
        names = [call[0] for call in seen]
        if n <= most:
            assert names == ["embedding_forward", *2 * DECODED, "decode_logits", "draw"]
            groups = [call[1][1] for call in seen if call[0].startswith("decode") and call[0] != "decode_attention"]
            assert groups == 9 * [-(-n // 4)] and seen[-1][1] == (n, predict)
        else:
            names = ["flash" if name.startswith("flash") else name for name in names]
            assert names == ["embedding_forward", *2 * PROMPT, "rmsnorm_forward", "matmul", "draw", "matmul"]
            assert [call for call in seen if call[0] == "draw"][0][1] == (1, predict)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_kernels_may_use_the_shared_memory_that_they_are_given(made, precision):
    """More than 48 KiB have to be asked for."""
    gpu = model_gpu.Gpu(TINY, precision, "ours")
    for name, _, _, shared in model_gpu.flash_kernels(precision, TINY.head_dim):
        assert gpu.kernels[name].max_dynamic_shared_size_bytes == shared


@pytest.mark.parametrize("capability, hopper", [("80", False), ("89", False), ("90", True), ("100", False), ("120", False)])
def test_attention_is_compiled_for_what_hopper_alone_has(made, monkeypatch, capability, hopper):
    monkeypatch.setattr(model_gpu.cupy.cuda, "Device", lambda: types.SimpleNamespace(compute_capability=capability))
    config = dataclasses.replace(TINY, dim=128)                         # heads of 64
    model_gpu.Gpu(config, "bf16", "ours")
    kernels, attention = model_gpu.cupy.get_default_memory_pool().options
    assert kernels == ("-DBF16=1", "-DROW_THREADS=32")
    assert attention == ("-DHEAD_DIM=64", f"-DHOPPER={int(hopper)}", *["-arch=sm_90a"] * hopper)


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


def test_the_starts_of_all_ids_are_sent(made):
    """Also of those after the largest that occurs, where an earlier batch has left others."""
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours")
    for token in (47, 5, 0):
        model.forward(np.full((2, 3), token), np.zeros((2, 5), int))
        starts = model.saved[1]["starts"]
        assert np.array_equal(starts, [0] * (token + 1) + [6] * (48 - token))


def test_launches_of_decoding_many(made, monkeypatch):
    """The attention of a prompt after a long text takes the blocks from its first row on."""
    monkeypatch.setattr(model_gpu, "PROMPT_ROWS", 1)
    config = Config(dim=64, heads=2, kv_heads=1, layers=1, context=520, vocab=8)
    model, seen = model_gpu.Model(config, precision="bf16", matmul="ours"), []
    model.gpu.launch = lambda name, grid, *rest, **options: seen.append((name, grid, options))
    for position, n, z in ((0, 257, 3), (100, 157, 3), (127, 100, 2), (128, 100, 1), (200, 57, 2), (255, 9, 2),
                           (256, 9, 1)):
        model.decoder.tokens = [1] * position                           # whatever the cache has of them
        seen.clear()
        model.decoder.extend([1] * n)
        (name, grid, options), = [call for call in seen if "flash" in call[0]]
        assert name == "flash_forward_bf16" and grid == (2, 1, z) and options == {"shared": (128 + 4 * 64) * 32 * 2}, position
        assert [call[1] for call in seen if call[0] == "rope"] == [(-(-n * 3 * 2 // 256),)]


def test_other_numbers_than_the_usual(made):
    """The width of the feed-forward, the norm's eps and the rotation's base come from Config; without
    training
    there are losses and no gradients."""
    config = dataclasses.replace(TINY, hidden=72, norm_eps=0.25, rope_theta=20.0)
    model, reference = model_gpu.Model(config, precision="fp32", matmul="ours"), model_cpu.Model(config)
    widen(model, reference)
    tokens, targets = batch(config, 2, 9)
    for m in (model, reference):
        m.forward(tokens, targets)
        m.backward()
    assert max(relative(grad, reference.grads[name]) for name, grad in model.grads.items()) < 3e-6
    assert relative(model.logits(tokens), reference.logits(tokens)) < 1e-5
    assert relative(model.decoder.extend(tokens[0]), reference.logits(tokens)[0]) < 1e-5
    count = len(made)
    only = model_gpu.Model(config, precision="fp32", matmul="ours", training=False, seed=None)
    size = 4 * model_cpu.param_count(config)
    assert [x.nbytes for x in made[count:]].count(size) == 1 and not only.flat_params.any()
    only.write(only.flat_params, reference.flat_params)
    assert np.array_equal(only.forward(tokens, targets), model.forward(tokens, targets))
    assert only.flat_grads is only.m is only.v is None and only.grads == {}
    with pytest.raises(ValueError, match=r"^this model was made with training=False: it has no gradients\.$"):
        only.backward()


def test_a_memory_limit_ends_with_its_model(made):
    pool = model_gpu.cupy.get_default_memory_pool()
    before, limit = pool.limit, 800 << 20
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours", memory_limit=limit)
    assert pool.limit == limit - model_gpu.CUBLAS_BYTES - model_gpu.CONTEXT_BYTES
    with pytest.raises(ValueError, match="A micro-batch of 4000 x 40 tokens needs"):
        model.forward(np.zeros((4000, 40), int), np.zeros((4000, 42), int))
    del model
    gc.collect()
    assert pool.limit == before


def test_what_this_gpu_has(monkeypatch):
    for capability, precision in ("70", "fp32"), ("75", "fp32"), ("79", "fp32"), ("80", "bf16"), ("120", "bf16"):
        monkeypatch.setattr(model_gpu, "cupy", fake_cupy(capability=capability)[0])
        assert model_gpu.default_precision() == precision
    module, _ = fake_cupy(total_bytes=1000)
    module.get_default_memory_pool().total_bytes = lambda: 70
    monkeypatch.setattr(model_gpu, "cupy", module)
    context = model_gpu.CONTEXT_BYTES                        # which this process has already
    assert [model_gpu.free_memory(limit) for limit in (None, 1 << 40, 600)] == [1070 + context, 1070 + context, 600]
    monkeypatch.setattr(model_gpu, "cupy", None)
    assert model_gpu.default_precision() == "bf16"
    runtime = types.SimpleNamespace(getDeviceProperties=["none", {"name": b"Card 1"}].__getitem__)
    cuda = types.SimpleNamespace(runtime=runtime, Device=lambda: types.SimpleNamespace(id=1))
    monkeypatch.setattr(model_gpu, "cupy", types.SimpleNamespace(cuda=cuda))
    assert model_gpu.gpu_name() == "Card 1"


def test_the_plan_of_the_big_model():
    """Counted by hand: 64 x 512 tokens in bf16, of which each layer keeps 5 C + (H+2G)D + 3F numbers, and so on."""
    c, N = model_cpu.CONFIGS["big"], 64 * 512
    plan = model_gpu.memory_plan(c, 64, 512, "bf16")
    size = 116_417_280
    assert {name: plan[name] for name in ("parameters", "gradients", "moments", "bf16 weights")} == {
        "parameters": 4 * size, "gradients": 4 * size, "moments": 8 * size, "bf16 weights": 2 * size}
    muon = model_gpu.memory_plan(c, 64, 512, "bf16", optimizer="muon")      # no second moments of the layers' matrices
    hidden = 16 * (2 * 768 * 768 + 2 * 256 * 768 + 3 * 2048 * 768)
    assert muon == {**plan, "moments": 8 * size - 4 * hidden}
    little = model_gpu.memory_plan(c, 1, 8, "bf16", optimizer="muon")       # here the work of Muon takes more than a step
    work = 32 * 2 * (2 * 2048 * 768 + 2 * 768 * 768) + 4 * 32 * 64
    assert little["activations"] + little["logits and scratch"] == work
    assert plan["activations"] == 16 * N * (2 * (5 * 768 + 1280 + 3 * 2048) + 4 * (2 + 12))
    inputs = 4 * N * (1 + 4 + 1) + -(-4 * 4097 // 256) * 256 + 2 * 256
    assert plan["logits and scratch"] == N * (2 * 3 * 768 + 4 + 16) + 4 * 1056 * 768 + 2 * N * 4 * 4096
    assert plan["inputs"] == inputs
    assert plan["decoding"] == sum(-(-size // 256) * 256 for size in (
        4 * 512, 4 * 4, 8 * 2, 8, 4 * 8 * 4, 4 * 8, 4 * 8 * 4 * 4096,
        2 * 16 * 512 * 1280, *[2 * 512 * 768] * 8, *[4 * 512] * 3, 4 * 12 * 512, 2 * 512 * 4096, 2 * 512 * 2048,
        4 * 4 * 512, 4 * 1056 * 768))                                   # the last two are not used there
    assert plan["cuBLAS and kernels"] == 64 << 20 and plan["CUDA's context"] == 580 << 20 and len(plan) == 10
    assert model_gpu.memory_plan(c, 64, 512, "bf16", gpus=2) == {**plan, "NCCL": 860 << 20}
    assert "bf16 weights" not in model_gpu.memory_plan(c, 64, 512, "tf32")


def test_largest_micro_batch():
    config = model_cpu.CONFIGS["big"]
    total = sum(model_gpu.memory_plan(config, 64, 512, "bf16").values())
    assert 14 * 2 ** 30 < total < 15.5 * 2 ** 30
    def plan(rows):
        return model_gpu.memory_plan(config, rows, 512, "bf16")
    assert [model_cpu.largest_micro_batch(plan, free) for free in (total, total - 1, 1 << 30)] == [64, 63, 0]


def test_errors_are_one_sentence(monkeypatch):
    monkeypatch.setattr(model_gpu, "cupy", None)
    assert model_gpu.pick("auto") is model_cpu and model_gpu.pick("cpu") is model_cpu
    with pytest.raises(ValueError, match="needs CuPy"):
        model_gpu.pick("gpu")
    with pytest.raises(ValueError, match="needs CuPy"):
        model_gpu.Model(TINY)
    module, _ = fake_cupy()
    monkeypatch.setattr(model_gpu, "cupy", module)
    assert model_gpu.pick("auto") is model_gpu and model_gpu.pick("gpu") is model_gpu
    for arguments, words in [({"precision": "fp8"}, "precision must be one of"),
                             ({"matmul": "fast"}, "matmul must be one of")]:
        with pytest.raises(ValueError, match=words):
            model_gpu.Model(TINY, **arguments)
    for change, words in [
            (dict(dim=8320, heads=65), "models up to 8192 wide and contexts up to 16384, not 8320 and 8"),
            (dict(dim=64, heads=1, context=16385), "not 64 and 16385"),
            (dict(dim=96, heads=1), "heads 32, 64 or 128 wide, not 96: choose heads so that 96 / heads is one of these[.]$")]:
        config = Config(**{**dict(kv_heads=1, layers=1, context=8, vocab=8), **change})
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=words):
            patch.setattr(model_gpu, "cupy", None)
            model_gpu.check_sizes(config)
    for change in dict(dim=8192, heads=64), dict(dim=64, heads=1, context=16384), dict(dim=96, heads=3), dict(dim=64, heads=1):
        model_gpu.check_sizes(Config(**{**dict(kv_heads=1, layers=1, context=8, vocab=8), **change}))
    with pytest.raises(ValueError, match="heads 32, 64 or 128 wide"):
        model_gpu.Model(Config(dim=48, heads=2, kv_heads=1, layers=1, context=8, vocab=8), matmul="ours")
    module, _ = fake_cupy(total_bytes=80 << 20)
    monkeypatch.setattr(model_gpu, "cupy", module)
    config = Config(dim=64, heads=1, kv_heads=1, layers=2, context=64, vocab=512)
    with pytest.raises(ValueError, match="A micro-batch of 4096 x 64 tokens needs .* use a smaller --micro-batch, a smaller model or --device cpu"):
        model_gpu.Model(config, precision="fp32", matmul="ours", micro_batch=4096)
    for capability, precision in ("80", "bf16"), ("80", "tf32"), ("70", "fp32"), ("79", "fp32"):
        monkeypatch.setattr(model_gpu, "cupy", fake_cupy(capability=capability)[0])
        model_gpu.Model(TINY, precision=precision, matmul="ours", training=False, seed=None)
    for capability, precision, words in [("79", "tf32", "tf32 needs a GPU of compute capability 8.0 or later, this one has 7.9"),
                                         ("69", "fp32", "fp32 needs a GPU of compute capability 7.0 or later, this one has 6.9"),
                                         ("69", "bf16", "bf16 needs a GPU of compute capability 8.0 or later, this one has 6.9"),
                                         ("70", "bf16", "this one has 7.0; --precision fp32 needs 7.0[.]$"),
                                         ("61", "fp32", "fp32 needs a GPU of compute capability 7.0")]:
        monkeypatch.setattr(model_gpu, "cupy", fake_cupy(capability=capability)[0])
        with pytest.raises(ValueError, match=words):
            model_gpu.Model(TINY, precision=precision)
    module.cuda.is_available = lambda: False
    monkeypatch.setattr(model_gpu, "cupy", module)
    old = "too old: it serves CUDA {}, this CuPy needs 12.0: .* cupy-cuda11x"
    for driver, words in [(0, "no NVIDIA driver"), (11040, old.format("11[.]4")), (11990, old.format("11[.]99")),
                          (12090, "finds no GPU"), (12000, "finds no GPU"), (13010, "finds no GPU")]:
        module.cuda.runtime.driverGetVersion = lambda: driver
        for needed in (12000, 12090, 12990):
            module.cuda.runtime.runtimeGetVersion = lambda: needed
            with pytest.raises(ValueError, match=words):
                model_gpu.pick("gpu")


def test_a_missing_library_is_one_sentence(made, monkeypatch):
    monkeypatch.setattr(model_gpu.cupy, "RawModule", lambda **_: (_ for _ in ()).throw(RuntimeError("no nvrtc\nmore")))
    with pytest.raises(ValueError) as error:
        model_gpu.Model(TINY, precision="fp32", matmul="ours")
    assert str(error.value) == ("The GPU engine does not start; a CUDA library seems to be missing or does not fit the driver: run "
                                "`make gpu` (no nvrtc).")


def test_out_of_memory_says_what_would_fit(made):
    model = model_gpu.Model(TINY, precision="fp32", matmul="ours")
    pool = model_gpu.cupy.get_default_memory_pool()
    small = sum(model_gpu.memory_plan(TINY, 3, 40, "fp32").values())
    model_gpu.cupy.cuda.runtime.memGetInfo = lambda: (small - model_gpu.CONTEXT_BYTES, 1 << 40)
    need = sum(model_gpu.memory_plan(TINY, 50, 40, "fp32").values())

    def short_of(B, T):
        with pytest.raises(ValueError) as error, model._room_for(B, T):
            raise OutOfMemoryError
        return error.value
    assert str(short_of(50, 40)) == (f"A micro-batch of 50 x 40 tokens needs {need / 2**30:.2f} GiB of GPU memory, "
                                                f"{small / 2**30:.2f} GiB can be had: use a smaller --micro-batch, a smaller model or --device cpu.")
    model.logits([[1, 2, 3]])
    pool.limit = 100
    with pytest.raises(ValueError, match="A micro-batch of 1 x 3 tokens needs"):
        model.logits([[1, 2, 3]])
    pool.limit = 4 * model_cpu.param_count(TINY) - 1        # there is no room for the parameters
    for micro_batch, rows in (None, 1), (5, 5):
        with pytest.raises(ValueError, match=f"A micro-batch of {rows} x 40 tokens needs"):
            model_gpu.Model(TINY, precision="fp32", matmul="ours", micro_batch=micro_batch)


def test_first_steps_of_both_engines_side_by_side(made, monkeypatch, capsys):
    """What `python model_gpu.py` prints, of a smaller model."""
    small = Config(dim=64, heads=2, kv_heads=1, layers=1, context=12, vocab=304, predict=2)
    monkeypatch.setattr(model_gpu, "CONFIGS", {"small": small})
    monkeypatch.setattr(model_gpu.Model.__init__, "__defaults__", (0, None, None, None, "ours", True, "adamw"))
    clock = itertools.accumulate(itertools.repeat(0.0125))
    monkeypatch.setattr(model_gpu, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(model_gpu, "gpu_name", lambda: "Card 1")
    model_gpu.main([])
    title, *lines = capsys.readouterr().out.splitlines()
    assert "Small on random tokens, Card 1: loss of head 0 (ln V = 5.7170) and time of three steps." == title
    rows = [line.split() for line in lines]
    assert [" ".join(row[:2]) for row in rows] == ["CPU float64", "GPU fp32", "GPU tf32", "GPU bf16"]
    assert all(row[3::3] == ["12.50"] * 3 and row[4::3] == ["ms"] * 3 for row in rows)
    reference, rng = model_cpu.Model(small), np.random.default_rng(0)
    batch = rng.integers(0, 304, (16, 12)), rng.integers(0, 304, (16, 13))
    for column in 2, 5, 8:
        loss = reference.forward(*batch)[0]                             # of head 0
        reference.backward()
        reference.update(lr=1e-3)
        assert rows[0][column] == f"{loss:.5f}" and all(abs(float(row[column]) / loss - 1) < 1e-2 for row in rows)
    monkeypatch.setattr(model_gpu.cupy.cuda, "Device", lambda: types.SimpleNamespace(compute_capability="75"))
    model_gpu.main([])
    assert "GPU fp32" in (said := capsys.readouterr().out) and "GPU bf16" not in said


def test_the_gpu_of_a_process(made, monkeypatch):
    """That of its number on its host, or the only one that it sees; none is a sentence."""
    used = []
    monkeypatch.setattr(model_gpu.cupy.cuda, "Device", lambda number: types.SimpleNamespace(use=lambda: used.append(number)))
    for count, number in (1, 0), (1, 3), (2, 0), (2, 1), (4, 3):
        model_gpu.cupy.cuda.runtime.getDeviceCount = lambda count=count: count
        model_gpu.take_gpu(number)
    assert used == [0, 0, 0, 1, 3]
    for count, number in (2, 2), (4, 7), (0, 0):
        model_gpu.cupy.cuda.runtime.getDeviceCount = lambda count=count: count
        with pytest.raises(ValueError, match=f"^this host has {count} GPUs, too few for process {number}.$"):
            model_gpu.take_gpu(number)


@pytest.mark.parametrize("version, name, capability", [(12000, "libcublas.so.12", 89), (12090, "libcublas.so.12", 90),
                                                       (13000, "libcublas.so.13", 120)])
def test_cublas_is_that_of_the_runtime(made, monkeypatch, version, name, capability):
    opened = []
    monkeypatch.setitem(sys.modules, "cupy", model_gpu.cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", model_gpu.cupy.cuda)
    model_gpu.cupy.cuda.device = types.SimpleNamespace(get_cublas_handle=lambda: 5)
    model_gpu.cupy.cuda.runtime.runtimeGetVersion = lambda: version
    model_gpu.cupy.cuda.runtime.malloc = lambda size: size + 1
    monkeypatch.setattr(model_gpu, "capability", lambda: capability)
    function = types.SimpleNamespace
    library = function(cublasGemmEx=function(), cublasGemmStridedBatchedEx=function(), cublasSetStream_v2=function(),
                       cublasSgeam=function(), cublasSetWorkspace_v2=function())
    monkeypatch.setattr(model_gpu.ctypes, "CDLL", lambda path: opened.append(path) or library)
    model_gpu.load_cublas.cache_clear()
    handle, loaded, workspace = model_gpu.load_cublas()
    size = (32 if capability >= 90 else 4) << 20
    assert opened == [name] and handle.value == 5 and loaded is library and workspace == (size + 1, size)
    assert model_gpu.load_cublas()[2] is workspace                      # one a process, however many models
    model_gpu.load_cublas.cache_clear()
    letters = {ctypes.c_void_p: "p", ctypes.c_int: "i", ctypes.c_longlong: "q"}
    assert {name: "".join(letters[kind] for kind in function.argtypes) for name, function in vars(library).items()} == {
        "cublasGemmEx": "piiiiippiipiippiiii", "cublasGemmStridedBatchedEx": "piiiiippiiqpiiqppiiqiii",
        "cublasSgeam": "piiiippippipi", "cublasSetStream_v2": "pp", "cublasSetWorkspace_v2": "ppq"}


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
        assert name in ("linear_forward", "block_forward", "block_backward", "linear_backward") or name in (
            texts["kernels.cu"] + texts["flash_attn.cu"]), name

    def faces(text, name):
        body = re.split(r"\n\n\n", text.split(f"\nclass {name}")[1])[0]
        return re.findall(r"^    def (\w+)\(", body, re.MULTILINE)
    for name, least in ("Model:", {"refresh", "write", "logits", "forward", "backward", "update"}), (
            "Decoder", {"extend", "draw"}):
        cpu, gpu = (faces(texts[file], name) for file in ("model_cpu.py", "model_gpu.py"))
        shared = set(cpu) & set(gpu)
        assert least <= shared
        assert [method for method in cpu if method in shared] == [method for method in gpu if method in shared]


@pytest.mark.parametrize("name", ["Model", "Decoder"])
def test_the_public_methods_of_both_engines_have_the_same_signatures(name):
    """And there are no others; how an engine is made, by __init__, differs."""
    def face(engine):
        members = inspect.getmembers(getattr(engine, name))
        return {key: inspect.signature(member) if callable(member) else type(member)
                for key, member in members if not key.startswith("_")}
    assert face(model_gpu) == face(model_cpu)
    assert {"Model": "update", "Decoder": "extend"}[name] in face(model_gpu)


def test_the_flash_kernels_are_launched_as_their_own_tests_do():
    test_flash = pytest.importorskip("test_flash")
    for version, D in test_flash.VERSIONS:
        assert model_gpu.flash_kernels("bf16" if version == "hopper" else version, D) == test_flash.geometry(version, D)


def test_every_kernel_is_launched_and_says_how(made):
    """Each kernel of kernels.cu has its launch geometry above it and a launch in model_gpu.py."""
    with open(os.path.join(ROOT, "kernels.cu"), encoding="utf-8") as file:
        lines = file.read().split("\n")
    with open(os.path.join(ROOT, "model_gpu.py"), encoding="utf-8") as file:
        python = file.read()
    text = re.sub(r"__launch_bounds__\([^)]*\)\s*", "", "\n".join(lines))
    names = re.findall(r'extern "C" __global__ void (\w+)\(', text)
    gpu = model_gpu.Gpu(TINY, "bf16", "ours")
    assert sorted([*names, *(name for name, *_ in gpu.flash)]) == sorted(gpu.kernels)
    for name in names:
        assert f'"{name}"' in python, f"{name} is never launched"
    assert sum(line.startswith("// Grid (") for line in lines) >= len(names) - 1       # two share a comment


def test_every_kernel_that_starts_early_waits_before_it_reads():
    """No CPU can tell: without await_last a kernel would read what the one before it has yet to write."""
    texts = []
    for name in "model_gpu.py", "kernels.cu":
        with open(os.path.join(ROOT, name), encoding="utf-8") as file:
            texts.append(file.read())
    early = set(re.findall(r'launch_early\("(\w+)"', texts[0]))
    assert early == {*DECODED, "decode_logits", "draw"}
    reads = {**dict.fromkeys(early, "two_products("), "two_products": "products_of_rows<ROWS>(",
             "products_of_rows": "load8(x ", "decode_attention": "load_packed(", "draw": "order_key("}
    for name, first in reads.items():
        body = re.search(rf"\b{name}\([^;{{}}]*\) {{\n(.*?)\n}}\n", texts[1], re.DOTALL)[1]
        before, found, _ = body.partition(first)
        assert found, name
        assert "await_last();" in before or name not in ("products_of_rows", "decode_attention", "draw"), name
