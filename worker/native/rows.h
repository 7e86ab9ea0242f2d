// What is done to one token at a time: root-mean-square norms, rotary positions, writing the cache.
#pragma once

#include <cmath>

#include "simd.h"

// y = x / rms(x) * weight over `size` numbers; `size` is a multiple of 8.
template <class T>
inline void rms_norm(const float* x, const float* weight, float epsilon, int size, T* y) {
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < size; i += LANES) {
        const __m512 part = load(x + i, first_lanes(size - i));
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + epsilon));
    for (int i = 0; i < size; i += LANES) {
        const __mmask16 lanes = first_lanes(size - i);
        store(y + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i, lanes), factor), load(weight + i, lanes)), lanes);
    }
}

// Rotates one head: the halves of x are real and imaginary parts, turned by the angles of cosine and sine [size / 2].
template <class T>
inline void rotate(const float* x, const float* cosine, const float* sine, int size, T* y) {
    const int half = size / 2;
    for (int i = 0; i < half; i += LANES) {
        const __mmask16 lanes = first_lanes(half - i);
        const __m512 real = load(x + i, lanes), imaginary = load(x + half + i, lanes);
        const __m512 c = load(cosine + i, lanes), s = load(sine + i, lanes);
        store(y + i, _mm512_fmsub_ps(real, c, _mm512_mul_ps(imaginary, s)), lanes);
        store(y + half + i, _mm512_fmadd_ps(imaginary, c, _mm512_mul_ps(real, s)), lanes);
    }
}

template <class To, class From>
inline void copy(const From* from, To* to, int size) {
    for (int i = 0; i < size; i += LANES) {
        const __mmask16 lanes = first_lanes(size - i);
        store(to + i, load(from + i, lanes), lanes);
    }
}
