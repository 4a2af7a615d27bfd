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
//     (order 1), or the first from a drawn one on (order 2). Lanes of a warp do NOT move in lockstep: they meet
//     only where the source makes them meet. So a missing barrier lets a thread read what is not there yet, or
//     overwrite what another still needs. Blocks run in ascending order (0), in descending order (1), or in
//     ascending order from a drawn one on (2).
//   * Shared memory is filled with NaN bytes (0xFF) before each block.
//   * The megabyte behind an array cannot be read or written. Before an array lie NaN bytes; whether a kernel has
//     written there is seen afterwards (cuda_helpers.guarded and check_guards).
//   * An asynchronous copy spoils its destination with NaN bytes when it is issued (it might land at once, under a
//     late reader) and lands only when its thread waits for it (it might be late, too).
//   * ldmatrix reads a lane's row when that lane arrives, before the other lanes have arrived.
// It asks for more than CUDA: shuffles, votes and __syncwarp are of whole warps, of which no lane has ended.
// What it cannot see:
//   * a race that none of the orders tried brings to light
//   * a lane that relies on a shuffle, a vote or a matrix instruction to order shared memory: those wait for all lanes
//     here, and hide a missing __syncwarp before
//   * a kernel that starts before the one ahead of it has ended, and reads what that writes without await_last: here
//     kernels run one after the other, and await_last does nothing
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <random>
#include <tuple>
#include <vector>

// ---------------------------------------------------------------------------------------------------------------
// Words of the language
// ---------------------------------------------------------------------------------------------------------------

#define CUDA_ON_CPU 1
#define __global__
#define __device__
#define __launch_bounds__(...)
// Static shared memory is one array for all blocks (they run one by one); the section's name lets us poison it.
// `extern __shared__ T name[];` is rewritten by cuda_helpers.py into a pointer to shared_memory, and each array of
// `__shared__ T name[n], ...;` into GUARDED_SHARED(T, name, name[n]): behind it lie bytes that must stay poisoned.  An
// array lies where its type's alignment allows it, and no better: one of floats at 4 bytes behind a multiple of 256, so that
// an access of 16 bytes to it faults.
#define __shared__ static __attribute__((section("cuda_shared"), aligned(256)))
#define GUARDED_SHARED(T, name, array)                                                                                \
    __shared__ struct {                                                                                               \
        char before[alignof(T)];                                                                                      \
        T array;                                                                                                      \
        char guard[GUARD];                                                                                            \
    } room_of_##name;                                                                                                 \
    static char* place_of_##name __attribute__((section("cuda_guards"), used)) = room_of_##name.guard;                \
    auto& name = room_of_##name.name;

extern "C" {
#define HIDDEN __attribute__((weak, visibility("hidden")))
extern HIDDEN char __start_cuda_shared[], __stop_cuda_shared[];
extern HIDDEN char *__start_cuda_guards[], *__stop_cuda_guards[];
}

namespace {

struct { unsigned x, y, z; } threadIdx, blockIdx, blockDim, gridDim;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
using std::max;
using std::min;

// ---------------------------------------------------------------------------------------------------------------
// Fibers, barriers and meetings of a warp
// ---------------------------------------------------------------------------------------------------------------

// Jumps from one stack to another by GCC's own words: they save three registers and let the compiler save what else is in
// use.  Those of the C library look for handlers to undo on the way, which takes longer than the rest of a switch.
typedef void* Jump[5];

// What the lanes of a warp do together once all have arrived.
typedef void (*Operation)(void** operands);
#define EACH_LANE for (int lane = 0; lane < 32; lane++)

struct AsyncCopy {
    char* to;
    const char* from;  // nullptr: zeros
    int bytes;
};

typedef std::array<float, 32> Product64;  // a lane's part of one of Hopper's products

struct Async {
    std::vector<AsyncCopy> copies;              // issued and not yet landed
    std::map<float*, Product64> products;       // likewise, by where they will land, which is NaN until then
    bool begun;                                 // a fence came before the next product
    bool unseen;                                // copies have landed that no fence has shown to asynchronous products
};

struct Fiber {
    ucontext_t start;               // used once, to enter the stack; every later switch is a jump
    bool started;
    Jump place;
    Async async;
};

struct Warp {
    int waiting;
    Operation operation;
    void* operands[32];             // what each waiting lane brought
};

const size_t STACK = 256 << 10, GUARD = 1024, MOST_SHARED = 227 << 10;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<char> alive, ready;     // of each thread of the block 1 or 0: it has not ended; it may run
volatile int running;               // threads that have not ended
int at_barrier;                     // those of them that wait at a barrier
int line_of_barrier;
Fiber* self;                        // the fiber that runs
Jump scheduler;
const char* volatile error;         // volatile, as running: other fibers change it, which the compiler does not see
int order;
std::minstd_rand dice;
std::function<void()> body;         // what a thread does
char stacks[1024][STACK];
alignas(1024) char shared_memory[MOST_SHARED + GUARD];      // the dynamic part, and bytes that must stay poisoned

int own_number() { return self - fibers.data(); }
int own_lane() { return own_number() % 32; }

// Functions of their own, as GCC asks: no jump stands in the function that it leads to.
[[noreturn]] __attribute__((noinline)) void to_scheduler() { __builtin_longjmp(scheduler, 1); }
[[noreturn]] __attribute__((noinline)) void to_fiber() { __builtin_longjmp(self->place, 1); }

[[noreturn]] void fail(const char* what) {
    error = what;
    to_scheduler();
}

// Leaves the running fiber; returns when the scheduler picks it again. Not inlined, because threadIdx changes in it.
__attribute__((noinline)) void yield() {
    if (__builtin_setjmp(self->place) == 0) to_scheduler();
    threadIdx.x = own_number();
}

void open_barrier_if_complete() {
    if (at_barrier < running) return;
    at_barrier = 0;
    ready = alive;
}

void block_barrier(int line) {
    if (at_barrier++ && line != line_of_barrier) fail("threads of one block wait at two different __syncthreads");
    line_of_barrier = line;
    ready[own_number()] = 0;
    open_barrier_if_complete();
    yield();
}

// All lanes of the warp arrive here, then `operation` runs once over what they brought, then all may go on.
void meet(Operation operation, void* operand, unsigned mask = 0xFFFFFFFF) {
    int number = own_number(), lane = own_lane();
    Warp& warp = warps[number / 32];
    if (mask != 0xFFFFFFFF) fail("a mask that does not name all lanes");
    if (warp.waiting && warp.operation != operation) fail("lanes of a warp meet at different operations");
    warp.operation = operation;
    warp.operands[lane] = operand;
    ready[number] = 0;
    if (++warp.waiting == 32) {
        operation(warp.operands);
        warp.waiting = 0;
        EACH_LANE ready[number - own_lane() + lane] = 1;
    }
    yield();
}

void fiber_main() {
    for (;;) {  // one turn per block
        int number = threadIdx.x = own_number();
        body();
        alive[number] = ready[number] = 0;
        running--;
        open_barrier_if_complete();
        yield();
    }
}

// A kernel touched memory that it does not own (cuda_helpers.guarded() ends every array where that is so), or an index
// is outside an array of known size, or an address misaligned (which -fsanitize=bounds,alignment turns into a trap).
void memory_fault(int) {
    fail("a read or a write outside an array, or at an address that its type does not allow");
}
const int FAULTS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};

bool written(const char* guard) {
    static const std::vector<char> poison(GUARD, 0xFF);
    return memcmp(guard, poison.data(), GUARD);
}

void run_block(size_t shared_bytes) {
    memset(shared_memory, 0xFF, shared_bytes + GUARD);
    memset(__start_cuda_shared, 0xFF, __stop_cuda_shared - __start_cuda_shared);
    running = fibers.size();
    alive.assign(running, 1);
    ready = alive;
    for (Fiber& fiber : fibers) fiber.async = {};
    while (running && !error) {
        char* all = ready.data();
        size_t count = ready.size(), first = order == 2 ? dice() % count : 0;
        void* next = order == 1 ? memrchr(all, 1, count) : memchr(all + first, 1, count - first);
        if (!next) next = memchr(all, 1, first);
        if (!next) {
            error = "deadlock: every thread waits, for others or for lanes that have ended";
            return;
        }
        self = &fibers[(char*)next - all];
        if (__builtin_setjmp(scheduler) == 0) {
            if (self->started) to_fiber();
            self->started = true;
            setcontext(&self->start);
        }
    }
    if (error) return;
    if (written(shared_memory + shared_bytes)) error = "a write past the dynamic shared memory";
    for (char** guard = __start_cuda_guards; guard < __stop_cuda_guards; guard++)
        if (written(*guard)) error = "a write past an array in shared memory";
}

// Returns nullptr, or what went wrong. args as for cuLaunchKernel: one pointer per parameter.
template <class... A>
const char* launch(void (*kernel)(A...), const unsigned* grid, unsigned threads, unsigned shared_bytes,
                   void** args, const int* sizes, int count, int order_of_threads) {
    if (std::vector<int>(sizes, sizes + count) != std::vector<int>{sizeof(A)...})
        return "not the number and the sizes of its arguments";
    if (threads % 32 || threads > 1024 || shared_bytes > MOST_SHARED)
        return "a block has at most 1024 threads, in whole warps, and 227 KB of dynamic shared memory";
    error = nullptr;
    order = order_of_threads;
    dice.seed(1);
    std::tuple<A...> values{*(A*)*args++...};
    body = [&] { std::apply(kernel, values); };
    warps.assign(threads / 32, {});
    fibers.clear();                     // after an error they stand in the midst of a kernel
    fibers.resize(threads);
    for (unsigned i = 0; i < threads; i++) {
        ucontext_t& start = fibers[i].start;
        getcontext(&start);
        start.uc_stack.ss_sp = stacks[i];
        start.uc_stack.ss_size = STACK - 448 * (i % 128);       // not all on the same lines of the cache
        makecontext(&start, fiber_main, 0);
    }
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim.x = threads;
    sighandler_t before[4];
    for (int i = 0; i < 4; i++) before[i] = sysv_signal(FAULTS[i], memory_fault);   // may be left by a jump
    unsigned blocks = grid[0] * grid[1] * grid[2], first = order == 2 ? dice() % blocks : 0;
    for (unsigned n = 0; n < blocks && !error; n++) {
        unsigned b = order == 1 ? blocks - 1 - n : (first + n) % blocks;
        blockIdx = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        run_block(shared_bytes);
    }
    for (int i = 0; i < 4; i++) signal(FAULTS[i], before[i]);
    return error;
}

#define CUDA_KERNEL(name)                                                                                              \
    extern "C" const char* launch_##name(const unsigned* grid, unsigned threads, unsigned shared, void** args,         \
                                         const int* sizes, int count, int order) {                                     \
        return launch(name, grid, threads, shared, args, sizes, count, order);                                         \
    }

// ---------------------------------------------------------------------------------------------------------------
// Barriers, shuffles, votes
// ---------------------------------------------------------------------------------------------------------------

#define __syncthreads() block_barrier(__LINE__)
void __syncwarp() { meet([](void**) {}, nullptr); }

template <class T>
struct Shuffle {
    T value, result;
    int source;
};

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
    Shuffle<T> mine = {value, value, source % 32};
    meet([](void** operands) {
        auto lanes = (Shuffle<T>**)operands;
        EACH_LANE lanes[lane]->result = lanes[lanes[lane]->source]->value;
    }, &mine, mask);
    return mine.result;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) { return __shfl_sync(mask, value, own_lane() ^ bits); }

int __any_sync(unsigned mask, int predicate) {
    meet([](void** operands) {
        auto votes = (int**)operands;
        int any = 0;
        EACH_LANE any |= *votes[lane];
        EACH_LANE *votes[lane] = any;
    }, &predicate, mask);
    return predicate;
}

// ---------------------------------------------------------------------------------------------------------------
// Arithmetic that is built into CUDA
// ---------------------------------------------------------------------------------------------------------------

#define __expf inexact_exp
// Less exact than expf, as on a GPU; and on purpose less exact than there, so that tests in fp32 see it.
float inexact_exp(float x) { return exp2f(1.4426f * x); }
float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// (g++ is told that one word may be read as two types.)
unsigned __float_as_uint(float x) { return *(unsigned*)&x; }
float __uint_as_float(unsigned x) { return *(float*)&x; }

// ---------------------------------------------------------------------------------------------------------------
// The wrappers around PTX: these names and contracts are shared with the .cu files
// ---------------------------------------------------------------------------------------------------------------

// Two floats rounded to bf16 (nearest, ties to even) in one word, `low` in bits 0 to 15.      cvt.rn.bf16x2.f32
unsigned pack_bf16(float low, float high) {
    unsigned word[2] = {__float_as_uint(low), __float_as_uint(high)};
    for (unsigned& w : word)
        w = (w & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : (w + 0x7FFFu + (w >> 16 & 1)) >> 16;
    return word[0] | word[1] << 16;
}

// A float, as bits, rounded to tf32: 10 bits of mantissa, nearest, ties away from zero.       cvt.rna.tf32.f32
unsigned round_tf32(unsigned bits) {
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? bits : (bits + 0x1000u) & ~0x1FFFu;
}

// Four 8 x 8 matrices of 16-bit elements (or 8 x 4 of 32-bit ones); each lane gives the address of one 16-byte row.
// Matrix m's row r comes from lane 8m + r; lane l receives the two 16-bit elements (l/4, 2(l%4) and +1) of each matrix.
struct MatrixRow {
    unsigned short numbers[8];  // what this lane's address held when the lane arrived
    unsigned* out;
};

template <bool TRANSPOSE>
void ldmatrix(unsigned* out, const void* row) {
    if ((uintptr_t)row % 16) fail("ldmatrix: an address is not a multiple of 16 bytes");
    MatrixRow mine;
    memcpy(mine.numbers, row, 16);
    mine.out = out;
    meet([](void** operands) {
        auto lanes = (MatrixRow**)operands;
        EACH_LANE for (int m = 0; m < 4; m++) {
            unsigned number[2];
            for (int e = 0; e < 2; e++) {
                int row = lane / 4, column = 2 * (lane % 4) + e;
                if (TRANSPOSE) std::swap(row, column);
                number[e] = lanes[8 * m + row]->numbers[column];
            }
            lanes[lane]->out[m] = number[0] | number[1] << 16;
        }
    }, &mine);
}

void ldmatrix_x4(unsigned* r, const void* row) { ldmatrix<false>(r, row); }
void ldmatrix_x4_transposed(unsigned* r, const void* row) { ldmatrix<true>(r, row); }

struct MatrixProduct {
    float* c;
    const unsigned *a, *b;
};

// c (16 x 8, fp32) += a (16 x K) b (K x 8): 16 bytes of a row are 8 bf16 (K = 16) or 4 tf32 (K = 8).
template <int K>
void multiply(float* c, const unsigned* a, const unsigned* b) {
    MatrixProduct mine = {c, a, b};
    meet([](void** operands) {
        auto lanes = (MatrixProduct**)operands;
        auto number = [](unsigned word, int e) { return __uint_as_float(K == 16 ? word >> 16 * e << 16 : word & ~0x1FFFu); };
        float A[16][K], B[K][8], C[16][8] = {};
        EACH_LANE
            for (int r = 0; r < 4; r++)  // register r of A: row g or g + 8, first or second half of the k's
                for (int e = 0; e < K / 8; e++) {
                    int g = lane / 4, k = lane % 4 * (K / 8) + e;
                    A[g + 8 * (r % 2)][r / 2 * (K / 2) + k] = number(lanes[lane]->a[r], e);
                    if (r < 2) B[r * (K / 2) + k][g] = number(lanes[lane]->b[r], e);
                }
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < K; k++)
                for (int j = 0; j < 8; j++) C[i][j] += A[i][k] * B[k][j];
        EACH_LANE
            for (int r = 0; r < 4; r++) lanes[lane]->c[r] += C[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
    }, &mine);
}

// mma.sync m16n8k16 of bf16, or m16n8k8 of tf32
void mma(float* c, const unsigned* a, const unsigned* b) { multiply<BF16 ? 16 : 8>(c, a, b); }

// A copy of 16 or 4 bytes from global to shared memory; zeros where not `valid`.                    cp.async
template <int BYTES>
void cp_async(void* to, const void* from, bool valid) {
    if ((uintptr_t)to % BYTES || (uintptr_t)from % BYTES) fail("a misaligned copy");
    memset(to, 0xFF, BYTES);
    self->async.copies.push_back({(char*)to, valid ? (const char*)from : nullptr, BYTES});
}

// Waits until all copies that this thread has started have arrived.
void cp_async_wait() {
    for (AsyncCopy& copy : self->async.copies) {
        if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
        else memset(copy.to, 0, copy.bytes);
        self->async.unseen = true;
    }
    self->async.copies.clear();
}

// Hopper's products: c (16 of 64 rows x 64) += a b, k = 16.               wgmma.mma_async m64n64k16
// They read shared memory by its addresses in bytes, of which bits 4 to 6 (the chunk) are XORed with bits 7 to 9 (the row).
unsigned long long wgmma_tile(const char* rows) { return (uintptr_t)rows / 16; }

const char* swizzled(unsigned long long tile, int row, int chunk) {
    uintptr_t at = 16 * tile + 128 * row + 16 * chunk;
    return (const char*)(at ^ (at >> 7 & 7) << 4);
}

template <bool TRANSPOSED>
void begin_product(float* c, const unsigned* a, unsigned long long b, bool add) {
    if (!self->async.begun) fail("an asynchronous product without a fence before it");
    for (Fiber& fiber : fibers)
        if (fiber.async.unseen) fail("an asynchronous product of what no fence has shown to it");
    bool first = !self->async.products.count(c);
    Product64& sum = self->async.products[c];
    if (first) memcpy(&sum, c, sizeof sum);
    if (!add) sum = {};
    int l = own_lane();
    for (int n = 0; n < 8; n += 2) {
        unsigned words[4];
        if (TRANSPOSED) ldmatrix<true>(words, swizzled(b, l % 16, n + l / 16));
        else ldmatrix<false>(words, swizzled(b, 8 * n + l % 8 + l / 16 * 8, l / 8 % 2));
        for (int half = 0; half < 2; half++) multiply<16>(&sum[4 * (n + half)], a, words + 2 * half);
    }
    memset(c, 0xFF, sizeof sum);
}

// a: 64 rows in shared memory, and b 64 rows x 16 columns, transposed.
void wgmma_abt(float* c, unsigned long long a, unsigned long long b, int add) {
    unsigned words[4];
    int warp = own_number() / 32 % 4;
    ldmatrix<false>(words, swizzled(a, 16 * warp + own_lane() % 16, own_lane() / 16));
    begin_product<false>(c, words, b, add);
}
// a: this warp's rows in registers, as of mma; b: 16 rows x 64 columns.
void wgmma_ab(float* c, const unsigned* a, unsigned long long b) { begin_product<true>(c, a, b, true); }

void wgmma_begin() { self->async.begun = true; }
void fence_for_wgmma() { self->async.unseen = false; }
// The instruction waits for all products. Here only those of c arrive, so that a missing finish(C) is seen.
void wgmma_wait(float* c) {
    auto landed = self->async.products.extract(c);
    if (landed) memcpy(c, &landed.mapped(), sizeof landed.mapped());
    self->async.begun = false;
}

}  // namespace
