// An array that is indexed by what only the launch knows cannot lie in registers.
extern "C" __global__ void spilling(const int* in, int* out) {
    int held[64];
    for (int i = 0; i < 64; ++i) held[i] = in[i];
    for (int i = 0; i < 64; ++i) held[held[i] & 63] += i;
    for (int i = 0; i < 64; ++i) out[i] = held[i];
}
