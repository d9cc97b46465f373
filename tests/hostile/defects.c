/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin with one defect in what it declares: the build makes one, attn_DEFECT.so, of each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

__attribute__((unused)) static attn_status fail(struct attn_error *error, attn_status status,
                                                const char *why)
{
    if (error != NULL) {
        error->status = status;
        strcpy(error->message, why);
    }
    return status;
}

#if defined(DEFECT_none) /* the others differ from this one */
SOUND_BUT("sound", "sound", (void)0)
#elif defined(DEFECT_duplicate_name)   /* the backend of the one before */
SOUND_BUT("second_sound", "sound", (void)0)
#elif defined(DEFECT_bad_backend_name) /* outside [a-z][a-z0-9_]* */
SOUND_BUT("bad_backend_name", "Not A Name", (void)0)
#elif defined(DEFECT_caps_size_lies)
SOUND_BUT("caps_size_lies", "caps_size_lies", caps.struct_size = SIZE_MAX)
#elif defined(DEFECT_missing_array)      /* counts head sizes and gives none */
SOUND_BUT("missing_array", "missing_array", caps.head_sizes = NULL)
#elif defined(DEFECT_preferred_layout)   /* one that it does not read */
SOUND_BUT("preferred_layout", "preferred_layout", caps.preferred_layout = ATTN_KV_LAYOUT_HND)
#elif defined(DEFECT_unknown_bits)       /* a term that this ABI does not have */
SOUND_BUT("unknown_bits", "unknown_bits", caps.terms |= UINT64_C(1) << 40)
#elif defined(DEFECT_missing_dependency) /* a vendor's library that is not on this machine */
int driver_version(void);
SOUND_BUT("missing_dependency", "missing_dependency", caps.rank[0] = driver_version())
#elif defined(DEFECT_undefined_symbol)   /* a function that no library has */
attn_status no_such_function(void);
SOUND_BUT("undefined_symbol", "undefined_symbol",
          caps.rank[0] = host->num_threads == 77 ? no_such_function() : 0)
#elif defined(DEFECT_claims_no_memory)   /* while the engine has plenty */
SOUND_BUT("claims_no_memory", "claims_no_memory", return ATTN_ERROR_OUT_OF_MEMORY)
#elif defined(DEFECT_absent) /* hardware that is not there: no defect, and not reported as one */
SOUND_BUT("absent", "absent", return fail(error, ATTN_ERROR_ABSENT, "no such accelerator"))
#elif defined(DEFECT_endless_text) /* no byte of the error's text is NUL */
SOUND_BUT("endless_text", "endless_text", memset(error->field, 'f', sizeof error->field);
          memset(error->message, 'm', sizeof error->message);
          return error->status = ATTN_ERROR_DEVICE)
#elif defined(DEFECT_table_size_large)
SOUND_TABLE_BUT("table_size_large", table.struct_size = SIZE_MAX)
#elif defined(DEFECT_table_size_small)
SOUND_TABLE_BUT("table_size_small", table.struct_size = 8)
#elif defined(DEFECT_abi_too_new)    /* answers with a version that was not offered */
SOUND_TABLE_BUT("abi_too_new", table.abi_version = ATTN_MAKE_VERSION(9, 0))
#elif defined(DEFECT_abi_refused)    /* speaks a newer ABI only, and says so */
SOUND_TABLE_BUT("abi_refused", *plugin = NULL;
                return fail(error, ATTN_ERROR_ABI_VERSION, "speaks ABI 9.0 only"))
#elif defined(DEFECT_second_version) /* a newer one of the plugin without a defect */
SOUND_PROBE_BUT("sound", caps.version = "2.0")
SOUND_ENTRY_BUT("sound", table.version = "2.0")
#elif defined(DEFECT_changes_name)   /* the next time: what was cached of it does not hold */
SOUND_TABLE_BUT("first_name", table.name = getenv("HOSTILE_SECOND") ? "second_name" : table.name)
#elif defined(DEFECT_null_slot)      /* probe, or the one that HOSTILE_SLOT names */
static int is_null(const char *slot)
{
    const char *wanted = getenv("HOSTILE_SLOT");
    return strcmp(wanted != NULL ? wanted : "probe", slot) == 0;
}
SOUND_TABLE_BUT("null_slot", table.probe = is_null("probe") ? NULL : probe;
                table.create = is_null("create") ? NULL : sound_create;
                table.destroy = is_null("destroy") ? NULL : sound_destroy)
#elif defined(DEFECT_named_by_file)  /* none: attn_NAME.so is the plugin and the backend NAME */
static char name[64];

static const char *name_of_file(void)
{
    Dl_info info;

    if (dladdr(name, &info) != 0) {
        strncpy(name, strrchr(info.dli_fname, '/') + sizeof "attn_", sizeof name - 1);
        name[strcspn(name, ".")] = '\0';
    }
    return name;
}
SOUND_TABLE_BUT(name, table.name = name_of_file())
#elif defined(DEFECT_missing_symbol) /* a library that is no plugin */
int something_else(void);
__attribute__((visibility("default"))) int something_else(void)
{
    return 1;
}
#endif
