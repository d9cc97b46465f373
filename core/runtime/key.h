/* SPDX-License-Identifier: Apache-2.0 */
/* On what the answer of a probe depends: the plugin's file, and the machine around it. */
#ifndef CORE_RUNTIME_KEY_H
#define CORE_RUNTIME_KEY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

/* What belongs to another user, host, boot or choice of devices has another name and lies side by
 * side; what replaced an earlier state under the same name has another state. */
struct machine {
    uint64_t name; /* user, host, boot, the vendors' visibility variables */
    /* drivers, device nodes, CPU, installed libraries, version of libattn and of its ABI */
    uint64_t state;
};

/* One plugin file as it was when it was probed. */
struct probe_key {
    uint64_t state; /* struct machine's */
    uint64_t device;
    uint64_t inode;
    uint64_t size;
    uint64_t modified; /* ns */
    uint64_t changed;  /* ns: permissions and owner, too */
};

/* Looks at the machine. Allocates nothing through a host, fails never: what is not there is a
 * state, too. */
struct machine machine_read(void);

void probe_key_set(struct probe_key *key, const struct machine *machine, const struct stat *info);
/* The same file, whatever the machine. */
bool probe_key_same_file(const struct probe_key *a, const struct probe_key *b);

#endif
