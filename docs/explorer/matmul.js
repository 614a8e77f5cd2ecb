// Memory for float32 numbers, and the matrix product over it: WebAssembly SIMD, or plain JavaScript without it.

const PAGE = 65536; // bytes of a page of WebAssembly memory

/** Return an arena of `megabytes` with the fastest product that the browser has. simd: false selects JavaScript. */
export async function arena(megabytes, simd = true) {
  const pages = Math.ceil((megabytes * 1e6) / PAGE);
  if (simd) {
    try {
      const memory = new WebAssembly.Memory({ initial: pages, maximum: pages });
      const code = await (await fetch(new URL("matmul.wasm", import.meta.url))).arrayBuffer();
      const { instance } = await WebAssembly.instantiate(code, { page: { memory } });
      const product = (y, x, w, n, width, outs, stride = width) =>
        instance.exports.matmul(y.byteOffset, x.byteOffset, w.byteOffset, n, width, outs, stride);
      return new Arena("WebAssembly SIMD", memory.buffer, product);
    } catch (error) {
      console.info(`no WebAssembly SIMD: ${error.message}`);
    }
  }
  return new Arena("plain JavaScript", new ArrayBuffer(pages * PAGE), plainProduct);
}

/** matmul: y[n, outs] = x[n, width] · w[outs, width]ᵀ. stride: floats from one row of w to the next. */
class Arena {
  constructor(name, buffer, matmul) {
    Object.assign(this, { name, buffer, matmul, used: 0 });
  }

  /** Return `count` floats, aligned to 16 bytes. Setting `used` back frees what was taken since. */
  take(count) {
    const start = this.used, end = start + Math.ceil(count / 4) * 16;
    if (end > this.buffer.byteLength) throw new RangeError("memory is full. Choose fewer rows or a shorter prompt.");
    this.used = end;
    return new Float32Array(this.buffer, start, count).fill(0);
  }
}

/** The product of matmul.wat in JavaScript: four tokens a … d by two outputs 0 and 1 at a time. */
function plainProduct(y, x, w, n, width, outs, stride = width) {
  for (let a = 0; a < n; a += 4) {
    const last = n - 1, b = Math.min(a + 1, last), c = Math.min(a + 2, last), d = Math.min(a + 3, last);
    for (let out = 0; out < outs; out += 2) {
      let a0 = 0, b0 = 0, c0 = 0, d0 = 0, a1 = 0, b1 = 0, c1 = 0, d1 = 0;
      let p = out * stride, q = p + stride, i = a * width, j = b * width, k = c * width, l = d * width;
      for (const end = p + width; p < end; p++, q++, i++, j++, k++, l++) {
        const u = w[p], v = w[q];
        a0 += u * x[i]; b0 += u * x[j]; c0 += u * x[k]; d0 += u * x[l];
        a1 += v * x[i]; b1 += v * x[j]; c1 += v * x[k]; d1 += v * x[l];
      }
      for (const [token, s, t] of [[a, a0, a1], [b, b0, b1], [c, c0, c1], [d, d0, d1]]) {
        y[token * outs + out] = s;
        y[token * outs + out + 1] = t;
      }
    }
  }
}
