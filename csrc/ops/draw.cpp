// The in-edges that given rows draw, as positions among all edges: one hop of sampling where relabelling is another's work.
//
// A row is drawn under the id it is given, not under its number, so a part of a graph draws as the whole graph does. A
// range of rows runs in blocks, three stages deep, so that random reads were asked for a block earlier: (1) ask for the
// rows of indptr and ids, (2) read them and ask for the lists (LABOR), (3) draw.
#include <atomic>
#include <new>

#include "isa.h"
#include "pool.h"
#include "ranges.h"
#include "sample_choose.h"

#define PH_ENDS_ARGS                                                                                        \
  (const int64_t* indptr, int64_t num_rows, const int64_t* rows, int64_t n, int64_t fanout, int64_t* ends, \
   int64_t threads)
#define PH_DRAW_ARGS                                                                                                   \
  (const int64_t* indptr, const void* indices, int64_t wide, int64_t num_edges, const int64_t* rows,                   \
   const int64_t* ends, int64_t fanout, const polyhop::Variates* keys, const int64_t* cuts, int64_t num_keys, int64_t method, \
   const int64_t* ids, const int64_t* source_ids, int64_t* position, int64_t threads)

PH_DECLARE(int64_t, draw_ends, PH_ENDS_ARGS)
PH_DECLARE(int64_t, draw, PH_DRAW_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kNoMemory = -1;
constexpr int64_t kGrain = 1 << 13;  // drawn edges and rows

struct DrawRequest {
  const int64_t *indptr, *rows, *ends, *ids;
  int64_t fanout;
  Variates key;
  int64_t method;
  int64_t* position;
};

template <class Sources>
class Draw {
 public:
  Draw(const DrawRequest& request, const Sources& sources)
      : r_(request), chooser_(scratch_, sources, request.fanout, request.key, request.method) {}

  void run(int64_t first, int64_t last) {
    const int64_t blocks = (last - first + kMostRows - 1) / kMostRows;
    for (int64_t b = 0; b < blocks + 2; ++b) {
      const auto begin = [&](int64_t block) { return first + block * kMostRows; };
      const auto end = [&](int64_t block) { return std::min(last, begin(block) + kMostRows); };
      if (b < blocks) ask_rows(begin(b), end(b));
      if (b >= 1 && b - 1 < blocks) read_rows(begin(b - 1), end(b - 1), flights_[(b - 1) % 2]);
      if (b >= 2) chooser_.choose(flights_[b % 2], end(b - 2) - begin(b - 2), r_.position);
    }
  }

 private:
  void ask_rows(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      __builtin_prefetch(&r_.indptr[r_.rows[i]], 0, 3);
      __builtin_prefetch(&r_.ids[r_.rows[i]], 0, 3);
    }
  }

  void read_rows(int64_t begin, int64_t end, Row* flight) const {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = r_.rows[i], list = r_.indptr[row];
      flight[i - begin] = {r_.ids[row], list, r_.indptr[row + 1] - list, r_.ends[i]};
      chooser_.ask(flight[i - begin]);
    }
  }

  const DrawRequest& r_;
  Scratch scratch_;
  Chooser<Sources> chooser_;
  Row flights_[2][kMostRows];
};

template <class Sources>
int64_t draw_all(const DrawRequest& request, const Sources& sources, int64_t n, int threads) {
  std::atomic<bool> has_memory{true};
  for_rows(request.ends, n, kGrain, threads, [&](int64_t first, int64_t last) {
    try {
      Draw<Sources>(request, sources).run(first, last);
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
  });
  return has_memory ? 0 : kNoMemory;
}

template <class Index>
int64_t draw_from(const DrawRequest& request, const Index* indices, int64_t num_edges, const int64_t* source_ids, int64_t n,
                  int threads) {
  if (source_ids) return draw_all(request, TableIds<Index>{indices, num_edges, source_ids}, n, threads);
  return draw_all(request, OwnIds<Index>{indices}, n, threads);
}

}  // namespace

// ends[i]: how many edges the rows before i draw. The position of the first row outside the graph, or -1.
int64_t draw_ends PH_ENDS_ARGS {
  constexpr int64_t kAhead = 24;
  std::atomic<int64_t> bad{n};
  parallel_for(n, 1 << 14, int(threads), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end && uint64_t(rows[i + kAhead]) < uint64_t(num_rows))
        __builtin_prefetch(&indptr[rows[i + kAhead]], 0, 3);
      if (uint64_t(rows[i]) >= uint64_t(num_rows)) {
        int64_t known = bad.load();
        while (i < known && !bad.compare_exchange_weak(known, i)) {
        }
        return;
      }
      const int64_t degree = indptr[rows[i] + 1] - indptr[rows[i]];
      ends[i + 1] = fanout < 0 ? degree : std::min(degree, fanout);
    }
  });
  if (bad.load() < n) return bad.load();
  ends[0] = 0;
  for (int64_t i = 0; i < n; ++i) ends[i + 1] += ends[i];
  return -1;
}

int64_t draw PH_DRAW_ARGS {
  for (int64_t m = 0; m < num_keys; ++m) {
    const int64_t first = cuts[m], n = cuts[m + 1] - first;
    const DrawRequest request{indptr, rows + first, ends + first, ids, fanout, keys[m], method, position};
    const int64_t status =
        wide ? draw_from(request, static_cast<const int64_t*>(indices), num_edges, source_ids, n, int(threads))
             : draw_from(request, static_cast<const int32_t*>(indices), num_edges, source_ids, n, int(threads));
    if (status < 0) return status;
  }
  return 0;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_draw_ends PH_ENDS_ARGS {
  return PH_PICK(draw_ends)(indptr, num_rows, rows, n, fanout, ends, threads);
}

// position[ends[i] .. ends[i + 1]]: what rows[i] draws, rows cuts[m] .. cuts[m + 1] - 1 under keys[m]. source_ids may be null.
// 0, or -1 when there is no memory.
PH_EXPORT int64_t ph_draw_rows PH_DRAW_ARGS {
  return PH_PICK(draw)(indptr, indices, wide, num_edges, rows, ends, fanout, keys, cuts, num_keys, method, ids, source_ids,
                       position, threads);
}
#endif
