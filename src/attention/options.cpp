#include "attention/options.h"

#include <cmath>
#include <utility>

namespace strobe {

void check_dropout(const strobe_attention &a, Reasons &reasons) {
  if (!(a.dropout >= 0 && a.dropout < 1)) reasons.add("dropout", a.dropout, "; accepted is 0 to below 1, the probability of dropping");
}

static void check_score(const strobe_attention &a, Reasons &reasons) {
  const std::pair<const char *, int32_t> reserved[] = {
#define STROBE_RESERVED(name) {#name, a.name},
#include "strobe/fields.inc"
  };
  for (auto [field, value] : reserved)
    if (value) reasons.add(field, value, "; accepted is 0");
  if (a.score == STROBE_DOT) {
    for (auto [field, value] : {std::pair{"beta", a.beta}, {"shift", a.shift}})
      if (value != 0) reasons.add(field, value, " with a score of q.k itself; accepted is 0, or a hyperbolic score");
  } else if (a.score == STROBE_HYPERBOLIC) {
    if (!(a.beta > 0 && std::isfinite(a.beta)))
      reasons.add("beta", a.beta, "; accepted with a hyperbolic score is a positive finite number");
    if (!std::isfinite(a.shift)) reasons.add("shift", a.shift, "; accepted is any finite number");
    if (a.softcap != 0) reasons.add("softcap", a.softcap, " with a hyperbolic score; accepted is 0");
  } else {
    reasons.add("score", a.score, "; accepted is ", int(STROBE_DOT), " (q.k) or ", int(STROBE_HYPERBOLIC), " (hyperbolic)");
  }
}

void check_options(const strobe_attention &a, Reasons &reasons) {
  const std::pair<const char *, int32_t> flags[] = {
#define STROBE_OPTIONAL(name) {"has_" #name, a.has_##name},
#define STROBE_FLAG(name) {#name, a.name},
#include "strobe/fields.inc"
  };
  for (auto [field, value] : flags)
    if (value != 0 && value != 1) reasons.add(field, value, "; accepted is 0 or 1");

  if (a.has_scale && !std::isfinite(a.scale)) reasons.add("scale", a.scale, "; accepted is any finite number");
  if (!a.has_scale && a.scale != 0) reasons.add("scale", a.scale, " while has_scale is 0; accepted is 0, or has_scale = 1");
  if (!(a.softcap >= 0 && std::isfinite(a.softcap)))
    reasons.add("softcap", a.softcap, "; accepted is 0 (none) or a positive finite number");
  check_score(a, reasons);
  check_dropout(a, reasons);
  if (a.alignment != STROBE_BOTTOM_RIGHT && a.alignment != STROBE_TOP_LEFT)
    reasons.add("alignment", a.alignment, "; accepted is ", int(STROBE_BOTTOM_RIGHT), " (bottom right) or ", int(STROBE_TOP_LEFT),
                " (top left)");

  auto window = [&](const char *field, int64_t keys, bool given, const char *flag) {
    if (keys < 0) reasons.add(field, keys, "; accepted is 0 or more; for no bound on this side, ", flag, " = 0");
    if (keys > 0 && !given) reasons.add(field, keys, " while ", flag, " is 0; accepted is 0, or ", flag, " = 1");
  };
  window("window_left", a.window_left, a.has_window_left, "has_window_left");
  window("window_right", a.window_right, a.has_window_right, "has_window_right");

  auto wish = [&](const char *field, int64_t tile) {
    if (tile < 0 || tile > STROBE_MAX_TILE)
      reasons.add(field, tile, "; accepted is 1 to ", int(STROBE_MAX_TILE), ", or 0 for the engine's own choice");
  };
  wish("tile_q", a.tile_q);
  wish("tile_k", a.tile_k);
}

} // namespace strobe
