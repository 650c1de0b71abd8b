#define STROBE_ISA avx2
#define STROBE_VECTOR_BYTES 32
#include "fma_table.h"
