"""A device that is a GPU: memory, cubins and launches by `cuda-bindings` alone. Has not run on a GPU yet."""

import ctypes
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.manifest import find
from stepkernel.cuda.spec import KernelSpec


class GpuMissing(RuntimeError):
    """There is no usable GPU, driver or `cuda-bindings`."""


class GpuDevice:
    """One kernel of a directory of cubins on GPU `ordinal` (`executor.Device`).

    Raises GpuMissing; ValueError if the directory has no kernel for this GPU, or its CTAs cannot be resident together,
    which would make every barrier wait in vain.
    """

    def __init__(self, directory: Path, spec: KernelSpec, ordinal: int = 0) -> None:
        self.spec = spec
        self._cu = _driver()
        cu = self._cu
        try:
            self._call(cu.cuInit(0))
        except RuntimeError as error:  # the driver's library is not there
            raise GpuMissing(f"no CUDA driver: {error}") from None
        device = self._call(cu.cuDeviceGet(ordinal))
        self._context = self._call(cu.cuDevicePrimaryCtxRetain(device))
        self._call(cu.cuCtxSetCurrent(self._context))
        names = cu.CUdevice_attribute
        major = self._call(cu.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        minor = self._call(cu.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
        processors = self._call(cu.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device))
        self.name = self._call(cu.cuDeviceGetName(256, device)).split(b"\0")[0].decode()
        # Cubins of "a" architectures load on exactly that compute capability.
        self.arch = f"sm_{major}{minor}a"
        path, row = find(directory, spec, self.arch)
        self._module = self._call(cu.cuModuleLoadData(path.read_bytes()))
        self._function = self._call(cu.cuModuleGetFunction(self._module, row["entry"].encode()))
        each = self._call(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, spec.threads, 0))
        if each * processors < spec.grid:
            raise ValueError(f"{spec.name}: {spec.grid} CTAs, {self.name} holds {each} x {processors} at a time")
        self._sizes: dict[int, int] = {}

    def put(self, name: str, values: NDArray[Any], constant: bool = False) -> int:
        address = self.allocate(max(1, values.nbytes))
        self.write(address, values)
        return address

    def allocate(self, size: int) -> int:
        address = int(self._call(self._cu.cuMemAlloc(size)))
        self._sizes[address] = size
        return address

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

    def start(self, arguments: list[int]) -> None:
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
        self._call(cu.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def milliseconds(self, work: Any, times: int) -> list[float]:
        """GPU time of each call of `work`, which starts things on the default stream, by events around it."""
        cu = self._cu
        pairs = [[self._call(cu.cuEventCreate(0)) for _ in "ab"] for _ in range(times)]
        for before, after in pairs:
            self._call(cu.cuEventRecord(before, 0))
            work()
            self._call(cu.cuEventRecord(after, 0))
        self._call(cu.cuCtxSynchronize())
        return [float(self._call(cu.cuEventElapsedTime(before, after))) for before, after in pairs]

    def close(self) -> None:
        """Frees the memory and the module; the object is of no use afterwards."""
        for address in self._sizes:
            self._call(self._cu.cuMemFree(address))
        self._sizes.clear()
        self._call(self._cu.cuModuleUnload(self._module))

    def _call(self, result: tuple[Any, ...]) -> Any:
        status, *values = result
        if int(status) != 0:
            _, name = self._cu.cuGetErrorName(status)
            _, text = self._cu.cuGetErrorString(status)
            raise GpuMissing(f"CUDA driver: {(name or b'?').decode()}: {(text or b'?').decode()}")
        return values[0] if len(values) == 1 else tuple(values)


def _driver() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise GpuMissing(f"cuda-bindings is not installed ({error}): pip install 'stepkernel[cuda]'") from None
