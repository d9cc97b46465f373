// SPDX-License-Identifier: Apache-2.0
//! Which backend would serve a layer, from Rust. The bindings are bindgen's, of attn/api.h alone:
//!     bindgen abi/attn/api.h -- -I abi > attn.rs && ATTN_BINDINGS=$PWD/attn.rs rustc examples/rust/main.rs
#![allow(non_camel_case_types, non_upper_case_globals, non_snake_case, dead_code, deref_nullptr, improper_ctypes)]
include!(env!("ATTN_BINDINGS"));
use std::ffi::{CStr, CString};
extern "C" {
    fn dlopen(file: *const i8, mode: i32) -> *mut std::ffi::c_void;
    fn dlsym(library: *mut std::ffi::c_void, symbol: *const i8) -> *mut std::ffi::c_void;
}

fn main() {
    unsafe {
        let path = CString::new(std::env::args().nth(1).unwrap_or("libattn.so.1".into())).unwrap();
        let library = dlopen(path.as_ptr(), 2); // RTLD_NOW
        assert!(!library.is_null(), "libattn cannot be opened");
        let get: attn_get_api_fn = Some(std::mem::transmute(dlsym(library, b"attn_get_api\0".as_ptr() as *const i8)));
        let mut error: attn_error = std::mem::zeroed();
        error.struct_size = std::mem::size_of::<attn_error>() as _;
        let (mut api, mut runtime, mut chosen) = (std::ptr::null(), std::ptr::null_mut(), std::ptr::null_mut());
        assert_eq!(get.unwrap()(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &mut api, &mut error), 0);
        let api: &attn_api = &*api;
        assert_eq!(api.runtime_create.unwrap()(std::ptr::null(), &mut runtime, &mut error), 0);
        let name = CString::new("layer").unwrap();
        let mut layer: attn_layer_desc = std::mem::zeroed();
        layer.struct_size = std::mem::size_of::<attn_layer_desc>() as _;
        (layer.name, layer.dtype) = (name.as_ptr(), attn_dtype_id_ATTN_DTYPE_BF16 as i32);
        (layer.num_q_heads, layer.num_kv_heads, layer.head_size, layer.scale, layer.causal) = (32, 8, 128, 0.088, 1);
        let status = api.select.unwrap()(runtime, std::ptr::null(), &(&layer as *const _), 1, &mut chosen, &mut error);
        assert_eq!(status, 0, "{}", CStr::from_ptr(error.message.as_ptr()).to_string_lossy());
        let mut choice: attn_choice = std::mem::zeroed();
        choice.struct_size = std::mem::size_of::<attn_choice>() as _;
        api.assignment_choice.unwrap()(chosen, 0, 1, &mut choice);
        println!("served by {}; causal is bit {:#x}", CStr::from_ptr(choice.name).to_string_lossy(), ATTN_TERM_CAUSAL);
        api.assignment_destroy.unwrap()(chosen);
        api.runtime_destroy.unwrap()(runtime);
    }
}
