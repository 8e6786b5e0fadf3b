"""pynvml, if it is installed, and what its errors mean for the collector."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

try:
    import pynvml
except ImportError:  # the agent was installed without its extra
    pynvml = None

__all__ = [
    "GONE", "NOTHING_THERE", "NO_VALUES", "UNSUPPORTED", "address", "field_values", "function",
    "optional", "pynvml", "succeeds", "text", "versions",
]  # fmt: skip

# Permanent for this GPU, driver or user, so the call is not repeated. A driver rejects the number
# of a field, clock or threshold that is newer than itself as an invalid argument.
UNSUPPORTED: tuple[type[Exception], ...] = ()
GONE: tuple[type[Exception], ...] = ()  # the whole GPU or the driver is gone
NOTHING_THERE: tuple[type[Exception], ...] = ()
if pynvml is not None:
    UNSUPPORTED = (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_InvalidArgument,
        pynvml.NVMLError_ArgumentVersionMismatch,
        pynvml.NVMLError_Deprecated,
    )
    GONE = (
        pynvml.NVMLError_GpuIsLost,
        pynvml.NVMLError_ResetRequired,
        pynvml.NVMLError_Uninitialized,
        pynvml.NVMLError_DriverNotLoaded,
    )
    NOTHING_THERE = (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument)


# All bits set: "not available" in the result of a call that returns success.
NO_VALUES = frozenset({0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF})


def function(name: str) -> Callable[..., Any]:
    """Return a function of pynvml by name.

    If this pynvml lacks it, one that fails as if the driver did.
    """
    found: Callable[..., Any] | None = getattr(pynvml, name, None)
    if found is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    return found


def field_values(handle: Any, count: int, values: ctypes.Array[ctypes.c_char]) -> None:
    """Have the driver fill in `count` nvmlFieldValue_t, whose fields and scopes the caller has set.

    pynvml's own function rebuilds that array on each call, which costs several times the driver
    call.
    """
    try:
        call = pynvml.nvmlLib.nvmlDeviceGetFieldValues
    except AttributeError:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND) from None
    result = call(handle, ctypes.c_int(count), values)
    if result:
        raise pynvml.NVMLError(result)


def optional(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except pynvml.NVMLError:
        return None


def succeeds(call: Callable[[], Any]) -> bool:
    """Return whether the call returns without an error of NVML."""
    try:
        call()
    except pynvml.NVMLError:
        return False
    return True


def text(call: Callable[..., Any], *arguments: Any) -> str:
    """Return a call's text. Bytes that are not UTF-8, on which pynvml fails, are replaced."""
    try:
        found = call(*arguments)
    except UnicodeDecodeError as error:
        found = error.object
    return found.decode(errors="replace") if isinstance(found, bytes) else str(found)


def address(handle: Any) -> int | None:
    found: int | None = ctypes.cast(handle, ctypes.c_void_p).value
    return found


def versions() -> dict[str, str]:
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return {
        "driver_version": text(pynvml.nvmlSystemGetDriverVersion),
        "nvml_version": text(pynvml.nvmlSystemGetNVMLVersion),
        "cuda_version": f"{cuda // 1000}.{cuda % 1000 // 10}",
    }
