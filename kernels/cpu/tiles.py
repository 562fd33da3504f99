"""Products of a few rows and a few ranks, in the processor's vectors: what ``loops`` is made of.

Written in LLVM's language, since no compiler keeps so many sums in registers by itself. Callers pass
addresses only. The order of a sum is the same whatever rows and ranks are beside it. numba knows neither
bfloat16 nor float16: here the one is ``uint16`` and the other ``int16``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Numbers of a vector; ranks of A, and vectors of a row of y, at a time: so that the sums of four rows, and
# what they are made of, fit the registers. A row by itself has as many sums.
ROWS = 4
LANES, RANKS, VECTORS = (16, 4, 4) if binding.get_host_cpu_features().get("avx512f") else (8, 2, 2)
RANKS_OF_ONE, VECTORS_OF_ONE = 2 * RANKS, 4 * VECTORS

_FLOAT, _LONG, _INT, _SHORT = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(16)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
_FUSED = ("contract",)


def _shrinks(rows: int, ranks: int) -> Any:
    @intrinsic
    def shrink(
        _typing: Any, z: Any, z_apart: Any, x: Any, x_apart: Any, order: Any, live: Any,
        a: Any, a_apart: Any, live_ranks: Any, count: Any, of_x: Any, of_a: Any,
    ) -> Any:  # fmt: skip
        """``z[rows, ranks] += x[order[:rows], :count] · a[:ranks, :count]ᵀ``; z is fp32.

        Where fewer rows, or ranks, than these are live, the last one stands for them. ``count`` is a
        multiple of LANES. ``of_x``, ``of_a``: arrays of what numbers they are of.
        """

        def build(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            z, z_apart, x, x_apart, order, live, a, a_apart, live_ranks, count = values[:10]
            x_rows = [
                builder.gep(_typed(builder, x, of_x.dtype), [builder.mul(number, x_apart)])
                for number in _numbers(builder, order, rows, live)
            ]
            a_rows = [
                builder.gep(
                    _typed(builder, a, of_a.dtype), [builder.mul(_last(builder, j, live_ranks), a_apart)]
                )
                for j in range(ranks)
            ]
            sums = _sums(builder, rows, ranks)
            with cgutils.for_range_slice(builder, _LONG(0), count, _LONG(LANES)) as (k, _):
                of_ranks = [_load(builder, row, k, of_a.dtype) for row in a_rows]
                for row, of_row in zip(x_rows, sums, strict=True):
                    own = _load(builder, row, k, of_x.dtype)
                    for one, other in zip(of_row, of_ranks, strict=True):
                        _grow(builder, one, own, other)
            for i, of_row in enumerate(sums):
                for j, one in enumerate(of_row):
                    place = builder.add(builder.mul(_LONG(i), z_apart), _LONG(j))
                    at = builder.gep(_typed(builder, z, types.float32), [place])
                    builder.store(builder.fadd(builder.load(at), _total(builder, builder.load(one))), at)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10, of_x, of_a), build

    return shrink


def _expands(rows: int, vectors: int) -> Any:
    @intrinsic
    def expand(
        _typing: Any, y: Any, y_apart: Any, order: Any, live: Any, z: Any, z_apart: Any,
        b: Any, b_apart: Any, ranks: Any, scale: Any, add: Any, of_y: Any, of_b: Any,
    ) -> Any:  # fmt: skip
        """``y[order[:live], :vectors · LANES] (+)= scale · z[:live, :ranks] · b[:ranks]``; z is fp32.

        With more rows than one it prefetches these numbers of y, and those of b that follow.
        """

        def build(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            y, y_apart, order, live, z, z_apart, b, b_apart, ranks, scale, add = values[:11]
            sums = _sums(builder, rows, vectors)
            y_rows = [
                builder.gep(_typed(builder, y, of_y.dtype), [builder.mul(number, y_apart)])
                for number in _numbers(builder, order, rows, live)
            ]
            ahead = rows > 1  # a row by itself is done before it would pay
            for row in y_rows if ahead else []:
                for place in range(0, vectors * LANES, _per_line(of_y.dtype)):
                    _fetch(builder, row, place)
            with cgutils.for_range(builder, ranks) as loop:
                row = builder.gep(_typed(builder, b, of_b.dtype), [builder.mul(loop.index, b_apart)])
                of_rank = [_load(builder, row, _LONG(v * LANES), of_b.dtype) for v in range(vectors)]
                for place in range(0, vectors * LANES if ahead else 0, _per_line(of_b.dtype)):
                    _fetch(builder, row, vectors * LANES + place)
                for i, of_row in enumerate(sums):
                    place = builder.add(builder.mul(_LONG(i), z_apart), loop.index)
                    own = builder.load(builder.gep(_typed(builder, z, types.float32), [place]))
                    for one, other in zip(of_row, of_rank, strict=True):
                        _grow(builder, one, _everywhere(builder, own), other)
            for i, row in enumerate(y_rows):
                with builder.if_then(builder.icmp_signed("<", _LONG(i), live)):
                    for v, one in enumerate(sums[i]):
                        before = _load(builder, row, _LONG(v * LANES), of_y.dtype)
                        before = builder.select(builder.trunc(add, ir.IntType(1)), before, _ZERO)
                        product = builder.fmul(_everywhere(builder, scale), builder.load(one), flags=_FUSED)
                        _store(
                            builder, builder.fadd(before, product, flags=_FUSED), row, v * LANES, of_y.dtype
                        )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9, types.float32, types.boolean, of_y, of_b), build

    return expand


shrink_one, shrink_four = _shrinks(1, RANKS_OF_ONE), _shrinks(ROWS, RANKS)
expand_one, expand_four, expand_thin = _expands(1, VECTORS_OF_ONE), _expands(ROWS, VECTORS), _expands(ROWS, 1)


@intrinsic
def pointer(_typing: Any, _address: Any) -> Any:
    """An integer as a pointer."""

    def build(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), build


@intrinsic
def wide(_typing: Any, kind: Any) -> Any:
    """Any number as fp32."""

    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _widen(builder, values[0], kind, _same)

    return types.float32(kind), build


@intrinsic
def narrow(_typing: Any, _value: Any, kind: Any) -> Any:
    """A number of fp32 as one like the second, the nearest, and of two the even one; NaN stays NaN."""

    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _narrow(builder, values[0], kind, _same)

    return kind(types.float32, kind), build


# -- the parts of the loops ----------------------------------------------------------------------------


def _same(one: Any) -> Any:
    return one


def _vector(one: Any) -> Any:
    """A type, or a constant, for each lane."""
    if isinstance(one, ir.Constant):
        return ir.Constant(ir.VectorType(one.type, LANES), [one.constant] * LANES)
    return ir.VectorType(one, LANES)


def _widen(builder: Any, value: Any, kind: Any, of: Any) -> Any:
    if kind == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(value, of(_INT)), of(_INT(16))), of(_FLOAT))
    if kind == types.int16:
        return builder.fpext(builder.bitcast(value, of(ir.HalfType())), of(_FLOAT))
    return value


def _narrow(builder: Any, value: Any, kind: Any, of: Any) -> Any:
    if kind == types.int16:
        return builder.bitcast(builder.fptrunc(value, of(ir.HalfType())), of(_SHORT))
    if kind != types.uint16:
        return value
    bits = builder.bitcast(value, of(_INT))
    odd = builder.and_(builder.lshr(bits, of(_INT(16))), of(_INT(1)))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, of(_INT(0x7FFF)))), of(_INT(16)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, of(_INT(0x7FC0)), rounded), of(_SHORT))


def _typed(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, (_FLOAT if kind == types.float32 else _SHORT).as_pointer())


def _load(builder: Any, row: Any, place: Any, kind: Any) -> Any:
    """A vector, wherever it begins, in fp32."""
    at = builder.gep(row, [place])
    loaded = builder.load(builder.bitcast(at, _vector(at.type.pointee).as_pointer()), align=2)
    return _widen(builder, loaded, kind, _vector)


def _store(builder: Any, vector: Any, row: Any, place: int, kind: Any) -> None:
    value = _narrow(builder, vector, kind, _vector)
    at = builder.gep(row, [_LONG(place)])
    builder.store(value, builder.bitcast(at, value.type.as_pointer()), align=2)


def _fetch(builder: Any, row: Any, place: int) -> None:
    """Ask for what lies there to be brought near, to be read; there need be nothing."""
    of_bytes = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [of_bytes, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    at = builder.bitcast(builder.gep(row, [_LONG(place)]), of_bytes)
    builder.call(function, [at, _INT(0), _INT(3), _INT(1)])


def _per_line(kind: Any) -> int:
    """Numbers in what the processor brings at a time."""
    return 64 * 8 // int(kind.bitwidth)


def _last(builder: Any, index: int, live: Any) -> Any:
    """``index``, or the last one that is live."""
    end = builder.sub(live, _LONG(1))
    return builder.select(builder.icmp_signed("<", _LONG(index), end), _LONG(index), end)


def _numbers(builder: Any, order: Any, rows: int, live: Any) -> list[Any]:
    """The number in the batch of each row."""
    numbers = builder.inttoptr(order, _INT.as_pointer())
    places = [builder.gep(numbers, [_last(builder, i, live)]) for i in range(rows)]
    return [builder.sext(builder.load(place), _LONG) for place in places]


def _sums(builder: Any, rows: int, columns: int) -> list[list[Any]]:
    """Vectors of zeros; LLVM makes registers of them."""
    return [[cgutils.alloca_once_value(builder, _ZERO) for _ in range(columns)] for _ in range(rows)]


def _grow(builder: Any, sums: Any, one: Any, other: Any) -> None:
    product = builder.fmul(one, other, flags=_FUSED)
    builder.store(builder.fadd(builder.load(sums), product, flags=_FUSED), sums)


def _everywhere(builder: Any, number: Any) -> Any:
    lane = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(lane, lane, _vector(_INT(0)))


def _total(builder: Any, vector: Any) -> Any:
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR]), name
    )
    return builder.call(function, [_FLOAT(-0.0), vector], fastmath=("reassoc",))
