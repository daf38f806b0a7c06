// Ids to rows, numbered by first appearance, a batch at a time: what the sampler does inside, for ids that come piecemeal.
//
// Ids go through in blocks; the table entries of a block are asked for while the block before it is looked up.
#include <vector>

#include "isa.h"
#include "sample_relabel.h"

#define PH_JOIN_ARGS                                                                                                   \
  (void* table, const int64_t* ids, const int64_t* cuts, int64_t num_batches, const int64_t* order, const int64_t* counts, \
   const int64_t* ends, const int64_t* const* lists, const float* const* list_weights, int64_t num_pieces,             \
   int64_t* indptr, int32_t* rows, float* weights, int64_t* out_ids, int64_t* out_cuts, int64_t* edge_cuts, int64_t* where)

PH_DECLARE(int64_t, relabel_start, (void* table, const int64_t* ids, int64_t n, int64_t* where))
PH_DECLARE(int64_t, relabel_add, (void* table, const int64_t* ids, int64_t n, int32_t* rows, int64_t* where))
PH_DECLARE(int64_t, relabel_join, PH_JOIN_ARGS)
PH_DECLARE(void, relabel_find, (void* table, const int64_t* ids, int64_t n, int32_t* rows))

namespace polyhop {
namespace PH_ISA {
namespace {

enum Status : int64_t { kNegative = -1, kTwice = -2, kMemory = -3, kTooMany = -4 };
constexpr int64_t kBlock = 256;  // ids

struct Relabel {
  int64_t count = 0;
  Buffer<int64_t> ids;  // by row
  Buffer<int64_t> batch;  // neighbours of a mini-batch
  HashTable<AnyIds> hash{0};

  void clear() {
    count = 0;
    hash.start(0);
  }
};

int64_t first_negative(const int64_t* ids, int64_t n) {
  int64_t any = 0;
  for (int64_t i = 0; i < n; ++i) any |= ids[i];
  if (any >= 0) return -1;
  int64_t i = 0;
  while (ids[i] >= 0) ++i;
  return i;
}

// Gives each id its row; n, or where it stopped: at the first that has one already (is_fresh), or there are too many.
int64_t give_rows(Relabel& r, const int64_t* ids, int64_t n, int32_t* rows, bool is_fresh) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock), soon = std::min(n, end + kBlock);
    if (r.count + (end - begin) > INT32_MAX) return begin;
    r.ids.reserve(r.count + (end - begin), r.count);
    r.hash.make_room(r.ids.data(), r.count, soon - begin);
    for (int64_t i = begin ? end : 0; i < soon; ++i) r.hash.prefetch(ids[i]);
    int64_t count = r.count;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = r.hash.row(ids[i], count);
      if (row == count) r.ids[count++] = ids[i];
      else if (is_fresh) return i;
      if (rows) rows[i] = int32_t(row);
    }
    r.count = count;
  }
  return n;
}

}  // namespace

// Forgets all rows; distinct ids become rows 0 .. n-1. n, or a Status, with the place in where[0] and no rows.
int64_t relabel_start(void* table, const int64_t* ids, int64_t n, int64_t* where) {
  Relabel& r = *static_cast<Relabel*>(table);
  try {
    r.clear();
    where[0] = first_negative(ids, n);
    if (where[0] >= 0) return kNegative;
    if (n > INT32_MAX) return kTooMany;
    r.ids.reserve(n, 0);
    r.hash.make_room(nullptr, 0, n);
    where[0] = give_rows(r, ids, n, nullptr, true);
    if (where[0] == n) return n;
    r.clear();
    return kTwice;
  } catch (const std::bad_alloc&) {
    r.count = 0;
    return kMemory;
  }
}

// The row of each id; new ones get the next. The number of rows, or a Status: nothing changed where an id is negative;
// otherwise there are no rows any more.
int64_t relabel_add(void* table, const int64_t* ids, int64_t n, int32_t* rows, int64_t* where) {
  Relabel& r = *static_cast<Relabel*>(table);
  where[0] = first_negative(ids, n);
  if (where[0] >= 0) return kNegative;
  try {
    if (give_rows(r, ids, n, rows, false) == n) return r.count;
    r.clear();
    return kTooMany;
  } catch (const std::bad_alloc&) {
    r.count = 0;
    return kMemory;
  }
}

// Lists of several mini-batches' nodes, each mini-batch relabelled by itself: ids[cuts[m] ..] become its rows 0, 1, ..., then
// its neighbours by first appearance. Lists come in pieces: that of ids[order[j]] (order null: j) has counts[j] entries and
// is the next of the piece in which j lies (ends[p - 1] <= j < ends[p]). indptr has one entry more for each mini-batch. 0, or
// a Status with the mini-batch in where[0]; there are no rows afterwards.
int64_t relabel_join PH_JOIN_ARGS {
  struct List {
    const int64_t* neighbours;
    const float* weights;
    int64_t count;
  };
  Relabel& r = *static_cast<Relabel*>(table);
  int64_t status = 0, none = 0;
  try {
    std::vector<List> of(size_t(cuts[num_batches]));
    for (int64_t p = 0, j = 0; p < num_pieces; ++p) {
      const int64_t* at = lists[p];
      for (; j < ends[p]; at += counts[j++])
        of[size_t(order ? order[j] : j)] = {at, list_weights ? list_weights[p] + (at - lists[p]) : nullptr, counts[j]};
    }
    out_cuts[0] = edge_cuts[0] = 0;
    for (int64_t m = 0; m < num_batches && status >= 0; ++m) {
      where[0] = m;
      const int64_t first = cuts[m], n = cuts[m + 1] - first, edges = edge_cuts[m];
      status = relabel_start(table, ids + first, n, &none);
      if (status < 0) break;
      int64_t* const ptr = indptr + first + m;
      ptr[0] = 0;
      for (int64_t i = 0; i < n; ++i) ptr[i + 1] = ptr[i] + of[size_t(first + i)].count;
      r.batch.reserve(ptr[n], 0);
      for (int64_t i = 0; i < n; ++i) {
        const List& list = of[size_t(first + i)];
        std::copy(list.neighbours, list.neighbours + list.count, r.batch.data() + ptr[i]);
        if (weights) std::copy(list.weights, list.weights + list.count, weights + edges + ptr[i]);
      }
      status = relabel_add(table, r.batch.data(), ptr[n], rows + edges, &none);
      if (status < 0) break;
      std::copy(r.ids.data(), r.ids.data() + r.count, out_ids + out_cuts[m]);
      out_cuts[m + 1] = out_cuts[m] + r.count;
      edge_cuts[m + 1] = edges + ptr[n];
    }
    r.clear();
  } catch (const std::bad_alloc&) {
    r.count = 0;
    return kMemory;
  }
  return std::min<int64_t>(status, 0);
}

// The row of each id, -1 where it has none.
void relabel_find(void* table, const int64_t* ids, int64_t n, int32_t* rows) {
  Relabel& r = *static_cast<Relabel*>(table);
  if (!r.count) {  // there may be no table
    std::fill(rows, rows + n, -1);
    return;
  }
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock), soon = std::min(n, end + kBlock);
    for (int64_t i = begin ? end : 0; i < soon; ++i) r.hash.prefetch(ids[i]);
    for (int64_t i = begin; i < end; ++i) rows[i] = int32_t(r.hash.find(ids[i]));
  }
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
using polyhop::base::Relabel;

// A table without rows, or null when there is no memory.
PH_EXPORT void* ph_relabel_new() { return new (std::nothrow) Relabel; }

PH_EXPORT int64_t ph_relabel_free(void* table) {
  delete static_cast<Relabel*>(table);
  return 0;
}

PH_EXPORT int64_t ph_relabel_start(void* table, const int64_t* ids, int64_t n, int64_t* where) {
  return PH_PICK(relabel_start)(table, ids, n, where);
}

PH_EXPORT int64_t ph_relabel_add(void* table, const int64_t* ids, int64_t n, int32_t* rows, int64_t* where) {
  return PH_PICK(relabel_add)(table, ids, n, rows, where);
}

PH_EXPORT int64_t ph_relabel_join PH_JOIN_ARGS {
  return PH_PICK(relabel_join)(table, ids, cuts, num_batches, order, counts, ends, lists, list_weights, num_pieces, indptr,
                               rows, weights, out_ids, out_cuts, edge_cuts, where);
}

PH_EXPORT int64_t ph_relabel_find(void* table, const int64_t* ids, int64_t n, int32_t* rows) {
  PH_PICK(relabel_find)(table, ids, n, rows);
  return 0;
}

// Copies the ids of all rows.
PH_EXPORT int64_t ph_relabel_ids(void* table, int64_t* ids) {
  Relabel& r = *static_cast<Relabel*>(table);
  if (r.count) std::memcpy(ids, r.ids.data(), size_t(r.count) * 8);
  return 0;
}
#endif
