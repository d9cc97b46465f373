/* SPDX-License-Identifier: Apache-2.0 */
/* A bundle of code objects in the plugin, and its address in the table `hip_bundles`, whose ends the
 * linker names. */
    .section .rodata.hip, "a"
    .balign 4096
bundle:
    .incbin HIP_FILE
    .section hip_bundles, "aw"
    .balign 8
    .quad bundle
    .section .note.GNU-stack, "", %progbits
