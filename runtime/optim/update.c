/* Optimizer updates in place on host memory. The formulas are the ones that runtime/optim/formula.py writes out: every
 * operation is one IEEE fp32 operation, in that order, so that the bits are those of runtime/optim/torch_kernels.py and of the
 * device's kernels. Contraction into fused multiply-adds or relaxed arithmetic would break that, hence the checks.
 *
 * Beside them: what new host memory needs that Python cannot ask for.
 *
 * Loaded with ctypes: no Python header, and the GIL is not held. */

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

/* Whether some of the values has all bits of its exponent set, as an infinity and a NaN have: then that is the largest. */
#define SCAN(NAME, TYPE, EXPONENT)                                                       \
    CLONES static int NAME(const void *values, int64_t from, int64_t to) {               \
        const TYPE *v = values, all = EXPONENT;                                          \
        TYPE largest = 0;                                                                \
        _Pragma("omp simd reduction(max:largest)") for (int64_t i = from; i < to; i++) { \
            TYPE exponent = v[i] & all;                                                  \
            largest = exponent > largest ? exponent : largest;                           \
        }                                                                                \
        return largest == all;                                                           \
    }

SCAN(scan_bf16, uint16_t, 0x7f80)
SCAN(scan_fp16, uint16_t, 0x7c00)
SCAN(scan_fp32, uint32_t, 0x7f800000)
SCAN(scan_fp64, uint64_t, 0x7ff0000000000000)

enum dtype { BF16, FP16, FP32_VALUES, FP64, DTYPES };
static int (*const scans[DTYPES])(const void *, int64_t, int64_t) = {scan_bf16, scan_fp16, scan_fp32, scan_fp64};

/* Threads take chunks as they come free: one that the system stops, or that has other work beside, holds nobody up. */
#define CHUNK ((int64_t)1 << 15)

/* One update. kind, layout: as in the enums. n: elements of every tensor. The others: as in Operands. */
typedef struct {
    int64_t kind, layout, n;
    void *weight;
    int16_t *remainder;
    const void *grad;
    float *first, *second;
    float k[10];
} Task;

/* dtype: as in the enum. n values that lie one behind the other. */
typedef struct {
    int64_t dtype, n;
    const void *values;
} Values;

INLINE int64_t chunks_of(int64_t n) { return (n + CHUNK - 1) / CHUNK; }

/* Where a thread is: the part that holds its chunk, and the number of that part's first chunk. */
typedef struct {
    int64_t part, begin, from, to;
} Place;

/* Moves to the next chunk that no thread has. Returns 0 at the end. */
#define NEXT(PLACE, PARTS, COUNT, TAKEN)                                                                     \
    ({                                                                                                       \
        int64_t chunk = __atomic_fetch_add(&(TAKEN), 1, __ATOMIC_RELAXED);                                   \
        while ((PLACE).part < (COUNT) && chunk >= (PLACE).begin + chunks_of((PARTS)[(PLACE).part].n)) {      \
            (PLACE).begin += chunks_of((PARTS)[(PLACE).part].n);                                             \
            (PLACE).part++;                                                                                  \
        }                                                                                                    \
        if ((PLACE).part < (COUNT)) {                                                                        \
            int64_t n = (PARTS)[(PLACE).part].n;                                                             \
            (PLACE).from = (chunk - (PLACE).begin) * CHUNK;                                                  \
            (PLACE).to = (PLACE).from + CHUNK < n ? (PLACE).from + CHUNK : n;                                \
        }                                                                                                    \
        (PLACE).part < (COUNT);                                                                              \
    })

INLINE void lower(int64_t *least, int64_t value) {
    int64_t known = __atomic_load_n(least, __ATOMIC_RELAXED);
    while (value < known && !__atomic_compare_exchange_n(least, &known, value, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* The version of this interface and the formulas: a library that was built from another version is not used. */
EXPORT int mt_update_version(void) { return 2; }

/* Returns the first of count runs of values with one that is not finite; count if there is none. */
EXPORT int64_t mt_nonfinite(int threads, int64_t count, const Values *parts) {
    int64_t taken = 0, first = count;
#pragma omp parallel num_threads(threads)
    {
        Place at = {0, 0, 0, 0};
        while (NEXT(at, parts, count, taken)) {
            if (at.part < __atomic_load_n(&first, __ATOMIC_RELAXED) &&
                scans[parts[at.part].dtype](parts[at.part].values, at.from, at.to)) {
                lower(&first, at.part);
            }
        }
    }
    return first;
}

/* Updates all of count tasks and returns count. checked: returns the first task whose gradient has a value that is not finite,
 * if there is one, and then has written nothing. */
EXPORT int64_t mt_update(int threads, int checked, int64_t count, const Task *tasks) {
    int64_t scanned = 0, taken = 0, first = count;
#pragma omp parallel num_threads(threads)
    {
        if (checked) {
            Place at = {0, 0, 0, 0};
            while (NEXT(at, tasks, count, scanned)) {
                int dtype = tasks[at.part].layout == SPLIT_BF16 ? BF16 : FP32_VALUES;
                if (at.part < __atomic_load_n(&first, __ATOMIC_RELAXED) &&
                    scans[dtype](tasks[at.part].grad, at.from, at.to)) {
                    lower(&first, at.part);
                }
            }
#pragma omp barrier
        }
        if (__atomic_load_n(&first, __ATOMIC_RELAXED) == count) {
            Place at = {0, 0, 0, 0};
            while (NEXT(at, tasks, count, taken)) {
                const Task *t = &tasks[at.part];
                const Operands o = {t->weight, t->remainder, t->grad, t->first, t->second, t->k};
                kernels[t->kind][t->layout](o, at.from, at.to);
            }
        }
    }
    return first;
}

/* Asks for the pages of new memory to come from the nodes of a mask, by a mode of mbind(2). Returns 0 or the error's number. */
EXPORT int mt_place(void *memory, int64_t nbytes, int mode, uint64_t nodes) {
#if defined(__linux__) && defined(SYS_mbind)
    unsigned long mask = (unsigned long)nodes;
    return syscall(SYS_mbind, memory, (unsigned long)nbytes, mode, &mask, 8 * sizeof mask + 1, 0) ? errno : 0;
#else
    (void)memory, (void)nbytes, (void)mode, (void)nodes;
    return -1;
#endif
}

/* Reads and writes back a byte of every page of 4 KiB, so that all are there, zero if they are new. */
EXPORT void mt_touch(int threads, volatile char *memory, int64_t nbytes) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4096)
    for (int64_t at = 0; at < nbytes; at += 4096) memory[at] = memory[at];
}
