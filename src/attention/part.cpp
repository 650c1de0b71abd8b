#include "attention/part.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/tensor_check.h"
#include "attention/versioned.h"

namespace strobe {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max(); // the most positions, heads and sequences: dropout counts them in 32 bits

struct Lists {
  std::vector<RowRange> q, k;
  std::vector<int64_t> seqlens_q, seqlens_k;
};

class PartChecks {
public:
  PartChecks(const strobe_part &part, int64_t batch, Reasons &reasons)
      : p_(read_versioned("part", &part, reasons)), batch_(batch), reasons_(reasons) {}

  // The integers of a list with these axes. Null, with reasons, if the list cannot be read.
  std::optional<std::vector<int64_t>> ints(const char *name, const strobe_tensor *tensor, Axes axes) {
    if (!tensor) {
      reasons_.add(name, Code::missing, "missing; accepted is a list in host memory");
      return {};
    }
    TensorChecks checks(reasons_);
    if (!checks.accept_list(name, *tensor, axes, {DType::i64})) return {};
    if (tensor->device_type != STROBE_CPU) {
      reasons_.add(name, Code::device, "lies on a CUDA device; accepted is a list in host memory");
      return {};
    }
    int64_t count = 1;
    for (int32_t a = 0; a < tensor->rank; a++) count *= tensor->shape[a];
    std::vector<int64_t> list(static_cast<size_t>(count));
    gather(*tensor, sizeof(int64_t), list.data());
    return list;
  }

  bool lengths(const char *name, const strobe_tensor *tensor, std::vector<int64_t> &to) {
    std::optional<std::vector<int64_t>> found = ints(name, tensor, {{"B", batch_, true}});
    if (!found) return false;
    to = std::move(*found);
    for (size_t b = 0; b < to.size(); b++)
      if (to[b] < 0 || to[b] > kMost) {
        reasons_.add(name, Code::list, "{0} at [{1}]; accepted are 0 to {2}", to[b], b, kMost);
        return false;
      }
    return true;
  }

  bool ranges(const char *name, const strobe_tensor *tensor, const char *of, const std::vector<int64_t> &seqlens,
              std::vector<RowRange> &to) {
    std::optional<std::vector<int64_t>> found = ints(name, tensor, {{"B", batch_, true}, {"n"}, {"start and length", 2}});
    if (!found) return false;
    const int64_t count = tensor->shape[1], sequences = tensor->shape[0];
    if (sequences > 1 && seqlens.size() > 1 && sequences != int64_t(seqlens.size())) { // possible only if the batch size is not known
      reasons_.add(name, Code::shape, "ranges of {0} sequences; accepted are those of {1}, as {2} has, or of 1", sequences, seqlens.size(),
                   of);
      return false;
    }
    for (int64_t b = 0; b < sequences; b++) {
      // Ranges that all sequences share must fit the shortest one.
      const int64_t most = sequences > 1 && seqlens.size() > 1 ? seqlens[b] : shortest(seqlens);
      int64_t before = 0, local = 0;
      for (int64_t n = 0; n < count; n++) {
        const int64_t start = (*found)[2 * (b * count + n)], length = (*found)[2 * (b * count + n) + 1];
        if (start < 0 || length < 0 || start > most || length > most - start) {
          reasons_.add(name, Code::list,
                       "({0}, {1}) at [{2}, {3}]; accepted are a start and a length within the {4} positions that {5} says", start, length,
                       b, n, most, of);
          return false;
        }
        if (length > 0 && start < before) {
          reasons_.add(
              name, Code::list,
              "({0}, {1}) at [{2}, {3}] begins before {4}, where the range before ends; accepted are ascending and disjoint ranges", start,
              length, b, n, before);
          return false;
        }
        to.push_back({start, length, local});
        if (length > 0) before = start + length;
        local += length;
      }
    }
    return true;
  }

  std::optional<Problem::Part> part(int64_t heads) {
    const auto lists = std::make_shared<Lists>();
    bool good = lengths("part.seqlens_q", p_.seqlens_q, lists->seqlens_q) &&
                ranges("part.q_ranges", p_.q_ranges, "seqlens_q", lists->seqlens_q, lists->q);
    good &= lengths("part.seqlens_k", p_.seqlens_k, lists->seqlens_k) &&
            ranges("part.k_ranges", p_.k_ranges, "seqlens_k", lists->seqlens_k, lists->k);
    good &= whole("part.first_head", p_.first_head) & whole("part.heads", p_.heads) & whole("part.first_batch", p_.first_batch);
    if (p_.partial != 0 && p_.partial != 1) reasons_.add("part.partial", Code::value, "{0}; accepted is 0 or 1", p_.partial), good = false;
    if (p_.reserved) reasons_.add("part.reserved", Code::version, "{0}; accepted is 0", p_.reserved), good = false;
    if (good && heads >= 0 && p_.heads && p_.heads - heads < p_.first_head) {
      reasons_.add("part.heads", Code::heads,
                   "{0} with first_head {1} and {2} heads of {3}; accepted are {4} or more, or {5} for that many", p_.heads, p_.first_head,
                   heads, Argument{"q"}, p_.first_head + heads, Absent{"0"});
      good = false;
    }
    if (!good) return {};
    Problem::Part made;
    made.q = lists->q.data(), made.k = lists->k.data();
    static const RowRange none{}; // for a sequence without ranges
    if (!made.q) made.q = &none;
    if (!made.k) made.k = &none;
    made.count_q = p_.q_ranges->shape[1], made.count_k = p_.k_ranges->shape[1];
    made.batch_q = p_.q_ranges->shape[0], made.batch_k = p_.k_ranges->shape[0];
    made.seqlens_q = lists->seqlens_q.data(), made.seqlens_k = lists->seqlens_k.data();
    made.batch_lens_q = p_.seqlens_q->shape[0], made.batch_lens_k = p_.seqlens_k->shape[0];
    for (int64_t n : lists->seqlens_q) made.most_q = std::max(made.most_q, n);
    for (int64_t n : lists->seqlens_k) made.most_k = std::max(made.most_k, n);
    made.first_head = p_.first_head, made.first_batch = p_.first_batch;
    made.heads = p_.heads ? p_.heads : p_.first_head + std::max<int64_t>(heads, 0);
    made.partial = p_.partial;
    made.lists = lists;
    return made;
  }

private:
  bool whole(const char *name, int64_t x) {
    if (x >= 0 && x <= kMost) return true;
    reasons_.add(name, Code::value, "{0}; accepted is 0 to {1}", x, kMost);
    return false;
  }
  static int64_t shortest(const std::vector<int64_t> &seqlens) {
    return seqlens.empty() ? 0 : *std::min_element(seqlens.begin(), seqlens.end());
  }

  const strobe_part p_;
  int64_t batch_;
  Reasons &reasons_;
};

} // namespace

std::optional<Problem::Part> check_part(const strobe_part &part, int64_t batch, int64_t heads, Reasons &reasons) {
  return PartChecks(part, batch < 0 ? kAny : batch, reasons).part(heads);
}

static int64_t held_by(const RowRange *ranges, int64_t count) {
  int64_t held = 0;
  for (int64_t n = 0; n < count; n++) held += ranges[n].length;
  return held;
}

int64_t most_held(const RowRange *ranges, int64_t range_batch, int64_t count) {
  int64_t most = 0;
  for (int64_t b = 0; b < range_batch; b++) most = std::max(most, held_by(ranges + b * count, count));
  return most;
}

void check_held(const char *argument, const RowRange *ranges, int64_t range_batch, int64_t count, int64_t batch, const int32_t *cu,
                int64_t rows, Reasons &reasons) {
  // If all sequences share ranges and lengths, only the first one is checked, because the batch size itself has not been checked yet.
  for (int64_t b = 0; b < (cu || range_batch > 1 ? batch : std::min<int64_t>(batch, 1)); b++) {
    const int64_t held = held_by(ranges + (range_batch > 1 ? b : 0) * count, count);
    const int64_t wanted = cu ? int64_t{cu[b + 1]} - cu[b] : rows;
    if (held != wanted)
      return reasons.add(argument, Code::list, "hold {0} rows of sequence {1}; accepted is {2}, as many as it has here", held, b, wanted);
  }
}

} // namespace strobe
