// Launches kernels by cuda/tile/launch.cuh on the runtime beside this file, as told by the arguments, and prints what
// the runtime was asked. For test_launch.py.
//
//   device N              the device that later launches are on
//   launch KERNEL BYTES   a launch of kernel a or b with that much shared memory
//   behind KERNEL BYTES   the same, as one that may start early
//   cluster KERNEL        the most CTAs of a cluster
//   threads N BYTES       N threads that launch kernel a with one to N times as many bytes, all at once
//   latest ADDRESS NUMBER how often numbers were made into another one, which is 10 times the number, and the result
//   driver DRIVER RUNTIME what is wrong with such a driver
#define __CUDACC__

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver.h"
#include "cuda/tile/latest.h"
#include "cuda/tile/launch.cuh"

namespace {

void kernel_a(int) {}
void kernel_b(int) {}

void launch_in_threads(int count, size_t bytes) {
  std::barrier start(count);
  std::vector<std::thread> threads;
  for (int i = 1; i <= count; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      pagedtree::cuda::launch(kernel_a, dim3(1), dim3(32), bytes * static_cast<size_t>(i), nullptr, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void report(const std::string& said) {
  std::printf("%d,%d,%d,%d,%s\n", runtime.launches, runtime.set_attributes, runtime.read_attributes,
              runtime.device_attributes, said.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  using namespace pagedtree::cuda;
  for (int i = 1; i < argc;) {
    const auto word = [&] { return std::string(i < argc ? argv[i++] : ""); };
    const auto number = [&] { return std::atoi(word().c_str()); };
    const auto kernel = [&] { return word() == "a" ? kernel_a : kernel_b; };
    const std::string command = word();
    std::string said;
    try {
      if (command == "device") {
        device_of_thread = number();
        said = std::to_string(device_limits().num_sms);
      } else if (command == "launch" || command == "behind") {
        const auto launched = kernel();
        const auto bytes = static_cast<size_t>(number());
        command == "launch" ? launch(launched, dim3(1), dim3(32), bytes, nullptr, 0)
                            : launch_behind(launched, dim3(1), dim3(32), bytes, nullptr, 0);
      } else if (command == "cluster") {
        said = std::to_string(max_cluster(kernel()));
      } else if (command == "threads") {
        const int count = number();
        launch_in_threads(count, static_cast<size_t>(number()));
      } else if (command == "latest") {
        static Latest<int, int> latest;
        static int made = 0;
        const auto* address = reinterpret_cast<const void*>(static_cast<intptr_t>(number()));
        const int given = number();
        const int result = latest.at(address, given, [&] { return ++made, 10 * given; });
        said = std::to_string(made) + " " + std::to_string(result);
      } else if (command == "driver") {
        const int driver = number();
        said = driver_error(driver, number());
      } else {
        return 2;
      }
    } catch (const std::exception& error) {
      said = error.what();
    }
    report(said);
  }
}
