// Device code of CUDA on a processor: a block's threads run one after another, several times, until what they share is settled.
// Each pass reads what the one before left in shared memory and in shuffles, so a kernel must not add to what it wrote. Only the last
// pass of a block has places that are right: a kernel that takes them from shared memory writes elsewhere before (`last`).
#include <algorithm>
#include <cstddef>
#include <cstdint>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#define register
#define USE_ROCM 1
using std::min;

struct half { _Float16 v; };
typedef half __half;
struct half2 { half x, y; };
struct int4 { int x, y, z, w; };
struct Place { int x, y, z; };
static Place threadIdx, blockIdx, gridDim;
static const int PASSES = 5;

inline void __syncthreads() {}
inline half rounded(double v) { return {(_Float16)v}; }
inline half __hadd(half a, half b) { return rounded((double)a.v + (double)b.v); }
inline half __hsub(half a, half b) { return rounded((double)a.v - (double)b.v); }
inline half __hmul(half a, half b) { return rounded((double)a.v * (double)b.v); }
inline half __hfma(half a, half b, half c) { return rounded((double)a.v * (double)b.v + (double)c.v); }
inline half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline half2 __hmul2(half2 a, half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline half __int2half_rn(int v) { return rounded(v); }
inline half __float2half_rn(float v) { return rounded(v); }
inline float __half2float(half v) { return (float)v.v; }
inline half2 __halves2half2(half a, half b) { return {a, b}; }
inline half2 __half2half2(half a) { return {a, a}; }
inline half __low2half(half2 a) { return a.x; }
inline half __high2half(half2 a) { return a.y; }
inline half2 __lows2half2(half2 a, half2 b) { return {a.x, b.x}; }
inline half2 __highs2half2(half2 a, half2 b) { return {a.y, b.y}; }
inline half __ushort_as_half(uint16_t v) { half h; __builtin_memcpy(&h, &v, 2); return h; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int n) { return (uint32_t)((((uint64_t)high << 32) | low) >> (n & 31)); }
inline uint32_t __funnelshift_rc(uint32_t low, uint32_t high, int n) { return (uint32_t)((((uint64_t)high << 32) | low) >> min(n, 32)); }
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c)
{
    for (int i = 0; i < 32; i += 8) c += ((a >> i) & 255) * ((b >> i) & 255);
    return c;
}

static half2 sent[1024][8];
static int calls;
static bool last;
inline half2 __shfl_down_sync(uint32_t, half2 value, int by, int width)
{
    int t = threadIdx.x, from = t % width + by < width ? t + by : t;
    sent[t][calls] = value;
    return sent[from][calls++];
}

template <typename Kernel> void launch(int blocks_x, int blocks_y, int threads, int passes, Kernel kernel)
{
    gridDim = {blocks_x, blocks_y, 1};
    for (int y = 0; y < blocks_y; y++) for (int x = 0; x < blocks_x; x++) for (int pass = 0; pass < passes; pass++)
        for (int t = 0; t < threads; t++) { blockIdx = {x, y, 0}; threadIdx = {t, 0, 0}; calls = 0; last = pass == passes - 1; kernel(); }
}
