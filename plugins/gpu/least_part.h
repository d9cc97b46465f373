/* SPDX-License-Identifier: Apache-2.0 */
/* What hosts and kernels/cut.h have to agree on. A header of its own, since params.h is included
 * everywhere. */
#ifndef GPU_LEAST_PART_H
#define GPU_LEAST_PART_H

#define GPU_LEAST_PART 8 /* tiles of a part of an item, at least */

#endif
