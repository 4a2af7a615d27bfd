// Runs CUDA kernels on the CPU, one block after another, so that they can be tested where there is no GPU.
//
// tests/cuda_helpers.py puts a .cu file behind this header, compiles the pair with g++ and launches the kernels from
// Python. The header supplies the words of CUDA that our kernels use: threadIdx, __shared__, __syncthreads, shuffles,
// and, because g++ knows no PTX, its own versions of the small wrappers around tensor-core and asynchronous-copy
// instructions (the last section; the .cu files hide their PTX versions from g++).
//
// It does not simulate a GPU's speed. Among the orders of execution that CUDA allows it picks extreme ones, in which a
// kernel that relies on another order fails:
//   * Every thread of a block is a fiber (a stack of its own, switched by hand). A fiber runs alone until it reaches a
//     point of synchronisation, then the next one that may run is picked: the lowest number (order 0), the highest
//     (order 1), or one drawn from a seeded generator (order 2). Lanes of a warp do NOT move in lockstep: they meet
//     only where the source makes them meet. So a missing barrier lets a thread read what is not there yet, or
//     overwrite what another still needs. Blocks run in ascending order (0), in descending order (1), or in
//     ascending order from a drawn one on (2).
//   * Shared memory is filled with NaN bytes (0xFF) before each block.
//   * The megabyte behind an array cannot be read or written. Before an array lie NaN bytes; whether a kernel has
//     written there is seen afterwards (cuda_helpers.guarded and check_guards).
//   * An asynchronous copy spoils its destination with NaN bytes when it is issued (it might land at once, under a
//     late reader) and lands only when its thread waits for it (it might be late, too).
//   * ldmatrix reads a lane's row when that lane arrives, before the other lanes have arrived.
// What it cannot see:
//   * a race that none of the orders tried brings to light
//   * a lane that relies on a shuffle, a vote or a matrix instruction to order shared memory: those wait for all lanes
//     here, and hide a missing __syncwarp before
//   * a kernel that starts before the one ahead of it has ended, and reads what that writes without await_last: here
//     kernels run one after the other, and await_last does nothing
#pragma once
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <utility>
#include <vector>

// ---------------------------------------------------------------------------------------------------------------
// Words of the language
// ---------------------------------------------------------------------------------------------------------------

#define CUDA_ON_CPU 1
#ifndef BF16
#define BF16 0          // the test of the primer compiles its kernel without -DBF16
#endif
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Static shared memory is one array for all blocks (they run one by one); the section's name lets us poison it.
// `extern __shared__ T name[];` is rewritten by cuda_helpers.py into a call of dynamic_shared(), and each array of
// `__shared__ T name[n], ...;` into GUARDED_SHARED(T, name, name[n]): behind it lie bytes that must stay poisoned.  An
// array lies where its type's alignment allows it, and no better: one of floats at 4 bytes behind a multiple of 256, so that
// an access of 16 bytes to it faults.
#define __shared__ static __attribute__((section("cuda_shared"), aligned(256)))
#define GUARDED_SHARED(T, name, array)                                                                                \
    __shared__ struct {                                                                                               \
        char before[alignof(T)];                                                                                      \
        T array;                                                                                                      \
        char guard_of_##name[cuda_on_cpu::SHARED_GUARD];                                                              \
    } room_of_##name;                                                                                                 \
    static char* place_of_##name __attribute__((section("cuda_guards"), used)) = room_of_##name.guard_of_##name;      \
    auto& name = room_of_##name.name;

struct dim3 {
    unsigned x, y, z;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

#define CUDA_VECTOR2(name, T)          \
    struct alignas(8) name { T x, y; };   \
    static inline name make_##name(T x, T y) { return {x, y}; }
#define CUDA_VECTOR4(name, T)                   \
    struct alignas(16) name { T x, y, z, w; };  \
    static inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_VECTOR2(float2, float)
CUDA_VECTOR2(uint2, unsigned)
CUDA_VECTOR4(float4, float)
CUDA_VECTOR4(uint4, unsigned)

// ---------------------------------------------------------------------------------------------------------------
// Fibers, barriers and meetings of a warp
// ---------------------------------------------------------------------------------------------------------------

// Jumps from one stack to another by GCC's own words: they save three registers and let the compiler save what else is in
// use.  Those of the C library look for handlers to undo on the way, which takes longer than the rest of a switch.
typedef void* Place[5];

extern "C" {
#define HIDDEN __attribute__((weak, visibility("hidden")))
extern HIDDEN char __start_cuda_shared[], __stop_cuda_shared[];
extern HIDDEN char *__start_cuda_guards[], *__stop_cuda_guards[];
}

namespace cuda_on_cpu {

const size_t SHARED_GUARD = 128;

// A loop over the numbers of the lanes whose bits are set.
#define FOR_EACH_LANE(lanes) for (int lane = 0; lane < 32; lane++) if (lanes >> lane & 1)

// What the lanes of a warp do together once all have arrived (nullptr: nothing, they only wait for each other).
typedef void (*Operation)(void** operands, unsigned lanes);

struct AsyncCopy {
    char* to;
    const char* from;  // nullptr: zeros
    int bytes;
};

struct AsyncProduct {
    float* c;          // NaN until the product has landed
    float values[32];
};

struct Fiber {
    dim3 index;                     // its threadIdx
    ucontext_t start;               // used once, to enter the stack; every later switch is a jump
    Place context;
    bool started;
    int line;                       // of the __syncthreads at which it waits
    unsigned mask;                  // of the lanes it waits for
    Operation operation;
    std::vector<AsyncCopy> copies;  // issued and not yet landed
    std::vector<AsyncProduct> products;
    bool begun;                     // a fence came before the next product
    bool unseen;                    // copies have landed that no fence has shown to asynchronous products
};

struct Warp {
    unsigned alive, waiting;  // bits of lanes
    void* operands[32];       // what each waiting lane brought
};

const size_t STACK = 256 << 10, GUARD = 4096;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<uint64_t> ready;     // bits of the fibers that may run
static Fiber* self;                     // the fiber that runs
static int alive, at_barrier;           // of the block's threads
static Place scheduler;
static char error[256];
static bool broken;                     // the last launch did not come to its end
static char* shared_memory;             // dynamic shared memory, followed by GUARD bytes that must stay poisoned
static char* stacks;
static void (*body)(const void*, void**);
static const void* body_kernel;
static void** body_args;

static inline int self_number() { return int(self - fibers.data()); }
static void set_ready(int i) { ready[i >> 6] |= uint64_t(1) << (i & 63); }
static void clear_ready(int i) { ready[i >> 6] &= ~(uint64_t(1) << (i & 63)); }

// Functions of their own, as GCC asks: no jump stands in the function that it leads to.
[[noreturn]] __attribute__((noinline)) static void to_scheduler() { __builtin_longjmp(scheduler, 1); }
[[noreturn]] __attribute__((noinline)) static void to_fiber() { __builtin_longjmp(self->context, 1); }

template <class... A>
[[noreturn]] static void fail(const char* format, A... a) {
    snprintf(error, sizeof error, format, a...);
    to_scheduler();
}

// Leaves the running fiber; returns when the scheduler picks it again. Not inlined, because threadIdx changes in it.
__attribute__((noinline)) static void yield() {
    if (__builtin_setjmp(self->context) == 0) to_scheduler();
    threadIdx = self->index;
}

static void open_barrier_if_complete() {
    if (alive == 0 || at_barrier < alive) return;
    int line = 0;
    for (size_t i = 0; i < fibers.size(); i++) {
        if (!fibers[i].line) continue;  // exited
        if (line && line != fibers[i].line)
            fail("threads of one block wait at two different __syncthreads, lines %d and %d", line, fibers[i].line);
        line = fibers[i].line;
        fibers[i].line = 0;
        set_ready(int(i));
    }
    at_barrier = 0;
}

static void block_barrier(int line) {
    self->line = line;
    clear_ready(self_number());
    at_barrier++;
    open_barrier_if_complete();
    yield();
}

static void finish_meeting_if_complete(int w, unsigned mask) {
    Warp& warp = warps[w];
    unsigned lanes = mask & warp.alive;
    if (!lanes || (warp.waiting & lanes) != lanes) return;
    Operation operation = fibers[32 * w + __builtin_ctz(lanes)].operation;
    FOR_EACH_LANE(lanes) {
        Fiber& fiber = fibers[32 * w + lane];
        if (fiber.mask != mask || fiber.operation != operation)
            fail("lanes of warp %d meet at different operations or with different masks", w);
    }
    if (operation) operation(warp.operands, lanes);
    warp.waiting &= ~lanes;
    FOR_EACH_LANE(lanes) set_ready(32 * w + lane);
}

// All lanes of `mask` arrive here, then `operation` runs once over what they brought, then all may go on.
static void meet(unsigned mask, Operation operation, void* operand) {
    int number = self_number(), w = number / 32, lane = number % 32;
    if (!(mask >> lane & 1)) fail("lane %d is not in the mask %08x that it names", lane, mask);
    warps[w].operands[lane] = operand;
    warps[w].waiting |= 1u << lane;
    self->mask = mask;
    self->operation = operation;
    clear_ready(number);
    finish_meeting_if_complete(w, mask);
    yield();
}

static void fiber_main() {
    for (;;) {  // one turn per block
        threadIdx = self->index;
        body(body_kernel, body_args);
        int number = self_number();
        Warp& warp = warps[number / 32];
        clear_ready(number);
        warp.alive &= ~(1u << number % 32);
        alive--;
        open_barrier_if_complete();
        if (warp.waiting)
            finish_meeting_if_complete(number / 32, fibers[number / 32 * 32 + __builtin_ctz(warp.waiting)].mask);
        yield();
    }
}

// A kernel touched memory that it does not own (cuda_helpers.guarded() ends every array where that is so), or an index
// is outside an array of known size, or an address misaligned (which -fsanitize=bounds,alignment turns into a trap).
static void memory_fault(int) {
    fail("a read or a write outside an array, or at an address that its type does not allow");
}
const int FAULTS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};

struct Picker {  // the order of execution
    int order;
    uint64_t state;
    unsigned draw(unsigned n) {  // xorshift
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return unsigned(state >> 32) % n;
    }
    int next() {  // a fiber that may run, or -1
        int words = int(ready.size()), first = order == 2 ? draw(words) : 0;
        for (int k = 0; k < words; k++) {
            int w = order == 1 ? words - 1 - k : first + k < words ? first + k : first + k - words;
            uint64_t bits = ready[w];
            if (!bits) continue;
            if (order == 1) return 64 * w + 63 - __builtin_clzll(bits);
            uint64_t above = order == 2 ? bits >> draw(64) << (state >> 32 & 63) : 0;
            return 64 * w + __builtin_ctzll(above ? above : bits);
        }
        return -1;
    }
};

static bool written(const char* poisoned, size_t bytes) {
    static const std::vector<char> poison(GUARD, char(0xFF));
    return memcmp(poisoned, poison.data(), bytes);
}

static void run_block(Picker& picker, size_t shared_bytes) {
    memset(shared_memory, 0xFF, shared_bytes + GUARD);
    if (__start_cuda_shared) memset(__start_cuda_shared, 0xFF, __stop_cuda_shared - __start_cuda_shared);
    alive = int(fibers.size());
    at_barrier = 0;
    for (Warp& warp : warps) warp.alive = warp.waiting = 0;
    for (int i = 0; i < alive; i++) {
        warps[i / 32].alive |= 1u << i % 32;
        fibers[i].line = 0;
        fibers[i].copies.clear();
        fibers[i].products.clear();
        fibers[i].begun = fibers[i].unseen = false;
        set_ready(i);
    }
    while (alive && !*error) {
        int i = picker.next();
        if (i < 0) {
            snprintf(error, sizeof error, "deadlock: %d threads wait, %d of them at __syncthreads", alive, at_barrier);
            return;
        }
        self = &fibers[i];
        if (__builtin_setjmp(scheduler) == 0) {
            if (self->started) to_fiber();
            self->started = true;
            setcontext(&self->start);
        }
    }
    if (*error) return;
    if (written(shared_memory + shared_bytes, GUARD))
        snprintf(error, sizeof error, "a write past the %zu bytes of dynamic shared memory", shared_bytes);
    for (char** guard = __start_cuda_guards; guard < __stop_cuda_guards; guard++)
        if (written(*guard, SHARED_GUARD)) snprintf(error, sizeof error, "a write past an array in shared memory");
}

template <class... A, size_t... I>
static void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(args[I])...);
}

// Returns nullptr, or what went wrong. args as for cuLaunchKernel: one pointer per parameter.
template <class... A>
static const char* launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block, unsigned shared_bytes,
                          void** args, const int* arg_sizes, int arg_count, int order, unsigned seed) {
    *error = 0;
    const int sizes[] = {int(sizeof(A))...};
    if (arg_count != int(sizeof...(A))) return "wrong number of arguments";
    for (int i = 0; i < arg_count; i++)
        if (arg_sizes[i] != sizes[i]) {
            snprintf(error, sizeof error, "argument %d has %d bytes, should be %d", i, arg_sizes[i], sizes[i]);
            return error;
        }
    unsigned threads = block[0] * block[1] * block[2], blocks = grid[0] * grid[1] * grid[2];
    if (threads < 1 || threads > 1024 || blocks < 1) return "a block has 1 to 1024 threads, a grid at least one block";
    if (grid[1] > 65535 || grid[2] > 65535) return "the grid's y and z are at most 65535";
    if (shared_bytes > (227 << 10)) return "more than 227 KB of dynamic shared memory";
    if (!stacks) {
        stacks = (char*)mmap(0, 1024 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                             -1, 0);
        shared_memory = (char*)aligned_alloc(1024, (228 << 10) + GUARD);
    }
    if (broken) fibers.clear();         // they stand in the midst of a kernel; else each waits for its next turn
    broken = true;
    fibers.resize(threads);
    warps.resize((threads + 31) / 32);
    ready.assign((threads + 63) / 64, 0);
    for (unsigned i = 0; i < threads; i++) {
        fibers[i].index = {i % block[0], i / block[0] % block[1], i / block[0] / block[1]};
        if (fibers[i].start.uc_stack.ss_size) continue;         // not a new one
        getcontext(&fibers[i].start);
        fibers[i].start.uc_stack.ss_sp = stacks + i * STACK;
        fibers[i].start.uc_stack.ss_size = STACK - 448 * (i % 128);     // not all on the same lines of the cache
        makecontext(&fibers[i].start, fiber_main, 0);
    }
    body = [](const void* k, void** a) { call((void (*)(A...))k, a, std::index_sequence_for<A...>()); };
    body_kernel = (const void*)kernel;
    body_args = args;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    Picker picker = {order, (uint64_t(seed) + 1) * 0x9E3779B97F4A7C15u};
    struct sigaction ours = {}, before[4];
    ours.sa_handler = memory_fault;
    ours.sa_flags = SA_NODEFER;  // the handler is left by a jump
    for (int i = 0; i < 4; i++) sigaction(FAULTS[i], &ours, &before[i]);
    unsigned first = order == 2 ? picker.draw(blocks) : 0;
    for (unsigned n = 0; n < blocks && !*error; n++) {
        unsigned b = order == 1 ? blocks - 1 - n : (first + n) % blocks;
        blockIdx = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        run_block(picker, shared_bytes);
    }
    for (int i = 0; i < 4; i++) sigaction(FAULTS[i], &before[i], nullptr);
    broken = *error;
    return broken ? error : nullptr;
}

static void* dynamic_shared() { return shared_memory; }

}  // namespace cuda_on_cpu

#define CUDA_KERNEL(name)                                                                                              \
    extern "C" const char* launch_##name(const unsigned* grid, const unsigned* block, unsigned shared, void** args,    \
                                         const int* sizes, int count, int order, unsigned seed) {                      \
        return cuda_on_cpu::launch(name, grid, block, shared, args, sizes, count, order, seed);                        \
    }

// ---------------------------------------------------------------------------------------------------------------
// Barriers, shuffles, votes
// ---------------------------------------------------------------------------------------------------------------

#define __syncthreads() cuda_on_cpu::block_barrier(__LINE__)
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { cuda_on_cpu::meet(mask, nullptr, nullptr); }

namespace cuda_on_cpu {
template <class T>
struct Shuffle {
    T value, result;
    int source;
};

template <class T>
static void shuffle_all(void** operands, unsigned lanes) {
    FOR_EACH_LANE(lanes) {
        Shuffle<T>& s = *(Shuffle<T>*)operands[lane];
        if (lanes >> s.source & 1) s.result = ((Shuffle<T>*)operands[s.source])->value;
        else memset((void*)&s.result, 0xFF, sizeof(T));  // the source lane takes no part: undefined in CUDA
    }
}

template <class T>
static T shuffle(unsigned mask, T value, int source) {
    Shuffle<T> s = {value, value, source};
    meet(mask, shuffle_all<T>, &s);
    return s.result;
}

static void vote_all(void** operands, unsigned lanes) {
    unsigned votes = 0;
    FOR_EACH_LANE(lanes) votes |= unsigned(*(unsigned*)operands[lane] != 0) << lane;
    FOR_EACH_LANE(lanes) *(unsigned*)operands[lane] = votes;
}
static inline int lane() { return self_number() % 32; }
}  // namespace cuda_on_cpu

template <class T>
static T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    int lane = cuda_on_cpu::lane();
    return cuda_on_cpu::shuffle(mask, value, (lane & ~(width - 1)) + (source & (width - 1)));
}
template <class T>
static T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    int lane = cuda_on_cpu::lane(), source = lane ^ bits;
    return cuda_on_cpu::shuffle(mask, value, (source & ~(width - 1)) > (lane & ~(width - 1)) ? lane : source);
}
static inline int __any_sync(unsigned mask, int predicate) {
    unsigned vote = predicate != 0;
    cuda_on_cpu::meet(mask, cuda_on_cpu::vote_all, &vote);
    return vote != 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Arithmetic that is built into CUDA
// ---------------------------------------------------------------------------------------------------------------

#define __expf inexact_exp
// Less exact than expf, as on a GPU; and on purpose less exact than there, so that tests in fp32 see it.
static inline float inexact_exp(float x) { return exp2f(1.4426f * x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

template <class To, class From>
static To cuda_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float x) { return cuda_bits<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return cuda_bits<float>(x); }
using std::max;
using std::min;

// ---------------------------------------------------------------------------------------------------------------
// The wrappers around PTX: these names and contracts are shared with the .cu files
// ---------------------------------------------------------------------------------------------------------------

// Two floats rounded to bf16 (nearest, ties to even) in one word, `low` in bits 0 to 15.      cvt.rn.bf16x2.f32
static inline unsigned pack_bf16(float low, float high) {
    unsigned word[2] = {__float_as_uint(low), __float_as_uint(high)};
    for (unsigned& w : word)
        w = (w & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : (w + 0x7FFFu + (w >> 16 & 1)) >> 16;
    return word[0] | word[1] << 16;
}

// A float, as bits, rounded to tf32: 10 bits of mantissa, nearest, ties away from zero.       cvt.rna.tf32.f32
static inline unsigned round_tf32(unsigned bits) {
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? bits : (bits + 0x1000u) & ~0x1FFFu;
}

namespace cuda_on_cpu {
struct MatrixRow {
    unsigned char row[16];  // what this lane's address held when the lane arrived
    unsigned* out;
};

// Matrix m's row r comes from lane 8m + r; lane l receives the two 16-bit elements (l/4, 2(l%4) and +1) of each matrix.
template <bool TRANSPOSE>
static void ldmatrix_all(void** operands, unsigned lanes) {
    if (lanes != 0xFFFFFFFFu) fail("ldmatrix needs all 32 lanes");
    for (int lane = 0; lane < 32; lane++)
        for (int m = 0; m < 4; m++) {
            unsigned short element[2];
            for (int e = 0; e < 2; e++) {
                int row = lane / 4, column = 2 * (lane % 4) + e;
                if (TRANSPOSE) std::swap(row, column);
                memcpy(&element[e], ((MatrixRow*)operands[8 * m + row])->row + 2 * column, 2);
            }
            ((MatrixRow*)operands[lane])->out[m] = element[0] | unsigned(element[1]) << 16;
        }
}

template <bool TRANSPOSE>
static void ldmatrix(unsigned* out, const void* row) {
    MatrixRow mine;
    if ((uintptr_t)row % 16) fail("ldmatrix: an address is not a multiple of 16 bytes");
    memcpy(mine.row, row, 16);
    mine.out = out;
    meet(0xFFFFFFFFu, ldmatrix_all<TRANSPOSE>, &mine);
}

struct MatrixProduct {
    float* c;
    const unsigned* a;
    unsigned b[2];
};

// One k-step of C (16 x 8) += A (16 x K) B (K x 8): 16 bytes of a row are 8 bf16 (K = 16) or 4 tf32 (K = 8).
template <int K>
static void mma_all(void** operands, unsigned lanes) {
    if (lanes != 0xFFFFFFFFu) fail("mma needs all 32 lanes");
    float A[16][K], B[K][8];
    for (int lane = 0; lane < 32; lane++) {
        MatrixProduct& p = *(MatrixProduct*)operands[lane];
        int g = lane / 4, t = lane % 4;
        for (int r = 0; r < 4; r++)  // register r of A: row g or g + 8, first or second half of the k's
            for (int e = 0; e < K / 8; e++) {
                int k = (r / 2) * (K / 2) + t * (K / 8) + e;
                A[g + 8 * (r % 2)][k] = __uint_as_float(K == 16 ? p.a[r] >> 16 * e << 16 : p.a[r] & ~0x1FFFu);
            }
        for (int r = 0; r < 2; r++)
            for (int e = 0; e < K / 8; e++) {
                int k = r * (K / 2) + t * (K / 8) + e;
                B[k][g] = __uint_as_float(K == 16 ? p.b[r] >> 16 * e << 16 : p.b[r] & ~0x1FFFu);
            }
    }
    float C[16][8] = {};
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < K; k++)
            for (int j = 0; j < 8; j++) C[i][j] += A[i][k] * B[k][j];
    for (int lane = 0; lane < 32; lane++)
        for (int r = 0; r < 4; r++)
            ((MatrixProduct*)operands[lane])->c[r] += C[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
}

static inline void copy_async(void* to, const void* from, bool valid, int bytes) {
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) fail("a misaligned copy of %d bytes", bytes);
    memset(to, 0xFF, bytes);
    self->copies.push_back({(char*)to, valid ? (const char*)from : nullptr, bytes});
}
}  // namespace cuda_on_cpu

// Four 8 x 8 matrices of 16-bit elements (or 8 x 4 of 32-bit ones); each lane gives the address of one 16-byte row.
static inline void ldmatrix_x4(unsigned* r, const void* row) { cuda_on_cpu::ldmatrix<false>(r, row); }
static inline void ldmatrix_x4_transposed(unsigned* r, const void* row) { cuda_on_cpu::ldmatrix<true>(r, row); }

// c (16 x 8, fp32) += a (16 x 16 bf16, or 16 x 8 tf32) b (16 x 8, or 8 x 8).        mma.sync m16n8k16 / m16n8k8
static inline void mma(float* c, const unsigned* a, const unsigned* b) {
    cuda_on_cpu::MatrixProduct p = {c, a, {b[0], b[1]}};
    cuda_on_cpu::meet(0xFFFFFFFFu, cuda_on_cpu::mma_all<BF16 ? 16 : 8>, &p);
}

// A copy of 16 or 4 bytes from global to shared memory; zeros where not `valid`.                    cp.async
template <int BYTES>
static void cp_async(void* to, const void* from, bool valid) { cuda_on_cpu::copy_async(to, from, valid, BYTES); }
// Waits until all copies that this thread has started have arrived.
static inline void cp_async_wait() {
    using namespace cuda_on_cpu;
    for (AsyncCopy& copy : self->copies)
        if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
        else memset(copy.to, 0, copy.bytes);
    self->unseen |= !self->copies.empty();
    self->copies.clear();
}

// Hopper's products: c (16 of 64 rows x 64) += a b, k = 16.               wgmma.mma_async m64n64k16
// They read shared memory by its addresses in bytes, of which bits 4 to 6 (the chunk) are XORed with bits 7 to 9 (the row).
static inline unsigned long long wgmma_tile(const char* rows) { return (uintptr_t)rows / 16; }

namespace cuda_on_cpu {
static inline const char* swizzled(unsigned long long tile, int row, int chunk) {
    uintptr_t at = 16 * tile + 128 * row + 16 * chunk;
    return (const char*)(at ^ (at >> 7 & 7) << 4);
}

template <bool TRANSPOSED>
static void multiply(float* c, const unsigned* a, unsigned long long b, bool add) {
    if (!self->begun) fail("an asynchronous product without a fence before it");
    for (Fiber& fiber : fibers)
        if (fiber.unseen) fail("an asynchronous product of what no fence has shown to it");
    size_t i = 0;
    while (i < self->products.size() && self->products[i].c != c) i++;
    if (i == self->products.size()) {
        self->products.push_back({c, {}});
        memcpy(self->products[i].values, c, sizeof self->products[i].values);
    }
    if (!add) memset(self->products[i].values, 0, sizeof self->products[i].values);
    int l = lane();
    for (int n = 0; n < 8; n += 2) {
        unsigned words[4];
        if (TRANSPOSED) ldmatrix<true>(words, swizzled(b, l % 16, n + l / 16));
        else ldmatrix<false>(words, swizzled(b, 8 * n + l % 8 + l / 16 * 8, l / 8 % 2));
        for (int half = 0; half < 2; half++) {
            MatrixProduct p = {self->products[i].values + 4 * (n + half), a, {words[2 * half], words[2 * half + 1]}};
            meet(0xFFFFFFFFu, mma_all<16>, &p);
        }
    }
    memset((void*)c, 0xFF, sizeof self->products[i].values);
}
}  // namespace cuda_on_cpu

// a: 64 rows in shared memory, and b 64 rows x 16 columns, transposed.
static inline void wgmma_abt(float* c, unsigned long long a, unsigned long long b, int add) {
    unsigned words[4];
    int lane = cuda_on_cpu::lane(), warp = cuda_on_cpu::self_number() / 32 % 4;
    cuda_on_cpu::ldmatrix<false>(words, cuda_on_cpu::swizzled(a, 16 * warp + lane % 16, lane / 16));
    cuda_on_cpu::multiply<false>(c, words, b, add);
}
// a: this warp's rows in registers, as of mma; b: 16 rows x 64 columns.
static inline void wgmma_ab(float* c, const unsigned* a, unsigned long long b) {
    cuda_on_cpu::multiply<true>(c, a, b, true);
}

static inline void wgmma_begin() { cuda_on_cpu::self->begun = true; }
static inline void fence_for_wgmma() { cuda_on_cpu::self->unseen = false; }
// The instruction waits for all products. Here only those of c arrive, so that a missing finish(C) is seen.
static inline void wgmma_wait(float* c) {
    using namespace cuda_on_cpu;
    for (size_t i = self->products.size(); i-- > 0;)
        if (self->products[i].c == c) {
            memcpy(c, self->products[i].values, sizeof self->products[i].values);
            self->products.erase(self->products.begin() + i);
        }
    self->begun = false;
}
