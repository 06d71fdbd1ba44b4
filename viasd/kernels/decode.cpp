// Decoding passes of few tokens on a CPU: a whole decoder layer, or the readout, in one call.
//
// A pass over few tokens reads every weight once and computes little with it, so it should take as long as reading takes.
// Run operation by operation it takes several times that on a small model: dispatch, allocation and a barrier for each.
//
// Two properties are worth more than the last percent of speed:
// - A row's result does not depend on the rows that travel with it. Every dot product is summed in one order whatever the
//   number of rows, of threads or of other sequences, and so is every softmax. A verifier pass over a block therefore gives
//   bit for bit the rows that one-token passes would have given, in bf16 too.
// - Values are rounded to the activations' type where the operations of transformers' own layers would round them.
//
// Vectors are the compiler's own (GCC and Clang), so the same source serves every instruction set. Loops over threads use
// OpenMP, whose runtime is the one that torch has loaded (see build.py), so that both share their threads.

#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Codes __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

static const int LANES = 16;
// Bytes by which weights are asked for before they are needed. The processor's own prefetching stops at every page, and two
// threads alone can't keep enough reads in flight: on a Sapphire Rapids products of one row take half the time this way.
static const int64_t AHEAD = 8192;
static const int64_t INNERMOST = 1 << 15;  // bytes of weights that stay in the innermost cache
static const int MOST_DIM = 512;  // of a head
static const int64_t MANY_QUERIES = 128;  // of a key head, that threads share by turns
static const int GROUP = 32;  // weights that share a scale in int4
#ifdef __AVX512F__
static const int MOST_ROWS = 6;  // 4 x 6 sums, 4 weights and an input fit into 32 registers
#else
static const int MOST_ROWS = 2;
#endif

#define INLINE static inline __attribute__((always_inline))

// ---- interface; mirrored in native.py -----------------------------------------------------------------------------------

enum Kind { FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };
enum Activation { SILU = 0, GELU_TANH = 1 };
enum Part { WHOLE = 0, ATTENTION = 1, MLP = 2 };

struct Matrix {
    const void* weight;  // [rows, cols]; int4: two codes a byte, the low half the first 16 of a group of 32
    const void* scale;   // int8: [rows]; int4: [rows, cols / 32]; in the activations' type
    const void* zero;    // int4: [rows, cols / 32]
    const void* bias;    // [rows] or null
    int64_t rows, cols;
    int64_t kind;
};

struct Norm {
    const float* weight;  // null: no norm here
    double eps;
    int64_t offset;  // scaled before rounding (Gemma), not after
};

struct Layer {
    Matrix qkv[3], out, gate, up, down;
    Norm before_attention, after_attention, before_mlp, after_mlp, query, key;
    int64_t width, inner, heads, kv_heads, head_dim;
    int64_t window;  // 0: none
    double scale, softcap;  // softcap 0: none
    int64_t activation, half;  // half: activations are bf16
};

struct Segment {  // tokens of one sequence
    void* keys;    // [kv_heads, capacity, head_dim]
    void* values;
    int64_t capacity, start, length;
};

struct Call {  // one layer after another
    const Layer* const* layers;  // [count]
    const void* input;  // [rows, width]
    void* output;
    const void* const* cos;  // [count], each [rows, head_dim]
    const void* const* sin;  // the same, first half negated
    const Segment* segments;  // [count, n_segments]
    int64_t count, n_segments, rows, threads, part;
};

// ---- numbers ------------------------------------------------------------------------------------------------------------

INLINE Floats load(const float* p) { Floats v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }
INLINE Floats all(float x) { return Floats{} + x; }

INLINE float widened(uint16_t x) { uint32_t w = uint32_t(x) << 16; float f; memcpy(&f, &w, 4); return f; }

INLINE Floats rounded(Floats v) {  // to the nearest bf16, ties to even; NaN stays NaN
    Words w = (Words)v;
    Words r = (w + 0x7fffu + ((w >> 16) & 1u)) & 0xffff0000u;
    return (Floats)((v == v) ? (Ints)r : (Ints)(w | 0x400000u));
}
INLINE float rounded(float x) {
    uint32_t w; memcpy(&w, &x, 4);
    w = x == x ? (w + 0x7fffu + ((w >> 16) & 1u)) & 0xffff0000u : w | 0x400000u;
    float f; memcpy(&f, &w, 4); return f;
}

// By an instruction where there is one: compilers take 16 bytes apart one by one when they are widened fourfold.
#ifdef __AVX512F__
INLINE Ints widened_codes(const int8_t* p) { return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE Words widened_codes(const uint8_t* p) { return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
#else
INLINE Ints widened_codes(const int8_t* p) { Codes c; memcpy(&c, p, sizeof c); return __builtin_convertvector(c, Ints); }
INLINE Words widened_codes(const uint8_t* p) { Bytes b; memcpy(&b, p, sizeof b); return __builtin_convertvector(b, Words); }
#endif

struct Float32 {
    typedef float T;
    INLINE Floats get(const T* p) { return load(p); }
    INLINE float get1(const T* p) { return *p; }
    INLINE void put1(T* p, float x) { *p = x; }
    INLINE void put(T* p, Floats v) { store(p, v); }
    INLINE Floats round(Floats v) { return v; }
    INLINE float round(float x) { return x; }
};
struct BFloat16 {
    typedef uint16_t T;
    INLINE Floats get(const T* p) {
        Halves h; memcpy(&h, p, sizeof h);
        return (Floats)(__builtin_convertvector(h, Words) << 16);
    }
    INLINE float get1(const T* p) { return widened(*p); }
    INLINE void put1(T* p, float x) { uint32_t w; float r = rounded(x); memcpy(&w, &r, 4); *p = uint16_t(w >> 16); }
    INLINE void put(T* p, Floats v) {
        Halves h = __builtin_convertvector((Words)rounded(v) >> 16, Halves);
        memcpy(p, &h, sizeof h);
    }
    INLINE Floats round(Floats v) { return rounded(v); }
    INLINE float round(float x) { return rounded(x); }
};
struct Signed8 {
    typedef int8_t T;
    INLINE Floats get(const T* p) { return __builtin_convertvector(widened_codes(p), Floats); }
};

// Sums of four vectors, each in the same order whatever the others hold.
INLINE void sums(Floats a, Floats b, Floats c, Floats d, float* out) {
    Floats ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
              + __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    Floats cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
              + __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    Floats s = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
             + __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    Eight half = __builtin_shufflevector(s, s, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(s, s, 8, 9, 10, 11, 12, 13, 14, 15);
    Four four = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
    memcpy(out, &four, sizeof four);
}
INLINE float sum(Floats a) { float out[4]; sums(a, Floats{}, Floats{}, Floats{}, out); return out[0]; }

INLINE Floats exponential(Floats x) {  // relative error below 2e-7; 0 below -87, NaN of NaN
    Ints tiny = x < -87.0f, number = x == x;
    Floats given = x;
    x = x > 88.0f ? all(88.0f) : x;
    Floats n = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Ints whole = (Ints)n - 0x4b400000;
    n -= 12582912.0f;
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Floats scaled = (Floats)((Ints)p + (whole << 23));
    return number ? (tiny ? Floats{} : scaled) : given;
}

INLINE Floats hyperbolic_tangent(Floats x) {
    Floats e = exponential((x < 0.0f ? x : -x) * 2.0f);  // of a negative number: can't overflow
    Floats t = (1.0f - e) / (1.0f + e);
    Floats small = x * (1.0f - x * x * (1.0f / 3.0f));  // where 1 - e cancels
    Floats size = x < 0.0f ? -x : x;
    Floats signed_t = x < 0.0f ? -t : t;
    return size < 0.01f ? small : signed_t;
}

INLINE Floats activated(Floats x, int64_t kind) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    Floats inner = 0.79788456f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
}

// ---- dot products: 4 matrix rows times M inputs ---------------------------------------------------------------------------

template <class W, int M>
INLINE void dots(const typename W::T* const w[4], const float* x, int64_t stride, int64_t k, int64_t ahead, float out[][4]) {
    Floats s[4][M];
    for (int r = 0; r < 4; r++) for (int m = 0; m < M; m++) s[r][m] = Floats{};
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        Floats a[4];
        for (int r = 0; r < 4; r++) {
            a[r] = W::get(w[r] + i);
            if (ahead) __builtin_prefetch((const char*)(w[r] + i) + ahead, 0, 2);
        }
        for (int m = 0; m < M; m++) {
            Floats b = load(x + m * stride + i);
            for (int r = 0; r < 4; r++) s[r][m] += a[r] * b;
        }
    }
    if (i < k) {  // inputs are padded with zeros, weights are not
        for (int r = 0; r < 4; r++) {
            typename W::T rest[LANES] = {};
            memcpy(rest, w[r] + i, (k - i) * sizeof rest[0]);
            Floats a = W::get(rest);
            for (int m = 0; m < M; m++) {
                Floats b{};
                memcpy(&b, x + m * stride + i, (k - i) * sizeof(float));
                s[r][m] += a * b;
            }
        }
    }
    for (int m = 0; m < M; m++) sums(s[0][m], s[1][m], s[2][m], s[3][m], out[m]);
}

// The same for int4: w = (code - 8) * scale + zero, so a group adds scale * sum(code x) + (zero - 8 scale) * sum(x).
template <class S, int M>
INLINE void dots4(const uint8_t* const w[4], const typename S::T* const scale[4], const typename S::T* const zero[4],
                  const float* x, int64_t stride, const float* group_sums, int64_t groups, int64_t ahead, float out[][4]) {
    Floats s[4][M];
    for (int r = 0; r < 4; r++) for (int m = 0; m < M; m++) s[r][m] = Floats{};
    for (int64_t g = 0; g < groups; g++) {
        for (int r = 0; r < 4; r++) {
            if (ahead) __builtin_prefetch(w[r] + g * 16 + ahead, 0, 2);
            Words both = widened_codes(w[r] + g * 16);
            Floats low = __builtin_convertvector((Ints)(both & 15u), Floats);
            Floats high = __builtin_convertvector((Ints)(both >> 4), Floats);
            Floats by = all(S::get1(scale[r] + g));
            for (int m = 0; m < M; m++) {
                const float* in = x + m * stride + g * GROUP;
                s[r][m] += by * (low * load(in) + high * load(in + LANES));
            }
        }
    }
    for (int r = 0; r < 4; r++) {
        for (int64_t g = 0; g < groups; g += LANES) {
            typename S::T a[LANES] = {}, b[LANES] = {};
            int64_t n = groups - g < LANES ? groups - g : LANES;
            memcpy(a, scale[r] + g, n * sizeof a[0]);
            memcpy(b, zero[r] + g, n * sizeof b[0]);
            Floats shift = S::get(b) - 8.0f * S::get(a);
            for (int m = 0; m < M; m++) {
                Floats total{};
                memcpy(&total, group_sums + m * groups + g, n * sizeof(float));
                s[r][m] += shift * total;
            }
        }
    }
    for (int m = 0; m < M; m++) sums(s[0][m], s[1][m], s[2][m], s[3][m], out[m]);
}

// What goes into a product: n rows, in the forms that the kinds of weights want.
struct Inputs {
    const float* rows;         // [n, stride], padded with zeros
    int64_t stride;
    const uint16_t* packed;    // the same in bf16
    const uint32_t* pairs;     // pairs of the same, for each 16 rows [k / 2, rows]: tiles; always [k / 2, 16]: columns
    const float* group_sums;   // of every 32 values, [n, k / 32]; int4

    Inputs from(int64_t row, int64_t k) const {
        return {rows + row * stride, stride, packed + row * stride, pairs + row * stride / 2, group_sums + row * (k / GROUP)};
    }
};

#ifdef __AVX512BF16__
// bf16 weights times bf16 inputs without widening either.
template <int M>
INLINE void packed_dots(const uint16_t* const w[4], const uint16_t* x, int64_t stride, int64_t k, int64_t ahead, float out[][4]) {
    __m512 s[4][M];
    for (int r = 0; r < 4; r++) for (int m = 0; m < M; m++) s[r][m] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 2 * LANES <= k; i += 2 * LANES) {
        __m512bh a[4];
        for (int r = 0; r < 4; r++) {
            a[r] = (__m512bh)_mm512_loadu_si512(w[r] + i);
            if (ahead) __builtin_prefetch((const char*)(w[r] + i) + ahead, 0, 2);
        }
        for (int m = 0; m < M; m++) {
            __m512bh b = (__m512bh)_mm512_loadu_si512(x + m * stride + i);
            for (int r = 0; r < 4; r++) s[r][m] = _mm512_dpbf16_ps(s[r][m], a[r], b);
        }
    }
    if (i < k) {  // inputs are padded with zeros, weights are not
        for (int r = 0; r < 4; r++) {
            uint16_t rest[2 * LANES] = {};
            memcpy(rest, w[r] + i, (k - i) * sizeof rest[0]);
            __m512bh a = (__m512bh)_mm512_loadu_si512(rest);
            for (int m = 0; m < M; m++)
                s[r][m] = _mm512_dpbf16_ps(s[r][m], a, (__m512bh)_mm512_loadu_si512(x + m * stride + i));
        }
    }
    for (int m = 0; m < M; m++) sums((Floats)s[0][m], (Floats)s[1][m], (Floats)s[2][m], (Floats)s[3][m], out[m]);
}
template <int M>
INLINE void dense(const uint16_t* const w[4], const Inputs& in, int64_t k, int64_t ahead, float out[][4]) {
    packed_dots<M>(w, in.packed, in.stride, k, ahead, out);
}
#else
template <int M>
INLINE void dense(const uint16_t* const w[4], const Inputs& in, int64_t k, int64_t ahead, float out[][4]) {
    dots<BFloat16, M>(w, in.rows, in.stride, k, ahead, out);
}
#endif
template <int M>
INLINE void dense(const float* const w[4], const Inputs& in, int64_t k, int64_t ahead, float out[][4]) {
    dots<Float32, M>(w, in.rows, in.stride, k, ahead, out);
}

struct Range { int64_t from, to; };
INLINE Range share(int64_t blocks, int64_t thread, int64_t threads) {
    return {blocks * thread / threads, blocks * (thread + 1) / threads};
}

// Where the threads of a team wait for each other. OpenMP's own barrier spins for milliseconds; on a machine that has other
// work too, a thread that lost its processor then keeps all others spinning, 6 times a layer. Here a thread soon goes to
// sleep, so that the one it waits for gets its processor.
struct Barrier {
    static const int SPINS = 2000;  // some tens of microseconds, longer than threads are apart on a machine of their own
    std::atomic<int> arrived{0}, phase{0}, asleep{0};

    void wait(int64_t threads) {
        const int now = phase.load();
        if (arrived.fetch_add(1) + 1 == threads) {
            arrived.store(0);
            phase.store(now + 1);
#ifdef __linux__
            // Who counts as asleep after this sees the new phase before it sleeps.
            if (asleep.load()) syscall(SYS_futex, &phase, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
            return;
        }
        for (int i = 0; i < SPINS; i++) {
            if (phase.load(std::memory_order_acquire) != now) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
        asleep.fetch_add(1);
        while (phase.load() == now) {
#ifdef __linux__
            syscall(SYS_futex, &phase, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
#endif
        }
        asleep.fetch_sub(1);
    }
};

struct Team {
    int64_t thread, threads;
    Barrier* barrier;

    void wait() const { if (threads > 1) barrier->wait(threads); }
};
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

template <class A, int M>
static void rows_times(const Matrix& matrix, const Range& blocks, int64_t ahead, const Inputs& in, float* out,
                       int64_t out_stride) {
    typedef typename A::T T;
    const int64_t k = matrix.cols, last = matrix.rows - 1, groups = k / GROUP;
    const T* scales = (const T*)matrix.scale;
    const T* zeros = (const T*)matrix.zero;
    const T* bias = (const T*)matrix.bias;
    for (int64_t block = blocks.from; block < blocks.to; block += 4) {
        int64_t index[4];
        float result[M][4];
        for (int r = 0; r < 4; r++) index[r] = block + r < last ? block + r : last;
        if (matrix.kind == INT4) {
            const uint8_t* w[4]; const T* a[4]; const T* b[4];
            for (int r = 0; r < 4; r++) {
                w[r] = (const uint8_t*)matrix.weight + index[r] * (k / 2);
                a[r] = scales + index[r] * groups;
                b[r] = zeros + index[r] * groups;
            }
            dots4<A, M>(w, a, b, in.rows, in.stride, in.group_sums, groups, ahead, result);
        } else if (matrix.kind == INT8) {
            const int8_t* w[4];
            for (int r = 0; r < 4; r++) w[r] = (const int8_t*)matrix.weight + index[r] * k;
            dots<Signed8, M>(w, in.rows, in.stride, k, ahead, result);
            for (int m = 0; m < M; m++) for (int r = 0; r < 4; r++) result[m][r] *= A::get1(scales + index[r]);
        } else {
            const T* w[4];
            for (int r = 0; r < 4; r++) w[r] = (const T*)matrix.weight + index[r] * k;
            dense<M>(w, in, k, ahead, result);
        }
        float add[4] = {};
        if (bias) for (int r = 0; r < 4; r++) add[r] = A::get1(bias + index[r]);
        const size_t bytes = (block + 3 <= last ? 4 : last - block + 1) * sizeof(float);
        for (int m = 0; m < M; m++) {
            Floats four{}, more{};
            memcpy(&four, result[m], sizeof result[m]);
            memcpy(&more, add, sizeof add);
            four = A::round(four + more);
            if (bytes == 4 * sizeof(float)) memcpy(out + m * out_stride + block, &four, 4 * sizeof(float));
            else memcpy(out + m * out_stride + block, &four, bytes);
        }
    }
}

// The rows of a matrix that a thread computes, in whole tiles, so that kinds of products agree on them.
INLINE Range rows_of(const Matrix& matrix, const Team& team) {
    Range mine = share((matrix.rows + 15) / 16, team.thread, team.threads);
    return {mine.from * 16, mine.to * 16 < matrix.rows ? mine.to * 16 : matrix.rows};
}

INLINE int64_t row_bytes(const Matrix& matrix) {
    return matrix.kind == INT4 ? matrix.cols / 2 : matrix.cols * (matrix.kind == FP32 ? 4 : matrix.kind == BF16 ? 2 : 1);
}

// ---- the same by tiles (AMX), where a product of 16 inputs takes no longer than one of a single input -----------------------

#ifdef TILES
static const int TILE = 16;  // rows of weights, and inputs

static bool tiles_permitted() {  // Linux keeps the state of tiles only for processes that ask
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return granted;
}
static bool by_tiles(const Matrix& matrix) {
    return matrix.kind == BF16 && matrix.rows >= TILE && matrix.cols % 32 == 0 && tiles_permitted();
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Four sums over every fourth 32 columns, because a tile's sum can only be added to every 52 cycles, but every 16 to another.
static void tile_rows(const uint16_t* weights, int64_t k, const uint32_t* pairs, int n, int64_t ahead, float* out) {
    const uint16_t* w = weights;
    const uint32_t* x = pairs;
    const int64_t row = k * 2, column = n * 4;
    float parts[4][TILE][TILE];
#define STEP(C, A, B) \
    for (int r = 0; ahead && r < TILE; r++) __builtin_prefetch((const char*)(w + r * k) + ahead, 0, 2); \
    _tile_loadd(A, w, row); _tile_loadd(B, x, column); _tile_dpbf16ps(C, A, B); w += 32; x += 16 * n
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    int64_t steps = k / 32;
    for (; steps >= 4; steps -= 4) { STEP(0, 4, 6); STEP(1, 5, 7); STEP(2, 4, 6); STEP(3, 5, 7); }
    if (steps > 0) { STEP(0, 4, 6); }
    if (steps > 1) { STEP(1, 5, 7); }
    if (steps > 2) { STEP(2, 4, 6); }
#undef STEP
    _tile_stored(0, parts[0], column); _tile_stored(1, parts[1], column);
    _tile_stored(2, parts[2], column); _tile_stored(3, parts[3], column);
    const float* p = parts[0][0];
    for (int i = 0; i < TILE * n; i++)
        out[i] = (p[i] + p[i + TILE * TILE]) + (p[i + 2 * TILE * TILE] + p[i + 3 * TILE * TILE]);
}

static void tile_product(const Matrix& matrix, const Team& team, const Inputs& inputs, int64_t n, float* out,
                         int64_t out_stride, const Matrix* next) {
    const int64_t k = matrix.cols;
    const uint16_t* bias = (const uint16_t*)matrix.bias;
    Range mine = rows_of(matrix, team);
    int shaped = 0;
    for (int64_t block = mine.from; block < mine.to; block += TILE) {
        // The last rows with some before them rather than fewer than a tile has.
        int64_t first = block + TILE <= matrix.rows ? block : matrix.rows - TILE;
        const uint16_t* weights = (const uint16_t*)matrix.weight + first * k;
        // The next block is asked for, after the last one the first of the next matrix.
        int64_t ahead = TILE * k * 2;
        if (block + TILE >= mine.to && next && next->kind == BF16)
            ahead = (const char*)((const uint16_t*)next->weight + rows_of(*next, team).from * next->cols) - (const char*)weights;
        for (int64_t m = 0; m < n; m += TILE) {
            int columns = int(n - m < TILE ? n - m : TILE);
            if (columns != shaped) {
                TileShapes shapes;
                for (int t = 0; t < 8; t++) {
                    shapes.rows[t] = TILE;
                    shapes.bytes[t] = uint16_t(t == 4 || t == 5 ? 64 : columns * 4);
                }
                _tile_loadconfig(&shapes);
                shaped = columns;
            }
            float result[TILE * TILE];
            tile_rows(weights, k, inputs.from(m, k).pairs, columns, m ? 0 : ahead, result);
            for (int r = int(block - first); r < TILE; r++) {
                float add = bias ? widened(bias[first + r]) : 0.0f;
                for (int c = 0; c < columns; c++)
                    out[(m + c) * out_stride + first + r] = rounded(result[r * columns + c] + add);
            }
        }
    }
    if (shaped) _tile_release();
}
#endif

// ---- the same with inputs side by side: many of them cost what their arithmetic costs ----------------------------------------

#ifdef __AVX512BF16__
static const int EIGHT = 8;  // weight rows at a time
// From so many inputs on: a product costs as much as one of 16. Fewer are bound by reading the weights either way.
static const int64_t MANY = 7;

static bool by_columns(const Matrix& matrix, int64_t n) {
    return n >= MANY && matrix.kind == BF16 && matrix.rows >= EIGHT && matrix.cols % 32 == 0;
}

INLINE void transposed(__m512i r[16]) {  // 16 x 16
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        __m512i even_low = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88), odd_low = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd);
        __m512i even_high = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88), odd_high = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
        r[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        r[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        r[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        r[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
}

// Up to 16 rows [columns, stride] -> pairs [16, k / 32, 16]: those of every lane of a vector of weights lie together.
static void pair_columns(const float* rows, int64_t stride, int64_t columns, int64_t k, uint32_t* pairs) {
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1)), upper = _mm512_set1_epi32(int(0xffff0000u));
    const int64_t steps = k / 32;
    for (int64_t i = 0; i < steps; i++) {
        __m512i block[16];
        for (int64_t c = 0; c < 16; c++) {
            block[c] = _mm512_setzero_si512();
            if (c >= columns) continue;
            __m512i a = _mm512_loadu_si512(rows + c * stride + 32 * i), b = _mm512_loadu_si512(rows + c * stride + 32 * i + LANES);
            __m512i even = _mm512_permutex2var_epi32(a, evens, b), odd = _mm512_permutex2var_epi32(a, odds, b);
            block[c] = _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, upper));
        }
        transposed(block);
        for (int64_t lane = 0; lane < 16; lane++) _mm512_storeu_si512(pairs + (lane * steps + i) * 16, block[lane]);
    }
}

// Sums over the pairs that lanes j and j + 2 of a vector of weights would have added up: R weight rows, C times 16 inputs.
// Meanwhile memory is asked for from `ahead` on, if that is not null, as much as a weight row.
template <int R, int C>
INLINE void two_lanes(const uint16_t* const* w, const uint32_t* const* x, int64_t steps, int j, const char* ahead,
                      __m512 out[R][C]) {
    __m512 a[R][C], b[R][C];
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) a[r][c] = b[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < steps; i++) {
        __m512bh first[C], second[C];
        for (int c = 0; c < C; c++) {
            first[c] = (__m512bh)_mm512_loadu_si512(x[c] + (j * steps + i) * 16);
            second[c] = (__m512bh)_mm512_loadu_si512(x[c] + ((j + 2) * steps + i) * 16);
        }
        if (ahead) __builtin_prefetch(ahead + 64 * i, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t pair, other;
            memcpy(&pair, w[r] + 32 * i + 2 * j, 4);
            memcpy(&other, w[r] + 32 * i + 2 * j + 4, 4);
            const __m512bh all = (__m512bh)_mm512_set1_epi32(pair), rest = (__m512bh)_mm512_set1_epi32(other);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                a[r][c] = _mm512_dpbf16_ps(a[r][c], first[c], all);
                b[r][c] = _mm512_dpbf16_ps(b[r][c], second[c], rest);
            }
        }
    }
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) out[r][c] = a[r][c] + b[r][c];
}

// Eight weight rows times C times 16 inputs, every sum in the order of `packed_dots` and `sums`, so that the bits are the same.
// Meanwhile as many rows are asked for, from `ahead` on, one after another: all at once they would be too many to be in flight.
template <int C>
static void column_rows(const uint16_t* const w[EIGHT], const uint32_t* const x[C], int64_t k, const char* ahead,
                        __m512 out[EIGHT][C]) {
    const int64_t steps = k / 32;
    const int R = EIGHT / C;  // rows at a time: sums of more would not fit into registers
    // Sums of lanes 4g and 4g + 2, and of 4g + 1 and 4g + 3, and of both.
    auto quarter = [&](int g, __m512 sum[EIGHT][C]) {
        for (int r = 0; r < EIGHT; r += R)
            two_lanes<R, C>(w + r, x, steps, 4 * g, ahead && !r ? ahead + 4 * g * k : nullptr, sum + r);
        for (int r = 0; r < EIGHT; r += R) {
            __m512 other[R][C];
            two_lanes<R, C>(w + r, x, steps, 4 * g + 1, ahead && !r ? ahead + (4 * g + 2) * k : nullptr, other);
            for (int i = 0; i < R; i++) for (int c = 0; c < C; c++) sum[r + i][c] += other[i][c];
        }
    };
    __m512 quarters[4][EIGHT][C];
    for (int g = 0; g < 4; g++) quarter(g, quarters[g]);
    for (int r = 0; r < EIGHT; r++)
        for (int c = 0; c < C; c++)
            out[r][c] = (quarters[0][r][c] + quarters[2][r][c]) + (quarters[1][r][c] + quarters[3][r][c]);
}

// A block of eight weight rows times C times 16 inputs from the m-th on -> out.
template <int C>
static void column_block(const Matrix& matrix, int64_t block, const Inputs& inputs, int64_t m, int64_t n, const char* ahead,
                         float* out, int64_t out_stride) {
    const int64_t k = matrix.cols;
    // The last rows with some before them rather than fewer than eight.
    const int64_t first = block + EIGHT <= matrix.rows ? block : matrix.rows - EIGHT;
    const uint16_t* w[EIGHT];
    for (int r = 0; r < EIGHT; r++) w[r] = (const uint16_t*)matrix.weight + (first + r) * k;
    const uint32_t* x[C];
    for (int c = 0; c < C; c++) x[c] = inputs.from(m + 16 * c, k).pairs;
    float add[LANES] = {};
    const uint16_t* bias = (const uint16_t*)matrix.bias;
    if (bias) for (int r = 0; r < EIGHT; r++) add[r] = widened(bias[first + r]);
    const __mmask16 kept = __mmask16((0xff << (block - first)) & 0xff);
    __m512 sums[EIGHT][C];
    column_rows<C>(w, x, k, ahead, sums);
    for (int c = 0; c < C; c++) {
        union { __m512 rows[16]; __m512i lanes[16]; };
        for (int r = 0; r < 16; r++) rows[r] = r < EIGHT ? sums[r][c] : _mm512_setzero_ps();
        transposed(lanes);
        for (int64_t i = 0; i < 16 && m + 16 * c + i < n; i++)
            _mm512_mask_storeu_ps(out + (m + 16 * c + i) * out_stride + first, kept, (__m512)rounded((Floats)rows[i] + load(add)));
    }
}

static void column_product(const Matrix& matrix, const Team& team, const Inputs& inputs, int64_t n, float* out,
                           int64_t out_stride, const Matrix* next) {
    const int64_t row = matrix.cols * 2;
    const Range mine = rows_of(matrix, team);
    for (int64_t block = mine.from; block < mine.to; block += EIGHT) {
        // Two blocks further on, where this matrix ends in the next one: a block takes about as long as memory takes to answer.
        const int64_t beyond = block + 2 * EIGHT - mine.to;
        const char* ahead = (const char*)matrix.weight + (block + 2 * EIGHT) * row;
        if (beyond >= 0 && next) ahead = (const char*)next->weight + rows_of(*next, team).from * row_bytes(*next) + beyond * row;
        // A weight that serves two vectors of inputs is loaded half as often, and loads are what there are too many of.
        for (int64_t m = 0; m < n; m += 32, ahead = nullptr) {
            if (m + 16 < n) column_block<2>(matrix, block, inputs, m, n, ahead, out, out_stride);
            else column_block<1>(matrix, block, inputs, m, n, ahead, out, out_stride);
        }
    }
}
#endif

// This thread's share of a matrix's rows times n inputs -> out[n, out_stride].
template <class A>
static void product(const Matrix& matrix, const Team& team, const Inputs& inputs, int64_t n, float* out, int64_t out_stride,
                    const Matrix* next = nullptr) {
#ifdef TILES
    if (by_tiles(matrix)) { tile_product(matrix, team, inputs, n, out, out_stride, next); return; }
#endif
#ifdef __AVX512BF16__
    if (by_columns(matrix, n)) { column_product(matrix, team, inputs, n, out, out_stride, next); return; }
#endif
    Range mine = rows_of(matrix, team);
    // As many blocks at a time as stay in the innermost cache, so that further inputs find them there.
    int64_t bytes = matrix.cols * 4 * (matrix.kind == FP32 ? 4 : 2);
    int64_t step = n <= MOST_ROWS ? most(4, mine.to - mine.from) : most(1, INNERMOST / bytes) * 4;
    for (int64_t from = mine.from; from < mine.to; from += step) {
        Range some = {from, from + step < mine.to ? from + step : mine.to};
        for (int64_t m = 0; m < n;) {
            Inputs in = inputs.from(m, matrix.cols);
            float* to = out + m * out_stride;
            int64_t left = n - m, ahead = m ? 0 : AHEAD;
#define ROWS(M) rows_times<A, M>(matrix, some, ahead, in, to, out_stride); m += M
            if (MOST_ROWS >= 6 && left >= 6) { ROWS(6); }
            else if (MOST_ROWS >= 6 && left == 5) { ROWS(5); }
            else if (MOST_ROWS >= 6 && left == 4) { ROWS(4); }
            else if (MOST_ROWS >= 6 && left == 3) { ROWS(3); }
            else if (left >= 2) { ROWS(2); }
            else { ROWS(1); }
#undef ROWS
        }
    }
    if (next) {  // what this thread reads next, while others finish and norms are computed
        const Range its = rows_of(*next, team);
        const int64_t row = row_bytes(*next), all_of_it = (its.to - its.from) * row;
        const char* from = (const char*)next->weight + its.from * row;
        for (int64_t at = 0; at < all_of_it && at < AHEAD; at += 64) __builtin_prefetch(from + at, 0, 2);
    }
}

static const Ints PLACES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// ---- parts of a layer -----------------------------------------------------------------------------------------------------

static int64_t padded(int64_t n) { return (n + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

template <class A>
static void widen(const void* from, float* to, int64_t n) {
    const typename A::T* p = (const typename A::T*)from;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, A::get(p + i));
    for (; i < n; i++) to[i] = A::get1(p + i);
}

template <class A>
static void narrow(const float* from, void* to, int64_t n) {
    typename A::T* p = (typename A::T*)to;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) A::put(p + i, load(from + i));
    for (; i < n; i++) A::put1(p + i, from[i]);
}

template <class A>
static void add(float* to, const float* from, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, A::round(load(to + i) + load(from + i)));
    for (; i < n; i++) to[i] = A::round(to[i] + from[i]);
}

template <class A>
static void normed(const Norm& norm, const float* x, float* y, int64_t n) {
    Floats squares{};
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) { Floats v = load(x + i); squares += v * v; }
    for (; i < n; i++) rest += x[i] * x[i];
    float by = 1.0f / std::sqrt((sum(squares) + rest) / float(n) + float(norm.eps));
    for (i = 0; i + LANES <= n; i += LANES) {
        Floats v = load(x + i) * by, w = load(norm.weight + i);
        store(y + i, norm.offset ? A::round(v * w) : A::round(A::round(v) * w));
    }
    for (; i < n; i++) {
        float v = x[i] * by, w = norm.weight[i];
        y[i] = norm.offset ? A::round(v * w) : A::round(A::round(v) * w);
    }
}

static void add_groups(const float* x, int64_t stride, int64_t n, int64_t k, float* out) {
    for (int64_t m = 0; m < n; m++)
        for (int64_t g = 0; g < k / GROUP; g++)
            out[m * (k / GROUP) + g] = sum(load(x + m * stride + g * GROUP) + load(x + m * stride + g * GROUP + LANES));
}

// Inputs of a product from rows [n, stride] padded with zeros; `spare` has room for `inputs_size(n, stride)` floats.
static int64_t inputs_size(int64_t n, int64_t stride) { return (n + 15) / 16 * 16 * (stride / 2) + n * (stride / GROUP); }

// Numbers that bf16 can hold, as it holds them; n is a multiple of 16.
INLINE void pack(const float* rows, int64_t n, uint16_t* packed) {
    for (int64_t i = 0; i < n; i += LANES) {
        Halves h = __builtin_convertvector((Words)load(rows + i) >> 16, Halves);
        memcpy(packed + i, &h, sizeof h);
    }
}

static Inputs prepared(const float* rows, int64_t stride, int64_t n, int64_t k, const Matrix& matrix, float* spare) {
    uint16_t* packed = (uint16_t*)spare;
    uint32_t* pairs = (uint32_t*)spare;
    float* group_sums = spare + (n + 15) / 16 * 16 * (stride / 2);
    Inputs made = {rows, stride, packed, pairs, group_sums};
    if (matrix.kind == INT4) add_groups(rows, stride, n, k, group_sums);
    if (matrix.kind != BF16) return made;
#ifdef TILES
    if (by_tiles(matrix)) {
        for (int64_t m = 0; m < n; m += TILE) {
            int64_t columns = n - m < TILE ? n - m : TILE;
            for (int64_t c = 0; c < columns; c++) {
                const uint32_t* row = (const uint32_t*)(rows + (m + c) * stride);
                uint32_t* to = pairs + m * stride / 2 + c;
                for (int64_t i = 0; i < k / 2; i++) to[i * columns] = (row[2 * i] >> 16) | (row[2 * i + 1] & 0xffff0000u);
            }
        }
        return made;
    }
#endif
#ifdef __AVX512BF16__
    if (by_columns(matrix, n)) {
        for (int64_t m = 0; m < n; m += 16)
            pair_columns(rows + m * stride, stride, n - m < 16 ? n - m : 16, k, pairs + m * stride / 2);
        return made;
    }
#endif
    pack(rows, n * stride, packed);
    return made;
}

// Whether two matrices of as many columns take the same inputs.
static bool alike(const Matrix& a, const Matrix& b, int64_t n) {
    bool same = a.kind == b.kind;
#ifdef TILES
    same = same && by_tiles(a) == by_tiles(b);
#endif
#ifdef __AVX512BF16__
    same = same && by_columns(a, n) == by_columns(b, n);
#endif
    return same;
}

template <class A>
static void rotated(float* head, const void* cos, const void* sin, int64_t dim, float* spare) {
    const typename A::T* c = (const typename A::T*)cos;
    const typename A::T* s = (const typename A::T*)sin;
    const int64_t half = dim / 2;
    if (half % LANES == 0) {
        for (int64_t i = 0; i < half; i += LANES) {
            Floats low = load(head + i), high = load(head + half + i);
            store(head + i, A::round(A::round(low * A::get(c + i)) + A::round(high * A::get(s + i))));
            store(head + half + i, A::round(A::round(high * A::get(c + half + i)) + A::round(low * A::get(s + half + i))));
        }
        return;
    }
    memcpy(spare, head, dim * sizeof(float));
    for (int64_t i = 0; i < dim; i++) {
        float other = spare[i < dim / 2 ? i + dim / 2 : i - dim / 2];
        head[i] = A::round(A::round(spare[i] * A::get1(c + i)) + A::round(other * A::get1(s + i)));
    }
}

template <class T>
INLINE void ask_for(const T* from, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + i, 0, 2);
}

// M queries of one key head, each over the keys that it sees -> its place in the output. Lanes are positions modulo 16, and
// a place that a query does not see adds 0 to its total and nothing to its values (0 times NaN is NaN), so its result does
// not depend on the queries beside it.
struct Query {
    const float* head;  // [dim]
    float* out;         // [dim]
    int64_t low, high;  // first and last position that it sees
};

// Keys and values of many sequences come from memory, in pieces too short for the processor to see coming: values are asked
// for while scores are computed, and the keys that are read next, `following`, while values are added up.
template <class A, int M>
static void attend(const Layer& layer, const Query* queries, const typename A::T* keys, const typename A::T* values,
                   const typename A::T* following, float* scores, int64_t stride) {
    typedef typename A::T T;
    const int64_t dim = layer.head_dim;
    const float scale = float(layer.scale), softcap = float(layer.softcap);
    int64_t first = queries[0].low, last = queries[0].high;
    for (int m = 1; m < M; m++) {
        first = queries[m].low < first ? queries[m].low : first;
        last = queries[m].high > last ? queries[m].high : last;
    }
    const int64_t from = first / LANES * LANES, n = last - from + 1;  // scores begin at position `from`
    const int64_t width = padded(dim);
    alignas(64) float heads[M * MOST_DIM];
    alignas(64) uint16_t packed[M * MOST_DIM];
    for (int m = 0; m < M; m++) {
        memcpy(heads + m * width, queries[m].head, dim * sizeof(float));
        for (int64_t i = dim; i < width; i++) heads[m * width + i] = 0.0f;
    }
    if (sizeof(T) == sizeof(uint16_t)) pack(heads, M * width, packed);
    const Inputs in = {heads, width, packed, nullptr, nullptr};
    const T* held = values + from * dim;
    for (int64_t j = 0; j < n; j += 4) {
        const T* w[4];
        ask_for(held + j * dim, 4 * dim);
        for (int r = 0; r < 4; r++) w[r] = keys + (from + (j + r < n ? j + r : n - 1)) * dim;
        float four[M][4];
        dense<M>(w, in, dim, 0, four);
        for (int m = 0; m < M; m++) memcpy(scores + m * stride + j, four[m], sizeof four[m]);
    }
    float by[M];
    int64_t lowest[M], highest[M], all_from = 0, all_to = n;  // places that every query sees
    for (int m = 0; m < M; m++) {
        float* s = scores + m * stride;
        lowest[m] = queries[m].low - from;
        highest[m] = queries[m].high - from;
        all_from = most(all_from, lowest[m]);
        all_to = highest[m] + 1 < all_to ? highest[m] + 1 : all_to;
        const int32_t low = int32_t(lowest[m]), high = int32_t(highest[m]);
        Floats top = all(-INFINITY);
        for (int64_t j = 0; j < n; j += LANES) {
            Floats v = load(s + j) * scale;
            if (softcap > 0) v = hyperbolic_tangent(v / softcap) * softcap;
            Ints place = PLACES + int32_t(j);
            v = (place >= low) & (place <= high) ? v : all(-INFINITY);
            store(s + j, v);
            top = v > top ? v : top;  // passes over NaN, which comes back with the exponentials
        }
        float most_of_all = top[0];
        for (int i = 1; i < LANES; i++) most_of_all = top[i] > most_of_all ? top[i] : most_of_all;
        Floats total{};
        for (int64_t j = 0; j < n; j += LANES) {
            Floats e = exponential(load(s + j) - most_of_all);
            store(s + j, e);
            total += e;
        }
        by[m] = 1.0f / sum(total);
    }
    auto seen = [&](int m, int64_t j) { return j >= lowest[m] && j <= highest[m]; };
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        Floats s[M][4];
        for (int m = 0; m < M; m++) for (int r = 0; r < 4; r++) s[m][r] = Floats{};
        for (int64_t j = 0; j < n; j++) {
            if (!i) ask_for(following + j * dim, dim);
            Floats v[4];
            for (int r = 0; r < 4; r++) v[r] = A::get(held + j * dim + i + r * LANES);
            if (j >= all_from && j < all_to) {
                for (int m = 0; m < M; m++) for (int r = 0; r < 4; r++) s[m][r] += scores[m * stride + j] * v[r];
            } else {
                for (int m = 0; m < M; m++)
                    if (seen(m, j)) for (int r = 0; r < 4; r++) s[m][r] += scores[m * stride + j] * v[r];
            }
        }
        for (int m = 0; m < M; m++)
            for (int r = 0; r < 4; r++) store(queries[m].out + i + r * LANES, A::round(s[m][r] * by[m]));
    }
    for (; i < dim; i += LANES) {  // the rest, by vectors too: a scalar loop's products and sums may be fused or not, by M
        const int64_t width = dim - i < LANES ? dim - i : LANES;
        for (int m = 0; m < M; m++) {
            Floats s{};
            for (int64_t j = lowest[m]; j <= highest[m]; j++) {
                T rest[LANES] = {};
                memcpy(rest, held + j * dim + i, width * sizeof rest[0]);
                s += scores[m * stride + j] * A::get(rest);
            }
            s = A::round(s * by[m]);
            memcpy(queries[m].out + i, &s, width * sizeof(float));
        }
    }
}

template <class A>
static void attend_some(const Layer& layer, const Query* queries, int count, const typename A::T* keys,
                        const typename A::T* values, const typename A::T* following, float* scores, int64_t stride) {
    switch (count) {
        case 1: return attend<A, 1>(layer, queries, keys, values, following, scores, stride);
        case 2: return attend<A, 2>(layer, queries, keys, values, following, scores, stride);
#ifdef __AVX512F__
        case 3: return attend<A, 3>(layer, queries, keys, values, following, scores, stride);
        case 4: return attend<A, 4>(layer, queries, keys, values, following, scores, stride);
        case 5: return attend<A, 5>(layer, queries, keys, values, following, scores, stride);
        case 6: return attend<A, 6>(layer, queries, keys, values, following, scores, stride);
#endif
    }
}

// ---- memory: one piece a calling thread, kept -----------------------------------------------------------------------------

struct Arena {
    char* memory = nullptr;
    size_t size = 0;
    ~Arena() { free(memory); }
    bool fit(size_t bytes) {
        if (bytes <= size) return true;
        free(memory);
        size = (bytes + 4095) / 4096 * 4096;
        memory = (char*)aligned_alloc(4096, size);
        if (!memory) size = 0;
        return memory != nullptr;
    }
};
static thread_local Arena arena;

struct Cutter {  // hands out floats of a piece of memory; with none, only counts
    float* at;
    size_t used = 0;
    float* take(int64_t n) {
        float* p = at ? at + used : nullptr;
        used += padded(n);
        return p;
    }
};

struct Shared {
    float *qkv, *attended, *projected, *inner, *gates;
    int64_t qkv_width;
};
struct Own {  // of one thread
    float *rows, *input, *inputs, *scores, *spare;
    int64_t scores_stride;
};

static Shared cut_shared(Cutter& cutter, const Layer& layer, const Call& call) {
    int64_t n = call.rows, d = padded(layer.width), q = (layer.heads + 2 * layer.kv_heads) * layer.head_dim;
    int64_t a = padded(layer.heads * layer.head_dim);
    int64_t i = padded(layer.inner);
    return {cutter.take(n * q), cutter.take(n * a), cutter.take(n * d), cutter.take(n * i), cutter.take(n * i), q};
}

static Own cut_own(Cutter& cutter, const Layer& layer, const Call& call, int64_t which) {
    int64_t n = call.rows, d = padded(layer.width), a = padded(layer.heads * layer.head_dim), longest = 0;
    const Segment* segments = call.segments + which * call.n_segments;
    for (int64_t s = 0; s < call.n_segments; s++) longest = most(longest, segments[s].start + segments[s].length);
    int64_t stride = padded(longest + 2 * LANES), widest = most(d, most(a, padded(layer.inner)));
    return {cutter.take(n * d), cutter.take(n * d), cutter.take(inputs_size(n, widest)), cutter.take(MOST_ROWS * stride),
            cutter.take(layer.head_dim), stride};
}

// One layer of a call. Every thread keeps all rows between layers, so that none waits for another to see them.
template <class A>
static void layer_of_thread(const Call& call, int64_t which, const Team& team, const Shared& shared, const Own& own) {
    typedef typename A::T T;
    const Layer& layer = *call.layers[which];
    const bool last = which + 1 == call.count;
    const Matrix* following = last ? nullptr : call.layers[which + 1]->qkv;
    const Segment* segments = call.segments + which * call.n_segments;
    const int64_t n = call.rows, width = layer.width, d = padded(width), dim = layer.head_dim;
    const int64_t heads = layer.heads, kv = layer.kv_heads, q = shared.qkv_width, a = padded(heads * dim);
    for (int64_t m = 0; m < n; m++) {
        if (!which) widen<A>((const T*)call.input + m * width, own.rows + m * d, width);
        for (int64_t i = width; i < d; i++) own.rows[m * d + i] = own.input[m * d + i] = 0.0f;
    }
    if (call.part != MLP) {
        for (int64_t m = 0; m < n; m++) normed<A>(layer.before_attention, own.rows + m * d, own.input + m * d, width);
        int64_t offset = 0;
        const Matrix* form = layer.qkv;  // for which inputs are prepared
        Inputs in = prepared(own.input, d, n, width, *form, own.inputs);
        for (const Matrix& matrix : layer.qkv) {
            if (!matrix.weight) continue;
            if (!alike(*form, matrix, n)) in = prepared(own.input, d, n, width, *(form = &matrix), own.inputs);
            const bool more = &matrix < layer.qkv + 2 && (&matrix)[1].weight;
            product<A>(matrix, team, in, n, shared.qkv + offset, q, more ? &matrix + 1 : &layer.out);
            offset += matrix.rows;
        }
        team.wait();
        // Heads: normed and rotated where they are; keys and values stored.
        int64_t row = 0;
        for (int64_t s = 0; s < call.n_segments; s++) {
            const Segment& segment = segments[s];
            for (int64_t i = 0; i < segment.length; i++, row++) {
                for (int64_t h = 0; h < heads + 2 * kv; h++) {
                    if ((row * (heads + 2 * kv) + h) % team.threads != team.thread) continue;
                    float* head = shared.qkv + row * q + h * dim;
                    if (h < heads + kv) {
                        const Norm& norm = h < heads ? layer.query : layer.key;
                        if (norm.weight) normed<A>(norm, head, head, dim);
                        rotated<A>(head, (const T*)call.cos[which] + row * dim, (const T*)call.sin[which] + row * dim, dim, own.spare);
                    }
                    if (h < heads) continue;
                    int64_t index = h < heads + kv ? h - heads : h - heads - kv;
                    T* held = (T*)(h < heads + kv ? segment.keys : segment.values);
                    narrow<A>(head, held + (index * segment.capacity + segment.start + i) * dim, dim);
                }
            }
        }
        team.wait();
        row = 0;
        const int64_t each = heads / kv;
        auto lowest = [&](int64_t position) { return layer.window ? most(0, position - layer.window + 1) : 0; };
        // Keys of a head from where the first query of a segment sees them.
        auto keys_of = [&](const Segment& segment, int64_t head) {
            return (const T*)segment.keys + (head * segment.capacity + lowest(segment.start) / LANES * LANES) * dim;
        };
        for (int64_t s = 0; s < call.n_segments; s++) {
            const Segment& segment = segments[s];
            const int64_t of_head = segment.length * each;  // queries, by key head, so that those beside each other share keys
            // Some of them -> how many those were.
            auto attend_from = [&](int64_t head, int64_t from, int64_t to, const T* following) {
                Query queries[MOST_ROWS];
                int count = 0;
                for (; from < to && count < MOST_ROWS; from++, count++) {
                    int64_t i = from / each, h = head * each + from % each, position = segment.start + i;
                    queries[count] = {shared.qkv + (row + i) * q + h * dim, shared.attended + (row + i) * a + h * dim,
                                      lowest(position), position};
                }
                const int64_t offset = head * segment.capacity * dim;
                attend_some<A>(layer, queries, count, (const T*)segment.keys + offset, (const T*)segment.values + offset,
                               following, own.scores, own.scores_stride);
                return count;
            };
            if (of_head >= MANY_QUERIES) {
                // Later queries see more keys, so threads take turns. Keys are soon in every thread's cache.
                for (int64_t head = 0; head < kv; head++)
                    for (int64_t at = team.thread * MOST_ROWS; at < of_head; at += team.threads * MOST_ROWS)
                        attend_from(head, at, of_head, keys_of(segment, head));
            } else {
                const Range mine = share(kv * of_head, team.thread, team.threads);
                for (int64_t at = mine.from; at < mine.to;) {
                    const int64_t head = at / of_head, end = (head + 1) * of_head < mine.to ? (head + 1) * of_head : mine.to;
                    const int64_t next = end - at < MOST_ROWS ? end : at + MOST_ROWS;
                    const T* following = keys_of(segment, next < mine.to ? next / of_head : head);
                    if (next == mine.to && s + 1 < call.n_segments && segments[s + 1].length) {
                        const int64_t its = segments[s + 1].length * each;
                        following = keys_of(segments[s + 1], share(kv * its, team.thread, team.threads).from / its);
                    }
                    at += attend_from(head, at - head * of_head, end - head * of_head, following);
                }
            }
            row += segment.length;
        }
        for (int64_t m = team.thread; m < n; m += team.threads)
            for (int64_t i = heads * dim; i < a; i++) shared.attended[m * a + i] = 0.0f;
        team.wait();
        in = prepared(shared.attended, a, n, heads * dim, layer.out, own.inputs);
        product<A>(layer.out, team, in, n, shared.projected, d, &layer.up);
        team.wait();
        for (int64_t m = 0; m < n; m++) {
            float* added = shared.projected + m * d;
            if (layer.after_attention.weight) {
                normed<A>(layer.after_attention, added, own.input + m * d, width);
                added = own.input + m * d;
            }
            add<A>(own.rows + m * d, added, width);
        }
    }
    if (call.part != ATTENTION) {
        const int64_t wide = padded(layer.inner);
        for (int64_t m = 0; m < n; m++) normed<A>(layer.before_mlp, own.rows + m * d, own.input + m * d, width);
        // A thread computes gate and up of the same places, so it can join them without waiting for others.
        const auto [from, to] = rows_of(layer.up, team);
        Inputs in = prepared(own.input, d, n, width, layer.up, own.inputs);
        product<A>(layer.up, team, in, n, shared.inner, wide, &layer.gate);
        if (!alike(layer.up, layer.gate, n)) in = prepared(own.input, d, n, width, layer.gate, own.inputs);
        product<A>(layer.gate, team, in, n, shared.gates, wide, &layer.down);
        for (int64_t m = 0; m < n; m++) {
            float* up = shared.inner + m * wide;
            const float* gate = shared.gates + m * wide;
            int64_t i = from;
            for (; i + LANES <= to; i += LANES)
                store(up + i, A::round(A::round(activated(load(gate + i), layer.activation)) * load(up + i)));
            for (; i < to; i++) up[i] = A::round(A::round(activated(all(gate[i]), layer.activation)[0]) * up[i]);
            if (to == layer.inner) for (i = layer.inner; i < wide; i++) up[i] = 0.0f;
        }
        team.wait();
        in = prepared(shared.inner, wide, n, layer.inner, layer.down, own.inputs);
        product<A>(layer.down, team, in, n, shared.projected, d, following);
        team.wait();
    }
    for (int64_t m = last ? team.thread : 0; m < n; m += last ? team.threads : 1) {
        float* rows = own.rows + m * d;
        if (call.part != ATTENTION) {
            float* added = shared.projected + m * d;
            if (layer.after_mlp.weight) {
                normed<A>(layer.after_mlp, added, own.input + m * d, width);
                added = own.input + m * d;
            }
            add<A>(rows, added, width);
        }
        if (last) narrow<A>(rows, (T*)call.output + m * width, width);
    }
}

struct Readout {
    Matrix head;
    Norm norm;
    int64_t width, half;
};

struct Product {  // one matrix times some rows
    Matrix matrix;
    const void* input;  // [rows, cols]
    void* output;       // [rows, rows of the matrix]
    int64_t rows, threads, half;
};

extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

// Runs a part for each thread of a team; there may be fewer than were asked for.
template <class F>
static void together(int64_t threads, F part) {
    Barrier barrier;
    if (threads <= 1) { part(Team{0, 1, &barrier}); return; }
#pragma omp parallel num_threads(int(threads))
    {
        const Team team{omp_get_thread_num(), omp_get_num_threads(), &barrier};
        part(team);
        team.wait();  // OpenMP waits here too, spinning
    }
}

template <class A>
static int run_layers(const Call& call) {
    size_t before = 0, each = 0;  // of the layer that needs most: what a thread keeps between layers must stay where it is
    for (int64_t l = 0; l < call.count; l++) {
        Cutter count{nullptr};
        cut_shared(count, *call.layers[l], call);
        size_t shared = count.used;
        cut_own(count, *call.layers[l], call, l);
        if (shared > before) before = shared;
        if (count.used - shared > each) each = count.used - shared;
    }
    if (!arena.fit((before + each * call.threads) * sizeof(float))) return 1;
    float* memory = (float*)arena.memory;
    together(call.threads, [&](const Team& team) {
        const float* projected = nullptr;
        for (int64_t l = 0; l < call.count; l++) {
            Cutter cutter{memory}, piece{memory + before + each * team.thread};
            const Shared shared = cut_shared(cutter, *call.layers[l], call);
            // Another thread may still read what the layer before projected: it must not lie where this one begins to write.
            if (l && shared.projected != projected) team.wait();
            projected = shared.projected;
            layer_of_thread<A>(call, l, team, shared, cut_own(piece, *call.layers[l], call, l));
        }
    });
    return 0;
}

template <class A>
static int run_product(const Product& call) {
    const int64_t n = call.rows, k = call.matrix.cols, stride = padded(k), total = call.matrix.rows;
    if (!arena.fit((padded(n * stride) + padded(inputs_size(n, stride)) + n * total) * sizeof(float))) return 1;
    Cutter cutter{(float*)arena.memory};
    float* input = cutter.take(n * stride);
    float* spare = cutter.take(inputs_size(n, stride));
    float* output = cutter.take(n * total);
    for (int64_t m = 0; m < n; m++) {
        widen<A>((const typename A::T*)call.input + m * k, input + m * stride, k);
        for (int64_t i = k; i < stride; i++) input[m * stride + i] = 0.0f;
    }
    Inputs in = prepared(input, stride, n, k, call.matrix, spare);
    together(call.threads, [&](const Team& team) { product<A>(call.matrix, team, in, n, output, total); });
    narrow<A>(output, call.output, n * total);
    return 0;
}

template <class A>
static int run_readout(const Readout& readout, const void* hidden, float* logits, int64_t n, int64_t threads) {
    const int64_t k = readout.width, stride = padded(k);
    if (!arena.fit((2 * padded(n * stride) + inputs_size(n, stride)) * sizeof(float))) return 1;
    Cutter cutter{(float*)arena.memory};
    float* rows = cutter.take(n * stride);
    float* input = cutter.take(n * stride);
    float* spare = cutter.take(inputs_size(n, stride));
    for (int64_t m = 0; m < n; m++) {
        widen<A>((const typename A::T*)hidden + m * k, rows + m * stride, k);
        normed<A>(readout.norm, rows + m * stride, input + m * stride, k);
        for (int64_t i = k; i < stride; i++) input[m * stride + i] = 0.0f;
    }
    Inputs in = prepared(input, stride, n, k, readout.head, spare);
    together(threads, [&](const Team& team) { product<A>(readout.head, team, in, n, logits, readout.head.rows); });
    return 0;
}

template <class A>
static void expand(const Matrix& matrix, const Team& team, void* out) {
    typedef typename A::T T;
    const int64_t k = matrix.cols, groups = k / GROUP;
    Range mine = share(matrix.rows, team.thread, team.threads);
    for (int64_t r = mine.from; r < mine.to; r++) {
        T* to = (T*)out + r * k;
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t* from = (const uint8_t*)matrix.weight + r * (k / 2) + g * 16;
            float scale = A::get1((const T*)matrix.scale + r * groups + g), zero = A::get1((const T*)matrix.zero + r * groups + g);
            for (int i = 0; i < 16; i++) {
                A::put1(to + g * GROUP + i, (float(from[i] & 15) - 8.0f) * scale + zero);
                A::put1(to + g * GROUP + 16 + i, (float(from[i] >> 4) - 8.0f) * scale + zero);
            }
        }
    }
}

// Whether many bf16 rows are multiplied as fast here as by a library made for that: the columns reach three quarters of what
// the processor can do. Of tiles nothing of the kind is known.
extern "C" int viasd_many() {
#if defined(TILES)
    return 0;
#elif defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}
// All return 0, or 1 where there was no memory.
extern "C" int viasd_layers(const Call* call) {
    return call->layers[0]->half ? run_layers<BFloat16>(*call) : run_layers<Float32>(*call);
}
extern "C" int viasd_product(const Product* call) {
    return call->half ? run_product<BFloat16>(*call) : run_product<Float32>(*call);
}
// Hidden states [n, width] -> logits [n, rows] as fp32, rounded to the activations' type.
extern "C" int viasd_readout(const Readout* readout, const void* hidden, float* logits, int64_t n, int64_t threads) {
    return readout->half ? run_readout<BFloat16>(*readout, hidden, logits, n, threads)
                         : run_readout<Float32>(*readout, hidden, logits, n, threads);
}
// Weights that int4 codes stand for, [rows, cols] in the activations' type.
extern "C" int viasd_expand(const Matrix* matrix, void* out, int64_t half, int64_t threads) {
    together(threads, [&](const Team& team) {
        if (half) expand<BFloat16>(*matrix, team, out);
        else expand<Float32>(*matrix, team, out);
    });
    return 0;
}
