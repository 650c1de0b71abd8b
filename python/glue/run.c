#include <string.h>

#include "glue.h"

enum { MOST_FIELDS = (sizeof(strobe_addresses) - sizeof(uint64_t)) / sizeof(void *) };
_Static_assert(sizeof(strobe_tensors) == sizeof(strobe_addresses), "both have the same fields in the same order");

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

int32_t strobe_glue_prepare(const strobe_attention *attention, int32_t count, const uint8_t *fields, const strobe_tensor *tensors,
                            int32_t direction, int32_t threads, int32_t reserved_sms, strobe_prepared **prepared,
                            uint64_t *workspace_bytes) {
  const strobe_tensor *all[MOST_FIELDS] = {0};
  for (int32_t i = 0; i < count; i++) all[fields[i]] = &tensors[i];
  strobe_tensors given = {.size = sizeof given};
  memcpy((char *)&given + sizeof given.size, all, sizeof all);

  strobe_execution e;
  strobe_glue_execution(&e, threads ? threads : 1); /* on a GPU their number means nothing, and 0 would be counted */
  e.reserved_sms = reserved_sms;
  int32_t status = strobe_prepare(attention, &given, &e, direction, prepared);
  if (status != STROBE_OK) return status;
  strobe_plan plan = {.size = sizeof plan};
  status = strobe_prepared_plan(*prepared, &plan);
  *workspace_bytes = plan.workspace_bytes;
  return status;
}
