// Row ranges of equal work: cut by edges plus rows, so that neither hubs nor empty rows leave a thread behind.
#pragma once
#include <algorithm>
#include <cstdint>

#include "pool.h"

namespace polyhop {

// Runs body(first, last) over the rows of a CSR structure in ranges of about `grain` edges and rows. A row is never
// split. The cut depends on the structure and the grain only.
template <class Body>
void for_rows(const int64_t* indptr, int64_t rows, int64_t grain, int threads, const Body& body) {
  if (rows <= 0) return;
  const auto first_row = [&](int64_t cost) {  // the first row r with indptr[r] + r >= cost
    int64_t low = 0, high = rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (indptr[middle] + middle < cost) low = middle + 1; else high = middle;
    }
    return low;
  };
  parallel_for(indptr[rows] + rows, grain, threads, [&](int64_t begin, int64_t end) {
    const int64_t first = first_row(begin), last = first_row(end);
    if (first < last) body(first, last);
  });
}

}  // namespace polyhop
