// Choosing tokens: the largest logit of a row, or a draw from its distribution. A row is one
// thread's, from its first token to its last. `models.truncation` and `models.noise` say what a
// draw means; here is the same, to the last bit of every integer.

#include "vectors.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

// ---------------------------------------------------------------------------------------------
// Argmax

template <typename T>
int32_t first_largest(const T* values, int64_t size) {
  constexpr int64_t kRun = 512;
  float best = -kInfinity;
  int64_t run = 0;
  for (int64_t start = 0; start < size; start += kRun) {
    const int64_t end = std::min(start + kRun, size);
    Floats tops = Floats{} - kInfinity;
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      const Floats next = load(values + i);
      tops = next > tops ? next : tops;
    }
    float top = largest(tops);
    for (; i < end; ++i) top = std::max(top, static_cast<float>(values[i]));
    if (top > best) best = top, run = start;
  }
  for (int64_t i = run; i < size; ++i)
    if (static_cast<float>(values[i]) == best) return static_cast<int32_t>(i);
  return 0;
}

// The lowest index of the largest value of each row.
at::Tensor argmax(const at::Tensor& any) {
  const auto values = any.contiguous();
  TORCH_CHECK(values.dim() == 2 && values.size(1) > 0, "values are ", values.sizes());
  const int64_t rows = values.size(0), size = values.size(1);
  auto out = at::empty({rows}, values.options().dtype(at::kInt));
  int32_t* to = out.mutable_data_ptr<int32_t>();
  const auto run = [&](auto* from) {
    at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = first_largest(from + i * size, size);
    });
  };
  if (values.scalar_type() == at::kBFloat16)
    run(values.const_data_ptr<at::BFloat16>());
  else
    run(values.const_data_ptr<float>());
  return out;
}

// ---------------------------------------------------------------------------------------------
// Grammars

constexpr int64_t kWord = 32;

template <typename T>
void forbid(T* logits, const int32_t* mask, int64_t size) {
  for (int64_t start = 0; start < size; start += kWord) {
    const auto allowed = static_cast<uint32_t>(mask[start / kWord]);
    if (allowed == ~0u) continue;
    const int64_t count = std::min(kWord, size - start);
    for (int64_t i = 0; i < count; ++i)
      if (((allowed >> i) & 1u) == 0) logits[start + i] = -kInfinity;
  }
}

// `logits` with -inf where a bit of `bitmask` is 0, in the rows that are `masked`.
at::Tensor constrain(const at::Tensor& logits, const at::Tensor& bitmask, const at::Tensor& masked) {
  TORCH_CHECK(logits.dim() == 2, "logits are ", logits.sizes());
  const int64_t rows = logits.size(0), size = logits.size(1);
  const int64_t words = (size + kWord - 1) / kWord;
  TORCH_CHECK(
      bitmask.sizes() == at::IntArrayRef({rows, words}) && bitmask.scalar_type() == at::kInt &&
          bitmask.is_contiguous(),
      "bitmask is ", bitmask.sizes(), " for logits ", logits.sizes());
  TORCH_CHECK(
      masked.sizes() == at::IntArrayRef({rows}) && masked.scalar_type() == at::kBool &&
          masked.is_contiguous(),
      "masked is ", masked.sizes(), " for logits ", logits.sizes());
  auto out = at::empty(logits.sizes(), logits.options(), at::MemoryFormat::Contiguous);
  out.copy_(logits);
  const int32_t* masks = bitmask.const_data_ptr<int32_t>();
  const bool* is_masked = masked.const_data_ptr<bool>();
  const auto run = [&](auto* to) {
    at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        if (is_masked[i]) forbid(to + i * size, masks + i * words, size);
    });
  };
  if (out.scalar_type() == at::kBFloat16)
    run(out.mutable_data_ptr<at::BFloat16>());
  else
    run(out.mutable_data_ptr<float>());
  return out;
}

// ---------------------------------------------------------------------------------------------
// Noise

// No value of `gumbel` is larger.
constexpr float kMostNoise = 22.9f;

template <typename W>
inline W mixed(W x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0xD35A2D97u;
  return x ^ (x >> 15);
}

// Two words that stand for a seed and a position.
struct NoiseKey {
  uint32_t first = 0x3C6EF372u, second = 0x1F83D9ABu;

  NoiseKey(const int32_t* seed, int32_t position) {
    for (const int32_t word : {seed[0], seed[1], position}) {
      first = mixed(first + static_cast<uint32_t>(word));
      second = mixed(second + static_cast<uint32_t>(word));
    }
  }
};

// (1 + f) * 2^e for f in [sqrt(1/2) - 1, sqrt(2) - 1): its logarithm, after Cephes' logf.
inline Floats log_of_parts(Floats f, Floats e) {
  const Floats square = f * f;
  Floats y = f * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f - 1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f - 1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f - 2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  y = y * f * square - e * 2.12194440e-4f - square * 0.5f;
  return f + y + e * 0.693359375f;
}

struct Parts {
  Floats f, e;
};

// Of positive, normal numbers.
inline Parts parts(Floats x) {
  constexpr int32_t kRootOfHalf = 0x3F3504F3;
  const Ints bits = reinterpret_cast<const Ints&>(x);
  const Ints exponent = (bits - kRootOfHalf) >> 23;
  const Ints mantissa = bits - (exponent << 23);
  return {reinterpret_cast<const Floats&>(mantissa) - 1.0f,
          __builtin_convertvector(exponent, Floats)};
}

// The noise of 16 token ids.
inline Floats gumbel(const NoiseKey& key, Words ids) {
  const Words bits = mixed(mixed(ids + key.first) + key.second);
  const Floats upper = __builtin_convertvector(bits >> 8, Floats) * 0x1p-24f;
  const Floats lower = (__builtin_convertvector(bits & 0xFFu, Floats) + 0.5f) * 0x1p-32f;
  Floats uniform = upper + lower;
  uniform = uniform < 1.0f ? uniform : Floats{} + (1.0f - 0x1p-24f);
  // log(1 - uniform), which must not be rounded to 1 - uniform where that is near 1.
  Parts rest = parts(1.0f - uniform);
  const Ints near_one = uniform < 0.25f;
  rest.f = near_one ? -uniform : rest.f;
  rest.e = near_one ? Floats{} : rest.e;
  const Parts exponential = parts(-log_of_parts(rest.f, rest.e));
  return -log_of_parts(exponential.f, exponential.e);
}

// ---------------------------------------------------------------------------------------------
// Draws

constexpr float kUnits = 0x1p25f;
constexpr int32_t kLimb = 1 << 13;
// A token of one unit or more is less than 18 below the best.
constexpr int32_t kBucketsPerNat = 64, kBuckets = 18 * kBucketsPerNat;

struct Sampling {
  float temperature, top_p, min_p;
  int64_t top_k;
};

// One row at a time; the memory is kept for the next.
class Row {
 public:
  explicit Row(int64_t size)
      : size_(size), distances_((size + kLanes - 1) / kLanes * kLanes), masses_(distances_.size()) {}

  template <typename T>
  int32_t draw(const T* logits, const Sampling& how, const NoiseKey& key) {
    fill(logits, how.temperature);
    float cut = -std::log(how.min_p);
    if (how.top_k > 0 && how.top_k < size_) cut = std::min(cut, distance_of_rank(how.top_k));
    if (how.top_p < 1.0f) cut = distance_of_share(how.top_p, cut);
    return best_within(cut, key);
  }

 private:
  template <typename T>
  void fill(const T* logits, float temperature) {
    Floats tops = Floats{} - std::numeric_limits<float>::max();
    int64_t i = 0;
    for (; i + kLanes <= size_; i += kLanes) {
      const Floats next = load(logits + i);
      store(&distances_[i], next);
      tops = greater(tops, next);
    }
    float best = largest(tops);
    for (; i < size_; ++i) {
      distances_[i] = static_cast<float>(logits[i]);
      best = std::max(best, distances_[i]);
    }
    std::fill(distances_.begin() + size_, distances_.end(), -kInfinity);
    for (i = 0; i < size_; i += kLanes)
      store(&distances_[i], (best - load(&distances_[i])) / temperature);
  }

  float distance_of_rank(int64_t rank) {
    order_.assign(distances_.begin(), distances_.begin() + size_);
    std::nth_element(order_.begin(), order_.begin() + rank - 1, order_.end());
    return order_[rank - 1];
  }

  // The largest distance, up to `cut`, before which there is less than `top_p` of the mass.
  float distance_of_share(float top_p, float cut) {
    const int64_t total = weigh(cut);
    const float rounded =
        static_cast<float>(total / kLimb) * kLimb + static_cast<float>(total % kLimb);
    const int64_t share = static_cast<int64_t>(std::ceil(std::max(top_p * rounded, 1.0f)));

    // Without branches: which tokens have a mass is as good as random.
    tokens_.resize(size_);
    int64_t count = 0;
    for (int64_t i = 0; i < size_; ++i) {
      tokens_[count] = static_cast<int32_t>(i);
      count += masses_[i] > 0;
    }
    buckets_.assign(kBuckets, 0);
    for (int64_t i = 0; i < count; ++i) buckets_[bucket(tokens_[i])] += masses_[tokens_[i]];
    int64_t before = 0;
    int32_t crossed = 0;
    while (crossed < kBuckets && before + buckets_[crossed] < share) before += buckets_[crossed++];
    if (crossed == kBuckets) return cut;

    const auto end = std::remove_if(tokens_.begin(), tokens_.begin() + count,
                                    [&](int32_t token) { return bucket(token) != crossed; });
    std::sort(tokens_.begin(), end,
              [&](int32_t a, int32_t b) { return distances_[a] < distances_[b]; });
    float last = distances_[tokens_.front()];
    for (auto token = tokens_.begin(); token != end; ++token) {
      if (distances_[*token] != last && before >= share) break;
      last = distances_[*token];
      before += masses_[*token];
    }
    return last;
  }

  // Sets the masses of the tokens up to `cut` and returns their sum.
  int64_t weigh(float cut) {
    Ints high{}, low{};
    for (int64_t i = 0; i < size_; i += kLanes) {
      const Floats distance = load(&distances_[i]);
      const Ints mass = __builtin_convertvector(exp_of_negative(-distance) * kUnits, Ints);
      const Ints left = distance <= cut ? mass : Ints{};
      *reinterpret_cast<Ints*>(&masses_[i]) = left;
      high += left / kLimb;
      low += left % kLimb;
    }
    int64_t total = 0;
    for (int64_t i = 0; i < kLanes; ++i) total += int64_t{high[i]} * kLimb + low[i];
    return total;
  }

  int32_t bucket(int32_t token) const {
    return static_cast<int32_t>(distances_[token] * kBucketsPerNat);
  }

  // The lowest id of the largest noisy score; where the most noise could not win, none is made.
  int32_t best_within(float cut, const NoiseKey& key) const {
    Words ids;
    for (uint32_t i = 0; i < kLanes; ++i) ids[i] = i;
    Floats best = Floats{} - kInfinity;
    Words best_ids{};
    float bound = -kInfinity;
    for (int64_t i = 0; i < size_; i += kLanes, ids += static_cast<uint32_t>(kLanes)) {
      const Floats distance = load(&distances_[i]);
      if (-largest(-distance) > std::min(cut, kMostNoise - bound)) continue;
      const Floats score = gumbel(key, ids) - distance;
      const Ints better = (distance <= cut) & (score > best);
      best = better ? score : best;
      best_ids = better ? ids : best_ids;
      bound = largest(best);
    }
    uint32_t id = std::numeric_limits<uint32_t>::max();
    for (int64_t i = 0; i < kLanes; ++i)
      if (best[i] == bound) id = std::min(id, best_ids[i]);
    return static_cast<int32_t>(id);
  }

  int64_t size_;
  std::vector<float> distances_, order_;  // distances in whole vectors, the rest infinite
  std::vector<int32_t> masses_, tokens_;
  std::vector<int64_t> buckets_;
};

at::Tensor checked(const at::Tensor& tensor, const char* name, at::ScalarType type,
                   at::IntArrayRef sizes) {
  TORCH_CHECK(tensor.scalar_type() == type, name, " is ", tensor.scalar_type(), ", not ", type);
  TORCH_CHECK(tensor.sizes() == sizes, name, " is ", tensor.sizes(), ", not ", sizes);
  return tensor.contiguous();
}

// A token of each row of `logits`, as `models.sampling.sample` has it.
at::Tensor sample(
    const at::Tensor& any, const at::Tensor& any_temperature, const at::Tensor& any_top_p,
    const at::Tensor& any_min_p, const at::Tensor& any_top_k, const at::Tensor& any_seeds,
    const at::Tensor& any_positions) {
  const auto logits = any.contiguous();
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits are ", logits.sizes());
  const int64_t rows = logits.size(0), size = logits.size(1);
  const auto temperature = checked(any_temperature, "temperature", at::kFloat, {rows});
  const auto top_p = checked(any_top_p, "top_p", at::kFloat, {rows});
  const auto min_p = checked(any_min_p, "min_p", at::kFloat, {rows});
  const auto top_k = checked(any_top_k, "top_k", at::kInt, {rows});
  const auto seeds = checked(any_seeds, "seeds", at::kInt, {rows, 2});
  const auto positions = checked(any_positions, "positions", at::kInt, {rows});
  auto out = at::empty({rows}, logits.options().dtype(at::kInt));
  int32_t* to = out.mutable_data_ptr<int32_t>();
  const auto run = [&](auto* from) {
    at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      Row row(size);
      for (int64_t i = begin; i < end; ++i) {
        const Sampling how{
            temperature.const_data_ptr<float>()[i], top_p.const_data_ptr<float>()[i],
            min_p.const_data_ptr<float>()[i], top_k.const_data_ptr<int32_t>()[i]};
        const NoiseKey key(
            seeds.const_data_ptr<int32_t>() + 2 * i, positions.const_data_ptr<int32_t>()[i]);
        const auto* values = from + i * size;
        to[i] = how.temperature > 0.0f ? row.draw(values, how, key) : first_largest(values, size);
      }
    });
  };
  if (logits.scalar_type() == at::kBFloat16)
    run(logits.const_data_ptr<at::BFloat16>());
  else
    run(logits.const_data_ptr<float>());
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dflash, m) {
  m.def("argmax(Tensor values) -> Tensor");
  m.def("constrain(Tensor logits, Tensor bitmask, Tensor masked) -> Tensor");
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_p, Tensor min_p, Tensor top_k, "
      "Tensor seeds, Tensor positions) -> Tensor");
}

TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("argmax", argmax);
  m.impl("constrain", constrain);
  m.impl("sample", sample);
}
