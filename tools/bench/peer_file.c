/* SPDX-License-Identifier: Apache-2.0 */
#include "peer_file.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "common/command.h"

attn_status peer_file_open(struct peer_file *file, const char *path, struct attn_error *error)
{
    const struct {
        const char *name;
        void *function;
    } functions[] = {{"peer_name", &file->name},
                     {"peer_create", &file->create},
                     {"peer_bind", &file->bind},
                     {"peer_run", &file->run},
                     {"peer_destroy", &file->destroy}};
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* closed with the process */
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *symbol = library != NULL ? dlsym(library, functions[i].name) : NULL;
        if (symbol == NULL) {
            const char *why = dlerror();
            return command_error(error, ATTN_ERROR_NOT_FOUND, "", "%s", why != NULL ? why : path);
        }
        memcpy(functions[i].function, &symbol, sizeof symbol);
    }
    return ATTN_OK;
}

static attn_status run(void *user, int32_t copy, struct attn_error *error)
{
    struct peer *peer = user;
    int code = peer->file->run(peer->state, copy);
    if (code != 0 && error != NULL) {
        snprintf(error->message, sizeof error->message, "peer_run gave %d", code);
        error->status = ATTN_ERROR_INTERNAL;
    }
    return code == 0 ? ATTN_OK : ATTN_ERROR_INTERNAL;
}

attn_status peer_init(struct peer *peer, const struct peer_file *file,
                      const struct measured *measured, struct attn_error *error)
{
    const struct measured_layer *layer = &measured->layer;
    char why[256] = "";
    *peer = (struct peer){.file = file, .work = measured->work};
    peer->work.run = run;
    peer->work.user = peer;
    peer->state = file->create(&layer->desc, measured->params, &measured->batch, why);
    if (peer->state == NULL) {
        return command_error(error, ATTN_ERROR_UNSUPPORTED, "", "%.*s", (int)sizeof why - 1, why);
    }
    for (int32_t i = 0; i < measured->num_layers; i++) {
        const struct measured_io *io = &measured->io[i];
        int code = file->bind(peer->state, &io->k_view, &io->v_view, &io->step.io);
        if (code != 0) {
            peer_finish(peer);
            return command_error(error, ATTN_ERROR_UNSUPPORTED, "", "peer_bind gave %d", code);
        }
    }
    return ATTN_OK;
}

void peer_finish(struct peer *peer)
{
    if (peer->state != NULL) {
        peer->file->destroy(peer->state);
    }
    peer->state = NULL;
}
