/* The values of MXFP4 for every scale byte, filled when the library is loaded. Source: model specification 4.3. */
#include "k3cpu.h"

#include <math.h>
#include <string.h>

_Alignas(K3_ALIGN) uint16_t k3_mxfp4_words[256][32];
_Alignas(K3_ALIGN) k3_mxfp4_bytes k3_mxfp4_halves[256];

static float value_of(int scale, int code) {
    static const float doubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    if (scale == 255) return NAN;
    float magnitude = ldexpf(doubled[code & 7], scale - 130);
    return code & 8 ? -magnitude : magnitude;
}

__attribute__((constructor)) static void fill(void) {
    for (int scale = 0; scale < 256; scale++)
        for (int code = 0; code < 16; code++) {
            float value = value_of(scale, code);
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            k3_mxfp4_words[scale][code] = k3_mxfp4_words[scale][code + 16] = (uint16_t)(bits >> 16);
            k3_mxfp4_halves[scale].upper[code] = (uint8_t)(bits >> 24);
            k3_mxfp4_halves[scale].lower[code] = (uint8_t)(bits >> 16);
        }
}
