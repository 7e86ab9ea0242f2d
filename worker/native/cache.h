// How keys and values lie in a block of the cache: as the register tile reads them, so that decodes need not turn them.
//
// A block holds one stretch of block_size * head_size numbers for each key-value head. Keys: each word of the inner
// index for all tokens, then the next word. Values: two tokens (Bf16) or one (float) make the words of a line of
// head_size words; where Bf16 tokens do not come in pairs (odd block sizes), lines of plain numbers.
#pragma once

#include <algorithm>

#include "simd.h"

// One layer's keys and values, each [blocks, kv_heads, block_size * head_size].
struct Cache {
    void* keys;
    void* values;
    int64_t block_size, kv_heads, head_size;

    // Where the stretch of a block and head begins, in numbers.
    size_t head_start(int64_t block, int64_t kv_head) const {
        return static_cast<size_t>(block * kv_heads + kv_head) * block_size * head_size;
    }
};

template <class T>
inline bool has_pairs(const Cache& cache) {
    return PER_WORD<T> == 2 && cache.block_size % 2 == 0;
}

// Writes a token's key and value of one head; both [head_size].
template <class T>
inline void store_token(const Cache& cache, int64_t slot, int64_t kv_head, const T* key, const T* value) {
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size, size = cache.head_size;
    const size_t start = cache.head_start(block, kv_head);
    auto* words = reinterpret_cast<uint32_t*>(static_cast<T*>(cache.keys) + start) + offset;
    const auto* key_words = reinterpret_cast<const uint32_t*>(key);
    for (int64_t word = 0; word < size / PER_WORD<T>; ++word) words[word * cache.block_size] = key_words[word];
    T* to = static_cast<T*>(cache.values) + start;
    if constexpr (PER_WORD<T> == 2)
        if (has_pairs<T>(cache)) {
            // Only the own half of each word is written: the other token's may be written by another thread.
            const bool is_odd = offset % 2;
            const __mmask32 halves = is_odd ? 0xAAAAAAAA : 0x55555555;
            to += offset / 2 * size * 2;
            for (int64_t i = 0; i < size; i += LANES) {
                const __m512i numbers = _mm512_cvtepu16_epi32(load_bits(value + i));
                _mm512_mask_storeu_epi16(to + i * 2, halves, is_odd ? _mm512_slli_epi32(numbers, 16) : numbers);
            }
            return;
        }
    std::copy_n(value, size, to + offset * size);
}

// Reads one token of one head into column `column` of packed keys (`key_step` words from word to word), and its value
// into line column / PER_WORD of packed values; where `is_read` is false zeros.
template <class T>
inline void gather_token(const Cache& cache, int64_t block, int64_t offset, int64_t kv_head, bool is_read, int column,
                         uint32_t* keys, size_t key_step, uint32_t* values) {
    const int64_t size = cache.head_size;
    const size_t start = cache.head_start(block, kv_head);
    const auto* words = reinterpret_cast<const uint32_t*>(static_cast<const T*>(cache.keys) + start) + offset;
    for (int64_t word = 0; word < size / PER_WORD<T>; ++word)
        keys[word * key_step + column] = is_read ? words[word * cache.block_size] : 0;
    const int64_t step = has_pairs<T>(cache) ? 2 : 1;
    const T* from = static_cast<const T*>(cache.values) + start + offset / step * step * size + offset % step;
    T* to = reinterpret_cast<T*>(values + column / PER_WORD<T> * size) + column % PER_WORD<T>;
    for (int64_t i = 0; i < size; ++i) to[i * PER_WORD<T>] = is_read ? from[i * step] : T{};
}
