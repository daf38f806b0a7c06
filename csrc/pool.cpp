#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace polyhop {
namespace {

struct Job {
  int64_t n, grain;
  const std::function<void(int64_t, int64_t)>* body;
  std::atomic<int64_t> next{0};
  std::atomic<int> running{0};  // helpers inside run(); guarded by the pool's mutex for the final wait
  int wanted = 0;               // helpers still to be picked up; guarded by the pool's mutex

  void run() {
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) return;
      (*body)(begin, std::min(n, begin + grain));
    }
  }
};

class Pool {
 public:
  void run(Job& job, int helpers) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (int(threads_.size()) < helpers) {
        threads_.emplace_back([this] { work(); });
        threads_.back().detach();
      }
      job.wanted = helpers;
      jobs_.push_back(&job);
    }
    wake_.notify_all();
    job.run();
    std::unique_lock<std::mutex> lock(mutex_);
    const auto it = std::find(jobs_.begin(), jobs_.end(), &job);
    if (it != jobs_.end()) jobs_.erase(it);  // helpers that have not come yet are no longer needed
    done_.wait(lock, [&] { return job.running.load() == 0; });
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return !jobs_.empty(); });
      Job* job = jobs_.front();
      if (--job->wanted == 0) jobs_.pop_front();
      job->running.fetch_add(1);
      lock.unlock();
      job->run();
      lock.lock();
      job->running.fetch_sub(1);
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job*> jobs_;
  std::vector<std::thread> threads_;
};

// Leaked on purpose: worker threads may outlive static destruction. A forked child gets a new one, since threads do not
// survive a fork.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current) return *current;
  Pool* fresh = new Pool;
  if (pool.compare_exchange_strong(current, fresh)) {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); }); });
    return *fresh;
  }
  delete fresh;
  return *current;
}

}  // namespace

void parallel_for(int64_t n, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t ranges = (n + grain - 1) / grain;
  const int helpers = int(std::min<int64_t>(std::max(threads, 1), ranges)) - 1;
  Job job{n, grain, &body};
  if (helpers <= 0) {
    job.run();
    return;
  }
  the_pool().run(job, helpers);
}

}  // namespace polyhop
