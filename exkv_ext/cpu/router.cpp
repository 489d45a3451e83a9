#include "router.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "float_types.h"
#include "half.inc"

namespace exkv {
namespace {

constexpr float kBarred = -std::numeric_limits<float>::infinity();
// Of this share of the values or fewer, torch sorts as many as are asked for; of more, it parts
// them from the others first. That decides which of equal values are taken.
constexpr int64_t kFewOf = 64;

using Ranked = std::pair<float, int64_t>;

// NaN stand before all numbers, as in torch.topk.
bool Before(const Ranked& a, const Ranked& b) {
  return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
}

// The `count` largest of n values, in order, and where they are: those that torch.topk finds on
// this library's algorithms, among equal ones, too.
const std::vector<Ranked>& Largest(const float* values, int64_t n, int64_t count) {
  thread_local std::vector<Ranked> ranked;
  ranked.resize(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) ranked[i] = {values[i], i};
  const auto first = ranked.begin();
  if (count * kFewOf <= n) {
    std::partial_sort(first, first + count, ranked.end(), Before);
  } else {
    std::nth_element(first, first + count - 1, ranked.end(), Before);
    std::sort(first, first + count - 1, Before);
  }
  return ranked;
}

// Scores of all experts in place of their logits.
void Score(const RouterParams& p, float* scores) {
  if (p.sigmoid) {
    for (int64_t i = 0; i < p.experts; ++i) scores[i] = SigmoidOf(scores[i]);
    return;
  }
  float most = kBarred, sum = 0.0f;
  for (int64_t i = 0; i < p.experts; ++i) {
    most = std::isnan(scores[i]) ? scores[i] : std::max(most, scores[i]);
  }
  for (int64_t i = 0; i < p.experts; ++i) sum += scores[i] = std::exp(scores[i] - most);
  for (int64_t i = 0; i < p.experts; ++i) scores[i] /= sum;
}

// Bars all experts outside of the groups whose best ones have the largest sums.
void BarGroups(const RouterParams& p, float* preferred) {
  const int64_t size = p.experts / p.groups;
  thread_local std::vector<float> worth;
  worth.assign(static_cast<size_t>(p.groups), 0.0f);
  for (int64_t group = 0; group < p.groups; ++group) {
    const std::vector<Ranked>& best = Largest(preferred + group * size, size, p.best_of_group);
    for (int64_t i = 0; i < p.best_of_group; ++i) worth[group] += best[i].first;
    worth[group] = -worth[group];
  }
  const int64_t left_out = p.groups - p.top_k_groups;
  const std::vector<Ranked> worst = Largest(worth.data(), p.groups, left_out);
  for (int64_t i = 0; i < left_out; ++i) {
    float* of = preferred + worst[i].second * size;
    for (int64_t j = 0; j < size; ++j) of[j] += kBarred;
  }
}

void Route(const RouterParams& p, int64_t token) {
  thread_local std::vector<float> scores, preferred;
  scores.resize(static_cast<size_t>(p.experts));
  for (int64_t i = 0; i < p.experts; ++i) {
    scores[i] = WideAt(p.logits, p.dtype, token * p.experts + i);
  }
  Score(p, scores.data());
  preferred = scores;
  if (p.correction != nullptr) {
    for (int64_t i = 0; i < p.experts; ++i) preferred[i] += p.correction[i];
  }
  if (p.top_k_groups < p.groups) BarGroups(p, preferred.data());
  const std::vector<Ranked>& best = Largest(preferred.data(), p.experts, p.top_k);
  int64_t* chosen = p.chosen + token * p.top_k;
  float* weights = p.weights + token * p.top_k;
  float sum = 0.0f;
  for (int64_t i = 0; i < p.top_k; ++i) {
    chosen[i] = best[i].second;
    weights[i] = scores[best[i].second];
    sum += weights[i];
  }
  if (p.normalize) {
    sum = sum < p.min_sum ? p.min_sum : sum;  // a NaN stays
    for (int64_t i = 0; i < p.top_k; ++i) weights[i] /= sum;
  }
  for (int64_t i = 0; i < p.top_k; ++i) weights[i] *= p.scale;
}

}  // namespace

float SigmoidOf(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float WideAt(const void* values, FloatType dtype, int64_t i) {
  if (dtype == FloatType::kFloat32) return static_cast<const float*>(values)[i];
  const uint16_t bits = static_cast<const uint16_t*>(values)[i];
  return dtype == FloatType::kFloat16 ? HalfValue(bits) : AsFloat(uint32_t{bits} << 16);
}

void NarrowAt(float value, FloatType dtype, void* values, int64_t i) {
  if (dtype == FloatType::kFloat32) {
    static_cast<float*>(values)[i] = value;
  } else {
    static_cast<uint16_t*>(values)[i] =
        dtype == FloatType::kFloat16 ? HalfBits(value) : BFloat16Bits(value);
  }
}

void RouteTokens(const RouterParams& params, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) Route(params, token);
}

}  // namespace exkv
