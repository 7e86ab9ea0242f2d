// Vectors of 16 floats, and the two ways numbers are stored: float, and Bf16 (the upper half of a float).
//
// Matrices are handled in 32-bit words: one float, or two neighbouring Bf16. `dot` multiplies word by word and adds
// in float32, so that every kernel above is written once for both.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define UNROLL _Pragma("GCC unroll 32")

constexpr int LANES = 16;

struct Bf16 {
    uint16_t bits;
};

template <class T>
constexpr int PER_WORD = 4 / sizeof(T);

inline __mmask16 first_lanes(int count) {
    return count >= LANES ? 0xFFFF : static_cast<__mmask16>((1u << (count < 0 ? 0 : count)) - 1);
}

inline __m512 load(const float* from, __mmask16 lanes = 0xFFFF) { return _mm512_maskz_loadu_ps(lanes, from); }

inline __m512 load(const Bf16* from, __mmask16 lanes = 0xFFFF) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from)), 16));
}

inline __m256i load_bits(const Bf16* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

inline void store(float* to, __m512 values, __mmask16 lanes = 0xFFFF) { _mm512_mask_storeu_ps(to, lanes, values); }

inline void store(Bf16* to, __m512 values, __mmask16 lanes = 0xFFFF) {
#ifdef __AVX512BF16__
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh(values);
#else
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    __m256i rounded = _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_mov_epi32(up, is_nan, _mm512_set1_epi32(0x7FC00000)), 16));
#endif
    _mm256_mask_storeu_epi16(to, lanes, rounded);
}

inline void fetch_line(const void* place) { _mm_prefetch(static_cast<const char*>(place), _MM_HINT_T0); }

template <class T>
inline __m512 dot(__m512 sum, __m512i a, __m512i b);

template <>
inline __m512 dot<float>(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

template <>
inline __m512 dot<Bf16>(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i upper = _mm512_set1_epi32(0xFFFF0000);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, upper)),
                          _mm512_castsi512_ps(_mm512_and_si512(b, upper)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                           _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
#endif
}

// 2^x for finite x <= 126, within 2e-7 of it; 0 for what is below every float.
inline __m512 exp2_of_finite(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(x, whole);
    // 2^rest for |rest| <= 1/2: the polynomial of degree 5, 1 at 0, whose largest relative error is least (1.1e-7).
    __m512 sum = _mm512_set1_ps(1.32647273e-3f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.67151299e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.55073358e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.40222424e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.93147004e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

// The same, and 0 for minus infinity.
inline __m512 exp2(__m512 x) { return exp2_of_finite(_mm512_max_ps(x, _mm512_set1_ps(-150.0f))); }

constexpr float LOG2_E = 1.4426950408889634f;

inline __m512 silu(__m512 x) {
    __m512 exponent = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)), _mm512_set1_ps(126.0f));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp2(exponent)));
}
