// The CPU operators that decide speed and exactness, each row computed in an order of its own:
// what a row gives depends neither on its neighbours nor on how many there are.

#include "vectors.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

// One stage of a 16 x 16 transpose: swaps off-diagonal blocks of `step` lanes in each row pair.
template <int step>
inline void exchange(Floats (&rows)[kLanes]) {
  Ints low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = (i & step) ? kLanes + (i ^ step) : i;
    high[i] = (i & step) ? kLanes + i : (i | step);
  }
  for (int i = 0; i < kLanes; ++i) {
    if (i & step) continue;
    const Floats a = rows[i], b = rows[i + step];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + step] = __builtin_shuffle(a, b, high);
  }
}

inline void transpose(Floats (&rows)[kLanes]) {
  exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

// Head size in scratch memory, where rows are whole vectors.
inline int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

template <typename T>
inline void widen(const T* from, int64_t dim, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(to + i, load(from + i));
  for (; i < dim; ++i) to[i] = static_cast<float>(from[i]);
  for (; i < padded(dim); ++i) to[i] = 0.0f;
}

// ---------------------------------------------------------------------------------------------
// Linear layers on weights packed once

// What a packed weight's handle points to. Calls with fewer rows than `min_rows` are padded, those
// with more than `max_rows` are cut: in between, the library's result for a row does not depend on
// the number of rows.
struct PackedWeight {
  at::Tensor weight;
  int64_t min_rows, max_rows;
};

at::Tensor library_linear(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  using Signature = at::Tensor(
      const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
      c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                             .typed<Signature>();
  return op.call(x, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// A tensor with the weight's shape and no elements behind it: compilers see a plain input, and the
// packed weight lives as long as its handle.
at::Tensor pack(const at::Tensor& weight, int64_t min_rows, int64_t max_rows) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
                             .typed<at::Tensor(const at::Tensor&, std::optional<int64_t>)>();
  TORCH_CHECK(weight.dim() == 2, "weight has ", weight.dim(), " dimensions, not 2");
  auto* packed = new PackedWeight{op.call(weight, kLanes), min_rows, max_rows};
  return at::from_blob(
      packed, weight.sizes(), {0, 0}, [](void* p) { delete static_cast<PackedWeight*>(p); },
      weight.options());
}

at::Tensor packed_linear(
    const at::Tensor& x, const at::Tensor& handle, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == handle.size(1), "x is ", x.sizes(), ", weight ",
              handle.sizes());
  TORCH_CHECK(handle.stride(0) == 0 && handle.stride(1) == 0, "not the handle of a packed weight");
  const auto& packed = *static_cast<const PackedWeight*>(handle.const_data_ptr());
  const int64_t rows = x.size(0);
  if (rows == 0) return at::empty({0, handle.size(0)}, x.options());
  if (rows >= packed.min_rows && rows <= packed.max_rows)
    return library_linear(x.contiguous(), packed.weight, bias);
  auto out = at::empty({rows, handle.size(0)}, x.options());
  for (int64_t first = 0; first < rows; first += packed.max_rows) {
    const int64_t count = std::min(packed.max_rows, rows - first);
    auto part = x.narrow(0, first, count);
    if (count < packed.min_rows) {
      auto wide = at::zeros({packed.min_rows, x.size(1)}, x.options());
      wide.narrow(0, 0, count).copy_(part);
      part = wide;
    }
    const auto result = library_linear(part.contiguous(), packed.weight, bias);
    if (rows == count) return result.narrow(0, 0, count);
    out.narrow(0, first, count).copy_(result.narrow(0, 0, count));
  }
  return out;
}

// Values below which a second thread costs more than it saves.
constexpr int64_t kSerialValues = 16'384;

// silu(gate) * up for `size` values, computed in float.
template <typename T>
void gate(const T* gates, const T* ups, int64_t size, T* to) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats x = load(gates + i);
    const Floats e = exp_of_negative(x < 0.0f ? x : -x);
    store(to + i, x * (x < 0.0f ? e : Floats{} + 1.0f) / (1.0f + e) * load(ups + i));
  }
  for (; i < size; ++i) {
    const float x = gates[i];
    to[i] = static_cast<T>(x / (1.0f + std::exp(-x)) * static_cast<float>(ups[i]));
  }
}

// down(silu(gate(x)) * up(x)), of which `gate_up` is the packed weight of both.
at::Tensor gated_mlp(
    const at::Tensor& x, const at::Tensor& gate_up, const std::optional<at::Tensor>& bias,
    const at::Tensor& down) {
  const auto wide = packed_linear(x, gate_up, bias).contiguous();
  const int64_t rows = wide.size(0), width = wide.size(1) / 2;
  auto hidden = at::empty({rows, width}, x.options());
  const auto run = [&]<typename T>(T* to) {
    const T* from = wide.const_data_ptr<T>();
    at::parallel_for(0, rows, kSerialValues / width + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        gate(from + 2 * i * width, from + (2 * i + 1) * width, width, to + i * width);
    });
  };
  if (x.scalar_type() == at::kBFloat16)
    run(hidden.mutable_data_ptr<at::BFloat16>());
  else
    run(hidden.mutable_data_ptr<float>());
  return packed_linear(hidden, down, std::nullopt);
}

// ---------------------------------------------------------------------------------------------
// Attention over KV pages

// Tokens of one task share their keys, so that these are read and widened once for all of them;
// more tokens than this are cut evenly.
constexpr int64_t kTokensPerTask = 8;
// Multiply-adds below which a second thread costs more than it saves.
constexpr int64_t kSerialWork = 200'000;

// Softmax attention of one query, updated by blocks of 16 keys in order of their position.
struct Query {
  float largest = -kInfinity, sum = 0.0f;
};

// Adds `count` keys (`keys` transposed, [dim][16]; `values` [16][dim]) to one query's result.
template <int64_t kDim>
inline void add_block_of(
    const float* q, const float* keys, const float* values, int64_t count, int64_t any_dim,
    Query& query, float* result) {
  const int64_t dim = kDim ? kDim : any_dim;
  Floats parts[4] = {};
  for (int64_t d = 0; d < dim; d += 4)
    for (int64_t part = 0; part < 4; ++part)
      parts[part] += q[d + part] * load(keys + (d + part) * kLanes);
  Floats scores = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  if (count < kLanes)
    for (int64_t j = count; j < kLanes; ++j) scores[j] = -kInfinity;
  const float top = std::max(query.largest, largest(scores));
  // Rarely anything but 1: the largest score is soon found.
  const float scale = top == query.largest ? 1.0f : std::exp(query.largest - top);
  const Floats weights = exp_of_negative(scores - top);
  query.largest = top;
  query.sum = query.sum * scale + sum(weights);
  float weight[kLanes];
  store(weight, weights);
  int64_t d = 0;
  // Four vectors at a time, each summed in the order of the keys; missing keys weigh nothing.
  constexpr int64_t kVectors = 4;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
    Floats out[kVectors];
    for (int64_t i = 0; i < kVectors; ++i) out[i] = load(result + d + i * kLanes) * scale;
    for (int64_t j = 0; j < kLanes; ++j)
      for (int64_t i = 0; i < kVectors; ++i)
        out[i] += weight[j] * load(values + j * dim + d + i * kLanes);
    for (int64_t i = 0; i < kVectors; ++i) store(result + d + i * kLanes, out[i]);
  }
  for (; d < dim; d += kLanes) {
    Floats out = load(result + d) * scale;
    for (int64_t j = 0; j < kLanes; ++j) out += weight[j] * load(values + j * dim + d);
    store(result + d, out);
  }
}

inline void add_block(
    const float* q, const float* keys, const float* values, int64_t count, int64_t dim,
    Query& query, float* result) {
  // The usual head sizes as constants, for the loops to be unrolled.
  if (dim == 64)
    add_block_of<64>(q, keys, values, count, dim, query, result);
  else if (dim == 128)
    add_block_of<128>(q, keys, values, count, dim, query, result);
  else
    add_block_of<0>(q, keys, values, count, dim, query, result);
}

// Up to 16 keys and values, widened; the keys transposed.
struct KeyBlock {
  explicit KeyBlock(int64_t dim) : rows(kLanes * padded(dim)), keys(rows.size()), values(rows.size()) {}

  template <typename T>
  void fill(const T* const* k, const T* const* v, int64_t count, int64_t dim) {
    const int64_t width = padded(dim);
    for (int64_t j = 0; j < count; ++j) {
      widen(k[j], dim, rows.data() + j * width);
      widen(v[j], dim, values.data() + j * width);
    }
    std::fill(rows.begin() + count * width, rows.end(), 0.0f);
    std::fill(values.begin() + count * width, values.end(), 0.0f);
    for (int64_t d = 0; d < width; d += kLanes) {
      Floats square[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) square[j] = load(rows.data() + j * width + d);
      transpose(square);
      for (int64_t j = 0; j < kLanes; ++j) store(keys.data() + (d + j) * kLanes, square[j]);
    }
  }

  std::vector<float> rows, keys, values;
};

template <typename T>
void paged_attention_kernel(
    const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& v_pool,
    const at::Tensor& block_table, const at::Tensor& slots, const at::Tensor& lens,
    const std::optional<at::Tensor>& own_k, const std::optional<at::Tensor>& own_v,
    at::Tensor& out) {
  const int64_t tokens = q.size(0), heads = q.size(1), group = q.size(2), dim = q.size(3);
  const int64_t page_size = k_pool.size(1), pages = block_table.size(1), width = padded(dim);
  const int64_t block = own_k ? tokens / own_k->size(0) : tokens;
  const T *queries = q.const_data_ptr<T>(), *k = k_pool.const_data_ptr<T>(),
          *v = v_pool.const_data_ptr<T>();
  const T *block_k = own_k ? own_k->const_data_ptr<T>() : nullptr,
          *block_v = own_v ? own_v->const_data_ptr<T>() : nullptr;
  T* result = out.mutable_data_ptr<T>();
  const int32_t *table = block_table.const_data_ptr<int32_t>(),
                *slot = slots.const_data_ptr<int32_t>(), *len = lens.const_data_ptr<int32_t>();
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));

  struct Task {
    int64_t first, last;
  };
  std::vector<Task> tasks;
  int64_t work = 0;
  for (int64_t first = 0; first < tokens;) {
    int64_t last = first;
    do {
      work += (len[last] + (own_k ? block : 0)) * heads * group * dim;
      ++last;
    } while (last < tokens && slot[last] == slot[first] && last % block != 0);
    const int64_t parts = (last - first + kTokensPerTask - 1) / kTokensPerTask;
    for (int64_t i = 0; i < parts; ++i)
      tasks.push_back({first + (last - first) * i / parts, first + (last - first) * (i + 1) / parts});
    first = last;
  }

  const int64_t num_tasks = static_cast<int64_t>(tasks.size());
  const int64_t total = num_tasks * heads;
  // Head by head, so that threads get equal shares of a causal triangle.
  at::parallel_for(0, total, work < kSerialWork ? total : 1, [&](int64_t begin, int64_t end) {
    KeyBlock keys(dim);
    std::vector<float> wide, sums;
    std::vector<Query> state;
    const T *k_rows[kLanes], *v_rows[kLanes];
    for (int64_t t = begin; t < end; ++t) {
      const auto [first, last] = tasks[t % num_tasks];
      const int64_t head = t / num_tasks, count = (last - first) * group;
      wide.resize(count * width);
      sums.assign(count * width, 0.0f);
      state.assign(count, Query{});
      int64_t longest = 0;
      for (int64_t i = first; i < last; ++i) {
        longest = std::max<int64_t>(longest, len[i]);
        for (int64_t g = 0; g < group; ++g) {
          float* to = wide.data() + ((i - first) * group + g) * width;
          widen(queries + ((i * heads + head) * group + g) * dim, dim, to);
          for (int64_t d = 0; d < dim; ++d) to[d] *= scale;
        }
      }
      const int32_t* row = table + slot[first] * pages;
      for (int64_t start = 0; start < longest; start += kLanes) {
        const int64_t found = std::min(kLanes, longest - start);
        for (int64_t j = 0; j < found; ++j) {
          const int64_t position = start + j;
          const int64_t place = row[position / page_size] * page_size + position % page_size;
          k_rows[j] = k + (place * heads + head) * dim;
          v_rows[j] = v + (place * heads + head) * dim;
        }
        keys.fill(k_rows, v_rows, found, dim);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t visible = std::min<int64_t>(found, len[first + i / group] - start);
          if (visible > 0)
            add_block(wide.data() + i * width, keys.keys.data(), keys.values.data(), visible,
                      width, state[i], sums.data() + i * width);
        }
      }
      for (int64_t start = 0; own_k && start < block; start += kLanes) {
        const int64_t found = std::min(kLanes, block - start);
        for (int64_t j = 0; j < found; ++j) {
          const int64_t place = ((first / block * block + start + j) * heads + head) * dim;
          k_rows[j] = block_k + place;
          v_rows[j] = block_v + place;
        }
        keys.fill(k_rows, v_rows, found, dim);
        for (int64_t i = 0; i < count; ++i)
          add_block(wide.data() + i * width, keys.keys.data(), keys.values.data(), found, width,
                    state[i], sums.data() + i * width);
      }
      for (int64_t i = 0; i < count; ++i) {
        // A token that sees nothing is padding; it gets zeros.
        const float inverse = state[i].sum > 0.0f ? 1.0f / state[i].sum : 0.0f;
        T* to = result + (((first + i / group) * heads + head) * group + i % group) * dim;
        for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(sums[i * width + d] * inverse);
      }
    }
  });
}

void check(const at::Tensor& tensor, const char* name, at::ScalarType type, int64_t dims) {
  TORCH_CHECK(tensor.scalar_type() == type, name, " is ", tensor.scalar_type(), ", not ", type);
  TORCH_CHECK(tensor.dim() == dims, name, " has ", tensor.dim(), " dimensions, not ", dims);
  TORCH_CHECK(tensor.is_contiguous(), name, " is not contiguous");
}

at::Tensor paged_attention(
    const at::Tensor& q_any, const at::Tensor& k_pool, const at::Tensor& v_pool,
    const at::Tensor& block_table, const at::Tensor& slots, const at::Tensor& lens,
    const std::optional<at::Tensor>& own_k_any, const std::optional<at::Tensor>& own_v_any) {
  const auto q = q_any.contiguous();
  const auto type = q.scalar_type();
  check(q, "q", type, 4);
  std::optional<at::Tensor> own_k, own_v;
  TORCH_CHECK(own_k_any.has_value() == own_v_any.has_value(), "own_k without own_v, or own_v alone");
  if (own_k_any) {
    own_k = own_k_any->contiguous();
    own_v = own_v_any->contiguous();
    check(*own_k, "own_k", type, 4);
    check(*own_v, "own_v", type, 4);
    TORCH_CHECK(own_k->sizes() == own_v->sizes(), "own_k is ", own_k->sizes(), ", own_v ",
                own_v->sizes());
    TORCH_CHECK(own_k->size(0) * own_k->size(1) == q.size(0) && own_k->size(2) == q.size(1) &&
                    own_k->size(3) == q.size(3),
                "q is ", q.sizes(), ", own_k ", own_k->sizes());
  }
  check(k_pool, "k_pool", type, 4);
  check(v_pool, "v_pool", type, 4);
  check(block_table, "block_table", at::kInt, 2);
  check(slots, "slots", at::kInt, 1);
  check(lens, "lens", at::kInt, 1);
  TORCH_CHECK(slots.size(0) == q.size(0) && lens.size(0) == q.size(0), "q has ", q.size(0),
              " tokens, slots ", slots.size(0), ", lens ", lens.size(0));
  TORCH_CHECK(k_pool.sizes() == v_pool.sizes(), "k_pool is ", k_pool.sizes(), ", v_pool ",
              v_pool.sizes());
  TORCH_CHECK(k_pool.size(2) == q.size(1) && k_pool.size(3) == q.size(3), "q is ", q.sizes(),
              ", k_pool ", k_pool.sizes());
  auto out = at::empty(q.sizes(), q.options());
  if (type == at::kBFloat16)
    paged_attention_kernel<at::BFloat16>(
        q, k_pool, v_pool, block_table, slots, lens, own_k, own_v, out);
  else if (type == at::kFloat)
    paged_attention_kernel<float>(q, k_pool, v_pool, block_table, slots, lens, own_k, own_v, out);
  else
    TORCH_CHECK(false, "q is ", type, ", not float32 or bfloat16");
  return out;
}

}  // namespace

TORCH_LIBRARY(dflash, m) {
  m.def("pack(Tensor weight, int min_rows, int max_rows) -> Tensor");
  m.def("linear(Tensor x, Tensor handle, Tensor? bias) -> Tensor");
  m.def("gated_mlp(Tensor x, Tensor gate_up, Tensor? bias, Tensor down) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor slots, "
      "Tensor lens, Tensor? own_k, Tensor? own_v) -> Tensor");
}

TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("pack", pack);
  m.impl("linear", packed_linear);
  m.impl("gated_mlp", gated_mlp);
  m.impl("paged_attention", paged_attention);
}
