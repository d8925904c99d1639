/* The inner loops of packed images on a CPU: rows of bytes from anywhere, copied or made into floats. Called by pixels.py.
 *
 * Rows of a few KB from random places arrive at half the speed of a copy in order, as the processor sees too late where the next one
 * lies. So the lines of a row to come are asked for while those of the present one are used. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))  /* the best for the CPU it is loaded on */
#else
#define EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum {
    LINE = 64,    /* bytes of a cache line */
    AHEAD = 3,    /* rows */
    LOOK = 8192,  /* bytes of a row that are asked for; the rest comes by itself, as it is read in order */
    BLOCK = 16,   /* pixels, a vector's worth */
};

/* Of which source this library is made: one that is out of date is not used. */
const char *source(void) { return SOURCE; }

INLINE void ask_for(const uint8_t *row, int64_t from, int64_t to) {
    for (int64_t at = (from + LINE - 1) / LINE * LINE; at < to && at < LOOK; at += LINE) __builtin_prefetch(row + at);
}

/* The first of `count` numbers that is no row, or -1. */
INLINE int64_t outside(const int64_t *chosen, int64_t count, int64_t total) {
    for (int64_t k = 0; k < count; k++)
        if (chosen[k] < 0 || chosen[k] >= total) return k;
    return -1;
}

INLINE const uint8_t *later(const uint8_t *rows, int64_t width, const int64_t *chosen, int64_t count, int64_t k) {
    return rows + width * chosen[k + AHEAD < count ? k + AHEAD : count - 1];
}

/* Copies rows of `width` bytes. Returns the place of a number that is no row of `total`, and does nothing then, or -1. */
EACH_CPU
int64_t gather(uint8_t *restrict out, const uint8_t *restrict rows, int64_t total, int64_t width, const int64_t *restrict chosen,
               int64_t count) {
    int64_t wrong = outside(chosen, count, total);
    if (wrong >= 0) return wrong;
    for (int64_t k = 0; k < count; k++, out += width) {
        const uint8_t *row = rows + width * chosen[k], *next = later(rows, width, chosen, count, k);
        int64_t at = 0;
        for (; at + LINE <= width; at += LINE) {
            if (at < LOOK) __builtin_prefetch(next + at);
            memcpy(out + at, row + at, LINE);
        }
        memcpy(out + at, row + at, width - at);
    }
    return -1;
}

/* Two roundings, as in torch: the compiler is told not to fuse them. */
INLINE float level(uint8_t pixel, float scale, float bias) { return pixel * scale + bias; }

INLINE void block(float *restrict out, const uint8_t *restrict in, int mirrored, float scale, float bias) {
    for (int i = 0; i < BLOCK; i++) out[i] = level(in[mirrored ? BLOCK - 1 - i : i], scale, bias);
}

/* A line of pixels. Where it is no whole number of blocks, the last block overlaps the one before. */
INLINE void line(float *restrict out, const uint8_t *restrict in, int64_t wide, int mirrored, float scale, float bias) {
    int64_t x = 0;
    if (wide < BLOCK) {
        for (; x < wide; x++) out[x] = level(in[mirrored ? wide - 1 - x : x], scale, bias);
        return;
    }
    for (; x + BLOCK <= wide; x += BLOCK) block(out + x, mirrored ? in + wide - x - BLOCK : in + x, mirrored, scale, bias);
    if (x < wide) block(out + wide - BLOCK, mirrored ? in : in + wide - BLOCK, mirrored, scale, bias);
}

INLINE void fill(float *restrict out, int64_t from, int64_t to, float value) {
    for (int64_t x = from; x < to; x++) out[x] = value;
}

/* Makes images (channels, tall, wide) of rows: each mirrored or not, set into a border of zeros, cut out of that at its own corner
 * (down, right: 0 to 2 * border) and normalised. `moves` is (3, count): down, right, mirrored. Returns as gather does. */
EACH_CPU
int64_t images(float *restrict out, const uint8_t *restrict rows, int64_t total, int64_t width, const int64_t *restrict chosen,
               int64_t count, const int64_t *restrict moves, int64_t border, int64_t channels, int64_t tall, int64_t wide,
               const float *restrict scale, const float *restrict bias) {
    int64_t wrong = outside(chosen, count, total);
    if (wrong >= 0) return wrong;
    for (int64_t k = 0; k < count; k++) {
        const uint8_t *row = rows + width * chosen[k], *next = later(rows, width, chosen, count, k);
        int64_t down = moves[k] - border, right = moves[count + k] - border, mirrored = moves[2 * count + k];
        int64_t left = right < 0 ? (-right < wide ? -right : wide) : 0, end = right > 0 ? (right < wide ? wide - right : 0) : wide;
        for (int64_t c = 0; c < channels; c++) {
            float nothing = level(0, scale[c], bias[c]);
            for (int64_t y = 0; y < tall; y++, out += wide) {
                ask_for(next, (c * tall + y) * wide, (c * tall + y + 1) * wide);
                if (y + down < 0 || y + down >= tall || left >= end) {
                    fill(out, 0, wide, nothing);
                    continue;
                }
                const uint8_t *in = row + (c * tall + y + down) * wide;
                fill(out, 0, left, nothing);
                if (mirrored) line(out + left, in + wide - right - end, end - left, 1, scale[c], bias[c]);
                else line(out + left, in + right + left, end - left, 0, scale[c], bias[c]);
                fill(out, end, wide, nothing);
            }
        }
    }
    return -1;
}
