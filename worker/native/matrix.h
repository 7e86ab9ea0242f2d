// Products of few rows with a large matrix: the register tile, and linear layers over packed weights.
//
// Each element of a result is one sum in the order of the inner index, whatever the number of rows: a token's numbers
// do not depend on its batch mates, bit for bit.
#pragma once

#include "simd.h"
#include "team.h"

// Weights of a linear layer [n, k] as panels of 32 outputs: panel p holds, for each word of k, that word of the rows
// 32 p to 32 p + 31. Outputs are filled up with zero rows to whole panels. `bias` may be null.
struct Linear {
    const void* weights;
    const float* bias;
    int64_t n;
    int64_t k;
};

constexpr int PANEL_VECTORS = 2;
constexpr int PANEL = PANEL_VECTORS * LANES;
// Rows whose inputs stay in the second cache level while panels pass by; a multiple of the tile's 12 rows.
constexpr int ROWS_AT_ONCE = 96;
// How far ahead of its use a panel is fetched by the tile that reads it, in words: 4 KiB.
constexpr int FETCH_WORDS = 1024;
// Accumulators of a tile; 24 of the 32 registers hide the latency of `dot`.
constexpr int TILE_VECTORS = 24;

template <int VECTORS>
constexpr int TILE_ROWS = TILE_VECTORS / VECTORS > 12 ? 12 : TILE_VECTORS / VECTORS;

// sums[i][j] += a[i] . b[:, j]: ROWS rows of `words` words against words of VECTORS * 16 columns, `ldb` words apart.
// With FETCH two lines, `ahead_step` words further for each word, are fetched into the cache meanwhile.
template <class T, int ROWS, int VECTORS, bool FETCH>
inline void tile(const uint32_t* a, size_t lda, const uint32_t* b, size_t ldb, int words, const uint32_t* ahead,
                 size_t ahead_step, __m512 (&sums)[ROWS][VECTORS]) {
    for (int word = 0; word < words; ++word, b += ldb) {
        __m512i columns[VECTORS];
        UNROLL for (int j = 0; j < VECTORS; ++j) columns[j] = _mm512_loadu_si512(b + j * LANES);
        if (FETCH) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(ahead + LANES), _MM_HINT_T0);
            ahead += ahead_step;
        }
        UNROLL for (int i = 0; i < ROWS; ++i) {
            const __m512i row = _mm512_set1_epi32(a[i * lda + word]);
            UNROLL for (int j = 0; j < VECTORS; ++j) sums[i][j] = dot<T>(sums[i][j], row, columns[j]);
        }
    }
}

// Calls `finish(row, sums)` for each of `rows` rows with its VECTORS vectors of sums; `begin(row, sums)` sets them.
// With FETCH each tile fetches its part of what lies at `ahead`: `ahead_step` words for each word.
template <class T, int VECTORS, bool FETCH, int ROWS = TILE_ROWS<VECTORS>, class Begin, class Finish>
inline void product(int rows, const uint32_t* a, size_t lda, const uint32_t* b, size_t ldb, int words, Begin begin,
                    Finish finish, const uint32_t* ahead = nullptr, size_t ahead_step = 0, int first = 0) {
    int row = first;
    for (; row + ROWS <= rows; row += ROWS, ahead += words * ahead_step) {
        __m512 sums[ROWS][VECTORS];
        UNROLL for (int i = 0; i < ROWS; ++i) begin(row + i, sums[i]);
        tile<T, ROWS, VECTORS, FETCH>(a + row * lda, lda, b, ldb, words, ahead, ahead_step, sums);
        UNROLL for (int i = 0; i < ROWS; ++i) finish(row + i, sums[i]);
    }
    if constexpr (ROWS > 1)
        if (row < rows)
            product<T, VECTORS, FETCH, (ROWS > 8 ? 8 : ROWS > 4 ? 4 : ROWS - 1)>(rows, a, lda, b, ldb, words, begin,
                                                                                 finish, ahead, ahead_step, row);
}

// Multiplies `rows` rows x [rows, k] with a layer's weights; `finish(row, column, sums)` gets two vectors of outputs,
// the first of them output number `column`.
template <class T, class Finish>
void multiply(Member& member, const Linear& layer, const T* x, int rows, Finish finish) {
    const int words = static_cast<int>(layer.k) / PER_WORD<T>;
    const int panels = static_cast<int>((layer.n + PANEL - 1) / PANEL);
    const auto* weights = static_cast<const uint32_t*>(layer.weights);
    const auto* inputs = reinterpret_cast<const uint32_t*>(x);
    const int blocks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    member.each(panels * blocks, [&](int item) {
        const int first = item / panels * ROWS_AT_ONCE, panel = item % panels;
        const int count = rows - first < ROWS_AT_ONCE ? rows - first : ROWS_AT_ONCE;
        const int column = panel * PANEL;
        const size_t panel_words = static_cast<size_t>(words) * PANEL;
        const uint32_t* columns = weights + panel * panel_words;
        // One tile is done before its panel has come from memory: it fetches what it needs next itself. Several take
        // longer than that: each fetches its part of the panel that this thread is likely to get next.
        const int tiles = (count + TILE_ROWS<PANEL_VECTORS> - 1) / TILE_ROWS<PANEL_VECTORS>;
        const bool is_last = panel + member.team_size() >= panels;
        const uint32_t* ahead = tiles == 1 ? columns + FETCH_WORDS
            : is_last                      ? columns
                                           : columns + member.team_size() * panel_words;
        __m512 start[PANEL_VECTORS] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        if (layer.bias)
            UNROLL for (int j = 0; j < PANEL_VECTORS; ++j)
                start[j] = load(layer.bias + column + j * LANES, first_lanes(layer.n - column - j * LANES));
        product<T, PANEL_VECTORS, true>(
            count, inputs + static_cast<size_t>(first) * words, words, columns, PANEL, words,
            [&](int, __m512* sums) { UNROLL for (int j = 0; j < PANEL_VECTORS; ++j) sums[j] = start[j]; },
            [&](int row, const __m512* sums) { finish(first + row, column, sums); }, ahead, PANEL / tiles);
    });
}
