/* SPDX-License-Identifier: Apache-2.0 */
#include "trace_file.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "host/cache_file.h"
#include "runtime/runtime.h"
#include "util/safe_text.h"

#define LINE 4096

/* NVTX up to version 2, ROCTX of roctracer and of rocprofiler. Later NVTX and ITT have no library
 * that a process loads: each program has its own copy of their code. */
static const struct {
    const char *file, *push, *pop;
} markers[TRACE_MARKERS] = {{"libnvToolsExt.so.1", "nvtxRangePushA", "nvtxRangePop"},
                            {"libroctx64.so.4", "roctxRangePushA", "roctxRangePop"},
                            {"librocprofiler-sdk-roctx.so.1", "roctxRangePushA", "roctxRangePop"}};

static void find_markers(struct trace_file *trace)
{
    for (int32_t i = 0; i < TRACE_MARKERS; i++) {
        void *library = dlopen(markers[i].file, RTLD_LAZY | RTLD_NOLOAD); /* stays for good */
        if (library != NULL) {
            struct trace_marker *m = &trace->markers[trace->num_markers];
            *(void **)&m->push = dlsym(library, markers[i].push);
            *(void **)&m->pop = dlsym(library, markers[i].pop);
            trace->num_markers += m->push != NULL && m->pop != NULL;
        }
    }
}

/* NULL, or why it cannot be the file. The first who opens it writes its beginning. */
static const char *begin_file(int descriptor)
{
    struct stat info;
    char there[2] = {0, 0};
    if (flock(descriptor, LOCK_EX) != 0 || fstat(descriptor, &info) != 0) {
        return strerror(errno);
    }
    if (!S_ISREG(info.st_mode) && !S_ISCHR(info.st_mode)) {
        return "is no regular file";
    }
    if (info.st_size == 0) {
        return file_write(descriptor, "[\n", 2) ? NULL : strerror(errno);
    }
    return pread(descriptor, there, 2, 0) == 2 && memcmp(there, "[\n", 2) == 0
               ? NULL
               : "is there and is no trace";
}

attn_status trace_open(struct trace_file *trace, struct attn_error *error)
{
    trace->descriptor =
        open(trace->path,
             O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK, 0600);
    const char *why = trace->descriptor < 0 ? strerror(errno) : begin_file(trace->descriptor);
    ERROR_IF(why != NULL, ATTN_ERROR_IO, "ATTN_TRACE", "%s: %s", trace->path, why);
    (void)flock(trace->descriptor, LOCK_UN);
    find_markers(trace);
    return ATTN_OK;
}

void trace_close(struct trace_file *trace)
{
    if (trace->descriptor >= 0) {
        close(trace->descriptor);
    }
}

int64_t trace_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void write_line(struct trace_file *trace, const char *format, ...) CORE_PRINTF(2, 3);
static void write_line(struct trace_file *trace, const char *format, ...)
{
    char line[LINE];
    va_list values;
    va_start(values, format);
    const int length = vsnprintf(line, sizeof line, format, values);
    va_end(values);
    if (length < LINE && !atomic_load(&trace->failed) &&
        !file_write(trace->descriptor, line, (size_t)length) &&
        !atomic_exchange(&trace->failed, true)) {
        runtime_log(trace->runtime, ATTN_LOG_WARN,
                    "ATTN_TRACE: %s: %s; nothing more is written to it", trace->path,
                    strerror(errno));
    }
}

void trace_span(struct trace_file *trace, const char *name, int64_t begin, int64_t nanoseconds,
                int32_t track, const char *args)
{
    write_line(trace,
               "{\"name\":\"%s\",\"ph\":\"X\",\"ts\":%" PRId64 ".%03d,\"dur\":%" PRId64
               ".%03d,\"pid\":%d,\"tid\":%d,\"args\":{%s}},\n",
               name, begin / 1000, (int)(begin % 1000), nanoseconds / 1000,
               (int)(nanoseconds % 1000), (int)getpid(), (int)track, args);
}

int64_t trace_begin(const struct trace_file *trace, const char *name)
{
    for (int32_t i = 0; trace != NULL && i < trace->num_markers; i++) {
        trace->markers[i].push(name);
    }
    return trace != NULL ? trace_clock() : 0;
}

void trace_end(struct trace_file *trace, const char *name, int64_t begin, const char *args, ...)
{
    char text[LINE / 2];
    va_list values;
    if (begin == 0) {
        return;
    }
    const int64_t end = trace_clock();
    for (int32_t i = trace->num_markers - 1; i >= 0; i--) {
        trace->markers[i].pop();
    }
    va_start(values, args);
    const int length = vsnprintf(text, sizeof text, args, values);
    va_end(values);
    trace_span(trace, name, begin, end - begin, gettid(), length < LINE / 2 ? text : "");
}

void trace_name_track(struct trace_file *trace, int32_t track, const char *name)
{
    char quoted[256];
    write_line(trace,
               "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,"
               "\"args\":{\"name\":\"%s\"}},\n",
               (int)getpid(), (int)track, trace_quote(quoted, sizeof quoted, name));
}

const char *trace_quote(char *text, size_t size, const char *string)
{
    snprintf(text, size, "%s", string);
    text_make_safe(text, false);
    for (char *at = text; (at = strpbrk(at, "\"\\")) != NULL;) {
        *at = '\'';
    }
    return text;
}
