"""Programs of one record: `PROGRAMS[name]` has parameters, the shape of a row, and a function.

Mapped over records as the clippers map a loss, none of them may let one record change another's
loss or gradient, whatever is in it: not by a bit. `disturbances` looks for it;
`python -m tests.one_record` does so with many sizes and values on the present backend.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

from mirrordp.privacy._convolutions import apart

Program = tuple[Any, tuple[int, ...], Callable[[Any, jax.Array], jax.Array]]

_RNG = np.random.default_rng(0)
_VECTOR = _RNG.normal(size=8).astype(np.float32)
_MATRIX = _RNG.normal(size=(4, 4)).astype(np.float32)
_KERNEL = _RNG.normal(size=(3, 3, 4, 6)).astype(np.float32)
_NHWC = ("NHWC", "HWIO", "NHWC")


def _vector(function) -> Program:
    return _VECTOR, (8,), function


def _matrix(function) -> Program:
    return _MATRIX, (4, 4), function


def _image(function, kernel=_KERNEL) -> Program:
    return kernel, (6, 6, 4), function


def _conv(x, kernel, strides=(1, 1), padding="SAME", **options):
    return lax.conv_general_dilated(
        x[None], kernel, strides, padding, dimension_numbers=_NHWC, **options
    )


def _window(x, start, reduce, strides):
    return lax.reduce_window(x, start, reduce, (3, 3, 1), strides, "SAME")


def _positive(matrix):
    return matrix @ matrix.T + 2 * jnp.eye(4)


def _place(x):
    return (x * 10).astype(int)


def _while(p, x):
    def more(carry):
        return (jnp.abs(carry[1]).max() > 0.5) & (carry[0] < 50)

    start = (0, lax.stop_gradient(p * x))
    return p * x * lax.while_loop(more, lambda c: (c[0] + 1, c[1] * 0.7), start)[1]


def _key():
    return jax.random.key(0, impl="threefry2x32")


PROGRAMS: dict[str, Program] = {
    "convolution": _image(lambda w, x: _conv(x, w)),
    "convolution, strided": _image(lambda w, x: _conv(x, w, (2, 2))),
    "convolution, of a dilated image": _image(
        lambda w, x: _conv(x, w, padding=((2, 2), (2, 2)), lhs_dilation=(2, 2))
    ),
    "convolution, dilated": _image(lambda w, x: _conv(x, w, rhs_dilation=(2, 2))),
    "convolution, transposed": _image(
        lambda w, x: lax.conv_transpose(x[None], w, (2, 2), "SAME", dimension_numbers=_NHWC)
    ),
    "convolution, grouped": _image(
        lambda w, x: _conv(x, w, feature_group_count=2), kernel=_KERNEL[:, :, :2]
    ),
    "convolution, depthwise": _image(
        lambda w, x: _conv(x, w, feature_group_count=4), kernel=_KERNEL[:, :, :1, :4]
    ),
    "convolution with a kernel of its own": _image(lambda w, x: _conv(x, w * jnp.tanh(x.mean()))),
    "convolution with the record": (
        np.ones((6, 6, 4), np.float32),
        (3, 3, 4, 2),
        lambda p, x: _conv(p, x),
    ),
    "convolution, of sequences": (
        np.ones((3, 4, 2), np.float32),
        (7, 4),
        lambda w, x: lax.conv_general_dilated(
            x[None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
    ),
    "windows' sums": _image(lambda w, x: _window(w[0, 0, :, 0] * x, 0.0, lax.add, (2, 2, 1))),
    "windows' maxima": _image(
        lambda w, x: _window(w[0, 0, :, 0] * x, -jnp.inf, lax.max, (2, 2, 1))
    ),
    "windows' minima": _image(lambda w, x: _window(w[0, 0, :, 0] * x, jnp.inf, lax.min, (1, 2, 1))),
    "patches": _image(
        lambda w, x: lax.conv_general_dilated_patches(
            x[None] * w[0, 0, :, 0], (3, 3), (1, 1), "SAME", dimension_numbers=_NHWC
        )
    ),
    "resized": _image(lambda w, x: jax.image.resize(x * w[0, 0, :, 0], (9, 4, 4), "bicubic")),
    "cumsum": _vector(lambda p, x: jnp.cumsum(p * x)),
    "cumsum, reversed": _vector(lambda p, x: lax.cumsum(p * x, reverse=True)),
    "cumprod": _vector(lambda p, x: jnp.cumprod(p * x)),
    "cummax": _vector(lambda p, x: lax.cummax(p * x)),
    "cumlogsumexp": _vector(lambda p, x: lax.cumlogsumexp(p * x)),
    "associative scan": _vector(lambda p, x: lax.associative_scan(jnp.add, p * x)),
    "sort": _vector(lambda p, x: jnp.sort(p * x) * _VECTOR),
    "argsort": _vector(lambda p, x: (p * x)[jnp.argsort(x)] * _VECTOR),
    "largest": _vector(lambda p, x: lax.top_k(p * x, 3)[0]),
    "about the largest": _vector(lambda p, x: lax.approx_max_k(p * x, 3)[0]),
    "median": _vector(lambda p, x: jnp.median(p * x)),
    "quantile": _vector(lambda p, x: jnp.nanquantile(p * x, 0.3)),
    "FFT": _vector(lambda p, x: jnp.abs(jnp.fft.fft(p * x))),
    "real FFT": _vector(lambda p, x: jnp.abs(jnp.fft.rfft(p * x))),
    "inverse FFT": _vector(lambda p, x: jnp.fft.irfft(p * x)),
    "FFT of two axes": _matrix(lambda p, x: jnp.abs(jnp.fft.fft2(p * x))),
    "matrix product": _matrix(lambda p, x: x @ p @ x),
    "outer product": _matrix(lambda p, x: jnp.einsum("ij,kl->jl", x, p)),
    "rows' products": _matrix(lambda p, x: jnp.einsum("ij,ij->i", x, p)),
    "matrix product in bfloat16": _matrix(
        lambda p, x: (x.astype(jnp.bfloat16) @ p.astype(jnp.bfloat16)).astype(jnp.float32)
    ),
    "inner product": _vector(lambda p, x: jnp.vdot(p, x) ** 2),
    "logsumexp": _vector(lambda p, x: jax.nn.logsumexp(p * x)),
    "softmax": _vector(lambda p, x: jax.nn.softmax(p * x)),
    "normalised": _vector(lambda p, x: (p * x - jnp.mean(p * x)) / jnp.std(p * x)),
    "attention": _matrix(
        lambda p, x: jax.nn.dot_product_attention(
            (x @ p)[None, :, None], x[None, :, None], x[None, :, None]
        )
    ),
    "Cholesky": _matrix(lambda p, x: jnp.linalg.cholesky(_positive(p * x))),
    "solved": _matrix(lambda p, x: jnp.linalg.solve(_positive(x), p)),
    "solved, positive": _matrix(lambda p, x: jsp.linalg.solve(_positive(x), p, assume_a="pos")),
    "solved, triangular": _matrix(
        lambda p, x: jsp.linalg.solve_triangular(x + 3 * jnp.eye(4), p, lower=True)
    ),
    "solved for the record": _matrix(
        lambda p, x: jsp.linalg.solve_triangular(p + 3 * jnp.eye(4), x, lower=True)
    ),
    "inverse": _matrix(lambda p, x: jnp.linalg.inv(p * x + 3 * jnp.eye(4))),
    "determinant": _matrix(lambda p, x: jnp.linalg.slogdet(p * x)[1]),
    "LU": _matrix(lambda p, x: jsp.linalg.lu(p * x)[2]),
    "QR": _matrix(lambda p, x: jnp.linalg.qr(p * x)[1]),
    "eigenvalues": _matrix(lambda p, x: jnp.linalg.eigvalsh(_positive(p * x))),
    # LAPACK's SVD with vectors, which the gradient needs, does not end where there are infinities.
    "singular values": _matrix(
        lambda p, x: jnp.linalg.svd(p * jnp.clip(jnp.nan_to_num(x), -1e6, 1e6), compute_uv=False)
    ),
    "matrix exponential": _matrix(lambda p, x: jsp.linalg.expm(p * x)),
    "conjugate gradients": _matrix(
        lambda p, x: jsp.sparse.linalg.cg(lambda v: _positive(x) @ v, p[0], maxiter=3)[0]
    ),
    "linear solve": _matrix(
        lambda p, x: lax.custom_linear_solve(
            lambda v: _positive(x) @ v, p[0], lambda of, b: b / 3, symmetric=True
        )
    ),
    "gathered": _vector(lambda p, x: p[_place(x)] * x),
    "gathered, clipped": _vector(lambda p, x: p.at[_place(x)].get(mode="clip") * x),
    "gathered, filled": _vector(lambda p, x: p.at[_place(x)].get(mode="fill", fill_value=1.0) * x),
    "scattered, added": _vector(lambda p, x: jnp.zeros(8).at[_place(x)].add(p * x)),
    "scattered": _vector(lambda p, x: (2 * p).at[_place(x)].set(p * x)),
    "scattered, largest": _vector(lambda p, x: (2 * p).at[_place(x)].max(p * x)),
    "scattered, multiplied": _vector(
        lambda p, x: (2 * p).at[jnp.arange(8)].mul(p * x, unique_indices=True)
    ),
    "segments": _vector(lambda p, x: jax.ops.segment_sum(p * x, _place(x), 4)),
    "slice": _vector(lambda p, x: lax.dynamic_slice(p, (_place(x[0]),), (3,)) * x[:3]),
    "updated slice": _vector(
        lambda p, x: lax.dynamic_update_slice(p, x[:3] * p[:3], (_place(x[0]),))
    ),
    "rolled": _vector(lambda p, x: jnp.roll(p * x, _place(x[0]))),
    "convolve": _vector(lambda p, x: jnp.convolve(p, x)),
    "convolve by FFT": _vector(lambda p, x: jsp.signal.fftconvolve(p, x)),
    "interpolated": _vector(lambda p, x: jnp.interp(x, jnp.arange(8.0), p)),
    "while": _vector(_while),
    "for": _vector(lambda p, x: lax.fori_loop(0, 3, lambda i, c: c * p + x, x)),
    "scan": _vector(lambda p, x: lax.scan(lambda c, t: (jnp.tanh(c * p + t), c), x, x)[0]),
    "cond": _vector(lambda p, x: lax.cond(x[0] > 0.5, lambda: p * x, lambda: p / x)),
    "switch": _vector(
        lambda p, x: lax.switch(_place(x[0]), [lambda: p * x, lambda: p / x, lambda: jnp.exp(p)])
    ),
    "map": _matrix(lambda p, x: lax.map(lambda row: jnp.tanh(p @ row), x)),
    "where": _vector(lambda p, x: jnp.where(x > 0.5, p * x, p / x)),
    "special functions": _vector(
        lambda p, x: (
            lax.erf_inv(p * x)
            + jsp.special.gammaln(p * x)
            + jsp.special.i0e(p * x)
            + jsp.special.digamma(p * x)
            + jsp.special.ndtri(jax.nn.sigmoid(p * x))
            + jsp.special.spence(jnp.abs(p * x))
        )
    ),
    "incomplete gamma functions": _vector(
        lambda p, x: (
            jsp.special.gammainc(jnp.abs(p) + 0.1, jnp.abs(x))
            + jsp.special.gammaincc(jnp.abs(x) + 0.1, jnp.abs(p))
        )
    ),
    "zeta": _vector(lambda p, x: jsp.special.zeta(jnp.abs(p) + 1.5, jnp.abs(x) + 0.5)),
    "power": _vector(lambda p, x: jnp.power(jnp.abs(x), p)),
    "half precision": _vector(
        lambda p, x: (x.astype(jnp.float16) * p.astype(jnp.float16)).astype(jnp.float32)
    ),
    "integers": _matrix(lambda p, x: (_place(x).astype(jnp.int8) @ _place(x).astype(jnp.int8)) * p),
    # In float64 the gradient does not end for 1e30.
    "drawn from gamma": _vector(
        lambda p, x: jax.random.gamma(_key(), jnp.clip(jnp.abs(p * x), 0.2, 1e6))
    ),
    "drawn from Poisson": _vector(lambda p, x: jax.random.poisson(_key(), jnp.abs(x)) * p),
    "drawn from binomial": _vector(
        lambda p, x: jax.random.binomial(_key(), 5, jax.nn.sigmoid(x)) * p
    ),
}


def disturbances(
    name: str, *, sizes: Iterable[int], values: Iterable[float], dtype: Any = np.float32
) -> Iterator[str]:
    """Yields how records of a batch change others': none may. Compiles once for each size."""
    params, shape, function = PROGRAMS[name]
    params = jnp.asarray(params, dtype)
    # Squares, because compilers have shorter programs for cotangents that are all the same.
    loss = apart(lambda p, x: jnp.sum(function(p, x).astype(jnp.float32) ** 2))
    run = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))
    rng, values = np.random.default_rng(1), list(values)
    for size in sizes:
        rows = np.asarray(jnp.asarray(np.abs(rng.normal(size=(size, *shape))), dtype))
        before = run(params, rows)
        for place in sorted({0, size // 2, size - 1}):
            others = np.arange(size) != place
            for value in values:
                spoiled = [rows.copy(), rows.copy()]
                with np.errstate(over="ignore"):
                    spoiled[0][place] = value
                    spoiled[1][place].flat[0] = value
                for given in spoiled:
                    pairs = [
                        [np.asarray(part, np.float64)[others] for part in pair]
                        for pair in zip(before, run(params, given), strict=True)
                    ]
                    if not all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
                        yield f"{name}: {value} in record {place} of {size}"


def main() -> int:
    """Looks at all programs, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 6, 17])
    parser.add_argument("--dtype", default="float32", help="float32, float64, bfloat16, float16")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", arguments.dtype == "float64")
    values, names = (np.inf, -np.inf, np.nan, 3e38, -1e30, 1e-45, 0.0), arguments.names or PROGRAMS
    disturbed, failed = 0, 0
    for name in names:
        try:
            sizes, dtype = arguments.sizes, jnp.dtype(arguments.dtype)
            lines = list(disturbances(name, sizes=sizes, values=values, dtype=dtype))
        except Exception as error:
            # Some operations do not exist in every type. One more program that fails is no result.
            failed += 1
            lines = [f"{name}: did not run ({type(error).__name__}: {str(error).splitlines()[0]})"]
        else:
            disturbed += len(lines)
        print("\n".join(lines or [f"{name}: apart"]), flush=True)
    print(
        f"{jax.default_backend()}, {arguments.dtype}: {disturbed} disturbances; "
        f"{len(names) - failed} of {len(names)} programs ran"
    )
    # Every program has a form in float32.
    return int(disturbed > 0 or failed == len(names) or (failed > 0 and dtype == jnp.float32))


if __name__ == "__main__":
    raise SystemExit(main())
