#include "attention/options.h"

#include <cmath>
#include <utility>

#include "score/forms.h"

namespace strobe {

void check_dropout(const strobe_attention &a, Reasons &reasons) {
  if (!(a.dropout >= 0 && a.dropout < 1))
    reasons.add("dropout", Code::value, "{0}; accepted is 0 to below 1, the probability of dropping", a.dropout);
}

static void check_reserved(const strobe_attention &a, Reasons &reasons) {
  const std::pair<const char *, int32_t> reserved[] = {
#define STROBE_RESERVED(name) {#name, a.name},
#include "strobe/fields.inc"
  };
  for (auto [field, value] : reserved)
    if (value) reasons.add(field, Code::version, "{0}; accepted is 0", value);
}

void check_options(const strobe_attention &a, Reasons &reasons) {
  const std::pair<const char *, int32_t> flags[] = {
#define STROBE_OPTIONAL(name) {"has_" #name, a.has_##name},
#define STROBE_FLAG(name) {#name, a.name},
#include "strobe/fields.inc"
  };
  for (auto [field, value] : flags)
    if (value != 0 && value != 1) reasons.add(field, Code::value, "{0}; accepted is 0 or 1", value);

  if (a.has_scale && !std::isfinite(a.scale)) reasons.add("scale", Code::value, "{0}; accepted is any finite number", a.scale);
  if (!a.has_scale && a.scale != 0)
    reasons.add("scale", Code::excluded, "{0} while has_scale is 0; accepted is 0, or has_scale = 1", a.scale);
  check_reserved(a, reasons);
  score::check_forms(a, reasons);
  check_dropout(a, reasons);
  if (a.alignment != STROBE_BOTTOM_RIGHT && a.alignment != STROBE_TOP_LEFT)
    reasons.add("alignment", Code::value, "{0}; accepted is {1} (bottom right) or {2} (top left)", a.alignment, int(STROBE_BOTTOM_RIGHT),
                int(STROBE_TOP_LEFT));

  auto window = [&](const char *field, int64_t keys, bool given, const char *flag) {
    if (keys < 0) reasons.add(field, Code::value, "{0}; accepted is 0 or more; for no bound on this side, {1} = 0", keys, flag);
    if (keys > 0 && !given) reasons.add(field, Code::excluded, "{0} while {1} is 0; accepted is 0, or {1} = 1", keys, flag);
  };
  window("window_left", a.window_left, a.has_window_left, "has_window_left");
  window("window_right", a.window_right, a.has_window_right, "has_window_right");

  auto wish = [&](const char *field, int64_t tile) {
    if (tile < 0 || tile > STROBE_MAX_TILE)
      reasons.add(field, Code::value, "{0}; accepted is 1 to {1}, or {2} for the engine's own choice", tile, int(STROBE_MAX_TILE),
                  Absent{"0"});
  };
  wish("tile_q", a.tile_q);
  wish("tile_k", a.tile_k);
}

} // namespace strobe
