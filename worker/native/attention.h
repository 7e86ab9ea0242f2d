// Attention of mixed rows over the paged cache: a few queries at a time against tiles of 64 keys.
//
// One item of work is a block of queries of one row with all query heads that share a key-value head: decodes, chunks
// and whole prompts are one code. Blocks of a multiple of 16 tokens are read where they are, others are gathered first.
// Tiles start at multiples of 64 positions and a masked key adds an exact zero: a token's result does not depend on
// which other queries or rows were computed with it.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "cache.h"
#include "matrix.h"

// R rows, T tokens. query and output are [T, heads, head_size]; tables [R, table_width]; query_starts [R + 1];
// context_lens [R]. `window` 0: none.
struct Attention {
    Cache cache;
    const void* query;
    void* output;
    const int64_t* tables;
    const int64_t* query_starts;
    const int64_t* context_lens;
    int64_t num_rows, table_width, heads, window;
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

inline std::vector<AttentionItem> attention_items(const int64_t* query_starts, int64_t num_rows, int64_t group) {
    const int step = queries_per_item(group);
    std::vector<AttentionItem> items;
    for (int row = 0; row < num_rows; ++row)
        for (int64_t query = 0; query < query_starts[row + 1] - query_starts[row]; query += step)
            items.push_back({row, static_cast<int>(query)});
    return items;
}

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

// Where 64 keys and values of one row and head are, 16 and 16 of them.
template <class T>
struct KeyTile {
    const uint32_t* keys[KEY_VECTORS];
    const uint32_t* values[KEY_VECTORS];
    size_t key_step, size;

    struct Keys {
        const KeyTile& tile;
        const uint32_t* operator()(int word, int j) const { return tile.keys[j] + word * tile.key_step; }
    };

    // Columns from `column` on, of 16 numbers each; words are keys, or pairs of them.
    struct Values {
        const KeyTile& tile;
        int column;
        const uint32_t* operator()(int word, int j) const {
            return tile.values[word / GROUP_WORDS] + word % GROUP_WORDS * tile.size + column + j * LANES;
        }
    };

    static constexpr int GROUP_WORDS = LANES / PER_WORD<T>;
};

// What the queries of an item may see: positions [first_seen, end), the last of them by the last query alone.
struct Span {
    int64_t first_token, queries, first_position, first_seen, end;

    int64_t first_tile() const { return first_seen / KEYS * KEYS; }
};

inline Span span_of(const Attention& a, AttentionItem item) {
    Span span;
    const int64_t end_token = a.query_starts[item.row + 1];
    span.first_token = a.query_starts[item.row] + item.first_query;
    span.queries = std::min<int64_t>(queries_per_item(a.heads / a.cache.kv_heads), end_token - span.first_token);
    span.end = a.context_lens[item.row] - (end_token - span.first_token) + span.queries;
    span.first_position = span.end - span.queries;
    span.first_seen = a.window ? std::max<int64_t>(0, span.first_position - a.window + 1) : 0;
    return span;
}

// The block of a position, or the null block: what lies before the window may be anybody's by now, and past the end is
// nobody's yet.
inline int64_t block_at(const Attention& a, int row, const Span& span, int64_t position, int count) {
    const bool is_read = position + count > span.first_seen && position < span.end;
    return is_read ? a.tables[row * a.table_width + position / a.cache.block_size] : 0;
}

// The tile from position `start` on, where it lies in the cache; for blocks of a multiple of 16 tokens.
template <class T>
inline KeyTile<T> locate(const Attention& a, int row, const Span& span, int kv_head, int64_t start) {
    KeyTile<T> tile;
    tile.key_step = a.cache.block_size, tile.size = a.cache.head_size;
    UNROLL for (int j = 0; j < KEY_VECTORS; ++j) {
        const int64_t position = start + j * LANES, offset = position % a.cache.block_size;
        const size_t place = a.cache.head_start(block_at(a, row, span, position, LANES), kv_head);
        tile.keys[j] = reinterpret_cast<const uint32_t*>(static_cast<const T*>(a.cache.keys) + place) + offset;
        tile.values[j] = reinterpret_cast<const uint32_t*>(static_cast<const T*>(a.cache.values) + place) +
                         offset / PER_WORD<T> * tile.size;
    }
    return tile;
}

// Copies the values of a tile that holds keys which are not read: those become zeros, since what is there may be NaN.
template <class T>
inline void copy_values(KeyTile<T>& tile, const Span& span, int64_t start, uint32_t* to) {
    for (int word = 0; word < KEYS / PER_WORD<T>; ++word) {
        uint32_t bits = 0;
        for (int key = 0; key < PER_WORD<T>; ++key) {
            const int64_t position = start + word * PER_WORD<T> + key;
            const bool is_read = position >= span.first_seen && position < span.end;
            if (is_read) bits |= (PER_WORD<T> == 1 ? 0xFFFFFFFF : 0xFFFF) << (16 * key);
        }
        const __m512i mask = _mm512_set1_epi32(static_cast<int>(bits));
        const uint32_t* from = typename KeyTile<T>::Values{tile, 0}(word, 0);
        for (size_t i = 0; i < tile.size; i += LANES)
            _mm512_storeu_si512(to + word * tile.size + i, _mm512_and_si512(mask, _mm512_loadu_si512(from + i)));
    }
    UNROLL for (int j = 0; j < KEY_VECTORS; ++j) tile.values[j] = to + j * KeyTile<T>::GROUP_WORDS * tile.size;
}

// The same tile for any block size, key by key.
template <class T>
inline KeyTile<T> gather(const Attention& a, int row, const Span& span, int kv_head, int64_t start, uint32_t* keys,
                         uint32_t* values) {
    for (int i = 0; i < KEYS; ++i) {
        const int64_t position = start + i, block = block_at(a, row, span, position, 1);
        const bool is_read = position >= span.first_seen && position < span.end;
        gather_token<T>(a.cache, block, position % a.cache.block_size, kv_head, is_read, i, keys, KEYS, values);
    }
    KeyTile<T> tile;
    tile.key_step = KEYS, tile.size = a.cache.head_size;
    UNROLL for (int j = 0; j < KEY_VECTORS; ++j) {
        tile.keys[j] = keys + j * LANES;
        tile.values[j] = values + j * KeyTile<T>::GROUP_WORDS * tile.size;
    }
    return tile;
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

// Item `index` of items.size() * kv_heads. `after` is the item that this thread is likely to get next.
template <class T>
void attend(const Attention& a, const std::vector<AttentionItem>& items, size_t index, size_t after, float* scratch) {
    const int kv_heads = static_cast<int>(a.cache.kv_heads);
    const AttentionItem item = items[index / kv_heads];
    const int kv_head = static_cast<int>(index % kv_heads), group = static_cast<int>(a.heads / kv_heads);
    const int size = static_cast<int>(a.cache.head_size), words = size / PER_WORD<T>;
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

    for (int row = 0; row < rows; ++row) {
        const size_t head = (span.first_token + row / group) * a.heads + kv_head * group + row % group;
        std::copy_n(static_cast<const T*>(a.query) + head * size, size, query + row * size);
        tops[row] = -std::numeric_limits<float>::infinity();
        sums[row] = 0;
    }
    std::fill_n(outputs, rows * size, 0.0f);

    const __m512 scale = _mm512_set1_ps(a.scale * LOG2_E);
    const bool is_direct = a.cache.block_size % LANES == 0;
    KeyTile<T> next;
    if (is_direct) next = locate<T>(a, item.row, span, kv_head, span.first_tile());
    for (int64_t start = span.first_tile(); start < span.end; start += KEYS) {
        KeyTile<T> tile;
        if (is_direct) {
            tile = next;
            if (start + KEYS < span.end) {
                next = locate<T>(a, item.row, span, kv_head, start + KEYS);
            } else if (after < items.size() * kv_heads) {
                const AttentionItem other = items[after / kv_heads];
                const Span seen = span_of(a, other);
                next = locate<T>(a, other.row, seen, static_cast<int>(after % kv_heads), seen.first_tile());
            }
            if (start < span.first_seen || start + KEYS > span.end) copy_values(tile, span, start, packed_values);
        } else {
            next = tile = gather<T>(a, item.row, span, kv_head, start, packed_keys, packed_values);
        }
        const typename KeyTile<T>::Keys keys{tile}, next_keys{next};
        product<T, KEY_VECTORS>(
            rows, reinterpret_cast<const uint32_t*>(query), words, keys, words,
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
                soften(scores + row * KEYS, visible, scale, tops[row], sums[row], weights + row * KEYS);
            if (factor != 1.0f)
                for (float *to = outputs + row * size, *last_to = to + size; to < last_to; to += LANES)
                    store(to, _mm512_mul_ps(load(to), _mm512_set1_ps(factor)));
        }
        add_values(rows, weights, tile, next, outputs);
    }
    for (int row = 0; row < rows; ++row) {
        const size_t head = (span.first_token + row / group) * a.heads + kv_head * group + row % group;
        T* to = static_cast<T*>(a.output) + head * size;
        const __m512 sum = _mm512_set1_ps(sums[row]);
        for (int i = 0; i < size; i += LANES) store(to + i, _mm512_div_ps(load(outputs + row * size + i), sum));
    }
}
