/* Optimizer updates in place on host memory. The formulas are the ones that runtime/optim/formula.py writes out: every
 * operation is one IEEE fp32 operation, in that order, so that the bits are those of runtime/optim/torch_kernels.py and of the
 * device's kernels. Contraction into fused multiply-adds or relaxed arithmetic would break that, hence the checks.
 *
 * Loaded with ctypes: no Python header, and the GIL is not held. */

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "relaxed arithmetic changes bits: build without -ffast-math"
#endif
#if FLT_EVAL_METHOD != 0
#error "fp32 operations have to be rounded to fp32, each"
#endif

/* One copy of each loop per instruction set, chosen when the library is loaded. The width of a vector changes no bits: a test
 * defines CLONES as nothing and builds for one instruction set after another. */
#if defined(CLONES)
#elif defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default"))) /* v4: 16-bit AVX-512 too */
#elif defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

enum layout { FP32, SPLIT_BF16, SPLIT_FP32, LAYOUTS }; /* SPLIT_*: by the gradient's dtype */
enum kind { ADAMW, ADAM, SGD, SGD_FIRST, NESTEROV, NESTEROV_FIRST, KINDS };

/* weight: fp32, or the bf16 planes of split weights, whose remainder is the int16 plane. grad: fp32 or bf16. first, second:
 * fp32 optimizer state; second is NULL where there is one. k: scalars in the order of runtime/optim/formula.py. */
typedef struct {
    void *weight;
    int16_t *remainder;
    const void *grad;
    float *first, *second;
    const float *k;
} Operands;

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Which NaN comes of an operation differs between processors; one is stored. */
INLINE float stored(float x) { return x == x ? x : float_of(0x7fc00000u); }

INLINE float weight_at(Operands o, int layout, int64_t i) {
    if (layout == FP32) return ((const float *)o.weight)[i];
    return float_of(((uint32_t)((const uint16_t *)o.weight)[i] << 16) + (uint32_t)(int32_t)o.remainder[i]);
}

INLINE float grad_at(Operands o, int layout, int64_t i) {
    if (layout == SPLIT_BF16) return float_of((uint32_t)((const uint16_t *)o.grad)[i] << 16);
    return ((const float *)o.grad)[i];
}

INLINE void set_weight(Operands o, int layout, int64_t i, float w) {
    if (layout == FP32) {
        ((float *)o.weight)[i] = stored(w);
    } else {
        uint32_t bits = bits_of(stored(w));
        ((uint16_t *)o.weight)[i] = (uint16_t)((bits + 0x8000u) >> 16);
        o.remainder[i] = (int16_t)(uint16_t)bits;
    }
}

INLINE void adam(Operands o, int layout, int decoupled, int64_t from, int64_t to) {
    const float scale = o.k[0], keep = o.k[1], decay = o.k[2], take1 = o.k[3], beta2 = o.k[4], take2 = o.k[5];
    const float size = o.k[6], rise = o.k[7], eps = o.k[8];
#pragma omp simd
    for (int64_t i = from; i < to; i++) {
        float w = weight_at(o, layout, i), g = grad_at(o, layout, i) * scale, m = o.first[i], v = o.second[i];
        if (!decoupled) g = g + decay * w;
        m = m + take1 * (g - m);
        v = beta2 * v + (take2 * g) * g;
        float d = sqrtf(v) * rise + eps;
        if (decoupled) w = keep * w;
        w = w - (size * m) / d;
        o.first[i] = stored(m);
        o.second[i] = stored(v);
        set_weight(o, layout, i, w);
    }
}

INLINE void sgd(Operands o, int layout, int nesterov, int first, int64_t from, int64_t to) {
    const float scale = o.k[0], decay = o.k[1], momentum = o.k[2], take = o.k[3], lr = o.k[4];
#pragma omp simd
    for (int64_t i = from; i < to; i++) {
        float w = weight_at(o, layout, i), g = grad_at(o, layout, i) * scale;
        g = g + decay * w;
        float b = first ? g : momentum * o.first[i] + take * g;
        float u = nesterov ? g + momentum * b : b;
        w = w - lr * u;
        o.first[i] = stored(b);
        set_weight(o, layout, i, w);
    }
}

/* The same loop for each layout. */
#define KERNELS(NAME, CALL, ...)                                                                          \
    CLONES static void NAME##_fp32(Operands o, int64_t from, int64_t to) { CALL(o, FP32, __VA_ARGS__); }  \
    CLONES static void NAME##_bf16(Operands o, int64_t from, int64_t to) { CALL(o, SPLIT_BF16, __VA_ARGS__); } \
    CLONES static void NAME##_split(Operands o, int64_t from, int64_t to) { CALL(o, SPLIT_FP32, __VA_ARGS__); }
#define LISTED(NAME) {NAME##_fp32, NAME##_bf16, NAME##_split}

KERNELS(adamw, adam, 1, from, to)
KERNELS(adam_l2, adam, 0, from, to)
KERNELS(momentum, sgd, 0, 0, from, to)
KERNELS(momentum_first, sgd, 0, 1, from, to)
KERNELS(nesterov, sgd, 1, 0, from, to)
KERNELS(nesterov_first, sgd, 1, 1, from, to)

static void (*const kernels[KINDS][LAYOUTS])(Operands, int64_t, int64_t) = {
    LISTED(adamw), LISTED(adam_l2), LISTED(momentum), LISTED(momentum_first), LISTED(nesterov), LISTED(nesterov_first),
};

/* The version of this interface and the formulas: a library that was built from another version is not used. */
EXPORT int mt_update_version(void) { return 1; }

/* kind, layout: as in the enums. n: elements of every tensor. Each thread has one run of whole cache lines. */
EXPORT void mt_update(int kind, int layout, int threads, int64_t n, void *weight, int16_t *remainder, const void *grad,
                      float *first, float *second, const float *k) {
    const Operands o = {weight, remainder, grad, first, second, k};
#pragma omp parallel num_threads(threads)
    {
        int64_t team = omp_get_num_threads();
        int64_t each = ((n + team - 1) / team + 63) / 64 * 64;
        int64_t from = omp_get_thread_num() * each, to = from + each < n ? from + each : n;
        if (from < to) kernels[kind][layout](o, from, to);
    }
}
