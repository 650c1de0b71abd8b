// A fake libcuda.so.1 older than CUDA 12.
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int *version) { return *version = 11080, 0; }
}
