// Memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace exkv {

// Memory of one thread for its calls to come, aligned to 64 bytes, without contents to keep.
class Scratch {
 public:
  float* Get(int64_t floats) {
    if (floats > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<float*>(
          ::operator new(static_cast<size_t>(floats) * sizeof(float), kAlignment)));
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<float, Delete> memory_;
  int64_t size_ = 0;
};

}  // namespace exkv
