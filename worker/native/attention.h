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

// Rows of queries whose scores and weights are at hand at once.
constexpr int ROWS_TOGETHER = TILE_ROWS<KEY_VECTORS>;
// How far a score may lie above the row's reference, in powers of two, before what was summed is rescaled.
constexpr float HEADROOM = 8.0f;

// Floats of working memory that one thread needs.
inline size_t attention_scratch(int64_t heads, int64_t kv_heads, int64_t head_size) {
    const size_t rows = queries_per_item(heads / kv_heads) * (heads / kv_heads);
    return KEYS * head_size * 2 + ROWS_TOGETHER * KEYS * 2 + rows * (head_size * 2 + LANES + 1);
}

// What one head's queries need while keys pass by; `rows` rows of each. A weight is 2^(score - reference), where a
// row's reference is one of its scores, never more than HEADROOM below its best.
template <class T>
struct Running {
    T* query;           // [rows, head_size]
    float* outputs;     // [rows, head_size]
    float* sums;        // [rows, 16]: parts of the sum of weights
    float* references;  // [rows]
};

// The scores [64] of one row become weights: `visible` says which of the keys are seen.
template <class T>
inline void soften(const float* scores, uint64_t visible, float scale, const Running<T>& running, int row, int size,
                   T* weights) {
    __m512 s[KEY_VECTORS];
    UNROLL for (int j = 0; j < KEY_VECTORS; ++j) s[j] = load(scores + j * LANES);
    if (visible != ~0ull) {
        // Low enough to weigh exactly zero, and finite, so that the differences below are.
        const __m512 lowest = _mm512_set1_ps(std::numeric_limits<float>::lowest());
        UNROLL for (int j = 0; j < KEY_VECTORS; ++j)
            s[j] = _mm512_mask_mov_ps(lowest, static_cast<__mmask16>(visible >> (j * LANES)), s[j]);
    }
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512 best = _mm512_mul_ps(_mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3])), factor);
    float& reference = running.references[row];
    float* sums = running.sums + row * LANES;
    if (_mm512_cmp_ps_mask(best, _mm512_set1_ps(reference + HEADROOM), _CMP_GT_OQ)) {
        const float highest = _mm512_reduce_max_ps(best);
        const __m512 shrink = exp2(_mm512_set1_ps(reference - highest));
        float* outputs = running.outputs + row * size;
        for (int i = 0; i < size; i += LANES) store(outputs + i, _mm512_mul_ps(load(outputs + i), shrink));
        store(sums, _mm512_mul_ps(load(sums), shrink));
        reference = highest;
    }
    const __m512 base = _mm512_set1_ps(reference);
    __m512 total = load(sums);
    UNROLL for (int j = 0; j < KEY_VECTORS; ++j) {
        const __m512 weight = exp2_of_finite(_mm512_fmsub_ps(s[j], factor, base));
        total = _mm512_add_ps(total, weight);
        store(weights + j * LANES, weight);
    }
    store(sums, total);
}

// outputs [rows, size] += weights [rows, 64] times values [64, size], in columns of at most 64. `next` is fetched.
template <class T, class Fetch>
inline void add_values(int rows, const T* weights, const KeyTile<T>& tile, float* outputs, Fetch fetch) {
    constexpr int words = KEYS / PER_WORD<T>;
    const int size = static_cast<int>(tile.size);
    const auto* a = reinterpret_cast<const uint32_t*>(weights);
    const auto part = [&]<int VECTORS>(int column) {
        const typename KeyTile<T>::Values columns{tile, column};
        product<T, VECTORS>(
            rows, a, words, columns, words,
            [&](int row, __m512* sums) {
                UNROLL for (int j = 0; j < VECTORS; ++j) sums[j] = load(outputs + row * size + column + j * LANES);
            },
            [&](int row, const __m512* sums) {
                UNROLL for (int j = 0; j < VECTORS; ++j) store(outputs + row * size + column + j * LANES, sums[j]);
            },
            [&](int i) {
                UNROLL for (int j = 0; j < VECTORS; ++j) fetch(i, column + j * LANES);
            });
    };
    int column = 0;
    for (; column + 4 * LANES <= size; column += 4 * LANES) part.template operator()<4>(column);
    for (; column < size; column += LANES) part.template operator()<1>(column);
}

// Which of the keys [start, start + 64) the query at `position` sees.
inline uint64_t visible_keys(int64_t position, int64_t window, int64_t start) {
    const auto below = [](int64_t count) { return count >= KEYS ? ~0ull : (1ull << std::max<int64_t>(count, 0)) - 1; };
    return below(position + 1 - start) & ~(window ? below(position - window + 1 - start) : 0);
}

// One tile of keys for the rows of one head. `next` is fetched meanwhile.
template <class T>
inline void attend_tile(const Attention& a, const Span& span, int64_t start, const KeyTile<T>& tile,
                        const KeyTile<T>& next, const Running<T>& running, float* scores, T* weights) {
    const int size = static_cast<int>(a.cache.head_size), words = size / PER_WORD<T>;
    const int group = static_cast<int>(a.heads / a.cache.kv_heads), rows = static_cast<int>(span.queries) * group;
    const float scale = a.scale * LOG2_E;
    const bool sees_all = start + KEYS <= span.first_position + 1 && (!a.window || span.end - a.window <= start);
    const typename KeyTile<T>::Keys keys{tile}, next_keys{next};
    const typename KeyTile<T>::Values next_values{next, 0};
    // Rows that come together fetch their share of the next tile: prefetches that come faster than memory are dropped.
    const auto is_due = [&](int word, int first, int of_words) {
        return word >= first * of_words / rows && word < (first + ROWS_TOGETHER) * of_words / rows;
    };
    const auto score = [&](int first, int count) {
        product<T, KEY_VECTORS>(
            count, reinterpret_cast<const uint32_t*>(running.query + first * size), words, keys, words,
            [](int, __m512* s) { UNROLL for (int j = 0; j < KEY_VECTORS; ++j) s[j] = _mm512_setzero_ps(); },
            [&](int row, const __m512* s) {
                UNROLL for (int j = 0; j < KEY_VECTORS; ++j) store(scores + row * KEYS + j * LANES, s[j]);
            },
            [&](int i) {
                if (is_due(i, first, words))
                    UNROLL for (int j = 0; j < KEY_VECTORS; ++j) fetch_line(next_keys(i, j));
            });
    };
    const auto add = [&](int first, int count) {
        add_values(count, weights, tile, running.outputs + first * size, [&](int word, int column) {
            if (is_due(word, first, KEYS / PER_WORD<T>)) fetch_line(next_values(word, 0) + column);
        });
    };
    // Weights take a while from scores: the scores of the next rows are computed in between.
    int done = 0;
    for (int first = 0, count; first < rows; first += count) {
        count = std::min(rows - first, ROWS_TOGETHER);
        score(first, count);
        if (first) add(done, first - done);
        done = first;
        for (int row = 0; row < count; ++row) {
            const uint64_t visible =
                sees_all ? ~0ull : visible_keys(span.first_position + (first + row) / group, a.window, start);
            if (visible) {
                soften(scores + row * KEYS, visible, scale, running, first + row, size, weights + row * KEYS);
            } else {
                std::fill_n(weights + row * KEYS, KEYS, T{});
            }
        }
    }
    add(done, rows - done);
}

template <class T>
void attend(const Attention& a, AttentionItem item, float* scratch) {
    const int group = static_cast<int>(a.heads / a.cache.kv_heads), size = static_cast<int>(a.cache.head_size);
    const Span span = span_of(a, item);
    const int rows = static_cast<int>(span.queries) * group, max_rows = queries_per_item(group) * group;
    auto* packed_keys = reinterpret_cast<uint32_t*>(scratch);
    uint32_t* packed_values = packed_keys + KEYS * size;
    float* scores = reinterpret_cast<float*>(packed_values + KEYS * size);
    float* outputs = scores + ROWS_TOGETHER * KEYS;
    float* sums = outputs + max_rows * size;
    float* references = sums + max_rows * LANES;
    T* query = reinterpret_cast<T*>(references + max_rows);
    T* weights = query + max_rows * size;
    // The place of a row's numbers in query and output: rows are queries times the heads of a group, head by head.
    const auto head_place = [&](int row) {
        const int head = item.first_head + row / rows, own = row % rows;
        return ((span.first_token + own / group) * a.heads + head * group + own % group) * size;
    };
    for (int row = 0; row < rows * item.num_heads; ++row) {
        std::copy_n(static_cast<const T*>(a.query) + head_place(row), size, query + row * size);
        references[row] = -std::numeric_limits<float>::infinity();
    }
    std::fill_n(sums, rows * item.num_heads * LANES, 0.0f);
    std::fill_n(outputs, rows * item.num_heads * size, 0.0f);

    const bool is_direct = a.cache.block_size % LANES == 0, is_short = rows <= ROWS_TOGETHER;
    for (int64_t start = span.first_tile(); start < span.end; start += KEYS)
        for (int head = 0; head < item.num_heads; ++head) {
            KeyTile<T> tile, next;
            if (is_direct) {
                next = tile = locate<T>(a, item.row, span, item.first_head + head, start);
                if (!is_short && start + KEYS < span.end)
                    next = locate<T>(a, item.row, span, item.first_head, start + KEYS);
                if (is_short && head % heads_at_once<T>(size) == 0)
                    read_tiles(a, tile, std::min<int64_t>(item.num_heads - head, heads_at_once<T>(size)));
                if (start < span.first_seen || start + KEYS > span.end) copy_values(tile, span, start, packed_values);
            } else {
                next = tile =
                    gather<T>(a, item.row, span, item.first_head + head, start, packed_keys, packed_values);
            }
            const int row = head * rows;
            attend_tile<T>(a, span, start, tile, next,
                           {query + row * size, outputs + row * size, sums + row * LANES, references + row}, scores,
                           weights);
        }
    for (int row = 0; row < rows * item.num_heads; ++row) {
        T* to = static_cast<T*>(a.output) + head_place(row);
        const __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(load(sums + row * LANES)));
        for (int i = 0; i < size; i += LANES) store(to + i, _mm512_div_ps(load(outputs + row * size + i), sum));
    }
}
