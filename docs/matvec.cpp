// Lesson 16's kernel: a row x (num_inputs) times a matrix in 4 bits, as docs/exercises.py packs it.
//
// packed (num_outputs, num_inputs / 2): two integers in each byte, the first one in the low 4 bits.
// scales, zeros (num_outputs, num_inputs / group_size): a weight is integer * scale + zero.
// out[n] is the sum of x[i] * weight[n][i] over i. group_size is a multiple of 32.
#include <cstdint>

extern "C" void matvec(float* out, const float* x, const uint8_t* packed, const float* scales, const float* zeros,
                       int64_t num_outputs, int64_t num_inputs, int64_t group_size) {
    const int64_t num_groups = num_inputs / group_size;
    for (int64_t n = 0; n < num_outputs; n++) {
        float total = 0;
        for (int64_t g = 0; g < num_groups; g++) {
            const uint8_t* bytes = packed + (n * num_inputs + g * group_size) / 2;
            const float* inputs = x + g * group_size;
            float products[16] = {}, sums[16] = {};  // 16 sums side by side, which fit into vector registers
            for (int64_t i = 0; i < group_size / 2; i += 16)
                for (int64_t j = 0; j < 16; j++) {
                    const float low = inputs[2 * (i + j)], high = inputs[2 * (i + j) + 1];
                    products[j] += low * float(bytes[i + j] & 15) + high * float(bytes[i + j] >> 4);
                    sums[j] += low + high;
                }
            float product = 0, sum = 0;
            for (int64_t j = 0; j < 16; j++) product += products[j], sum += sums[j];
            total += scales[n * num_groups + g] * product + zeros[n * num_groups + g] * sum;
        }
        out[n] = total;
    }
}
