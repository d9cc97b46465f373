/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN, opened when it is needed: the functions of its backend API that the plugin calls. */
#ifndef CUDNN_LIBRARY_H
#define CUDNN_LIBRARY_H

#include <cudnn.h>
#include <stdint.h>

/* The oldest version that is served, as CUDNN_VERSION writes it. Older ones have not run here. */
#define CUDNN_OLDEST 91900

/* X(name without "cudnn", result, arguments) */
#define CUDNN_FUNCTIONS(X)                                                                         \
    X(GetVersion, size_t, (void))                                                                  \
    X(GetErrorString, const char *, (cudnnStatus_t))                                               \
    X(GetLastErrorString, void, (char *, size_t))                                                  \
    X(Create, cudnnStatus_t, (cudnnHandle_t *))                                                    \
    X(Destroy, cudnnStatus_t, (cudnnHandle_t))                                                     \
    X(SetStream, cudnnStatus_t, (cudnnHandle_t, cudaStream_t))                                     \
    X(BackendCreateDescriptor, cudnnStatus_t,                                                      \
      (cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t *))                                  \
    X(BackendDestroyDescriptor, cudnnStatus_t, (cudnnBackendDescriptor_t))                         \
    X(BackendSetAttribute, cudnnStatus_t,                                                          \
      (cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t,         \
       int64_t, const void *))                                                                     \
    X(BackendGetAttribute, cudnnStatus_t,                                                          \
      (cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t,         \
       int64_t, int64_t *, void *))                                                                \
    X(BackendFinalize, cudnnStatus_t, (cudnnBackendDescriptor_t))                                  \
    X(BackendExecute, cudnnStatus_t,                                                               \
      (cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t))

struct cudnn_library {
    int32_t version; /* as CUDNN_VERSION writes it */
#define CUDNN_MEMBER(name, result, arguments) result(*name) arguments;
    CUDNN_FUNCTIONS(CUDNN_MEMBER)
#undef CUDNN_MEMBER
};

#define CUDNN_CAUSE_BYTES 160

/* Opens libcudnn.so.9, which stays open, and finds the functions. Starts no CUDA. False, with the
 * version found and the one wanted in `cause`, where it is absent or too old. */
int cudnn_open(struct cudnn_library *library, char cause[CUDNN_CAUSE_BYTES]);

/* Making a plan runs cuDNN's compiler, which has a handler of SIGINT while it runs and leaves its
 * flags changed (9.19). Between these two one thread makes plans; the second puts back what the
 * process does on signals. */
void cudnn_begin_changes(void);
void cudnn_end_changes(void);

#endif
