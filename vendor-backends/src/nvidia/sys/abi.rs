//! The driver's structures, by NVIDIA's names (`nvos.h`, `nv-ioctl.h`, `alloc_channel.h`, `cl*.h`, `ctrl*.h`).
//!
//! Sizes and the offsets that matter are asserted at the end: a change here does not compile before it is thought about.
//! Where a structure grew with a series of the driver, the one here is the longest, and
//! [`Layout`](crate::nvidia::version::Layout) says how much of it a series has.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What is said to the driver about one kind of ioctl: its number, its name, and what is where in its argument.
pub trait Call: FromBytes + IntoBytes + Immutable + KnownLayout {
    /// `NV_ESC_*`.
    const NUMBER: u8;
    /// For messages and traces.
    const NAME: &'static str;
    /// Where the pointer to the parameters is, in calls that have one.
    const POINTER: Option<usize> = None;
    /// Byte ranges that differ from run to run (descriptors, addresses of ours): traces leave them out.
    const VOLATILE: &'static [(usize, usize)] = &[];

    /// `NV_STATUS` as the driver left it, in calls that have one.
    fn status(&self) -> u32;
}

macro_rules! structure {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[allow(missing_docs, reason = "the driver's own names")]
        pub struct $name { $($(#[$field_doc])* pub $field: $kind,)* }

        impl Default for $name {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    };
}

/// A call whose argument has its status in it; `pointer` and `volatile` as in [`Call`].
macro_rules! call {
    ($name:ident, $number:expr, $said:expr $(, pointer: $at:expr)? $(, volatile: $ranges:expr)?) => {
        impl Call for $name {
            const NUMBER: u8 = $number;
            const NAME: &'static str = $said;
            $(const POINTER: Option<usize> = Some($at);)?
            $(const VOLATILE: &'static [(usize, usize)] = &$ranges;)?

            fn status(&self) -> u32 {
                self.status
            }
        }
    };
}

structure!(
    /// `nv_ioctl_card_info_t`.
    CardInfo {
        valid: u8,
        pad0: [u8; 3],
        pci_domain: u32,
        pci_bus: u8,
        pci_slot: u8,
        pci_function: u8,
        pad1: u8,
        pci_vendor: u16,
        pci_device: u16,
        gpu_id: u32,
        interrupt_line: u16,
        pad2: [u8; 2],
        reg_address: u64,
        reg_size: u64,
        fb_address: u64,
        fb_size: u64,
        minor: u32,
        dev_name: [u8; 10],
        pad3: [u8; 2],
    }
);

/// Cards that `NV_ESC_CARD_INFO` tells of.
pub const MAX_CARDS: usize = 64;

structure!(
    /// The argument of `NV_ESC_CARD_INFO`.
    CardInfos {
        cards: [CardInfo; MAX_CARDS],
    }
);

impl Call for CardInfos {
    const NUMBER: u8 = 200;
    const NAME: &'static str = "CARD_INFO";
    const VOLATILE: &'static [(usize, usize)] = &[(0, size_of::<Self>())];

    fn status(&self) -> u32 {
        0
    }
}

structure!(
    /// `nv_ioctl_register_fd_t`: joins a device's descriptor to the control descriptor's client.
    RegisterFd { control: i32, }
);

impl Call for RegisterFd {
    const NUMBER: u8 = 201;
    const NAME: &'static str = "REGISTER_FD";
    const VOLATILE: &'static [(usize, usize)] = &[(0, 4)];

    fn status(&self) -> u32 {
        0
    }
}

structure!(
    /// `nv_ioctl_alloc_os_event_t`.
    AllocOsEvent { client: u32, device: u32, fd: u32, status: u32, }
);

call!(AllocOsEvent, 206, "ALLOC_OS_EVENT", volatile: [(8, 12)]);

structure!(
    /// `NVOS00_PARAMETERS`: frees an object and all below it.
    Free { root: u32, parent: u32, object: u32, status: u32, }
);

call!(Free, 0x29, "RM_FREE");

structure!(
    /// `NVOS21_PARAMETERS`: makes an object.
    Alloc { root: u32, parent: u32, object: u32, class: u32, params: u64, params_bytes: u32, status: u32, }
);

call!(Alloc, 0x2b, "RM_ALLOC", pointer: 16);

structure!(
    /// `NVOS54_PARAMETERS`: asks something of an object.
    Control {
        client: u32,
        object: u32,
        command: u32,
        flags: u32,
        params: u64,
        params_bytes: u32,
        status: u32,
    }
);

call!(Control, 0x2a, "RM_CONTROL", pointer: 16);

structure!(
    /// `nv_ioctl_nvos02_parameters_with_fd`: makes memory out of pages of the caller's.
    AllocMemory {
        root: u32,
        parent: u32,
        object: u32,
        class: u32,
        flags: u32,
        pad0: u32,
        memory: u64,
        limit: u64,
        status: u32,
        pad1: u32,
        fd: i32,
        pad2: u32,
    }
);

call!(AllocMemory, 0x27, "RM_ALLOC_MEMORY", volatile: [(24, 32)]);

structure!(
    /// `nv_ioctl_nvos33_parameters_with_fd`: prepares a descriptor so that its `mmap` is an object's memory.
    MapMemory {
        client: u32,
        device: u32,
        memory: u32,
        pad0: u32,
        offset: u64,
        length: u64,
        linear: u64,
        status: u32,
        flags: u32,
        fd: i32,
        pad1: u32,
    }
);

call!(MapMemory, 0x4e, "RM_MAP_MEMORY", volatile: [(32, 40), (48, 52)]);

structure!(
    /// `NVOS46_PARAMETERS` of series 580 and later: maps memory at a GPU virtual address.
    MapDma {
        client: u32,
        device: u32,
        dma: u32,
        memory: u32,
        offset: u64,
        length: u64,
        flags: u32,
        flags2: u32,
        kind: u32,
        pad0: u32,
        va: u64,
        status: u32,
        pad1: u32,
    }
);

call!(MapDma, 0x57, "RM_MAP_MEMORY_DMA");

structure!(
    /// `NVOS46_PARAMETERS` before series 580.
    MapDma570 {
        client: u32,
        device: u32,
        dma: u32,
        memory: u32,
        offset: u64,
        length: u64,
        flags: u32,
        pad0: u32,
        va: u64,
        status: u32,
        pad1: u32,
    }
);

call!(MapDma570, 0x57, "RM_MAP_MEMORY_DMA");

structure!(
    /// `NVOS47_PARAMETERS`: unmaps `size` bytes at a GPU virtual address, or with 0 the mapping that begins there.
    UnmapDma {
        client: u32,
        device: u32,
        dma: u32,
        memory: u32,
        flags: u32,
        pad0: u32,
        va: u64,
        size: u64,
        status: u32,
        pad1: u32,
    }
);

call!(UnmapDma, 0x58, "RM_UNMAP_MEMORY_DMA");

structure!(
    /// `NV0080_ALLOC_PARAMETERS`.
    DeviceParams {
        device: u32,
        client_share: u32,
        target_client: u32,
        target_device: u32,
        flags: u32,
        pad0: u32,
        va_space_size: u64,
        va_start: u64,
        va_limit: u64,
        va_mode: u32,
        pad1: u32,
    }
);

structure!(
    /// `NV_VASPACE_ALLOCATION_PARAMETERS`; before series 580 without its last two fields.
    VaSpaceParams {
        index: u32,
        flags: u32,
        size: u64,
        start_internal: u64,
        limit_internal: u64,
        big_page: u32,
        pad0: u32,
        base: u64,
        pasid: u32,
        pad1: u32,
    }
);

structure!(
    /// `NV_MEMORY_VIRTUAL_ALLOCATION_PARAMS`.
    VirtualParams { offset: u64, limit: u64, va_space: u32, pad0: u32, }
);

structure!(
    /// `NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS`.
    GroupParams { error: u32, ecc_error: u32, va_space: u32, engine: u32, plugin: u8, pad0: [u8; 3], }
);

structure!(
    /// `NV_CHANNEL_ALLOC_PARAMS` as far as it is ours; what follows is the driver's own.
    ChannelParams {
        error: u32,
        buffer: u32,
        gpfifo: u64,
        gpfifo_entries: u32,
        flags: u32,
        context_share: u32,
        va_space: u32,
        userd_memory: [u32; 8],
        userd_offset: [u64; 8],
        engine: u32,
        cid: u32,
        subdevice: u32,
        ecc_error: u32,
        reserved: [u8; 232],
    }
);

structure!(
    /// `NV_MEMORY_ALLOCATION_PARAMS`.
    MemoryParams {
        owner: u32,
        kind: u32,
        flags: u32,
        width: u32,
        height: u32,
        pitch: u32,
        attr: u32,
        attr2: u32,
        format: u32,
        compression: u32,
        zcull: u32,
        pad0: u32,
        range_lo: u64,
        range_hi: u64,
        size: u64,
        alignment: u64,
        offset: u64,
        limit: u64,
        address: u64,
        ctag: u32,
        va_space: u32,
        internal: u32,
        tag: u32,
        numa: u32,
        pad1: u32,
    }
);

structure!(
    /// `NV0005_ALLOC_PARAMETERS`.
    EventParams { client: u32, source: u32, class: u32, index: u32, data: u64, }
);

structure!(
    /// `NVB0B5_ALLOCATION_PARAMETERS`: which copy engine.
    CopyParams { version: u32, engine: u32, }
);

structure!(
    /// `NV_EVENT_BUFFER_ALLOC_PARAMETERS`.
    EventBufferParams {
        header: u64,
        records: u64,
        record_bytes: u32,
        record_count: u32,
        vardata: u64,
        vardata_bytes: u32,
        records_free_threshold: u32,
        notification: u64,
        vardata_free_threshold: u32,
        subdevice: u32,
        flags: u32,
        header_memory: u32,
        record_memory: u32,
        vardata_memory: u32,
    }
);

structure!(
    /// `NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS`.
    IdInfo {
        gpu_id: u32,
        flags: u32,
        device: u32,
        subdevice: u32,
        sli_status: u32,
        board: u32,
        instance: u32,
        numa_node: u32,
    }
);

structure!(
    /// `NV2080_CTRL_FB_GET_INFO_V2_PARAMS`.
    FbInfo { count: u32, list: [[u32; 2]; 128], }
);

structure!(
    /// `NV2080_CTRL_GPU_GET_NAME_STRING_PARAMS`.
    NameString { flags: u32, text: [u8; 128], }
);

structure!(
    /// `NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS`.
    DisableChannels {
        disable: u8,
        pad0: [u8; 3],
        count: u32,
        only_scheduling: u8,
        rewind: u8,
        pad1: [u8; 6],
        preempt_event: u64,
        clients: [u32; 64],
        channels: [u32; 64],
    }
);

structure!(
    /// `NV906F_CTRL_CMD_RESET_CHANNEL_PARAMS`.
    ResetChannel { engine: u32, subdevice: u32, reason: u32, rc_pending: u8, pad0: [u8; 3], }
);

structure!(
    /// `NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS`.
    PreemptionMode { flags: u32, object: u32, graphics: u32, compute: u32, route: [u32; 4], }
);

structure!(
    /// `NV0080_CTRL_EVENT_SET_NOTIFICATION`-like: `NV2080_CTRL_EVENT_SET_NOTIFICATION_PARAMS`.
    SetNotification { event: u32, action: u32, notify_state: u32, info32: u32, info16: u32, }
);

structure!(
    /// `NV906F_CTRL_GET_MMU_FAULT_INFO_PARAMS`.
    MmuFault {
        address_hi: u32,
        address_lo: u32,
        kind: u32,
        text: [u8; 32],
        pad0: [u8; 4],
        programs: [u64; 7],
    }
);

structure!(
    /// `NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_PARAMS`.
    BindTrace {
        buffer: u32,
        record_bytes: u32,
        detail: u32,
        filter: u32,
        all_users: u8,
        pad0: [u8; 3],
    }
);

structure!(
    /// One word twice, as several controls have it.
    Pair { first: u32, second: u32, }
);

/// `NvNotification`: where a channel's error is reported. All of it is the driver's to write.
pub mod notification {
    /// The robust-channel code.
    pub const INFO32: u64 = 8;
    /// 0xffff in the upper half of this word once there is an error.
    pub const STATUS_WORD: u64 = 12;
}

macro_rules! sizes {
    ($($name:ident = $bytes:expr;)*) => { $(const _: () = assert!(size_of::<$name>() == $bytes);)* };
}

sizes! {
    CardInfo = 72;
    CardInfos = 4608;
    RegisterFd = 4;
    AllocOsEvent = 16;
    Free = 16;
    Alloc = 32;
    Control = 32;
    AllocMemory = 56;
    MapMemory = 56;
    MapDma = 64;
    MapDma570 = 56;
    UnmapDma = 48;
    DeviceParams = 56;
    VaSpaceParams = 56;
    VirtualParams = 24;
    GroupParams = 20;
    ChannelParams = 376;
    MemoryParams = 128;
    EventParams = 24;
    CopyParams = 8;
    EventBufferParams = 72;
    IdInfo = 32;
    FbInfo = 1028;
    NameString = 132;
    DisableChannels = 536;
    ResetChannel = 16;
    PreemptionMode = 32;
    SetNotification = 20;
    MmuFault = 104;
    BindTrace = 20;
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(CardInfo, gpu_id) == 16 && offset_of!(CardInfo, minor) == 56);
    assert!(offset_of!(Alloc, params) == 16 && offset_of!(Control, params) == 16);
    assert!(offset_of!(MapDma, va) == 48 && offset_of!(MapDma, status) == 56);
    assert!(offset_of!(MapDma570, va) == 40 && offset_of!(MapDma570, status) == 48);
    assert!(offset_of!(UnmapDma, va) == 24 && offset_of!(UnmapDma, size) == 32);
    assert!(offset_of!(MapMemory, fd) == 48 && offset_of!(AllocMemory, fd) == 48);
    assert!(offset_of!(VaSpaceParams, base) == 40);
    assert!(offset_of!(ChannelParams, userd_memory) == 32);
    assert!(offset_of!(ChannelParams, userd_offset) == 64);
    assert!(offset_of!(ChannelParams, engine) == 128);
    assert!(offset_of!(MemoryParams, size) == 64 && offset_of!(MemoryParams, limit) == 88);
    assert!(offset_of!(DisableChannels, clients) == 24);
    assert!(offset_of!(DisableChannels, channels) == 280);
    assert!(offset_of!(EventBufferParams, header_memory) == 60);
};
