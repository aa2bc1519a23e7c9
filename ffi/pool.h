// XLA's intra-op thread pool as the bridge sees it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "rust/cxx.h"
#include "xla/ffi/api/ffi.h"

namespace xa {

class XlaPool {
 public:
  explicit XlaPool(xla::ffi::ThreadPool pool) : pool_(pool) {}
  int64_t num_threads() const noexcept { return pool_.num_threads(); }
  void schedule(rust::Fn<void(std::size_t)> task, std::size_t argument) const {
    // Scheduling does not change the pool that a handler borrows; the header lacks the const.
    const_cast<xla::ffi::ThreadPool&>(pool_).Schedule([task, argument] { task(argument); });
  }

 private:
  xla::ffi::ThreadPool pool_;
};

}  // namespace xa
