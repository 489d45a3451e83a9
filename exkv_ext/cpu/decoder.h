// A bound run: token embedding, decoder layers and logits one after the other for a few tokens, in
// one go for all threads. RunParams hold what is bound once, CallParams what a call brings; see
// exkv/ops/bound_run.py. It runs the other ops' kernels, in the order of the layers' modules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "../params/append_params.h"
#include "attention.h"
#include "attention_plan.h"
#include "kv_quant.h"
#include "linear.h"
#include "linear_groups.h"
#include "linear_packed.h"
#include "router.h"
#include "rows.h"

namespace exkv {

// A layer's norms and projections, in the order in which the op takes them.
enum Norm { kBeforeAttention, kAfterAttention, kBeforeMlp, kAfterMlp, kOfQueries, kOfKeys, kNorms };
enum Projection { kQ, kK, kV, kOut, kGate, kUp, kDown, kProjections };

struct NormWeights {
  const void* weight;  // (dim), or null where there is no norm
  int64_t dim;         // values that are normed together: hidden, or those of one head or of all
  float eps;
  bool offset;       // the factor is 1 + weight
  bool centered;     // as NormParams have it
  const void* bias;  // likewise
};

enum class Stored { kFloats, kGroups, kPacked };

// What an adapter adds for some of a call's rows: b (a x); see exkv/layers/low_rank.py.
struct LowRank {
  int64_t first;  // row
  int64_t last;   // behind the last row, or -1 for all rows
  int64_t rank;
  const void* a;  // (rank, inputs)
  const void* b;  // (outputs, rank)
};

struct Matrix {
  const void* weight;  // (outputs, inputs) contiguous, or the codes of groups, or packed rows
  const void* bias;    // (outputs), or null
  int64_t inputs;
  int64_t outputs;
  Stored stored;
  int64_t hadamard;               // x is transformed first, in blocks of so many inputs; or 0
  bool exact;                     // floats of float32 in a run of another type, as x is made then
  float scale = 1.0f;             // times what comes out, which is rounded first
  GroupsMatrix groups;            // where it is in groups
  PackedMatrix packed;            // where its rows are packed
  std::vector<LowRank> low_rank;  // of rows that don't overlap

  int64_t most_rank() const {
    int64_t most = 0;
    for (const LowRank& part : low_rank) most = std::max(most, part.rank);
    return most;
  }
};

// The transform of x (rows, inputs) before it meets the matrix.
HadamardParams TransformOf(const Matrix& m, FloatType dtype, int64_t rows, const void* x,
                           void* out);

struct Expert {
  Matrix gate;  // without a weight in MLPs without a gate
  Matrix up;
  Matrix down;
};

// A mixture of experts.
struct Mixture {
  RouterParams router;          // but for what a call brings
  Matrix gate;                  // (experts, hidden), or without a weight where calls bring choices
  std::vector<Expert> experts;  // behind those that are routed to, one that all tokens take
  bool asks;                    // some have no weights here, and their answers are asked for
  bool shared;                  // whether there is that
  Matrix shared_gate;           // (1, hidden), or without a weight
  Matrix before;                // (features of those that are routed to, hidden); likewise
  Matrix after;                 // the other way around; likewise
  Act act;
  float alpha;           // of a clamped gate, see GateParams
  float limit;           // or 0 for none
  bool weighs_inputs;    // a token's weight multiplies what an expert gets, not what it answers
  int64_t features;      // that those get and answer that are routed to
  int64_t inner;         // of each of them
  int64_t shared_inner;  // or 0
};

struct StateMixer;  // state_mixer.h

// Latent attention (exkv/layers/latent.py): one head of keys, which are the values, too. The
// layer's projections are those of queries, of what is stored, and of the output; in the place of
// values', that of queries' low ranks, or without a weight.
struct Latent {
  int64_t heads;
  int64_t plain;                 // features of a head's queries that aren't rotated
  int64_t rotated;               // those that are
  int64_t rank;                  // of latent vectors
  int64_t values;                // of a head
  NormWeights query_norm;        // of queries' low ranks
  NormWeights norm;              // of latent vectors
  std::vector<Matrix> key_up;    // (rank, plain) of each head
  std::vector<Matrix> value_up;  // (values, rank) of each head
};

// Gates of what attention returns, made of the layer's input: for each feature, or for each head.
struct HeadGates {
  Matrix matrix;   // (H * D or H, hidden), or without a weight
  bool soft_plus;  // and not sigmoids
};

// A layer's attention or MLP may be asked of the caller: the run stops there, and goes on with the
// answer.
struct LayerParams {
  bool asks_attention;  // then nothing is known of its stores
  bool asks_whole;      // then it has no projections of attention either
  bool asks_mlp;        // then it has no gate, up and down, and no experts
  bool no_attention;    // nor anything in its place
  bool no_mlp;
  bool asks_experts() const { return mixture != nullptr && mixture->asks; }  // for some answers
  std::shared_ptr<Mixture> mixture;                                          // or null
  std::shared_ptr<Latent> latent;                                            // or null
  std::shared_ptr<StateMixer> mixer;  // in the place of attention, or beside it; or null
  bool beside;                        // whether the mixer is beside attention
  int64_t dim;                        // D
  NormWeights norms[kNorms];
  Matrix projections[kProjections];
  bool gated;  // a head's queries are followed by gates of what attention returns for it
  HeadGates gates;
  float input_scale;  // of attention; 1 for none
  Act act;
  int64_t interleaved;        // features of a head, the first ones, of which neighbours are rotated
  float residual;             // times what attention and MLP add
  bool parallel;              // the MLP sees what attention does, or its own norm of that input
  int64_t rotary;             // which of a call's factors
  bool normed_rotated;        // norms of heads come after their rotation
  int64_t query_factors;      // which of a call's factors queries are multiplied by; -1 for none
  int64_t chunk;              // of positions, of which a token sees its own; 0 for all
  const void* sinks;          // (H) scores of nothing, or null
  AppendParams append;        // but for what a call brings
  AttentionParams attention;  // likewise
  bool paged;                 // rows of the stores are pages
  bool in_part;               // stores that only attention over parts can read
  PartParams part;            // likewise

  // Values of a token's queries as attention meets them, and of its keys.
  int64_t queries() const {
    if (latent != nullptr) return latent->heads * dim;
    return projections[kQ].outputs / (gated ? 2 : 1);
  }
  int64_t keys() const { return projections[kK].outputs; }
  // What is read first.
  const Matrix& first() const {
    const bool low = latent != nullptr && projections[kV].weight != nullptr;
    return projections[low ? kV : kQ];
  }
  const Matrix& first_of_mlp() const {
    if (mixture != nullptr) return mixture->gate;
    return projections[projections[kGate].weight != nullptr ? kGate : kUp];
  }
  // Whether it has attention of its own, or asks for it.
  bool attends() const { return !no_attention && (mixer == nullptr || beside); }
};

struct RunParams {
  FloatType dtype;
  int64_t hidden;
  Matrix table;  // (vocabulary, hidden); without a weight where calls bring hidden states
  float scale;   // of what is looked up
  std::vector<LayerParams> layers;
  NormWeights last_norm;
  Matrix logits;  // without a weight where there is no head
};

struct Rotary {
  int64_t width;  // R, features of a head that are rotated
  TokenView cos;  // (B, T, 1, R)
  TokenView sin;
};

enum class LogitRows { kNone, kLast, kAll };

// Where a call begins: at the start, or with the answer to a layer's question.
enum class Begin { kStart, kAfterAttention, kAfterMlp, kAfterExperts };

struct CallParams {
  int64_t rows;    // B
  int64_t length;  // T
  int64_t kv_len;  // of the longest row, these tokens included
  const int32_t* past_lens;
  const int32_t* new_lens;     // or null: T in every row
  const int32_t* block_table;  // (B, table_row), where layers have pages
  int64_t table_row;
  const int32_t* store_rows;  // (B,), the rows of the stores that rows are of, or null
  std::vector<Rotary> rotary;
  const int64_t* ids;  // (B, T), where there is a table
  const void* x;       // (B, T, hidden), where there is none
  LogitRows wanted;
  void* out;  // logits (B, 1 or T, vocabulary), or, where none are wanted, (B, T, hidden)
  Begin begin;
  size_t layer;        // whose question was answered
  const void* answer;  // (B, T, H * D), (B, T, hidden) or (B, T, K, hidden)
  // The layer that asks next, and what about, if the run ends with a question: queries and keys
  // rotated and values, (B, T, heads * D), or the input of the MLP or all of attention,
  // (B, T, hidden). About experts, beside the latter, also choices and weights, (B, T, K).
  size_t asking;
  bool asks_attention;
  void* q;
  void* k;
  void* v;
  void* y;
  int64_t* chosen;
  float* weights;

  bool asks() const { return q != nullptr || y != nullptr; }
  int64_t tokens() const { return rows * length; }
  // Tokens of a row once those of the call are there.
  int64_t End(int64_t row) const {
    return past_lens[row] + (new_lens == nullptr ? length : new_lens[row]);
  }
  int64_t logit_rows() const { return wanted == LogitRows::kAll ? tokens() : rows; }
};

struct DecoderKernels {
  const LinearKernels& linear;
  const GroupsKernels& groups;
  const PackedKernels& packed;
  const RowKernels& rows;
  const AttentionKernels& attention;
  const KvQuantKernels& quant;
};

// Bytes of `space` that a call needs, aligned to 64.
int64_t RunBytes(const RunParams& params, const CallParams& call);

// Of experts whose choices calls bring, in the only layer of a run: rows of x (N, hidden), and
// `sum` or each choice's weighted output to `out`, (N, hidden) or (N, K, hidden); of experts that
// are elsewhere, nothing.
struct ChosenCall {
  int64_t rows;
  const void* x;
  const int64_t* chosen;  // (N, K)
  const float* weights;   // (N, K)
  bool sum;
  void* out;
};

void RunChosen(const DecoderKernels& kernels, const RunParams& params, const ChosenCall& call,
               int64_t threads, const ParallelFor& parallel_for);

void RunBound(const DecoderKernels& kernels, const RunParams& params, const CallParams& call,
              char* space, int64_t threads, const ParallelFor& parallel_for);

}  // namespace exkv
