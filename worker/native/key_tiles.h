// What a call of attention is given, how its work is cut into items, and where an item finds its keys, 64 at a time.
#pragma once

#include <algorithm>
#include <vector>

#include "cache.h"

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
// Query rows (queries times heads of a group) per item: enough that reading a tile of keys is a small part.
constexpr int QUERY_ROWS = 96;
// Keys and values of few queries are read so many bytes at a time before they are used.
constexpr int64_t READ_BYTES = 48 * 1024;

// Queries of one row from `first_query` on, for the heads that share `num_heads` key-value heads.
struct AttentionItem {
    int row, first_query, first_head, num_heads;
};

inline int queries_per_item(int64_t group) { return static_cast<int>(std::max<int64_t>(1, QUERY_ROWS / group)); }

// The items of all rows. The heads of one query lie together in the cache: one item takes them all, if `num_threads`
// threads have enough to do then.
inline std::vector<AttentionItem> attention_items(const int64_t* query_starts, int64_t num_rows, int64_t heads,
                                                  int64_t kv_heads, int num_threads) {
    const int64_t group = heads / kv_heads, step = queries_per_item(group);
    const int together = num_rows < 4 * num_threads ? 1 : static_cast<int>(std::min(kv_heads, step));
    std::vector<AttentionItem> items;
    for (int row = 0; row < num_rows; ++row) {
        const int64_t queries = query_starts[row + 1] - query_starts[row];
        const int at_once = queries == 1 ? together : 1;
        for (int query = 0; query < queries; query += step)
            for (int head = 0; head < kv_heads; head += at_once)
                items.push_back({row, query, head, std::min<int>(at_once, kv_heads - head)});
    }
    return items;
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

// Heads whose tiles are read in one go: what the second cache level of any CPU has room for.
template <class T>
inline int64_t heads_at_once(int64_t head_size) {
    return std::max<int64_t>(1, READ_BYTES / (2 * KEYS * head_size * static_cast<int64_t>(sizeof(T))));
}

// Reads the tiles of `heads` heads from `tile` on in the order of memory, at its speed. Few rows multiply a tile faster
// than that and in another order, and prefetches that come faster than memory are dropped.
template <class T>
inline void read_tiles(const Attention& a, const KeyTile<T>& tile, int64_t heads) {
    const auto read = [](const uint32_t* words) { static_cast<void>(*static_cast<const volatile uint32_t*>(words)); };
    const size_t head_words = a.cache.block_size * tile.size / PER_WORD<T>;
    const int key_words = static_cast<int>(tile.size) / PER_WORD<T>;
    for (int j = 0; j < KEY_VECTORS; ++j)
        for (int64_t head = 0; head < heads; ++head)
            for (int word = 0; word < key_words; ++word) read(tile.keys[j] + head * head_words + word * tile.key_step);
    for (int j = 0; j < KEY_VECTORS; ++j)
        for (int64_t head = 0; head < heads; ++head)
            for (size_t word = 0; word < LANES / PER_WORD<T> * tile.size; word += LANES)
                read(tile.values[j] + head * head_words + word);
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
