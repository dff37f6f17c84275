"""The cost of a kernel: FLOPs, bytes of memory traffic, and time on a machine, by the roofline or as measured there."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.flops import by_name, is_uncounted, node_flops
from mtcompile.passes.analysis.rows import ROW_COPY_US, rows_that_cross
from mtcompile.passes.analysis.tiles import program_of, run_tiles
from mtcompile.passes.generators import replay
from mtcompile.passes.step_graph import is_view, iter_tensors, kernel_of, regions, results, span_nbytes

aten = torch.ops.aten
# Beside pointwise operations, these are compiled together with their neighbours.
_REDUCTIONS = {
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
}
_COPIES = {aten.clone.default, aten._to_copy.default, aten.cat.default}
# How much longer a FLOP of attention takes than one of a product (on an H200 with 2,048 tokens: 1.3 and 1.7).
_ATTENTION_US = {"forward": 1.25, "backward": 1.6}
_HIDING_NBYTES = 16 * 2**20  # an operation that moves more takes longer than the next one's launch, which goes on beside it
# A softmax whose rows are longer than this reads them again from memory: its operand twice more, its backward once more.
_LONG_ROW_NBYTES = 96 * 1024
_READ_AGAIN = {aten._softmax: 2, aten._log_softmax: 2, aten._softmax_backward_data: 1, aten._log_softmax_backward_data: 1}
# Of a collective through the host's memory, reads and writes of what a rank has; of the network between hosts, crossings.
PASSES = {"all_reduce": 7, "reduce_scatter": 5, "all_gather": 4, "all_gather of parts": 4, "broadcast": 4}
CROSSINGS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_gather of parts": 1, "broadcast": 2}
_FUSION_GAIN = 3  # fused, fusible operations move one in so many of the bytes that they move one by one (an estimate)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured times, in place of formulas. ``kernels``: ``kernel_digest`` -> microseconds of one run. ``scale``: queue ->
    measured time over the formula's for the same work; everything that was not measured itself is multiplied by it, so that
    it does not look cheap only because formulas are."""

    kernels: Mapping[str, float] = field(hash=False)
    scale: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds of one machine: GB/s of the device's memory, of the link per direction and of the host's memory, dense FLOP/s of
    products in bf16 and fp16, and the microseconds one operation costs to issue. ``fp32_flops``, ``tf32_flops``,
    ``fp64_flops``: FLOP/s of products in these; 0: as ``flops``. ``tf32_products``, ``tf32_convolutions``: torch is set to run
    those of fp32 in TF32. ``fuses``: its kernels are compiled. ``device_nbytes``: the memory of
    its device, 0 where it has what it is given. ``measured``: times measured on it, None for none. Of its disk: GB/s of reads
    and writes, its bytes, and the bytes that may be written to it in its life, 0 where that is not known. Of the network
    between hosts: GB/s per direction. ``strided_gops``: billions of elements per second of operations that go through values
    of different strides one element at a time; where that is not known, they take as long as their bytes.
    ``host_nbytes``: the RAM of its host, 0 where that is not known. ``update_gbps``: GB/s at which the host's cores update
    parameters; 0: as fast as its memory. ``watts``: what its device may draw; 0: not known. The defaults are
    of the emulated device on a small CPU."""

    name: str = "emulated"
    flops: float = 5e10
    memory_gbps: float = 10.0
    h2d_gbps: float = 5.0
    d2h_gbps: float = 5.0
    issue_us: float = 5.0
    fuses: bool = False
    host_gbps: float = 10.0
    device_nbytes: int = 0
    measured: Measured | None = None
    disk_read_gbps: float = 1.0
    disk_write_gbps: float = 0.7
    disk_nbytes: int = 0
    disk_rated_nbytes: int = 0
    network_gbps: float = 1.0
    updating_ranks: int = 1
    strided_gops: float = 1e9
    fp32_flops: float = 0.0
    tf32_flops: float = 0.0
    fp64_flops: float = 0.0
    tf32_products: bool = False
    tf32_convolutions: bool = False
    host_nbytes: int = 0
    update_gbps: float = 0.0
    watts: float = 0.0

    def scale(self, queue: str) -> float:
        if queue == "direct" and not self._measured_direct:
            queue = self._slower
        return 1.0 if self.measured is None else self.measured.scale.get(queue, 1.0)

    def copy_us(self, nbytes: int, queue: str) -> float:
        """The microseconds of a copy on a queue; ``direct``: from disk straight to the device, as long as the slower of drive
        and link takes, or as measured."""
        return self.scale(queue) * (nbytes / self.gbps(queue) / 1e3)

    @property
    def _measured_direct(self) -> bool:
        return self.measured is not None and "direct" in self.measured.scale

    @property
    def _slower(self) -> str:
        return max(("disk_read", "h2d"), key=lambda queue: self.scale(queue) / self.gbps(queue))

    def gbps(self, queue: str) -> float:
        if queue == "direct":
            return min(self.disk_read_gbps, self.h2d_gbps) if self._measured_direct else self.gbps(self._slower)
        if queue == "disk_read":
            return self.disk_read_gbps
        if queue == "disk_write":
            return self.disk_write_gbps
        return self.d2h_gbps if queue == "d2h" else self.h2d_gbps

    def drive_us(self, read: int, written: int) -> float:
        """The microseconds that the drive is busy with so many bytes: it reads or writes."""
        return self.copy_us(read, "disk_read") + self.copy_us(written, "disk_write")

    def update_us(self, host_nbytes: int, device_nbytes: int, state_copies: float, checked: bool = False) -> float:
        """The microseconds of an elementwise optimizer's update, by parameter bytes at home in each tier: it reads weight,
        gradient and state, and writes weight and state, once each; where the gradient is ``checked``, it reads it once more. On
        the host, each of ``updating_ranks`` updates a share."""
        passes = 3 + checked + 2 * state_copies
        return passes * (host_nbytes / self.updating_gbps + device_nbytes / self.memory_gbps) / 1e3

    @property
    def updating_gbps(self) -> float:
        """GB/s at which all updating ranks of the host update."""
        return min(self.update_gbps or self.host_gbps, self.host_gbps) * self.updating_ranks

    def shared_by(self, ranks: int, once: bool = False, hosts: int = 1) -> Machine:
        """Returns the machine as each of ``ranks`` on one host has it while all do the same: each with a device and a link of
        its own, and with an equal part of the host's memory traffic, through which copies go too. ``once``: their weights lie
        on the host once, and each updates a share of them; of ``hosts``, each updates a part."""
        part, sharing = self.host_gbps / ranks, ranks * hosts if once else 1
        links = {"h2d_gbps": min(self.h2d_gbps, part), "d2h_gbps": min(self.d2h_gbps, part)}
        return replace(self, host_gbps=part, updating_ranks=sharing, **links)

    def collective_us(self, nbytes: int, hosts: int, kind: str) -> float:
        """The microseconds of a collective over ``nbytes`` of each rank, on a machine ``shared_by`` those of a host. A byte is
        read and written where the others see it, added up there in shares, and read and written back; a broadcast adds nothing
        up, and a reduce-scatter gives nothing back. In an all-gather, each rank brings a share of what other hosts have; of
        parts at home, each rank then copies the whole.
        Between hosts, each host sends and receives the sum of its ranks about twice, or once where it needs a part of it."""
        ranks = self.gathering_ranks(hosts) if kind.startswith("all_gather") else 1
        whole = 2 * nbytes if kind == "all_gather of parts" else 0
        through_host = (PASSES[kind] * nbytes / ranks + whole) / self.host_gbps
        return (through_host + CROSSINGS[kind] * (hosts - 1) / hosts * nbytes / self.network_gbps) / 1e3

    def gathering_ranks(self, hosts: int) -> int:
        """How many ranks of one of the ``hosts`` each bring a share of what the other hosts have."""
        return max(1, self.updating_ranks // hosts)

    def contention_us(self, nbytes: int) -> float:
        """The microseconds that copies of ``nbytes`` cost the kernels they hide behind: both go through the same memory."""
        return nbytes / self.memory_gbps / 1e3

    @property
    def rates(self) -> tuple[float, float, float, float]:
        """FLOP/s of products in bf16 and fp16, of those in fp32, of convolutions in fp32, and of products in fp64."""
        fp32, tf32 = self.fp32_flops or self.flops, self.tf32_flops or self.flops
        in_fp32 = (tf32 if narrow else fp32 for narrow in (self.tf32_products, self.tf32_convolutions))
        return self.flops, *in_fp32, self.fp64_flops or self.flops

    def run_us(self, flops: Sequence[float], product_nbytes: int, nbytes: int, operations: int) -> float:
        """The microseconds of operations that run one after the other, scaled as measured kernels are: those of products by
        the roofline of ``flops``, by their ``rates``, and ``product_nbytes``, and those of the others, which move
        ``nbytes``."""
        flops_us = sum(each / rate for each, rate in zip(flops, self.rates, strict=True)) * 1e6
        products_us = max(flops_us, product_nbytes / self.memory_gbps / 1e3)
        return self.scale("compute") * (products_us + nbytes / self.memory_gbps / 1e3 + self.issue_us * operations)


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a kernel. ``operations``: those so small that their launch takes time. ``fusible_nbytes``, ``fusible``: the
    part of the bytes and of these operations that a compiler fuses. ``product_nbytes``: the bytes that operations with FLOPs
    move. ``slow_flops``: what attention would do with products in the time that it takes longer. ``strided``: elements of
    operations on values of different strides, which move ``strided_nbytes``. ``fp32_flops``, ``convolved_flops``,
    ``fp64_flops``: of all FLOPs and slow ones, those of products in fp32, of convolutions in fp32, and of products in fp64."""

    flops: int = 0
    nbytes: int = 0
    operations: int = 0
    fusible_nbytes: int = 0
    fusible: int = 0
    product_nbytes: int = 0
    slow_flops: int = 0
    strided: int = 0
    strided_nbytes: int = 0
    fp32_flops: int = 0
    convolved_flops: int = 0
    fp64_flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.nbytes + other.nbytes,
            self.operations + other.operations,
            self.fusible_nbytes + other.fusible_nbytes,
            self.fusible + other.fusible,
            self.product_nbytes + other.product_nbytes,
            self.slow_flops + other.slow_flops,
            self.strided + other.strided,
            self.strided_nbytes + other.strided_nbytes,
            self.fp32_flops + other.fp32_flops,
            self.convolved_flops + other.convolved_flops,
            self.fp64_flops + other.fp64_flops,
        )

    def flops_us(self, machine: Machine) -> float:
        """The microseconds without the memory traffic of products."""
        return replace(self, nbytes=self.nbytes - self.product_nbytes, product_nbytes=0).time_us(machine)

    def traffic_us(self, machine: Machine) -> float:
        """The microseconds without FLOPs."""
        return replace(self, flops=0, slow_flops=0, fp32_flops=0, convolved_flops=0, fp64_flops=0).time_us(machine)

    def time_us(self, machine: Machine) -> float:
        wide = self.fp32_flops, self.convolved_flops, self.fp64_flops
        flops = self.flops + self.slow_flops - sum(wide), *wide
        nbytes, operations = self.nbytes - self.product_nbytes, self.operations
        if machine.fuses:
            nbytes += self.fusible_nbytes // _FUSION_GAIN - self.fusible_nbytes
            operations -= self.fusible
        else:
            nbytes += max(0, round(self.strided * machine.memory_gbps / machine.strided_gops) - self.strided_nbytes)
        return machine.run_us(flops, self.product_nbytes, nbytes, operations)


def kernel_us(kernel: fx.GraphModule, machine: Machine) -> float:
    """Microseconds of one run: as measured, or by formula."""
    measured_us = None if machine.measured is None else machine.measured.kernels.get(kernel_digest(kernel))
    return kernel_cost(kernel).time_us(machine) if measured_us is None else measured_us


def formula_us(kernel: fx.GraphModule, machine: Machine) -> float:
    """Microseconds of one run, whatever was measured."""
    return kernel_cost(kernel).time_us(replace(machine, measured=None))


def kernel_digest(kernel: fx.GraphModule) -> str:
    """A digest of the kernel's key: the same for the same body in every process."""
    if "digest" not in kernel.meta:
        kernel.meta["digest"] = hashlib.sha256(kernel.meta["key"].encode()).hexdigest()
    return str(kernel.meta["digest"])


def uncounted(step: fx.GraphModule) -> list[str]:
    """Says of which operations of a step no FLOPs are counted, though they may multiply matrices."""
    kernels = {str(region.target): kernel_of(step, region) for region in regions(step)}
    nodes = (node for kernel in kernels.values() for node in kernel.graph.nodes if node.op == "call_function")
    names = sorted({str(node.target) for node in nodes if is_uncounted(node)})
    told = "FLOPs are not counted of {}: it has no formula, so its predicted time is that of its memory traffic alone"
    return [told.format(name) for name in names]


def kernel_cost(kernel: fx.GraphModule) -> Cost:
    """``body_cost``, worked out once per kernel."""
    if "cost" not in kernel.meta:
        kernel.meta["cost"] = body_cost(kernel.graph)
    cost: Cost = kernel.meta["cost"]
    return cost


def body_cost(body: fx.Graph) -> Cost:
    """FLOPs, bytes read and written, and number of operations of a body run operation by operation."""
    return sum((node_cost(node) for node in body.nodes if node.op == "call_function" and not is_view(node)), Cost())


def node_cost(node: fx.Node) -> Cost:
    """The cost of one operation; a getitem costs nothing."""
    if node.target is operator.getitem:
        return Cost()
    if node.target is run_tiles:
        return _cost_of_tiles(node)
    written, read = [*iter_tensors(node)], [v for operand in node.all_input_nodes for v in iter_tensors(operand)]
    nbytes = sum(map(span_nbytes, (*written, *read))) + _read_again_nbytes(node)
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    fusible = pointwise or node.target in _REDUCTIONS
    flops, waits = node_flops(node), int(nbytes < _HIDING_NBYTES)
    slow_flops = round(flops * (_flop_us(node) - 1))
    strided = _strided(node.target, written, read) if pointwise or node.target in _COPIES else 0
    about = flops, nbytes, waits, nbytes * fusible, waits * fusible, nbytes if flops else 0, slow_flops
    wide = _wide_flops(node, read, flops + slow_flops) if flops else (0, 0, 0)
    return Cost(*about, strided, nbytes if strided else 0, *wide)


def _wide_flops(node: fx.Node, read: Sequence[torch.Tensor], flops: int) -> tuple[int, int, int]:
    """FLOPs of products in fp32, of convolutions in fp32, and of products in fp64, by what an operation multiplies."""
    dtype = next((value.dtype for value in read if value.is_floating_point() or value.is_complex()), None)
    fp32, convolves = dtype in (torch.float32, torch.complex64), "conv" in str(node.target)
    return (
        flops if fp32 and not convolves else 0,
        flops if fp32 and convolves else 0,
        flops if dtype in (torch.float64, torch.complex128) else 0,
    )


def _strided(operation: Any, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> int:
    """The elements of an elementwise operation or copy that goes through its values one element at a time, as they do not lie
    alike: in other orders or with gaps, or one is read again for many elements; else 0."""
    if not written or not read:
        return 0
    result = written[0]
    if operation is aten.cat.default:  # parts that are contiguous are copied as they lie
        return 0 if all(value.is_contiguous() for value in read) else result.numel()
    alike = all(v.stride() == result.stride() and v.shape == result.shape for v in read if v.numel() > 1)
    return 0 if alike and span_nbytes(result) == result.numel() * result.element_size() else result.numel()


def _flop_us(node: fx.Node) -> float:
    """How much longer a FLOP of an operation takes than one of a product."""
    operation = str(node.args[2] if node.target is replay else node.target)
    if "scaled_dot_product" not in operation:
        return 1.0
    return _ATTENTION_US["backward" if "backward" in operation else "forward"]


def _read_again_nbytes(node: fx.Node) -> int:
    """The bytes that a softmax of long rows reads more than once."""
    times = _READ_AGAIN.get(getattr(node.target, "overloadpacket", None), 0)
    if not times:
        return 0
    value, dim = next(iter_tensors(node.all_input_nodes[0])), by_name(node.target, node.args, node.kwargs)["dim"]
    row = value.shape[dim] * value.element_size() if value.dim() else 0
    return times * span_nbytes(value) if row > _LONG_ROW_NBYTES else 0


def _cost_of_tiles(node: fx.Node) -> Cost:
    """The cost of all tiles, each of which also writes its part of the results."""
    program = program_of(str(node.args[0]))
    bodies = (kernel_cost(body) for body, count in program.bodies for _ in range(count))
    results = len(program.makes) * len(program.bounds)
    return sum(bodies, Cost(0, 2 * sum(span_nbytes(v) for v in iter_tensors(node)), results))


def rows_us(machine: Machine, queue: str, rows: int, nbytes: int, whole_nbytes: int) -> float:
    """The microseconds of a copy of ``rows``, of ``nbytes`` together, of a value of ``whole_nbytes``. On their way home, the
    host first fills the place of the value with zeros."""
    zeros = whole_nbytes / machine.host_gbps / 1e3 if queue == "d2h" else 0.0
    return machine.copy_us(nbytes, queue) + rows * ROW_COPY_US + zeros


def crossing(call: fx.Node, machine: Machine, queue: str) -> tuple[int, float]:
    """Returns the bytes that a copy of rows moves at most, and the microseconds that it takes then."""
    value, *indices = call.args
    count, nbytes = rows_that_cross(value.meta["val"], [each.meta["val"] for each in indices])
    return nbytes, rows_us(machine, queue, count, nbytes, results(call)[0].meta["nbytes"])
