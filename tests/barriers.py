"""Deletes every barrier of a .cu file, one at a time, in a copy, and reports whether a test notices.

    python tests/barriers.py flash_attn.cu                 # all; exit code 1 if a deletion passed the tests
    python tests/barriers.py kernels.cu --lines 120 340    # only the barriers in these lines

A barrier is a call of __syncthreads, __syncwarp or cp_async_wait. A deletion counts as noticed when tests/test_flash.py
(for flash_attn.cu) or tests/test_kernels.py (for kernels.cu) fails on the copy, by a wrong result, a deadlock or a
crash. One that passes means a barrier that is not needed, or a test that is missing. It takes some 5 to 10 minutes, and
is no part of `make check`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

TESTS = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(TESTS)
SUITES = {"flash_attn.cu": "test_flash.py", "kernels.cu": "test_kernels.py"}
BARRIER = re.compile(r"\b(?:__syncthreads\(\)|__syncwarp\([^()]*\)|cp_async_wait<[^<>]*>\(\));")


def barriers(source):
    """(start, end) of each barrier's call in the text; comments and the wrappers' own definitions are passed over."""
    # comments blanked out, so that positions stay
    code = re.sub(r"//[^\n]*|/\*.*?\*/", lambda match: re.sub(r"[^\n]", " ", match.group()), source, flags=re.S)
    return [match.span() for match in BARRIER.finditer(code)]


def passes(folder, suite):
    """Whether the suite's tests on the CPU pass with the .cu file in `folder`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-k", "not compiles and not launches_them_so",
               "-p", "no:cacheprovider", os.path.join(TESTS, suite)]
    try:
        done = subprocess.run(command, cwd=ROOT, env=dict(os.environ, CUDA_SOURCES=folder), capture_output=True,
                              timeout=600)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", choices=sorted(SUITES), help="the .cu file")
    parser.add_argument("--lines", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(1, 10 ** 9))
    args = parser.parse_args()
    with open(os.path.join(ROOT, args.file)) as file:
        source = file.read()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        def verdict(text):
            with open(os.path.join(folder, args.file), "w") as file:
                file.write(text)
            return passes(folder, SUITES[args.file])

        if not verdict(source):
            sys.exit(f"error: {SUITES[args.file]} fails on the unchanged {args.file}; mend that first.")
        found = [(start, end) for start, end in barriers(source)
                 if args.lines[0] <= source.count("\n", 0, start) + 1 <= args.lines[1]]
        for start, end in found:
            unnoticed = verdict(source[:start] + ";" + source[end:])
            missed += unnoticed
            line = source.count("\n", 0, start) + 1
            print(f"{args.file}:{line}: {source[start:end - 1]:22s} {'NOT NOTICED' if unnoticed else 'noticed'}",
                  flush=True)
    print(f"{len(found) - missed} of {len(found)} deletions noticed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
