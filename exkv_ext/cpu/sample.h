// From a row of logits to a token, see exkv/ops/sample.py. Written once, for any processor: what
// takes time is one look at every logit, whose loops compilers turn into vectors by themselves.
#pragma once

#include "../params/kv_quant_params.h"

namespace exkv {

struct SampleParams {
  FloatType dtype;
  int64_t rows;
  int64_t dim;             // the vocabulary
  int64_t step;            // values from a row to the next
  const void* logits;      // (rows, dim); a row's values are neighbours
  const double* uniforms;  // (rows) in [0, 1); null where nothing is drawn
  int64_t* tokens;         // (rows), the result; -1 where a row holds NaN, +inf or only -inf
  double temperature;
  int64_t top_k;
  double top_p;
  double min_p;
  double typical;
  bool temperature_last;
};

// Works on rows [begin, end).
void SampleRows(const SampleParams& params, int64_t begin, int64_t end);

}  // namespace exkv
