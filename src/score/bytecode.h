// A program as instructions, each of which computes many pairs of queries and keys at once. It is made once for calls of one shape, for all
// instruction sets; src/cpu/program.h executes it. The instruction sets' files read these structs, so they have no functions to share.
#pragma once
#include <memory>

#include "attention/attention.h"
#include "score/program.h"

namespace strobe::score {

// What a value depends on besides the head and its sequence. A value is computed once for each head, query, key, or pair of both.
enum class Stage : uint8_t { head, query, key, pair };
// How a value is stored. narrow: an integer, or of FP64 any integer, in as many bits as a real has; wide: an integer in 64 bits; mask: all
// bits of a real's size.
enum class Type : uint8_t { mask, narrow, wide, real };

// Operations besides those of Op.
enum : int32_t {
  kWiden = 1000, // narrow to wide
  kNarrow,       // wide to narrow: the value is known to fit
  kIndex,        // in[1] + stride * (in[0] as an index of an axis of `size` elements), in elements of the captured tensor
  kElement       // the captured tensor's element in[0]
};

// Where a value is stored.
struct Place {
  Stage stage = Stage::head;
  bool wide = false;
  int32_t slot = -1;
};

struct Instruction {
  int32_t op = 0;
  Type type = Type::real; // of the inputs; of a condition's branches; of a number or position itself
  Type gives = Type::real;
  bool small = false; // narrow integers below 2^20, divided by a number that is the same for all pairs
  Place out = {}, in[3] = {};
  double real = 0;            // a constant
  int64_t integer = 0;        // a constant; kIndex: the size of the axis; kElement: the captured tensor
  int64_t stride = 0;         // kIndex
  DType dtype = DType::none;  // kElement
  const char *data = nullptr; // kElement
};

// The instructions of each stage, and what they compute.
struct Code {
  struct List {
    const Instruction *at = nullptr;
    int32_t count = 0, slots = 0;
    const Place *used = nullptr; // the values of a stage that pairs read
    int32_t used_count = 0;
  } lists[4];
  Place score, slope, seen; // without slot: not computed

  bool computes() const { return score.slot >= 0 || seen.slot >= 0; }
  int32_t count(Stage stage) const { return lists[int(stage)].count; }
};

// What a program is executed on: rows x lanes scores, where the scores of a row lie side by side and rows `stride` elements apart. Queries
// are rows and keys lanes, or, if keys_are_rows, the other way round.
struct Scores {
  int64_t query = 0, key = 0;              // the first ones
  int64_t rows = 0, lanes = 0, stride = 0; // lanes: a multiple of the vector's
  bool keys_are_rows = true;
  int64_t batch = 0, head = 0, offset = 0; // as the program sees them
  double scale = 1;                        // x = scale * score
};

// The vectors of a span of values: element l of vector v in row r lies at r * row + v * step bytes and l elements.
struct Operand {
  char *at = nullptr;
  int64_t row = 0, step = 0;
};
struct Vectors {
  int64_t rows, vectors, lanes; // lanes of a vector
};

// An operation of any kind, element by element. first: the position of QUERY or KEY.
template <class T> void compute_each(const Instruction &, const Vectors &, int64_t first, const Operand &out, const Operand *in);

// The codes of a LOAD whose captured tensor wants a gradient. Both leave their result where the scores were.
struct LoadCode {
  int32_t captured = 0;
  Lines lines = Lines::general;
  Code slope, place; // the derivative; a narrow integer, the element among all of the tensor's in the order of its axes
  bool slope_is_one = false, slope_reads_score = false, place_reads_score = false;
  Code curvature, rest; // of a TangentLoad; without slot: 0
};

// What a TangentProgram adds. Each leaves its result where the scores before the program were; without slot: it is 0.
struct TangentCode {
  Code rest, curvature, rest_of_slope;
};

struct Bytecode : BuiltIn { // the numbers of its form
  Code forward, backward;   // backward: with the slope
  bool curved = false;      // whether scores are not linear in q.k
  TangentCode tangents;
  const LoadCode *loads = nullptr;
  int32_t load_count = 0;
  // Executes code on s, scores before the program, in place; a hidden pair's score becomes -inf. slopes (optional): receives df/dx.
  void (*run)(const Code &, const Scores &, char *scratch, void *s, void *slopes) = nullptr;
  int64_t scratch_bytes = 0;
};

// Values that the executor holds at a time.
inline constexpr int64_t kValuesAtOnce = 512, kRowsAtOnce = 64, kVectorRoom = 128; // kVectorRoom: bytes of a vector, if its lanes were wide

// The bytecode of problem.program. If its score is a form (softcap, hyperbolic), engines compute it by their own code, and only the mask is
// compiled.
std::shared_ptr<Bytecode> compile(const Problem &);

} // namespace strobe::score
