"""Deletes every barrier of a .cu file, one at a time, in a copy, and reports whether a test notices.

    python tests/barriers.py flash_attn.cu                 # all; exit code 1 if a deletion passed the tests
    python tests/barriers.py kernels.cu --lines 120 340    # only the barriers in these lines

A barrier is a call of __syncthreads, __syncwarp, cp_async_wait, or of what waits for Hopper's products. A deletion
counts as noticed when a test of the file fails on the copy, by a wrong result, a deadlock or a crash. If it passes, the
barrier is not needed or a test is missing. tests/mutate.py does the work, and plants all other mistakes. This takes
2 to 10 minutes, and is no part of `make check`.
"""
import sys

import mutate

if __name__ == "__main__":
    sys.exit(mutate.main([*sys.argv[1:], "--barriers"]))
