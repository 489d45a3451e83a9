// Torch's own caching allocator, asked line by line: "a ID BYTES", "f ID", "e" (empty the cache).
// Answers a line for each: bytes reserved, allocated, and in free pieces of segments in use; -1 at
// the end where the request found no memory.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <iostream>
#include <string>
#include <unordered_map>

int main() {
  namespace caching = c10::cuda::CUDACachingAllocator;
  caching::init(1);
  c10::cuda::detail::init_p2p_access_cache(1);
  std::unordered_map<long, void*> held;
  std::string what;
  while (std::cin >> what) {
    long id = 0, nbytes = 0;
    bool failed = false;
    if (what == "a") {
      std::cin >> id >> nbytes;
      try {
        held[id] = caching::raw_alloc(nbytes);
      } catch (const c10::OutOfMemoryError&) {
        failed = true;
      }
    } else if (what == "f") {
      std::cin >> id;
      if (held.count(id) != 0) caching::raw_delete(held[id]);
      held.erase(id);
    } else {
      caching::emptyCache();
    }
    const auto stats = caching::getDeviceStats(0);
    std::cout << stats.reserved_bytes[0].current << ' ' << stats.allocated_bytes[0].current << ' '
              << stats.inactive_split_bytes[0].current << (failed ? " -1" : "") << '\n';
  }
}
