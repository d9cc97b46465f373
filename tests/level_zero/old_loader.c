/* SPDX-License-Identifier: Apache-2.0 */
/* A libze_loader.so.1 of long ago: it has less than Level Zero 1.4. */
__attribute__((visibility("default"))) int zeInit(int flags);
int zeInit(int flags)
{
    return flags;
}
