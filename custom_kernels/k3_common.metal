// What the kernels of this folder share. Every launcher passes this text as `header`, so it stands
// at global scope, after Metal's own names (or after k3_cuda.h, which supplies them on CUDA).
// ASCII only; every name starts with k3_, because the set of global names around it grows.

// Logistic function. For very negative x the exponential is infinite and the quotient 0, as it should be.
inline float k3_sigmoid(float x) {
  return 1.0f / (1.0f + metal::precise::exp(-x));
}

// x * sigmoid(x); written as a quotient so that no product of infinity and 0 can arise.
inline float k3_silu(float x) {
  return x / (1.0f + metal::precise::exp(-x));
}

// Reciprocal root with both steps correctly rounded where the hardware does so.
inline float k3_inverse_root(float x) {
  return 1.0f / metal::precise::sqrt(x);
}
