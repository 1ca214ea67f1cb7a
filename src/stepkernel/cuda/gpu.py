"""A GPU and its kernels: memory, cubins and launches by `cuda-bindings` alone. Has not run on a GPU yet."""

import ctypes
import statistics
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.manifest import find
from stepkernel.cuda.spec import KernelSpec

COPY_BYTES, COPIES = 4 << 30, 20


class GpuMissing(ValueError):
    """There is no usable GPU, driver or `cuda-bindings`."""


class GpuFailed(RuntimeError):
    """A call of the driver failed on a GPU that is there."""


class Gpu:
    """GPU `ordinal`, by its primary context, which other libraries of this process use as well.

    arch  as kernels are built for it: cubins of "a" architectures load on exactly that compute capability
    fits  multiprocessors: CTAs that run at a time, at one for each

    Raises GpuMissing.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self.driver = cu = _driver()
        try:
            call(cu, cu.cuInit(0))
            count = call(cu, cu.cuDeviceGetCount())
        except RuntimeError as error:  # the driver's library is not there, or it has nothing to drive
            raise GpuMissing(f"no GPU that the CUDA driver can use: {error}") from None
        if not 0 <= ordinal < count:
            raise GpuMissing(f"GPU {ordinal}: this machine has {count}")
        device = call(cu, cu.cuDeviceGet(ordinal))
        self.context = call(cu, cu.cuDevicePrimaryCtxRetain(device))
        call(cu, cu.cuCtxSetCurrent(self.context))
        attribute = cu.CUdevice_attribute
        major, minor, self.fits = (
            call(cu, cu.cuDeviceGetAttribute(which, device))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )
        )
        self.name = call(cu, cu.cuDeviceGetName(256, device)).split(b"\0")[0].decode()
        self.arch = f"sm_{major}{minor}a"

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = call(self.driver, self.driver.cuMemGetInfo())
        return int(free), int(total)

    def copy_gbps(self) -> float:
        """Median of COPIES copies of COPY_BYTES, or of a quarter of what is free."""
        cu, size = self.driver, min(COPY_BYTES, self.memory()[0] // 4)
        source, target = (call(cu, cu.cuMemAlloc(size)) for _ in "ab")
        try:
            times = self.milliseconds(lambda: call(cu, cu.cuMemcpyDtoDAsync(target, source, size, 0)), COPIES)
        finally:
            for address in (source, target):
                call(cu, cu.cuMemFree(address))
        return 2 * size / statistics.median(times[COPIES // 4 :]) / 1e6

    def milliseconds(self, work: Callable[[], object], times: int) -> list[float]:
        """GPU time of each call of `work`, which starts things on the default stream, by events around it."""
        cu = self.driver
        pairs = [[call(cu, cu.cuEventCreate(0)) for _ in "ab"] for _ in range(times)]
        for before, after in pairs:
            call(cu, cu.cuEventRecord(before, 0))
            work()
            call(cu, cu.cuEventRecord(after, 0))
        call(cu, cu.cuCtxSynchronize())
        found = [float(call(cu, cu.cuEventElapsedTime(before, after))) for before, after in pairs]
        for event in (event for pair in pairs for event in pair):
            call(cu, cu.cuEventDestroy(event))
        return found

    def load(self, directory: Path, spec: KernelSpec) -> "GpuDevice":
        """A kernel of this GPU; all of them share its memory."""
        return GpuDevice(directory, spec, self)


class GpuDevice:
    """One kernel of a directory of cubins on a GPU (`device_protocol.Device`).

    Raises GpuMissing; ValueError if the directory has no kernel for this GPU, or its CTAs cannot be resident together,
    which would make every barrier wait in vain.
    """

    def __init__(self, directory: Path, spec: KernelSpec, gpu: Gpu | None = None) -> None:
        self.spec = spec
        self.gpu = gpu = Gpu() if gpu is None else gpu
        self._cu = cu = gpu.driver
        path, row = find(directory, spec, gpu.arch)
        if path.suffix != ".cubin":
            raise ValueError(f"{path}: is PTX, a GPU runs cubins; build the kernels without --ptx")
        self._module = self._call(cu.cuModuleLoadData(path.read_bytes()))
        self._function = self._call(cu.cuModuleGetFunction(self._module, row["entry"].encode()))
        each = self._call(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, spec.threads, 0))
        if each * gpu.fits < spec.grid:
            raise ValueError(f"{spec.name}: {spec.grid} CTAs, {gpu.name} holds {each} x {gpu.fits} at a time")
        self._sizes: dict[int, int] = {}

    def put(self, name: str, values: NDArray[Any], constant: bool = False) -> int:
        address = self.allocate(max(1, values.nbytes))
        self.write(address, values)
        return address

    def zeros(self, name: str, size: int) -> int:
        address = self.allocate(max(1, size))
        self.clear(address, size)
        return address

    def allocate(self, size: int) -> int:
        address = int(self._call(self._cu.cuMemAlloc(size)))
        self._sizes[address] = size
        return address

    def clear(self, address: int, size: int) -> None:
        if size:
            self._call(self._cu.cuMemsetD8(address, 0, size))

    def copy(self, target: int, source: int, size: int) -> None:
        """Within the device."""
        self._call(self._cu.cuMemcpyDtoD(target, source, size))

    def share(self, address: int) -> bytes:
        """A handle by which another process opens an allocation."""
        return bytes(self._call(self._cu.cuIpcGetMemHandle(address)).reserved)

    def open_shared(self, handle: bytes) -> int:
        """The address here of an allocation of another process, on a GPU that this one reaches."""
        opened = self._cu.CUipcMemHandle()
        opened.reserved = handle
        flag = self._cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call(self._cu.cuIpcOpenMemHandle(opened, int(flag))))

    def close_shared(self, address: int) -> None:
        self._call(self._cu.cuIpcCloseMemHandle(address))

    def write(self, address: int, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values)
        if data.nbytes:
            self._call(self._cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        found = np.empty(shape, dtype)
        if found.nbytes:
            self._call(self._cu.cuMemcpyDtoH(found.ctypes.data, address, found.nbytes))
        return found

    def launch(self, arguments: list[int]) -> None:
        self.start(arguments)
        self._call(self._cu.cuCtxSynchronize())

    def start(self, arguments: list[int], stream: Any = 0) -> None:
        """Launches the kernel without waiting for it."""
        cu = self._cu
        values = [ctypes.c_uint64(value & (1 << 64) - 1) for value in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.spec.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.spec.threads, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        config.hStream = stream
        self._call(cu.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def recorded(self, arguments: list[int]) -> Callable[[], None]:
        """The launch as a graph of one node: what is returned replays it, without waiting for it."""
        cu = self._cu
        stream = self._call(cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self._call(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        self.start(arguments, stream)
        graph = self._call(cu.cuStreamEndCapture(stream))
        ready = self._call(cu.cuGraphInstantiate(graph, 0))
        return lambda: self._call(cu.cuGraphLaunch(ready, 0))

    def close(self) -> None:
        """Frees the memory and the module; the object is of no use afterwards."""
        for address in self._sizes:
            self._call(self._cu.cuMemFree(address))
        self._sizes.clear()
        self._call(self._cu.cuModuleUnload(self._module))

    def _call(self, result: tuple[Any, ...]) -> Any:
        return call(self._cu, result)


def call(driver: Any, result: tuple[Any, ...]) -> Any:
    """What a call of the driver returns behind its status. Raises GpuFailed."""
    status, *values = result
    if int(status) != 0:
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        raise GpuFailed(f"CUDA driver: {(name or b'?').decode()}: {(text or b'?').decode()}")
    return values[0] if len(values) == 1 else tuple(values)


def _driver() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise GpuMissing(f"cuda-bindings is not installed ({error}): pip install 'stepkernel[cuda]'") from None
