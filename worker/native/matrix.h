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

// Columns of words in memory: those of one place, `step` words from word to word.
struct PlainColumns {
    const uint32_t* words;
    size_t step;
    const uint32_t* operator()(int word, int j) const { return words + word * step + j * LANES; }
};

struct NoFetch {
    void operator()(int) const {}
};

// sums[i][j] += a[i] . column j: ROWS rows of `words` words against words of VECTORS * 16 columns. `columns(word, j)`
// says where 16 of them are. `fetch` is called once a word, with `first_fetch` and what follows.
template <class T, int ROWS, int VECTORS, class Columns, class Fetch>
inline void tile(const uint32_t* a, size_t lda, Columns columns, int words, Fetch fetch, int first_fetch,
                 __m512 (&sums)[ROWS][VECTORS]) {
    for (int word = 0; word < words; ++word) {
        __m512i parts[VECTORS];
        UNROLL for (int j = 0; j < VECTORS; ++j) parts[j] = _mm512_loadu_si512(columns(word, j));
        fetch(first_fetch + word);
        UNROLL for (int i = 0; i < ROWS; ++i) {
            const __m512i row = _mm512_set1_epi32(a[i * lda + word]);
            UNROLL for (int j = 0; j < VECTORS; ++j) sums[i][j] = dot<T>(sums[i][j], row, parts[j]);
        }
    }
}

// Calls `finish(row, sums)` for each of `rows` rows with its VECTORS vectors of sums; `begin(row, sums)` sets them.
// `fetch(i)` is called for each word of each tile, i counting from 0: it may ask for what is needed next.
template <class T, int VECTORS, int ROWS = TILE_ROWS<VECTORS>, class Columns, class Begin, class Finish, class Fetch>
inline void product(int rows, const uint32_t* a, size_t lda, Columns columns, int words, Begin begin, Finish finish,
                    Fetch fetch, int first = 0, int first_fetch = 0) {
    int row = first;
    for (; row + ROWS <= rows; row += ROWS, first_fetch += words) {
        __m512 sums[ROWS][VECTORS];
        UNROLL for (int i = 0; i < ROWS; ++i) begin(row + i, sums[i]);
        tile<T, ROWS, VECTORS>(a + row * lda, lda, columns, words, fetch, first_fetch, sums);
        UNROLL for (int i = 0; i < ROWS; ++i) finish(row + i, sums[i]);
    }
    if constexpr (ROWS > 1)
        if (row < rows)
            product<T, VECTORS, (ROWS > 8 ? 8 : ROWS > 4 ? 4 : ROWS - 1)>(rows, a, lda, columns, words, begin, finish,
                                                                         fetch, row, first_fetch);
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
        const int ahead_step = PANEL / tiles;
        product<T, PANEL_VECTORS>(
            count, inputs + static_cast<size_t>(first) * words, words, PlainColumns{columns, PANEL}, words,
            [&](int, __m512* sums) { UNROLL for (int j = 0; j < PANEL_VECTORS; ++j) sums[j] = start[j]; },
            [&](int row, const __m512* sums) { finish(first + row, column, sums); },
            [&](int i) {
                fetch_line(ahead + i * ahead_step);
                fetch_line(ahead + i * ahead_step + LANES);
            });
    });
}
