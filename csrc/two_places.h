// Rows of a matrix that goes on in a second one: row r is in the first if r < num_first, else it is row r - num_first of the
// second.
#pragma once
#include <cstdint>

namespace polyhop {
namespace PH_ISA {

template <class T>
class TwoPlaces {
 public:
  TwoPlaces(const T* first, int64_t num_first, const T* second, int64_t width)
      : num_first_(num_first),
        row_bytes_(uintptr_t(width) * sizeof(T)),
        first_(uintptr_t(first)),
        gap_(uintptr_t(second) - first_ - uintptr_t(num_first) * row_bytes_) {}

  // Without a branch: which of the two it is follows no pattern, and a guess gone wrong costs as much as adding up a row.
  const T* row(int64_t r) const {
    const uintptr_t is_second = uintptr_t(0) - uintptr_t(r >= num_first_);
    return reinterpret_cast<const T*>(first_ + uintptr_t(r) * row_bytes_ + (gap_ & is_second));
  }

 private:
  int64_t num_first_;
  uintptr_t row_bytes_, first_, gap_;  // gap: from where the first would go on to where the second begins
};

}  // namespace PH_ISA
}  // namespace polyhop
