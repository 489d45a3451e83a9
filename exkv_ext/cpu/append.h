// Storing new keys and values on the CPU: a token at a time goes through the kernels that rope,
// transform and encode, from one small buffer into its place.
#pragma once

#include <cstdint>

#include "../params/append_params.h"
#include "kv_quant.h"
#include "rows.h"

namespace exkv {

// Stores tokens [begin, end) of the B * T that there are.
void AppendTokens(const AppendParams& params, const RowKernels& rope, const KvQuantKernels& encode,
                  int64_t begin, int64_t end);

}  // namespace exkv
