/* SPDX-License-Identifier: Apache-2.0 */
/* Stands for a library of a profiler's ranges: counts how deep they are, and how many there were.
 */
#define EXPORTED __attribute__((visibility("default")))
EXPORTED int marker_depth, marker_count;

EXPORTED int nvtxRangePushA(const char *name);
EXPORTED int nvtxRangePop(void);

int nvtxRangePushA(const char *name)
{
    marker_count += name != 0 && name[0] != '\0';
    return marker_depth++;
}

int nvtxRangePop(void)
{
    return --marker_depth;
}
