// Norms, gates, rotary positions and what layers with a state compute on the CPU, whose work is a
// row at a time: one table of kernels for each instruction set. The arithmetic is in norm.inc,
// gate.inc, rope.inc, delta.inc, ssd.inc, scan.inc and states.inc, which each instruction set's
// file compiles once; that of a prompt's chunks in delta_chunks.inc and ssd_chunks.inc.
#pragma once

#include <algorithm>

#include "../params/attention_params.h"
#include "../params/kv_quant_params.h"

namespace exkv {

// All tensors are of dtype; a row's values are neighbours, and outputs are contiguous.
struct NormParams {
  FloatType dtype;
  int64_t rows;
  int64_t dim;
  int64_t x_step;         // values from a row of x to the next
  int64_t residual_step;  // likewise
  const void* x;          // (rows, dim)
  const void* residual;   // (rows, dim), or null
  const void* weight;     // (dim)
  float eps;
  bool offset;       // the factor is 1 + weight
  void* sum;         // (rows, dim), x + residual; null where residual is
  void* out;         // (rows, dim)
  bool centered;     // a norm of mean and variance, and not of the root mean square
  const void* bias;  // (dim) of a centered one, or null
};

// Activations of MLPs, by config.json's names.
enum Act { kSilu, kGeluTanh, kGelu, kRelu, kRelu2, kSoftPlus, kActs };
inline constexpr const char* kActNames[kActs] = {"silu",  "gelu_pytorch_tanh", "gelu", "relu",
                                                 "relu2", "softplus"};

struct GateParams {
  FloatType dtype;
  int64_t rows;
  int64_t dim;
  int64_t gate_step;
  int64_t up_step;
  void* gate;      // (rows, dim), and the result
  const void* up;  // (rows, dim), or unused
  // Of a clamped gate: the sigmoid's factor, and the largest gate and size of up.
  float alpha = 0.0f;
  float limit = 0.0f;
};

// Heads that are rotated: (B, T, count, D), and the result, contiguous.
struct RopeHeads {
  TokenView x;
  int64_t count;
  void* out;
};

// A row is a token: its queries' heads and its keys'.
struct RopeParams {
  FloatType dtype;
  int64_t rows;      // B * T
  int64_t dim;       // values of a row, all its heads'
  int64_t length;    // T
  int64_t head_dim;  // D
  int64_t width;     // R, even: the features that are rotated
  TokenView cos;     // (B, T, 1, R)
  TokenView sin;
  RopeHeads heads[2];
};

// A row is a head of a sequence.
struct DeltaParams {
  FloatType dtype;
  int64_t rows;       // B * H
  int64_t heads;      // H
  int64_t groups;     // heads of values to a head of keys
  int64_t length;     // T
  int64_t key_dim;    // D_k
  int64_t value_dim;  // D_v
  int64_t channels;   // decays of a head: 1, or D_k
  TokenView q;        // (B, T, H / groups, D_k)
  TokenView k;
  TokenView v;              // (B, T, H, D_v)
  const float* decay;       // (B, T, H, channels), logarithms
  const float* beta;        // (B, T, H)
  const int32_t* new_lens;  // (B,), real tokens; null for all
  float* state;             // (B, H, D_k, D_v)
  int64_t state_row;        // floats from a sequence's state to the next
  void* out;                // (B, T, H, D_v)
};

// A row is a head of a sequence.
struct SsdParams {
  FloatType dtype;
  int64_t rows;       // B * H
  int64_t heads;      // H
  int64_t groups;     // heads to a group of b and c
  int64_t length;     // T
  int64_t state_dim;  // N
  int64_t head_dim;   // P
  TokenView x;        // (B, T, H, P)
  TokenView b;        // (B, T, H / groups, N)
  TokenView c;
  const float* dt;          // (B, T, H)
  const float* a;           // (H)
  const float* d;           // (H)
  const int32_t* new_lens;  // (B,), real tokens; null for all
  float* state;             // (B, H, N, P)
  int64_t state_row;        // floats from a sequence's state to the next
  void* out;                // (B, T, H, P)
};

// Recurrences run the tokens of a long enough call in chunks; what is left, one after the other.
constexpr int64_t kChunkTokens = 64;
constexpr int64_t kLeastChunk = 16;

inline int64_t RoundUp(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

template <typename Params>
int64_t RealTokens(const Params& p, int64_t row) {
  return p.new_lens == nullptr ? p.length : std::clamp<int64_t>(p.new_lens[row], 0, p.length);
}

// Of a row's first `real` tokens, those that run in chunks.
inline int64_t TokensInChunks(int64_t real) {
  const int64_t rest = real % kChunkTokens;
  return real < kLeastChunk ? 0 : rest < kLeastChunk ? real - rest : real;
}

// Floats from one of a chunk's vectors to the next: no power of two, which would put all into the
// same few sets of a cache.
inline int64_t ChunkStep(int64_t size) { return RoundUp(size, 16) + 16; }

// Floats that a thread needs. One that aligns what it is given needs some more.
inline int64_t SpaceOf(const DeltaParams& p) {
  const int64_t step = ChunkStep(p.key_dim), tokens = ChunkStep(kChunkTokens);
  if (p.length < kLeastChunk) return 4 * p.key_dim;
  return 3 * kChunkTokens * step + step * (30 + tokens + 32) + 2 * kChunkTokens * (tokens + 32);
}

inline int64_t SpaceOf(const SsdParams& p) {
  const int64_t step = ChunkStep(p.state_dim), tokens = ChunkStep(kChunkTokens);
  if (p.length < kLeastChunk) return 2 * p.state_dim;
  return step * (kChunkTokens + tokens + 32) + 2 * kChunkTokens * (tokens + 32);
}

// A row is some channels of a sequence. All tensors are contiguous but the state.
constexpr int64_t kScanChannels = 64;

struct ScanParams {
  FloatType dtype;
  int64_t rows;    // B * blocks
  int64_t blocks;  // of channels
  int64_t length;  // T
  int64_t channels;
  int64_t state_dim;        // N
  const void* x;            // (B, T, channels)
  const void* b;            // (B, T, N)
  const void* c;            // (B, T, N)
  const float* dt;          // (B, T, channels)
  const float* a;           // (N, channels)
  const float* d;           // (channels)
  const int32_t* new_lens;  // (B,), real tokens; null for all
  float* state;             // (B, N, channels)
  int64_t state_row;        // floats from a sequence's state to the next
  void* out;                // (B, T, channels)
};

// Features of tokens, in heads: the i-th of a token is at
// data + token * step + i / size * head + i % size.
struct Features {
  const void* data;  // or null
  int64_t step;      // values from a token to the next
  int64_t size;      // of a head
  int64_t head;      // values from a head to the next
};

// A causal convolution of few tokens. A row is some channels of a sequence.
constexpr int64_t kConvChannels = 128;
constexpr int64_t kConvInputs = 3;

struct ConvRowsParams {
  FloatType dtype;
  int64_t rows;    // B * blocks()
  int64_t length;  // T
  int64_t channels;
  int64_t taps;
  Features inputs[kConvInputs];  // (B, T, ends[i] - ends[i - 1]) each: the channels, side by side
  int64_t ends[kConvInputs];     // the first channel behind each
  Features times;                // (B, T, channels) that inputs are multiplied by first; or none
  Features behind;               // likewise, that outputs are multiplied by
  const void* weight;            // (channels, taps), the newest input's factor last
  const void* bias;              // (channels), or null
  bool silu;                     // of outputs
  const int32_t* new_lens;       // (B,), real tokens; null for all
  void* state;                   // (B, taps - 1, channels), the inputs before
  int64_t state_row;             // values from a sequence's state to the next
  void* out;                     // (B, T, channels)

  int64_t blocks() const { return (channels + kConvChannels - 1) / kConvChannels; }
};

// How the norm of a token's features and their gate follow each other.
enum class Gating {
  kNormThenGate,    // the norm's outputs are rounded first
  kGateThenNorm,    // all in float32
  kNormedAndGated,  // the norm first, all in float32
  kGate,            // no norm; what is made of the gate is rounded first
};

// A root-mean-square norm of each of a token's groups of features, and its gate's activation. A row
// is a group.
struct GatedNormParams {
  FloatType dtype;
  int64_t groups;  // of a token
  int64_t dim;     // of a group
  const void* x;   // (N, groups, dim)
  Features gate;   // (N, groups * dim), whose groups lie together
  const void* weight;
  int64_t weight_step;  // values from a group's weights to the next's, or 0
  float eps;
  bool sigmoid;  // of the gate, and not SiLU, where the norm's outputs are rounded
  Gating gating;
  int64_t heads;  // groups are groups / heads times so many, and written the other way around
  void* out;      // (N, groups, dim)
};

// The kernels work on rows [begin, end).
struct RowKernels {
  void (*norm)(const NormParams& params, int64_t begin, int64_t end);
  // gate = act(gate) * up, the activation rounded first.
  void (*gate_mul[kActs])(const GateParams& params, int64_t begin, int64_t end);
  // gate = (up + 1) * gate * sigmoid(alpha * gate), clamped first; each step is rounded.
  void (*clamped)(const GateParams& params, int64_t begin, int64_t end);
  // gate = act(gate).
  void (*activate[kActs])(const GateParams& params, int64_t begin, int64_t end);
  void (*add)(const GateParams& params, int64_t begin, int64_t end);
  // What is added is multiplied by a factor first, and rounded.
  void (*add_times)(const GateParams& params, float factor, int64_t begin, int64_t end);
  // gate = factor * up.
  void (*scale)(const GateParams& params, float factor, int64_t begin, int64_t end);
  void (*rope)(const RopeParams& params, int64_t begin, int64_t end);
  // `space` is for SpaceOf(params) floats.
  void (*delta)(const DeltaParams& params, float* space, int64_t begin, int64_t end);
  void (*ssd)(const SsdParams& params, float* space, int64_t begin, int64_t end);
  // `space` is for 2 * state_dim floats.
  void (*scan)(const ScanParams& params, float* space, int64_t begin, int64_t end);
  void (*conv)(const ConvRowsParams& params, int64_t begin, int64_t end);
  void (*gated_norm)(const GatedNormParams& params, int64_t begin, int64_t end);
};

extern const RowKernels kRowsPortable;
#if defined(__x86_64__)
extern const RowKernels kRowsAvx2;
extern const RowKernels kRowsAvx512;
#endif

}  // namespace exkv
