// A layer with a state in the place of keys and values, in a bound run: projections, a causal
// convolution, a recurrence, and the projection of what these give. See StateBlock in
// exkv/layers/descriptions.py.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder.h"

namespace exkv {

enum class StateRule {
  kDelta,  // the gated delta rule: of queries, keys and values; state (D_k, D_v) of a head
  kSsd,    // state space duality: of values, and what is written and read; state (N, P) of a head
  kScan,   // the selective scan, a state (N) of a channel
  kConv,   // no recurrence
};

// Some outputs of one of the projections: `count` heads of `size`, `step` outputs apart.
struct Outputs {
  int64_t projection;  // or -1 for none
  int64_t offset;
  int64_t size;
  int64_t step;
  int64_t count;

  int64_t width() const { return size * count; }
};

// A vector of float32, or of the run's type.
struct Numbers {
  const void* data;
  FloatType dtype;
};

constexpr size_t kMostInputs = 8;

// What the selective scan makes of the convolution's outputs: steps, what is written to states, and
// what is read from them; each after a norm.
struct Selection {
  Matrix low;  // (rank + 2 N, channels): the steps' low ranks, and the others
  NormWeights norms[3];
  Matrix steps;  // (channels, rank)
};

struct StateMixer {
  StateRule rule;
  int64_t rows;                  // that have a state
  std::vector<Matrix> inputs;    // kMostInputs at most
  std::vector<int64_t> sources;  // of each: an earlier projection, or -1 for the layer's input
  float input_scale;             // of that; 1 for none
  Selection selection;           // of kScan
  Matrix out;
  std::vector<Outputs> mixed;  // what the convolution goes over, side by side
  Outputs times;               // what is multiplied by that first
  Outputs gate;                // of what goes to `out`
  Outputs step;
  Outputs beta;
  ConvRowsParams conv;  // but for what a call brings
  // Of the recurrence, whose heads have a state (rows, keys, values) each.
  int64_t heads;    // H; of kScan, 1
  int64_t sharing;  // of them, that share one head of keys, or a group
  int64_t keys;     // D_k or N
  int64_t values;   // D_v or P; of kScan, all channels
  float* state;
  int64_t state_row;  // floats from a row's to the next
  int64_t channels;   // steps of a head: 1 or D_k
  Numbers step_bias;  // (H * channels)
  Numbers rates;      // (H), logarithms; of kScan, (channels, N)
  const float* skip;  // (H), of kSsd; of kScan, (channels)
  float least_step;   // likewise
  float most_step;
  float largest_beta;
  GatedNormParams norm;  // likewise but for what a call brings

  // Features behind the recurrence.
  int64_t inner() const { return rule == StateRule::kConv ? conv.channels : heads * values; }
};

// What a call's tokens have between the projections of such a layer.
struct MixerBuffers {
  char* projected[kMostInputs];  // each (tokens, outputs)
  char* convolved;               // (tokens, channels)
  float* steps;                  // (tokens, H, channels): logarithms of decays, or sizes of steps
  float* betas;                  // (tokens, H)
  float* rates;                  // (B, H); of kScan, (N, channels)
  char* low;                     // (tokens, rank + 2 N), of kScan
  char* selected[3];             // the parts of that, contiguous, normed
  char* raw_steps;               // (tokens, channels)
  char* recurred;                // (tokens, inner)
  char* kept;                    // likewise, behind the norm and the gate
  int64_t end;                   // bytes of all
};

inline MixerBuffers LayMixer(const StateMixer& m, FloatType dtype, const CallParams& call,
                             char* space) {
  const int64_t item = dtype == FloatType::kFloat32 ? 4 : 2;
  MixerBuffers b{};
  const auto take = [&](int64_t values, int64_t bytes) {
    constexpr int64_t kAlign = 64;
    char* begin = space + b.end;
    b.end += (values * bytes + kAlign - 1) / kAlign * kAlign;
    return begin;
  };
  const auto floats = [&](int64_t count) {
    return reinterpret_cast<float*>(take(count, sizeof(float)));
  };
  const int64_t tokens = call.tokens(), recurs = m.rule != StateRule::kConv;
  for (size_t i = 0; i < m.inputs.size(); ++i) {
    b.projected[i] = take(tokens * m.inputs[i].outputs, item);
  }
  b.convolved = take(tokens * m.conv.channels, item);
  b.steps = floats(recurs * tokens * m.heads * m.channels);
  b.betas = floats(recurs * tokens * m.heads);
  b.rates = floats(m.rule == StateRule::kScan ? m.keys * m.values : recurs * call.rows * m.heads);
  if (m.rule == StateRule::kScan) {
    b.low = take(tokens * m.selection.low.outputs, item);
    for (size_t i = 0; i < 3; ++i) b.selected[i] = take(tokens * m.selection.norms[i].dim, item);
    b.raw_steps = take(tokens * m.values, item);
  }
  b.recurred = take(recurs * tokens * m.inner(), item);
  b.kept = recurs ? take(tokens * m.inner(), item) : b.convolved;
  return b;
}

// Bytes that a layer needs if it is one.
inline int64_t MixerBytes(const LayerParams& layer, const CallParams& call) {
  if (layer.mixer == nullptr) return 0;
  return LayMixer(*layer.mixer, layer.mixer->conv.dtype, call, nullptr).end;
}

}  // namespace exkv
