"""mbarriers, the loads of tensors (TMA) and the copies whose end an mbarrier counts.

Whatever is asynchronous ends only when no thread can go on, the newest first: the worst case that the PTX manual
allows. Until then the target of a load holds NaN.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from ptx.formats import Array
from ptx.module import Address, Fault
from ptx.state import PARAM, SHARED
from ptx.transfers import Transfers

TENSOR_MAP_BYTES = 128


class TensorMap(NamedTuple):
    """What cuTensorMapEncodeTiled is given, with the 128-byte swizzle. Axes are the innermost first."""

    base: int  # address
    element_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of the innermost axis too
    box: tuple[int, ...]

    @classmethod
    def of(cls, array: Array, box: tuple[int, ...]) -> TensorMap:
        return cls(array.ctypes.data, array.itemsize, array.shape[::-1], array.strides[::-1], box)

    @classmethod
    def of_simt(cls, data: bytes) -> TensorMap:
        """What csrc/simt/ptx_sm90_simt.h has in the place of the driver's map, which is not documented."""
        base, size, *numbers = struct.unpack_from("QI4x4Q3Q4I", data)
        return cls(base, size, tuple(numbers[:4]), (size, *numbers[4:7]), tuple(numbers[7:]))


@dataclass
class MBarrier:
    count: int
    pending: int
    transaction_bytes: int = 0  # expected and not yet delivered; below 0 where the bytes came first
    phase: int = 0
    delivered: bool = False  # something asynchronous in the phase that is open
    unawaited: bool = False  # and in the last one that ended, which no thread has waited for


class Load(NamedTuple):
    to: Array  # addresses in shared memory of 16 bytes each
    data: Array  # [pieces, 16]
    barrier: int


class Arrivals(NamedTuple):
    """One cp.async.mbarrier.arrive.noinc."""

    threads: Array  # bool [n]
    barriers: Array  # [n] addresses
    copies: int  # how many cp.async had been issued before


def swizzled_128(addresses: Array) -> Array:
    """Where the 128-byte swizzle places the bytes of these shared addresses.

    The pattern repeats every eight rows of 128 bytes: the 16-byte column c of row r is stored in column c xor r.
    """
    row, column = addresses // 128 % 8, addresses // 16 % 8
    return addresses + ((column ^ row) - column) * 16


class MBarriers(Transfers):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # By generic address; a parameter's is PARAM + its offset, and one that is not named here was made by simt.
        self.tensor_maps: dict[int, TensorMap] = {}
        self.barriers: dict[int, MBarrier] = {}
        self.under_way: list[Load | Arrivals] = []
        self.parked = np.zeros(self.n, bool)  # threads that try their instruction again later

    def _shared_addresses(self, operand: Address) -> Array:
        addresses = self.address(operand)
        return np.where(addresses >= SHARED, addresses - SHARED, addresses)

    def _barrier_at(self, address: int) -> MBarrier:
        if address not in self.barriers:
            raise Fault("mbarrier not initialised")
        return self.barriers[address]

    def _end_phase_if_complete(self, barrier: MBarrier) -> None:
        if barrier.pending == 0 and barrier.transaction_bytes == 0:
            barrier.pending = barrier.count
            barrier.phase += 1
            barrier.delivered, barrier.unawaited = False, barrier.delivered
            self.parked[:] = False

    def _arrive_at(self, address: int) -> None:
        barrier = self._barrier_at(address)
        if barrier.pending == 0:
            raise Fault("more arrivals than the mbarrier was initialised for")
        barrier.pending -= 1
        self._end_phase_if_complete(barrier)

    def do_mbarrier(self, name, operands):
        place = 0 if name[1] == "init" else 1
        addresses = self._shared_addresses(operands[place])
        if (addresses[self.mask] % 8).any() or (addresses[self.mask] + 8 > len(self.shared)).any():
            raise Fault("misaligned mbarrier, or out of bounds")
        if name[1] == "try_wait":
            return self._try_wait(name, operands, addresses)
        last = operands[place + 1] if len(operands) > place + 1 else 1
        values = np.broadcast_to(self.get(last, np.uint32), self.n)
        for thread in np.flatnonzero(self.mask):
            address, value = int(addresses[thread]), int(values[thread])
            if name[1] == "init":
                self.barriers[address] = MBarrier(value, value)
            elif name[1] != "arrive":
                raise Fault("this mbarrier instruction is not known here")
            elif "expect_tx" in name:
                self._barrier_at(address).transaction_bytes += value
                self._arrive_at(address)
            else:
                for _ in range(value):
                    self._arrive_at(address)

    def _try_wait(self, name, operands, addresses):
        """Threads whose phase has not ended wait here, as long as it takes."""
        if "parity" not in name:
            raise Fault("try_wait without .parity is not known here")
        parities = np.broadcast_to(self.get(operands[2], np.uint32), self.n)
        ended = np.zeros(self.n, bool)
        for address in np.unique(addresses[self.mask]):
            barrier = self._barrier_at(int(address))
            waited = self.mask & (addresses == address) & (barrier.phase % 2 != parities)
            barrier.unawaited &= not waited.any()
            ended |= waited
        self.parked |= self.mask & ~ended
        self.put(operands[0], ended)

    def do_cp(self, name, operands):
        if name[2] == "bulk":
            self._load_tensor(name, operands)
        elif name[2] == "mbarrier":
            if name[3:5] != ("arrive", "noinc"):
                raise Fault("this cp.async.mbarrier is not known here")
            addresses = self._shared_addresses(operands[0])
            self.under_way.append(Arrivals(self.mask.copy(), addresses, self.issued))
        else:
            super().do_cp(name, operands)

    def _load_tensor(self, name, operands):
        if name[3] != "tensor" or operands[1].coordinates is None or "multicast::cluster" in name:
            raise Fault("this cp.async.bulk is not known here")
        to, barriers = (self._shared_addresses(operand) for operand in (operands[0], operands[2]))
        maps = self.address(operands[1])
        coordinates = [np.broadcast_to(self.get(c, np.int32), self.n) for c in operands[1].coordinates]
        for thread in np.flatnonzero(self.mask):
            tensor = self._tensor_map_at(int(maps[thread]))
            if tensor is None or not len(tensor.box) == int(name[4][0]) == len(coordinates):
                raise Fault("no tensor map there, or one of another rank")
            data = self._box(tensor, [int(c[thread]) for c in coordinates])
            start = int(to[thread])
            if tensor.box[0] * tensor.element_bytes != 128 or start % 128 or start + data.size > len(self.shared):
                raise Fault("the 128-byte swizzle needs rows of 128 bytes at a multiple of 128 in shared memory")
            self._barrier_at(int(barriers[thread]))
            pieces = swizzled_128(start + np.arange(0, data.size, 16))
            self.shared[start : start + data.size] = 0xFF
            self.under_way.append(Load(pieces, data.reshape(-1, 16), int(barriers[thread])))

    def _tensor_map_at(self, address: int) -> TensorMap | None:
        if address not in self.tensor_maps and PARAM <= address <= PARAM + len(self.params) - TENSOR_MAP_BYTES:
            return TensorMap.of_simt(self.params[address - PARAM :].tobytes())
        return self.tensor_maps.get(address)

    def _box(self, tensor: TensorMap, at: list[int]) -> Array:
        """The bytes of a box, the innermost axis last; zeros outside the tensor."""
        axes = [start + np.arange(length) for start, length in zip(at, tensor.box, strict=True)][::-1]
        places = np.meshgrid(*axes, indexing="ij")
        inside, address = np.ones(places[0].shape, bool), np.full(places[0].shape, tensor.base, np.int64)
        for place, size, stride in zip(places, tensor.sizes[::-1], tensor.strides[::-1], strict=True):
            inside &= (place >= 0) & (place < size)
            address += place * stride
        data = np.zeros((*inside.shape, tensor.element_bytes), np.uint8)
        index = self.memory.index(address[inside], tensor.element_bytes)
        data[inside] = self.memory.bytes[index[:, None] + np.arange(tensor.element_bytes)]
        return data.reshape(-1)

    def check_exit(self) -> None:
        super().check_exit()
        if self.under_way or any(barrier.unawaited for barrier in self.barriers.values()):
            raise Fault("exits with a load in flight")

    def deliver_one(self) -> bool:
        """Ends the newest of what is under way; False where nothing is."""
        if not self.under_way:
            return False
        ended = self.under_way.pop()
        if isinstance(ended, Load):
            self.shared[ended.to[:, None] + np.arange(16)] = ended.data
            barrier = self._barrier_at(ended.barrier)
            barrier.transaction_bytes -= ended.data.size
            barrier.delivered = True
            self._end_phase_if_complete(barrier)
        else:
            self.deliver_copies(lambda copies: ended.threads if copies.number < ended.copies else self.nobody)
            for thread in np.flatnonzero(ended.threads):
                self._barrier_at(int(ended.barriers[thread])).delivered = True
                self._arrive_at(int(ended.barriers[thread]))
        return True
