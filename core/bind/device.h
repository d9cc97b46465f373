/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of struct attn_api for engines without device memory of their own; meanings stand in
 * attn/api.h. */
#ifndef CORE_BIND_DEVICE_H
#define CORE_BIND_DEVICE_H

#include "bind/bound.h"
#include "util/slots.h"

struct attn_open_device {
    attn_runtime *runtime;
    struct attn_device device;
    struct instance instance; /* the host's: host_kernels, without a handle */
};

SLOT_OF(attn_device_services, open, device_open);
SLOT_OF(attn_device_services, close, device_close);
SLOT_OF(attn_device_services, allocate, device_allocate);
SLOT_OF(attn_device_services, free, device_free);
SLOT_OF(attn_device_services, copy, device_copy);
SLOT_OF(attn_device_services, fill, device_fill);
SLOT_OF(attn_device_services, of_address, device_of_address);
SLOT_OF(attn_device_services, create_stream, device_stream_create);
SLOT_OF(attn_device_services, destroy_stream, device_stream_destroy);
SLOT_OF(attn_device_services, synchronize, device_synchronize);
SLOT_OF(attn_device_services, begin_capture, device_capture_begin);
SLOT_OF(attn_device_services, end_capture, device_capture_end);
SLOT_OF(attn_device_services, launch_graph, device_graph_launch);
SLOT_OF(attn_device_services, destroy_graph, device_graph_destroy);

#endif
