/* SPDX-License-Identifier: Apache-2.0 */
/* What the plugin `opaque` and its test agree on. */
#ifndef STEP_OPAQUE_H
#define STEP_OPAQUE_H

#define OPAQUE_DTYPE 0x10007
#define OPAQUE_LAYOUT 0x10008
#define OPAQUE_TAIL 8       /* bytes of a row after its numbers */
#define OPAQUE_SCALE 2      /* bytes of a row's tag */
#define OPAQUE_PAGE_HEAD 64 /* bytes of a page before its rows */

#endif
