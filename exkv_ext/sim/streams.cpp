// See streams.h.
#include "streams.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "allocator.h"
#include "ledger.h"

namespace exkv::sim {
namespace {

struct Copy {
  char* to;
  const char* from;
  size_t nbytes;

  bool touches(const char* begin, size_t count) const {
    const auto overlaps = [&](const char* mine) {
      return mine < begin + count && begin < mine + nbytes;
    };
    return overlaps(to) || overlaps(from);
  }
};

struct Queue {
  std::deque<Copy> copies;
  int64_t done = 0;  // copies that were given before the first in the queue

  void finish(int64_t number) {
    for (; done < number && !copies.empty(); ++done) {
      const Copy& copy = copies.front();
      if (copy.nbytes != 0) std::memcpy(copy.to, copy.from, copy.nbytes);
      copies.pop_front();
    }
  }
  int64_t given() const { return done + static_cast<int64_t>(copies.size()); }
};

std::atomic<bool> lag{false};
std::atomic<int64_t> errors{0};
std::mutex mutex;
std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue>& queues() {
  static auto* all = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue>();
  return *all;
}
std::map<const char*, std::set<c10::StreamId>>& uses() {
  static auto* all = new std::map<const char*, std::set<c10::StreamId>>();
  return *all;
}

}  // namespace

void set_lag(bool on) { lag = on; }
bool lags() { return lag; }
int64_t lifetime_errors() { return errors; }

bool queue_copy(c10::DeviceIndex index, void* to, const void* from, size_t nbytes) {
  const c10::StreamId stream = current_stream(index);
  if (!lag || stream == 0) return false;
  std::lock_guard<std::mutex> lock(mutex);
  queues()[{index, stream}].copies.push_back(
      {static_cast<char*>(to), static_cast<const char*>(from), nbytes});
  return true;
}

int64_t given(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = queues().find({stream.device_index(), stream.id()});
  return found == queues().end() ? 0 : found->second.given();
}

void finish(const c10::Stream& stream, int64_t number) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = queues().find({stream.device_index(), stream.id()});
  if (found != queues().end()) found->second.finish(number);
}

void finish_device(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [key, queue] : queues()) {
    if (key.first == index) queue.finish(queue.given());
  }
}

void record_use(const void* data, c10::StreamId stream) {
  if (!lag) return;
  std::lock_guard<std::mutex> lock(mutex);
  uses()[static_cast<const char*>(data)].insert(stream);
}

void memory_freed(const void* data, size_t nbytes) {
  if (!lag) return;
  const auto* begin = static_cast<const char*>(data);
  std::lock_guard<std::mutex> lock(mutex);
  const auto recorded = uses().find(begin);
  for (auto& [key, queue] : queues()) {
    for (size_t i = 0; i < queue.copies.size(); ++i) {
      if (!queue.copies[i].touches(begin, nbytes)) continue;
      if (recorded != uses().end() && recorded->second.count(key.second) != 0) {
        queue.finish(queue.done + static_cast<int64_t>(i) + 1);
        i = static_cast<size_t>(-1);
      } else {
        queue.copies[i].nbytes = 0;
        ++errors;
      }
    }
  }
  if (recorded != uses().end()) uses().erase(recorded);
}

}  // namespace exkv::sim
