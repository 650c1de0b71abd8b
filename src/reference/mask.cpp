#include "reference/mask.h"

#include "reference/function.h"

namespace strobe::oracle {

std::function<bool(const Place &)> mask(const score::Program &program, const Captured *captured) {
  return [seen = Function(program.graph.nodes(), program.seen, captured)](const Place &at) {
    return seen.boolean({0, at.b, at.h, at.i, at.j, at.offset});
  };
}

} // namespace strobe::oracle
