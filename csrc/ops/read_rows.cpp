// Rows of a file that is larger than memory, by a plan of large reads made elsewhere: each read is one stretch of pages, and
// says which of the wanted rows lie in it. Threads here wait for the disk, so there are more of them than processors; they
// take reads in file order, each into its own aligned buffer, and copy the wanted rows out.
//
// Nothing is computed, so one build serves every instruction set.
#ifdef PH_ISA_base
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "isa.h"

namespace {

constexpr int64_t kPage = 4096;
enum Status : int64_t { kDone = 0, kShort = -1, kFailed = -2, kNoMemory = -3 };

struct Reads {
  int fd;
  const int64_t* starts;  // [R] byte of the file, a multiple of kPage
  const int64_t* sizes;   // [R] bytes, a multiple of kPage; the last may reach beyond the end of the file
  const int64_t* first;   // [R + 1] of the wanted rows, those that lie in each read
  int64_t num_reads;
  const int64_t* rows;  // [n] ascending
  const int64_t* at;    // [n] where in `out` each belongs, or null: in their order
  int64_t row_bytes, offset;
  uint8_t* out;
  bool is_direct;  // past the page cache; else what was read is dropped from it
};

struct Outcome {
  std::atomic<int64_t> status{kDone};
  int64_t read = 0, detail = 0;
  void fail(int64_t kind, int64_t which, int64_t what) {
    int64_t none = kDone;
    if (!status.compare_exchange_strong(none, kind)) return;
    read = which;
    detail = what;
  }
};

// Bytes that are there, up to `size`: less only at the end of the file. Negative: an error number.
int64_t fill(const Reads& reads, uint8_t* buffer, int64_t size, int64_t start) {
  int64_t got = 0;
  while (got < size) {
    const ssize_t some = pread(reads.fd, buffer + got, size_t(size - got), off_t(start + got));
    if (some < 0 && errno == EINTR) continue;
    if (some < 0) return -int64_t(errno);
    got += some;
    if (some == 0 || (reads.is_direct && some % 512)) break;  // a direct read ends inside a sector only where the file does
  }
  return got;
}

void copy_rows(const Reads& reads, int64_t which, const uint8_t* buffer) {
  const int64_t shift = reads.offset - reads.starts[which], width = reads.row_bytes;
  for (int64_t k = reads.first[which]; k < reads.first[which + 1]; ++k) {
    const int64_t to = reads.at ? reads.at[k] : k;
    std::memcpy(reads.out + to * width, buffer + shift + reads.rows[k] * width, size_t(width));
  }
}

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};

void work(const Reads& reads, std::atomic<int64_t>& next, int64_t buffer_bytes, Outcome& outcome) {
  const std::unique_ptr<uint8_t, Free> buffer(
      static_cast<uint8_t*>(std::aligned_alloc(size_t(kPage), size_t(buffer_bytes))));
  if (!buffer) return outcome.fail(kNoMemory, 0, buffer_bytes);
  while (outcome.status.load(std::memory_order_relaxed) == kDone) {
    const int64_t which = next.fetch_add(1);
    if (which >= reads.num_reads) return;
    const int64_t start = reads.starts[which], last = reads.rows[reads.first[which + 1] - 1];
    const int64_t needed = reads.offset + (last + 1) * reads.row_bytes - start;
    const int64_t got = fill(reads, buffer.get(), reads.sizes[which], start);
    if (got < 0) return outcome.fail(kFailed, which, -got);
    if (got < needed) return outcome.fail(kShort, which, 0);
    copy_rows(reads, which, buffer.get());
    if (!reads.is_direct) posix_fadvise(reads.fd, off_t(start), off_t(reads.sizes[which]), POSIX_FADV_DONTNEED);
  }
}

}  // namespace

// 0 and the rows are in out; else a Status, with the read in where[0] and the error number (kFailed) in where[1].
PH_EXPORT int64_t ph_read_rows(int64_t fd, const int64_t* starts, const int64_t* sizes, const int64_t* first,
                               int64_t num_reads, const int64_t* rows, const int64_t* at, int64_t row_bytes,
                               int64_t offset, uint8_t* out, int64_t buffer_bytes, int64_t is_direct, int64_t threads,
                               int64_t* where) {
  const Reads reads{int(fd), starts, sizes, first, num_reads, rows, at, row_bytes, offset, out, is_direct != 0};
  std::atomic<int64_t> next{0};
  Outcome outcome;
  std::vector<std::thread> others;
  const int64_t count = threads < num_reads ? threads : num_reads;
  try {
    for (int64_t k = 1; k < count; ++k)
      others.emplace_back([&] { work(reads, next, buffer_bytes, outcome); });
  } catch (const std::system_error&) {
    // The system gives no more threads: those there are do the work.
  }
  work(reads, next, buffer_bytes, outcome);
  for (std::thread& thread : others) thread.join();
  where[0] = outcome.read;
  where[1] = outcome.detail;
  return outcome.status.load();
}
#endif
