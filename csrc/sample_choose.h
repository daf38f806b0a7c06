// The drawn in-edges of several rows at once: each row is drawn the cheapest way that gives its picks (sample_draw.h).
#pragma once
#include "sample_draw.h"

namespace polyhop {
namespace PH_ISA {
namespace {  // nothing here is shared with other files or other instruction sets

constexpr int64_t kMostRows = 64;  // chosen at once
enum Method { kUniform = 0, kLabor = 1 };

struct Row {
  int64_t id;             // keys the draw
  int64_t begin, degree;  // its list among all edges
  int64_t out;            // where its picks go
};

// What draws keep between rows; serves one thread at a time.
struct Scratch {
  FloydBits floyd;
  Labor labor;
};

// Sources: how LABOR reads the ids of a list, OwnIds or TableIds.
template <class Sources>
class Chooser {
 public:
  Chooser(Scratch& scratch, const Sources& sources, int64_t fanout, const Variates& variates, int64_t method)
      : scratch_(scratch), sources_(sources), fanout_(fanout), variates_(variates), key_(variates.first), method_(method) {}

  int64_t num_picks(int64_t degree) const { return fanout_ < 0 ? degree : std::min(degree, fanout_); }

  // LABOR reads the lists it draws from: what it reads first is asked for here.
  void ask(const Row& row) const {
    if (method_ == kLabor && fanout_ >= 0 && row.degree > fanout_) sources_.ask(row.begin, row.degree);
  }

  // The positions among all edges of what up to kMostRows rows draw, ascending within a row. Inlined, so that the
  // compiler sees the caller's rows on the stack, which no store to positions can change.
  __attribute__((always_inline)) void choose(const Row* rows, int64_t num_rows, int64_t* position) {
    const int64_t fanout = fanout_;
    int64_t lanes[kMostRows], num_lanes = 0;
    for (int64_t i = 0; i < num_rows; ++i) {
      const Row row = rows[i];
      int64_t* out = position + row.out;
      if (fanout < 0 || row.degree <= fanout) {
        for (int64_t k = 0; k < row.degree; ++k) out[k] = row.begin + k;
        continue;
      }
      if (method_ == kUniform && fanout <= kLaneFanout && row.degree <= kNarrow) {
        lanes[num_lanes++] = i;
        continue;
      }
      if (method_ == kLabor)
        scratch_.labor.draw(variates_, sources_, row.begin, row.degree, fanout, out);
      else
        scratch_.floyd.draw(key_, uint64_t(row.id), row.degree, fanout, out);
      for (int64_t k = 0; k < fanout; ++k) out[k] += row.begin;
    }
    for (int64_t first = 0; first < num_lanes; first += kLanes)
      choose_lanes(rows, lanes + first, int(std::min<int64_t>(kLanes, num_lanes - first)), position);
  }

 private:
  void choose_lanes(const Row* rows, const int64_t* lanes, int num_lanes, int64_t* position) const {
    const int64_t fanout = fanout_;
    Lanes low, high, degree;
    SignedLanes picks[kLaneFanout];
    for (int l = 0; l < kLanes; ++l) {
      const Row& row = rows[lanes[l < num_lanes ? l : 0]];
      low[l] = uint32_t(row.id);
      high[l] = uint32_t(uint64_t(row.id) >> 32);
      degree[l] = uint32_t(row.degree);
    }
    floyd_lanes(key_, low, high, degree, int(fanout), picks);
    for (int l = 0; l < num_lanes; ++l) {
      const Row& row = rows[lanes[l]];
      const int64_t begin = row.begin;
      int64_t* out = position + row.out;
      for (int64_t k = 0; k < fanout; ++k) out[k] = begin + picks[k][l];
    }
  }

  Scratch& scratch_;
  const Sources sources_;
  const int64_t fanout_;
  const Variates variates_;
  const uint64_t key_;
  const int64_t method_;
};

}  // namespace
}  // namespace PH_ISA
}  // namespace polyhop
