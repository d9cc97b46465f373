/* SPDX-License-Identifier: Apache-2.0 */
#include "select/composition.h"

const struct composition *const compositions[MAX_COMPOSITIONS + 1] = {
    [COMPOSITION_CASCADE] = &composition_cascade,
    [COMPOSITION_CONTEXT_PARALLEL] = &composition_context_parallel,
    [COMPOSITION_CHUNKED] = &composition_chunked,
    [COMPOSITION_MLA] = &composition_mla,
    [COMPOSITION_RECURRENT] = &composition_recurrent,
    [COMPOSITION_SINK] = &composition_sink,
    [COMPOSITION_ENCODER] = &composition_encoder,
    [COMPOSITION_OUTPUT_QUANT] = &composition_output_quant,
};
