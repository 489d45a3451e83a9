// Runs CUDA kernels on the CPU: the same .cu file, compiled by a C++ compiler with this header.
//
// Blocks run one after another; a block's threads are fibers on one CPU thread, each of which runs
// until it waits for its block or its warp. So results don't depend on luck, and what a GPU answers
// with silence is an error here: a barrier that some threads never reach, a lane missing from a
// shuffle, a write past shared memory. Shared memory starts poisoned (all NaN), each warp gets as
// far ahead of the others as barriers let it, and SetBackward reverses the order of warps and of
// their lanes, so that a missing barrier shows as a wrong result in one of the two.
//
// Only what exkv's kernels use is here: add to it what a new kernel needs.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../exkv_ext/cpu/half.inc"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

using cudaStream_t = void*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned count() const { return x * y * z; }
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

struct float2 {
  float x, y;
};

namespace exkv::emulation {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kCanaryBytes = 64;
constexpr unsigned char kPoison = 0xff;  // NaN in every float type
constexpr unsigned char kCanary = 0xfe;  // a huge float: who reads it gets a wrong result

enum class State { kReady, kAtBlock, kAtWarp, kDone };

struct Fiber {
  ucontext_t context;  // to begin with
  jmp_buf jump;        // to go on: without the system call that swapcontext makes
  bool begun = false;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state = State::kReady;
  unsigned mask;                                      // the lanes that an kAtWarp fiber waits for
  uint64_t exchange;                                  // what its lane hands to a shuffle
  uint32_t operands[6];                               // and to a product of matrices
  std::vector<std::pair<void*, const void*>> copies;  // that it has asked for, each of 16 bytes
  std::deque<size_t> groups;                          // where each group of these ends
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<unsigned char> shared;
  std::function<void()> body;
  jmp_buf scheduler;
  unsigned current = 0;
  unsigned threads = 0;
  bool backward = false;
  std::exception_ptr failure;
};

inline Block block;

inline void SetBackward(bool backward) { block.backward = backward; }

inline void Wait(State state, unsigned mask = 0) {
  Fiber& self = *block.fibers[block.current];
  self.state = state;
  self.mask = mask;
  if (_setjmp(self.jump) == 0) _longjmp(block.scheduler, 1);
}

// A fiber's own function: a thread of one block after the other. To begin costs system calls, which
// then are a few for all blocks of a launch.
inline void Entry() {
  while (true) {
    try {
      block.body();
    } catch (...) {
      block.failure = std::current_exception();
    }
    Wait(State::kDone);
  }
}

inline void Switch(Fiber& fiber) {
  if (_setjmp(block.scheduler) != 0) return;  // the fiber waits, or is done
  if (std::exchange(fiber.begun, true)) _longjmp(fiber.jump, 1);
  setcontext(&fiber.context);
}

inline void Resume(unsigned thread) {
  block.current = thread;
  const unsigned row = thread / blockDim.x;
  threadIdx = dim3(thread % blockDim.x, row % blockDim.y, row / blockDim.y);
  Switch(*block.fibers[thread]);
  if (block.failure) std::rethrow_exception(std::exchange(block.failure, nullptr));
}

// A warp's lanes go on together once every lane of the mask has come to the same call.
inline bool WarpArrived(unsigned thread) {
  const unsigned first = thread / kWarp * kWarp, mask = block.fibers[thread]->mask;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    if (first + lane >= block.threads) return false;
    const Fiber& fiber = *block.fibers[first + lane];
    if (fiber.state != State::kAtWarp || fiber.mask != mask) return false;
  }
  return true;
}

inline void SetReady(const std::vector<unsigned>& threads) {
  for (const unsigned t : threads) block.fibers[t]->state = State::kReady;
}

// Makes ready the lanes of a warp that no longer have to wait for it; whether there were any.
inline bool ReleaseWarp(unsigned first) {
  std::vector<unsigned> ready;
  for (unsigned t = first; t < std::min(first + kWarp, block.threads); ++t) {
    const Fiber& fiber = *block.fibers[t];
    if (fiber.state != State::kAtWarp) continue;
    // Most lanes wait for the same ones as their neighbour, who was let go.
    const bool as_before =
        !ready.empty() && ready.back() == t - 1 && block.fibers[t - 1]->mask == fiber.mask;
    if (as_before || WarpArrived(t)) ready.push_back(t);
  }
  SetReady(ready);
  return !ready.empty();
}

// The same for a block, once no warp can go on.
inline bool ReleaseBlock() {
  std::vector<unsigned> at_block;
  unsigned done = 0;
  for (unsigned t = 0; t < block.threads; ++t) {
    if (block.fibers[t]->state == State::kAtBlock) at_block.push_back(t);
    done += block.fibers[t]->state == State::kDone;
  }
  if (at_block.size() + done < block.threads) {
    throw std::runtime_error("emulated block " + std::to_string(blockIdx.x) + ": " +
                             std::to_string(block.threads - done) +
                             " threads wait at a barrier or shuffle that others never reach");
  }
  SetReady(at_block);
  return !at_block.empty();
}

// Runs a warp until all of its lanes wait for the block, or are done.
inline void RunWarp(unsigned first) {
  const unsigned lanes = std::min(kWarp, block.threads - first);
  do {
    for (unsigned i = 0; i < lanes; ++i) {
      const unsigned t = first + (block.backward ? lanes - 1 - i : i);
      if (block.fibers[t]->state == State::kReady) Resume(t);
    }
  } while (ReleaseWarp(first));
}

// From the top of its stack: a new one, or one of a block that failed.
inline void Begin(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, Entry, 0);
  fiber.begun = false;
}

inline void StartFibers() {
  while (block.fibers.size() < block.threads) block.fibers.emplace_back(new Fiber);
  for (unsigned t = 0; t < block.threads; ++t) {
    Fiber& fiber = *block.fibers[t];
    if (std::exchange(fiber.state, State::kReady) != State::kDone) Begin(fiber);
  }
}

inline void RunBlock(size_t shared_bytes) {
  block.shared.assign(shared_bytes, kPoison);
  block.shared.resize(shared_bytes + kCanaryBytes, kCanary);
  StartFibers();
  const unsigned warps = (block.threads + kWarp - 1) / kWarp;
  do {
    for (unsigned i = 0; i < warps; ++i) RunWarp((block.backward ? warps - 1 - i : i) * kWarp);
  } while (ReleaseBlock());
  if (!std::all_of(block.shared.begin() + shared_bytes, block.shared.end(),
                   [](unsigned char byte) { return byte == kCanary; })) {
    throw std::runtime_error("emulated block " + std::to_string(blockIdx.x) +
                             ": wrote past its shared memory of " + std::to_string(shared_bytes) +
                             " bytes");
  }
}

// A launch, with its arguments by value.
struct Launched {
  dim3 grid;
  dim3 threads;
  size_t shared_bytes;
  std::function<void()> body;

  void Run() const {
    gridDim = grid;
    blockDim = threads;
    block.threads = threads.count();
    block.body = body;
    for (unsigned b = 0; b < grid.count(); ++b) {
      blockIdx = dim3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
      RunBlock(shared_bytes);
    }
  }
};

// What a CUDA graph holds: launches as they were made, and the memory that was theirs.
struct Graph {
  bool capturing = false;
  std::vector<Launched> launches;
  std::vector<std::unique_ptr<float[]>> memory;
};

inline Graph graph;

// Memory of an op's own that its launches use, which stays with the graph that is captured.
inline float* KeptByGraph(float* own, int64_t count) {
  if (!graph.capturing) return own;
  graph.memory.emplace_back(new float[static_cast<size_t>(count)]);
  return graph.memory.back().get();
}

// What a device says of itself: see launch.cuh.
struct Device {
  bool has_code = true;
  int blocks_at_once = 4;
  bool tensor_cores = true;
};

inline Device devices[2];
inline int current = 0;     // the device that is asked, and that launches go to
inline int tensors_on = 0;  // the device that every tensor is on
inline int64_t wrong = 0;   // times that one was not the other

inline const Device& Current() {
  wrong += current != tensors_on;
  return devices[current];
}

// Makes a device the current one for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(std::exchange(current, device)) {}
  ~OnDevice() { current = before_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_;
};

inline void Launch(dim3 grid, dim3 threads, size_t shared_bytes, std::function<void()> body) {
  Current();
  const Launched launched{grid, threads, shared_bytes, std::move(body)};
  if (graph.capturing) graph.launches.push_back(launched);
  launched.Run();
}

template <typename T>
T Shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  std::memcpy(&block.fibers[block.current]->exchange, &value, sizeof(T));
  Wait(State::kAtWarp, mask);  // everyone has written
  if (source >= kWarp || !(mask >> source & 1)) {
    throw std::runtime_error("shuffle from lane " + std::to_string(source) +
                             ", which its mask leaves out");
  }
  T result;
  std::memcpy(&result, &block.fibers[block.current / kWarp * kWarp + source]->exchange, sizeof(T));
  Wait(State::kAtWarp, mask);  // everyone has read
  return result;
}

inline unsigned Lane() { return block.current % kWarp; }

// The fiber of a lane of the current one's warp.
inline const Fiber& FiberOf(unsigned lane) {
  return *block.fibers[block.current / kWarp * kWarp + lane];
}

// Where a row of a matrix in shared memory begins.
inline const uint16_t* MatrixRow(unsigned lane) {
  const uint64_t address = FiberOf(lane).exchange;
  const auto first = reinterpret_cast<uint64_t>(block.shared.data());
  const uint64_t end = first + block.shared.size() - kCanaryBytes;
  if (address % 16 != 0 || address < first || address + 16 > end) {
    throw std::runtime_error(
        "emulated block " + std::to_string(blockIdx.x) + ": lane " + std::to_string(lane) +
        " loads a matrix's row that is misaligned, or outside of shared memory");
  }
  return reinterpret_cast<const uint16_t*>(address);
}

// ldmatrix of four: see exkv_ext/cuda/mma.cuh.
inline void LoadFour(const void* row, bool transposed, uint32_t (&out)[4]) {
  constexpr unsigned kAll = 0xffffffffu;
  block.fibers[block.current]->exchange = reinterpret_cast<uint64_t>(row);
  Wait(State::kAtWarp, kAll);  // everyone has written
  const unsigned major = Lane() / 4, minor = Lane() % 4 * 2;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    uint32_t pair[2];
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned r = transposed ? minor + i : major, c = transposed ? major : minor + i;
      pair[i] = MatrixRow(matrix * 8 + r)[c];
    }
    out[matrix] = pair[0] | pair[1] << 16;
  }
  Wait(State::kAtWarp, kAll);  // everyone has read
}

// movmatrix: see exkv_ext/cuda/mma.cuh.
inline uint32_t Transposed(uint32_t piece) {
  constexpr unsigned kAll = 0xffffffffu;
  uint32_t pair[2];
  for (unsigned i = 0; i < 2; ++i) {
    const unsigned row = Lane() % 4 * 2 + i, column = Lane() / 4;
    pair[i] = Shuffle(kAll, piece, row * 4 + column / 2) >> (column % 2 * 16) & 0xffff;
  }
  return pair[0] | pair[1] << 16;
}

inline void LoadMatrices(const void* row, uint32_t (&out)[4]) { LoadFour(row, false, out); }
inline void LoadTransposed(const void* row, uint32_t (&out)[4]) { LoadFour(row, true, out); }

}  // namespace exkv::emulation

#define EXKV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (static_cast<void>(stream),                                       \
   ::exkv::emulation::Launch((grid), (block), (shared_bytes), [=] { kernel(__VA_ARGS__); }))

#define EXKV_DYNAMIC_SHARED(type, name) \
  type* name = reinterpret_cast<type*>(::exkv::emulation::block.shared.data())

namespace exkv {
// The grant that a GPU wants for large blocks: see launch.cuh.
template <typename Kernel>
void AllowShared(Kernel*, int) {}

inline int CurrentDevice() { return -1; }
inline bool HasTensorCores() { return emulation::Current().tensor_cores; }

template <typename Kernel>
bool IsLoadable(Kernel*) {
  return emulation::Current().has_code;
}

template <typename Kernel>
int BlocksAtOnce(Kernel*, int, size_t) {
  return emulation::Current().blocks_at_once;
}

// Copies that a thread has asked for: made when it waits for them, and no sooner.
inline void CopyAsync(void* shared, const void* from) {
  emulation::block.fibers[emulation::block.current]->copies.push_back({shared, from});
}

inline void CommitCopies() {
  auto& fiber = *emulation::block.fibers[emulation::block.current];
  fiber.groups.push_back(fiber.copies.size());
}

template <int kUnderWay>
void WaitForCopies() {
  auto& fiber = *emulation::block.fibers[emulation::block.current];
  while (fiber.groups.size() > kUnderWay) {
    const size_t count = fiber.groups.front();
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(fiber.copies[i].first, fiber.copies[i].second, 16);
    }
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<long>(count));
    fiber.groups.pop_front();
    for (size_t& others : fiber.groups) others -= count;
  }
}
}  // namespace exkv

inline void __syncthreads() { exkv::emulation::Wait(exkv::emulation::State::kAtBlock); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  exkv::emulation::Wait(exkv::emulation::State::kAtWarp, mask);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const unsigned first = exkv::emulation::Lane() / width * width;
  return exkv::emulation::Shuffle(mask, value, first + static_cast<unsigned>(lane));
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return exkv::emulation::Shuffle(mask, value, exkv::emulation::Lane() ^ lanes);
}

// Four bytes of the two words together, each by a digit of the selector.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  unsigned found = 0;
  for (unsigned i = 0; i < 4; ++i) {
    found |= static_cast<unsigned>(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  }
  return found;
}

using std::max;
using std::min;

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline unsigned __float_as_uint(float value) { return exkv::AsBits(value); }
inline float __uint_as_float(unsigned bits) { return exkv::AsFloat(bits); }

// No conversions by themselves: torch's build flags take them from CUDA's types too.
struct __half {
  uint16_t bits;
};

struct __nv_bfloat16 {
  uint16_t bits;
};

inline __half __float2half_rn(float value) { return {exkv::HalfBits(value)}; }
inline float __half2float(__half value) { return exkv::HalfValue(value.bits); }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const unsigned bits = exkv::AsBits(value), rounded = bits + 0x7fff + (bits >> 16 & 1);
  return {std::isnan(value) ? uint16_t{0x7fff} : static_cast<uint16_t>(rounded >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 value) {
  return exkv::AsFloat(static_cast<unsigned>(value.bits) << 16);
}

struct __half2 {
  __half x, y;
};

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

namespace exkv::emulation {

template <typename T>
float WidenBits(uint32_t bits);
template <>
inline float WidenBits<__half>(uint32_t bits) {
  return HalfValue(static_cast<uint16_t>(bits));
}
template <>
inline float WidenBits<__nv_bfloat16>(uint32_t bits) {
  return AsFloat(bits << 16);
}

// The values of row (or, of a second factor, column) `at` that the inner dimension of 16 goes
// through: in lanes 4 at to 4 at + 3, in the registers `first` and `second`.
template <typename T>
void GatherOperands(unsigned at, unsigned first, unsigned second, float (&out)[16]) {
  for (unsigned i = 0; i < 16; ++i) {
    const uint32_t pair = FiberOf(at * 4 + i % 8 / 2).operands[i < 8 ? first : second];
    out[i] = WidenBits<T>(pair >> (i % 2 * 16) & 0xffff);
  }
}

// mma.m16n8k16 with sums in float32: see exkv_ext/cuda/mma.cuh.
template <typename T>
void Multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
  constexpr unsigned kAll = 0xffffffffu;
  const uint32_t given[6] = {a[0], a[1], a[2], a[3], low, high};
  std::copy(given, given + 6, block.fibers[block.current]->operands);
  Wait(State::kAtWarp, kAll);  // everyone has written
  float rows[2][16], columns[2][16];
  for (unsigned i = 0; i < 2; ++i) {
    GatherOperands<T>(Lane() / 4, i, 2 + i, rows[i]);
    GatherOperands<T>(Lane() % 4 * 2 + i, 4, 5, columns[i]);
  }
  for (unsigned i = 0; i < 4; ++i) {
    for (unsigned k = 0; k < 16; ++k) sum[i] += rows[i / 2][k] * columns[i % 2][k];
  }
  Wait(State::kAtWarp, kAll);  // everyone has read
}

}  // namespace exkv::emulation
