// Ascending ids as bytes: the first id, then differences, each as a LEB128 varint (7 bits a byte, low first; the high bit
// says that more follow). An id is below 2^63, so a varint has at most 9 bytes. Bytes to decode come from elsewhere: every
// length is checked before it is read, and only what encoding gives is taken.
#include <cstdint>
#include <cstring>

#include "isa.h"

PH_DECLARE(int64_t, varint_size, (const int64_t* ids, int64_t n, int64_t* where))
PH_DECLARE(int64_t, varint_encode, (const int64_t* ids, int64_t n, uint8_t* out))
PH_DECLARE(int64_t, varint_decode, (const uint8_t* data, int64_t size, int64_t n, int64_t* ids, int64_t* where))

namespace polyhop {
namespace PH_ISA {
namespace {

enum Status : int64_t { kNotAscending = -1, kEndsEarly = -2, kNotMinimal = -3, kTooLarge = -4 };
constexpr int64_t kGroup = 8;  // ids whose differences are tried as one byte each
constexpr int kMostBytes = 9;

inline int64_t num_bytes(uint64_t value) { return ((63 - __builtin_clzll(value | 1)) * 9 + 73) / 64; }

inline uint8_t* put(uint64_t value, uint8_t* out) {
  for (; value >= 0x80; value >>= 7) *out++ = uint8_t(value | 0x80);
  *out++ = uint8_t(value);
  return out;
}

}  // namespace

// Bytes of all ids; or kNotAscending, with the place in where[0].
int64_t varint_size(const int64_t* ids, int64_t n, int64_t* where) {
  int64_t total = 0, last = 0, falls = 0;
  for (int64_t i = 0; i < n; ++i) {
    falls |= ids[i] < last;
    total += num_bytes(uint64_t(ids[i]) - uint64_t(last));
    last = ids[i];
  }
  if (!falls) return total;
  int64_t i = 0;
  for (last = 0; ids[i] >= last; ++i) last = ids[i];
  where[0] = i;
  return kNotAscending;
}

// Writes the varint_size bytes of checked ids.
int64_t varint_encode(const int64_t* ids, int64_t n, uint8_t* out) {
  const uint8_t* const first = out;
  uint64_t last = 0;
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    uint64_t step[kGroup], all = 0;
    for (int64_t k = 0; k < kGroup; ++k) step[k] = uint64_t(ids[i + k]) - (k ? uint64_t(ids[i + k - 1]) : last);
    for (int64_t k = 0; k < kGroup; ++k) all |= step[k];
    if (all < 0x80) {
      for (int64_t k = 0; k < kGroup; ++k) out[k] = uint8_t(step[k]);
      out += kGroup;
    } else {
      for (int64_t k = 0; k < kGroup; ++k) out = put(step[k], out);
    }
    last = uint64_t(ids[i + kGroup - 1]);
  }
  for (; i < n; ++i) {
    out = put(uint64_t(ids[i]) - last, out);
    last = uint64_t(ids[i]);
  }
  return out - first;
}

// Reads n ids from exactly `size` bytes: how many bytes were used, which is less than size where some are left over; or a
// Status, with the place of the id in where[0].
int64_t varint_decode(const uint8_t* data, int64_t size, int64_t n, int64_t* ids, int64_t* where) {
  const uint8_t *at = data, *const end = data + size;
  uint64_t last = 0;
  int64_t i = 0;
  while (i < n) {
    if (i + kGroup <= n && end - at >= kGroup) {
      uint64_t word;
      std::memcpy(&word, at, kGroup);
      if (!(word & 0x8080808080808080u)) {
        for (int64_t k = 0; k < kGroup; ++k) ids[i + k] = int64_t(last += at[k]);
        if (last > uint64_t(INT64_MAX)) return where[0] = i, int64_t(kTooLarge);
        at += kGroup;
        i += kGroup;
        continue;
      }
    }
    uint64_t value = 0;
    for (int byte = 0;; ++byte) {
      if (at == end) return where[0] = i, int64_t(kEndsEarly);
      if (byte == kMostBytes) return where[0] = i, int64_t(kTooLarge);
      const uint8_t bits = *at++;
      value |= uint64_t(bits & 0x7F) << (7 * byte);
      if (bits & 0x80) continue;
      if (!bits && byte) return where[0] = i, int64_t(kNotMinimal);
      break;
    }
    last += value;
    if (last > uint64_t(INT64_MAX)) return where[0] = i, int64_t(kTooLarge);
    ids[i++] = int64_t(last);
  }
  return at - data;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_varint_size(const int64_t* ids, int64_t n, int64_t* where) {
  return PH_PICK(varint_size)(ids, n, where);
}

PH_EXPORT int64_t ph_varint_encode(const int64_t* ids, int64_t n, uint8_t* out) {
  return PH_PICK(varint_encode)(ids, n, out);
}

PH_EXPORT int64_t ph_varint_decode(const uint8_t* data, int64_t size, int64_t n, int64_t* ids, int64_t* where) {
  return PH_PICK(varint_decode)(data, size, n, ids, where);
}
#endif
