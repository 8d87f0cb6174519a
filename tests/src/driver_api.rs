//! CUDA's driver API, as far as the tests call it, from NVIDIA's own libcuda.

use std::ffi::{CStr, c_char, c_int, c_void};

use anyhow::{Context, Result, ensure};
use libloading::{Library, Symbol};

/// `CUdeviceptr`.
pub type DevicePtr = u64;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: c_int = 2;

/// `CUipcMemHandle`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

/// `CUDA_ERROR_ILLEGAL_ADDRESS`.
pub const ILLEGAL_ADDRESS: c_int = 700;

/// `CUDA_MEMSET_NODE_PARAMS`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FillParams {
    /// Destination.
    pub to: DevicePtr,
    /// Bytes between rows.
    pub pitch: usize,
    /// Value of an element.
    pub value: u32,
    /// Bytes of an element.
    pub element: u32,
    /// Elements of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

/// libcuda, with a context on the vGPU.
#[derive(Debug)]
pub struct Cuda {
    library: Library,
}

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $kind:ty),*);)*) => {
        impl Cuda {
            $($(#[$doc])*
            #[allow(clippy::undocumented_unsafe_blocks, reason = "documented inside, for all calls")]
            pub fn $name(&self, $($arg: $kind),*) -> Result<c_int> {
                unsafe {
                    // SAFETY: the type is that of cuda.h. The tests pass pointers to memory that is
                    // large enough, as cuda.h asks.
                    let name = concat!($symbol, "\0").as_bytes();
                    let call: Symbol<'_, unsafe extern "C" fn($($kind),*) -> c_int> =
                        self.library.get(name)?;
                    Ok(call($($arg),*))
                }
            })*
        }
    };
}

calls! {
    /// `cuInit`.
    init = "cuInit" (flags: u32);
    /// `cuDeviceGetName`.
    device_get_name = "cuDeviceGetName" (name: *mut c_char, len: c_int, device: c_int);
    /// `cuDeviceGetUuid`.
    device_get_uuid = "cuDeviceGetUuid" (uuid: *mut [u8; 16], device: c_int);
    /// `cuDevicePrimaryCtxRetain`.
    primary_ctx_retain = "cuDevicePrimaryCtxRetain" (context: *mut *mut c_void, device: c_int);
    /// `cuCtxSetCurrent`.
    ctx_set_current = "cuCtxSetCurrent" (context: *mut c_void);
    /// `cuMemGetInfo`.
    mem_get_info = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
    /// `cuMemAlloc`.
    mem_alloc = "cuMemAlloc_v2" (ptr: *mut DevicePtr, bytes: usize);
    /// `cuMemFree`.
    mem_free = "cuMemFree_v2" (ptr: DevicePtr);
    /// `cuMemAllocHost`.
    mem_alloc_host = "cuMemAllocHost_v2" (ptr: *mut *mut c_void, bytes: usize);
    /// `cuMemFreeHost`.
    mem_free_host = "cuMemFreeHost" (ptr: *mut c_void);
    /// `cuMemAllocManaged`.
    mem_alloc_managed = "cuMemAllocManaged" (ptr: *mut DevicePtr, bytes: usize, flags: u32);
    /// `cuIpcGetMemHandle`.
    ipc_get_mem_handle = "cuIpcGetMemHandle" (handle: *mut IpcHandle, ptr: DevicePtr);
    /// `cuIpcOpenMemHandle`.
    ipc_open_mem_handle = "cuIpcOpenMemHandle_v2"
        (ptr: *mut DevicePtr, handle: IpcHandle, flags: u32);
    /// `cuIpcCloseMemHandle`.
    ipc_close_mem_handle = "cuIpcCloseMemHandle" (ptr: DevicePtr);
    /// `cuIpcGetEventHandle`.
    ipc_get_event_handle = "cuIpcGetEventHandle" (handle: *mut IpcHandle, event: *mut c_void);
    /// `cuIpcOpenEventHandle`.
    ipc_open_event_handle = "cuIpcOpenEventHandle" (event: *mut *mut c_void, handle: IpcHandle);
    /// `cuMemcpyHtoD`.
    memcpy_htod = "cuMemcpyHtoD_v2" (to: DevicePtr, from: *const c_void, bytes: usize);
    /// `cuMemcpyDtoH`.
    memcpy_dtoh = "cuMemcpyDtoH_v2" (to: *mut c_void, from: DevicePtr, bytes: usize);
    /// `cuMemcpyDtoD`.
    memcpy_dtod = "cuMemcpyDtoD_v2" (to: DevicePtr, from: DevicePtr, bytes: usize);
    /// `cuMemcpyHtoDAsync`.
    memcpy_htod_async = "cuMemcpyHtoDAsync_v2"
        (to: DevicePtr, from: *const c_void, bytes: usize, stream: *mut c_void);
    /// `cuMemsetD32`.
    memset_d32 = "cuMemsetD32_v2" (to: DevicePtr, value: u32, count: usize);
    /// `cuStreamCreate`.
    stream_create = "cuStreamCreate" (stream: *mut *mut c_void, flags: u32);
    /// `cuStreamDestroy`.
    stream_destroy = "cuStreamDestroy_v2" (stream: *mut c_void);
    /// `cuStreamSynchronize`.
    stream_synchronize = "cuStreamSynchronize" (stream: *mut c_void);
    /// `cuEventCreate`.
    event_create = "cuEventCreate" (event: *mut *mut c_void, flags: u32);
    /// `cuEventDestroy`.
    event_destroy = "cuEventDestroy_v2" (event: *mut c_void);
    /// `cuEventRecord`.
    event_record = "cuEventRecord" (event: *mut c_void, stream: *mut c_void);
    /// `cuEventQuery`.
    event_query = "cuEventQuery" (event: *mut c_void);
    /// `cuEventSynchronize`.
    event_synchronize = "cuEventSynchronize" (event: *mut c_void);
    /// `cuCtxGetCurrent`.
    ctx_get_current = "cuCtxGetCurrent" (context: *mut *mut c_void);
    /// `cuGraphCreate`.
    graph_create = "cuGraphCreate" (graph: *mut *mut c_void, flags: u32);
    /// `cuGraphAddMemsetNode`.
    graph_add_memset_node = "cuGraphAddMemsetNode"
        (node: *mut *mut c_void, graph: *mut c_void, after: *const *mut c_void, count: usize,
         params: *const FillParams, context: *mut c_void);
    /// `cuGraphInstantiateWithFlags`.
    graph_instantiate = "cuGraphInstantiateWithFlags"
        (executable: *mut *mut c_void, graph: *mut c_void, flags: u64);
    /// `cuGraphLaunch`.
    graph_launch = "cuGraphLaunch" (executable: *mut c_void, stream: *mut c_void);
    /// `cuEventElapsedTime`.
    event_elapsed_time = "cuEventElapsedTime"
        (ms: *mut f32, start: *mut c_void, end: *mut c_void);
}

/// Fails unless a call returned `CUDA_SUCCESS`.
pub fn ok(what: &str, result: Result<c_int>) -> Result<()> {
    let code = result?;
    ensure!(code == 0, "{what} returned {code}");
    Ok(())
}

impl Cuda {
    /// Loads libcuda, and makes the first device's primary context current.
    pub fn with_context() -> Result<Self> {
        // SAFETY: libcuda's initializers have no requirements.
        let library = unsafe { Library::new("libcuda.so.1") }.context("Cannot load libcuda")?;
        let cuda = Self { library };
        ok("cuInit", cuda.init(0))?;
        let mut context = std::ptr::null_mut();
        ok("cuDevicePrimaryCtxRetain", cuda.primary_ctx_retain(&raw mut context, 0))?;
        ok("cuCtxSetCurrent", cuda.ctx_set_current(context))?;
        Ok(cuda)
    }

    /// Returns the device's name.
    pub fn name(&self) -> Result<String> {
        let mut name = [0; 64];
        ok("cuDeviceGetName", self.device_get_name(name.as_mut_ptr(), 64, 0))?;
        // SAFETY: libcuda ends the name with a zero byte.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Returns free and total memory, in bytes.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        ok("cuMemGetInfo", self.mem_get_info(&raw mut free, &raw mut total))?;
        Ok((free, total))
    }

    /// Allocates device memory.
    pub fn alloc(&self, bytes: usize) -> Result<DevicePtr> {
        let mut ptr = 0;
        ok("cuMemAlloc", self.mem_alloc(&raw mut ptr, bytes))?;
        Ok(ptr)
    }

    /// Copies to the device.
    pub fn upload(&self, to: DevicePtr, data: &[u8]) -> Result<()> {
        ok("cuMemcpyHtoD", self.memcpy_htod(to, data.as_ptr().cast(), data.len()))
    }

    /// Copies from the device.
    pub fn download(&self, from: DevicePtr, len: usize) -> Result<Vec<u8>> {
        let mut data = vec![0; len];
        ok("cuMemcpyDtoH", self.memcpy_dtoh(data.as_mut_ptr().cast(), from, len))?;
        Ok(data)
    }
}
