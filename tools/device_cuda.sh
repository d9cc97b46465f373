#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tools/device.sh for an NVIDIA GPU. usage: tools/device_cuda.sh [BUILD_DIR] [--quick|--full] [SECONDS_OF_SOAK]
exec sh "$(dirname "$0")/device.sh" cuda_flash "$@"
