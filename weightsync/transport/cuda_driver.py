"""The six calls of the CUDA driver that exporting and mapping memory takes, through ctypes.

driver = CudaDriver()
base, num_bytes = driver.address_range(tensor.data_ptr())
handle = driver.export_handle(base)              # 64 bytes, for another process
address = driver.open_handle(handle)             # there
driver.close_handle(address)
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p

from weightsync.errors import TransportError

HANDLE_BYTES = 64
_ATTRIBUTE_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_ERROR_INVALID_VALUE = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class CudaDriver:
    """libcuda. The calling thread needs a current context, which any earlier torch CUDA call has made.

    Raises:
        TransportError: There is no driver on this machine.
    """

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError(f"CUDA IPC needs the NVIDIA driver: {error}") from error
        self._lib.cuMemGetAddressRange_v2.argtypes = [POINTER(c_ulonglong), POINTER(c_size_t), c_ulonglong]
        self._lib.cuPointerGetAttribute.argtypes = [c_void_p, c_int, c_ulonglong]
        self._lib.cuIpcGetMemHandle.argtypes = [POINTER(_IpcHandle), c_ulonglong]
        self._lib.cuIpcOpenMemHandle_v2.argtypes = [POINTER(c_ulonglong), _IpcHandle, c_uint]
        self._lib.cuIpcCloseMemHandle.argtypes = [c_ulonglong]
        self._lib.cuGetErrorString.argtypes = [c_int, POINTER(c_char_p)]
        self._pointer_attribute = self._lib.cuPointerGetAttribute  # looked up once: asked per allocation in every push

    def _check(self, code: int, what: str, hint: str = "") -> None:
        if code:
            text = c_char_p()
            self._lib.cuGetErrorString(code, byref(text))
            words = (text.value or b"unknown").decode()
            raise TransportError(f"{what} failed: {words} (CUDA driver error {code}){hint}")

    def address_range(self, address: int) -> tuple[int, int]:
        """Base address and size in bytes of the allocation that holds `address`."""
        base, size = c_ulonglong(), c_size_t()
        self._check(self._lib.cuMemGetAddressRange_v2(byref(base), byref(size), address), "cuMemGetAddressRange")
        return base.value, size.value

    def buffer_id(self, address: int) -> int:
        """The driver's id of the allocation, never used twice in a process; -1 if the address is not allocated."""
        number = c_uint64()
        code = self._pointer_attribute(byref(number), _ATTRIBUTE_BUFFER_ID, address)
        if code == _ERROR_INVALID_VALUE:
            return -1
        self._check(code, "cuPointerGetAttribute")
        return number.value

    def export_handle(self, base: int) -> bytes:
        """The 64-byte handle of an allocation.

        Raises:
            TransportError: The memory came from a pool or from expandable segments.
        """
        handle = _IpcHandle()
        hint = "; memory of expandable_segments or of a cudaMallocAsync pool cannot be exported"
        self._check(self._lib.cuIpcGetMemHandle(byref(handle), base), "cuIpcGetMemHandle", hint)
        return ctypes.string_at(byref(handle), HANDLE_BYTES)

    def open_handle(self, handle: bytes) -> int:
        """Maps another process's allocation; gives its address here."""
        value = _IpcHandle.from_buffer_copy(handle)
        address = c_ulonglong()
        code = self._lib.cuIpcOpenMemHandle_v2(byref(address), value, _LAZY_PEER_ACCESS)
        self._check(code, "cuIpcOpenMemHandle", "; is the trainer still alive, and on the same GPU?")
        return address.value

    def close_handle(self, address: int) -> None:
        """Unmaps what `open_handle` mapped."""
        self._check(self._lib.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")
