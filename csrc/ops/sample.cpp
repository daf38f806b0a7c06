// Neighbour sampling of a whole multi-layer mini-batch in one call.
//
// A hop runs over its destinations in small blocks, four stages deep, so that every random read was asked for a
// block earlier: (1) ask for the rows of indptr, (2) draw positions and ask for indices[position], (3) read the sources
// and ask for their table entries, (4) relabel. Results stay in the sampler until they are copied into the caller's
// arrays. A sampler serves one thread at a time; the same call gives the same result on any of them.
#include <deque>

#include "isa.h"
#include "sample_choose.h"
#include "sample_relabel.h"

struct SampleRequest {
  const int64_t* indptr;
  const void* indices;
  int64_t wide;  // indices are int64
  const int64_t* seeds;
  int64_t num_seeds;
  const int64_t* fanouts;  // per hop; -1 = all
  const polyhop::Variates* keys;  // per hop
  int64_t hops, method;
  int64_t check;   // look at every id before it is used
  int64_t* sizes;  // out: (edges, nodes so far) per hop
};

PH_DECLARE(int64_t, sample_run, (void* sampler, const SampleRequest& request))
PH_DECLARE(void, sample_ids, (void* sampler, const int64_t* indptr, int64_t* ids, int32_t* degree))

namespace polyhop {
namespace PH_ISA {
namespace {

enum Status : int64_t {
  kOk = 0,
  kSeedRange = -1,
  kSeedTwice = -2,
  kMemory = -3,
  kTooMany = -4,
  kBadRow = -5,
  kBadSource = -6
};

// Destinations on their way through the stages.
struct Flight {
  int64_t first = 0, num_dst = 0, edge_begin = 0, num_edges = 0;
  Buffer<int64_t> position;  // of each drawn edge in the graph
  Buffer<int64_t> source;    // global id at the other end
};

struct Layer {
  int64_t num_dst = 0, num_edges = 0, num_src = 0;
  Buffer<int64_t> indptr, edge;  // edge: position of each edge in the graph
  Buffer<int32_t> indices;
};

struct Sampler {
  Sampler(int64_t nodes, int64_t edges, bool use_hash, bool positions, uint32_t first_mark)
      : num_nodes(nodes),
        num_edges(edges),
        use_hash(use_hash),
        keep_positions(positions),
        dense(nodes, first_mark),
        hash(first_mark) {}

  int64_t num_nodes, num_edges;
  bool use_hash, keep_positions;
  int64_t count = 0;    // nodes of the batch so far
  Buffer<int64_t> ids;  // their global ids, by local row
  DenseTable dense;
  HashTable<NodeIds> hash;
  std::deque<Layer> layers;  // from the seeds outward
  Flight flights[4];
  Scratch scratch;
};

struct Failure {
  Status status;
  int64_t where;
};

// One hop of one batch.
template <class Index, class Table>
class Hop {
 public:
  Hop(Sampler& sampler, Table& table, Layer& layer, const SampleRequest& request, int64_t hop)
      : s_(sampler),
        table_(table),
        layer_(layer),
        indptr_(request.indptr),
        indices_(static_cast<const Index*>(request.indices)),
        fanout_(request.fanouts[hop]),
        chooser_(sampler.scratch, {indices_}, fanout_, request.keys[hop], request.method),
        check_(request.check != 0) {}

  void run() {
    layer_.num_dst = s_.count;
    layer_.num_edges = 0;
    layer_.indptr.reserve(layer_.num_dst + 1, 0);
    layer_.indptr[0] = 0;
    const int64_t step = block_size(), blocks = (layer_.num_dst + step - 1) / step;
    for (int64_t b = 0; b < blocks + 3; ++b) {
      if (b < blocks) ask_rows(b * step, std::min(step, layer_.num_dst - b * step), s_.flights[b % 4]);
      if (b >= 1 && b - 1 < blocks) draw(s_.flights[(b - 1) % 4]);
      if (b >= 2 && b - 2 < blocks) read_sources(s_.flights[(b - 2) % 4]);
      if (b >= 3) relabel(s_.flights[(b - 3) % 4]);
    }
    layer_.num_src = s_.count;
  }

 private:
  // Destinations per block: enough edges in flight to hide memory, few enough to stay in the first-level cache.
  int64_t block_size() const {
    constexpr int64_t kFewest = 16, kEdges = 256;
    return fanout_ < 0 ? kFewest : std::max(kFewest, std::min(kMostRows, kEdges / fanout_ / kFewest * kFewest));
  }

  void ask_rows(int64_t first, int64_t num_dst, Flight& flight) {
    flight.first = first;
    flight.num_dst = num_dst;
    for (int64_t i = first; i < first + num_dst; ++i) __builtin_prefetch(&indptr_[s_.ids[i]], 0, 3);
  }

  // Chooses the edges of each destination, and asks for their sources.
  void draw(Flight& flight) {
    Row rows[kMostRows];
    int64_t* ends = layer_.indptr.data() + flight.first + 1;
    int64_t total = 0;
    for (int64_t i = 0; i < flight.num_dst; ++i) {
      const int64_t id = s_.ids[flight.first + i], begin = indptr_[id], degree = indptr_[id + 1] - begin;
      if (check_ && (degree < 0 || begin < 0 || begin + degree > s_.num_edges)) throw Failure{kBadRow, id};
      rows[i] = {id, begin, degree, total};
      chooser_.ask(rows[i]);
      total += chooser_.num_picks(degree);
      ends[i] = layer_.num_edges + total;
    }
    flight.edge_begin = layer_.num_edges;
    flight.num_edges = total;
    flight.position.reserve(total, 0);
    layer_.num_edges += total;
    chooser_.choose(rows, flight.num_dst, flight.position.data());
    for (int64_t e = 0; e < total; ++e) __builtin_prefetch(&indices_[flight.position[e]], 0, 3);
  }

  void read_sources(Flight& flight) {
    flight.source.reserve(flight.num_edges, 0);
    table_.make_room(s_.ids.data(), s_.count, 2 * flight.num_edges);
    for (int64_t e = 0; e < flight.num_edges; ++e) {
      const int64_t id = indices_[flight.position[e]];
      if (check_ && (id < 0 || id >= s_.num_nodes)) throw Failure{kBadSource, flight.position[e]};
      flight.source[e] = id;
      table_.prefetch(id);
    }
    if (!s_.keep_positions || !flight.num_edges) return;
    layer_.edge.reserve(layer_.num_edges, flight.edge_begin);
    std::memcpy(layer_.edge.data() + flight.edge_begin, flight.position.data(), size_t(flight.num_edges) * 8);
  }

  void relabel(Flight& flight) {
    int64_t count = s_.count;
    if (count + flight.num_edges > INT32_MAX) throw Failure{kTooMany, count};
    s_.ids.reserve(count + flight.num_edges + 1, count);
    layer_.indices.reserve(flight.edge_begin + flight.num_edges, flight.edge_begin);
    table_.make_room(s_.ids.data(), count, flight.num_edges);
    int32_t* out = layer_.indices.data() + flight.edge_begin;
    int64_t* ids = s_.ids.data();
    const int64_t* source = flight.source.data();
    for (int64_t e = 0; e < flight.num_edges; ++e) {
      const int64_t row = table_.row(source[e], count);
      ids[count] = source[e];  // kept only if new
      count += row == count;
      out[e] = int32_t(row);
    }
    s_.count = count;
  }

  Sampler& s_;
  Table& table_;
  Layer& layer_;
  const int64_t* indptr_;
  const Index* indices_;
  const int64_t fanout_;
  Chooser<OwnIds<Index>> chooser_;
  const bool check_;
};

template <class Table>
void take_seeds(Sampler& s, Table& table, const int64_t* seeds, int64_t num_seeds) {
  table.start(s.count);
  s.count = 0;
  s.ids.reserve(num_seeds + 1, 0);
  table.make_room(s.ids.data(), 0, num_seeds);
  for (int64_t i = 0; i < num_seeds; ++i) {
    if (seeds[i] < 0 || seeds[i] >= s.num_nodes) throw Failure{kSeedRange, i};
    if (table.row(seeds[i], i) != i) throw Failure{kSeedTwice, i};
    s.ids[i] = seeds[i];
    s.count = i + 1;
  }
}

template <class Index, class Table>
void run_batch(Sampler& s, Table& table, const SampleRequest& request) {
  take_seeds(s, table, request.seeds, request.num_seeds);
  while (int64_t(s.layers.size()) < request.hops) s.layers.emplace_back();
  for (int64_t h = 0; h < request.hops; ++h) {
    Layer& layer = s.layers[size_t(h)];
    Hop<Index, Table>(s, table, layer, request, h).run();
    request.sizes[2 * h] = layer.num_edges;
    request.sizes[2 * h + 1] = layer.num_src;
  }
}

}  // namespace

int64_t sample_run(void* sampler, const SampleRequest& request) {
  Sampler& s = *static_cast<Sampler*>(sampler);
  try {
    if (s.use_hash)
      request.wide ? run_batch<int64_t>(s, s.hash, request) : run_batch<int32_t>(s, s.hash, request);
    else
      request.wide ? run_batch<int64_t>(s, s.dense, request) : run_batch<int32_t>(s, s.dense, request);
    return kOk;
  } catch (const Failure& failure) {
    request.sizes[0] = failure.where;
    return failure.status;
  } catch (const std::bad_alloc&) {
    return kMemory;
  }
}

// Copies the batch's node ids and reads their in-degrees.
void sample_ids(void* sampler, const int64_t* indptr, int64_t* ids, int32_t* degree) {
  Sampler& s = *static_cast<Sampler*>(sampler);
  constexpr int64_t kAhead = 24;
  const int64_t* from = s.ids.data();
  for (int64_t i = 0; i < s.count; ++i) {
    if (i + kAhead < s.count) __builtin_prefetch(&indptr[from[i + kAhead]], 0, 3);
    ids[i] = from[i];
    degree[i] = int32_t(indptr[from[i] + 1] - indptr[from[i]]);
  }
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
using polyhop::base::Sampler;

// table: 0 = by size, 1 = dense, 2 = hash. first_mark: 0, or where tests begin, close to where marks run out.
// Null when there is no memory.
PH_EXPORT void* ph_sampler_new(int64_t num_nodes, int64_t num_edges, int64_t table, int64_t keep_positions,
                               int64_t first_mark) {
  constexpr int64_t kDenseNodes = int64_t(1) << 25;
  const bool hash = table == 2 || (table == 0 && num_nodes > kDenseNodes) || num_nodes >= int64_t(0xFFFFFFFF);
  return new (std::nothrow) Sampler(num_nodes, num_edges, hash, keep_positions != 0, uint32_t(first_mark));
}

PH_EXPORT int64_t ph_sampler_free(void* sampler) {
  delete static_cast<Sampler*>(sampler);
  return 0;
}

// Draws a batch; see SampleRequest. Below 0: a Status, with the place in sizes[0].
PH_EXPORT int64_t ph_sample_hops(void* sampler, const int64_t* indptr, const void* indices, int64_t wide,
                                 const int64_t* seeds, int64_t num_seeds, const int64_t* fanouts,
                                 const polyhop::Variates* keys, int64_t hops, int64_t method, int64_t check,
                                 int64_t* sizes) {
  const SampleRequest request{indptr, indices, wide,   seeds, num_seeds, fanouts,
                              keys,   hops,    method, check, sizes};
  return PH_PICK(sample_run)(sampler, request);
}

// Copies one hop of the last batch; edge may be null.
PH_EXPORT int64_t ph_sample_copy(void* sampler, int64_t hop, int64_t* indptr, int32_t* indices, int64_t* edge) {
  auto& layer = static_cast<Sampler*>(sampler)->layers[size_t(hop)];
  std::memcpy(indptr, layer.indptr.data(), size_t(layer.num_dst + 1) * 8);
  if (!layer.num_edges) return 0;
  std::memcpy(indices, layer.indices.data(), size_t(layer.num_edges) * 4);
  if (edge) std::memcpy(edge, layer.edge.data(), size_t(layer.num_edges) * 8);
  return 0;
}

// Copies the ids of all nodes of the last batch and their in-degrees.
PH_EXPORT int64_t ph_sample_ids(void* sampler, const int64_t* indptr, int64_t* ids, int32_t* degree) {
  PH_PICK(sample_ids)(sampler, indptr, ids, degree);
  return 0;
}
#endif
