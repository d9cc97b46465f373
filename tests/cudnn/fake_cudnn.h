/* SPDX-License-Identifier: Apache-2.0 */
/* Controls of fake_cudnn.c. */
#ifndef TESTS_CUDNN_FAKE_CUDNN_H
#define TESTS_CUDNN_FAKE_CUDNN_H

void fake_cudnn_fail(int call);  /* resets the counts; that call will fail, 0: none */
int fake_cudnn_calls(void);      /* since then */
int fake_cudnn_operations(void); /* the last graph's since then */
int fake_cudnn_living(void);     /* descriptors that were not destroyed */

#endif
