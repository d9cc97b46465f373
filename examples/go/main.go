// SPDX-License-Identifier: Apache-2.0

// Which backend would serve a layer, from Go: cgo takes the constants and structs of attn/api.h as they are, and a C
// line calls each slot, since Go calls no function pointers of C.
//
//	CGO_CFLAGS=-I$PWD/abi go run examples/go/main.go path/to/libattn.so.1
package main

/*
#cgo LDFLAGS: -ldl
#include <attn/api.h>
#include <dlfcn.h>
#include <stdlib.h>

static const struct attn_api *open_api(const char *path, struct attn_error *error)
{
	void *library = dlopen(path, RTLD_NOW);
	attn_get_api_fn *get = library ? (attn_get_api_fn *)dlsym(library, ATTN_GET_API_SYMBOL) : NULL;
	const struct attn_api *api = NULL;
	return get && get(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, error) == ATTN_OK ? api : NULL;
}
static attn_status create(const struct attn_api *a, attn_runtime **r, struct attn_error *e) { return a->runtime_create(NULL, r, e); }
static attn_status choose(const struct attn_api *a, attn_runtime *r, const struct attn_layer_desc *l, attn_assignment **out,
                          struct attn_error *e) { return a->select(r, NULL, &l, 1, out, e); }
static const char *name(const struct attn_api *a, const attn_assignment *s)
{
	struct attn_choice choice = {.struct_size = sizeof choice};
	a->assignment_choice(s, 0, ATTN_PHASE_DECODE, &choice);
	return choice.name;
}
*/
import "C"

import (
	"fmt"
	"os"
)

func main() {
	e := (*C.struct_attn_error)(C.calloc(1, C.sizeof_struct_attn_error))
	e.struct_size = C.sizeof_struct_attn_error
	api := C.open_api(C.CString(os.Args[1]), e)
	layer := (*C.struct_attn_layer_desc)(C.calloc(1, C.sizeof_struct_attn_layer_desc))
	layer.struct_size, layer.name = C.sizeof_struct_attn_layer_desc, C.CString("layer")
	layer.dtype, layer.num_q_heads, layer.num_kv_heads = C.ATTN_DTYPE_BF16, 32, 8
	layer.head_size, layer.scale, layer.causal = 128, 0.088, 1
	var runtime *C.attn_runtime
	var chosen *C.attn_assignment
	if api == nil || C.create(api, &runtime, e) != 0 || C.choose(api, runtime, layer, &chosen, e) != 0 {
		fmt.Fprintln(os.Stderr, C.GoString(&e.message[0]))
		os.Exit(1)
	}
	fmt.Printf("served by %s; causal is bit %#x\n", C.GoString(C.name(api, chosen)), uint64(C.ATTN_TERM_CAUSAL))
}
