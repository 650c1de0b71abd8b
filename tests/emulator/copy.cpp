// Asynchronous copies: cp.async of one thread; and what the bulk copy engine copies, runs of bytes and boxes of tensors.
#include <cstring>

#include "async.h"
#include "tensor_map.h"
#include "tile.h"

namespace strobe::emulator {
namespace {

uint32_t address_of(const Warp &warp, const Operand &o, uint32_t lane) { return static_cast<uint32_t>(warp.value(o, lane)); }

// Removes and returns the groups for which a lane waits: all of its committed groups except the last `pending`.
template <class Work> std::vector<Work> waited_for(std::vector<Work> &all, uint32_t lane, uint32_t committed, uint64_t pending) {
  auto is = [&](const Work &w) { return w.lane == lane && w.group + pending < committed; };
  std::vector<Work> found;
  std::ranges::copy_if(all, std::back_inserter(found), is);
  std::erase_if(all, is);
  return found;
}
template <auto kGroups> Tile commit() {
  return [](Warp &warp, uint32_t lanes) { for_each_lane(lanes, [&](uint32_t lane) { ((*warp.async).*kGroups)[lane]++; }); };
}

void perform(const Warp &warp, const Copy &c) {
  std::byte *to = warp.shared(c.to, c.bytes, c.bytes, Access::kWrite, c.lane);
  std::memset(to, 0, c.bytes);
  if (c.read) std::memcpy(to, global(c.from, c.read, c.bytes), c.read);
  warp.block.grid.changes++;
}
// Operands: [to], [from], bytes {, how many are read}
Tile copy(std::string_view opcode, const Operands &operands) {
  if (operands.size() < 3 || operands[2].kind != Operand::kImmediate) unsupported(opcode);
  const auto bytes = static_cast<uint32_t>(operands[2].value);
  if (bytes != 16 && (opcode.find(".cg.") != opcode.npos || (bytes != 4 && bytes != 8))) unsupported(opcode);
  return [=](Warp &warp, uint32_t lanes) {
    for_each_lane(lanes, [&](uint32_t lane) {
      const uint32_t read = operands.size() > 3 ? static_cast<uint32_t>(warp.value(operands[3], lane)) : bytes;
      if (read > bytes) throw Fault("cp.async reads more bytes than it copies");
      const Copy made = {.group = warp.async->copy_groups[lane],
                         .lane = lane,
                         .to = address_of(warp, operands[0], lane),
                         .from = warp.value(operands[1], lane),
                         .bytes = bytes,
                         .read = read};
      if (warp.block.grid.machine.late)
        warp.async->copies.push_back(made);
      else
        perform(warp, made);
    });
  };
}
Tile wait_copies(uint64_t pending) {
  return [=](Warp &warp, uint32_t lanes) {
    for_each_lane(lanes, [&](uint32_t lane) {
      for (const Copy &c : waited_for(warp.async->copies, lane, warp.async->copy_groups[lane], pending)) perform(warp, c);
    });
  };
}

void begin(Warp &warp, uint32_t lane, Transfer transfer) {
  if (Races *races = warp.block.races.get())
    transfer.perform = [known = races->begin(warp.index, lane), t = transfer, races](const Warp &any) {
      races->perform(known, t.barrier);
      t.perform(any);
    };
  if (warp.block.grid.machine.late)
    warp.block.async->transfers.push_back(std::move(transfer));
  else
    transfer.perform(warp);
}
// Operands: [to], [from], bytes, [barrier]
Tile bulk_copy(const Operands &operands) {
  return [=](Warp &warp, uint32_t lanes) {
    for_each_lane(lanes, [&](uint32_t lane) {
      const uint32_t to = address_of(warp, operands[0], lane), barrier = address_of(warp, operands[3], lane);
      const uint64_t from = warp.value(operands[1], lane);
      const auto bytes = static_cast<uint32_t>(warp.value(operands[2], lane));
      if (bytes % 16) throw Fault("a bulk copy of " + std::to_string(bytes) + " bytes, no multiple of 16");
      begin(warp, lane, {barrier, [=](const Warp &any) {
                           std::memcpy(any.shared(to, bytes, 16, Access::kAsyncWrite, 0), global(from, bytes, 16), bytes);
                           complete_bytes(any, barrier, bytes);
                         }});
    });
  };
}

// Copies the rows of a box one after another; axis 0 is contiguous. Elements outside of the tensor are zero.
void copy_box(const Warp &warp, const TensorMap &map, const int32_t *origin, uint32_t to, uint32_t barrier) {
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  uint32_t rows = 1;
  for (uint32_t axis = 1; axis < map.rank; axis++) rows *= map.box[axis];
  std::vector<std::byte> row(row_bytes);
  for (uint32_t r = 0; r < rows; r++) {
    std::ranges::fill(row, std::byte{0});
    uint64_t from = map.address;
    bool inside = true;
    for (uint32_t axis = 1, rest = r; axis < map.rank; rest /= map.box[axis++]) {
      const int64_t at = int64_t{origin[axis]} + rest % map.box[axis];
      inside = inside && at >= 0 && at < static_cast<int64_t>(map.sizes[axis]);
      from += static_cast<uint64_t>(at) * map.strides[axis];
    }
    const int64_t begin = std::max<int64_t>(origin[0], 0);
    const int64_t end = std::min<int64_t>(int64_t{origin[0]} + map.box[0], static_cast<int64_t>(map.sizes[0]));
    if (inside && begin < end) {
      const auto bytes = static_cast<size_t>(end - begin) * map.element_bytes;
      std::memcpy(row.data() + (begin - origin[0]) * map.element_bytes,
                  global(from + static_cast<uint64_t>(begin) * map.element_bytes, bytes, map.element_bytes), bytes);
    }
    for (uint32_t at = 0; at < row_bytes; at += 16) {
      const uint32_t address = to + r * row_bytes + at;
      std::memcpy(warp.shared(map.swizzled ? swizzled(address) : address, 16, 16, Access::kAsyncWrite, 0), row.data() + at, 16);
    }
  }
  complete_bytes(warp, barrier, rows * row_bytes);
}
const TensorMap &map_at(uint64_t address) {
  const auto &map = *reinterpret_cast<const TensorMap *>(global(address, sizeof(TensorMap), 64));
  if (map.magic != TensorMap::kMagic) throw Fault("no tensor map lies there that cuTensorMapEncodeTiled made");
  return map;
}
// Operands: [to], [map, {coordinates}], [barrier]
Tile box_copy(std::string_view opcode, uint32_t rank, const Operands &operands) {
  if (operands.size() != 3 || operands[1].parts.size() != rank) unsupported(opcode);
  return [=](Warp &warp, uint32_t lanes) {
    for_each_lane(lanes, [&](uint32_t lane) {
      const TensorMap map = map_at(warp.value(operands[1], lane));
      if (map.rank != rank) throw Fault("a box of another rank than the tensor map's");
      const uint32_t to = address_of(warp, operands[0], lane), barrier = address_of(warp, operands[2], lane);
      if (to % 128) throw Fault("a box goes to a shared address that is no multiple of 128");
      std::array<int32_t, TensorMap::kMostRank> origin{};
      for (uint32_t axis = 0; axis < rank; axis++) origin[axis] = static_cast<int32_t>(warp.value(operands[1].parts[axis], lane));
      begin(warp, lane, {barrier, [=](const Warp &any) { copy_box(any, map, origin.data(), to, barrier); }});
    });
  };
}
Tile prefetch(const Operand &map) {
  return [=](Warp &warp, uint32_t lanes) { for_each_lane(lanes, [&](uint32_t lane) { map_at(warp.value(map, lane)); }); };
}

void read(const Warp &warp, Addition &a) {
  if (!a.read.empty()) return;
  a.read.resize(a.bytes / sizeof(float));
  std::memcpy(a.read.data(), warp.shared(a.from, a.bytes, 16, Access::kAsyncRead, a.lane), a.bytes);
}
void perform(const Warp &warp, Addition a) {
  read(warp, a);
  float *to = reinterpret_cast<float *>(global(a.to, a.bytes, 16));
  if (a.adds)
    for (size_t n = 0; n < a.read.size(); n++) to[n] += a.read[n];
  else
    std::memcpy(to, a.read.data(), a.bytes);
  warp.block.grid.changes++;
}
// Operands: [global], [shared], bytes
Tile bulk_add(const Operands &operands, bool adds) {
  return [=](Warp &warp, uint32_t lanes) {
    for_each_lane(lanes, [&](uint32_t lane) {
      const Addition made = {.adds = adds,
                             .group = warp.async->addition_groups[lane],
                             .lane = lane,
                             .to = warp.value(operands[0], lane),
                             .from = address_of(warp, operands[1], lane),
                             .bytes = static_cast<uint32_t>(warp.value(operands[2], lane)),
                             .read = {}};
      if (made.bytes % 16) throw Fault("a bulk addition of " + std::to_string(made.bytes) + " bytes, no multiple of 16");
      if (warp.block.grid.machine.late)
        warp.async->additions.push_back(made);
      else
        perform(warp, made);
    });
  };
}
// read_only: waits only until shared memory has been read; the additions may come later.
Tile wait_additions(uint64_t pending, bool read_only) {
  return [=](Warp &warp, uint32_t lanes) {
    for_each_lane(lanes, [&](uint32_t lane) {
      WarpAsync &async = *warp.async;
      if (read_only) {
        for (Addition &a : async.additions)
          if (a.lane == lane && a.group + pending < async.addition_groups[lane]) read(warp, a);
      } else {
        for (Addition &a : waited_for(async.additions, lane, async.addition_groups[lane], pending)) perform(warp, std::move(a));
      }
    });
  };
}

} // namespace

void copies_end(Warp &warp) {
  for (Addition &a : warp.async->additions) {
    if (a.read.empty()) throw Fault("a warp ends before it has waited until a bulk addition has read shared memory");
    perform(warp, std::move(a));
  }
  warp.async->additions.clear();
}

Tile decode_copy(std::string_view opcode, const Operands &operands) {
  if (opcode == "cp.async.cg.shared.global.L2::128B" || opcode == "cp.async.cg.shared.global" || opcode == "cp.async.ca.shared.global")
    return copy(opcode, operands);
  if (opcode == "cp.async.commit_group") return commit<&WarpAsync::copy_groups>();
  if (opcode == "cp.async.wait_group") return wait_copies(operands[0].value);
  if (opcode == "cp.async.bulk.commit_group") return commit<&WarpAsync::addition_groups>();
  if (opcode == "cp.async.bulk.wait_group") return wait_additions(operands[0].value, false);
  if (opcode == "cp.async.bulk.wait_group.read") return wait_additions(operands[0].value, true);
  if (opcode == "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes") return bulk_copy(operands);
  if (opcode == "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes") return box_copy(opcode, 4, operands);
  if (opcode == "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32") return bulk_add(operands, true);
  if (opcode == "cp.async.bulk.global.shared::cta.bulk_group") return bulk_add(operands, false);
  if (opcode == "prefetch.tensormap") return prefetch(operands[0]);
  if (opcode.starts_with("cp.") || opcode.starts_with("prefetch")) unsupported(opcode);
  return {};
}

} // namespace strobe::emulator
