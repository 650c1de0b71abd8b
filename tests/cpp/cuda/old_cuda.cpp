// A libcuda.so.1 of before CUDA 12.
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int *version) { return *version = 11080, 0; }
}
