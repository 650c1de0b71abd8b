// The text that answers "what would run, and why".
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "attention/text.h"
#include "engines.h"
#include "kernels/attention/dropout.h"
#include "score/forms.h"
#include "score/program.h"

namespace strobe {
namespace {

// Headings, with lines "label  value" below them. The values are aligned.
class Page {
public:
  void heading(const std::string &title) { page << title << "\n"; }
  void line(const std::string &label, const std::string &value) {
    page << "  " << std::left << std::setw(width) << label << "  " << value << "\n";
  }
  void fit(const std::string &label) { width = std::max(width, static_cast<int>(label.size())); }
  std::string str() const { return page.str(); }

private:
  int width = 10;
  std::ostringstream page;
};

std::string duration(double seconds) {
  const auto [factor, unit] = seconds < 1e-3 ? std::pair{1e6, "us"} : seconds < 1 ? std::pair{1e3, "ms"} : std::pair{1.0, "s"};
  return text(Digits{seconds * factor, 3}, " ", unit);
}

std::string size(uint64_t bytes) {
  if (bytes < 1024) return text(bytes, " B");
  const bool mega = bytes >= 1024 * 1024;
  return text(Digits{double(bytes) / (mega ? 1024 * 1024 : 1024), 4}, mega ? " MiB" : " KiB");
}

std::string shape(const Problem &p) {
  std::string heads = p.heads == p.heads_kv ? text("H ", p.heads) : text("H ", p.heads, ", Hkv ", p.heads_kv);
  std::string dims = text("D ", p.head_dim, ", Dv ", p.head_dim_v);
  if (p.page_size) {
    const std::string keys = text("Sk ", p.pages_each, " pages of ", p.page_size, " keys, of a pool of ", p.pages);
    if (!p.varlen) return text("B ", p.batch, ", ", heads, ", Sq ", p.seqlen_q, ", ", keys, ", ", dims);
    return text(p.batch, " sequences, Tq ", p.total_q, ", max_seqlen_q ", p.longest_q(), ", ", keys, ", ", heads, ", ", dims);
  }
  if (!p.varlen) return text("B ", p.batch, ", ", heads, ", Sq ", p.seqlen_q, ", Sk ", p.seqlen_k, ", ", dims);
  return text(p.batch, " sequences, Tq ", p.total_q, ", Tk ", p.total_k, ", max_seqlen_q ", p.longest_q(), ", max_seqlen_k ", p.longest_k(),
              ", ", heads, ", ", dims);
}

std::string bound(int64_t keys) { return keys == kUnbounded ? "unbounded" : std::to_string(keys); }

std::string dropout(const Problem &p) {
  const double rate = dropout_threshold(p.dropout) / 256.0;
  std::string bits = p.rng ? "from rng" : text("seed ", p.seed, ", offset ", p.offset);
  return text(p.dropout, ", quantised to ", 1 - rate, " (keeps ", rate * 256, "/256); ", bits);
}

std::string blocks(const Problem::Blocks &b) {
  const double all = double(b.batch) * double(b.heads) * double(b.rows) * double(b.cols);
  std::string share = all > 0 ? text(" (", Digits{100 * double(b.kept) / all, 3}, "%)") : "";
  return text(b.block_q, " x ", b.block_k, ", ", b.rows, " x ", b.cols, " blocks over B ", b.batch, ", H ", b.heads, ", ", b.kept, " kept",
              share, b.transposed ? ", with the transpose" : "");
}

std::string captured(const Captured &c) { return text(name(c.dtype), " ", tuple(c.size, c.rank)); }

// Along which lines the gradient of captured tensor n is summed before it is scattered, for each LOAD.
std::string sums(const score::GradientProgram &program, int32_t n) {
  std::string found;
  for (const score::LoadGradient &g : program.loads)
    if (program.graph[g.load].captured == n)
      found += (found.empty() ? ", summed along " : ", ") + std::string(g.lines == score::Lines::rows        ? "rows"
                                                                        : g.lines == score::Lines::columns   ? "columns"
                                                                        : g.lines == score::Lines::diagonals ? "diagonals"
                                                                                                             : "nothing: pair by pair");
  return found.empty() ? ": 0, for the score does not depend on it smoothly" : found;
}

void asked(Page &page, const Problem &p, const Execution &e) {
  page.line("shape", shape(p));
  page.line("dtype", text(name(p.dtype), p.quantised() ? text(", k and v ", name(p.quantised_as)) : "", " on ",
                          p.device_type == STROBE_CPU ? text("the CPU, ", e.threads, e.threads == 1 ? " thread" : " threads")
                                                      : text("CUDA device ", p.device_index)));
  page.line("scale", text(p.scale));
  if (p.program)
    for (const auto &[label, value] : score::in_words(*p.program)) page.line(label, value);
  const std::pair<const char *, const Captured &> read[] = {
#define STROBE_CAPTURED(name, place) {#name, p.place},
#include "strobe/fields.inc"
  };
  for (const auto &[what, tensor] : read)
    if (tensor) page.line(what, captured(tensor));
  const std::pair<const char *, const Captured &> gradients[] = {
#define STROBE_DCAPTURED(name, place) {#name, p.place},
#include "strobe/fields.inc"
  };
  for (int32_t n = 0; n < STROBE_MOST_CAPTURED; n++)
    if (const auto &[what, tensor] = gradients[n]; tensor) page.line(what, text(captured(tensor), sums(*p.gradient_program, n)));
  if (p.window_left != kUnbounded || p.window_right != kUnbounded)
    page.line("window", text(bound(p.window_left), " keys to the left, ", bound(p.window_right), " to the right",
                             p.window_left == kUnbounded && p.window_right == 0 ? " (causal)" : ""));
  page.line("alignment", p.bottom_right ? text("bottom right: the last query sees the last key", p.seqused_k ? " that counts" : "")
                                        : "top left: the first query sees the first key");
  if (p.part)
    page.line("part", text(p.part.count_q, " ranges of queries and ", p.part.count_k, " of keys of up to ", p.part.most_q, " and ",
                           p.part.most_k, "; heads from ", p.part.first_head, " of ", p.part.heads, ", sequences from ", p.part.first_batch,
                           p.part.partial ? "; partial: float32 results, to be merged" : ""));
  std::string extras;
  for (auto [present, what] : {std::pair{bool(p.mask), "mask"},
                               {bool(p.bias), "bias"},
                               {bool(p.alibi_slopes), "ALiBi"},
                               {bool(p.sinks), "sinks"},
                               {p.seqused_k != nullptr, "seqused_k"},
                               {p.page_size > 0, "page_table"},
                               {p.quantised() && !p.scaled_by_channel(), "k_scale and v_scale"},
                               {p.quantised() && p.scaled_by_channel(), "k_scale by channel and v_scale"},
                               {bool(p.max_logit), "max_logit"},
                               {bool(p.column_sums), "column_sums"}})
    if (present) extras += (extras.empty() ? "" : ", ") + std::string(what);
  if (!extras.empty()) page.line("with", extras);
  if (p.blocks.present) page.line("blocks", blocks(p.blocks));
  if (p.dropout > 0) page.line("dropout", dropout(p));
  if (p.wishes.tile_q || p.wishes.tile_k)
    page.line("tile wish", text(p.wishes.tile_q ? std::to_string(p.wishes.tile_q) : "any", " x ",
                                p.wishes.tile_k ? std::to_string(p.wishes.tile_k) : "any"));
  std::string wishes;
  const std::pair<bool, const char *> modes[] = {
#define STROBE_MODE(name) {p.name, #name},
#include "strobe/fields.inc"
  };
  for (auto [on, what] : modes)
    if (on) wishes += (wishes.empty() ? "" : ", ") + std::string(what);
  if (!p.wishes.engine.empty()) wishes += (wishes.empty() ? "" : ", ") + ("engine " + p.wishes.engine);
  if (!wishes.empty()) page.line("options", wishes);
}

std::string in_words(const Answer &answer) {
  if (const auto *reason = std::get_if<std::string>(&answer)) return "no: " + *reason;
  const Plan &plan = std::get<Plan>(answer);
  return text(duration(plan.predicted_seconds), " predicted; ", plan.kernel, "; tile ", plan.tile_q, " x ", plan.tile_k, "; workspace ",
              size(plan.workspace_bytes));
}

} // namespace

std::string explain(const Problem &problem, const Execution &execution, Operation operation, const Choice &choice) {
  Page page;
  for (const Choice::Row &row : choice.rows) page.fit(row.engine->name());
  page.heading(text("attention, ", name(operation)));
  asked(page, problem, execution);
  page.heading("engines");
  for (const Choice::Row &row : choice.rows)
    if (!stands_elsewhere(row, choice, problem)) page.line(row.engine->name(), in_words(row.answer));
  page.heading("choice");
  try {
    const Decision decision = decide(problem, execution, operation, choice);
    page.line(decision.engine->name(), !problem.wishes.engine.empty() ? "asked for by name"
                                       : choice.follows               ? "the forward's engine, whose LSE the backward takes"
                                       : problem.invariant ? "invariant: the first one that takes the dtype, head dimensions and options"
                                                           : "the least predicted time");
    for (const std::string &note : decision.plan.notes) page.line("note", note);
  } catch (const Error &refusal) {
    page.line("none", refusal.what());
  }
  return page.str();
}

} // namespace strobe
