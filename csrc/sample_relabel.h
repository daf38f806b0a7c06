// Global node ids to local rows, numbered by first appearance; two tables with the same answers.
//
// Both forget a whole batch without touching memory: entries carry a mark that only the current batch's entries match.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace polyhop {
namespace PH_ISA {
namespace {  // nothing here is shared with other files or other instruction sets

// Grow-only array that does not initialise what it holds; a large one asks for huge pages.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // Room for n items; the first `keep` survive.
  void reserve(int64_t n, int64_t keep) {
    if (n <= room_) return;
    const int64_t room = n + n / 2;
    T* fresh = allocate(room);
    if (keep > 0) std::memcpy(static_cast<void*>(fresh), data_, size_t(keep) * sizeof(T));
    std::free(data_);
    data_ = fresh;
    room_ = room;
  }
  void assign_zero(int64_t n) {
    if (n > room_) {
      std::free(data_);
      data_ = nullptr, room_ = 0;
      data_ = allocate(n), room_ = n;
    }
    std::memset(static_cast<void*>(data_), 0, size_t(n) * sizeof(T));
  }
  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  static constexpr size_t kHuge = size_t(1) << 21;

  static T* allocate(int64_t n) {
    const size_t bytes = size_t(n) * sizeof(T), step = bytes >= 2 * kHuge ? kHuge : 64;
    const size_t whole = (bytes + step - 1) / step * step;
    void* fresh = std::aligned_alloc(step, whole ? whole : step);
    if (!fresh) throw std::bad_alloc();
    if (step == kHuge) madvise(fresh, whole, MADV_HUGEPAGE);
    return static_cast<T*>(fresh);
  }

  T* data_ = nullptr;
  int64_t room_ = 0;
};

// One 4-byte mark per node of the graph: base + local row. `base` moves past the last batch's marks: none is cleared.
class DenseTable {
 public:
  DenseTable(int64_t num_nodes, uint32_t first_base) : num_nodes_(num_nodes), base_(first_base ? first_base : 1) {}

  void start(int64_t last_count) {
    base_ += uint64_t(last_count);
    const bool is_spent = base_ + uint64_t(num_nodes_) > 0xFFFFFFFFu;
    if (is_spent) base_ = 1;
    if (is_spent || is_new_) marks_.assign_zero(num_nodes_);
    is_new_ = false;
  }
  void make_room(const int64_t*, int64_t, int64_t) {}
  void prefetch(int64_t id) { __builtin_prefetch(&marks_[id], 1, 3); }

  // The row of `id`; `count` if it is new, which then holds it.
  int64_t row(int64_t id, int64_t count) {
    uint32_t& mark = marks_[id];
    const uint32_t base = uint32_t(base_), known = mark - base;
    const uint32_t row = known < uint32_t(count) ? known : uint32_t(count);
    mark = base + row;
    return row;
  }

 private:
  int64_t num_nodes_;
  uint64_t base_;
  bool is_new_ = true;
  Buffer<uint32_t> marks_;
};

// Where ids hash to. Those of one graph, 0 .. n-1, spread evenly with few collisions by one product.
struct NodeIds {
  static uint64_t mix(uint64_t id) { return id * 0x9E3779B97F4A7C15u; }
};
// Any others too: ids that differ in high bits only (a rank, say) lie apart.
struct AnyIds {
  static uint64_t mix(uint64_t id) { return NodeIds::mix(id + (id >> 32) * 0xD6E8FEB86659FD93u); }
};

// Open addressing with linear probing, at most half full: memory follows the batch, not the graph.
template <class Ids>
class HashTable {
 public:
  explicit HashTable(uint32_t first_batch) : batch_(first_batch ? first_batch : 1) {}

  void start(int64_t) {
    const bool is_spent = ++batch_ == 0;
    if (is_spent) batch_ = 1;
    if (is_spent || !capacity_) clear(std::max(capacity_, kFewest));
  }
  // Room for `more` new ids beside the `count` that are in.
  void make_room(const int64_t* ids, int64_t count, int64_t more) {
    if ((count + more) * 2 <= capacity_) return;
    int64_t capacity = std::max(capacity_, kFewest);
    while ((count + more) * 2 > capacity) capacity *= 2;
    clear(capacity);
    for (int64_t i = 0; i < count; ++i) row(ids[i], i);
  }
  void prefetch(int64_t id) { __builtin_prefetch(&slots_[home(id)], 1, 3); }

  // The row of `id`; `count` if it is new, which then holds it.
  int64_t row(int64_t id, int64_t count) {
    for (int64_t s = home(id);; s = (s + 1) & (capacity_ - 1)) {
      Slot& slot = slots_[s];
      if (slot.batch != batch_) {
        slot = {id, batch_, uint32_t(count)};
        return count;
      }
      if (slot.id == id) return slot.row;
    }
  }

  // The row of `id`, -1 if it has none.
  int64_t find(int64_t id) {
    for (int64_t s = home(id);; s = (s + 1) & (capacity_ - 1)) {
      const Slot& slot = slots_[s];
      if (slot.batch != batch_) return -1;
      if (slot.id == id) return slot.row;
    }
  }

 private:
  static constexpr int64_t kFewest = 1024;
  struct Slot {
    int64_t id;
    uint32_t batch, row;  // batch 0: of none
  };

  void clear(int64_t capacity) {
    capacity_ = 0;  // until there is memory
    slots_.assign_zero(capacity);
    capacity_ = capacity;
  }

  int64_t home(int64_t id) const { return int64_t(Ids::mix(uint64_t(id)) >> 20) & (capacity_ - 1); }

  int64_t capacity_ = 0;
  uint32_t batch_;
  Buffer<Slot> slots_;
};

}  // namespace
}  // namespace PH_ISA
}  // namespace polyhop
