#include "cuda/program/part.h"

#include <algorithm>

#include "../../../kernels/attention/dq_sum.h"
#include "../../../kernels/attention/part.h"
#include "../../../kernels/passes/config.h"
#include "cuda/program/arguments.h"

namespace strobe::cuda {

template <class V> void each_pointer(const WordArguments &a, V &visit) { visit(a.to); }

namespace {

// The ranges of each sequence. Ranges that touch are joined. Empty ranges, which the list may have anywhere, come last.
struct Ranges {
  std::vector<HeldRange> all;
  int32_t count = 0, sequences = 0;
};
Ranges joined(const RowRange *ranges, int64_t count, int64_t sequences) {
  std::vector<std::vector<HeldRange>> found(static_cast<size_t>(sequences));
  Ranges result{.all = {}, .sequences = int32_t(sequences)};
  for (int64_t b = 0; b < sequences; b++) {
    std::vector<HeldRange> &own = found[static_cast<size_t>(b)];
    for (int64_t n = 0; n < count; n++) {
      const RowRange &r = ranges[b * count + n];
      if (r.length == 0) continue;
      if (!own.empty() && own.back().end() == r.start)
        own.back().length += i32(r.length);
      else
        own.push_back({i32(r.start), i32(r.length), i32(r.local)});
    }
    result.count = std::max(result.count, int32_t(own.size()));
  }
  for (const std::vector<HeldRange> &own : found) {
    const HeldRange last = own.empty() ? HeldRange{0, 0, 0} : own.back(), none{last.end(), 0, last.local + last.length};
    result.all.insert(result.all.end(), own.begin(), own.end());
    result.all.insert(result.all.end(), static_cast<size_t>(result.count) - own.size(), none);
  }
  return result;
}
Ranges queries(const Problem &p) { return joined(p.part.q, p.part.count_q, p.part.batch_q); }
Ranges keys(const Problem &p) { return joined(p.part.k, p.part.count_k, p.part.batch_k); }

class Words {
public:
  std::vector<int32_t> all = std::vector<int32_t>(sizeof(PartTable) / sizeof(int32_t));

  int32_t add(const Ranges &ranges) {
    const int32_t at = int32_t(all.size());
    for (const HeldRange &r : ranges.all) all.insert(all.end(), {r.start, r.length, r.local});
    return at;
  }
  int32_t add(const int64_t *lengths, int64_t count) {
    const int32_t at = int32_t(all.size());
    for (int64_t b = 0; b < count; b++) all.push_back(int32_t(lengths[b]));
    return at;
  }
};

int64_t tiles_of(const Problem &p, int64_t rows, const Ranges &ranges, int64_t tile) {
  return part_tiles(rows, ranges.count, tile, p.blocks.present);
}

} // namespace

std::vector<Launch> part_table(Problem &p, Scratch &scratch) {
  const Ranges of_queries = queries(p), of_keys = keys(p);
  Words words;
  PartTable table{.lse_low = p.lse_low,
                  .first_head = i32(p.part.first_head),
                  .first_batch = i32(p.part.first_batch),
                  .count_q = of_queries.count,
                  .count_k = of_keys.count,
                  .columns = i32(p.part.most_k),
                  .step_q = of_queries.sequences > 1 ? of_queries.count : 0,
                  .step_k = of_keys.sequences > 1 ? of_keys.count : 0,
                  .step_whole_q = p.part.batch_lens_q > 1,
                  .step_whole_k = p.part.batch_lens_k > 1,
                  .ranges_q = words.add(of_queries),
                  .ranges_k = words.add(of_keys),
                  .whole_q = words.add(p.part.seqlens_q, p.part.batch_lens_q),
                  .whole_k = words.add(p.part.seqlens_k, p.part.batch_lens_k),
                  .unused = 0};
  std::memcpy(words.all.data(), &table, sizeof table);

  int32_t *to = scratch.take<int32_t>(int64_t(words.all.size()));
  p.part.table = to;
  std::vector<Launch> launches;
  for (size_t first = 0; first < words.all.size(); first += size_t(kMostWords)) {
    WordArguments a{};
    a.to = to + first, a.count = i32(std::min<size_t>(words.all.size() - first, size_t(kMostWords)));
    std::copy_n(words.all.begin() + int64_t(first), a.count, a.words);
    launches.push_back(Launch(kWriteWords, passes::WordsConfig{}, 1, passes::WordsConfig::threads(), 0, a));
  }
  return launches;
}

bool begins_aligned(const Problem &p) {
  for (const Ranges &side : {queries(p), keys(p)})
    for (const HeldRange &r : side.all)
      if (r.length > 0 && r.start % 16 != 0) return false;
  return true;
}

int64_t query_tiles(const Problem &p, int64_t tile) { return p.part ? tiles_of(p, p.seqlen_q, queries(p), tile) : tiles(p.seqlen_q, tile); }
bool worth_numbering(const Problem &p, int64_t rows, int64_t longest, int64_t tile) {
  return numbers_tiles(p) && 2 * count_packed_tiles(rows, p.batch, tile) < p.batch * tiles(longest, tile);
}
int64_t key_tiles(const Problem &p, int64_t tile) { return p.part ? tiles_of(p, p.seqlen_k, keys(p), tile) : tiles(p.seqlen_k, tile); }

int64_t all_query_tiles(const Problem &p, const Inputs &in, int64_t tile) {
  if (!p.part) return count_query_tiles(in, tile);
  if (!p.varlen) return p.batch * p.heads * query_tiles(p, tile);
  return p.heads * (p.total_q / tile + p.batch * queries(p).count * spare_tiles(p.blocks.present)) + 1;
}

} // namespace strobe::cuda
