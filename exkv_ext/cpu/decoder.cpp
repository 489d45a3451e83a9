#include "decoder.h"

#include <algorithm>
#include <deque>

#include "append.h"
#include "scratch.h"
#include "team.h"

namespace exkv {
namespace {

constexpr int64_t kAlign = 64;
// Blocks of outputs that a thread takes at a time, of a linear map.
constexpr int64_t kStep = 4;
// What a thread that waits asks for meanwhile, of the weights that it will read next: less than the
// second cache has room for.
constexpr int64_t kAheadBytes = 64 << 10;
constexpr int64_t kLine = 64;
constexpr int64_t kStagesOfLayer = 8;

int64_t ItemBytes(FloatType dtype) { return dtype == FloatType::kFloat32 ? 4 : 2; }

int64_t Blocks(int64_t outputs) { return (outputs + kLinearBlock - 1) / kLinearBlock; }

// What lies between the parts of a layer: each (tokens, n) contiguous.
struct Buffers {
  char* sum;     // of the residual path; p.out, so that the last one is the result
  char* normed;  // hidden
  char* q;       // H * D
  char* k;       // H_kv * D
  char* v;       // H_kv * D
  char* turned_q;
  char* read;   // H * D
  char* added;  // hidden
  char* gate;   // inner
  char* up;     // inner
};

// The buffers in `space`; with null, only how far they reach.
int64_t Lay(const DecoderParams& p, char* space, Buffers* b) {
  int64_t end = 0;
  const auto take = [&](int64_t width) {
    char* begin = space + end;
    end += (p.tokens() * width * ItemBytes(p.dtype) + kAlign - 1) / kAlign * kAlign;
    return begin;
  };
  const int64_t q = p.heads * p.dim, kv = p.kv_heads * p.dim;
  b->sum = static_cast<char*>(p.out);
  b->normed = take(p.hidden);
  b->q = take(q), b->k = take(kv), b->v = take(kv);
  b->turned_q = take(q);
  b->read = take(q);
  b->added = take(p.hidden);
  b->gate = take(p.inner), b->up = take(p.inner);
  return end;
}

// One call, as all threads see it.
class Decoder {
 public:
  Decoder(const DecoderKernels& kernels, const DecoderParams& params, char* space)
      : kernels_(kernels), p_(params), item_(ItemBytes(params.dtype)) {
    Lay(p_, space, &b_);
    for (const LayerParams& layer : p_.layers) {
      AttentionParams attention = layer.attention;
      attention.q = {b_.turned_q, p_.length * p_.heads * p_.dim, p_.heads * p_.dim, p_.dim};
      attention.out = b_.read;
      attention_.push_back(attention);
      calls_.emplace_back(kernels_.attention, attention_.back());
      const int64_t token = p_.kv_heads * p_.dim;
      AppendParams append = layer.append;
      append.sides[0].x = {b_.k, p_.length * token, token, p_.dim};
      append.sides[1].x = {b_.v, p_.length * token, token, p_.dim};
      appends_.push_back(append);
    }
    GiveStates();
  }

  void Go(Team::Member* thread) {
    for (size_t layer = 0; layer < p_.layers.size(); ++layer) RunLayer(layer, thread);
    // The last layer's network; a norm has added every other's.
    thread->Stage(p_.tokens(), 1, [&](int64_t begin, int64_t end) {
      const GateParams sum{p_.dtype,  p_.tokens(), p_.hidden, p_.hidden,
                           p_.hidden, b_.sum,      b_.added};
      kernels_.rows.add(sum, begin, end);
    });
  }

 private:
  // The layers follow each other, so their states may share their memory.
  void GiveStates() {
    thread_local Scratch states;
    int64_t most = 0;
    for (const AttentionCall& call : calls_) most = std::max(most, call.state_floats());
    float* memory = states.Get(most);
    for (AttentionCall& call : calls_) call.GiveStates(memory);
  }

  void RunLayer(size_t index, Team::Member* thread) {
    const LayerParams& layer = p_.layers[index];
    const LayerParams* next = index + 1 < p_.layers.size() ? &p_.layers[index + 1] : nullptr;
    Norm(layer.norm, index == 0 ? nullptr : b_.added, index == 0 ? p_.x : b_.sum, thread);
    Linear(layer, {{kQ, b_.q}, {kK, b_.k}, {kV, b_.v}}, b_.normed, thread,
           [&] { Ask(layer, kOut, thread); });
    thread->Stage(p_.tokens(), 1, [&](int64_t begin, int64_t end) {
      TurnQueries(begin, end);
      AppendTokens(appends_[index], kernels_.rows, kernels_.quant, begin, end);
    });
    AttentionCall& call = calls_[index];
    thread->Stage(call.items(), 1, [&](int64_t item, int64_t) { call.Run(item, item + 1); });
    Linear(layer, {{kOut, b_.added}}, b_.read, thread, [&] { Ask(layer, kGate, thread); });
    Norm(layer.second_norm, b_.added, index == 0 ? p_.x : b_.sum, thread);
    thread->Stage(
        Blocks(p_.inner), kStep, [&](int64_t begin, int64_t end) { Gate(layer, begin, end); },
        [&] { Ask(layer, kDown, thread); });
    Linear(layer, {{kDown, b_.added}}, b_.gate, thread, [&] {
      if (next != nullptr) Ask(*next, kQ, thread);
    });
  }

  // For what this thread reads first of a map.
  void Ask(const LayerParams& layer, Map map, Team::Member* thread) const {
    const int64_t row = Inputs(map) * item_;
    const int64_t first = thread->First(Blocks(Outputs(map))) * kLinearBlock * row;
    const int64_t bytes = std::min(kAheadBytes, Outputs(map) * row - first);
    const char* from = static_cast<const char*>(layer.maps[map].weight) + first;
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at, 0, 2);
  }

  // x, with `added` if there is any, is the new sum; its norm goes to `normed`.
  void Norm(const void* weight, const void* added, const void* x, Team::Member* thread) {
    thread->Stage(p_.tokens(), 1, [&](int64_t begin, int64_t end) {
      const NormParams norm{p_.dtype,
                            p_.tokens(),
                            p_.hidden,
                            p_.hidden,
                            p_.hidden,
                            x,
                            added,
                            weight,
                            p_.eps,
                            false,
                            added == nullptr ? nullptr : b_.sum,
                            b_.normed};
      kernels_.rows.norm(norm, begin, end);
    });
  }

  struct Wanted {
    Map map;
    char* out;
  };

  int64_t Outputs(Map map) const {
    switch (map) {
      case kQ:
        return p_.heads * p_.dim;
      case kK:
      case kV:
        return p_.kv_heads * p_.dim;
      case kGate:
      case kUp:
        return p_.inner;
      default:
        return p_.hidden;
    }
  }

  int64_t Inputs(Map map) const {
    return map == kOut ? p_.heads * p_.dim : map == kDown ? p_.inner : p_.hidden;
  }

  LinearParams MapOf(const LayerParams& layer, const Wanted& wanted, const char* x) const {
    const MapParams& map = layer.maps[wanted.map];
    return {p_.dtype, p_.tokens(), Inputs(wanted.map), Outputs(wanted.map),
            x,        map.weight,  map.bias,           wanted.out};
  }

  // Maps of one input, as one row of outputs.
  template <typename Meanwhile>
  void Linear(const LayerParams& layer, std::initializer_list<Wanted> maps, const char* x,
              Team::Member* thread, const Meanwhile& meanwhile) {
    int64_t blocks = 0;
    for (const Wanted& wanted : maps) blocks += Blocks(Outputs(wanted.map));
    const auto run = [&](int64_t begin, int64_t end) {
      int64_t first = 0;  // block of the map at hand
      for (const Wanted& wanted : maps) {
        const LinearParams map = MapOf(layer, wanted, x);
        const int64_t last = first + Blocks(map.outputs);
        RunBlocks(map, std::max(begin, first) - first, std::min(end, last) - first);
        first = last;
      }
    };
    thread->Stage(blocks, kStep, run, meanwhile);
  }

  void RunBlocks(const LinearParams& map, int64_t begin, int64_t end) const {
    if (begin >= end) return;
    kernels_.linear.run(map, begin * kLinearBlock, std::min(end * kLinearBlock, map.outputs));
  }

  // act(gate) * up for some of the network's inner values: nobody has to wait between.
  void Gate(const LayerParams& layer, int64_t begin, int64_t end) const {
    RunBlocks(MapOf(layer, {kGate, b_.gate}, b_.normed), begin, end);
    RunBlocks(MapOf(layer, {kUp, b_.up}, b_.normed), begin, end);
    const int64_t first = begin * kLinearBlock;
    const int64_t count = std::min(end * kLinearBlock, p_.inner) - first;
    const GateParams gate{p_.dtype,
                          p_.tokens(),
                          count,
                          p_.inner,
                          p_.inner,
                          b_.gate + first * item_,
                          b_.up + first * item_};
    (p_.gelu ? kernels_.rows.gelu_mul : kernels_.rows.silu_mul)(gate, 0, p_.tokens());
  }

  void TurnQueries(int64_t begin, int64_t end) const {
    const int64_t token = p_.heads * p_.dim;
    const TokenView q{b_.q, p_.length * token, token, p_.dim};
    const RopeParams rope{p_.dtype,  p_.tokens(), token,
                          p_.length, p_.dim,      p_.width,
                          p_.cos,    p_.sin,      {{q, p_.heads, b_.turned_q}, {}}};
    kernels_.rows.rope(rope, begin, end);
  }

  const DecoderKernels& kernels_;
  const DecoderParams& p_;
  const int64_t item_;
  Buffers b_;
  std::vector<AppendParams> appends_;
  std::deque<AttentionParams> attention_;  // the calls hold on to them
  std::deque<AttentionCall> calls_;
};

}  // namespace

int64_t DecoderBytes(const DecoderParams& params) {
  Buffers unused;
  return Lay(params, nullptr, &unused);
}

void RunDecoder(const DecoderKernels& kernels, const DecoderParams& params, char* space,
                int64_t threads, const ParallelFor& parallel_for) {
  Decoder decoder(kernels, params, space);
  Team team(static_cast<int64_t>(params.layers.size()) * kStagesOfLayer + 1, threads);
  parallel_for(threads, [&](int64_t, int64_t) {
    Team::Member member(&team);
    decoder.Go(&member);
  });
}

}  // namespace exkv
