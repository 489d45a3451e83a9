// Decoder layers one after the other for a few tokens, in one go for all threads: what
// exkv/ops/decoder_layers.py describes. It runs the other ops' kernels, in their order.
#pragma once

#include <cstdint>
#include <vector>

#include "../params/append_params.h"
#include "attention.h"
#include "attention_plan.h"
#include "kv_quant.h"
#include "linear.h"
#include "rows.h"

namespace exkv {

// A layer's linear maps, in the order in which the op takes them.
enum Map { kQ, kK, kV, kOut, kGate, kUp, kDown, kMaps };

struct MapParams {
  const void* weight;  // (outputs, inputs) contiguous
  const void* bias;    // (outputs), or null
};

struct LayerParams {
  const void* norm;         // (hidden)
  const void* second_norm;  // (hidden)
  MapParams maps[kMaps];
  AppendParams append;        // but for what is given
  AttentionParams attention;  // of the same stores, but for q and out
};

// All layers are alike but for what they read and write, and for their windows.
struct DecoderParams {
  FloatType dtype;
  int64_t rows;    // B
  int64_t length;  // T
  int64_t hidden;
  int64_t heads;     // H
  int64_t kv_heads;  // H_kv
  int64_t dim;       // D
  int64_t inner;     // of the network
  int64_t kv_len;    // of every row, these tokens included
  float eps;
  bool gelu;
  int64_t width;  // R, features of a head that are turned
  TokenView cos;  // (B, T, 1, R)
  TokenView sin;
  const int32_t* past_lens;  // (B,): kv_len - T in every row
  const void* x;             // (B, T, hidden)
  void* out;                 // the same
  std::vector<LayerParams> layers;

  int64_t tokens() const { return rows * length; }
};

struct DecoderKernels {
  const LinearKernels& linear;
  const RowKernels& rows;
  const AttentionKernels& attention;
  const KvQuantKernels& quant;
};

// Bytes of `space` that a call needs, aligned to 64.
int64_t DecoderBytes(const DecoderParams& params);

void RunDecoder(const DecoderKernels& kernels, const DecoderParams& params, char* space,
                int64_t threads, const ParallelFor& parallel_for);

}  // namespace exkv
