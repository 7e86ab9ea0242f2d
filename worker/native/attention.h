// Attention of mixed rows over the paged cache: a few queries at a time against tiles of 64 keys.
//
// One item of work is a block of queries of one row with all query heads that share a key-value head: decodes, chunks
// and whole prompts are one code. Blocks of a multiple of 16 tokens are read where they are, others are gathered first.
// Tiles start at multiples of 64 positions and a masked key adds an exact zero: a token's result does not depend on
// which other queries or rows were computed with it.
#pragma once

#include <limits>

#include "key_tiles.h"
#include "matrix.h"

// Floats of working memory that one thread needs.
inline size_t attention_scratch(int64_t heads, int64_t kv_heads, int64_t head_size) {
    const size_t rows = queries_per_item(heads / kv_heads) * (heads / kv_heads);
    return KEYS * head_size * 2 + rows * (head_size * 2 + KEYS * 2 + 2);
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

// outputs [rows, size] += weights [rows, 64] times values [64, size], in columns of at most 64. `next` is fetched.
template <class T>
inline void add_values(int rows, const T* weights, const KeyTile<T>& tile, const KeyTile<T>& next, float* outputs) {
    constexpr int words = KEYS / PER_WORD<T>;
    const int size = static_cast<int>(tile.size);
    const auto* a = reinterpret_cast<const uint32_t*>(weights);
    const auto part = [&]<int VECTORS>(int column) {
        const typename KeyTile<T>::Values columns{tile, column}, next_columns{next, column};
        product<T, VECTORS>(
            rows, a, words, columns, words,
            [&](int row, __m512* sums) {
                UNROLL for (int j = 0; j < VECTORS; ++j) sums[j] = load(outputs + row * size + column + j * LANES);
            },
            [&](int row, const __m512* sums) {
                UNROLL for (int j = 0; j < VECTORS; ++j) store(outputs + row * size + column + j * LANES, sums[j]);
            },
            [&](int i) {
                if (i < words) UNROLL for (int j = 0; j < VECTORS; ++j) fetch_line(next_columns(i, j));
            });
    };
    int column = 0;
    for (; column + 4 * LANES <= size; column += 4 * LANES) part.template operator()<4>(column);
    for (; column < size; column += LANES) part.template operator()<1>(column);
}

// What one head's queries need while keys pass by; `rows` rows of each.
template <class T>
struct Running {
    T* query;        // [rows, head_size]
    float* outputs;  // [rows, head_size]
    float* tops;     // [rows]
    float* sums;     // [rows]
};

// One tile of keys for the rows of one head.
template <class T>
inline void attend_tile(const Attention& a, const Span& span, int64_t start, const KeyTile<T>& tile,
                        const KeyTile<T>& next, const Running<T>& running, float* scores, T* weights) {
    const int size = static_cast<int>(a.cache.head_size), words = size / PER_WORD<T>;
    const int group = static_cast<int>(a.heads / a.cache.kv_heads), rows = static_cast<int>(span.queries) * group;
    const __m512 scale = _mm512_set1_ps(a.scale * LOG2_E);
    const typename KeyTile<T>::Keys keys{tile}, next_keys{next};
    product<T, KEY_VECTORS>(
        rows, reinterpret_cast<const uint32_t*>(running.query), words, keys, words,
        [](int, __m512* s) { UNROLL for (int j = 0; j < KEY_VECTORS; ++j) s[j] = _mm512_setzero_ps(); },
        [&](int row, const __m512* s) {
            UNROLL for (int j = 0; j < KEY_VECTORS; ++j) store(scores + row * KEYS + j * LANES, s[j]);
        },
        [&](int i) {
            if (i < words) UNROLL for (int j = 0; j < KEY_VECTORS; ++j) fetch_line(next_keys(i, j));
        });
    for (int row = 0; row < rows; ++row) {
        const int64_t position = span.first_position + row / group;
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
            soften(scores + row * KEYS, visible, scale, running.tops[row], running.sums[row], weights + row * KEYS);
        if (factor != 1.0f)
            for (float *to = running.outputs + row * size, *last_to = to + size; to < last_to; to += LANES)
                store(to, _mm512_mul_ps(load(to), _mm512_set1_ps(factor)));
    }
    add_values(rows, weights, tile, next, running.outputs);
}

// `after` is the item that this thread is likely to get next, or null.
template <class T>
void attend(const Attention& a, AttentionItem item, const AttentionItem* after, float* scratch) {
    const int group = static_cast<int>(a.heads / a.cache.kv_heads), size = static_cast<int>(a.cache.head_size);
    const Span span = span_of(a, item);
    const int rows = static_cast<int>(span.queries) * group, max_rows = queries_per_item(group) * group;
    auto* packed_keys = reinterpret_cast<uint32_t*>(scratch);
    uint32_t* packed_values = packed_keys + KEYS * size;
    float* outputs = reinterpret_cast<float*>(packed_values + KEYS * size);
    float* scores = outputs + max_rows * size;
    float* tops = scores + max_rows * KEYS;
    float* sums = tops + max_rows;
    T* query = reinterpret_cast<T*>(sums + max_rows);
    T* weights = query + max_rows * size;
    // The place of a row's numbers in query and output: rows are queries times the heads of a group, head by head.
    const auto head_place = [&](int row) {
        const int head = item.first_head + row / rows, own = row % rows;
        return ((span.first_token + own / group) * a.heads + head * group + own % group) * size;
    };
    for (int row = 0; row < rows * item.num_heads; ++row) {
        std::copy_n(static_cast<const T*>(a.query) + head_place(row), size, query + row * size);
        tops[row] = -std::numeric_limits<float>::infinity();
        sums[row] = 0;
    }
    std::fill_n(outputs, rows * item.num_heads * size, 0.0f);

    const bool is_direct = a.cache.block_size % LANES == 0;
    KeyTile<T> next;
    if (is_direct) next = locate<T>(a, item.row, span, item.first_head, span.first_tile());
    for (int64_t start = span.first_tile(); start < span.end; start += KEYS)
        for (int head = 0; head < item.num_heads; ++head) {
            KeyTile<T> tile;
            if (is_direct) {
                tile = next;
                if (head + 1 < item.num_heads) {
                    next = locate<T>(a, item.row, span, item.first_head + head + 1, start);
                } else if (start + KEYS < span.end) {
                    next = locate<T>(a, item.row, span, item.first_head, start + KEYS);
                } else if (after) {
                    const Span seen = span_of(a, *after);
                    next = locate<T>(a, after->row, seen, after->first_head, seen.first_tile());
                }
                if (start < span.first_seen || start + KEYS > span.end) copy_values(tile, span, start, packed_values);
            } else {
                next = tile =
                    gather<T>(a, item.row, span, item.first_head + head, start, packed_keys, packed_values);
            }
            const int row = head * rows;
            attend_tile<T>(a, span, start, tile, next,
                           {query + row * size, outputs + row * size, tops + row, sums + row}, scores, weights);
        }
    for (int row = 0; row < rows * item.num_heads; ++row) {
        T* to = static_cast<T*>(a.output) + head_place(row);
        const __m512 sum = _mm512_set1_ps(sums[row]);
        for (int i = 0; i < size; i += LANES) store(to + i, _mm512_div_ps(load(outputs + row * size + i), sum));
    }
}
