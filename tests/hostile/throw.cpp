// SPDX-License-Identifier: Apache-2.0
extern "C" void throw_something(void);

extern "C" void throw_something(void)
{
    throw 42;
}
