/* SPDX-License-Identifier: Apache-2.0 */
#include "compose/composition.h"

const struct composition *const compositions[MAX_COMPOSITIONS + 1] = {
    &composition_cascade, &composition_context_parallel, &composition_chunked,
    &composition_mla,     &composition_recurrent,        &composition_sink,
    &composition_encoder, &composition_output_quant, /* behind all others */
};
