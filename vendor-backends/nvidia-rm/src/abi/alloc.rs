//! Parameters of object allocations.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

structures! {
    /// `NV0080_ALLOC_PARAMETERS`.
    DeviceParams {
        device: u32, client_share: u32, target_client: u32, target_device: u32, flags: u32,
        pad0: u32, va_space_size: u64, va_start: u64, va_limit: u64, va_mode: u32, pad1: u32,
    }

    /// `NV_VASPACE_ALLOCATION_PARAMETERS`, before series 580 without the last two fields.
    VaSpaceParams {
        index: u32, flags: u32, size: u64, start_internal: u64, limit_internal: u64, big_page: u32,
        pad0: u32, base: u64, pasid: u32, pad1: u32,
    }

    /// `NV_MEMORY_VIRTUAL_ALLOCATION_PARAMS`.
    VirtualParams { offset: u64, limit: u64, va_space: u32, pad0: u32 }

    /// `NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS`.
    GroupParams {
        error: u32, ecc_error: u32, va_space: u32, engine: u32, plugin: u8, pad0: [u8; 3],
    }

    /// `NV_CTXSHARE_ALLOCATION_PARAMETERS`.
    ContextShareParams { va_space: u32, flags: u32, subcontext: u32 }

    /// `NV_CHANNEL_ALLOC_PARAMS`. The reserved fields are internal to the driver.
    ChannelParams {
        error: u32, buffer: u32, gpfifo: u64, gpfifo_entries: u32, flags: u32, context_share: u32,
        va_space: u32, userd_memory: [u32; 8], userd_offset: [u64; 8], engine: u32, cid: u32,
        subdevice: u32, ecc_error: u32, reserved: [u8; 232],
    }

    /// `NV_MEMORY_ALLOCATION_PARAMS`.
    MemoryParams {
        owner: u32, kind: u32, flags: u32, width: u32, height: u32, pitch: u32, attr: u32,
        attr2: u32, format: u32, compression: u32, zcull: u32, pad0: u32, range_lo: u64,
        range_hi: u64, size: u64, alignment: u64, offset: u64, limit: u64, address: u64, ctag: u32,
        va_space: u32, internal: u32, tag: u32, numa: u32, pad1: u32,
    }

    /// `NV0005_ALLOC_PARAMETERS`.
    EventParams { client: u32, source: u32, class: u32, index: u32, data: u64 }

    /// `NVB0B5_ALLOCATION_PARAMETERS`: selects a copy engine.
    CopyParams { version: u32, engine: u32 }

    /// `NV83DE_ALLOC_PARAMETERS`: selects the object of a channel to debug.
    DebuggerParams { debugger: u32, client: u32, object: u32 }

    /// `NV_EVENT_BUFFER_ALLOC_PARAMETERS`.
    EventBufferParams {
        header: u64, records: u64, record_bytes: u32, record_count: u32, vardata: u64,
        vardata_bytes: u32, records_free_threshold: u32, notification: u64,
        vardata_free_threshold: u32, subdevice: u32, flags: u32, header_memory: u32,
        record_memory: u32, vardata_memory: u32,
    }
}
