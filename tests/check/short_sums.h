/* SPDX-License-Identifier: Apache-2.0 */
/* The sum of products as matrix units of Hopper make it: 32 at a time, of which each, and the sum
 * so far, is cut below 2^-SHORT_BITS of the power of two in the largest of them. */
static double short_dot(const double *a, const double *b, int32_t count)
{
    double sum = 0;
    for (int32_t first = 0; first < count; first += 32) {
        double x[32], largest = fabs(sum), total = 0;
        for (int32_t i = 0; i < 32; i++) {
            x[i] = first + i < count ? a[first + i] * b[first + i] : 0;
            largest = fmax(largest, fabs(x[i]));
        }
        const double unit = largest > 0 ? ldexp(1, ilogb(largest) - SHORT_BITS) : 1;
        for (int32_t i = 0; i < 32; i++) {
            total += trunc(x[i] / unit);
        }
        sum = (trunc(sum / unit) + total) * unit;
    }
    return sum;
}
