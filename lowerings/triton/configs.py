"""One way to launch a kernel, and the estimates that say on which cards it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .device import Device


class Config(NamedTuple):
    """One way to launch a kernel: a tile is block_m queries by block_n keys. AXES are 0 or 1."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: int = 0  # the forward's keys and values are copied by tensor descriptors (TMA)
    # Contributions of every score pass through shared memory, so that neighbours in a warp add side by side.
    coalesced: int = 0

    def constants(self, axes: Sequence[str] = ()) -> dict[str, int]:
        """Constants of a kernel that is written with a choice along these axes."""
        chosen = {axis.upper(): getattr(self, axis) for axis in axes}
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, **chosen}

    def launch(self, axes: Sequence[str] = ()) -> dict[str, int]:
        """As Inductor's autotuner takes it."""
        return {**self.constants(axes), "num_warps": self.warps, "num_stages": self.stages}


LARGEST_TILE = 256  # of either length

AXES = ("descriptors", "coalesced")


def axes_of(configs: Sequence[Config]) -> list[str]:
    """The axes that any of these configs uses."""
    return [axis for axis in AXES if any(getattr(config, axis) for config in configs)]


def launched_with(config: Any) -> Config:
    """The Config that a config of Triton's was made from."""
    sizes = config.kwargs
    chosen = {axis: sizes[axis.upper()] for axis in AXES if axis.upper() in sizes}
    return Config(sizes["BLOCK_M"], sizes["BLOCK_N"], config.num_warps, config.num_stages, **chosen)


class Shape(NamedTuple):
    """The facts of a call that estimates need."""

    D: int  # head dims, padded
    V: int
    bytes: int  # of an element
    q_block: int | None = None  # the schedule's blocks, which a tile must divide; None for any tile
    kv_block: int | None = None
    tile_loads: int = 0  # captured values that every lane reads: the pipeline keeps them in shared memory
    score_loads: int = 0  # those that do not pass through it, see `per_score` in tiles.jinja
    score_adds: int = 0  # contributions of every score that need not pass through it, see Config.coalesced
    line_loads: int = 0  # those that vary along the walked side alone
    tile_values: int = 0  # values of every lane's score that are kept for its gradient
    aligned: bool = True  # see AttentionProblem.aligned
    rows: int | None = None  # of a tile of queries, where the call sets them: all lie in one block
    exact: bool = False  # fp32 products that tensor cores cannot do: threads multiply and add
    mapped: bool = False  # tiles lie where a map says
    narrow: bool = False  # keys and values have 8 bits in memory

    @property
    def widest(self) -> int:
        return max(self.D, self.V)


# family, or "exact" if Shape.exact -> largest head dim -> configs, best first
Table = dict[str, dict[int, list[Config]]]
# Shared bytes of an instance and registers of all its threads, about.
Cost = Callable[[Config, Shape, Device], tuple[int, int]]

LAST = [Config(32, 32, 4, 1), Config(16, 32, 4, 1), Config(32, 16, 4, 1), Config(16, 16, 4, 1)]
_LAST_EXACT = [Config(16, 16, 8, 2)]


def forward_cost(config: Config, shape: Shape, device: Device) -> tuple[int, int]:
    m, n = config.block_m, config.block_n
    # Without stages one tile leaves room for the other.
    width = shape.D + shape.V if config.stages > 1 else shape.widest
    shared = (m * shape.D + _walked(config, shape, device) * n * width) * shape.bytes
    if shape.narrow:  # while one is copied, another becomes wide: both, where products run into the next step
        wide = shape.D + shape.V if device.family == "blackwell" else shape.widest
        shared = (m * shape.D + n * wide) * shape.bytes + (config.stages - 1) * n * width
    if shape.exact or _divides_columns(config, max(n, shape.V), device):
        shared += m * n * shape.bytes  # the weights, for the other product
    shared += _aside(config, m, max(n, shape.V), device)
    loaded = shape.tile_loads * (1 if _ahead(config, device) else 3)  # with 64-bit addresses
    held = 0 if device.shared_operands else m * shape.D * shape.bytes // 4
    return shared + _captured(config, shape, device, n), m * shape.V + (2 + loaded) * m * n + held


def dq_cost(config: Config, shape: Shape, device: Device) -> tuple[int, int]:
    m, n = config.block_m, config.block_n
    loaded = shape.tile_loads * (3 if device.family == "blackwell" else 1)  # in memory, with 64-bit addresses
    tiles = m * shape.D + (3 + loaded + shape.tile_values) * m * n
    # Found by compiling: contributions of lanes change their layout on the way to memory.
    moves = shape.score_loads and shape.tile_values and (config.coalesced or not shape.score_adds)
    shared = _backward_shared(config, shape, device, m, n, shape.D) + (512 * config.warps if moves else 0)
    return shared + _aside(config, m, 0, device), tiles + _operands(m + n, shape, device)


def dkdv_cost(config: Config, shape: Shape, device: Device) -> tuple[int, int]:
    registers = dk_cost(config, shape, device)[1] + config.block_n * shape.V
    return _of_keys(config, shape, device, shape.D + shape.V), registers


def dk_cost(config: Config, shape: Shape, device: Device) -> tuple[int, int]:
    m, n = config.block_m, config.block_n
    tiles = n * shape.D + (3 + shape.tile_values) * m * n
    rows = m + n if device.family == "amd" else m  # where what is held is held in registers
    return _of_keys(config, shape, device, shape.D), tiles + _operands(rows, shape, device)


def dv_cost(config: Config, shape: Shape, device: Device) -> tuple[int, int]:
    m, n = config.block_m, config.block_n
    values = 0 if device.family == "amd" else n * shape.V * shape.bytes  # which are not held
    return _of_keys(config, shape, device, 0) - values, n * shape.V + 2 * m * n


def _of_keys(config: Config, shape: Shape, device: Device, twice: int) -> int:
    shared = _backward_shared(config, shape, device, config.block_n, config.block_m, twice)
    statistics = config.block_m * 8 * max(config.stages - 1, 0)  # the logsumexp and delta of rows
    return shared + _aside(config, 0, 0, device) + (0 if device.family == "amd" else statistics)


def _backward_shared(config: Config, shape: Shape, device: Device, held: int, walked: int, twice: int) -> int:
    """`twice` is the width of the walked tiles that two products of a step take."""
    if device.family == "amd":  # the tiles of one product at a time
        return max(held, walked) * shape.widest * shape.bytes
    tensor_memory = device.family == "blackwell" and config.stages > 1
    rows = held + _walked(config, shape, device) * walked
    # A product's result for the next one, unless it stays in registers or tensor memory.
    alone = device.family == "hopper" and shape.bytes < 4 and held >= 64
    alone = alone or (not device.shared_operands and not shape.exact and held >= max(walked, shape.widest))
    alone = alone or (config.stages == 1 and twice <= shape.widest)  # one of the tiles leaves room for it
    between = 0 if tensor_memory or alone else held * walked
    # Two products take a tile in two layouts. Those of sm_100 run into the next step. What is not copied in stages goes
    # through shared memory for each layout, one tile after the other.
    again = 0
    if tensor_memory:
        again = walked * twice
    elif (config.stages == 1 and not alone) or (config.stages == 2 and shape.bytes == 4 and not shape.exact):
        again = walked * min(twice, shape.widest)
    shared = (rows * (shape.D + shape.V) + between + again) * shape.bytes
    # What tensor cores read begins at a multiple of 1024, behind numbers of rows and captured values.
    aligned = 1024 if device.family == "hopper" else 0
    return shared + aligned + _captured(config, shape, device, walked)


def _divides_columns(config: Config, columns: int, device: Device) -> bool:
    """Whether warps share the rows of a step's products, so that maxima and weights pass through shared memory. Triton
    gives each its own rows where a product has no fewer rows than columns."""
    if device.family == "hopper":
        return config.block_m < 16 * config.warps
    if device.family == "blackwell" and config.block_m >= 64:  # a thread has a row
        return False
    return device.nvidia and config.block_m < columns


def _aside(config: Config, rows: int, columns: int, device: Device) -> int:
    """What a step has in shared memory beside tiles: a number for each row, from every warp that has a part of it."""
    if device.family == "amd":
        return 0
    blackwell = device.family == "blackwell"
    parts = config.warps if blackwell or _divides_columns(config, columns, device) else 1
    return rows * parts * 4 + (1024 if blackwell else 0)  # barriers there, and what it takes to align tiles


def _walked(config: Config, shape: Shape, device: Device) -> int:
    """How many of the loop's tiles are in shared memory at once. The present one is in registers, unless tensor cores
    read it from shared memory."""
    return max(config.stages - (shape.exact or not device.shared_operands), 1)


def _operands(rows: int, shape: Shape, device: Device) -> int:
    """Registers for rows of two tensors, in parts if wide, where tensor cores do not read from shared memory."""
    width = shape.D + shape.V if shape.widest <= 128 else 128
    return 0 if device.shared_operands else rows * width * shape.bytes // 4


def _captured(config: Config, shape: Shape, device: Device, walked: int) -> int:
    loaded = shape.tile_loads * config.block_m * config.block_n * 4 + shape.line_loads * walked * 8
    return loaded * _ahead(config, device)


def _ahead(config: Config, device: Device) -> int:
    """Tiles of captured values that the pipeline has in shared memory before they are needed."""
    return max(config.stages - (device.family != "blackwell"), 0)


def decode_cost(config: Config, shape: Shape, device: Device) -> tuple[int, int]:
    shared, registers = forward_cost(config, shape, device)
    if device.family != "amd":
        shared = max(shared, config.block_m * shape.V * 4)  # a part's output on its way to memory
    # With tiles this small the queries are in registers on these cards too.
    held = config.block_m * shape.D * shape.bytes // 4 if device.family == "blackwell" else 0
    return shared, registers + held


# How many of a kernel's products take D multiplications for a score, and how many V.
PRODUCTS: dict[Cost, tuple[int, int]] = {
    forward_cost: (1, 1),
    decode_cost: (1, 1),
    dq_cost: (2, 1),
    dkdv_cost: (2, 2),
    dk_cost: (2, 1),
    dv_cost: (1, 1),
}


def candidates(
    table: Table, cost: Cost, device: Device, shape: Shape
) -> tuple[list[Config], list[tuple[Config, str]]]:
    """The configs that fit, best first, and why the others do not. If none does, the smallest tile that
    divides the schedule's blocks."""
    classes = table["exact" if shape.exact else device.family]
    last = _LAST_EXACT if shape.exact else LAST
    width = next((w for w in sorted(classes) if shape.widest <= w), max(classes))
    kept: list[Config] = []
    rejected: list[tuple[Config, str]] = []
    for config in dict.fromkeys(_adapted(c, shape, device) for c in (*classes[width], *last)):
        reason = misfit(config, cost, device, shape)
        if reason is None:
            kept.append(config)
        else:
            rejected.append((config, reason))
    return kept or [_adapted(last[-1], shape, device)], rejected


def _adapted(config: Config, shape: Shape, device: Device) -> Config:
    """A table's config for a call."""
    if shape.score_adds and device.family in ("hopper", "blackwell"):
        # Measured on H200. On sm_100, found by compiling: sums that wait for the next step to be added take registers.
        config = config._replace(coalesced=1)
    return config if shape.rows is None else config._replace(block_m=shape.rows)


def without_choice(kind: str, config: Config) -> str | None:
    """An axis of the config that this kind of kernel lacks."""
    has = {"descriptors": "forward", "coalesced": "backward_dq"}
    return next((axis for axis in axes_of([config]) if has[axis] != kind), None)


def misfit(config: Config, cost: Cost, device: Device, shape: Shape, rough: float = 1.0) -> str | None:
    """Why a config cannot serve, or None. Registers may be `rough` times as many as there should be."""
    if shape.rows is not None and config.block_m != shape.rows:
        return "block_m is set by the number of queries"
    for tile, block, name in (
        (config.block_m, shape.q_block, "query"),
        (config.block_n, shape.kv_block, "KV"),
    ):
        if not 16 <= tile <= LARGEST_TILE or tile & (tile - 1):
            return f"a tile of {tile} is not a power of two from 16 to {LARGEST_TILE}"
        if block is not None and block % tile and not (shape.rows and name == "query"):
            return f"a tile of {tile} does not divide the schedule's {name} blocks of {block}"
    for axis in AXES:
        if getattr(config, axis) not in (0, 1):
            return f"{axis} is 0 or 1, not {getattr(config, axis)}"
    if config.coalesced and device.family == "amd":
        return "coalesced is for NVIDIA's cards, which alone have the other way"
    if config.descriptors and shape.mapped:
        return "descriptors are not for tiles that lie where a map says"
    if config.descriptors and not device.describes:
        return f"{device.arch} has no tensor descriptors"
    if config.descriptors and not shape.aligned:
        return "descriptors need rows of whole, contiguous units of 16 bytes"
    if reason := no_room(config, cost, device, shape):
        return reason
    if (
        config.descriptors
        and config.warps == 4
        and (shared := _taken(config, cost, device, shape)[0]) > _half(device)
    ):
        return f"about {shared} bytes of shared memory, which leave a multiprocessor no room for a second instance"
    _, a_thread = _taken(config, cost, device, shape)
    if a_thread > rough * (300 if device.warp == 64 else 230):
        return f"about {a_thread} registers a thread"
    return None


def _half(device: Device) -> int:
    """Shared memory for each of two instances on a multiprocessor, which reserves 1024 bytes for either."""
    return (device.shared_bytes + 1024) // 2 - 1024


def no_room(config: Config, cost: Cost, device: Device, shape: Shape) -> str | None:
    """Whether shared memory is too small, so that a launch would fail."""
    shared, _ = _taken(config, cost, device, shape)
    if shared <= device.shared_bytes:
        return None
    return f"about {shared} bytes of shared memory of {device.shared_bytes}"


def estimate(config: Config, cost: Cost, device: Device, shape: Shape) -> str:
    shared, a_thread = _taken(config, cost, device, shape)
    return f"about {shared} bytes of shared memory, {a_thread} registers a thread"


def _taken(config: Config, cost: Cost, device: Device, shape: Shape) -> tuple[int, int]:
    shared, registers = cost(config, shape, device)
    threads = config.warps * device.warp
    if not shape.exact:
        return shared, registers // threads
    # Found by compiling: products are unrolled, and the longer the code the more values the compiler keeps.
    keys, values = PRODUCTS[cost]
    lanes = config.block_m * config.block_n // threads
    # Operands too where narrow keys and values are stored as wide ones before.
    held = int(1.2 * shape.widest * math.sqrt(lanes)) if shape.narrow and config.stages > 1 else 0
    multiplied = lanes * (keys * shape.D + values * shape.V)
    return shared, 48 + held + multiplied // 24 + lanes * (
        shape.tile_loads + shape.score_loads + shape.tile_values
    )


def describe(config: Config) -> str:
    sizes = f"{config.block_m}x{config.block_n}, {config.warps} warps, {config.stages} stages"
    return ", ".join([sizes, *axes_of([config])])
