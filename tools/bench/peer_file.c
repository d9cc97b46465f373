/* SPDX-License-Identifier: Apache-2.0 */
/* --peer: a file of peer.h's functions, timed over the tensors that a backend was measured with. */
#include "without_core.h"

#include <dlfcn.h>
#include <stdlib.h>
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

struct peer {
    const struct peer_file *file;
    void *state;
    struct work work; /* as much of it as of the backend's */
};

static attn_status run(void *user, int32_t copy, struct attn_error *error)
{
    struct peer *peer = user;
    struct attn_error unread;
    const int code = peer->file->run(peer->state, copy);
    return code == 0 ? ATTN_OK
                     : command_error(error != NULL ? error : &unread, ATTN_ERROR_INTERNAL, "",
                                     "peer_run gave %d", code);
}

static void destroy(void *user)
{
    struct peer *peer = user;
    if (peer->state != NULL) {
        peer->file->destroy(peer->state);
    }
    free(peer);
}

static attn_status bind(struct peer *peer, const struct measured *measured,
                        struct attn_error *error)
{
    char why[256] = "";
    peer->state =
        peer->file->create(&measured->layer.desc, measured->params, &measured->batch, why);
    if (peer->state == NULL) {
        return command_error(error, ATTN_ERROR_UNSUPPORTED, "", "%.*s", (int)sizeof why - 1, why);
    }
    for (int32_t i = 0; i < measured->num_layers; i++) {
        const struct measured_io *io = &measured->io[i];
        const int code = peer->file->bind(peer->state, &io->k_view, &io->v_view, &io->step.io);
        if (code != 0) {
            return command_error(error, ATTN_ERROR_UNSUPPORTED, "", "peer_bind gave %d", code);
        }
    }
    return ATTN_OK;
}

attn_status peer_create(const struct work **work, const struct peer_file *file,
                        const struct measured *measured, struct attn_error *error)
{
    struct peer *peer = command_calloc(1, sizeof *peer);
    *peer = (struct peer){.file = file, .work = measured->work};
    peer->work.run = run;
    peer->work.destroy = destroy;
    peer->work.user = peer;
    attn_status status = bind(peer, measured, error);
    return work_made(&peer->work, status, work);
}
