// A graph that nobody stores: degrees, in-neighbours and feature rows are computed when they are asked for.
//
// Each is a pure function of (a key, the node's id):
//
//   degree of v       table[first 12 bits of philox(degree_key, v)]
//   neighbour i of v  word 0 of philox(edge_key, v, i) says of which kind, words 1 and 2 which: a popular node (rank H u^2 of
//                     H, its id in philox(hot_key, rank)), a node of v's class, or any node. Never v itself
//   row of v          unit noise, the sum of four uniform bytes of philox(row_key, v, column / 4), plus the centre of v's class
//
// The class of v is v mod C. Which neighbours are drawn is decided by sample_choose.h, as for stored lists.
#include <atomic>
#include <new>
#include <vector>

#include "isa.h"
#include "philox_many.h"
#include "pool.h"
#include "ranges.h"
#include "sample_choose.h"

#ifndef PH_PROCEDURAL_FACTS
#define PH_PROCEDURAL_FACTS
namespace polyhop {

// Mirrors Virtual.facts in kernels/procedural.py.
struct VirtualFacts {
  int64_t num_nodes, num_classes, num_hot;
  int64_t hot_cut, class_cut;  // of 2^32: a first word below the one is a popular node, below the other one of the class
  uint64_t degree_key, edge_key, hot_key;
};

}  // namespace polyhop
#endif

#define PH_DEGREES_ARGS \
  (const polyhop::VirtualFacts* facts, const int32_t* table, const int64_t* ids, int64_t n, int32_t* out, int64_t threads)
#define PH_DRAW_ARGS                                                                                                  \
  (const polyhop::VirtualFacts* facts, const int64_t* ids, const int32_t* degrees, const int64_t* ends, int64_t n,    \
   int64_t fanout, const polyhop::Variates* key, int64_t method, int64_t* out, int64_t threads)
#define PH_ROWS_ARGS                                                                                              \
  (uint64_t key, const int64_t* ids, int64_t n, int64_t width, int64_t num_classes, const float* centres, float* out, \
   int64_t threads)

PH_DECLARE(int64_t, procedural_degrees, PH_DEGREES_ARGS)
PH_DECLARE(int64_t, procedural_draw, PH_DRAW_ARGS)
PH_DECLARE(int64_t, procedural_rows, PH_ROWS_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kNoMemory = -1;
constexpr int64_t kGrain = 1 << 13;  // drawn edges and rows
constexpr int kBatch = 64;           // counters hashed at once

// Neighbours by (node, position in its list), hashed some at a time: out[k] is read as a position and becomes an id.
class Neighbours {
 public:
  explicit Neighbours(const VirtualFacts& facts) : g_(facts) {}

  void add(int64_t id, int64_t* out) {
    ids_[count_] = uint64_t(id);
    positions_[count_] = uint64_t(*out);
    outs_[count_++] = out;
    if (count_ == kBatch) flush();
  }

  void flush() {
    uint32_t words[4 * kBatch];
    philox_many(g_.edge_key, ids_, positions_, count_, words);
    int num_hot = 0;
    for (int k = 0; k < count_; ++k) {
      const uint32_t* w = words + 4 * k;
      if (w[0] < g_.hot_cut) {
        ranks_[num_hot] = (uint64_t(w[1]) * w[1] >> 32) * uint64_t(g_.num_hot) >> 32;
        hot_[num_hot++] = k;
        continue;
      }
      int64_t found;
      if (w[0] < g_.class_cut) {
        const int64_t c = int64_t(ids_[k]) % g_.num_classes;
        found = c + g_.num_classes * (number(w + 1) % ((g_.num_nodes - c + g_.num_classes - 1) / g_.num_classes));
      } else {
        found = number(w + 1) % g_.num_nodes;
      }
      *outs_[k] = other_than(int64_t(ids_[k]), found);
    }
    philox_many(g_.hot_key, ranks_, zeros_, num_hot, words);
    for (int h = 0; h < num_hot; ++h)
      *outs_[hot_[h]] = other_than(int64_t(ids_[hot_[h]]), number(words + 4 * h) % g_.num_nodes);
    count_ = 0;
  }

 private:
  static int64_t number(const uint32_t* w) { return int64_t(uint64_t(w[0]) << 31 | w[1] >> 1); }  // of 63 bits

  int64_t other_than(int64_t id, int64_t found) const {
    if (found != id) return found;
    return id + 1 == g_.num_nodes ? 0 : id + 1;
  }

  const VirtualFacts& g_;
  uint64_t ids_[kBatch], positions_[kBatch], ranks_[kBatch], zeros_[kBatch] = {};
  int64_t* outs_[kBatch];
  int hot_[kBatch], count_ = 0;
};

struct VirtualDraw {
  const VirtualFacts& facts;
  const int64_t* ids;
  const int32_t* degrees;
  const int64_t* ends;
  int64_t fanout;
  Variates key;
  int64_t* out;

  bool takes_all(int64_t i) const { return fanout < 0 || degrees[i] <= fanout; }

  void uniform(int64_t first, int64_t last) const {
    Scratch scratch;
    Chooser<OwnIds<int64_t>> chooser(scratch, OwnIds<int64_t>{nullptr}, fanout, key, kUniform);
    Neighbours neighbours(facts);
    Row rows[kMostRows];
    for (int64_t begin = first; begin < last; begin += kMostRows) {
      const int64_t count = std::min(kMostRows, last - begin);
      for (int64_t i = 0; i < count; ++i) rows[i] = {ids[begin + i], 0, degrees[begin + i], ends[begin + i]};
      chooser.choose(rows, count, out);
      for (int64_t i = begin; i < begin + count; ++i)
        for (int64_t e = ends[i]; e < ends[i + 1]; ++e) neighbours.add(ids[i], out + e);
    }
    neighbours.flush();
  }

  void labor(int64_t first, int64_t last) const {
    Labor labor;
    Neighbours neighbours(facts);
    std::vector<int64_t> list;
    for (int64_t i = first; i < last; ++i) {
      const int64_t degree = degrees[i];
      int64_t* picks = out + ends[i];
      const bool all = takes_all(i);
      if (!all) list.resize(size_t(degree));
      int64_t* target = all ? picks : list.data();
      for (int64_t k = 0; k < degree; ++k) {
        target[k] = k;
        neighbours.add(ids[i], target + k);
      }
      if (all) continue;
      neighbours.flush();
      labor.draw(key, OwnIds<int64_t>{list.data()}, 0, degree, fanout, picks);
      for (int64_t k = 0; k < fanout; ++k) picks[k] = list[size_t(picks[k])];
    }
    neighbours.flush();
  }
};

}  // namespace

int64_t procedural_degrees PH_DEGREES_ARGS {
  parallel_for(n, 1 << 14, int(threads), [&](int64_t begin, int64_t end) {
    uint64_t id[kBatch], zeros[kBatch] = {};
    uint32_t words[4 * kBatch];
    for (int64_t i = begin; i < end; i += kBatch) {
      const int count = int(std::min<int64_t>(kBatch, end - i));
      for (int k = 0; k < count; ++k) id[k] = uint64_t(ids[i + k]);
      philox_many(facts->degree_key, id, zeros, count, words);
      for (int k = 0; k < count; ++k) out[i + k] = table[words[4 * k] >> 20];
    }
  });
  return 0;
}

int64_t procedural_draw PH_DRAW_ARGS {
  const VirtualDraw draw{*facts, ids, degrees, ends, fanout, *key, out};
  std::atomic<bool> has_memory{true};
  for_rows(ends, n, kGrain, int(threads), [&](int64_t first, int64_t last) {
    try {
      if (method == kLabor) draw.labor(first, last);
      else draw.uniform(first, last);
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
  });
  return has_memory ? 0 : kNoMemory;
}

int64_t procedural_rows PH_ROWS_ARGS {
  constexpr float kUnit = 1.0f / 147.80054f;  // standard deviation of the sum: sqrt(4 * (256^2 - 1) / 12)
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(width, 1));
  parallel_for(n, grain, int(threads), [&](int64_t begin, int64_t end) {
    uint64_t id[kBatch], block[kBatch];
    uint32_t words[4 * kBatch];
    float noise[4 * kBatch];
    for (int64_t i = begin; i < end; ++i) {
      const float* centre = centres ? centres + ids[i] % num_classes * width : nullptr;
      std::fill(id, id + kBatch, uint64_t(ids[i]));
      for (int64_t column = 0; column < width; column += 4 * kBatch) {
        const int64_t columns = std::min<int64_t>(4 * kBatch, width - column);
        const int count = int((columns + 3) / 4);
        for (int k = 0; k < count; ++k) block[k] = uint64_t(column / 4 + k);
        philox_many(key, id, block, count, words);
        for (int k = 0; k < 4 * count; ++k) {
          const uint32_t w = words[k];
          noise[k] = float(int32_t((w & 0xff) + ((w >> 8) & 0xff) + ((w >> 16) & 0xff) + (w >> 24)) - 510) * kUnit;
        }
        float* row = out + i * width + column;
        if (centre)
          for (int64_t k = 0; k < columns; ++k) row[k] = noise[k] + centre[column + k];
        else
          std::copy(noise, noise + columns, row);
      }
    }
  });
  return 0;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_procedural_degrees PH_DEGREES_ARGS {
  return PH_PICK(procedural_degrees)(facts, table, ids, n, out, threads);
}

// out[ends[i] .. ends[i + 1]]: the neighbours that ids[i], of degrees[i], draws. 0, or -1 when there is no memory.
PH_EXPORT int64_t ph_procedural_drawn PH_DRAW_ARGS {
  return PH_PICK(procedural_draw)(facts, ids, degrees, ends, n, fanout, key, method, out, threads);
}

// out[i] float [width]: the row of ids[i] >= 0. centres float [num_classes, width], or null: noise alone.
PH_EXPORT int64_t ph_procedural_rows PH_ROWS_ARGS {
  return PH_PICK(procedural_rows)(key, ids, n, width, num_classes, centres, out, threads);
}
#endif
