// Attention of mixed rows over the paged cache: a few queries at a time against tiles of 64 keys.
//
// One item of work is a block of queries of one row with all query heads that share a key-value head. Keys are turned
// into the layout of the register tile once per item and tile, so that decodes, chunks and whole prompts are one code.
// Tiles start at multiples of 64 positions and a masked key adds an exact zero: a token's result does not depend on
// which other queries or rows were computed with it.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "matrix.h"

// R rows, T tokens. query and output are [T, heads, head_size]; keys and values [blocks, block_size, kv_heads,
// head_size]; tables [R, table_width]; query_starts [R + 1]; context_lens [R]. `window` 0: none.
struct Attention {
    const void* query;
    const void* keys;
    const void* values;
    void* output;
    const int64_t* tables;
    const int64_t* query_starts;
    const int64_t* context_lens;
    int64_t num_rows, table_width, block_size, heads, kv_heads, head_size, window;
    float scale;
};

constexpr int KEYS = 64;
constexpr int KEY_VECTORS = KEYS / LANES;
// Query rows (queries times heads of a group) per item: enough that preparing a tile of keys is a small part.
constexpr int QUERY_ROWS = 96;

struct AttentionItem {
    int row;
    int first_query;
};

inline int queries_per_item(int64_t group) { return static_cast<int>(std::max<int64_t>(1, QUERY_ROWS / group)); }

inline std::vector<AttentionItem> attention_items(const Attention& a) {
    const int step = queries_per_item(a.heads / a.kv_heads);
    std::vector<AttentionItem> items;
    for (int row = 0; row < a.num_rows; ++row)
        for (int64_t query = 0; query < a.query_starts[row + 1] - a.query_starts[row]; query += step)
            items.push_back({row, static_cast<int>(query)});
    return items;
}

// Floats of working memory that one thread needs.
inline size_t attention_scratch(int64_t heads, int64_t kv_heads, int64_t head_size) {
    const size_t rows = queries_per_item(heads / kv_heads) * (heads / kv_heads);
    return KEYS * head_size * 2 + rows * (head_size * 2 + KEYS * 2 + 2);
}

// 16 words of each of 16 rows, transposed: word i of row j goes to to[i * stride + j]. Words past `count` are not read.
inline void transpose_words(const uint32_t* const* rows, int count, uint32_t* to, size_t stride) {
    __m512i r[LANES], t[LANES];
    const __mmask16 lanes = first_lanes(count);
    UNROLL for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(lanes, rows[i]);
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    UNROLL for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
    UNROLL for (int i = 0; i < 16; ++i)
        if (i < count) _mm512_storeu_si512(to + i * stride, r[i]);
}

// Values of two keys (Bf16) or of one (float) as the words of the register tile.
inline void pack_values(const Bf16* const* rows, int size, uint32_t* to) {
    for (int i = 0; i < size; i += LANES) {
        const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[0] + i)));
        const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[1] + i)));
        _mm512_storeu_si512(to + i, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

inline void pack_values(const float* const* rows, int size, uint32_t* to) {
    for (int i = 0; i < size; i += LANES) _mm512_storeu_si512(to + i, _mm512_loadu_si512(rows[0] + i));
}

// One row of scores [64] becomes weights: `visible` says which keys are seen. Returns the factor for what was summed
// so far; `top` and `sum` are the running maximum and sum of weights.
template <class T>
inline float soften(float* scores, uint64_t visible, __m512 scale, float& top, float& sum, T* weights) {
    __m512 s[KEY_VECTORS], best = _mm512_set1_ps(top);
    UNROLL for (int j = 0; j < KEY_VECTORS; ++j) {
        const __mmask16 lanes = static_cast<__mmask16>(visible >> (j * LANES));
        s[j] = _mm512_mul_ps(load(scores + j * LANES), scale);
        best = _mm512_mask_max_ps(best, lanes, best, s[j]);
    }
    const float highest = _mm512_reduce_max_ps(best);
    const float factor = top == highest ? 1.0f : _mm512_cvtss_f32(exp2(_mm512_set1_ps(top - highest)));
    __m512 total = _mm512_setzero_ps();
    UNROLL for (int j = 0; j < KEY_VECTORS; ++j) {
        const __mmask16 lanes = static_cast<__mmask16>(visible >> (j * LANES));
        const __m512 weight = _mm512_maskz_mov_ps(lanes, exp2(_mm512_sub_ps(s[j], _mm512_set1_ps(highest))));
        total = _mm512_add_ps(total, weight);
        store(weights + j * LANES, weight);
    }
    sum = sum * factor + _mm512_reduce_add_ps(total);
    top = highest;
    return factor;
}

// outputs [rows, size] += weights [rows, 64] times packed values [64, size], in columns of at most 64.
template <class T>
inline void add_values(int rows, const T* weights, const uint32_t* values, int size, float* outputs) {
    const int words = KEYS / PER_WORD<T>;
    const auto* a = reinterpret_cast<const uint32_t*>(weights);
    const auto part = [&]<int VECTORS>(int column) {
        product<T, VECTORS, false>(
            rows, a, words, values + column, size, words,
            [&](int row, __m512* sums) {
                UNROLL for (int j = 0; j < VECTORS; ++j) sums[j] = load(outputs + row * size + column + j * LANES);
            },
            [&](int row, const __m512* sums) {
                UNROLL for (int j = 0; j < VECTORS; ++j) store(outputs + row * size + column + j * LANES, sums[j]);
            });
    };
    int column = 0;
    for (; column + 4 * LANES <= size; column += 4 * LANES) part.template operator()<4>(column);
    for (; column < size; column += LANES) part.template operator()<1>(column);
}

template <class T>
void attend(const Attention& a, AttentionItem item, int kv_head, float* scratch) {
    static const T zeros[256] = {};
    const int group = static_cast<int>(a.heads / a.kv_heads), size = static_cast<int>(a.head_size);
    const int words = size / PER_WORD<T>;
    const int64_t first_token = a.query_starts[item.row] + item.first_query;
    const int queries = static_cast<int>(
        std::min<int64_t>(queries_per_item(group), a.query_starts[item.row + 1] - first_token));
    const int rows = queries * group, max_rows = queries_per_item(group) * group;
    auto* packed_keys = reinterpret_cast<uint32_t*>(scratch);
    uint32_t* packed_values = packed_keys + KEYS * size;
    float* outputs = reinterpret_cast<float*>(packed_values + KEYS * size);
    float* scores = outputs + max_rows * size;
    float* tops = scores + max_rows * KEYS;
    float* sums = tops + max_rows;
    T* query = reinterpret_cast<T*>(sums + max_rows);
    T* weights = query + max_rows * size;

    for (int row = 0; row < rows; ++row) {
        const size_t head = (first_token + row / group) * a.heads + kv_head * group + row % group;
        std::copy_n(static_cast<const T*>(a.query) + head * size, size, query + row * size);
        tops[row] = -std::numeric_limits<float>::infinity();
        sums[row] = 0;
    }
    std::fill_n(outputs, rows * size, 0.0f);

    const int64_t* table = a.tables + item.row * a.table_width;
    const int64_t end = a.context_lens[item.row] - (a.query_starts[item.row + 1] - first_token) + queries;
    const int64_t first_position = end - queries;
    const int64_t first_seen = a.window ? std::max<int64_t>(0, first_position - a.window + 1) : 0;
    const __m512 scale = _mm512_set1_ps(a.scale * LOG2_E);
    const uint32_t* key_places[2][KEYS];
    const T* value_places[2][KEYS];
    // The cache lines of a tile are scattered: they are asked for while the tile before them is worked on.
    const auto locate = [&](int64_t start, int side) {
        int64_t column = start / a.block_size, offset = start % a.block_size;
        for (int i = 0; i < KEYS; ++i) {
            // What lies before the window may be anybody's by now, and past the end is nobody's yet.
            const bool is_read = start + i >= first_seen && start + i < end;
            const size_t place = is_read ? (table[column] * a.block_size + offset) * a.kv_heads + kv_head : 0;
            if (++offset == a.block_size) offset = 0, ++column;
            const T* key = is_read ? static_cast<const T*>(a.keys) + place * size : zeros;
            const T* value = is_read ? static_cast<const T*>(a.values) + place * size : zeros;
            key_places[side][i] = reinterpret_cast<const uint32_t*>(key);
            value_places[side][i] = value;
            for (int line = 0; line < size; line += 64 / static_cast<int>(sizeof(T))) {
                _mm_prefetch(reinterpret_cast<const char*>(key + line), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(value + line), _MM_HINT_T0);
            }
        }
    };
    int side = 0;
    locate(first_seen / KEYS * KEYS, side);
    for (int64_t start = first_seen / KEYS * KEYS; start < end; start += KEYS, side ^= 1) {
        const uint32_t* const* key_rows = key_places[side];
        const T* const* value_rows = value_places[side];
        if (start + KEYS < end) locate(start + KEYS, side ^ 1);
        for (int key = 0; key < KEYS; key += LANES)
            for (int word = 0; word < words; word += LANES) {
                const uint32_t* from[LANES];
                UNROLL for (int i = 0; i < LANES; ++i) from[i] = key_rows[key + i] + word;
                transpose_words(from, words - word, packed_keys + word * KEYS + key, KEYS);
            }
        for (int key = 0; key < KEYS; key += PER_WORD<T>)
            pack_values(value_rows + key, size, packed_values + key / PER_WORD<T> * size);
        product<T, KEY_VECTORS, false>(
            rows, reinterpret_cast<const uint32_t*>(query), words, packed_keys, KEYS, words,
            [](int, __m512* s) { UNROLL for (int j = 0; j < KEY_VECTORS; ++j) s[j] = _mm512_setzero_ps(); },
            [&](int row, const __m512* s) {
                UNROLL for (int j = 0; j < KEY_VECTORS; ++j) store(scores + row * KEYS + j * LANES, s[j]);
            });
        for (int row = 0; row < rows; ++row) {
            const int64_t position = first_position + row / group;
            const int last = static_cast<int>(std::clamp<int64_t>(position + 1 - start, 0, KEYS));
            const int64_t before = a.window ? position - a.window + 1 - start : 0;
            const int first = static_cast<int>(std::clamp<int64_t>(before, 0, KEYS));
            const uint64_t before_last = last == KEYS ? ~0ull : (1ull << last) - 1;
            const uint64_t visible = first == KEYS ? 0 : before_last & (~0ull << first);
            if (visible == 0) {
                std::fill_n(weights + row * KEYS, KEYS, T{});
                continue;
            }
            const float factor =
                soften(scores + row * KEYS, visible, scale, tops[row], sums[row], weights + row * KEYS);
            if (factor != 1.0f)
                for (float *to = outputs + row * size, *last_to = to + size; to < last_to; to += LANES)
                    store(to, _mm512_mul_ps(load(to), _mm512_set1_ps(factor)));
        }
        add_values(rows, weights, packed_values, size, outputs);
    }
    for (int row = 0; row < rows; ++row) {
        const size_t head = (first_token + row / group) * a.heads + kv_head * group + row % group;
        T* to = static_cast<T*>(a.output) + head * size;
        const __m512 sum = _mm512_set1_ps(sums[row]);
        for (int i = 0; i < size; i += LANES) store(to + i, _mm512_div_ps(load(outputs + row * size + i), sum));
    }
}
