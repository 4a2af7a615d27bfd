"""Compiles and launches CUDA kernels on the CPU (through tests/cuda_on_cpu.h), and compiles them for real GPUs.

    from cuda_helpers import CpuModule, guarded, check_guards
    module = CpuModule("flash_attn.cu", ["-DBF16=0", "-DHEAD_DIM=64", "-DHOPPER=0", "-DPARTS=0"])    # g++; the result is cached by content
    kernel = module.get_function("flash_forward")                # as cupy.RawModule.get_function
    kernel((4, 2, 1), (128,), (out, lse, qkv, np.int32(T), np.int32(H), np.int32(G)))

The call has the form of a cupy.RawKernel's: grid, block, arguments, bytes of dynamic shared memory. An argument is a
NumPy array (its address is passed; C-contiguous) or a NumPy scalar (np.int32, np.float32, ...) of exactly the
parameter's size: a plain Python number is refused, because CuPy would pass it as 64 bits without a word.
bf16 lives in uint16 arrays: stored and value convert.

`module.order` chooses how threads and blocks take turns, in one of the three ORDERS, over which the tests are spread. What
the kernel does wrong (deadlock, shared memory overrun, an index outside an array, wrong argument sizes, lanes that do not
meet) raises KernelError. guarded(array) copies an array: a kernel that
reads or writes past its end raises KernelError; before it are NaN bytes, and check_guards(array) raises if a kernel
wrote there.

A .cu file needs, for this: kernels declared as `extern "C" __global__ void NAME(...)`, by a macro or not, with or without
__launch_bounds__; PTX only where g++ does not see it: in wrappers of the names in cuda_on_cpu.h's last section, or
behind __CUDA_ARCH__;
dynamic shared memory declared as `extern __shared__ T name[];`, aligned or not; and nothing that is in neither CUDA nor
cuda_on_cpu.h.

compile_for_gpu(arch, options) compiles for a GPU architecture such as "sm_80" with NVRTC (the Python package
nvidia-cuda-nvrtc-cu12, the compiler that CuPy uses), and returns what memory each kernel takes.
"""

import ctypes
import glob
import hashlib
import mmap
import os
import pathlib
import re
import subprocess
import tempfile
import types

import numpy as np
import pytest

TESTS = os.path.dirname(os.path.abspath(__file__))
ORDERS = range(3)
KERNEL = re.compile(r'extern "C"\s+void\s+(\w+)\s*\(')  # in preprocessed text, where __global__ is empty
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\]\s*;")
STATIC_SHARED = re.compile(r"(?<!extern )__shared__ (\w+) (\w[^;=(){}]*);")      # a type and arrays of it
LIBC = ctypes.CDLL(None)
GUARD, NO_ENTRY = 4096, 1 << 20  # bytes of NaN before a guarded array, and bytes after it that cannot be touched


class KernelError(RuntimeError):
    """A launch failed in a way that a GPU would answer with an error, a hang or silent damage."""


def text_of(name):
    """The text of a file of the house, or of tests/."""
    return pathlib.Path(TESTS, "..", name).read_text()


def code_of(name):
    """What the compiler gets of a .cu file: flash_attn.cu goes on where kernels.cu ends."""
    return text_of("kernels.cu") + text_of(name) if name == "flash_attn.cu" else text_of(name)


class CpuModule:
    """The kernels of one .cu file, compiled for the CPU with the given -D options. bounds: an index outside an array
    of known size raises KernelError, which costs a third of the speed. source: the text, if it is not that of the file."""

    def __init__(self, name, options=("-DBF16=0",), bounds=True, source=None):
        own, source, header = source or text_of(name), source or code_of(name), text_of("tests/cuda_on_cpu.h")
        self.order = 0
        source = DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)shared_memory;", source)
        source = STATIC_SHARED.sub(lambda match: " ".join(
            f"GUARDED_SHARED({match[1]}, {array.partition('[')[0]}, {array})" for array in match[2].split(", ")), source)
        # -fno-ipa-ra: the compiler must not believe that a switch to another fiber keeps registers that yield() does not use.
        # In an unnamed namespace a template's static shared memory stays out of COMDAT sections, which the header could
        # not poison.
        text = f'#include "cuda_on_cpu.h"\nnamespace {{\n#line 1 "{name}"\n{source}\n}}\n'
        command = [*"g++ -std=c++17 -O2 -fPIC -fno-ipa-ra -fno-strict-aliasing -U_FORTIFY_SOURCE -w -I".split(), TESTS,
                   *(["-fsanitize=bounds,alignment", "-fsanitize-undefined-trap-on-error"] if bounds else []), *options,
                   "-x", "c++", "-"]
        digest = hashlib.sha256("\0".join([text, header, *command]).encode()).hexdigest()[:24]
        folder = f"{tempfile.gettempdir()}/cuda_on_cpu-{os.getuid()}"
        library = f"{folder}/{digest}.so"
        if not os.path.exists(library):
            os.makedirs(folder, exist_ok=True)
            fresh = f"{library}.{os.getpid()}"
            preprocessed = subprocess.check_output([*command, "-E"], input=text, text=True)
            text += "".join(f"CUDA_KERNEL({kernel})\n" for kernel in KERNEL.findall(preprocessed) if f"{kernel}(" in own)
            subprocess.run([*command, "-shared", "-o", fresh], input=text, text=True, check=True)
            os.replace(fresh, library)
        self.library = ctypes.CDLL(library)

    def get_function(self, name):
        """The kernel `name`, callable as kernel(grid, block, args, shared_mem=0)."""
        function = getattr(self.library, f"launch_{name}")
        function.restype = ctypes.c_char_p

        def kernel(grid, block, args, shared_mem=0):
            assert all(arg.flags.c_contiguous for arg in args if isinstance(arg, np.ndarray)), name
            values = [np.array(arg.ctypes.data if isinstance(arg, np.ndarray) else arg) for arg in args]
            error = function((ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid))), *block, shared_mem,
                             (ctypes.c_void_p * len(args))(*[value.ctypes.data for value in values]),
                             (ctypes.c_int * len(args))(*[value.nbytes for value in values]), len(args), self.order)
            if error:
                raise KernelError(f"{name}: {error.decode()}.")

        return kernel


class Array(np.ndarray):
    """A NumPy array with the few attributes of a CuPy array that model_gpu.py uses."""
    data = property(lambda self: types.SimpleNamespace(ptr=self.ctypes.data))

    def set(self, host):
        assert host.dtype == self.dtype
        self[...] = host

    def get(self, out=None, blocking=True):
        if out is None:
            return np.array(self)
        out[...] = self
        return out


def guarded(array):
    """A copy of the array that ends where memory begins that cannot be touched; before it are NaN bytes. Aligned as far
    as its size allows: one of a multiple of 16 bytes to 16."""
    room = -(-(array.nbytes + GUARD) // mmap.PAGESIZE) * mmap.PAGESIZE
    base = np.frombuffer(mmap.mmap(-1, room + NO_ENTRY), np.uint8)
    if LIBC.mprotect(ctypes.c_void_p(base.ctypes.data + room), ctypes.c_size_t(NO_ENTRY), 0):
        raise OSError("mprotect fails.")
    base[:room - array.nbytes] = 0xFF
    view = base[room - array.nbytes:room].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def check_guards(*arrays):
    """Raises KernelError if anything was written just before an array made by guarded()."""
    for array in arrays:
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        if not np.all(base[:array.ctypes.data - base.ctypes.data] == 0xFF):
            raise KernelError(f"a kernel wrote outside an array of shape {array.shape}.")


def to_bf16(array):
    """float array -> uint16 array with the bits of bf16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def stored(array, bf16):
    """These numbers as the engine keeps activations: the bits of bf16, or float32."""
    return to_bf16(array) if bf16 else np.float32(array)


def value(array):
    """float64 array of the numbers that are stored so."""
    return ((array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array).astype(float)


# --- compiling for real GPUs ------------------------------------------------------------------------------------------

def compile_for_gpu(arch, options):
    """Compiles flash_attn.cu, and kernels.cu with it, for `arch` with the options that CuPy 14 adds to every RawModule's ->
    {kernel: {kind of memory: bytes}}; ValueError with the log if that fails, or if ptxas had to make a product of Hopper's
    wait (its remarks C75xx).  Skips the test where there is no compiler for GPUs or it does not know this architecture:
    CUDA 13 has dropped sm_70, CUDA before 12.8 does not have sm_100 and sm_120 yet."""
    package = pytest.importorskip("nvidia.cuda_nvrtc", reason="nvidia-cuda-nvrtc-cu12 (pip) is not installed")
    [library] = glob.glob(f"{package.__path__[0]}/lib/libnvrtc.so.1[0-9]")
    options = [*options, "-std=c++17", "-ftz=true", f"-arch={arch}", "--ptxas-options=-v"]
    nvrtc, program, size = ctypes.CDLL(library), ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), code_of("flash_attn.cu").encode(), None, 0, None, None)
    words = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), words)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, buffer)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    log = buffer.value.decode()
    if "invalid value for --gpu-architecture" in log:
        pytest.skip(f"the NVRTC here does not know {arch}")
    if status or "(C75" in log:
        raise ValueError(f"{arch}:\n{log}")
    kernels = {}
    for part in log.split("Compiling entry function '")[1:]:
        used = re.findall(r"(\d+) bytes (spill stores|stack frame|smem)", part)
        kernels[part.split("'")[0]] = {kind: int(size) for size, kind in used}
    return kernels
