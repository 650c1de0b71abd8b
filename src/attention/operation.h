// What a call computes, and the table of what each operation reads, writes and multiplies.
#pragma once
#include <cstdint>

#include "strobe/strobe.h"

namespace strobe {

// forward: out and lse. backward: the gradients. jvp: the derivatives of out and lse in the direction of the inputs' tangents.
// backward_jvp: the derivatives of the gradients in that direction.
enum class Operation : int32_t {
  forward = STROBE_FORWARD,
  backward = STROBE_BACKWARD,
  jvp = STROBE_JVP,
  backward_jvp = STROBE_BACKWARD_JVP
};
inline constexpr int kOperations = 4;

// The groups of tensors that operations read and write (strobe/fields.inc has the group of each tensor).
enum Tensors : uint32_t {
  kInputs = 1 << 0,               // q, k, v, bias, ...
  kResults = 1 << 1,              // out, lse
  kAuxiliary = 1 << 2,            // max_logit, column_sums
  kCotangents = 1 << 3,           // dout, dlse, delta
  kGradients = 1 << 4,            // dq, dk, dv, dbias, ...
  kTangents = 1 << 5,             // tq, tk, tv, tbias, ...
  kTangentsOfCotangents = 1 << 6, // tdout, tdlse
  kTangentsOfResults = 1 << 7     // tout, tlse
};

struct OperationRecord {
  const char *name;                // in texts, and in tuning tables
  uint32_t reads, writes;          // Tensors
  int32_t products_d, products_dv; // products of a tile: those over or of the columns of Q and K; those of the columns of V
};
inline constexpr OperationRecord kOperationRecords[kOperations] = {
    {"forward", kInputs, kResults | kAuxiliary, 1, 1},                // S; O
    {"backward", kInputs | kResults | kCotangents, kGradients, 3, 2}, // S, dK, dQ; dP, dV
    // S and, from tq and tk, its tangent; O and, from the tangents of P and of V, its tangent
    {"jvp", kInputs | kTangents, kResults | kTangentsOfResults, 3, 3},
    // S, its tangent in two products, dQ and dK in two each; dP, its tangent in two, dV in two. These are derivatives of the gradients.
    {"backward_jvp", kInputs | kTangents | kResults | kTangentsOfResults | kCotangents | kTangentsOfCotangents, kGradients, 7, 5},
};

constexpr const OperationRecord &record(Operation operation) { return kOperationRecords[int(operation)]; }
constexpr const char *name(Operation operation) { return record(operation).name; }
constexpr bool reads(Operation operation, Tensors tensors) { return record(operation).reads & tensors; }
constexpr bool writes(Operation operation, Tensors tensors) { return record(operation).writes & tensors; }

// One T for each operation.
template <class T> struct PerOperation {
  T of[kOperations];
  constexpr const T &operator[](Operation operation) const { return of[int(operation)]; }
  constexpr T &operator[](Operation operation) { return of[int(operation)]; }
};

} // namespace strobe
