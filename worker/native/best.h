// The token of the greatest logit of a row, in one pass.
#pragma once

#include <limits>

#include "simd.h"

// tokens[i] is that of row rows[i] of `logits`, whose rows of `vocabulary` numbers begin `stride` numbers apart. Of equal
// logits the lowest token. A row that holds NaN, or nothing above minus infinity, gets `no_token`.
struct BestTokens {
    const float* logits;
    const int64_t* rows;
    int64_t* tokens;
    int64_t num_rows, stride, vocabulary, no_token;
};

// Logits whose greatest is looked at together: where it lies is searched once, in the best part.
constexpr int PART_VECTORS = 16;
constexpr int PART = PART_VECTORS * LANES;

inline int64_t best_token(const float* logits, int vocabulary, int64_t no_token) {
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    const auto at = [&](int token) {
        const __mmask16 lanes = first_lanes(vocabulary - token);
        return _mm512_mask_mov_ps(lowest, lanes, load(logits + token, lanes));
    };
    __m512 best = lowest;
    int best_part = 0;
    __mmask16 is_nan = 0;
    const auto take = [&](int part, const __m512* numbers) {
        __m512 highest = lowest;
        UNROLL for (int j = 0; j < PART_VECTORS; j += 2) {
            is_nan |= _mm512_cmp_ps_mask(numbers[j], numbers[j + 1], _CMP_UNORD_Q);
            highest = _mm512_max_ps(highest, _mm512_max_ps(numbers[j], numbers[j + 1]));
        }
        if (!_mm512_cmp_ps_mask(highest, best, _CMP_GT_OQ)) return;
        best = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
        best_part = part;
    };
    __m512 numbers[PART_VECTORS];
    int part = 0;
    for (; part + PART <= vocabulary; part += PART) {
        UNROLL for (int j = 0; j < PART_VECTORS; ++j) numbers[j] = _mm512_loadu_ps(logits + part + j * LANES);
        take(part, numbers);
    }
    UNROLL for (int j = 0; j < PART_VECTORS; ++j) numbers[j] = at(part + j * LANES);
    take(part, numbers);
    if (is_nan || _mm512_cmp_ps_mask(best, lowest, _CMP_EQ_OQ)) return no_token;
    for (int token = best_part;; token += LANES)
        if (const __mmask16 equal = _mm512_cmp_ps_mask(at(token), best, _CMP_EQ_OQ))
            return token + __builtin_ctz(equal);
}

inline void find_best_token(const BestTokens& b, int place) {
    b.tokens[place] = best_token(b.logits + b.rows[place] * b.stride, static_cast<int>(b.vocabulary), b.no_token);
}
