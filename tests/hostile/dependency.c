/* SPDX-License-Identifier: Apache-2.0 */
int driver_version(void);
__attribute__((visibility("default"))) int driver_version(void)
{
    return 7;
}
