//! Arguments of ioctls.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Call;

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

/// Number of cards in the argument of `NV_ESC_CARD_INFO`.
pub const MAX_CARDS: usize = 64;

structure!(
    /// Argument of `NV_ESC_CARD_INFO`.
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
    /// `nv_ioctl_register_fd_t`: attaches a GPU's descriptor to a control descriptor.
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
    /// `NVOS41_PARAMETERS`: takes an event with data from an event's descriptor.
    GetEventData { event: u64, more: u32, status: u32, }
);

call!(GetEventData, 0x52, "RM_GET_EVENT_DATA", pointer: 0, volatile: [(0, 8)]);

structure!(
    /// `NvUnixEvent`: event with data. `object` is the event's handle.
    EventData { object: u32, index: u32, info32: u32, info16: u32, }
);

structure!(
    /// `NVOS00_PARAMETERS`: frees an object and its children.
    Free { root: u32, parent: u32, object: u32, status: u32, }
);

call!(Free, 0x29, "RM_FREE");

structure!(
    /// `NVOS21_PARAMETERS`: allocates an object.
    Alloc {
        root: u32,
        parent: u32,
        object: u32,
        class: u32,
        params: u64,
        params_bytes: u32,
        status: u32,
    }
);

call!(Alloc, 0x2b, "RM_ALLOC", pointer: 16);

structure!(
    /// `NVOS54_PARAMETERS`: calls a control of an object.
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
    /// `nv_ioctl_nvos02_parameters_with_fd`: creates a memory object from pages of the caller.
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
    /// `nv_ioctl_nvos33_parameters_with_fd`: prepares a descriptor for `mmap` of a memory object.
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

sizes! {
    CardInfo = 72;
    CardInfos = 4608;
    RegisterFd = 4;
    AllocOsEvent = 16;
    GetEventData = 16;
    EventData = 16;
    Free = 16;
    Alloc = 32;
    Control = 32;
    AllocMemory = 56;
    MapMemory = 56;
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(CardInfo, gpu_id) == 16 && offset_of!(CardInfo, minor) == 56);
    assert!(offset_of!(Alloc, params) == 16 && offset_of!(Control, params) == 16);
    assert!(offset_of!(MapMemory, fd) == 48 && offset_of!(AllocMemory, fd) == 48);
};
