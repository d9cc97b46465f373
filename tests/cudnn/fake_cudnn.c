/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of cuDNN that the plugin makes, without a GPU: descriptors are counted, and the call
 * that fake_cudnn_fail names fails. FAKE_CUDNN_VERSION is its version. */
#include <cudnn.h>
#include <stdio.h>
#include <stdlib.h>

#include "fake_cudnn.h"

#pragma GCC visibility push(default) /* the project hides by default */

struct cudnnContext {
    int created;
};
static struct cudnnContext context;
static int calls, failing, living, operations;

void fake_cudnn_fail(int call)
{
    calls = operations = 0;
    failing = call;
}
int fake_cudnn_calls(void)
{
    return calls;
}
int fake_cudnn_living(void)
{
    return living;
}
int fake_cudnn_operations(void)
{
    return operations;
}
static cudnnStatus_t answer(void)
{
    return ++calls == failing ? CUDNN_STATUS_NOT_SUPPORTED : CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetVersion(void)
{
    const char *text = getenv("FAKE_CUDNN_VERSION");
    return text != NULL ? strtoul(text, NULL, 10) : CUDNN_VERSION;
}
const char *cudnnGetErrorString(cudnnStatus_t status)
{
    return status == CUDNN_STATUS_SUCCESS ? "success" : "not supported";
}
void cudnnGetLastErrorString(char *message, size_t size)
{
    snprintf(message, size, "call %d", failing);
}
cudnnStatus_t cudnnCreate(cudnnHandle_t *handle)
{
    *handle = &context;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle)
{
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream)
{
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t *descriptor)
{
    cudnnStatus_t status = answer();
    *descriptor = status == CUDNN_STATUS_SUCCESS ? malloc(1) : NULL;
    living += *descriptor != NULL;
    return status;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor)
{
    living -= descriptor != NULL;
    free(descriptor);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void *values)
{
    operations = name == CUDNN_ATTR_OPERATIONGRAPH_OPS ? (int)count : operations;
    return answer();
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t requested,
                                       int64_t *count, void *values)
{
    *count = 1;
    if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
        *(int64_t *)values = 4096;
    }
    return answer();
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor)
{
    return answer();
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack)
{
    return answer();
}
