// How a token is chosen without sorting the vocabulary: the largest value of each block of 64 comes
// first. The k-th largest of those is no larger than the k-th largest of all values, so whatever is
// below it is out, and hardly more than k values are left to sort.
//
// Masses are float64 and summed one after the other, in the order of the reference's columns:
// every processor draws the same token.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "float_types.h"
#include "half.inc"

namespace exkv {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kFirstGuess = 256;  // tokens that a nucleus is looked for in, and
constexpr int64_t kGrowth = 8;        // how many times more where they are too few
constexpr int32_t kInfinityBits = 0x7f800000;

float Value(float x) { return x; }
float Value(BFloat16 x) { return AsFloat(uint32_t{x.bits} << 16); }
float Value(Half x) { return HalfValue(x.bits); }

int32_t SignedBits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Integers in the order of the floats; both zeros are one.
int32_t Ordered(float x) {
  const int32_t bits = SignedBits(x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Rising keys are falling values, and of equals rising ids.
uint64_t Key(float x, int64_t id) {
  const uint32_t falling = 0x7fffffffu - static_cast<uint32_t>(Ordered(x));
  return uint64_t{falling} << 32 | static_cast<uint64_t>(id);
}

// What a row needs besides its logits; kept from row to row for its memory.
struct Space {
  std::vector<int32_t> maxima;  // of each block, as Ordered has them
  std::vector<int32_t> ranked;
  std::vector<uint64_t> keys;
  // The candidates: the reference's columns, without those at -inf.
  std::vector<uint32_t> ids;
  std::vector<float> scores;
  std::vector<double> weights;
};

// Step 4 for one score, as the reference has it.
struct Temper {
  float largest;
  float divisor;
  bool now;

  float operator()(float x) const { return now ? (x - largest) / divisor : x; }
};

// The largest logit, and those of blocks; NaN where the row holds one.
template <typename T>
float LargestOfBlocks(const T* x, int64_t dim, std::vector<int32_t>& maxima) {
  int32_t largest = std::numeric_limits<int32_t>::min();
  int32_t magnitude = 0;  // above infinity's for NaN of either sign
  maxima.clear();
  for (int64_t first = 0; first < dim; first += kBlock) {
    const int64_t count = std::min(kBlock, dim - first);
    int32_t of_block = std::numeric_limits<int32_t>::min();
    for (int64_t i = 0; i < count; ++i) {
      const float value = Value(x[first + i]);
      of_block = std::max(of_block, Ordered(value));
      magnitude = std::max(magnitude, SignedBits(value) & 0x7fffffff);
    }
    maxima.push_back(of_block);
    largest = std::max(largest, of_block);
  }
  if (magnitude > kInfinityBits) return std::numeric_limits<float>::quiet_NaN();
  const int32_t bits = largest ^ ((largest >> 31) & 0x7fffffff);
  return AsFloat(static_cast<uint32_t>(bits));
}

// The keys of the k largest, in order.
template <typename T>
void RankLargest(const T* x, int64_t dim, int64_t k, Space& space) {
  int32_t least = std::numeric_limits<int32_t>::min();
  if (k < static_cast<int64_t>(space.maxima.size())) {
    space.ranked = space.maxima;
    const auto kth = space.ranked.begin() + (k - 1);
    std::nth_element(space.ranked.begin(), kth, space.ranked.end(), std::greater<int32_t>());
    least = *kth;
  }
  space.keys.clear();
  for (int64_t first = 0; first < dim; first += kBlock) {
    if (space.maxima[first / kBlock] < least) continue;
    for (int64_t id = first; id < std::min(first + kBlock, dim); ++id) {
      const float value = Value(x[id]);
      if (Ordered(value) >= least) space.keys.push_back(Key(value, id));
    }
  }
  if (k < static_cast<int64_t>(space.keys.size())) {
    std::nth_element(space.keys.begin(), space.keys.begin() + k, space.keys.end());
    space.keys.resize(k);
  }
  std::sort(space.keys.begin(), space.keys.end());
}

void AddCandidate(float score, int64_t id, Space& space) {
  if (score == -std::numeric_limits<float>::infinity()) return;
  space.ids.push_back(static_cast<uint32_t>(id));
  space.scores.push_back(score);
}

template <typename T>
void TakeLargest(const T* x, int64_t dim, int64_t k, const Temper& temper, Space& space) {
  RankLargest(x, dim, k, space);
  space.ids.clear();
  space.scores.clear();
  for (const uint64_t key : space.keys) {
    const int64_t id = static_cast<int64_t>(key & 0xffffffffu);
    AddCandidate(temper(Value(x[id])), id, space);
  }
}

// In the order of ids, those that aren't below `least`.
template <typename T>
void TakeFrom(float least, const T* x, int64_t dim, const Temper& temper, Space& space) {
  space.ids.clear();
  space.scores.clear();
  for (int64_t id = 0; id < dim; ++id) {
    const float score = temper(Value(x[id]));
    if (score >= least) AddCandidate(score, id, space);
  }
}

float Largest(const std::vector<float>& scores) {
  return *std::max_element(scores.begin(), scores.end());
}

// Weights with the same proportions as the candidates' probabilities; their sum.
double Weigh(Space& space) {
  const double largest = Largest(space.scores);
  space.weights.clear();
  for (const float score : space.scores) space.weights.push_back(std::exp(score - largest));
  return std::accumulate(space.weights.begin(), space.weights.end(), 0.0);
}

void Keep(size_t count, Space& space) {
  space.ids.resize(count);
  space.scores.resize(count);
}

// Step 6, of candidates that fall and are part of a mass `total`; whether they reach p.
bool KeepTopP(double p, double total, Space& space) {
  double before = 0.0;
  size_t count = 0;
  for (; count < space.scores.size() && (count == 0 || before < p); ++count) {
    before += std::exp(static_cast<double>(space.scores[count]) - space.scores[0]) / total;
  }
  Keep(count, space);
  return before >= p;
}

// Step 6 of all tokens: ever more of the largest, until they reach p.
template <typename T>
void TakeNucleus(const T* x, int64_t dim, double p, const Temper& temper, Space& space) {
  TakeLargest(x, dim, 1, temper, space);
  const double largest = space.scores[0];
  double total = 0.0;
  for (int64_t id = 0; id < dim; ++id) total += std::exp(temper(Value(x[id])) - largest);
  for (int64_t k = kFirstGuess;; k *= kGrowth) {
    TakeLargest(x, dim, std::min(k, dim), temper, space);
    if (KeepTopP(p, total, space) || k >= dim) return;
  }
}

// Step 7.
void KeepMinP(float min_p, Space& space) {
  const float largest = Largest(space.scores);
  size_t count = 0;
  for (size_t i = 0; i < space.scores.size(); ++i) {
    if (std::exp(space.scores[i] - largest) < min_p) continue;
    space.ids[count] = space.ids[i];
    space.scores[count++] = space.scores[i];
  }
  Keep(count, space);
}

// Step 8.
void KeepTypical(double mass, Space& space) {
  const double log_total = std::log(Weigh(space));
  const double largest = Largest(space.scores);
  const size_t size = space.scores.size();
  std::vector<double> log_p(size), distance(size);
  for (size_t i = 0; i < size; ++i) log_p[i] = space.scores[i] - largest - log_total;
  double entropy = 0.0;
  for (const double each : log_p) entropy -= std::exp(each) * each;
  for (size_t i = 0; i < size; ++i) distance[i] = std::abs(-log_p[i] - entropy);
  std::vector<size_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return distance[a] < distance[b]; });
  double before = 0.0;
  size_t count = 0;
  for (; count < size && (count == 0 || before < mass); ++count) {
    before += std::exp(log_p[order[count]]);
  }
  std::sort(order.begin(), order.begin() + count);
  for (size_t i = 0; i < count; ++i) {
    space.ids[i] = space.ids[order[i]];
    space.scores[i] = space.scores[order[i]];
  }
  Keep(count, space);
}

// Step 9: the first candidate where the cumulated weights exceed the share `uniform` of them all.
int64_t Draw(double uniform, Space& space) {
  const double target = uniform * Weigh(space);
  double cumulated = 0.0;
  size_t last = 0;
  for (size_t i = 0; i < space.ids.size(); ++i) {
    if (space.weights[i] == 0.0) continue;
    last = i;
    cumulated += space.weights[i];
    if (cumulated > target) break;
  }
  return space.ids[last];
}

// Steps 4 and 9 where nothing is dropped: only sums of blocks are kept, and one block is looked
// into again.
template <typename T>
int64_t DrawFromAll(const T* x, int64_t dim, double uniform, const Temper& temper, Space& space) {
  const auto weight = [&](int64_t id) { return std::exp(double{temper(Value(x[id]))}); };
  space.weights.clear();
  for (int64_t first = 0; first < dim; first += kBlock) {
    double sum = 0.0;
    for (int64_t id = first; id < std::min(first + kBlock, dim); ++id) sum += weight(id);
    space.weights.push_back(sum);
  }
  const double total = std::accumulate(space.weights.begin(), space.weights.end(), 0.0);
  const double target = uniform * total;
  double cumulated = 0.0;
  size_t block = 0;
  while (block + 1 < space.weights.size() && cumulated + space.weights[block] <= target) {
    cumulated += space.weights[block++];
  }
  int64_t last = block * kBlock;
  for (int64_t id = last; id < std::min<int64_t>((block + 1) * kBlock, dim); ++id) {
    const double each = weight(id);
    if (each == 0.0) continue;
    last = id;
    cumulated += each;
    if (cumulated > target) break;
  }
  return last;
}

// Steps 4 to 7 of one row.
template <typename T>
void TakeCandidates(const SampleParams& p, const T* x, const Temper& temper, Space& space) {
  if (p.top_k > 0 && p.top_k < p.dim) {
    TakeLargest(x, p.dim, p.top_k, temper, space);
    if (p.top_p < 1.0) KeepTopP(p.top_p, Weigh(space), space);
  } else if (p.top_p < 1.0) {
    TakeNucleus(x, p.dim, p.top_p, temper, space);
  } else if (p.top_k > 0) {
    TakeLargest(x, p.dim, p.dim, temper, space);
  } else {
    // What surely falls to min_p needs neither a place nor an exponential.
    const float margin = 1.0f - std::log(static_cast<float>(p.min_p));
    TakeFrom(temper(temper.largest) - margin, x, p.dim, temper, space);
  }
  if (p.min_p > 0.0) KeepMinP(static_cast<float>(p.min_p), space);
}

template <typename T>
int64_t SampleRow(const SampleParams& p, int64_t row, Space& space) {
  const T* x = static_cast<const T*>(p.logits) + row * p.step;
  const float largest = LargestOfBlocks(x, p.dim, space.maxima);
  if (!std::isfinite(largest)) return -1;
  if (p.temperature == 0.0 || p.top_k == 1) {
    return std::find_if(x, x + p.dim, [&](T each) { return Value(each) == largest; }) - x;
  }
  const float divisor = static_cast<float>(std::max(p.temperature, 1e-30));
  const bool typical = p.typical > 0.0 && p.typical < 1.0;
  if (p.top_k == 0 && p.top_p >= 1.0 && p.min_p == 0.0 && !typical) {
    return DrawFromAll(x, p.dim, p.uniforms[row], Temper{largest, divisor, true}, space);
  }
  TakeCandidates(p, x, Temper{largest, divisor, !p.temperature_last}, space);
  if (typical) KeepTypical(p.typical, space);
  if (p.temperature_last) {
    const Temper temper{Largest(space.scores), divisor, true};
    for (float& score : space.scores) score = temper(score);
  }
  return Draw(p.uniforms[row], space);
}

template <typename T>
void SampleTyped(const SampleParams& p, int64_t begin, int64_t end) {
  Space space;
  for (int64_t row = begin; row < end; ++row) p.tokens[row] = SampleRow<T>(p, row, space);
}

}  // namespace

void SampleRows(const SampleParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case FloatType::kFloat32:
      return SampleTyped<float>(p, begin, end);
    case FloatType::kFloat16:
      return SampleTyped<Half>(p, begin, end);
    case FloatType::kBFloat16:
      return SampleTyped<BFloat16>(p, begin, end);
  }
}

}  // namespace exkv
