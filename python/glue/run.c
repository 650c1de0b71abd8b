#include <string.h>

#include "glue.h"

enum { MOST_FIELDS = (sizeof(strobe_addresses) - sizeof(uint64_t)) / sizeof(void *) };

int32_t strobe_glue_run(const strobe_prepared *prepared, int32_t count, const uint8_t *fields, const uintptr_t *addresses, int32_t threads,
                        uintptr_t stream, uintptr_t workspace, uint64_t workspace_bytes) {
  void *all[MOST_FIELDS] = {0};
  for (int32_t i = 0; i < count; i++) all[fields[i]] = (void *)addresses[i];
  strobe_addresses at = {.size = sizeof at};
  memcpy((char *)&at + sizeof at.size, all, sizeof all);

  strobe_execution e;
  strobe_glue_execution(&e, threads);
  e.stream = (void *)stream;
  e.workspace = (void *)workspace;
  e.workspace_bytes = workspace_bytes;
  return strobe_run(prepared, &at, &e);
}
