// Sixteen numbers at a time, in the compiler's vector types (GCC, Clang), which are lowered to what
// the machine has.

#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <limits>

namespace {

constexpr int64_t kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2)));

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

inline Floats load(const at::BFloat16* from) {
  const Halves halves = *reinterpret_cast<const Halves*>(from);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  return reinterpret_cast<const Floats&>(words);
}

inline void store(float* to, Floats values) { *reinterpret_cast<Floats*>(to) = values; }

// Rounds to nearest, ties to even, as at::BFloat16 does; not for NaN.
inline void store(at::BFloat16* to, Floats values) {
  const Words words = reinterpret_cast<const Words&>(values);
  const Words rounded = words + 0x7fffu + ((words >> 16) & 1u);
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(rounded >> 16, Halves);
}

// Lanes i and i ^ step change places.
template <int step>
inline Floats swapped(Floats values) {
  Ints places;
  for (int i = 0; i < kLanes; ++i) places[i] = i ^ step;
  return __builtin_shuffle(values, places);
}

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

inline float largest(Floats v) {
  v = greater(v, swapped<8>(v));
  v = greater(v, swapped<4>(v));
  v = greater(v, swapped<2>(v));
  return greater(v, swapped<1>(v))[0];
}

inline float sum(Floats v) {
  v += swapped<8>(v);
  v += swapped<4>(v);
  v += swapped<2>(v);
  return (v + swapped<1>(v))[0];
}

// exp(x) for x <= 0, after Cephes' expf (2 ulp); 0 below -87.
inline Floats exp_of_negative(Floats x) {
  const Ints tiny = x < -87.0f;
  x = tiny ? Floats{} : x;
  const Floats n = __builtin_convertvector(
      __builtin_convertvector(x * 1.44269504088896341f - 0.5f, Ints), Floats);
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Ints scale = (__builtin_convertvector(n, Ints) + 127) << 23;
  return tiny ? Floats{} : y * reinterpret_cast<const Floats&>(scale);
}

}  // namespace
