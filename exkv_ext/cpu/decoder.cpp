#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "append.h"
#include "float_types.h"
#include "half.inc"
#include "scratch.h"
#include "sinks.h"
#include "state_mixer.h"
#include "team.h"

namespace exkv {
namespace {

constexpr int64_t kAlign = 64;
// Values of the hidden state whose sum over experts is taken at a time.
constexpr int64_t kSummed = 256;
// Outputs of a linear layer that stay together.
constexpr int64_t kBlock = kGroupsBlock;
static_assert(kBlock % kLinearBlock == 0);
// Blocks that a thread takes at a time: half of them are a stream of their own where there is one
// row.
constexpr int64_t kStep = 4;
// What a thread that waits asks for meanwhile, of the weights that it will read next: less than the
// second cache has room for.
constexpr int64_t kAheadBytes = 64 << 10;
constexpr int64_t kLine = 64;
constexpr int64_t kStagesOfLayer = 28;
constexpr int64_t kStagesOfMixer = 28;  // beside attention
constexpr int64_t kStagesBeside = 5;    // embedding, last norm, logits

int64_t ItemBytes(FloatType dtype) { return dtype == FloatType::kFloat32 ? 4 : 2; }

int64_t Blocks(int64_t outputs) { return (outputs + kBlock - 1) / kBlock; }

// What lies between the parts of a run: each (tokens, n) contiguous. Those of attention and those
// of the MLP lie in one place, since neither needs the other's.
struct Buffers {
  char* sum;     // of the residual path; the call's output where that is a hidden state
  char* normed;  // hidden
  char* added;   // hidden
  char* wanted;  // hidden, of the rows whose logits are wanted
  char* q;       // H * D
  char* k;       // H_kv * D
  char* v;       // H_kv * D
  char* made_q;  // as a projection makes them, where they are not q yet
  char* rotated_q;
  char* attended;  // H * D
  char* part;      // H * D float32, of attention over a part
  char* lse;       // H float32, likewise
  char* mixer;     // what a layer with a state has: see MixerBuffers
  char* gates;     // H * D or H, of heads
  char* beside;    // hidden, of a mixer beside attention
  char* scaled;    // hidden, of an input that is scaled
  char* gate;      // inner
  char* up;        // inner
  char* low;       // ranks of the matrices of one input, where they have adapters
  // Of a mixture: logits and the shared one's gate, in float32 at most; experts, K of a token, and
  // their weights; what they answer, a token's own ones in no order, before the shared one's.
  // `gate` and `up` then have the inner values of all in that order.
  char* scores;
  char* shared_gate;
  int64_t* chosen;
  float* weights;
  char* answers;
  char* features;  // where experts have a size of their own: what they take, and their sum
  char* summed;
};

// The largest of what layers need of each.
struct Widths {
  int64_t q = 0;
  int64_t made_q = 0;
  int64_t kv = 0;
  int64_t inner = 0;
  int64_t part = 0;
  int64_t heads = 0;
  int64_t low = 0;
  int64_t scores = 0;
  int64_t chosen = 0;
  int64_t answers = 0;
  int64_t features = 0;
  int64_t gates = 0;
  int64_t beside = 0;
  int64_t scaled = 0;
  bool asks = false;  // the sum outlives a call

  explicit Widths(const RunParams& p) {
    for (const LayerParams& layer : p.layers) {
      q = std::max(q, layer.queries());
      const bool apart = layer.gated || layer.latent != nullptr;
      if (apart) made_q = std::max(made_q, layer.projections[kQ].outputs);
      if (layer.latent != nullptr) {  // which has low ranks and values in places of queries
        q = std::max({q, layer.projections[kV].outputs, layer.projections[kOut].inputs});
      }
      kv = std::max(kv, layer.projections[kK].outputs);
      inner = std::max(inner, layer.projections[kUp].outputs);
      gates = std::max(gates, layer.gates.matrix.outputs);
      if (layer.beside) beside = p.hidden;
      const bool scales = layer.mixer != nullptr && layer.mixer->input_scale != 1.0f;
      if (scales || layer.input_scale != 1.0f) scaled = p.hidden;
      asks = asks || layer.asks_attention || layer.asks_mlp || layer.asks_experts();
      const Matrix* of = layer.projections;
      low = std::max({low, of[kQ].most_rank() + of[kK].most_rank() + of[kV].most_rank(),
                      of[kOut].most_rank(), of[kGate].most_rank() + of[kUp].most_rank(),
                      of[kDown].most_rank()});
      if (layer.mixture != nullptr) {
        const Mixture& mixture = *layer.mixture;
        const int64_t top_k = mixture.router.top_k;
        inner = std::max(inner, top_k * mixture.inner + mixture.shared_inner);
        scores = std::max(scores, mixture.router.experts);
        chosen = std::max(chosen, top_k);
        const int64_t own = mixture.features;
        answers = std::max(answers, top_k * own + mixture.shared * p.hidden);
        if (mixture.before.weight != nullptr) features = std::max(features, own);
      }
      if (!layer.in_part) continue;
      part = std::max(part, layer.queries());
      heads = std::max(heads, layer.attention.heads);
    }
    low = std::max(low, p.logits.most_rank());
  }
};

// The buffers in `space`; with null, only how far they reach.
int64_t Lay(const RunParams& p, const CallParams& call, char* space, Buffers* b) {
  const int64_t item = ItemBytes(p.dtype);
  const Widths widths(p);
  int64_t end = 0;
  const auto take = [&](int64_t width, int64_t bytes) {
    char* begin = space + end;
    end += (call.tokens() * width * bytes + kAlign - 1) / kAlign * kAlign;
    return begin;
  };
  const bool hidden_out = call.wanted == LogitRows::kNone && !widths.asks;
  b->sum = hidden_out ? static_cast<char*>(call.out) : take(p.hidden, item);
  b->normed = take(p.hidden, item);
  b->added = take(p.hidden, item);
  b->low = take(widths.low, item);
  b->beside = take(widths.beside, item);
  b->scaled = take(widths.scaled, item);
  // Not where later stages write: a thread that is late reads them while others are layers ahead.
  b->chosen = reinterpret_cast<int64_t*>(take(widths.chosen, sizeof(int64_t)));
  b->weights = reinterpret_cast<float*>(take(widths.chosen, sizeof(float)));
  const int64_t shared = end;
  b->q = take(widths.q, item);
  b->k = take(widths.kv, item);
  b->v = take(widths.kv, item);
  b->made_q = take(widths.made_q, item);
  b->gates = take(widths.gates, item);
  b->rotated_q = take(widths.q, item);
  b->attended = take(widths.q, item);
  b->part = take(widths.part, sizeof(float));
  b->lse = take(widths.heads, sizeof(float));
  const int64_t after_attention = end;
  end = shared;
  b->mixer = space + end;
  for (const LayerParams& layer : p.layers) end = std::max(end, shared + MixerBytes(layer, call));
  const int64_t after_mixer = end;
  end = shared;
  b->gate = take(widths.inner, item);
  b->up = take(widths.inner, item);
  b->scores = take(widths.scores, sizeof(float));
  b->shared_gate = take(widths.scores > 0, sizeof(float));
  b->answers = take(widths.answers, item);
  b->features = take(widths.features, item);
  b->summed = take(widths.features, item);
  const int64_t after_mlp = end;
  end = shared;
  b->wanted = take(p.hidden, item);
  return std::max({after_attention, after_mixer, after_mlp, end});
}

void Narrowed(const float* from, int64_t count, FloatType dtype, char* to) {
  if (dtype == FloatType::kFloat32) std::memcpy(to, from, count * sizeof(float));
  auto* bits = reinterpret_cast<uint16_t*>(to);
  if (dtype == FloatType::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) bits[i] = BFloat16Bits(from[i]);
  }
  if (dtype == FloatType::kFloat16) {
    for (int64_t i = 0; i < count; ++i) bits[i] = HalfBits(from[i]);
  }
}

// Every second value of a head's first ones, then the others between.
template <typename T>
void Deinterleave(char* head, int64_t width, std::vector<T>* space) {
  T* values = reinterpret_cast<T*>(head);
  space->assign(values, values + width);
  for (int64_t i = 0; i < width / 2; ++i) {
    values[i] = (*space)[2 * i];
    values[width / 2 + i] = (*space)[2 * i + 1];
  }
}

void Scaled(const char* from, int64_t count, FloatType dtype, float scale, char* to) {
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  std::vector<float> wide(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const float value = dtype == FloatType::kFloat32   ? reinterpret_cast<const float*>(from)[i]
                        : dtype == FloatType::kFloat16 ? HalfValue(bits[i])
                                                       : AsFloat(uint32_t{bits[i]} << 16);
    wide[i] = value * scale;
  }
  Narrowed(wide.data(), count, dtype, to);
}

// What one layer is told of a call: its params, with all that they point to.
struct LayerCall {
  AppendParams append;
  AttentionParams attention;
  PartParams part;
  std::vector<int32_t> past;   // of a ring, as attention sees it
  std::vector<int32_t> start;  // of a part
  std::vector<int32_t> count;
};

void Fill(const LayerParams& layer, const CallParams& call, const Buffers& b, LayerCall* out) {
  const int64_t ring = layer.append.ring;
  AppendParams& append = out->append = layer.append;
  const Rotary& rotary = call.rotary[layer.rotary];
  const int64_t dim = append.dim, token = append.heads * dim;
  append.rows = call.rows;
  append.length = call.length;
  const bool rotated = layer.latent != nullptr || layer.normed_rotated;
  append.width = rotated ? 0 : rotary.width;  // there they come rotated
  append.cos = rotary.cos;
  append.sin = rotary.sin;
  append.past_lens = call.past_lens;
  append.new_lens = call.new_lens;
  if (layer.paged) {
    append.block_table = call.block_table;
    append.table_row = call.table_row;
  }
  append.store_rows = call.store_rows;
  append.sides[0].x = {b.k, call.length * token, token, dim};
  append.sides[1].x = {layer.latent == nullptr ? b.v : b.k, call.length * token, token, dim};

  AttentionParams& attention = out->attention = layer.attention;
  const int64_t queries = attention.heads * dim;
  attention.rows = call.rows;
  attention.length = call.length;
  attention.kv_len = call.kv_len;
  attention.past_lens = call.past_lens;
  attention.store_rows = call.store_rows;
  attention.q = {b.rotated_q, call.length * queries, queries, dim};
  attention.out = b.attended;
  if (ring > 0) {  // stores just what its token sees; the order makes no difference
    out->past.assign(call.past_lens, call.past_lens + call.rows);
    for (int32_t& past : out->past) past = std::min<int32_t>(past, static_cast<int32_t>(ring) - 1);
    attention.past_lens = out->past.data();
    attention.kv_len = std::min(call.kv_len, ring);
    attention.window = 0;
  }
  if (layer.chunk > 0 && call.kv_len > layer.chunk) {  // of rows of one length
    attention.window = call.past_lens[0] % layer.chunk + 1;
  }
  if (!layer.in_part) return;
  out->part = layer.part;
  out->start.assign(call.rows, 0);
  out->count.assign(call.rows, static_cast<int32_t>(attention.kv_len));
  if (layer.paged) {  // padding sees no key for which the row has no page
    for (int64_t row = 0; row < call.rows; ++row) {
      out->count[row] = static_cast<int32_t>(call.End(row));
    }
    out->part.block_table = call.block_table;
    out->part.table_row = call.table_row;
    out->part.page = append.page;
    out->part.pages = append.pages;
  }
  out->part.key_start = out->start.data();
  out->part.key_count = out->count.data();
  out->part.row_queries = call.length;
  out->part.lse = reinterpret_cast<float*>(b.lse);
  attention.part = &out->part;
  attention.out = b.part;
}

// The layers that a call runs from where it begins to where it ends, or asks.
size_t FirstLayer(const CallParams& call) { return call.begin == Begin::kStart ? 0 : call.layer; }
size_t EndOfLayers(const RunParams& p, const CallParams& call) {
  return call.asks() ? call.asking + 1 : p.layers.size();
}

// One call, as all threads see it.
class Decoder {
 public:
  Decoder(const DecoderKernels& kernels, const RunParams& params, const CallParams& call,
          char* space)
      : kernels_(kernels), p_(params), call_(call), item_(ItemBytes(params.dtype)) {
    Lay(p_, call_, space, &b_);
    runs_.resize(p_.layers.size());
    const size_t first = FirstLayer(call) + (call.begin != Begin::kStart);  // else it has attended
    for (size_t i = first; i < EndOfLayers(p_, call); ++i) {
      const LayerParams& layer = p_.layers[i];
      if (layer.asks_attention || !layer.attends()) continue;
      runs_[i] = std::make_unique<LayerRun>();
      Fill(layer, call_, b_, &runs_[i]->call);
      runs_[i]->attention.emplace(kernels_.attention, runs_[i]->call.attention);
    }
    GiveStates();
  }

  void Go(Team::Member* thread) {
    const bool at_start = call_.begin == Begin::kStart;
    const bool from_x = p_.table.weight == nullptr && (at_start || call_.layer == 0);
    Residual residual{from_x ? static_cast<const char*>(call_.x) : b_.sum, nullptr, nullptr};
    if (at_start && p_.table.weight != nullptr) {
      thread->Stage(call_.tokens(), 1, [&](int64_t begin, int64_t end) { Embed(begin, end); });
    }
    Begin begin = call_.begin;
    for (size_t layer = at_start ? 0 : call_.layer; layer < p_.layers.size(); ++layer) {
      if (RunLayer(layer, begin, &residual, thread)) return;
      begin = Begin::kStart;
    }
    if (call_.wanted == LogitRows::kNone) {
      Join(&residual, NormWeights{}, thread);
    } else {
      Logits(residual, thread);
    }
  }

  // Of experts alone, whose choices the call brings.
  void GoChosen(const ChosenCall& chosen, Team::Member* thread) {
    const Mixture& of = *p_.layers[0].mixture;
    const Pairs& pairs = PairUp(of);
    Answer(of, pairs, static_cast<const char*>(chosen.x), Matrix{}, thread);
    const int64_t size = p_.hidden * item_, taken = of.router.top_k;
    if (chosen.sum) return SumUp(of, pairs, Matrix{}, thread);
    thread->Stage(call_.tokens() * taken, 1, [&](int64_t begin, int64_t) {
      const Pairs::Share& share = pairs.shares[begin];
      if (share.elsewhere) return;
      char* out = static_cast<char*>(chosen.out) + share.choice * size;
      std::memset(out, 0, size);
      const char* answer = b_.answers + share.pair * size;
      const int64_t n = p_.hidden;
      kernels_.rows.add_times({p_.dtype, 1, n, n, n, out, answer}, share.weight, 0, 1);
    });
  }

  // The call's choices, and where its sum goes, in place of the run's own buffers.
  void Bring(const ChosenCall& chosen) {
    const int64_t count = call_.tokens() * p_.layers[0].mixture->router.top_k;
    std::memcpy(b_.chosen, chosen.chosen, count * sizeof(int64_t));
    std::memcpy(b_.weights, chosen.weights, count * sizeof(float));
    if (chosen.sum) b_.added = static_cast<char*>(chosen.out);
  }

  // What one thread copies when all are done.
  void CopyOut() const {
    const size_t size = call_.tokens() * p_.hidden * item_;
    if (call_.chosen != nullptr) {
      const int64_t count = call_.tokens() * p_.layers[call_.asking].mixture->router.top_k;
      std::memcpy(call_.chosen, b_.chosen, count * sizeof(int64_t));
      std::memcpy(call_.weights, b_.weights, count * sizeof(float));
    }
    if (call_.y != nullptr) {
      const LayerParams& asking = p_.layers[call_.asking];
      const Norm before = call_.asks_attention ? kBeforeAttention : kBeforeMlp;
      const bool normed = asking.parallel || asking.norms[before].weight != nullptr;
      const bool given = call_.asks_attention && call_.asking == 0 && p_.table.weight == nullptr;
      const void* sum = given ? call_.x : b_.sum;
      std::memcpy(call_.y, normed ? b_.normed : sum, size);
    }
    const bool ended = call_.y == nullptr && call_.q == nullptr;
    if (ended && call_.wanted == LogitRows::kNone && b_.sum != call_.out) {
      std::memcpy(call_.out, b_.sum, size);
    }
  }

 private:
  // The hidden state on its way: x + scale * norm(added), as long as nobody has added it up.
  struct Residual {
    const char* x;
    const char* added;        // or null
    const NormWeights* norm;  // of what is added; perhaps none
    float scale = 1.0f;       // where there is no norm
  };

  // The layers follow each other, so their states may share their memory.
  void GiveStates() {
    thread_local Scratch states;
    int64_t most = 0;
    for (const auto& run : runs_) {
      if (run) most = std::max(most, run->attention->state_floats());
    }
    float* memory = states.Get(most);
    for (auto& run : runs_) {
      if (run) run->attention->GiveStates(memory);
    }
  }

  // Whether it ends with a question.
  bool RunLayer(size_t index, Begin begin, Residual* residual, Team::Member* thread) {
    const LayerParams& layer = p_.layers[index];
    const bool skips = begin == Begin::kStart && layer.no_attention;
    if (skips) return Mlp(index, residual, thread);
    if (begin == Begin::kStart && Attend(index, residual, thread)) return true;
    if (begin == Begin::kAfterExperts) {
      SumUp(*layer.mixture, PairUp(*layer.mixture), Matrix{}, thread);
      *residual = {b_.sum, b_.added, &layer.norms[kAfterMlp], layer.residual};
      return false;
    }
    if (begin == Begin::kAfterMlp) {
      *residual = {b_.sum, static_cast<const char*>(call_.answer), &layer.norms[kAfterMlp],
                   layer.residual};
      return false;
    }
    const bool answered = begin == Begin::kAfterAttention;
    if (answered && layer.asks_whole) {
      *residual = {residual->x, static_cast<const char*>(call_.answer),
                   &layer.norms[kAfterAttention], layer.residual};
      return Mlp(index, residual, thread);
    }
    const char* attended = answered ? static_cast<const char*>(call_.answer) : Attended(layer);
    if (layer.latent != nullptr) attended = RaiseValues(layer, thread);
    if (layer.gated || layer.gates.matrix.weight != nullptr) {
      attended = Gated(layer, attended, thread);
    }
    Linear({{Output(layer), b_.added}}, attended, call_.tokens(), thread,
           [&] { Ask(layer.first_of_mlp(), thread); });
    if (layer.beside) {
      thread->Stage(call_.tokens(), 1, [&](int64_t begin, int64_t end) {
        kernels_.rows.add(HiddenRows(b_.added, b_.beside), begin, end);
      });
    }
    if (layer.parallel && layer.norms[kBeforeMlp].weight != nullptr) {
      const Residual before{residual->x, nullptr, nullptr};
      thread->Stage(call_.tokens(), 1, [&](int64_t begin, int64_t end) {
        JoinTokens(before, layer.norms[kBeforeMlp], begin, end);
      });
    }
    *residual = {residual->x, b_.added, &layer.norms[kAfterAttention], layer.residual};
    return Mlp(index, residual, thread);
  }

  bool Attend(size_t index, Residual* residual, Team::Member* thread) {
    const LayerParams& layer = p_.layers[index];
    const Matrix* of = layer.projections;
    const char* x = Join(residual, layer.norms[kBeforeAttention], thread);
    if (layer.mixer != nullptr) {
      const StateMixer& mixer = *layer.mixer;
      Advance(mixer, x, thread);
      if (!layer.beside) return false;
      Linear({{mixer.out, b_.beside}}, Mixer(mixer).kept, call_.tokens(), thread,
             [&] { Ask(of[kQ], thread); });
    }
    if (layer.asks_whole) return true;
    x = ScaledInput(x, layer.input_scale, thread);
    if (layer.latent != nullptr) {
      LatentHeads(index, x, thread);
    } else {
      std::vector<Wanted> made{
          {of[kQ], layer.gated ? b_.made_q : b_.q}, {of[kK], b_.k}, {of[kV], b_.v}};
      if (layer.gates.matrix.weight != nullptr) made.push_back({layer.gates.matrix, b_.gates});
      Linear(made, x, call_.tokens(), thread, [&] { Ask(of[kOut], thread); });
      thread->Stage(call_.tokens(), 1,
                    [&](int64_t begin, int64_t end) { Heads(index, begin, end); });
    }
    if (layer.asks_attention) return true;
    AttentionCall& call = *runs_[index]->attention;
    thread->Stage(call.items(), 1, [&](int64_t item, int64_t) { call.Run(item, item + 1); });
    Finish(index, thread);
    return false;
  }

#include "decoder_states.inc"

  bool Mlp(size_t index, Residual* residual, Team::Member* thread) {
    const LayerParams& layer = p_.layers[index];
    if (layer.no_mlp) return false;
    const Matrix* of = layer.projections;
    const Matrix* next = index + 1 < p_.layers.size() ? First(p_.layers[index + 1]) : &p_.logits;
    const NormWeights none{};  // of a parallel layer, whose input was normed before
    const char* y = Join(residual, layer.parallel ? none : layer.norms[kBeforeMlp], thread);
    if (layer.parallel) y = b_.normed;
    if (layer.asks_mlp) return true;
    if (layer.mixture != nullptr) {
      Route(*layer.mixture, y, thread);
      const Pairs& pairs = PairUp(*layer.mixture);
      Answer(*layer.mixture, pairs, y, *next, thread);
      if (layer.asks_experts()) return true;
      SumUp(*layer.mixture, pairs, *next, thread);
      *residual = {residual->x, b_.added, &layer.norms[kAfterMlp], layer.residual};
      return false;
    }
    Input input{y, call_.tokens()};
    Lower({{of[kGate], b_.gate}, {of[kUp], b_.up}}, y, call_.tokens(), thread);
    thread->Stage(
        Blocks(of[kUp].outputs), kStep,
        [&](int64_t begin, int64_t end) {
          Gate({of[kGate], b_.gate}, {of[kUp], b_.up}, layer.act, &input, begin, end);
        },
        [&] { Ask(of[kDown], thread); });
    Linear({{of[kDown], b_.added}}, b_.gate, call_.tokens(), thread, [&] { Ask(*next, thread); });
    *residual = {residual->x, b_.added, &layer.norms[kAfterMlp], layer.residual};
    return false;
  }

  // Rows of the hidden size.
  GateParams HiddenRows(char* gate, const char* up) const {
    return {p_.dtype, call_.tokens(), p_.hidden, p_.hidden, p_.hidden, gate, up};
  }

  // x times a factor.
  const char* ScaledInput(const char* x, float factor, Team::Member* thread) {
    if (factor == 1.0f) return x;
    thread->Stage(call_.tokens(), 1, [&](int64_t begin, int64_t end) {
      kernels_.rows.scale(HiddenRows(b_.scaled, x), factor, begin, end);
    });
    return b_.scaled;
  }

  // For what this thread reads first of a matrix.
  void Ask(const Matrix& matrix, Team::Member* thread) const {
    if (matrix.weight != nullptr) AskFrom(matrix, thread->First(Blocks(matrix.outputs)));
  }

  void AskFrom(const Matrix& matrix, int64_t block) const {
    const int64_t row = RowBytes(matrix);
    const int64_t first = block * kBlock * row;
    const int64_t bytes = std::min(kAheadBytes, matrix.outputs * row - first);
    const char* from = static_cast<const char*>(matrix.weight) + first;
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at, 0, 2);
  }

  int64_t RowBytes(const Matrix& matrix) const {
    switch (matrix.stored) {
      case Stored::kFloats:
        break;
      case Stored::kGroups:
        return matrix.groups.block_bytes() / kGroupsBlock;
      case Stored::kPacked:
        return matrix.packed.row_bytes;
    }
    return matrix.inputs * item_;
  }

  void Embed(int64_t begin, int64_t end) const {
    const int64_t size = p_.hidden * item_;
    for (int64_t i = begin; i < end; ++i) {
      const char* row = RowOfTable(call_.ids[i]);
      if (p_.scale == 1.0f) {
        std::memcpy(b_.sum + i * size, row, size);
      } else {
        Scaled(row, p_.hidden, p_.dtype, p_.scale, b_.sum + i * size);
      }
    }
  }

  // A row of the embedding table, which may be in this thread's memory.
  const char* RowOfTable(int64_t id) const {
    const Matrix& table = p_.table;
    const int64_t size = p_.hidden * item_;
    if (table.stored == Stored::kFloats) return static_cast<const char*>(table.weight) + id * size;
    thread_local Scratch memory;
    char* block = reinterpret_cast<char*>(memory.Get((kBlock + 1) * p_.hidden));
    if (table.stored == Stored::kPacked) {
      kernels_.packed.dequantize(table.packed, p_.dtype, id, id + 1, block);
      return block;
    }
    const int64_t first = id / kBlock * kBlock, end = std::min(first + kBlock, table.outputs);
    kernels_.groups.dequantize(table.groups, p_.dtype, first, end, block);
    const char* row = block + (id - first) * size;
    if (table.groups.order == nullptr) return row;
    char* sorted = block + kBlock * size;
    for (int64_t i = 0; i < p_.hidden; ++i) {
      std::memcpy(sorted + table.groups.order[i] * item_, row + i * item_, item_);
    }
    return sorted;
  }

  // What was added becomes part of the sum; returns where the norm of that is.
  const char* Join(Residual* residual, const NormWeights& norm, Team::Member* thread) {
    if (residual->added != nullptr || norm.weight != nullptr) {
      thread->Stage(call_.tokens(), 1,
                    [&](int64_t begin, int64_t end) { JoinTokens(*residual, norm, begin, end); });
    }
    if (residual->added != nullptr) *residual = {b_.sum, nullptr, nullptr};
    return norm.weight != nullptr ? b_.normed : residual->x;
  }

  void JoinTokens(const Residual& residual, const NormWeights& norm, int64_t begin,
                  int64_t end) const {
    const char* added = residual.added;
    if (added != nullptr && residual.norm->weight != nullptr) {
      NormRows(*residual.norm, added, nullptr, b_.normed, begin, end);
      added = b_.normed;  // which the second norm overwrites once it has read it
    }
    if (added != nullptr && residual.scale != 1.0f) {
      const int64_t first = begin * p_.hidden * item_, count = (end - begin) * p_.hidden;
      Scaled(added + first, count, p_.dtype, residual.scale, b_.normed + first);
      added = b_.normed;
    }
    if (norm.weight != nullptr) {
      return NormRows(norm, residual.x, added, b_.normed, begin, end);
    }
    const int64_t size = p_.hidden * item_;
    if (residual.x != b_.sum) {
      std::memcpy(b_.sum + begin * size, residual.x + begin * size, (end - begin) * size);
    }
    kernels_.rows.add(HiddenRows(b_.sum, added), begin, end);
  }

  // The norm of x, or of x + added, which goes to the sum.
  void NormRows(const NormWeights& norm, const char* x, const char* added, char* out, int64_t begin,
                int64_t end) const {
    const NormParams params{p_.dtype,
                            call_.tokens(),
                            p_.hidden,
                            p_.hidden,
                            p_.hidden,
                            x,
                            added,
                            norm.weight,
                            norm.eps,
                            norm.offset,
                            added == nullptr ? nullptr : b_.sum,
                            out,
                            norm.centered,
                            norm.bias};
    kernels_.rows.norm(params, begin, end);
  }

  struct Wanted {
    const Matrix& matrix;
    char* out;
  };

  // A stage's input x (rows, inputs), and what this thread made of it. Each thread makes its own:
  // that takes a hundredth of the time of reading a matrix, and nobody waits.
  struct Input {
    const char* x;
    int64_t rows;
    const float* wide = nullptr;   // for floats, where they are widened
    const char* turned = nullptr;  // transformed, in `block`s
    int64_t block = 0;
    const char* for_groups = nullptr;
    const int32_t* order = nullptr;              // for which it was
    int64_t groups_block = 0;                    // likewise
    const char* for_packed[kPackedInputs] = {};  // by PackedInput
    const float* exact = nullptr;                // for exact matrices
  };

  // Bytes of what adapters make of so many rows of x first.
  int64_t LowBytes(const Matrix& m, int64_t rows) const { return rows * m.most_rank() * item_; }

  // A x, (its rows, rank) for each part of each matrix, one behind the other. Then the matrices'
  // own stages add what B makes of it.
  void Lower(const std::vector<Wanted>& all, const char* x, int64_t rows, Team::Member* thread) {
    struct Part {
      LinearParams linear;
      int64_t blocks;
    };
    std::vector<Part> parts;
    int64_t blocks = 0;
    char* low = b_.low;
    for (const Wanted& wanted : all) {
      char* out = low;
      for (const LowRank& part : wanted.matrix.low_rank) {
        const auto [first, count] = RowsOf(part, rows);
        const char* of = x + first * wanted.matrix.inputs * item_;
        parts.push_back(
            {{p_.dtype, count, wanted.matrix.inputs, part.rank, of, part.a, nullptr, out},
             Blocks(part.rank)});
        out += count * part.rank * item_;
        blocks += parts.back().blocks;
      }
      low += LowBytes(wanted.matrix, rows);
    }
    if (parts.empty()) return;
    thread->Stage(blocks, 1, [&](int64_t begin, int64_t end) {
      int64_t first = 0;  // block of the part at hand
      for (const Part& part : parts) {
        const int64_t from = std::max(begin - first, int64_t{0});
        const int64_t to = std::min(end - first, part.blocks);
        if (from < to) {
          kernels_.linear.run(part.linear, from * kBlock,
                              std::min(to * kBlock, part.linear.outputs));
        }
        first += part.blocks;
      }
    });
  }

  // The first of `rows` tokens that a part is for, and how many.
  std::pair<int64_t, int64_t> RowsOf(const LowRank& part, int64_t rows) const {
    if (part.last < 0) return {0, rows};
    const int64_t each = rows / call_.rows;
    return {part.first * each, (part.last - part.first) * each};
  }

  // Adds B (A x) to outputs [first, last) of a matrix.
  void AddLowRank(const Wanted& wanted, const char* low, int64_t rows, int64_t first,
                  int64_t last) const {
    thread_local Scratch memory;
    const Matrix& m = wanted.matrix;
    const int64_t count = last - first;
    for (const LowRank& part : m.low_rank) {
      const auto [begin, tokens] = RowsOf(part, rows);
      char* made = Bytes(&memory, tokens * count * item_);
      const char* b = static_cast<const char*>(part.b) + first * part.rank * item_;
      kernels_.linear.run({p_.dtype, tokens, part.rank, count, low, b, nullptr, made}, 0, count);
      char* out = wanted.out + (begin * m.outputs + first) * item_;
      kernels_.rows.add({p_.dtype, tokens, count, m.outputs, count, out, made}, 0, tokens);
      low += tokens * part.rank * item_;
    }
  }

  // Linear layers of one input, as one row of outputs.
  template <typename Meanwhile>
  void Linear(const std::vector<Wanted>& all, const char* x, int64_t rows, Team::Member* thread,
              const Meanwhile& meanwhile) {
    int64_t blocks = 0;
    for (const Wanted& wanted : all) blocks += Blocks(wanted.matrix.outputs);
    Input input{x, rows};
    Lower(all, x, rows, thread);
    const auto run = [&](int64_t begin, int64_t end) {
      int64_t first = 0;  // block of the matrix at hand
      const char* low = b_.low;
      for (const Wanted& wanted : all) {
        const int64_t last = first + Blocks(wanted.matrix.outputs);
        RunBlocks(wanted, &input, low, std::max(begin, first) - first, std::min(end, last) - first);
        low += LowBytes(wanted.matrix, rows);
        first = last;
      }
    };
    thread->Stage(blocks, kStep, run, meanwhile);
  }

  void RunBlocks(const Wanted& wanted, Input* input, const char* low, int64_t begin,
                 int64_t end) const {
    if (begin >= end) return;
    const Matrix& m = wanted.matrix;
    const int64_t first = begin * kBlock, last = std::min(end * kBlock, m.outputs);
    RunMatrix(wanted, input, first, last);
    if (!m.low_rank.empty()) AddLowRank(wanted, low, input->rows, first, last);
    if (m.scale == 1.0f) return;
    char* out = wanted.out + first * item_;
    kernels_.rows.scale({p_.dtype, input->rows, last - first, m.outputs, m.outputs, out, out},
                        m.scale, 0, input->rows);
  }

  void RunMatrix(const Wanted& wanted, Input* input, int64_t first, int64_t last) const {
    const Matrix& m = wanted.matrix;
    if (m.stored == Stored::kGroups) {
      const char* made = InputOfGroups(m, input);
      const GroupsParams p{m.groups, p_.dtype, input->rows, made, m.bias, wanted.out};
      return kernels_.groups.run(p, first, last);
    }
    if (m.stored == Stored::kPacked) {
      const char* made = InputOfPacked(m, input);
      const PackedParams p{m.packed, p_.dtype, input->rows, made, m.bias, wanted.out};
      return kernels_.packed.run(p, first, last);
    }
    LinearParams p{p_.dtype, input->rows, m.inputs, m.outputs,
                   input->x, m.weight,    m.bias,   wanted.out};
    if (m.exact) {
      p.dtype = FloatType::kFloat32;
      p.x = Exact(p, input);
      return kernels_.linear.run(p, first, last);
    }
    p.wide = Widened(p, input);
    kernels_.linear.run(p, first, last);
  }

  // x in float32.
  const float* Exact(const LinearParams& p, Input* input) const {
    thread_local Scratch memory;
    if (input->exact == nullptr) {
      float* made = memory.Get(p.rows * p.inputs);
      for (int64_t i = 0; i < p.rows * p.inputs; ++i) made[i] = WideAt(p.x, p_.dtype, i);
      input->exact = made;
    }
    return input->exact;
  }

  const float* Widened(const LinearParams& p, Input* input) const {
    thread_local Scratch memory;
    if (input->wide == nullptr) {
      const int64_t floats = kernels_.linear.widen(p, nullptr);
      if (floats == 0) return nullptr;
      float* made = memory.Get(floats);
      kernels_.linear.widen(p, made);
      input->wide = made;
    }
    return input->wide;
  }

  const char* InputOfGroups(const Matrix& m, Input* input) const {
    thread_local Scratch memory;
    const bool other = input->order != m.groups.order || input->groups_block != m.hadamard;
    if (input->for_groups == nullptr || other) {
      const int64_t bytes = kernels_.groups.input_bytes(p_.dtype, input->rows, m.inputs);
      char* made = Bytes(&memory, bytes);
      const char* x = Turned(m, input);
      kernels_.groups.prepare(p_.dtype, input->rows, m.inputs, x, m.groups.order, made);
      input->for_groups = made;
      input->order = m.groups.order;
      input->groups_block = m.hadamard;
    }
    return input->for_groups;
  }

  // x as it meets a matrix of which the inputs are transformed.
  const char* Turned(const Matrix& m, Input* input) const {
    thread_local Scratch memory, space;
    if (m.hadamard == 0) return input->x;
    if (input->turned == nullptr || input->block != m.hadamard) {
      char* made = Bytes(&memory, input->rows * m.inputs * item_);
      const HadamardParams params = TransformOf(m, p_.dtype, input->rows, input->x, made);
      kernels_.quant.hadamard(params, space.Get(m.hadamard), 0, input->rows);
      input->turned = made;
      input->block = m.hadamard;
    }
    return input->turned;
  }

  const char* InputOfPacked(const Matrix& m, Input* input) const {
    thread_local Scratch memory[kPackedInputs];
    const PackedInput kind = kernels_.packed.input_of(m.packed);
    const auto index = static_cast<size_t>(kind);
    const char*& made = input->for_packed[index];
    if (made == nullptr) {
      const int64_t bytes = kernels_.packed.input_bytes(kind, p_.dtype, input->rows, m.inputs);
      char* space = Bytes(&memory[index], bytes);
      kernels_.packed.prepare(kind, p_.dtype, input->rows, m.inputs, input->x, space);
      made = space;
    }
    return made;
  }

  static char* Bytes(Scratch* memory, int64_t bytes) {
    const int64_t floats = (bytes + int64_t{sizeof(float)} - 1) / int64_t{sizeof(float)};
    return reinterpret_cast<char*>(memory->Get(floats));
  }

  // act(gate) * up, or act(up), for some of an MLP's inner values: nobody has to wait between. With
  // a limit, both are clamped.
  void Gate(const Wanted& gate, const Wanted& up, Act act, Input* input, int64_t begin, int64_t end,
            float alpha = 0.0f, float limit = 0.0f) const {
    const bool gated = gate.matrix.weight != nullptr;
    if (gated) RunBlocks(gate, input, b_.low, begin, end);
    RunBlocks(gated ? up : Wanted{up.matrix, gate.out}, input,
              b_.low + LowBytes(gate.matrix, input->rows), begin, end);
    const int64_t outputs = up.matrix.outputs, first = begin * kBlock;
    const int64_t count = std::min(end * kBlock, outputs) - first;
    const GateParams params{p_.dtype,
                            input->rows,
                            count,
                            outputs,
                            outputs,
                            gate.out + first * item_,
                            up.out + first * item_,
                            alpha,
                            limit};
    if (limit > 0.0f) return kernels_.rows.clamped(params, 0, input->rows);
    (gated ? kernels_.rows.gate_mul : kernels_.rows.activate)[act](params, 0, input->rows);
  }

  // Tokens that meet one expert.
  struct Group {
    const Expert* expert;
    int64_t first;  // of them among all pairs of a token and an expert
    int64_t count;
    int64_t inner;  // values of `gate` before theirs
    bool all;       // all tokens, in order
  };

  // Who meets whom, in ascending order of experts; of a token, too. The shared expert is the last.
  struct Pairs {
    struct Share {
      int64_t pair;
      float weight;
      bool elsewhere;
      int64_t choice;  // k of token n is n * K + k
    };
    std::vector<Group> groups;
    std::vector<int64_t> tokens;  // of each pair
    std::vector<float> weights;   // of each pair's inputs, where those are weighted
    std::vector<Share> shares;    // (N, K), of the pairs of a token
  };

  // Each thread makes its own, which takes a thousandth of the time of reading the experts. One
  // that is late for its layer, and finds nothing left to do there, may see a later layer's
  // choices: a copy, of experts that there are, keeps its places in their ranges.
  const Pairs& PairUp(const Mixture& of) const {
    thread_local Pairs pairs;
    thread_local std::vector<int64_t> ends, chosen;
    const int64_t tokens = call_.tokens(), taken = of.router.top_k;
    chosen.assign(b_.chosen, b_.chosen + tokens * taken);
    for (int64_t& expert : chosen) expert = std::min(expert, of.router.experts - 1);
    ends.assign(static_cast<size_t>(of.router.experts) + 1, 0);
    for (int64_t i = 0; i < tokens * taken; ++i) ++ends[chosen[i] + 1];
    pairs.groups.clear();
    for (int64_t expert = 0; expert < of.router.experts; ++expert) {
      const int64_t first = ends[expert], count = ends[expert + 1];
      ends[expert + 1] += first;
      if (count == 0 || IsElsewhere(of, expert)) continue;
      pairs.groups.push_back({&of.experts[expert], first, count, first * of.inner,
                              count == tokens && !of.weighs_inputs});
    }
    pairs.tokens.resize(static_cast<size_t>(tokens * taken));
    pairs.weights.resize(of.weighs_inputs ? pairs.tokens.size() : 0);
    pairs.shares.resize(static_cast<size_t>(tokens * taken));
    for (int64_t i = 0; i < tokens * taken; ++i) {  // from an expert's first pair on
      const int64_t pair = ends[chosen[i]]++;
      pairs.tokens[pair] = i / taken;
      const float weight = of.weighs_inputs ? 1.0f : b_.weights[i];
      pairs.shares[i] = {pair, weight, IsElsewhere(of, chosen[i]), i};
      if (of.weighs_inputs) pairs.weights[pair] = b_.weights[i];
    }
    for (int64_t token = 0; token < tokens; ++token) {
      const auto own = pairs.shares.begin() + token * taken;
      std::sort(own, own + taken, [](const auto& a, const auto& b) { return a.pair < b.pair; });
    }
    if (of.shared) {
      const int64_t routed = tokens * taken;
      pairs.groups.push_back({&of.experts.back(), routed, tokens, routed * of.inner, true});
    }
    return pairs;
  }

  // Blocks [begin, end) of all groups' outputs, one group's behind the other's:
  // run(group, begin, end) for the blocks of each.
  template <typename Outputs, typename Run>
  static void ForGroups(const std::vector<Group>& groups, int64_t begin, int64_t end,
                        const Outputs& outputs, const Run& run) {
    int64_t first = 0;
    for (const Group& group : groups) {
      if (first >= end) return;
      const int64_t last = first + Blocks(outputs(group));
      const int64_t from = std::max(begin, first) - first, to = std::min(end, last) - first;
      if (from < to) run(group, from, to);
      first = last;
    }
  }

  static bool IsElsewhere(const Mixture& of, int64_t expert) {
    return of.experts[expert].down.weight == nullptr;
  }

  // Chooses experts for y.
  void Route(const Mixture& of, const char* y, Team::Member* thread) {
    const int64_t tokens = call_.tokens();
    std::vector<Wanted> made{{of.gate, b_.scores}};
    if (of.shared_gate.weight != nullptr) made.push_back({of.shared_gate, b_.shared_gate});
    const bool narrow = of.before.weight != nullptr;
    if (narrow) made.push_back({of.before, b_.features});
    Linear(made, y, tokens, thread, [] {});
    thread->Stage(tokens, 1, [&](int64_t begin, int64_t end) {
      RouterParams router = of.router;
      router.logits = b_.scores;
      router.chosen = b_.chosen;
      router.weights = b_.weights;
      RouteTokens(router, begin, end);
    });
  }

  // What experts answer that are here: in one stage all gates and ups, in one all downs.
  void Answer(const Mixture& of, const Pairs& pairs, const char* y, const Matrix& next,
              Team::Member* thread) {
    const int64_t tokens = call_.tokens(), width = of.features;
    const bool narrow = of.before.weight != nullptr;
    const char* routed = narrow ? b_.features : y;
    const auto inner = [](const Group& group) { return group.expert->up.outputs; };
    const auto outputs = [](const Group& group) { return group.expert->down.outputs; };
    int64_t all = 0, downs = 0;
    for (const Group& group : pairs.groups) {
      all += Blocks(inner(group));
      downs += Blocks(outputs(group));
    }
    Input input{nullptr, 0};
    const Group* at_hand = nullptr;
    thread->Stage(
        all, kStep,
        [&](int64_t begin, int64_t end) {
          ForGroups(pairs.groups, begin, end, inner, [&](const Group& group, int64_t a, int64_t b) {
            const char* x = group.expert == &of.experts.back() && of.shared ? y : routed;
            if (!group.all && at_hand != &group) {
              input = {Gathered(pairs, group, x, width), group.count};
            }
            if (group.all && input.x != x) input = {x, tokens};
            at_hand = &group;
            const Wanted gate{group.expert->gate, b_.gate + group.inner * item_};
            Gate(gate, {group.expert->up, b_.up + group.inner * item_}, of.act, &input, a, b,
                 of.alpha, of.limit);
          });
        },
        [&] { AskDown(pairs, thread); });
    at_hand = nullptr;
    thread->Stage(
        downs, kStep,
        [&](int64_t begin, int64_t end) {
          ForGroups(pairs.groups, begin, end, outputs,
                    [&](const Group& group, int64_t a, int64_t b) {
                      const char* x = b_.gate + group.inner * item_;
                      if (at_hand != &group) input = {x, group.count};
                      at_hand = &group;
                      char* out = b_.answers + group.first * width * item_;
                      RunBlocks({group.expert->down, out}, &input, b_.low, a, b);
                    });
        },
        [&] { Ask(narrow ? of.after : next, thread); });
  }

  // The sum of a mixture's answers, into `added`.
  void SumUp(const Mixture& of, const Pairs& pairs, const Matrix& next, Team::Member* thread) {
    const int64_t tokens = call_.tokens(), parts = (of.features + kSummed - 1) / kSummed;
    const bool narrow = of.before.weight != nullptr;
    thread->Stage(tokens * parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t token = i / parts, first = i % parts * kSummed;
        Sum(of, pairs, token, first, narrow ? b_.summed : b_.added);
        if (!narrow) AddShared(of, token, first);
      }
    });
    if (!narrow) return;
    Linear({{of.after, b_.added}}, b_.summed, tokens, thread, [&] { Ask(next, thread); });
    const int64_t shared = (p_.hidden + kSummed - 1) / kSummed;
    thread->Stage(tokens * shared, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) AddShared(of, i / shared, i % shared * kSummed);
    });
  }

  // A group's rows of y (tokens, width), contiguous, times their weights where inputs have some.
  const char* Gathered(const Pairs& pairs, const Group& group, const char* y, int64_t width) const {
    thread_local Scratch memory;
    const int64_t size = width * item_;
    char* rows = Bytes(&memory, group.count * size);
    for (int64_t i = 0; i < group.count; ++i) {
      const int64_t pair = group.first + i;
      const char* from = y + pairs.tokens[pair] * size;
      if (pairs.weights.empty()) {
        std::memcpy(rows + i * size, from, size);
        continue;
      }
      alignas(float) char rounded[sizeof(float)];
      NarrowAt(pairs.weights[pair], p_.dtype, rounded, 0);
      kernels_.rows.scale({p_.dtype, 1, width, width, width, rows + i * size, from},
                          WideAt(rounded, p_.dtype, 0), 0, 1);
    }
    return rows;
  }

  // For what this thread reads first of the experts' downs.
  void AskDown(const Pairs& pairs, Team::Member* thread) const {
    int64_t all = 0;
    for (const Group& group : pairs.groups) all += Blocks(group.expert->down.outputs);
    int64_t first = thread->First(all);
    for (const Group& group : pairs.groups) {
      const int64_t own = Blocks(group.expert->down.outputs);
      if (first < own) return AskFrom(group.expert->down, first);
      first -= own;
    }
  }

  // The weighted sum of what a token's experts answer, for kSummed values from `first` on: rounded
  // after each addition, and what is added as well.
  void Sum(const Mixture& of, const Pairs& pairs, int64_t token, int64_t first, char* sums) const {
    const int64_t width = of.features, count = std::min(kSummed, width - first);
    char* sum = sums + (token * width + first) * item_;
    std::memset(sum, 0, count * item_);
    const int64_t taken = of.router.top_k;
    for (int64_t i = token * taken; i < (token + 1) * taken; ++i) {
      const Pairs::Share& share = pairs.shares[i];
      if (share.elsewhere) {  // weighted by who has the expert
        const char* part = static_cast<const char*>(call_.answer);
        part += (share.choice * width + first) * item_;
        kernels_.rows.add({p_.dtype, 1, count, count, count, sum, part}, 0, 1);
        continue;
      }
      const char* answer = b_.answers + (share.pair * width + first) * item_;
      AddAnswer(sum, answer, share.weight, count);
    }
  }

  void AddAnswer(char* sum, const char* answer, float weight, int64_t count) const {
    kernels_.rows.add_times({p_.dtype, 1, count, count, count, sum, answer}, weight, 0, 1);
  }

  // What the shared expert answers a token, times its gate, where there is one.
  void AddShared(const Mixture& of, int64_t token, int64_t first) const {
    if (!of.shared) return;
    float factor = 1.0f;
    if (of.shared_gate.weight != nullptr) {
      alignas(float) char rounded[sizeof(float)];
      NarrowAt(SigmoidOf(WideAt(b_.shared_gate, p_.dtype, token)), p_.dtype, rounded, 0);
      factor = WideAt(rounded, p_.dtype, 0);
    }
    const int64_t routed = call_.tokens() * of.router.top_k * of.features;
    const int64_t at = token * p_.hidden + first;
    AddAnswer(b_.added + at * item_, b_.answers + (routed + at) * item_, factor,
              std::min(kSummed, p_.hidden - first));
  }

  // Queries as attention meets them, and keys and values into their stores; or all to the caller.
  void Heads(size_t index, int64_t begin, int64_t end) const {
    const LayerParams& layer = p_.layers[index];
    if (layer.gated) TakeQueries(layer, begin, end);
    if (!layer.normed_rotated) NormQueriesAndKeys(layer, b_.q, b_.k, begin, end);
    if (layer.interleaved > 0) {
      Halve(layer, b_.q, layer.queries(), begin, end);
      Halve(layer, b_.k, layer.keys(), begin, end);
    }
    const bool asks = layer.asks_attention;
    char* q = asks ? static_cast<char*>(call_.q) : b_.rotated_q;
    char* k = asks ? static_cast<char*>(call_.k) : layer.normed_rotated ? b_.k : nullptr;
    Rotate(layer, q, k, begin, end);
    if (layer.normed_rotated) NormQueriesAndKeys(layer, q, k, begin, end);
    ScaleQueries(layer, q, layer.queries(), begin, end);
    if (asks) {
      const int64_t size = layer.projections[kV].outputs * item_;
      std::memcpy(static_cast<char*>(call_.v) + begin * size, b_.v + begin * size,
                  (end - begin) * size);
      return;
    }
    const LayerCall& call = runs_[index]->call;
    Transform(call, b_.rotated_q, begin, end);
    AppendTokens(call.append, kernels_.rows, kernels_.quant, begin, end);
  }

  void NormQueriesAndKeys(const LayerParams& layer, char* q, char* k, int64_t begin,
                          int64_t end) const {
    NormHeads(layer.norms[kOfQueries], q, layer.queries(), begin, end);
    NormHeads(layer.norms[kOfKeys], k, layer.keys(), begin, end);
  }

  // Queries (tokens, width) times the factors of their positions, in place.
  void ScaleQueries(const LayerParams& layer, char* q, int64_t width, int64_t begin,
                    int64_t end) const {
    if (layer.query_factors < 0) return;
    const TokenView& factors = call_.rotary[layer.query_factors].cos;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t row = token / call_.length, at = token % call_.length;
      const float factor = WideAt(factors.data, p_.dtype, row * factors.row + at * factors.token);
      char* own = q + token * width * item_;
      kernels_.rows.scale({p_.dtype, 1, width, width, width, own, own}, factor, 0, 1);
    }
  }

  // Queries from before their gates.
  void TakeQueries(const LayerParams& layer, int64_t begin, int64_t end) const {
    const int64_t heads = layer.queries() / layer.dim, size = layer.dim * item_;
    for (int64_t i = begin * heads; i < end * heads; ++i) {
      std::memcpy(b_.q + i * size, b_.made_q + 2 * i * size, size);
    }
  }

  // What attention has found, times what is made of the gates; each rounded.
  const char* Gated(const LayerParams& layer, const char* attended, Team::Member* thread) {
    const int64_t dim = layer.dim, heads = call_.tokens() * layer.queries() / dim;
    const char* gates = layer.gated ? b_.made_q : b_.gates;
    const bool of_heads = !layer.gated && layer.gates.matrix.outputs < layer.queries();
    thread->Stage(heads, kStep, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * dim; i < end * dim; ++i) {
        alignas(float) char rounded[sizeof(float)];
        const int64_t between = (2 * (i / dim) + 1) * dim + i % dim;
        const int64_t at = layer.gated ? between : of_heads ? i / dim : i;
        const float gate = WideAt(gates, p_.dtype, at);
        NarrowAt(layer.gates.soft_plus ? SoftPlus(gate) : SigmoidOf(gate), p_.dtype, rounded, 0);
        const float product = WideAt(attended, p_.dtype, i) * WideAt(rounded, p_.dtype, 0);
        NarrowAt(product, p_.dtype, b_.attended, i);
      }
    });
    return b_.attended;
  }

  // Latent attention, in latent.inc: queries and keys as attention meets them, and keys into their
  // stores.
  void LatentHeads(size_t index, const char* x, Team::Member* thread);
  void LatentKeys(size_t index, int64_t begin, int64_t end) const;
  void LatentQueries(const LayerParams& layer, int64_t head, int64_t first, int64_t last) const;
  void RotateToken(const LayerParams& layer, const char* from, int64_t token, char* to) const;
  // The values of what attention has found, (tokens, H * values).
  const char* RaiseValues(const LayerParams& layer, Team::Member* thread);
  // Outputs [first, last) of a head's matrix, for the inputs of all tokens; steps are in bytes.
  void RaiseHead(const Matrix& matrix, const char* x, int64_t x_step, int64_t first, int64_t last,
                 char* out, int64_t out_step) const;
  void AskHeads(const std::vector<Matrix>& heads, Team::Member* thread) const;

  // run(head, first, last) for all outputs of each head's matrix.
  template <typename Run>
  void ForHeads(const std::vector<Matrix>& heads, Team::Member* thread, const Run& run) {
    const int64_t outputs = heads[0].outputs, each = Blocks(outputs);
    thread->Stage(static_cast<int64_t>(heads.size()) * each, kStep,
                  [&](int64_t begin, int64_t end) {
                    for (int64_t at = begin, next; at < end; at = next) {
                      const int64_t head = at / each;
                      next = std::min(end, (head + 1) * each);
                      run(head, (at - head * each) * kBlock,
                          std::min((next - head * each) * kBlock, outputs));
                    }
                  });
  }

  // In place: heads one by one, or all heads of a token together.
  void NormHeads(const NormWeights& norm, char* x, int64_t width, int64_t begin,
                 int64_t end) const {
    if (norm.weight == nullptr) return;
    const int64_t each = width / norm.dim;
    NormParams params{};
    params.dtype = p_.dtype;
    params.rows = call_.tokens() * each;
    params.dim = params.x_step = params.residual_step = norm.dim;
    params.x = params.out = x;
    params.weight = norm.weight;
    params.eps = norm.eps;
    params.offset = norm.offset;
    params.centered = norm.centered;
    params.bias = norm.bias;
    kernels_.rows.norm(params, begin * each, end * each);
  }

  // Heads of tokens in the order in which their halves are rotated, in place.
  void Halve(const LayerParams& layer, char* x, int64_t width, int64_t begin, int64_t end) const {
    thread_local std::vector<uint16_t> narrow;
    thread_local std::vector<uint32_t> wide;
    for (int64_t at = begin * width; at < end * width; at += layer.dim) {
      char* head = x + at * item_;
      item_ == 2 ? Deinterleave(head, layer.interleaved, &narrow)
                 : Deinterleave(head, layer.interleaved, &wide);
    }
  }

  // Queries, and keys where there is a place for them.
  void Rotate(const LayerParams& layer, char* q, char* k, int64_t begin, int64_t end) const {
    const Rotary& rotary = call_.rotary[layer.rotary];
    const auto heads = [&](char* x, int64_t width, char* out) {
      return RopeHeads{{x, call_.length * width, width, layer.dim}, width / layer.dim, out};
    };
    const int64_t queries = layer.queries(), keys = layer.keys();
    const RopeParams rope{
        p_.dtype,
        call_.tokens(),
        queries,
        call_.length,
        layer.dim,
        rotary.width,
        rotary.cos,
        rotary.sin,
        {heads(b_.q, queries, q), k == nullptr ? RopeHeads{} : heads(b_.k, keys, k)}};
    kernels_.rows.rope(rope, begin, end);
  }

  // The Walsh-Hadamard transform of heads, in place, where the stores' heads are transformed.
  void Transform(const LayerCall& call, char* x, int64_t begin, int64_t end) const {
    if (call.append.block == 0) return;
    thread_local Scratch space;
    const int64_t heads = call.attention.heads;
    HadamardParams params{};
    params.dtype = p_.dtype;
    params.rows = call_.tokens() * heads;
    params.dim = call.append.dim;
    params.block = call.append.block;
    params.factor = call.append.factor;
    params.x = params.out = x;
    kernels_.quant.hadamard(params, space.Get(params.block), begin * heads, end * heads);
  }

  // What attention has found as the output projection takes it.
  void Finish(size_t index, Team::Member* thread) {
    const LayerParams& layer = p_.layers[index];
    const LayerCall& call = runs_[index]->call;
    if (!layer.in_part && call.append.block == 0) return;
    const int64_t width = layer.queries();
    thread->Stage(call_.tokens(), 1, [&](int64_t begin, int64_t end) {
      if (layer.in_part) {
        float* from = reinterpret_cast<float*>(b_.part) + begin * width;
        if (layer.sinks != nullptr) Sink(layer, begin, end);
        Narrowed(from, (end - begin) * width, p_.dtype, b_.attended + begin * width * item_);
      }
      Transform(call, b_.attended, begin, end);
    });
  }

  // The share of heads' sinks taken off what attention has found.
  void Sink(const LayerParams& layer, int64_t begin, int64_t end) const {
    const int64_t heads = layer.attention.heads;
    const auto* all = reinterpret_cast<const float*>(b_.lse);
    auto* part = reinterpret_cast<float*>(b_.part);
    for (int64_t i = begin * heads; i < end * heads; ++i) {
      const float sink = WideAt(layer.sinks, p_.dtype, i % heads);
      ShareWithSink(part + i * layer.dim, layer.dim, all[i], sink);
    }
  }

  // A token of the call for each row of logits.
  int64_t TokenOf(int64_t row) const {
    if (call_.wanted == LogitRows::kAll) return row;
    const int64_t length = call_.new_lens == nullptr ? call_.length : call_.new_lens[row];
    return row * call_.length + std::max<int64_t>(length - 1, 0);
  }

  void Logits(const Residual& residual, Team::Member* thread) {
    const int64_t size = p_.hidden * item_;
    thread->Stage(call_.logit_rows(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t token = TokenOf(row);
        JoinTokens(residual, p_.last_norm, token, token + 1);
        std::memcpy(b_.wanted + row * size, b_.normed + token * size, size);
      }
    });
    Linear({{p_.logits, static_cast<char*>(call_.out)}}, b_.wanted, call_.logit_rows(), thread,
           [] {});
  }

  const DecoderKernels& kernels_;
  const RunParams& p_;
  const CallParams& call_;
  const int64_t item_;
  Buffers b_;
  // Of layers whose attention this part of the call runs.
  struct LayerRun {
    LayerCall call;
    std::optional<AttentionCall> attention;  // holds on to the former
  };
  std::vector<std::unique_ptr<LayerRun>> runs_;
};

}  // namespace
}  // namespace exkv

#include "latent.inc"

namespace exkv {

HadamardParams TransformOf(const Matrix& m, FloatType dtype, int64_t rows, const void* x,
                           void* out) {
  const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(m.hadamard)));
  return {dtype, rows, m.inputs, m.hadamard, factor, x, out};
}

int64_t RunBytes(const RunParams& params, const CallParams& call) {
  Buffers unused;
  return Lay(params, call, nullptr, &unused);
}

void RunBound(const DecoderKernels& kernels, const RunParams& params, const CallParams& call,
              char* space, int64_t threads, const ParallelFor& parallel_for) {
  Decoder decoder(kernels, params, call, space);
  int64_t stages = kStagesBeside;
  for (size_t i = FirstLayer(call); i < EndOfLayers(params, call); ++i) {
    stages += kStagesOfLayer + (params.layers[i].beside ? kStagesOfMixer : 0);
  }
  Team team(stages, threads);
  parallel_for(threads, [&](int64_t, int64_t) {
    Team::Member member(&team);
    decoder.Go(&member);
  });
  decoder.CopyOut();
}

void RunChosen(const DecoderKernels& kernels, const RunParams& params, const ChosenCall& call,
               int64_t threads, const ParallelFor& parallel_for) {
  thread_local Scratch memory;
  CallParams one{};
  one.rows = call.rows;
  one.length = 1;
  const int64_t floats = RunBytes(params, one) / int64_t{sizeof(float)} + 1;
  Decoder decoder(kernels, params, one, reinterpret_cast<char*>(memory.Get(floats)));
  decoder.Bring(call);
  Team team(kStagesOfLayer, threads);
  parallel_for(threads, [&](int64_t, int64_t) {
    Team::Member member(&team);
    decoder.GoChosen(call, &member);
  });
}

}  // namespace exkv
