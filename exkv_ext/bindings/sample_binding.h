// Between torch and the choice of tokens: checks the tensors, makes the output, fills the params.
#pragma once

#include <cmath>
#include <limits>
#include <optional>

#include "../cpu/sample.h"
#include "rows_binding.h"

namespace exkv {

inline const double* CheckedUniforms(const Tensor& logits, const Tensor& uniforms) {
  CheckSameDevice("sample", "logits", logits, "uniforms", uniforms);
  STD_TORCH_CHECK(uniforms.scalar_type() == ScalarType::Double,
                  "sample: uniforms must be float64, not ",
                  torch::headeronly::toString(uniforms.scalar_type()));
  STD_TORCH_CHECK(uniforms.dim() == 1 && uniforms.size(0) == logits.size(0), "sample: uniforms ",
                  ShapeText(uniforms), " must hold one number for each row of logits ",
                  ShapeText(logits));
  STD_TORCH_CHECK(uniforms.is_contiguous(), "sample: uniforms must be contiguous");
  const double* values = static_cast<const double*>(uniforms.const_data_ptr());
  for (int64_t row = 0; row < uniforms.size(0); ++row) {
    STD_TORCH_CHECK(values[row] >= 0.0 && values[row] < 1.0, "sample: uniforms[", row, "] is ",
                    values[row], "; it must be in [0, 1)");
  }
  return values;
}

inline void CheckShare(const char* name, double value) {
  STD_TORCH_CHECK(value >= 0.0 && value <= 1.0, "sample: ", name, " is ", value,
                  "; it must be from 0 to 1");
}

// logits (B, V), uniforms (B) -> tokens (B).
template <typename Launch>
Tensor Sample(const Tensor& logits, const std::optional<Tensor>& uniforms, SampleParams params,
              const Launch& launch) {
  params.dtype = CheckRows("sample", "logits", logits);
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "sample: logits ", ShapeText(logits),
                  " must be (B, V), with a token to choose");
  STD_TORCH_CHECK(logits.size(1) <= std::numeric_limits<int32_t>::max(), "sample: logits ",
                  ShapeText(logits), " have more tokens than 2^31 - 1");
  STD_TORCH_CHECK(
      params.temperature >= 0.0 && std::isfinite(params.temperature) && params.top_k >= 0,
      "sample: temperature ", params.temperature, " and top_k ", params.top_k,
      " must be finite, and 0 or more");
  CheckShare("top_p", params.top_p);
  CheckShare("min_p", params.min_p);
  CheckShare("typical", params.typical);
  if (uniforms) {
    params.uniforms = CheckedUniforms(logits, *uniforms);
  } else {
    STD_TORCH_CHECK(params.temperature == 0.0 || params.top_k == 1, "sample: temperature ",
                    params.temperature, " and top_k ", params.top_k,
                    " draw; give uniforms, or temperature 0");
  }
  Tensor tokens = NewEmpty(logits, {logits.size(0)}, ScalarType::Long);
  if (logits.size(0) == 0) return tokens;
  const Tensor rows = InRows(logits);
  params.rows = logits.size(0);
  params.dim = logits.size(1);
  params.step = *RowStep(rows);
  params.logits = rows.const_data_ptr();
  params.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  launch(params);
  return tokens;
}

}  // namespace exkv
