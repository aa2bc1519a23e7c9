// Runs a grid on the host: each thread of a block is a fiber, which is switched where the thread would wait for others.
//
// Threads run in turn. With XLA_ATTENTION_EMULATOR_SEED some warps, chosen anew for each block, run only once in 16
// turns, each lane by itself: a kernel must not rely on a warp's seeing every phase of an mbarrier.
//
// A block of a cluster runs until all of its threads wait, perhaps for the other blocks, or have ended. Then the next
// one runs, and its shared memory takes the place of the other's.
#include "device.h"

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;
extern "C" {
alignas(1024) uint8_t shared[256 * 1024];
void emulator_switch(void** save, void* to);
void XA_ENTRY(const void* parameter);
}

// Saves the callee-saved registers and the stack pointer in *save, and resumes the fiber that was saved in `to` (x86-64
// System V).
asm(R"(
.text
.globl emulator_switch
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace emulator {

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "emulator: %s (block %u, thread %u)\n", why, blockIdx.x, threadIdx.x);
  std::abort();
}

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kSavedRegisters = 6;

struct Copy {
  uint32_t destination;
  const void* source;
  int bytes;
  int copied;
};

struct Fiber {
  void* stack_pointer = nullptr;
  bool done = false;
  unsigned cluster_rounds = 0;  // of the cluster's barrier at which it has arrived
  std::deque<std::vector<Copy>> committed;
  std::vector<Copy> open;
  std::deque<std::function<void()>> bulk_stores;
};

struct Warp {
  void* lanes[kWarp];
  int arrived = 0;
  unsigned round = 0;
};

struct Barrier {
  int arrived = 0;
  bool all = true;
  bool result = true;
  unsigned round = 0;
};

struct Mbarrier {
  uint32_t arrivals;          // per phase
  int64_t pending_arrivals;   // of the current phase
  int64_t pending_bytes = 0;  // of the current phase
  unsigned phase = 0;
};

/// The state of a block.
struct Block {
  std::vector<uint8_t*> stacks;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier block_barrier;
  std::map<int, Barrier> named_barriers;
  std::map<uint32_t, Mbarrier> mbarriers;
  int current, alive;
  int waiting;         // threads that wait for the cluster
  int checks_in_vain;  // how many of them, one after the other, have found that they still wait
  uint32_t slow_warps;
};

/// The cluster's barrier. A thread counts once in each round, by its arrival or its end.
struct ClusterBarrier {
  int arrived = 0;
  int ended = 0;
  unsigned round = 0;
};

std::vector<Block> cluster;
std::vector<std::vector<uint8_t>> shared_memories;  // of the blocks of the cluster that do not run
Block* block;                                       // the one that runs
ClusterBarrier cluster_barrier;
uint64_t completed_steps;  // barriers, phases of mbarriers and collective operations
void* main_stack_pointer;
const void* parameter;
std::mt19937 random_bits;
int64_t switches_without_progress = 0;

void note_progress() {
  ++completed_steps;
  switches_without_progress = 0;
}

/// The next fiber that has not ended, rarely one of a slow warp; the current one if there is no other.
int next_fiber() {
  const std::vector<Fiber>& fibers = block->fibers;
  const int count = static_cast<int>(fibers.size()), current = block->current;
  int next = current;
  for (int passed = 1; passed < 2 * count; ++passed) {
    if (++next == count) next = 0;
    if (fibers[next].done || next == current) continue;
    if (passed < count && (block->slow_warps >> next / kWarp & 1) != 0 && random_bits() % 16 != 0) continue;
    return next;
  }
  return current;
}

void switch_to(int next, void** save) {
  block->current = next;
  threadIdx.x = static_cast<unsigned>(next);
  emulator_switch(save, block->fibers[next].stack_pointer);
}

void switch_thread() {
  const int me = block->current, next = next_fiber();
  const int64_t threads = static_cast<int64_t>(block->fibers.size());
  ++switches_without_progress;
  if (cluster.size() > 1 && (next == me || switches_without_progress > 64 * threads)) {
    // Perhaps for another block of the cluster.
    emulator_switch(&block->fibers[me].stack_pointer, main_stack_pointer);
    return;
  }
  if (next == me) fail("a thread waits for threads that have ended");
  if (switches_without_progress > 4096 * threads) fail("all threads wait");
  switch_to(next, &block->fibers[me].stack_pointer);
}

void end_cluster_round_if_complete() {
  const int threads = static_cast<int>(cluster.size() * blockDim.x);
  if (cluster_barrier.arrived + cluster_barrier.ended < threads) return;
  cluster_barrier.arrived = 0;
  ++cluster_barrier.round;
}

void perform(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    std::memset(shared + copy.destination, 0, copy.bytes);
    std::memcpy(shared + copy.destination, copy.source, copy.copied);
  }
}

void thread() {
  XA_ENTRY(parameter);
  Fiber& me = block->fibers[block->current];
  for (const auto& group : me.committed) perform(group);
  me.committed.clear();
  if (!me.bulk_stores.empty()) fail("a thread ends before its bulk copies have read shared memory");
  me.done = true;
  if (me.cluster_rounds > cluster_barrier.round) --cluster_barrier.arrived;
  ++cluster_barrier.ended;
  end_cluster_round_if_complete();
  void* nowhere;
  if (--block->alive == 0) emulator_switch(&nowhere, main_stack_pointer);
  switch_to(next_fiber(), &nowhere);
}

void start_block(Block& started) {
  const int threads = static_cast<int>(blockDim.x);
  started.fibers.assign(threads, Fiber{});
  started.warps.assign((threads + kWarp - 1) / kWarp, Warp{});
  started.block_barrier = Barrier{};
  started.named_barriers.clear();
  started.mbarriers.clear();
  started.alive = threads;
  started.current = started.waiting = started.checks_in_vain = 0;
  started.slow_warps =
      std::getenv("XLA_ATTENTION_EMULATOR_SEED") != nullptr ? random_bits() & random_bits() : uint32_t{0};
  while (started.stacks.size() < blockDim.x) {
    started.stacks.push_back(static_cast<uint8_t*>(std::aligned_alloc(64, kStackBytes)));
  }
  for (int i = 0; i < threads; ++i) {
    void** top = reinterpret_cast<void**>(started.stacks[i] + kStackBytes - 64);
    *--top = nullptr;  // where `thread` would return to
    *--top = reinterpret_cast<void*>(thread);
    for (int j = 0; j < kSavedRegisters; ++j) *--top = nullptr;
    started.fibers[i].stack_pointer = top;
  }
}

/// Runs the cluster whose first block is `blockIdx`; its blocks are adjacent along y.
void run_cluster() {
  const unsigned first = blockIdx.y;
  cluster_barrier = ClusterBarrier{};
  for (Block& each : cluster) start_block(each);
  int rounds_without_progress = 0;
  // All bits set are a NaN, which a kernel gets that reads shared memory before writing it.
  for (auto& memory : shared_memories) memory.assign(sizeof(shared), 0xff);
  for (size_t ended = 0; ended < cluster.size();) {
    const unsigned round = cluster_barrier.round;
    const uint64_t steps = completed_steps;
    const size_t ended_before = ended;
    for (size_t rank = 0; rank < cluster.size(); ++rank) {
      block = &cluster[rank];
      if (block->alive == 0) continue;
      blockIdx.y = first + static_cast<unsigned>(rank);
      std::memcpy(shared, shared_memories[rank].data(), sizeof(shared));
      switches_without_progress = 0;
      switch_to(block->current, &main_stack_pointer);
      std::memcpy(shared_memories[rank].data(), shared, sizeof(shared));
      ended += block->alive == 0;
    }
    const bool has_progress = ended != ended_before || round != cluster_barrier.round || steps != completed_steps;
    rounds_without_progress = has_progress ? 0 : rounds_without_progress + 1;
    // A slow warp may not have run in some of them.
    if (rounds_without_progress == 16) fail("all blocks wait for the cluster");
  }
  blockIdx.y = first;
}

}  // namespace

void warp_collective(void (*operation)(void* const*), void* mine) {
  Warp& warp = block->warps[block->current / kWarp];
  warp.lanes[block->current % kWarp] = mine;
  if (++warp.arrived == kWarp) {
    operation(warp.lanes);
    warp.arrived = 0;
    ++warp.round;
    note_progress();
    return;
  }
  const unsigned round = warp.round;
  while (warp.round == round) switch_thread();
}

namespace {
/// Registers the arrival of a thread; returns whether it was the last of `threads`.
bool arrive_at(Barrier& barrier, int threads, bool mine) {
  barrier.all = (barrier.arrived == 0 || barrier.all) && mine;
  if (++barrier.arrived < threads) return false;
  barrier.arrived = 0;
  barrier.result = barrier.all;
  ++barrier.round;
  note_progress();
  return true;
}
/// Waits for `threads` threads; returns whether `mine` was true for all of them.
bool wait_at(Barrier& barrier, int threads, bool mine) {
  const unsigned round = barrier.round;
  if (!arrive_at(barrier, threads, mine)) {
    while (barrier.round == round) switch_thread();
  }
  return barrier.result;
}
}  // namespace

bool barrier_and(bool mine) { return wait_at(block->block_barrier, static_cast<int>(block->fibers.size()), mine); }

void yield_thread() {
  if (next_fiber() != block->current) switch_thread();
}

void cluster_arrive() {
  ++block->fibers[block->current].cluster_rounds;
  ++cluster_barrier.arrived;
  end_cluster_round_if_complete();
}
namespace {
/// Waits until `is_over`, which other blocks of the cluster bring about.
template <typename IsOver>
void wait_for_cluster(const IsOver& is_over) {
  if (is_over()) return;
  ++block->waiting;
  while (!is_over()) {
    // Others may wait for an earlier round, which is over.
    if (block->waiting == block->alive && ++block->checks_in_vain >= block->alive) {
      block->checks_in_vain = 0;
      emulator_switch(&block->fibers[block->current].stack_pointer, main_stack_pointer);
    } else {
      switch_thread();
    }
  }
  --block->waiting;
  block->checks_in_vain = 0;
}
}  // namespace

void cluster_wait() {
  const Fiber& me = block->fibers[block->current];
  wait_for_cluster([&] { return me.cluster_rounds <= cluster_barrier.round; });
}
uint8_t* shared_of_rank(uint32_t rank) {
  if (rank >= cluster.size()) fail("an access outside of the cluster");
  if (cluster_barrier.round == 0) fail("an access to a block that may not have started");
  if (cluster[rank].alive == 0) fail("an access to a block that has ended");
  return &cluster[rank] == block ? shared : shared_memories[rank].data();
}
void store_cluster(uint32_t address, uint32_t rank, const void* from, int bytes) {
  if (address + bytes > sizeof(shared)) fail("a store outside of the cluster");
  std::memcpy(shared_of_rank(rank) + address, from, bytes);
}

bool barrier(int number, int threads, bool mine) { return wait_at(block->named_barriers[number], threads, mine); }
void barrier_arrive(int number, int threads) { arrive_at(block->named_barriers[number], threads, true); }

/// The bytes of an mbarrier in shared memory. On a GPU they are its state; here they detect that something overwrites
/// it.
constexpr uint64_t kMbarrierBytes = 0x7fff'f800'001f'fffe;

void mbarrier_init(uint32_t address, uint32_t arrivals) {
  if (address % 8 != 0) fail("a misaligned mbarrier");
  block->mbarriers[address] = Mbarrier{arrivals, arrivals};
  std::memcpy(shared + address, &kMbarrierBytes, sizeof(kMbarrierBytes));
}

namespace {
Mbarrier& mbarrier(uint32_t address) {
  const auto found = block->mbarriers.find(address);
  if (found == block->mbarriers.end()) fail("an mbarrier that was not initialized");
  if (std::memcmp(shared + address, &kMbarrierBytes, sizeof(kMbarrierBytes)) != 0) {
    fail("an mbarrier was overwritten");
  }
  return found->second;
}
void end_if_complete(Mbarrier& barrier) {
  if (barrier.pending_arrivals < 0) fail("too many arrivals at an mbarrier");
  if (barrier.pending_arrivals > 0 || barrier.pending_bytes != 0) return;
  barrier.pending_arrivals = barrier.arrivals;
  ++barrier.phase;
  note_progress();
}
}  // namespace

void mbarrier_inval(uint32_t address) {
  mbarrier(address);
  block->mbarriers.erase(address);
}

void mbarrier_arrive(uint32_t address, uint32_t expected_bytes) {
  Mbarrier& barrier = mbarrier(address);
  barrier.pending_bytes += expected_bytes;
  --barrier.pending_arrivals;
  end_if_complete(barrier);
}
void mbarrier_complete_tx(uint32_t address, uint32_t bytes) {
  Mbarrier& barrier = mbarrier(address);
  barrier.pending_bytes -= bytes;
  end_if_complete(barrier);
}
void mbarrier_wait(uint32_t address, uint32_t parity) {
  const Mbarrier& barrier = mbarrier(address);
  while ((barrier.phase & 1) == parity) switch_thread();
}

void mbarrier_wait_in_cluster(uint32_t address, uint32_t parity) {
  const Mbarrier& barrier = mbarrier(address);
  wait_for_cluster([&] { return (barrier.phase & 1) != parity; });
}
namespace {
Mbarrier& mbarrier_of_rank(uint32_t address, uint32_t rank) {
  shared_of_rank(rank);
  const auto found = cluster[rank].mbarriers.find(address);
  if (found == cluster[rank].mbarriers.end()) fail("an mbarrier of another block that was not initialized");
  return found->second;
}
}  // namespace
void mbarrier_arrive_at_rank(uint32_t address, uint32_t rank) {
  Mbarrier& barrier = mbarrier_of_rank(address, rank);
  --barrier.pending_arrivals;
  end_if_complete(barrier);
}
void mbarrier_complete_tx_at_rank(uint32_t address, uint32_t rank, uint32_t bytes) {
  Mbarrier& barrier = mbarrier_of_rank(address, rank);
  barrier.pending_bytes -= bytes;
  end_if_complete(barrier);
}
void store_cluster_async(uint32_t address, uint32_t rank, const void* from, int bytes, uint32_t barrier) {
  store_cluster(address, rank, from, bytes);
  mbarrier_complete_tx_at_rank(barrier, rank, bytes);
}

void cp_async(uint32_t destination, const void* source, int bytes, int copied) {
  if (destination % bytes != 0 || reinterpret_cast<uintptr_t>(source) % bytes != 0) fail("a misaligned cp.async");
  // NaN until `cp_async_wait`, so that reading the destination too early is noticed.
  std::memset(shared + destination, 0xff, bytes);
  block->fibers[block->current].open.push_back({destination, source, bytes, copied});
}

void cp_async_commit() {
  Fiber& me = block->fibers[block->current];
  me.committed.push_back(std::move(me.open));
  me.open.clear();
}

void cp_async_wait(int pending) {
  auto& groups = block->fibers[block->current].committed;
  while (static_cast<int>(groups.size()) > pending) {
    perform(groups.front());
    groups.pop_front();
  }
}

void bulk_store(std::function<void()> copy) { block->fibers[block->current].bulk_stores.push_back(std::move(copy)); }

void bulk_wait_group(size_t pending) {
  auto& stores = block->fibers[block->current].bulk_stores;
  for (; stores.size() > pending; stores.pop_front()) stores.front()();
}

}  // namespace emulator

/// Runs the kernel of this library in clusters of `cluster_y` blocks along y.
extern "C" __attribute__((visibility("default"))) void xa_emulate(unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                                                  unsigned cluster_y, unsigned threads,
                                                                  const void* kernel_parameter) {
  using namespace emulator;
  parameter = kernel_parameter;
  if (const char* seed = std::getenv("XLA_ATTENTION_EMULATOR_SEED")) random_bits.seed(std::atoi(seed));
  gridDim = {grid_x, grid_y, grid_z};
  blockDim = {threads, 1, 1};
  cluster.resize(cluster_y);
  shared_memories.resize(cluster_y);
  for (blockIdx.z = 0; blockIdx.z < grid_z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y += cluster_y) {
      for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) run_cluster();
    }
  }
}
