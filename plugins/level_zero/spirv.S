/* SPDX-License-Identifier: Apache-2.0 */
/* A SPIR-V module in the plugin, and its entry in the table `level_zero_modules` (struct module of
 * device.c), whose ends the linker names. */
    .section .rodata.level_zero, "a"
    .balign 64
module:
    .incbin SPIRV_FILE
module_end:
    .section level_zero_modules, "aw"
    .balign 8
    .quad module
    .quad module_end - module
    .quad SPIRV_DEVICES
    .section .note.GNU-stack, "", %progbits
