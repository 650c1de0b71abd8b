// The properties of a workspace that every engine may rely on.
#pragma once
#include <cstdint>

namespace strobe {
inline constexpr uint64_t kWorkspaceAlignment = 256;
}
