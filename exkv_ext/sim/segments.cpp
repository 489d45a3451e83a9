// See segments.h.
#include "segments.h"

#include <algorithm>
#include <vector>

namespace exkv::sim {
namespace {

constexpr size_t kBlock = 512;
constexpr size_t kSmall = size_t{1} << 20;
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kLarge = size_t{10} << 20;
constexpr size_t kRoundLarge = size_t{2} << 20;

size_t up(size_t n, size_t step) { return (n + step - 1) / step * step; }

// Bytes to which a block can grow: of blocks that fit, the one that can is the last choice.
size_t room_of(const Segments::Block* block) {
  const Segments::Block* after = block->after;
  return block->size + (after != nullptr && !after->mapped ? after->size : 0);
}

}  // namespace

size_t Segments::rounded(size_t nbytes) const {
  const size_t divisions = rules_.power2_divisions;
  if (divisions > 1 && nbytes > kBlock * divisions) {
    size_t floor = 1;
    while (floor * 2 <= nbytes) floor *= 2;
    return nbytes == floor ? floor : floor + up(nbytes - floor, floor / divisions);
  }
  return std::max(up(nbytes, kBlock), kBlock);
}

size_t Segments::segment_of(size_t size) const {
  if (size <= kSmall) return kSmallSegment;
  return size < kLarge ? rules_.large_segment : up(size, kRoundLarge);
}

size_t Segments::page_of(bool small) const { return small ? kSmallSegment : rules_.large_segment; }

Segments::Block* Segments::allocate(size_t nbytes, size_t capacity) {
  const size_t size = rounded(nbytes);
  const bool small = size <= kSmall;
  Block* block = best_fit(size, small);
  if (block == nullptr) block = new_block(size, small, capacity);
  if (block == nullptr && release_fitting(size, small)) block = new_block(size, small, capacity);
  if (block == nullptr) {
    empty_cache();
    block = new_block(size, small, capacity);
  }
  if (block == nullptr) return nullptr;
  if (splits(block, size)) pool(small).insert(cut(block, size));
  block->free = false;
  return block;
}

void Segments::release(Block* block) {
  block->free = true;
  block = merged(block);
  pool(block->small).insert(block);
}

void Segments::empty_cache() {
  for (Pool& each : free_) {
    for (Block* block : std::vector<Block*>(each.begin(), each.end())) {
      if (rules_.expandable) {
        unmap(block);
      } else if (block->before == nullptr && block->after == nullptr) {
        drop(block);
      }
    }
  }
}

size_t Segments::inactive_split() const {
  size_t total = 0;
  for (const Pool& each : free_) {
    for (const Block* block : each) {
      const bool split = block->before != nullptr || block->after != nullptr;
      if (split && !rules_.expandable) total += block->size;
    }
  }
  return total;
}

// --- blocks
// ---------------------------------------------------------------------------------------

Segments::Block* Segments::made(uint64_t address, size_t size, bool small, bool is_mapped) {
  auto owner = std::make_unique<Block>(Block{address, size, small, is_mapped});
  Block* block = owner.get();
  blocks_[block] = std::move(owner);
  return block;
}

void Segments::forget(Block* block) {
  if (block->mapped) {
    pool(block->small).erase(block);
  } else {
    unmapped(block->small).erase(block);
  }
}

bool Segments::takes(size_t nbytes, size_t capacity) {
  if (nbytes > capacity || reserved_ > capacity - nbytes) return false;
  reserved_ += nbytes;
  return true;
}

Segments::Block* Segments::best_fit(size_t size, bool small) {
  Pool& blocks = pool(small);
  Block key{0, size, small};
  auto found = blocks.lower_bound(&key);
  if (found == blocks.end()) return nullptr;
  if (rules_.expandable) {
    for (auto next = std::next(found); next != blocks.end() && room_of(*next) < room_of(*found);
         ++next) {
      found = next;
    }
  }
  Block* block = *found;
  if (size < rules_.max_split && block->size >= rules_.max_split) return nullptr;
  if (size >= rules_.max_split && block->size >= size + rules_.max_unsplit_rounding) return nullptr;
  blocks.erase(found);
  return block;
}

bool Segments::splits(const Block* block, size_t size) const {
  const size_t rest = block->size - size;
  if (block->small || rules_.expandable) return rest >= kBlock;
  return size < rules_.max_split && rest > kSmall;
}

// Keeps `size` bytes of the block; returns the rest, in no pool.
Segments::Block* Segments::cut(Block* block, size_t size, bool is_mapped) {
  Block* rest = made(block->address + size, block->size - size, block->small, is_mapped);
  rest->before = block;
  rest->after = block->after;
  if (rest->after != nullptr) rest->after->before = rest;
  block->after = rest;
  block->size = size;
  return rest;
}

// The block, in no pool, with its neighbours that are free as well.
Segments::Block* Segments::merged(Block* block) {
  auto joins = [&](const Block* other) {
    return other != nullptr && other->free && other->mapped == block->mapped;
  };
  if (Block* after = block->after; joins(after)) {
    forget(after);
    block->size += after->size;
    block->after = after->after;
    if (block->after != nullptr) block->after->before = block;
    blocks_.erase(after);
  }
  if (Block* before = block->before; joins(before)) {
    forget(before);
    before->size += block->size;
    before->after = block->after;
    if (before->after != nullptr) before->after->before = before;
    blocks_.erase(block);
    return before;
  }
  return block;
}

// --- segments
// -------------------------------------------------------------------------------------

Segments::Block* Segments::new_block(size_t size, bool small, size_t capacity) {
  if (rules_.expandable) return expanded(size, small, capacity);
  const size_t nbytes = segment_of(size);
  if (!takes(nbytes, capacity)) return nullptr;
  Block* block = made(next_address_, nbytes, small);
  next_address_ += nbytes;
  return block;
}

// Where large blocks are not split: gives back free ones that were too large for the request, until
// there is room for it.
bool Segments::release_fitting(size_t size, bool small) {
  if (rules_.max_split == SIZE_MAX || rules_.expandable) return false;
  const size_t wanted = std::max(size, rules_.max_split);
  Pool& blocks = pool(small);
  Block key{0, wanted, small};
  auto found = blocks.lower_bound(&key);
  if (found != blocks.end()) {
    drop(*found);
    return true;
  }
  size_t freed = 0;
  while (freed < wanted && !blocks.empty() && (*blocks.rbegin())->size >= rules_.max_split) {
    freed += (*blocks.rbegin())->size;
    drop(*blocks.rbegin());
  }
  return freed >= wanted;
}

void Segments::drop(Block* block) {
  pool(block->small).erase(block);
  reserved_ -= block->size;
  blocks_.erase(block);
}

// --- expandable segments
// --------------------------------------------------------------------------

// A free block of `size` bytes or more, in no pool, by pages that are added to a segment.
Segments::Block* Segments::expanded(size_t size, bool small, size_t capacity) {
  Block* block = expandable(size, small);
  Block* found = block;
  if (block->mapped) {
    pool(small).erase(block);
  } else {
    found = map(block, std::min(block->size, size), capacity);
  }
  while (found != nullptr && found->size < size) {
    pool(small).insert(found);
    Block* rest = found->after;
    found = map(rest, std::min(size - found->size, rest->size), capacity);
  }
  return found;
}

// The lowest block without memory, or the free one before it, behind which there are enough
// addresses; at the start of a new range of them where there is none.
Segments::Block* Segments::expandable(size_t size, bool small) {
  for (Block* block : unmapped(small)) {
    Block* start = block->before != nullptr && block->before->free ? block->before : block;
    size_t room = 0;
    for (Block* each = start; each != nullptr && each->free && room < size; each = each->after) {
      room += each->size;
    }
    if (room >= size) return start;
  }
  const size_t page = page_of(small);
  const uint64_t address = up(next_address_, page);
  Block* block = made(address, page << 20, small, /*is_mapped=*/false);
  next_address_ = address + block->size;
  unmapped(small).insert(block);
  return block;
}

// Gives a block pages for `nbytes`; the rest of it stays without. Returns the free block that it is
// now a part of, in no pool, or null where there is no memory.
Segments::Block* Segments::map(Block* block, size_t nbytes, size_t capacity) {
  nbytes = up(nbytes, page_of(block->small));
  if (!takes(nbytes, capacity)) return nullptr;
  unmapped(block->small).erase(block);
  block->mapped = true;
  if (nbytes < block->size) {
    unmapped(block->small).insert(cut(block, nbytes, /*is_mapped=*/false));
  }
  return merged(block);
}

// Takes the whole pages of a free block from it.
void Segments::unmap(Block* block) {
  const size_t page = page_of(block->small);
  const uint64_t begin = up(block->address, page);
  const uint64_t end = (block->address + block->size) / page * page;
  if (begin >= end) return;
  pool(block->small).erase(block);
  if (begin > block->address) {
    Block* rest = cut(block, begin - block->address);
    pool(block->small).insert(block);
    block = rest;
  }
  if (end < block->address + block->size) {
    pool(block->small).insert(cut(block, end - block->address));
  }
  reserved_ -= block->size;
  block->mapped = false;
  block = merged(block);
  unmapped(block->small).insert(block);
}

}  // namespace exkv::sim
