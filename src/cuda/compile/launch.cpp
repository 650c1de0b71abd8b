#include "attention/text.h"
#include "cuda/compile/jit.h"

namespace strobe::cuda {

static void refuse(const Kernel &kernel, const std::string &what) {
  throw Error(STROBE_INTERNAL, text("launch of ", kernel.name, ": ", what));
}

void launch(const Kernel &kernel, Grid grid, int threads, int64_t shared_bytes, CUstream stream, const void *arguments,
            size_t argument_bytes, bool early) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  constexpr int64_t most_x = 0x7fffffff, most_yz = 0xffff;
  if (grid.x < 0 || grid.x > most_x || grid.y < 0 || grid.y > most_yz || grid.z < 0 || grid.z > most_yz)
    refuse(kernel, text("grid ", grid.x, " x ", grid.y, " x ", grid.z, "; accepted is up to ", most_x, " x ", most_yz, " x ", most_yz));
  if (shared_bytes < 0 || shared_bytes > kernel.most_shared)
    refuse(kernel, text(shared_bytes, " bytes of dynamic shared memory; accepted is up to ", kernel.most_shared));
  if (kernel.argument_bytes && kernel.argument_bytes != argument_bytes)
    refuse(kernel, text(argument_bytes, " bytes of arguments; the kernel takes ", kernel.argument_bytes));

  constexpr int kInGraphs = 12030; // the first driver that captures early launches in graphs
  CUlaunchAttribute overlap = {CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, {.programmaticStreamSerializationAllowed = 1}};
  const bool overlaps = early && driver()->version >= kInGraphs;
  const CUlaunchConfig config = {.gridDimX = static_cast<unsigned>(grid.x),
                                 .gridDimY = static_cast<unsigned>(grid.y),
                                 .gridDimZ = static_cast<unsigned>(grid.z),
                                 .blockDimX = static_cast<unsigned>(threads),
                                 .blockDimY = 1,
                                 .blockDimZ = 1,
                                 .sharedMemBytes = static_cast<unsigned>(shared_bytes),
                                 .hStream = stream,
                                 .attrs = overlaps ? &overlap : nullptr,
                                 .numAttrs = overlaps};
  void *parameters[] = {const_cast<void *>(arguments)};
  const CUresult result = driver()->cuLaunchKernelEx(&config, kernel.function, parameters, nullptr);
  if (result != CUDA_SUCCESS) fail(result, "launch of " + kernel.name);
}

} // namespace strobe::cuda
