// Philox4x32-10, the counter-based generator behind every random choice.
//
// A draw is a pure function of (key, counter). The 64-bit key is folded by the caller from (seed, purpose, epoch, step,
// site); the 128-bit counter is (c0, c1) = the user's global id, (c2, c3) = column block, draw block or other endpoint.
#pragma once
#include <cstdint>

namespace polyhop {

struct Words4 {
  uint32_t w[4];
};

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

inline Words4 philox(uint64_t key, uint64_t id, uint64_t other) {
  uint32_t c0 = uint32_t(id), c1 = uint32_t(id >> 32), c2 = uint32_t(other), c3 = uint32_t(other >> 32);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(kPhiloxM0) * c0, p1 = uint64_t(kPhiloxM1) * c2;
    const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    c0 = n0;
    c2 = n2;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace polyhop
