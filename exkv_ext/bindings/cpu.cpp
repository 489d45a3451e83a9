// exkv_ext._C: the CPU kernels of the ops that exkv/ops defines, through torch's stable ABI.
//
// Loading this library registers them; it holds no Python objects. Each op reads: check, pick the
// instruction set, run rows in parallel on torch's own threads. Kernels: cpu/.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "../cpu/append.h"
#include "../cpu/attention.h"
#include "../cpu/attention_plan.h"
#include "../cpu/decoder.h"
#include "../cpu/isa.h"
#include "../cpu/kv_quant.h"
#include "../cpu/linear.h"
#include "../cpu/linear_groups.h"
#include "../cpu/linear_packed.h"
#include "../cpu/pack_codes.h"
#include "../cpu/rows.h"
#include "../cpu/sample.h"
#include "../cpu/sinks.h"
#include "append_binding.h"
#include "attention_binding.h"
#include "attention_part_binding.h"
#include "decode_attention_binding.h"
#include "decoder_binding.h"
#include "delta_binding.h"
#include "kv_groups_binding.h"
#include "kv_quant_binding.h"
#include "linear_binding.h"
#include "linear_groups_binding.h"
#include "linear_packed_binding.h"
#include "pack_codes_binding.h"
#include "rope_binding.h"
#include "router_binding.h"
#include "rows_binding.h"
#include "sample_binding.h"
#include "scan_binding.h"
#include "ssd_binding.h"

namespace exkv {
namespace {

// Values that one thread should at least get, as ATen's element-wise ops have it.
constexpr int64_t kGrain = 32768;

const KvQuantKernels& KvQuant() {
#if defined(__x86_64__)
  switch (ChosenIsa()) {
    case CpuIsa::kAvx512Bf16:
    case CpuIsa::kAvx512:
      return kKvQuantAvx512;
    case CpuIsa::kAvx2:
      return kKvQuantAvx2;
    case CpuIsa::kPortable:
      break;
  }
#endif
  return kKvQuantPortable;
}

template <typename Params>
void ForRows(const Params& params, void (*kernel)(const Params&, int64_t, int64_t)) {
  const int64_t grain = std::max<int64_t>(1, kGrain / params.dim);
  torch::stable::parallel_for(0, params.rows, grain,
                              [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

std::tuple<Tensor, Tensor> QuantizeKvCpu(const Tensor& x) {
  return QuantizeKv(x, [](const QuantizeParams& p) { ForRows(p, KvQuant().quantize); });
}

Tensor DequantizeKvCpu(const Tensor& q, const Tensor& scale, ScalarType dtype) {
  return DequantizeKv(q, scale, dtype,
                      [](const DequantizeParams& p) { ForRows(p, KvQuant().dequantize); });
}

std::tuple<Tensor, Tensor, Tensor> QuantizeGroupsCpu(const Tensor& x, int64_t bits) {
  return QuantizeGroups(x, bits, [](const PackParams& p) { ForRows(p, KvQuant().pack); });
}

Tensor DequantizeGroupsCpu(const Tensor& packed, const Tensor& scale, const Tensor& offset,
                           int64_t bits, int64_t head_dim, ScalarType dtype) {
  return DequantizeGroups(packed, scale, offset, bits, head_dim, dtype,
                          [](const UnpackParams& p) { ForRows(p, KvQuant().unpack); });
}

void RunHadamard(const HadamardParams& p) {
  const KvQuantKernels& kernels = KvQuant();
  const int64_t grain = std::max<int64_t>(1, kGrain / p.dim);
  torch::stable::parallel_for(0, p.rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> space(static_cast<size_t>(p.block));
    kernels.hadamard(p, space.data(), begin, end);
  });
}

Tensor HadamardCpu(const Tensor& x) { return HadamardTransform(x, RunHadamard); }

const AttentionKernels& AttentionTable() {
#if defined(__x86_64__)
  switch (ChosenIsa()) {
    case CpuIsa::kAvx512Bf16:
      return kAttentionAvx512Bf16;
    case CpuIsa::kAvx512:
      return kAttentionAvx512;
    case CpuIsa::kAvx2:
      return kAttentionAvx2;
    case CpuIsa::kPortable:
      break;
  }
#endif
  return kAttentionPortable;
}

// Products of queries and keys that are as soon done as a second thread is woken; on a machine that
// is busy that can take a thousand times as long.
constexpr int64_t kSharedProducts = int64_t{1} << 17;

void ShareAttention(const AttentionParams& params) {
  const int64_t queries = params.rows * params.length * params.heads;
  const bool alone = queries * params.kv_len * params.dim < kSharedProducts;
  RunAttention(AttentionTable(), params, [&](int64_t n, const auto& run) {
    torch::stable::parallel_for(0, n, alone ? n : 1, run);
  });
}

void LaunchAttention(const AttentionParams& params) {
  for (int64_t row = 0; row < params.rows; ++row) {
    STD_TORCH_CHECK(params.Past(row) >= 0, "attention: past_lens is ", params.Past(row), " in row ",
                    row, ", and a row can't hold fewer than 0 keys");
  }
  ShareAttention(params);
}

Tensor AttentionCpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& past_lens,
                    int64_t kv_len, bool ragged, double scale, int64_t window, double softcap) {
  return Attention({q, k, v, past_lens, kv_len, ragged, scale, window, softcap}, LaunchAttention);
}

Tensor AttentionInt8Cpu(const Tensor& q, const Tensor& k, const Tensor& k_scale, const Tensor& v,
                        const Tensor& v_scale, const Tensor& past_lens, int64_t kv_len,
                        double scale, int64_t window, double softcap) {
  return AttentionInt8({q, k, k_scale, v, v_scale, past_lens, kv_len, scale, window, softcap},
                       LaunchAttention);
}

std::tuple<Tensor, Tensor> AttentionPartCpu(const PartArguments& a) {
  if (!HasKernels(a)) return Reference(a);
  return AttentionPart(a, [&](const AttentionParams& params) {
    if (a.block_table.has_value()) CheckEntries(params, a.k[0].size(0));
    ShareAttention(params);
  });
}

const LinearKernels& LinearOfIsa() {
#if defined(__x86_64__)
  switch (ChosenIsa()) {
    case CpuIsa::kAvx512Bf16:
      return kLinearAvx512Bf16;
    case CpuIsa::kAvx512:
      return kLinearAvx512;
    case CpuIsa::kAvx2:
      return kLinearAvx2;
    case CpuIsa::kPortable:
      break;
  }
#endif
  return kLinearPortable;
}

// Pieces of a thread's share of many rows, so that one that others hold up gives some away.
constexpr int64_t kPieces = 4;
constexpr int64_t kManyRows = 17;

// Linear layers of one input, in one go: threads get whole blocks of outputs, and have no one to
// wait for between one layer and the next.
void RunLinear(const LinearKernels& kernels, const std::vector<LinearParams>& layers) {
  const auto blocks_of = [](const LinearParams& p) {
    return (p.outputs + kLinearBlock - 1) / kLinearBlock;
  };
  int64_t blocks = 0;
  for (const LinearParams& p : layers) blocks += blocks_of(p);
  const int64_t per_block = std::max<int64_t>(1, kLinearBlock * layers[0].inputs * layers[0].rows);
  const int64_t grain = std::max<int64_t>(1, kGrain / per_block);
  const auto run = [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // block of the layer at hand
    for (const LinearParams& p : layers) {
      const int64_t last = first + blocks_of(p);
      const int64_t from = std::max(begin, first) - first, to = std::min(end, last) - first;
      if (from < to) kernels.run(p, from * kLinearBlock, std::min(to * kLinearBlock, p.outputs));
      first = last;
    }
  };
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t piece = std::max(grain, blocks / (threads * kPieces));
  if (layers[0].rows < kManyRows || piece >= blocks) {
    torch::stable::parallel_for(0, blocks, grain, run);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(piece)) < blocks;) {
      run(begin, std::min(begin + piece, blocks));
    }
  });
}

Tensor LinearCpu(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
  const LinearKernels& kernels = LinearOfIsa();
  return Linear(x, weight, bias, kernels.max_rows,
                [&](const auto& layers) { RunLinear(kernels, layers); });
}

std::vector<Tensor> LinearsCpu(const Tensor& x, std::vector<Tensor> weights,
                               std::vector<Tensor> biases) {
  const LinearKernels& kernels = LinearOfIsa();
  return Linears(x, weights, biases, kernels.max_rows,
                 [&](const auto& layers) { RunLinear(kernels, layers); });
}

Tensor LinearHeadsCpu(const Tensor& x, const Tensor& weight) {
  const LinearKernels& kernels = LinearOfIsa();
  return LinearHeads(x, weight, kernels.max_rows,
                     [&](const auto& heads) { RunLinear(kernels, heads); });
}

int64_t ItemBytes(FloatType dtype) { return dtype == FloatType::kFloat32 ? 4 : 2; }

const GroupsKernels& GroupsOfIsa() {
#if defined(__x86_64__)
  switch (ChosenIsa()) {
    case CpuIsa::kAvx512Bf16:
      return kGroupsVnni;
    case CpuIsa::kAvx512:
    case CpuIsa::kAvx2:
      return kGroupsAvx2;
    case CpuIsa::kPortable:
      break;
  }
#endif
  return kGroupsPortable;
}

// Layers of one input x, one after the other: each is as long as a region of threads is worth.
void RunGroupsStrip(const void* x, std::vector<GroupsParams>& layers) {
  const GroupsKernels& kernels = GroupsOfIsa();
  const GroupsMatrix& first = layers[0].matrix;
  const FloatType dtype = layers[0].dtype;
  const int64_t rows = layers[0].rows;
  std::vector<char> input(static_cast<size_t>(kernels.input_bytes(dtype, rows, first.inputs)));
  for (size_t i = 0; i < layers.size(); ++i) {
    GroupsParams& p = layers[i];
    if (i == 0 || p.matrix.order != layers[i - 1].matrix.order) {
      kernels.prepare(dtype, rows, first.inputs, x, p.matrix.order, input.data());
    }
    p.input = input.data();
    const int64_t per_block = std::max<int64_t>(1, kGroupsBlock * first.inputs * rows);
    const int64_t grain = std::max<int64_t>(1, kGrain / per_block);
    torch::stable::parallel_for(0, p.matrix.blocks(), grain, [&](int64_t begin, int64_t end) {
      kernels.run(p, begin * kGroupsBlock, std::min(end * kGroupsBlock, p.matrix.outputs));
    });
  }
}

// Rows of x that are multiplied together: as integers they stay in the second cache.
constexpr int64_t kStripRows = 16;

void RunGroups(const void* x, std::vector<GroupsParams>& layers) {
  const int64_t rows = layers[0].rows, item = ItemBytes(layers[0].dtype);
  for (int64_t first = 0; first < rows; first += kStripRows) {
    std::vector<GroupsParams> strip = layers;
    for (GroupsParams& p : strip) {
      p.rows = std::min(kStripRows, rows - first);
      p.out = static_cast<char*>(p.out) + first * p.matrix.outputs * item;
    }
    RunGroupsStrip(static_cast<const char*>(x) + first * layers[0].matrix.inputs * item, strip);
  }
}

// Rows whose x is rounded at once, which the last cache has.
constexpr int64_t kRoundedRows = 512;

// Outputs of all rows: run(call, begin, end) computes those of some.
template <typename Run>
void RunRounded(const RoundedKernels& kernels, RoundedInput input, RoundedCall call,
                const Run& run) {
  const int64_t item = ItemBytes(call.dtype), rows = call.rows;
  const int64_t most = std::min(rows, kRoundedRows);
  const std::unique_ptr<char[]> space(new char[kernels.bytes(most, call.inputs, call.words)]);
  call.input = space.get();
  for (int64_t first = 0; first < rows; first += most) {
    input.rows = call.rows = std::min(most, rows - first);
    torch::stable::parallel_for(
        0, input.rows, std::max<int64_t>(1, kGrain / call.inputs),
        [&](int64_t begin, int64_t end) { kernels.round(input, space.get(), begin, end); });
    const int64_t tiles = (call.outputs + kRoundedTile - 1) / kRoundedTile;
    torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
      run(call, begin * kRoundedTile, std::min(end * kRoundedTile, call.outputs));
    });
    input.x = static_cast<const char*>(input.x) + input.rows * call.inputs * item;
    call.out = static_cast<char*>(call.out) + input.rows * call.outputs * item;
  }
}

template <typename Params>
RoundedCall RoundedOf(const Params& p, bool words) {
  const auto& m = p.matrix;
  return {p.dtype, p.rows, m.inputs, m.outputs, nullptr, p.bias, p.out, words};
}

// Whether bits of x, 8 or 16, are 16.
bool AreWords(const char* op, int64_t bits) {
  STD_TORCH_CHECK(bits == 8 || bits == 16, op, ": x in ", bits, " bits; it must be 8 or 16");
  return bits == 16;
}

Tensor LinearGroupsPromptCpu(const Tensor& x, std::vector<Tensor> tensors,
                             std::vector<int64_t> layout, std::optional<Tensor> bias,
                             int64_t bits) {
  const char* op = "linear_groups_prompt";
  const bool words = AreWords(op, bits);
  const GroupsKernels& kernels = GroupsOfIsa();
  if (kernels.run_rounded == nullptr) {
    return LinearGroupsPromptReference(x, tensors, layout, bias, bits);
  }
  const auto launch = [&](const void* values, const std::vector<GroupsParams>& layers) {
    const GroupsParams& p = layers[0];
    const GroupsMatrix& m = p.matrix;
    RunRounded(kernels.rounded, {p.dtype, p.rows, m.inputs, values, m.order, words},
               RoundedOf(p, words), [&](const RoundedCall& call, int64_t begin, int64_t end) {
                 kernels.run_rounded(m, call, begin, end);
               });
  };
  return LinearsGroups(op, x, tensors, layout, {bias}, launch)[0];
}

Tensor LinearGroupsCpu(const Tensor& x, std::vector<Tensor> tensors, std::vector<int64_t> layout,
                       std::optional<Tensor> bias) {
  return LinearsGroups("linear_groups", x, tensors, layout, {bias}, RunGroups)[0];
}

std::vector<Tensor> LinearsGroupsCpu(const Tensor& x, std::vector<Tensor> tensors,
                                     std::vector<int64_t> layout, std::vector<Tensor> biases) {
  return LinearsGroups(x, tensors, layout, biases, RunGroups);
}

Tensor DequantizeWeightCpu(std::vector<Tensor> tensors, std::vector<int64_t> layout, int64_t begin,
                           int64_t end, ScalarType dtype) {
  return DequantizeWeight(
      tensors, layout, begin, end, dtype, [&](const GroupsMatrix& m, FloatType type, void* out) {
        const int64_t blocks = (end - begin + kGroupsBlock - 1) / kGroupsBlock;
        const int64_t row = m.inputs * ItemBytes(type);
        const int64_t grain = std::max<int64_t>(1, kGrain / (kGroupsBlock * m.inputs));
        torch::stable::parallel_for(0, blocks, grain, [&](int64_t first, int64_t last) {
          GroupsOfIsa().dequantize(m, type, begin + first * kGroupsBlock,
                                   std::min(begin + last * kGroupsBlock, end),
                                   static_cast<char*>(out) + first * kGroupsBlock * row);
        });
      });
}

// Blocks of outputs, of so many inputs each.
template <typename Run>
void ForBlocks(int64_t blocks, int64_t inputs, const Run& run) {
  const int64_t grain = std::max<int64_t>(1, kGrain / (kGroupsBlock * inputs));
  torch::stable::parallel_for(0, blocks, grain, run);
}

Tensor PackCodesCpu(const Tensor& codes, int64_t bits) {
  return PackCodes(codes, bits, [](int64_t blocks, int64_t inputs, const auto& run) {
    ForBlocks(blocks, inputs, run);
  });
}

Tensor PackWordsCpu(const Tensor& words, int64_t bits, int64_t inputs,
                    std::optional<Tensor> order) {
  return PackWords(words, bits, inputs, order,
                   [](int64_t blocks, int64_t of, const auto& run) { ForBlocks(blocks, of, run); });
}

Tensor PackAwqCpu(const Tensor& words) {
  return PackAwq(words, [](int64_t blocks, int64_t inputs, const auto& run) {
    ForBlocks(blocks, inputs, run);
  });
}

std::vector<Tensor> SplitBlocksCpu(const Tensor& rows, int64_t type) {
  return SplitBlocks(rows, type, [](int64_t blocks, int64_t inputs, const auto& run) {
    ForBlocks(blocks, inputs, run);
  });
}

const PackedKernels& PackedOfIsa() {
#if defined(__x86_64__)
  switch (ChosenIsa()) {
    case CpuIsa::kAvx512Bf16:
      return kPackedVnni;
    case CpuIsa::kAvx512:
    case CpuIsa::kAvx2:
      return kPackedAvx2;
    case CpuIsa::kPortable:
      break;
  }
#endif
  return kPackedPortable;
}

void RunPacked(const void* x, PackedParams& p) {
  const PackedKernels& kernels = PackedOfIsa();
  const PackedInput kind = kernels.input_of(p.matrix);
  const int64_t inputs = p.matrix.inputs;
  std::vector<char> input(static_cast<size_t>(kernels.input_bytes(kind, p.dtype, p.rows, inputs)));
  kernels.prepare(kind, p.dtype, p.rows, inputs, x, input.data());
  p.input = input.data();
  const int64_t grain = std::max<int64_t>(1, kGrain / (inputs * p.rows));
  torch::stable::parallel_for(0, p.matrix.outputs, grain,
                              [&](int64_t begin, int64_t end) { kernels.run(p, begin, end); });
}

// Rows of a matrix in sections, their columns in the model's order.
template <typename Item>
void SortedRows(const GroupsMatrix& m, FloatType type, int64_t begin, int64_t end, Item* out) {
  const int64_t first = begin / kGroupsBlock, last = (end + kGroupsBlock - 1) / kGroupsBlock;
  ForBlocks(last - first, m.inputs, [&](int64_t from, int64_t to) {
    std::vector<Item> eight(static_cast<size_t>(kGroupsBlock * m.inputs));
    for (int64_t block = first + from; block < first + to; ++block) {
      const int64_t top = block * kGroupsBlock, below = std::min(top + kGroupsBlock, end);
      GroupsOfIsa().dequantize(m, type, top, below, eight.data());
      for (int64_t row = std::max(top, begin); row < below; ++row) {
        const Item* values = eight.data() + (row - top) * m.inputs;
        Item* to_row = out + (row - begin) * m.inputs;
        for (int64_t i = 0; i < m.inputs; ++i) to_row[m.order[i]] = values[i];
      }
    }
  });
}

Tensor LinearPackedCpu(const Tensor& x, std::vector<Tensor> tensors, StringHandle format,
                       std::vector<int64_t> layout, int64_t outputs, std::optional<Tensor> bias) {
  TakeText(format);  // for the reference
  if (SectionTensors::IsSections(layout)) {
    return LinearSections(x, tensors, layout, outputs, bias, RunGroups);
  }
  return LinearPacked("linear_packed", x, tensors, layout, outputs, bias, RunPacked);
}

Tensor LinearPackedPromptCpu(const Tensor& x, std::vector<Tensor> tensors, StringHandle format,
                             std::vector<int64_t> layout, int64_t outputs,
                             std::optional<Tensor> bias, int64_t bits) {
  const char* op = "linear_packed_prompt";
  const int64_t name = TextNumber(TakeText(format));
  const bool words = AreWords(op, bits);
  const PackedKernels& kernels = PackedOfIsa();
  if (kernels.run_rounded == nullptr || !PackedTensors::AreIntegers(layout)) {
    return LinearPackedPromptReference(x, tensors, name, layout, outputs, bias, bits);
  }
  const auto launch = [&](const void* values, const PackedParams& p) {
    const PackedMatrix& m = p.matrix;
    RunRounded(kernels.rounded, {p.dtype, p.rows, m.inputs, values, nullptr, words},
               RoundedOf(p, words), [&](const RoundedCall& call, int64_t begin, int64_t end) {
                 kernels.run_rounded(m, call, begin, end);
               });
  };
  return LinearPacked(op, x, tensors, layout, outputs, bias, launch);
}

Tensor DequantizePackedCpu(std::vector<Tensor> tensors, StringHandle format,
                           std::vector<int64_t> layout, int64_t inputs, int64_t begin, int64_t end,
                           ScalarType dtype) {
  TakeText(format);
  if (SectionTensors::IsSections(layout)) {
    return DequantizeSections(tensors, layout, inputs, begin, end, dtype,
                              [&](const GroupsMatrix& m, FloatType type, void* out) {
                                if (type == FloatType::kFloat32) {
                                  SortedRows(m, type, begin, end, static_cast<float*>(out));
                                } else {
                                  SortedRows(m, type, begin, end, static_cast<uint16_t*>(out));
                                }
                              });
  }
  return DequantizePacked(tensors, layout, inputs, begin, end, dtype,
                          [&](const PackedMatrix& m, FloatType type, void* out) {
                            const int64_t row = m.inputs * ItemBytes(type);
                            const int64_t grain = std::max<int64_t>(1, kGrain / m.inputs);
                            torch::stable::parallel_for(
                                begin, end, grain, [&](int64_t first, int64_t last) {
                                  char* to = static_cast<char*>(out) + (first - begin) * row;
                                  PackedOfIsa().dequantize(m, type, first, last, to);
                                });
                          });
}

const RowKernels& RowsOfIsa() {
#if defined(__x86_64__)
  switch (ChosenIsa()) {
    case CpuIsa::kAvx512Bf16:
    case CpuIsa::kAvx512:
      return kRowsAvx512;
    case CpuIsa::kAvx2:
      return kRowsAvx2;
    case CpuIsa::kPortable:
      break;
  }
#endif
  return kRowsPortable;
}

Tensor RmsNormCpu(const Tensor& x, const Tensor& weight, double eps, bool offset) {
  return RmsNorm(x, weight, eps, offset, [](const NormParams& p) { ForRows(p, RowsOfIsa().norm); });
}

Tensor LayerNormCpu(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, double eps,
                    bool offset) {
  return LayerNorm(x, weight, bias, eps, offset,
                   [](const NormParams& p) { ForRows(p, RowsOfIsa().norm); });
}

std::tuple<Tensor, Tensor> AddRmsNormCpu(const Tensor& x, const Tensor& residual,
                                         const Tensor& weight, double eps, bool offset) {
  return AddRmsNorm(x, residual, weight, eps, offset,
                    [](const NormParams& p) { ForRows(p, RowsOfIsa().norm); });
}

void SiluMulCpu(Tensor gate, const Tensor& up) {
  GateMul("silu_mul_", gate, up,
          [](const GateParams& p) { ForRows(p, RowsOfIsa().gate_mul[kSilu]); });
}

void ActivateCpu(Tensor x, int64_t act) {
  const char* op = "activate_";
  GateParams params{};
  params.dtype = CheckRows(op, "x", x);
  STD_TORCH_CHECK(x.is_contiguous(), op, ": x must be contiguous, since it is overwritten");
  STD_TORCH_CHECK(act >= 0 && act < kActs, op, ": act is ", act, "; there are ", int{kActs});
  if (x.numel() == 0) return;
  params.dim = params.gate_step = x.size(x.dim() - 1);
  params.rows = x.numel() / params.dim;
  params.gate = x.mutable_data_ptr();
  ForRows(params, RowsOfIsa().activate[act]);
}

void ClampedSwigluCpu(Tensor gate, const Tensor& up, double alpha, double limit) {
  GateMul("clamped_swiglu_", gate, up, [&](GateParams p) {
    p.alpha = static_cast<float>(alpha);
    p.limit = static_cast<float>(limit);
    ForRows(p, RowsOfIsa().clamped);
  });
}

// out float32 (B, T, H, D) of attention, lse float32 (B, T, H), sinks (H).
void ShareWithSinksCpu(Tensor out, const Tensor& lse, const Tensor& sinks) {
  const char* op = "share_with_sinks_";
  const FloatType dtype = CheckRows(op, "sinks", sinks);
  const bool fits = out.dim() == 4 && lse.dim() == 3 && sinks.dim() == 1 &&
                    sinks.size(0) == out.size(2) && lse.size(0) == out.size(0) &&
                    lse.size(1) == out.size(1) && lse.size(2) == out.size(2);
  STD_TORCH_CHECK(fits, op, ": out ", ShapeText(out), " must be (B, T, H, D), lse ", ShapeText(lse),
                  " (B, T, H) and sinks ", ShapeText(sinks), " (H,)");
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && lse.scalar_type() == ScalarType::Float,
                  op, ": out and lse must be float32, not ",
                  torch::headeronly::toString(out.scalar_type()), " and ",
                  torch::headeronly::toString(lse.scalar_type()));
  CheckSameDevice(op, "out", out, "lse", lse);
  CheckSameDevice(op, "out", out, "sinks", sinks);
  STD_TORCH_CHECK(out.is_contiguous(), op, ": out must be contiguous, since it is overwritten");
  if (out.numel() == 0) return;
  const Tensor scores = Contiguous(lse), own = Contiguous(sinks);
  const int64_t heads = sinks.size(0), dim = out.size(3);
  auto* values = out.mutable_data_ptr<float>();
  const auto* sums = scores.const_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kGrain / dim);
  torch::stable::parallel_for(0, lse.numel(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      ShareWithSink(values + i * dim, dim, sums[i], WideAt(own.const_data_ptr(), dtype, i % heads));
    }
  });
}

void GeluMulCpu(Tensor gate, const Tensor& up) {
  GateMul("gelu_mul_", gate, up,
          [](const GateParams& p) { ForRows(p, RowsOfIsa().gate_mul[kGeluTanh]); });
}

std::tuple<Tensor, Tensor> RopeCpu(const Tensor& q, const Tensor& k, const Tensor& cos,
                                   const Tensor& sin) {
  return Rope(q, k, cos, sin, [](const RopeParams& p) { ForRows(p, RowsOfIsa().rope); });
}

Tensor GatedDeltaCpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
                     const Tensor& beta, Tensor state, std::optional<Tensor> new_lens) {
  return GatedDelta(q, k, v, decay, beta, state, new_lens, [](const DeltaParams& p) {
    torch::stable::parallel_for(0, p.rows, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> space(static_cast<size_t>(SpaceOf(p)));
      RowsOfIsa().delta(p, space.data(), begin, end);
    });
  });
}

Tensor SsdCpu(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
              const Tensor& d, Tensor state, std::optional<Tensor> new_lens) {
  return StateSpaceDuality(x, dt, a, b, c, d, state, new_lens, [](const SsdParams& p) {
    torch::stable::parallel_for(0, p.rows, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> space(static_cast<size_t>(SpaceOf(p)));
      RowsOfIsa().ssd(p, space.data(), begin, end);
    });
  });
}

Tensor SelectiveScanCpu(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                        const Tensor& c, const Tensor& d, Tensor state,
                        std::optional<Tensor> new_lens) {
  return SelectiveScan(x, dt, a, b, c, d, state, new_lens, [](const ScanParams& p) {
    torch::stable::parallel_for(0, p.rows, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> space(static_cast<size_t>(2 * p.state_dim));
      RowsOfIsa().scan(p, space.data(), begin, end);
    });
  });
}

void AppendKvCpu(const AppendArguments& a) {
  AppendKv(a, [](const AppendParams& p) {
    CheckPlaces(p);
    const int64_t grain = std::max<int64_t>(1, kGrain / (p.heads * p.dim));
    torch::stable::parallel_for(0, p.rows * p.length, grain, [&](int64_t begin, int64_t end) {
      AppendTokens(p, RowsOfIsa(), KvQuant(), begin, end);
    });
  });
}

Tensor DecodeAttentionCpu(const Tensor& q, const Tensor& k, const Tensor& v,
                          std::vector<Tensor> k_stored, StringHandle k_format,
                          std::vector<Tensor> v_stored, StringHandle v_format,
                          const Tensor& past_lens, int64_t kv_len, double scale, int64_t window,
                          double softcap, int64_t ring, bool hadamard) {
  const std::string k_name = TakeText(k_format), v_name = TakeText(v_format);
  return DecodeAttention({q, k, v, k_stored, k_name, v_stored, v_name, past_lens, kv_len, scale,
                          window, softcap, ring, hadamard},
                         AppendKvCpu, ShareAttention, RunHadamard);
}

// Any matrix times a few rows, as the op of its kind does it.
void RunMatrix(const Matrix& m, FloatType dtype, const void* x, int64_t rows, void* out) {
  std::vector<char> turned;
  if (m.hadamard > 0) {
    turned.resize(static_cast<size_t>(rows * m.inputs * (dtype == FloatType::kFloat32 ? 4 : 2)));
    RunHadamard(TransformOf(m, dtype, rows, x, turned.data()));
    x = turned.data();
  }
  if (m.stored == Stored::kGroups) {
    std::vector<GroupsParams> one{{m.groups, dtype, rows, nullptr, m.bias, out}};
    return RunGroups(x, one);
  }
  if (m.stored == Stored::kPacked) {
    PackedParams p{m.packed, dtype, rows, nullptr, m.bias, out};
    return RunPacked(x, p);
  }
  const LinearParams p{dtype, rows, m.inputs, m.outputs, x, m.weight, m.bias, out};
  const int64_t grain = std::max<int64_t>(1, kGrain / (kLinearBlock * m.inputs * rows));
  const int64_t blocks = (m.outputs + kLinearBlock - 1) / kLinearBlock;
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    LinearOfIsa().run(p, begin * kLinearBlock, std::min(end * kLinearBlock, m.outputs));
  });
}

std::tuple<Tensor, Tensor> RouteExpertsCpu(const Tensor& logits, std::optional<Tensor> correction,
                                           int64_t top_k, bool sigmoid, bool normalize,
                                           double min_sum, int64_t groups, int64_t top_k_groups,
                                           int64_t best_of_group, double scale) {
  const RouterArguments router{top_k,  sigmoid,      normalize,     min_sum,
                               groups, top_k_groups, best_of_group, scale};
  return RouteExperts(logits, correction, router, [](const RouterParams& p, int64_t tokens) {
    const int64_t grain = std::max<int64_t>(1, kGrain / (16 * p.experts));
    torch::stable::parallel_for(0, tokens, grain,
                                [&](int64_t begin, int64_t end) { RouteTokens(p, begin, end); });
  });
}

// A token that chose an expert, and the weight of its answer.
struct Choice {
  int64_t token;
  float share;
};

std::vector<std::vector<Choice>> ChoicesOf(const Tensor& chosen, const Tensor& weights,
                                           int64_t experts) {
  std::vector<std::vector<Choice>> choices(static_cast<size_t>(experts));
  const int64_t taken = chosen.size(1);
  const auto* ids = chosen.const_data_ptr<int64_t>();
  const auto* shares = weights.const_data_ptr<float>();
  for (int64_t i = 0; i < chosen.size(0) * taken; ++i) {
    const bool there = ids[i] >= 0 && ids[i] < experts;
    STD_TORCH_CHECK(there && (choices[ids[i]].empty() || choices[ids[i]].back().token < i / taken),
                    "experts: chosen must name experts 0 to ", experts - 1,
                    ", none twice for a token");
    choices[ids[i]].push_back({i / taken, shares[i]});
  }
  return choices;
}

// exkv::chosen_experts: experts in ascending order, each with the tokens that chose it.
Tensor ChosenExpertsCpu(const Tensor& x, const Tensor& chosen, const Tensor& weights,
                        std::vector<Tensor> tensors, std::vector<int64_t> layouts,
                        StringHandle formats, StringHandle act) {
  TakeText(formats);  // for the reference
  const Act function = ActOf(TakeText(act));
  const std::vector<WeightArguments> matrices = SplitWeights(tensors, layouts);
  const auto type = KernelFloatType(x.scalar_type());
  const bool fits = x.dim() == 2 && chosen.dim() == 2 && weights.dim() == 2 &&
                    x.size(0) == chosen.size(0) && chosen.size(0) == weights.size(0) &&
                    chosen.size(1) == weights.size(1);
  STD_TORCH_CHECK(fits && type && chosen.scalar_type() == ScalarType::Long &&
                      weights.scalar_type() == ScalarType::Float && matrices.size() % 3 == 0,
                  "chosen_experts: x ", ShapeText(x),
                  " must be (N, hidden) of float32, float16 or "
                  "bfloat16, chosen ",
                  ShapeText(chosen), " int64 (N, K) and weights ", ShapeText(weights),
                  " float32 (N, K), with three matrices of each expert");
  CheckSameDevice("chosen_experts", "x", x, "chosen", chosen);
  CheckSameDevice("chosen_experts", "x", x, "weights", weights);
  const Tensor lined = Contiguous(x), ids = Contiguous(chosen), shares = Contiguous(weights);
  const int64_t hidden = x.size(1), item = *type == FloatType::kFloat32 ? 4 : 2;
  Tensor out = NewEmpty(lined, x.sizes());
  auto* sums = static_cast<char*>(out.mutable_data_ptr());
  std::memset(sums, 0, static_cast<size_t>(x.numel() * item));
  const auto* rows = static_cast<const char*>(lined.const_data_ptr());
  BoundTensors bound(lined, hidden);
  const auto choices = ChoicesOf(ids, shares, static_cast<int64_t>(matrices.size() / 3));
  for (size_t expert = 0; expert < choices.size(); ++expert) {
    const auto count = static_cast<int64_t>(choices[expert].size());
    if (count == 0) continue;
    const WeightArguments* of = &matrices[3 * expert];
    const int64_t inner = of[0].outputs();
    const std::string name = "expert " + std::to_string(expert) + "'s ";
    const Matrix gate = bound.MatrixOf(name + "gate", of[0], inner, hidden);
    const Matrix up = bound.MatrixOf(name + "up", of[1], inner, hidden);
    const Matrix down = bound.MatrixOf(name + "down", of[2], hidden, inner);
    std::vector<char> input(count * hidden * item), answer(count * hidden * item);
    std::vector<char> gated(count * inner * item), raised(count * inner * item);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(input.data() + i * hidden * item, rows + choices[expert][i].token * hidden * item,
                  hidden * item);
    }
    RunMatrix(gate, *type, input.data(), count, gated.data());
    RunMatrix(up, *type, input.data(), count, raised.data());
    const GateParams params{*type, count, inner, inner, inner, gated.data(), raised.data()};
    RowsOfIsa().gate_mul[function](params, 0, count);
    RunMatrix(down, *type, gated.data(), count, answer.data());
    for (int64_t i = 0; i < count; ++i) {
      const auto [token, share] = choices[expert][i];
      const int64_t row = hidden * item;
      RowsOfIsa().add_times(
          {*type, 1, hidden, hidden, hidden, sums + token * row, answer.data() + i * row}, share, 0,
          1);
    }
  }
  return out;
}

BoundRuns& Runs() {
  static BoundRuns* const runs = new BoundRuns;  // outlives every caller
  return *runs;
}

Tensor NewRunCpu(const Tensor& like, int64_t hidden) {
  auto run = std::make_shared<BoundRun>(like, hidden);
  const int64_t most = LinearOfIsa().max_rows(run->dtype());
  Tensor handle = NewEmpty(like, {2}, ScalarType::Long);
  handle.mutable_data_ptr<int64_t>()[0] = Runs().Add(std::move(run));
  handle.mutable_data_ptr<int64_t>()[1] = most;
  return handle;
}

void AddEmbeddingCpu(const Tensor& run, std::vector<Tensor> table, std::vector<int64_t> layout,
                     double scale) {
  Runs().Find(run)->Add(EmbeddingArguments{OneWeight(table, layout), scale});
}

void AddLayerCpu(const Tensor& run, std::vector<std::optional<Tensor>> norms,
                 std::vector<double> eps, std::vector<int64_t> kinds,
                 std::vector<std::optional<Tensor>> norm_biases, std::vector<Tensor> weights,
                 std::vector<int64_t> layouts, std::vector<std::optional<Tensor>> biases,
                 int64_t head_dim, StringHandle act, int64_t interleaved, double residual,
                 bool parallel, int64_t rotary, double scale, int64_t window, double softcap,
                 std::vector<Tensor> k_stored, StringHandle k_format, std::vector<Tensor> v_stored,
                 StringHandle v_format, int64_t ring, bool hadamard, bool paged, bool gated) {
  const std::string k_name = TakeText(k_format), v_name = TakeText(v_format);
  const Act function = ActOf(TakeText(act));
  Runs().Find(run)->Add(LayerArguments{std::move(norms),
                                       std::move(eps),
                                       std::move(kinds),
                                       std::move(norm_biases),
                                       SplitWeights(weights, layouts),
                                       std::move(biases),
                                       head_dim,
                                       function,
                                       interleaved,
                                       residual,
                                       parallel,
                                       rotary,
                                       scale,
                                       window,
                                       softcap,
                                       std::move(k_stored),
                                       k_name,
                                       std::move(v_stored),
                                       v_name,
                                       ring,
                                       hadamard,
                                       paged,
                                       gated});
}

void AddLatentCpu(const Tensor& run, std::vector<std::optional<Tensor>> norms,
                  std::vector<double> eps, std::vector<Tensor> weights,
                  std::vector<int64_t> layouts, std::vector<std::optional<Tensor>> biases,
                  int64_t heads, int64_t rotated, int64_t interleaved, int64_t rotary, double scale,
                  int64_t window, std::vector<Tensor> stored, StringHandle format, int64_t ring,
                  bool hadamard, bool paged) {
  LayerArguments beside{};
  beside.interleaved = interleaved;
  beside.rotary = rotary;
  beside.scale = scale;
  beside.window = window;
  beside.k_stored = std::move(stored);
  beside.k_format = TakeText(format);
  beside.ring = ring;
  beside.hadamard = hadamard;
  beside.paged = paged;
  Runs().Find(run)->Add(
      LatentArguments{std::move(norms), std::move(eps), SplitWeights(weights, layouts),
                      std::move(biases), heads, rotated},
      std::move(beside));
}

void AddExpertsCpu(const Tensor& run, std::vector<Tensor> weights, std::vector<int64_t> layouts,
                   std::vector<std::optional<Tensor>> biases, std::optional<Tensor> correction,
                   StringHandle act, int64_t experts, bool shared, int64_t top_k, bool sigmoid,
                   bool normalize, double min_sum, int64_t groups, int64_t top_k_groups,
                   int64_t best_of_group, double scale, bool gated, bool weighs_inputs, bool narrow,
                   double alpha, double limit, std::vector<int64_t> elsewhere) {
  const Act function = ActOf(TakeText(act));
  Runs().Find(run)->Add(ExpertsArguments{
      SplitWeights(weights, layouts),
      std::move(biases),
      std::move(correction),
      function,
      experts,
      shared,
      std::move(elsewhere),
      {top_k, sigmoid, normalize, min_sum, groups, top_k_groups, best_of_group, scale},
      gated,
      weighs_inputs,
      narrow,
      alpha,
      limit});
}

void AddDetailsCpu(const Tensor& run, bool no_attention, bool no_mlp, bool normed_rotated,
                   int64_t query_factors, int64_t chunk, std::optional<Tensor> sinks,
                   std::vector<Tensor> gates, std::vector<int64_t> layout, bool soft_plus,
                   double input_scale, std::vector<double> factors) {
  Runs().Find(run)->Add(DetailsArguments{no_attention, no_mlp, normed_rotated, query_factors, chunk,
                                         std::move(sinks), SplitWeights(gates, layout), soft_plus,
                                         input_scale, std::move(factors)});
}

void AddMixerCpu(const Tensor& run, StringHandle rule, std::vector<Tensor> weights,
                 std::vector<int64_t> layouts, std::vector<std::optional<Tensor>> biases,
                 std::vector<int64_t> sources, std::vector<int64_t> outputs, const Tensor& conv,
                 std::optional<Tensor> conv_bias, std::optional<Tensor> step_bias,
                 std::optional<Tensor> rates, std::optional<Tensor> skip, std::vector<Tensor> norms,
                 double eps, StringHandle gating, bool sigmoid, int64_t groups, int64_t order,
                 double largest_beta, double least_step, double most_step, const Tensor& inputs,
                 std::optional<Tensor> state, std::vector<double> factors, double input_scale,
                 bool beside) {
  Runs().Find(run)->Add(StateArguments{TakeText(rule),
                                       SplitWeights(weights, layouts),
                                       std::move(biases),
                                       std::move(sources),
                                       std::move(outputs),
                                       conv,
                                       conv_bias,
                                       step_bias,
                                       rates,
                                       skip,
                                       std::move(norms),
                                       eps,
                                       TakeText(gating),
                                       sigmoid,
                                       groups,
                                       order,
                                       largest_beta,
                                       least_step,
                                       most_step,
                                       inputs,
                                       state,
                                       std::move(factors),
                                       input_scale,
                                       beside});
}

void AddLowRankCpu(const Tensor& run, int64_t projection, const Tensor& a, const Tensor& b,
                   int64_t first, int64_t last) {
  Runs().Find(run)->Add(LowRankArguments{projection, a, b, first, last});
}

void AddHeadCpu(const Tensor& run, const Tensor& norm, std::optional<Tensor> norm_bias, double eps,
                int64_t kind, std::vector<Tensor> weight, std::vector<int64_t> layout,
                std::optional<Tensor> bias) {
  Runs().Find(run)->Add(HeadArguments{norm, std::move(norm_bias), eps, kind,
                                      OneWeight(weight, layout), std::move(bias)});
}

DecoderKernels KernelsOfRuns() {
  return {LinearOfIsa(), GroupsOfIsa(), PackedOfIsa(), RowsOfIsa(), AttentionTable(), KvQuant()};
}

void OnThreads(int64_t n, const std::function<void(int64_t, int64_t)>& part) {
  torch::stable::parallel_for(0, n, 1, part);
}

std::vector<Tensor> BoundRunCpu(const Tensor& run, const Tensor& x, const Tensor& past_lens,
                                std::optional<Tensor> new_lens, int64_t kv_len,
                                std::vector<Tensor> factors, int64_t logits,
                                std::optional<Tensor> space, std::optional<Tensor> answer,
                                int64_t at, std::optional<Tensor> block_table,
                                std::optional<Tensor> store_rows) {
  const RunCall call{
      x,     past_lens, new_lens, kv_len,      factors,   static_cast<LogitRows>(logits),
      space, answer,    at,       block_table, store_rows};
  return Runs().Find(run)->Call(
      call, [](const RunParams& params, const CallParams& of, char* space) {
        RunBound(KernelsOfRuns(), params, of, space, torch::stable::get_num_threads(), OnThreads);
      });
}

Tensor ChosenOfRunCpu(const Tensor& run, const Tensor& x, const Tensor& chosen,
                      const Tensor& weights, bool sum, std::optional<Tensor> counts) {
  return Runs().Find(run)->Chosen(
      x, chosen, weights, sum, counts, [](const RunParams& params, const ChosenCall& of) {
        RunChosen(KernelsOfRuns(), params, of, torch::stable::get_num_threads(), OnThreads);
      });
}

void ReleaseRunCpu(const Tensor& run) { Runs().Release(run); }

Tensor SampleCpu(const Tensor& logits, std::optional<Tensor> uniforms, double temperature,
                 int64_t top_k, double top_p, double min_p, double typical, bool temperature_last) {
  SampleParams params{};
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  params.typical = typical;
  params.temperature_last = temperature_last;
  return Sample(logits, uniforms, params, [](const SampleParams& p) { ForRows(p, SampleRows); });
}

}  // namespace
}  // namespace exkv

STABLE_TORCH_LIBRARY_IMPL(exkv, CPU, m) {
  m.impl("quantize_kv", TORCH_BOX(&exkv::QuantizeKvCpu));
  m.impl("dequantize_kv", TORCH_BOX(&exkv::DequantizeKvCpu));
  m.impl("quantize_groups", TORCH_BOX(&exkv::QuantizeGroupsCpu));
  m.impl("dequantize_groups", TORCH_BOX(&exkv::DequantizeGroupsCpu));
  m.impl("hadamard", TORCH_BOX(&exkv::HadamardCpu));
  m.impl("attention", TORCH_BOX(&exkv::AttentionCpu));
  m.impl("attention_int8", TORCH_BOX(&exkv::AttentionInt8Cpu));
  m.impl("attention_part", TORCH_BOX(&exkv::AttentionPartOp<exkv::AttentionPartCpu>));
  m.impl("linear", TORCH_BOX(&exkv::LinearCpu));
  m.impl("linears", TORCH_BOX(&exkv::LinearsCpu));
  m.impl("linear_heads", TORCH_BOX(&exkv::LinearHeadsCpu));
  m.impl("linear_groups", TORCH_BOX(&exkv::LinearGroupsCpu));
  m.impl("linear_groups_prompt", TORCH_BOX(&exkv::LinearGroupsPromptCpu));
  m.impl("linears_groups", TORCH_BOX(&exkv::LinearsGroupsCpu));
  m.impl("dequantize_weight", TORCH_BOX(&exkv::DequantizeWeightCpu));
  m.impl("pack_codes", TORCH_BOX(&exkv::PackCodesCpu));
  m.impl("pack_awq", TORCH_BOX(&exkv::PackAwqCpu));
  m.impl("pack_words", TORCH_BOX(&exkv::PackWordsCpu));
  m.impl("split_blocks", TORCH_BOX(&exkv::SplitBlocksCpu));
  m.impl("linear_packed", TORCH_BOX(&exkv::LinearPackedCpu));
  m.impl("linear_packed_prompt", TORCH_BOX(&exkv::LinearPackedPromptCpu));
  m.impl("dequantize_packed", TORCH_BOX(&exkv::DequantizePackedCpu));
  m.impl("chosen_experts", TORCH_BOX(&exkv::ChosenExpertsCpu));
  m.impl("route_experts", TORCH_BOX(&exkv::RouteExpertsCpu));
  m.impl("sigmoid_", TORCH_BOX(&exkv::Sigmoid));
  m.impl("rms_norm", TORCH_BOX(&exkv::RmsNormCpu));
  m.impl("layer_norm", TORCH_BOX(&exkv::LayerNormCpu));
  m.impl("add_rms_norm", TORCH_BOX(&exkv::AddRmsNormCpu));
  m.impl("silu_mul_", TORCH_BOX(&exkv::SiluMulCpu));
  m.impl("gelu_mul_", TORCH_BOX(&exkv::GeluMulCpu));
  m.impl("activate_", TORCH_BOX(&exkv::ActivateCpu));
  m.impl("clamped_swiglu_", TORCH_BOX(&exkv::ClampedSwigluCpu));
  m.impl("share_with_sinks_", TORCH_BOX(&exkv::ShareWithSinksCpu));
  m.impl("rope", TORCH_BOX(&exkv::RopeCpu));
  m.impl("gated_delta", TORCH_BOX(&exkv::GatedDeltaCpu));
  m.impl("ssd", TORCH_BOX(&exkv::SsdCpu));
  m.impl("selective_scan", TORCH_BOX(&exkv::SelectiveScanCpu));
  m.impl("append_kv", TORCH_BOX(&exkv::AppendKvOp<exkv::AppendKvCpu>));
  m.impl("decode_attention", TORCH_BOX(&exkv::DecodeAttentionCpu));
#if defined(__x86_64__)
  // Elsewhere torch's linear layers may be the faster ones; nobody has compared them yet.
  m.impl("new_run", TORCH_BOX(&exkv::NewRunCpu));
  m.impl("add_embedding", TORCH_BOX(&exkv::AddEmbeddingCpu));
  m.impl("add_layer", TORCH_BOX(&exkv::AddLayerCpu));
  m.impl("add_details", TORCH_BOX(&exkv::AddDetailsCpu));
  m.impl("add_latent", TORCH_BOX(&exkv::AddLatentCpu));
  m.impl("add_experts", TORCH_BOX(&exkv::AddExpertsCpu));
  m.impl("add_mixer", TORCH_BOX(&exkv::AddMixerCpu));
  m.impl("add_low_rank", TORCH_BOX(&exkv::AddLowRankCpu));
  m.impl("add_head", TORCH_BOX(&exkv::AddHeadCpu));
  m.impl("bound_run", TORCH_BOX(&exkv::BoundRunCpu));
  m.impl("chosen_of_run", TORCH_BOX(&exkv::ChosenOfRunCpu));
  m.impl("release_run", TORCH_BOX(&exkv::ReleaseRunCpu));
#endif
  m.impl("sample", TORCH_BOX(&exkv::SampleCpu));
}

// For exkv_ext.cpu_isa(); null where EXKV_CPU_ISA is nonsense, which the first op call explains.
extern "C" __attribute__((visibility("default"))) const char* exkv_cpu_isa() {
  try {
    return exkv::IsaName(exkv::ChosenIsa());
  } catch (const std::exception&) {
    return nullptr;
  }
}

// For exkv_ext.activations(): those that bound runs know, a line each.
extern "C" __attribute__((visibility("default"))) const char* exkv_activations() {
  static const std::string text = [] {
    std::string lines;
    for (const char* name : exkv::kActNames) lines += std::string(name) + "\n";
    return lines;
  }();
  return text.c_str();
}

// For exkv_ext.kv_formats(): what the kernels know of each format, a line each.
extern "C" __attribute__((visibility("default"))) const char* exkv_kv_formats() {
  static const std::string text = [] {
    std::string lines;
    for (const exkv::KvFormatTraits& of : exkv::kKvFormats) {
      lines += std::string(of.name) + " " + std::to_string(of.bits) + " " +
               std::to_string(of.tensors) + " " + std::to_string(of.tokens) + "\n";
    }
    return lines;
  }();
  return text.c_str();
}
