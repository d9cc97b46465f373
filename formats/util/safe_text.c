/* SPDX-License-Identifier: Apache-2.0 */
#include "util/safe_text.h"

#include <stdint.h>

size_t utf8_length(const char *string)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char *s = (const unsigned char *)string;
    if (s[0] < 0x80) {
        return 1;
    }
    if (s[0] < 0xc2 || s[0] > 0xf4) {
        return 0;
    }
    const size_t length = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    uint32_t code = s[0] & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xc0u) != 0x80u) {
            return 0;
        }
        code = code << 6 | (s[i] & 0x3fu);
    }
    return code >= least[length] && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff) ? length
                                                                                         : 0;
}

bool utf8_is_control(const char *string)
{
    const unsigned char *s = (const unsigned char *)string;
    return s[0] < 0x20 || s[0] == 0x7f || (s[0] == 0xc2 && s[1] < 0xa0);
}

bool text_is_clean(const char *string, size_t max)
{
    size_t at = 0;
    if (string == NULL) {
        return false;
    }
    while (at <= max && string[at] != '\0') {
        const size_t length = utf8_length(string + at);
        if (length == 0 || utf8_is_control(string + at)) {
            return false;
        }
        at += length;
    }
    return at <= max;
}

void text_make_safe(char *string, bool lines)
{
    for (size_t length; *string != '\0'; string += length) {
        length = utf8_length(string);
        const bool bad = length == 0 || (utf8_is_control(string) && !(lines && *string == '\n'));
        length = length > 0 ? length : 1;
        for (size_t i = 0; i < length && bad; i++) {
            string[i] = '?';
        }
    }
}

size_t utf8_cut(const char *string, size_t length)
{
    size_t cut = length;

    while (cut > 0 && ((unsigned char)string[cut] & 0xc0u) == 0x80u) {
        cut--;
    }
    return cut;
}
