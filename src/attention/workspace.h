// What every engine may expect of a workspace.
#pragma once
#include <cstdint>

namespace strobe {
inline constexpr uint64_t kWorkspaceAlignment = 256;
}
