// Torch's caching allocator for CUDA as arithmetic on addresses, without memory: which segments a
// device reserves for the blocks that are asked of it. The same rules as
// exkv/caching_allocator.py, which says where they come from; tests hold both against torch's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

namespace exkv::sim {

struct SegmentRules {
  bool expandable = false;
  size_t max_split = SIZE_MAX;
  size_t max_unsplit_rounding = size_t{20} << 20;
  size_t power2_divisions = 0;
  size_t large_segment = size_t{20} << 20;
};

class Segments {
 public:
  struct Block {
    uint64_t address;
    size_t size;
    bool small;
    bool mapped = true;
    bool free = true;
    Block* before = nullptr;
    Block* after = nullptr;
  };

  explicit Segments(const SegmentRules& rules) : rules_(rules) {}

  // A block of at least `nbytes` (> 0), or null where it would take more than `capacity` bytes.
  Block* allocate(size_t nbytes, size_t capacity);
  void release(Block* block);
  void empty_cache();

  size_t reserved() const { return reserved_; }
  // Bytes of free blocks in segments that are partly in use.
  size_t inactive_split() const;

 private:
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return a->size != b->size ? a->size < b->size : a->address < b->address;
    }
  };
  struct ByAddress {
    bool operator()(const Block* a, const Block* b) const { return a->address < b->address; }
  };
  using Pool = std::set<Block*, BySize>;

  size_t rounded(size_t nbytes) const;
  size_t segment_of(size_t size) const;
  size_t page_of(bool small) const;
  Pool& pool(bool small) { return free_[small ? 0 : 1]; }
  std::set<Block*, ByAddress>& unmapped(bool small) { return unmapped_[small ? 0 : 1]; }

  Block* made(uint64_t address, size_t size, bool small, bool mapped = true);
  void forget(Block* block);
  bool takes(size_t nbytes, size_t capacity);

  Block* best_fit(size_t size, bool small);
  bool splits(const Block* block, size_t size) const;
  Block* cut(Block* block, size_t size, bool mapped = true);
  Block* merged(Block* block);

  Block* new_block(size_t size, bool small, size_t capacity);
  bool release_fitting(size_t size, bool small);
  void drop(Block* block);

  Block* expanded(size_t size, bool small, size_t capacity);
  Block* expandable(size_t size, bool small);
  Block* map(Block* block, size_t nbytes, size_t capacity);
  void unmap(Block* block);

  const SegmentRules rules_;
  size_t reserved_ = 0;
  uint64_t next_address_ = uint64_t{1} << 40;
  Pool free_[2];
  std::set<Block*, ByAddress> unmapped_[2];
  std::unordered_map<Block*, std::unique_ptr<Block>> blocks_;
};

}  // namespace exkv::sim
