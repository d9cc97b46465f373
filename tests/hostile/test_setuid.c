/* SPDX-License-Identifier: Apache-2.0 */
/* A setuid process takes nothing from the environment: no plugin path, no cache, no selection. The
 * test runs itself with the same variables twice, once as a setuid program; root alone can make
 * one. Arguments: libattn.so.1, a plugin. */
#include <attn/api.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define NOBODY 65534
#define EXIT_SKIPPED 77

/* Inside: 10 + what a runtime says that is created with all defaults but the installed plugins. */
enum { READS = 10, READS_NOT = 11, NO_CORE = 12, NOT_SECURE = 13, WRONG = 14 };

static int inside(const char *core, int wants_secure)
{
    const struct attn_runtime_options options = {.struct_size = sizeof options,
                                                 .no_default_plugins = 1};
    struct attn_error error = ATTN_ERROR_INIT;
    const struct attn_api *api = NULL;
    attn_get_api_fn *get_api = NULL;
    attn_runtime *runtime = NULL;
    void *library = dlopen(core, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library != NULL ? dlsym(library, ATTN_GET_API_SYMBOL) : NULL;
    int32_t count = 0;
    memcpy(&get_api, &symbol, sizeof get_api);
    if (symbol == NULL ||
        get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, &error) != ATTN_OK) {
        fprintf(stderr, "%s\n", library == NULL ? dlerror() : error.message);
        return NO_CORE;
    }
    if (wants_secure != (getauxval(AT_SECURE) != 0)) {
        return NOT_SECURE;
    }
    if (api->runtime_create(&options, &runtime, &error) != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", error.field, error.message);
        return WRONG;
    }
    count = api->plugin_count(runtime);
    api->runtime_destroy(runtime);
    return count == 0 ? READS_NOT : READS;
}

static int run(const char *program, const char *mode, const char *core)
{
    int status = -1;
    const pid_t pid = fork();
    if (pid == 0) {
        execl(program, program, mode, core, (char *)NULL);
        _exit(127);
    }
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int copy_self(const char *to)
{
    static char bytes[1 << 16];
    const int in = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    const int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
    ssize_t size = 0;
    while (in >= 0 && out >= 0 && (size = read(in, bytes, sizeof bytes)) > 0) {
        if (write(out, bytes, (size_t)size) != size) {
            return -1;
        }
    }
    if (in < 0 || out < 0 || size < 0 || fchown(out, NOBODY, NOBODY) != 0 ||
        fchmod(out, 04755) != 0) {
        return -1;
    }
    close(in);
    return close(out);
}

static int skip(const char *why)
{
    printf("skipped: %s\n", why);
    return EXIT_SKIPPED;
}

static int compare(const char *folder, const char *core, const char *plugin)
{
    char program[128], cache[128];
    struct stat info;
    int as_setuid = 0;
    snprintf(program, sizeof program, "%s/setuid", folder);
    snprintf(cache, sizeof cache, "%s/cache", folder);
    setenv("ATTN_PLUGIN_PATH", plugin, 1);
    setenv("ATTN_CACHE_DIR", cache, 1);
    setenv("HOME", cache, 1);
    setenv("XDG_CACHE_HOME", cache, 1);
    if (chmod(folder, 0777) != 0 || copy_self(program) != 0) {
        return skip(strerror(errno));
    }
    setenv("ATTN_NUM_THREADS", "many", 1); /* an error where it is read */
    as_setuid = run(program, "--setuid", core);
    if (as_setuid == NOT_SECURE) {
        return skip("setuid programs are not honoured on the file system of /tmp");
    }
    if (as_setuid == NO_CORE || as_setuid == 127) {
        return skip("another user cannot read the build folder");
    }
    if (as_setuid != READS_NOT || stat(cache, &info) == 0) {
        fprintf(stderr, "the setuid process read the environment: %d\n", as_setuid);
        return EXIT_FAILURE;
    }
    if (run("/proc/self/exe", "--plain", core) != WRONG) {
        fprintf(stderr, "ATTN_NUM_THREADS is not read at all\n");
        return EXIT_FAILURE;
    }
    unsetenv("ATTN_NUM_THREADS");
    if (run("/proc/self/exe", "--plain", core) != READS || stat(cache, &info) != 0) {
        fprintf(stderr, "ATTN_PLUGIN_PATH or ATTN_CACHE_DIR is not read at all\n");
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/attn_setuid_XXXXXX", command[128];
    if (argc != 3) {
        return 2;
    }
    if (strncmp(argv[1], "--", 2) == 0) {
        /* nothing of a sanitizer's at the end */
        _exit(inside(argv[2], strcmp(argv[1], "--setuid") == 0));
    }
    if (geteuid() != 0) {
        return skip("only root can make a setuid program of another user");
    }
    if (mkdtemp(folder) == NULL) {
        return EXIT_FAILURE;
    }
    const int result = compare(folder, argv[1], argv[2]);
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) == 0 ? result : EXIT_FAILURE;
}
