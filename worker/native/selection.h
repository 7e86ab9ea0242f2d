// The few tokens of a row of logits that can still be chosen, in one pass over the vocabulary after the best is known.
//
// A row that is cut (top-k, top-p, min-p) keeps what lies within `reach` of its best score, half as far if that is too
// much, and so on, and the mass of the whole row. A row that is not keeps its contenders: those whose noise may lift
// them over the best one. The noise is that of worker/noise.py, whose constants come with the call; here it only has to
// be bounded, so leading bits do.
#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

// Row r: logits rows[r] [vocabulary], divided by temperatures[r]. Its tokens go, in rising order, to ids and scores
// [num_rows, capacity]; counts[r] is their number, or -1 where there are more or the logits are not finite, and
// reaches[r] the reach that was used.
struct Selection {
    const float* const* rows;
    const float* temperatures;
    const int64_t* keys;
    const int64_t* cuts;
    int64_t* ids;
    float* scores;
    int64_t* counts;
    double* masses;
    float* reaches;
    int64_t num_rows, vocabulary, capacity;
    uint64_t token_step, first_multiplier, second_multiplier;
    int64_t first_shift, second_shift, last_shift, uniform_bits, contender_bits;
    float reach, slack, margin;
};

inline uint64_t unfinished_hash(const Selection& s, uint64_t key, uint64_t token) {
    uint64_t word = token * s.token_step ^ key;
    word = (word ^ word >> s.first_shift) * s.first_multiplier;
    return (word ^ word >> s.second_shift) * s.second_multiplier;
}

inline double gumbel(const Selection& s, uint64_t key, uint64_t token) {
    uint64_t word = unfinished_hash(s, key, token);
    word ^= word >> s.last_shift;
    const double bits = static_cast<double>(word >> (64 - s.uniform_bits)) + 0.5;
    return -std::log(-std::log(std::ldexp(bits, static_cast<int>(-s.uniform_bits))));
}

// The leading bits of the hashes of eight tokens from `steps` (token times token_step) as floats.
inline __m256 leading_bits(const Selection& s, __m512i steps, __m512i key) {
    __m512i word = _mm512_xor_si512(steps, key);
    word = _mm512_xor_si512(word, _mm512_srl_epi64(word, _mm_cvtsi64_si128(s.first_shift)));
    word = _mm512_mullo_epi64(word, _mm512_set1_epi64(static_cast<int64_t>(s.first_multiplier)));
    word = _mm512_xor_si512(word, _mm512_srl_epi64(word, _mm_cvtsi64_si128(s.second_shift)));
    word = _mm512_mullo_epi64(word, _mm512_set1_epi64(static_cast<int64_t>(s.second_multiplier)));
    return _mm512_cvtepi64_ps(_mm512_srl_epi64(word, _mm_cvtsi64_si128(64 - s.contender_bits)));
}

// False if the row has more than `capacity` tokens within this reach.
inline bool select_within(const Selection& s, int row, float reach) {
    const float* logits = s.rows[row];
    const int vocabulary = static_cast<int>(s.vocabulary);
    const __m512 temperature = _mm512_set1_ps(s.temperatures[row]);
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    const auto scores_at = [&](int token) {
        const __mmask16 lanes = first_lanes(vocabulary - token);
        return _mm512_mask_div_ps(lowest, lanes, load(logits + token, lanes), temperature);
    };
    __m512 highest = lowest;
    __mmask16 is_nan = 0;
    for (int token = 0; token < vocabulary; token += LANES) {
        const __m512 scores = scores_at(token);
        is_nan |= _mm512_cmp_ps_mask(scores, scores, _CMP_UNORD_Q);
        highest = _mm512_max_ps(highest, scores);
    }
    const float best = _mm512_reduce_max_ps(highest);
    s.counts[row] = -1;
    if (is_nan || !std::isfinite(best)) return true;

    const bool is_cut = s.cuts[row];
    const uint64_t key = static_cast<uint64_t>(s.keys[row]);
    const float largest = static_cast<float>((1ll << s.contender_bits) - 1);
    float offset = best;
    if (!is_cut) {
        int first = 0;
        while (!(_mm512_cmp_ps_mask(scores_at(first), _mm512_set1_ps(best), _CMP_EQ_OQ))) first += LANES;
        first += __builtin_ctz(_mm512_cmp_ps_mask(scores_at(first), _mm512_set1_ps(best), _CMP_EQ_OQ));
        offset += static_cast<float>(gumbel(s, key, first)) - s.slack - std::log((largest + 1) * s.margin);
    }
    const __m512i keys = _mm512_set1_epi64(static_cast<int64_t>(key));
    const __m512i stride = _mm512_set1_epi64(static_cast<int64_t>(8 * s.token_step));
    __m512i steps = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7),
                                       _mm512_set1_epi64(static_cast<int64_t>(s.token_step)));
    __m512d mass = _mm512_setzero_pd();
    int64_t count = 0;
    for (int token = 0; token < vocabulary; token += LANES) {
        const __m512 scores = scores_at(token);
        const __m512 distance = _mm512_sub_ps(scores, _mm512_set1_ps(offset));
        const __m512 exponent = _mm512_mul_ps(distance, _mm512_set1_ps(LOG2_E));
        const __m512 share = exp2(_mm512_min_ps(exponent, _mm512_set1_ps(126.0f)));
        __mmask16 kept;
        if (is_cut) {
            kept = _mm512_cmp_ps_mask(distance, _mm512_set1_ps(-reach), _CMP_GE_OQ);
            mass = _mm512_add_pd(mass, _mm512_cvtps_pd(_mm512_castps512_ps256(share)));
            mass = _mm512_add_pd(mass, _mm512_cvtps_pd(_mm512_extractf32x8_ps(share, 1)));
        } else {
            const __m256 low = leading_bits(s, steps, keys);
            steps = _mm512_add_epi64(steps, stride);
            const __m256 high = leading_bits(s, steps, keys);
            steps = _mm512_add_epi64(steps, stride);
            const __m512 bits = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
            kept = _mm512_cmp_ps_mask(bits, _mm512_sub_ps(_mm512_set1_ps(largest), share), _CMP_GE_OQ);
            kept |= _mm512_cmp_ps_mask(scores, _mm512_set1_ps(best), _CMP_EQ_OQ);
        }
        kept &= first_lanes(vocabulary - token);
        if (!kept) continue;
        const int found = __builtin_popcount(kept);
        if (count + found > s.capacity) return false;
        const int64_t place = row * s.capacity + count;
        _mm512_mask_compressstoreu_ps(s.scores + place, kept, scores);
        for (int rest = kept, i = 0; rest; rest &= rest - 1, ++i) s.ids[place + i] = token + __builtin_ctz(rest);
        count += found;
    }
    s.masses[row] = _mm512_reduce_add_pd(mass);
    s.counts[row] = count;
    s.reaches[row] = reach;
    return true;
}

inline void select_tokens(const Selection& s, int row) {
    for (float reach = s.reach; reach >= 1.0f && !select_within(s, row, reach); reach /= 2)
        if (!s.cuts[row]) return;
}
