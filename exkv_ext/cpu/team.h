// Threads that go through stages of work together, each stage begun when the one before is done.
//
// Starting and joining a parallel region costs some microseconds, as long as it takes to read a
// matrix of a small model; here a stage costs a fraction of one. Each thread has its own part of a
// stage, which it goes through in memory order. A thread that has finished its part steals from the
// ends of the others' parts: so a thread that is descheduled delays nobody for long, and any number
// of threads, even one, makes progress.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace exkv {

class Team {
  // Of a thread's part of a stage: what was taken from its front, and from its end (upper half).
  struct alignas(64) Taken {
    std::atomic<uint64_t> both{0};
  };
  struct alignas(64) Done {
    std::atomic<int64_t> count{0};
  };

 public:
  Team(int64_t stages, int64_t threads)
      : threads_(threads), taken_(static_cast<size_t>(stages * threads)), done_(stages) {}

  // One thread's view of the stages; all threads call Stage with the same work in one order.
  class Member {
   public:
    explicit Member(Team* team) : team_(*team), index_(team->joined_++ % team->threads_) {}

    // The first of [0, n) that is this thread's own.
    int64_t First(int64_t n) const { return n * index_ / team_.threads_; }

    // Runs pieces [begin, end) of [0, n), of `step` or less, until none is left. Then `meanwhile`,
    // once, and waits for those who still run a piece.
    template <typename Run, typename Meanwhile>
    void Stage(int64_t n, int64_t step, const Run& run, const Meanwhile& meanwhile) {
      int64_t mine = 0;
      for (int64_t i = 0; i < team_.threads_; ++i) mine += TakeAll(n, step, i, run);
      std::atomic<int64_t>& done = team_.done_[at_++].count;
      if (mine > 0) done.fetch_add(mine, std::memory_order_acq_rel);
      if (done.load(std::memory_order_acquire) < n) meanwhile();
      Wait(done, n);
    }

    template <typename Run>
    void Stage(int64_t n, int64_t step, const Run& run) {
      Stage(n, step, run, [] {});
    }

   private:
    // The part of the thread that comes `after` this one: our own from its front, others' from the
    // end. Returns how much was run.
    template <typename Run>
    int64_t TakeAll(int64_t n, int64_t step, int64_t after, const Run& run) {
      const int64_t owner = (index_ + after) % team_.threads_;
      const int64_t first = n * owner / team_.threads_;
      const int64_t last = n * (owner + 1) / team_.threads_;
      auto& taken = team_.taken_[at_ * static_cast<size_t>(team_.threads_) + owner].both;
      int64_t mine = 0;
      uint64_t seen = taken.load(std::memory_order_relaxed);
      while (true) {
        const auto front = static_cast<int64_t>(seen & 0xffffffffu);
        const auto back = static_cast<int64_t>(seen >> 32);
        const int64_t count = std::min(step, last - first - front - back);
        if (count <= 0) return mine;
        const uint64_t more = static_cast<uint64_t>(count) << (after == 0 ? 0 : 32);
        if (!taken.compare_exchange_weak(seen, seen + more, std::memory_order_relaxed)) continue;
        const int64_t begin = after == 0 ? first + front : last - back - count;
        run(begin, begin + count);
        mine += count;
        seen = taken.load(std::memory_order_relaxed);
      }
    }

    static void Wait(const std::atomic<int64_t>& done, int64_t n) {
      for (int64_t spins = 0; done.load(std::memory_order_acquire) < n; ++spins) {
        if (spins < kSpins) {
          Pause();
        } else {
          std::this_thread::yield();  // more threads than processors
        }
      }
    }

    Team& team_;
    const int64_t index_;
    size_t at_ = 0;
  };

 private:
  static constexpr int64_t kSpins = 1 << 12;

  static void Pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  const int64_t threads_;
  std::vector<Taken> taken_;  // of each stage, of each thread
  std::vector<Done> done_;
  std::atomic<int64_t> joined_{0};
};

}  // namespace exkv
